"""Write and read the manifest of a checkpoint: its files, its parameters, and the layout that wrote them, as JSON.

Places do not depend on ranks. A *model rank* counts stages and slices, ``stage * slices + slice``, in any order of
axes, as DeepSpeed's file names do (``mp_rank_03``). A *replica* counts the ranks of a data parallel group
(``zero_pp_rank_1``). The coordinates of every rank follow from the topology's spec, in closed form.

*Slices* split a parameter along the dimension that it declares by Megatron's attributes: ``partition_dim``, and
``partition_stride`` where each slice holds several pieces, such as a part of the queries, the keys and the values.

DeepSpeed's files can be read in any order of axes, because their names contain no ranks. Experts are an exception: two
orders may put different experts into the same place. :func:`why_unreachable` decides that.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ds_topo.errors import CheckpointVersionError, DamagedCheckpointError, ExpertSizeError, abridged
from ds_topo.topology.axes import MODEL, PIPE, SHARD
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import ExpertPlan, gradient_axes

NAME = "manifest.json"
"""The file's name in the folder of a checkpoint."""
FORMAT, VERSION = "ds_topo checkpoint", 4
_DIGEST = "sha256"
_OURS = {"format", "version", "bytes"}
"""Entries of the file that are no fields of a manifest."""
MOST_RANKS = 1 << 22
"""The most ranks of a layout: tables of all ranks must fit into memory."""
Number = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]
"""A whole number. Sizes of files and tensors are in this range; others would be slow to multiply and to print."""
Count = Annotated[Number, Field(ge=0)]
Size = Annotated[Number, Field(ge=1)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
_PRINTABLE = r"^(?:[^\pC\pZ]| )*$"
Text = Annotated[str, Field(pattern=_PRINTABLE)]
"""A text that can be printed in one line."""
FLAT_OPTIMIZER = "FP16_Optimizer"
"""DeepSpeed's optimizer for half precision without ZeRO that joins the parameters of a group into one vector."""
BF16_OPTIMIZER = "BF16_Optimizer"
"""DeepSpeed's optimizer for bf16 with gradients summed in fp32. It partitions its states at ZeRO 0, too."""


class Saved:
    """A value that is read from JSON: its entries have the declared types and ranges, and there are no others."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True)
class SavedSplit(Saved):
    """The split of a parameter over slices.

    The parameter has ``stride * slices`` equal pieces along ``dim``. Slice i holds pieces i, i + slices, and so on.
    """

    dim: Count
    stride: Size = 1
    real: Count | None = None
    """The size of the whole dimension without padding, such as the words of a padded vocabulary; None if unknown."""
    padded: Count | None = None
    """The size of the whole dimension with padding, if ``real`` is known."""


@dataclass(frozen=True)
class SavedLayer(Saved):
    """A layer of a pipeline."""

    kind: Text
    """The name of its class or function, which ``partition_method="type:..."`` matches."""
    tied: Text = ""
    """The key of the module that it shares with other layers; empty if it shares none."""

    def prefix(self, number: int) -> str:
        """Return the prefix of its parameters' names, if it has this number in the pipeline."""
        return f"tied_modules.{self.tied}." if self.tied else f"{number}."


@dataclass(frozen=True)
class SavedOptions(Saved):
    """The options of ``zero_optimization`` that order the optimizer's files, with DeepSpeed's defaults."""

    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    sub_group_size: Number = 1_000_000_000


@dataclass(frozen=True)
class SavedStructure(Saved):
    """The structure of a model and its optimizer, besides the parameters."""

    optimizer: Text | None
    """The class of the innermost optimizer, inside DeepSpeed's wrappers."""
    groups: tuple[tuple[tuple[Text, ...], ...], ...]
    """The names of the parameters in each group of the optimizer, in its order, by stage."""
    splits: Mapping[Text, SavedSplit] = field(default_factory=dict)
    """The split of each sliced parameter, by name."""
    undeclared: tuple[Text, ...] = ()
    """Parameters that are marked as slices without a dimension."""
    aliases: Mapping[Text, Text] = field(default_factory=dict)
    """Each further name of a shared parameter, mapped to its first name."""
    layers: tuple[SavedLayer, ...] = ()
    """The layers of a pipeline, over all stages."""
    bounds: tuple[Number, ...] = ()
    """The first layer of each stage of a pipeline, or of its two parts of DualPipeV, then the number of layers."""
    experts: Mapping[Text, Size] = field(default_factory=dict)
    """The expert parallel size of each MoE layer, by the prefix of its experts' names (``...deepspeed_experts``), or of
    each parameter in which AutoEP stacks the experts of a rank."""
    options: SavedOptions = SavedOptions()
    """The engine's options of ZeRO."""
    is_by_element: bool = True
    """False if the optimizer is not known to update each element by its own gradient and states alone."""
    buffers: Mapping[Text, tuple[Number, ...]] = field(default_factory=dict)
    """The shape on slice 0 of each saved buffer, except those of experts."""


def whole_structure(shares: Iterable[Mapping[str, Any] | None]) -> SavedStructure:
    """Merge the structures that the stages of a pipeline see into that of the whole model.

    The first rank of a stage shares it, as JSON, and other ranks None. For a tied parameter the first stage decides;
    its copies on later stages add nothing.
    """
    found = sorted((share for share in shares if share is not None), key=lambda share: int(share["stage"]))
    stages: list[SavedStructure] = [built_from(SavedStructure, share["structure"]) for share in found]
    splits = {name: split for one in reversed(stages) for name, split in one.splits.items()}
    undeclared = {name: None for one in stages for name in one.undeclared if name not in splits}
    return replace(
        stages[0],
        groups=tuple(stage for one in stages for stage in one.groups),
        splits=splits,
        undeclared=tuple(undeclared),
        aliases={alias: name for one in stages for alias, name in one.aliases.items()},
        experts={head: size for one in stages for head, size in one.experts.items()},
        buffers={name: shape for one in stages for name, shape in one.buffers.items()},
    )


@dataclass(frozen=True)
class SavedFile(Saved):
    """One file of a checkpoint."""

    path: Text
    """Relative to the checkpoint's folder, with ``/``."""
    bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    rank: Count
    """The global rank that wrote it."""

    def __post_init__(self) -> None:
        if any(part in ("", ".", "..") for part in self.path.split("/")):
            raise ValueError(f"path={abridged(self.path)} is not inside the checkpoint's folder")


MOST_EXPERTS = 65_536
"""The largest number of experts in a layer of a manifest: readers enumerate them."""


@dataclass(frozen=True)
class SavedParameter(Saved):
    """A parameter, with the shape that each of its model ranks holds."""

    name: Text
    """The module's name. Layers of a pipeline have their number in the whole pipeline; ``*`` stands for experts."""
    shape: Annotated[tuple[Count, ...], Field(max_length=64)]  # as in torch
    """The shape on one model rank: that of the slice if it is tensor parallel, and the full one under ZeRO 3."""
    dtype: Text
    model_ranks: tuple[Number, ...]
    """The model ranks that hold it, ascending."""
    split_dim: Annotated[Number, Field(ge=-1)] | None = None
    """The dimension that slices split; -1 if the parameter is marked as a slice without one; None if it is unmarked."""
    experts: Annotated[int, Field(ge=1, le=MOST_EXPERTS)] | None = None
    """The number of experts in the layer; None for a dense parameter. AutoEP stacks a rank's in one parameter."""
    is_trained: bool = True


@dataclass(frozen=True)
class SavedTable(Saved):
    """The file with a rank's table, and what it is about, so that other ranks know whether they need it."""

    path: Text
    model_rank: Count
    rows: tuple[Number, ...] = ()
    """Runs among the sorted names of the model rank's parameters: first, end, first, end, ..."""
    has_buffers: bool = False
    partition: Count = 0
    partitions: Ranks = 1
    """Each parameter is cut into so many equal partitions, of which the table has one; 1 if it has any elements."""

    @classmethod
    def of(
        cls, path: str, model_rank: int, positions: Iterable[int], has_buffers: bool, partition: tuple[int, int]
    ) -> SavedTable:
        """Return the description of a table that has rows at positions.

        >>> SavedTable.of("table.json", 0, {0, 1, 2, 5}, False, (0, 1)).rows
        (0, 3, 5, 6)
        """
        runs: list[int] = []
        for at in sorted(positions):
            if runs and runs[-1] == at:
                runs[-1] = at + 1
            else:
                runs += [at, at + 1]
        return cls(path, model_rank, tuple(runs), has_buffers, *partition)

    def holds_row(self, position: int) -> bool:
        """Return True if it has a part of the parameter at a position."""
        return bisect_right(self.rows, position) % 2 == 1


@dataclass(frozen=True)
class SavedExperts(Saved):
    """Expert groups of one size, by the arguments of ``create_expert_groups``."""

    size: Size
    tensor_parallel: bool = False
    data_first: bool = False


@dataclass(frozen=True)
class SavedLayout(Saved):
    """The layout of the job that wrote a checkpoint."""

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")  # earlier manifests have further entries

    topology: Text | None
    """The topology's spec; None if the engine's mpu is not a ds_topo grid."""
    world_size: Ranks
    model_ranks: Ranks
    """Stages times slices."""
    replicas: Ranks
    """The number of ranks with the same parameters."""
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    optimizer: Text | None
    """The class of DeepSpeed's optimizer, which determines the contents of its files."""
    precision: Annotated[str, Field(pattern="^(fp32|bf16|fp16)$")]
    """The precision of the parameters: ``fp32``, ``bf16`` or ``fp16``."""
    is_pipeline: bool = False
    experts: tuple[SavedExperts, ...] = ()

    def __post_init__(self) -> None:
        if max(self.model_ranks, self.replicas) > self.world_size:
            raise ValueError(f"{self.model_ranks} model ranks or {self.replicas} replicas of {self.world_size:,} ranks")
        size = 1 if self.topology is None else ProcessTopology.from_spec(self.topology).world_size()
        if size > self.world_size:
            raise ValueError(f"{size:,} ranks are not in a world of {self.world_size:,}")

    @property
    def has_partitions(self) -> bool:
        """True if the optimizer's states are partitioned over replicas."""
        return self.zero_stage > 0 or self.optimizer == BF16_OPTIMIZER

    @property
    def partitions(self) -> int:
        """The number of ranks over which ZeRO partitions dense parameters.

        >>> layout = SavedLayout("data=2,shard=4", 8, 1, 8, 3, None, "fp32")
        >>> layout.partitions, replace(layout, topology="data=8").partitions
        (4, 8)
        """
        if self.topology is None or SHARD not in (topology := ProcessTopology.from_spec(self.topology)).axes:
            return self.replicas
        return topology.get_dim(SHARD)

    def degree(self, axis: str) -> int:
        """Return the degree of an axis; 1 if the layout does not have it, or if the topology is unknown.

        >>> [SavedLayout("pipe=2,data=4", 8, 2, 4, 0, None, "fp32").degree(axis) for axis in ("pipe", "model")]
        [2, 1]
        """
        return 1 if self.topology is None else max(1, ProcessTopology.from_spec(self.topology).get_dim(axis))

    def __str__(self) -> str:
        """Describe the layout in one line, for messages.

        >>> print(SavedLayout("data=2", 2, 1, 2, 1, "DeepSpeedZeroOptimizer", "bf16"))
        data=2 (2 ranks), ZeRO 1, bf16
        """
        ranks = f"{self.world_size} rank{'' if self.world_size == 1 else 's'}"
        where = self.topology or f"{self.model_ranks} model ranks x {self.replicas} replicas"
        parts = [f"{where} ({ranks})", f"ZeRO {self.zero_stage}", self.precision]
        parts += [f"experts over {groups.size}" for groups in self.experts]
        return ", ".join(parts)


@dataclass(frozen=True)
class Manifest(Saved):
    """The manifest of one checkpoint."""

    tag: Text
    step: Count
    time: Text
    """The time at which its files were written, in UTC and ISO 8601."""
    layout: SavedLayout
    files: tuple[SavedFile, ...]
    parameters: tuple[SavedParameter, ...]
    versions: Mapping[Text, Text] = field(default_factory=dict)
    structure: SavedStructure = SavedStructure(None, ())
    tables: tuple[SavedTable, ...] = ()
    """The tables, which say where each element is; empty if the optimizer's memory is unknown."""

    def __post_init__(self) -> None:
        for row in self.parameters:
            if not row.model_ranks or row.model_ranks[-1] >= self.layout.model_ranks:
                raise ValueError(
                    f"parameters: {abridged(row.name)} is on model ranks {abridged(row.model_ranks)}, and there are "
                    f"{self.layout.model_ranks}"
                )

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.bytes for file in self.files)

    def numel(self) -> int:
        """Count the elements of the whole model.

        Each slice and expert counts. Copies of a tied parameter on several stages count once.
        """
        slices = self.layout.model_ranks if self.layout.topology is None else self.layout.degree(MODEL)
        counted: dict[tuple[str, int], int] = {}
        for row in self.parameters:
            for place in {rank % slices for rank in row.model_ranks} if row.split_dim is not None else (0,):
                copies = self.structure.experts.get(row.name, row.experts or 1)
                counted.setdefault((row.name, place), math.prod(row.shape) * copies)
        return sum(counted.values())


def to_text(manifest: Manifest) -> str:
    """Return the text of the manifest's file. The last entry is a digest of all others.

    >>> layout = SavedLayout("data=1", 1, 1, 1, 0, None, "fp32")
    >>> manifest = Manifest("last", 7, "2026-01-31T12:00:00+00:00", layout, (), ())
    >>> from_text(to_text(manifest), "last") == manifest
    True
    """
    content = {"format": FORMAT, "version": VERSION, **vars(manifest), "bytes": manifest.bytes}
    # asdict(), and encoding with an indent, would take several times as long
    encode = json.JSONEncoder(default=vars).encode
    lines = []
    for key, value in {**content, _DIGEST: _digest_of(content)}.items():
        rows = ",\n  ".join(map(encode, value)) if isinstance(value, tuple) else ""
        lines.append(f" {encode(key)}: " + (f"[\n  {rows}\n ]" if rows else encode(value)))
    return "{\n" + ",\n".join(lines) + "\n}"


def from_text(text: str, where: str) -> Manifest:
    """Parse the text of a manifest's file; ``where`` is its path, for messages.

    Raises DamagedCheckpointError, or CheckpointVersionError if a later release wrote it.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedCheckpointError(f"{where}: not JSON ({error or type(error).__name__})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        given = abridged(content.get("format")) if isinstance(content, dict) else type(content).__name__
        raise DamagedCheckpointError(f'{where}: "format" must be {FORMAT!r}, not {given}')
    version, releases = content.get("version"), content.get("versions")
    if isinstance(version, int) and version > VERSION:
        release = releases.get("ds_topo", "unknown") if isinstance(releases, Mapping) else "unknown"
        raise CheckpointVersionError(
            f"{where}: version {version} of the manifest, but this ds_topo reads versions up to {VERSION}: install the "
            f"release that wrote it ({release}) or a later one"
        )
    try:
        digest = content.pop(_DIGEST, None)
        if digest != _digest_of(content):
            raise ValueError(f"changed after it was written ({_DIGEST} differs)")
        found: Manifest = built_from(Manifest, {key: value for key, value in content.items() if key not in _OURS})
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedCheckpointError(f"{where}: {error or type(error).__name__}") from None
    return found


def built_from(kind: Any, value: Any) -> Any:
    """Return JSON, or what ``json.loads`` has returned for it, as a value of a type, or raise ValueError.

    The type is a dataclass or named tuple of this package, or a collection of them. Every entry has the type and the
    range that its field declares, and none is unknown. The dataclasses themselves check what several fields say
    together, so that code which gets a value need not check it again.

    >>> built_from(dict[str, SavedSplit], {"weight": {"dim": 0}})
    {'weight': SavedSplit(dim=0, stride=1, real=None, padded=None)}
    >>> built_from(dict[str, SavedSplit], {"weight": {"dim": "0"}})
    Traceback (most recent call last):
    ...
    ValueError: weight.dim: '0' is wrong: Input should be a valid integer
    """
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        return _reader_of(kind).validate_json(text)  # of JSON, since lists are tuples there
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
        if first["type"] == "value_error":  # of a dataclass, which names the value
            reason = str(first["ctx"]["error"])
        else:
            broken = first.get("ctx", {}).get("pattern", first["type"])
            reason = _REASONS.get(broken) or f"{abridged(first['input'])} is wrong: {first['msg']}"
        where = at.removeprefix(".")
        raise ValueError(f"{where}: {reason}" if where else reason) from None


_REASONS = {
    "missing": "is missing",
    "unexpected_keyword_argument": "is an unknown entry",
    _PRINTABLE: "has characters that cannot be printed",
}
"""Our text for a type of pydantic's errors, or for a pattern, where its own text would not help."""


@cache
def _reader_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=vars).encode()).hexdigest()


def merged(rows: Iterable[SavedParameter]) -> tuple[SavedParameter, ...]:
    """Merge rows that differ only in their model ranks, in the order of their first model rank.

    >>> rows = [SavedParameter("weight", (4, 2), "float32", (rank,)) for rank in (1, 0)]
    >>> merged(rows)[0].model_ranks
    (0, 1)
    """
    found: dict[tuple[Any, ...], tuple[SavedParameter, set[int]]] = {}
    for row in rows:
        rest = tuple(value for name, value in vars(row).items() if name != "model_ranks")
        found.setdefault(rest, (row, set()))[1].update(row.model_ranks)
    whole = (
        row if len(row.model_ranks) == len(held) else replace(row, model_ranks=tuple(sorted(held)))
        for row, held in found.values()
    )
    return tuple(sorted(whole, key=lambda row: row.model_ranks[0]))


def why_unreachable(saved: SavedLayout, now: SavedLayout, *, optimizer_states: bool = True) -> str:
    """Return why a job of layout ``now`` cannot read the files of layout ``saved``; empty if it can.

    >>> layouts = [SavedLayout(spec, 4, 2, 2, 1, "DeepSpeedZeroOptimizer", "fp32") for spec in
    ...            ("pipe=2,data=2", "data=2,pipe=2")]
    >>> why_unreachable(*layouts)
    ''
    """
    for axis in (PIPE, MODEL):
        before, after = saved.degree(axis), now.degree(axis)
        if saved.topology is not None and now.topology is not None and before != after:
            return f"{axis}={before} became {axis}={after}: each file holds other parameters"
    if saved.model_ranks != now.model_ranks:
        return f"{saved.model_ranks} model ranks (stages x slices) became {now.model_ranks}"
    if saved.is_pipeline != now.is_pipeline:
        kinds = {True: "a PipelineModule", False: "a plain engine"}
        return f"{kinds[saved.is_pipeline]} became {kinds[now.is_pipeline]}: pipelines save layer by layer"
    partitions_parameters = 3 in (saved.zero_stage, now.zero_stage)
    if optimizer_states and saved.optimizer != now.optimizer:
        return f"{saved.optimizer} at ZeRO {saved.zero_stage} became {now.optimizer} at ZeRO {now.zero_stage}"
    if partitions_parameters and saved.zero_stage != now.zero_stage:
        return f"ZeRO {saved.zero_stage} became ZeRO {now.zero_stage}: stage 3 also partitions parameters"
    if optimizer_states and saved.precision != now.precision:
        return f"{saved.precision} became {now.precision}: weights must be rounded anew from the optimizer's"
    if partitions_parameters or (optimizer_states and saved.has_partitions):
        if saved.replicas != now.replicas:
            return f"{saved.replicas} replicas became {now.replicas}: ZeRO writes one partition for each replica"
        if saved.partitions != now.partitions:
            return f"{saved.partitions} partitions of ZeRO became {now.partitions}: each file has one of them"
    return _difference_of_experts(saved, now, optimizer_states)


def _difference_of_experts(saved: SavedLayout, now: SavedLayout, optimizer_states: bool) -> str:
    sizes = [sorted((groups.size, groups.tensor_parallel) for groups in layout.experts) for layout in (saved, now)]
    if sizes[0] != sizes[1]:
        return f"experts over (ranks, tensor parallel) {sizes[0]} became {sizes[1]}"
    if saved.experts and 3 in (saved.zero_stage, now.zero_stage) and _places(saved) != _places(now):
        return (
            f"{now.topology} puts ranks in other places than {saved.topology}, and with AutoEP at ZeRO 3 DeepSpeed "
            "loads partitions on the ranks that saved them only"
        )
    if saved.experts and saved.topology is not None and now.topology is not None:
        whole_places = optimizer_states and bool(saved.zero_stage)
        try:
            before, after = (_places_of_experts(layout, whole_places) for layout in (saved, now))
        except ExpertSizeError as error:  # a manifest can say anything
            return str(error)
        if before != after:
            return (
                f"{now.topology} puts experts in other places than {saved.topology}: a replica would read files that "
                "hold another replica's experts"
            )
    return ""


class SavedPlace(NamedTuple):
    """A rank as DeepSpeed's file names identify it."""

    model_rank: int
    replica: int


def _places_of_experts(layout: SavedLayout, whole_places: bool) -> frozenset[tuple[object, ...]]:
    """Return for every rank its model rank and the part of its experts.

    If files belong to a replica, its replica is added, with the partitions of experts and of dense parameters that it
    has. If a size of expert groups does not divide the ranks that can share experts, ExpertSizeError is raised.
    """
    topology = _topology_of(layout)
    found = set[tuple[object, ...]]()
    for experts in layout.experts:
        plan = ExpertPlan(topology, experts.size, experts.tensor_parallel, experts.data_first)
        parts = {rank: part for ranks in plan.expert_tables() for part, rank in enumerate(ranks)}
        for ranks in plan.expert_data_tables():
            for copy, rank in enumerate(ranks):
                place = _place(topology, rank)
                dense = topology.get_axis_index(SHARD, rank) if SHARD in topology.axes else place.replica
                of_files = (place.replica, copy, dense) if whole_places else ()
                found.add((experts.size, place.model_rank, parts[rank], of_files))
    return frozenset(found)


def _places(layout: SavedLayout) -> list[SavedPlace]:
    topology = _topology_of(layout)
    return [_place(topology, rank) for rank in range(topology.world_size())]


def _place(topology: ProcessTopology, rank: int) -> SavedPlace:
    coordinate = topology.get_coord(rank)._asdict()
    model_rank = coordinate.get(PIPE, 0) * max(1, topology.get_dim(MODEL)) + coordinate.get(MODEL, 0)
    return SavedPlace(model_rank, topology.get_axis_index(gradient_axes(topology), rank))


def _topology_of(layout: SavedLayout) -> ProcessTopology:
    return ProcessTopology.from_spec(layout.topology or f"data={layout.world_size}")
