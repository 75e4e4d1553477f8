"""The manifest of a checkpoint: which files it has, what is in them, and the layout that wrote them. JSON.

Places have no ranks in them. A *model rank* counts stages and slices, ``stage * slices + slice``, in any order of axes,
as DeepSpeed's file names do (``mp_rank_03``); a *replica* counts the ranks of a data parallel group
(``zero_pp_rank_1``). The coordinates of every rank follow from the topology's spec, in closed form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ds_topo.checkpoint_files.structure import SavedStructure, structure_from
from ds_topo.errors import CheckpointVersionError, DamagedCheckpointError, abridged
from ds_topo.topology.process_topology import ProcessTopology

NAME = "manifest.json"
"""Inside the folder of a checkpoint."""
FORMAT, VERSION = "ds_topo checkpoint", 1
_DIGEST = "sha256"
BF16_OPTIMIZER = "BF16_Optimizer"
"""DeepSpeed's, of bf16 with sums of gradients in fp32: it partitions, at ZeRO 0, too."""


@dataclass(frozen=True)
class SavedFile:
    """One file of a checkpoint."""

    path: str
    """From the checkpoint's folder, with ``/``."""
    bytes: int
    sha256: str
    rank: int
    """The global rank that wrote it."""


@dataclass(frozen=True)
class SavedParameter:
    """One parameter, as the model ranks that hold it see it."""

    name: str
    """Of the module; a pipeline's layers go by their number in the whole pipeline, experts by ``*``."""
    shape: tuple[int, ...]
    """Of one model rank's part: a tensor-parallel parameter's slice, all of it under ZeRO 3."""
    dtype: str
    model_ranks: tuple[int, ...]
    """Ascending."""
    split_dim: int | None = None
    """The dimension that slices split, if the parameter is marked and says which; -1 if it is marked and does not."""
    experts: int | None = None
    """How many of them there are in the layer; None for a dense parameter."""
    is_trained: bool = True


@dataclass(frozen=True)
class SavedExperts:
    """Expert groups of one size: the arguments of ``create_expert_groups``."""

    size: int
    tensor_parallel: bool = False
    data_first: bool = False


@dataclass(frozen=True)
class SavedLayout:
    """How the ranks that wrote a checkpoint shared the model out."""

    topology: str | None
    """The spec; None of an engine whose mpu is not a grid of ours."""
    world_size: int
    model_ranks: int
    """Stages x slices."""
    replicas: int
    """Ranks that hold the same parameters, and share out what ZeRO partitions."""
    zero_stage: int
    optimizer: str | None
    """The class of DeepSpeed's optimizer, which decides what its files hold."""
    precision: str
    """Of the parameters: ``fp32``, ``bf16`` or ``fp16``."""
    is_pipeline: bool = False
    experts: tuple[SavedExperts, ...] = ()
    has_reducer: bool = False
    """Whether our reducer kept ZeRO's partitions in its balanced layout; the files are in DeepSpeed's in any case."""
    first_rank: int = 0
    """The global rank of the topology's rank 0."""

    @property
    def has_partitions(self) -> bool:
        """Whether replicas share out the optimizer's states."""
        return self.zero_stage > 0 or self.optimizer == BF16_OPTIMIZER

    def degrees(self) -> dict[str, int]:
        """The axes above 1, outermost first; empty where the topology is not known.

        >>> SavedLayout("pipe=2,data=1,model=4", 8, 8, 1, 0, None, "fp32").degrees()
        {'pipe': 2, 'model': 4}
        """
        if self.topology is None:
            return {}
        topology = ProcessTopology.from_spec(self.topology)
        return {axis: degree for axis, degree in zip(topology.axes, topology.dims, strict=True) if degree > 1}

    def __str__(self) -> str:
        """One line for messages.

        >>> print(SavedLayout("data=2", 2, 1, 2, 1, "DeepSpeedZeroOptimizer", "bf16"))
        data=2 (2 ranks), ZeRO 1, bf16
        """
        ranks = f"{self.world_size} rank{'' if self.world_size == 1 else 's'}"
        where = self.topology or f"{self.model_ranks} model ranks x {self.replicas} replicas"
        parts = [f"{where} ({ranks})", f"ZeRO {self.zero_stage}", self.precision]
        parts += [f"experts over {groups.size}" for groups in self.experts]
        return ", ".join(parts)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    tag: str
    step: int
    time: str
    """When its files were written: UTC, ISO 8601."""
    layout: SavedLayout
    files: tuple[SavedFile, ...]
    parameters: tuple[SavedParameter, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    structure: SavedStructure | None = None
    """How the model is put together, for conversions; None where it was not noted."""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)

    def numel(self) -> int:
        """Elements of the whole model: slices and experts are counted once each, copies on several stages too."""
        total = 0
        for parameter in self.parameters:
            numel = 1
            for size in parameter.shape:
                numel *= size
            slices = len(parameter.model_ranks) if parameter.split_dim is not None else 1
            total += numel * slices * (parameter.experts or 1)
        return total


def to_text(manifest: Manifest) -> str:
    """The manifest as it is written; the last entry is a digest of all others.

    >>> layout = SavedLayout("data=1", 1, 1, 1, 0, None, "fp32")
    >>> manifest = Manifest("last", 7, "2026-01-31T12:00:00+00:00", layout, (), ())
    >>> from_text(to_text(manifest), "last") == manifest
    True
    """
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest), "bytes": manifest.bytes}
    content["layout"]["coordinates"] = _coordinates(manifest.layout)
    return json.dumps({**content, _DIGEST: _digest_of(content)}, indent=1)


def from_text(text: str, where: str) -> Manifest:
    """What a manifest says.

    Args:
        text: the file's.
        where: its path, for messages.

    Raises:
        DamagedCheckpointError: not a manifest, or not as it was written.
        CheckpointVersionError: of a later ds_topo.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where}: not JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedCheckpointError(f'{where}: "format" must be {FORMAT!r}, not {_format_of(content)}')
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointVersionError(
            f"{where}: version {version} of the manifest, and this ds_topo reads versions up to {VERSION}: install the "
            f"release that wrote it ({_release_in(content)}) or a later one"
        )
    digest = content.pop(_DIGEST, None)
    if digest != _digest_of(content):
        raise DamagedCheckpointError(f"{where}: not as it was written ({_DIGEST} differs)")
    try:
        return _from_content(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{where}: {type(error).__name__}: {error}") from None


def _release_in(content: Mapping[str, Any]) -> str:
    versions = content.get("versions")
    return str(versions.get("ds_topo", "a later one")) if isinstance(versions, Mapping) else "a later one"


def _from_content(content: Mapping[str, Any]) -> Manifest:
    layout = dict(content["layout"])
    layout.pop("coordinates", None)
    layout["experts"] = tuple(SavedExperts(**groups) for groups in layout["experts"])
    parameters = (
        {**row, "shape": tuple(row["shape"]), "model_ranks": tuple(row["model_ranks"])} for row in content["parameters"]
    )
    return Manifest(
        str(content["tag"]),
        int(content["step"]),
        str(content["time"]),
        SavedLayout(**layout),
        tuple(SavedFile(**row) for row in content["files"]),
        tuple(SavedParameter(**row) for row in parameters),
        dict(content["versions"]),
        structure_from(content.get("structure")),
    )


def _coordinates(layout: SavedLayout) -> dict[str, Any] | None:
    """``[[size, stride], ...]`` of each axis: a rank is the sum of digits x strides. For readers without ds_topo."""
    if layout.topology is None:
        return None
    topology = ProcessTopology.from_spec(layout.topology)
    return {
        axis: [list(factor) for factor in factors]
        for axis, factors in zip(topology.axes, topology.layout.axes, strict=True)
    }


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _format_of(content: object) -> str:
    return abridged(content.get("format")) if isinstance(content, dict) else type(content).__name__


def merged(rows: Sequence[SavedParameter]) -> tuple[SavedParameter, ...]:
    """Rows that differ in their model ranks alone as one, in the order of their first model rank.

    >>> rows = [SavedParameter("weight", (4, 2), "float32", (rank,)) for rank in (1, 0)]
    >>> merged(rows)[0].model_ranks
    (0, 1)
    """
    ranks: dict[SavedParameter, set[int]] = {}
    for row in rows:
        alike = SavedParameter(row.name, row.shape, row.dtype, (), row.split_dim, row.experts, row.is_trained)
        ranks.setdefault(alike, set()).update(row.model_ranks)
    found = [
        SavedParameter(key.name, key.shape, key.dtype, tuple(sorted(held)), key.split_dim, key.experts, key.is_trained)
        for key, held in ranks.items()
    ]
    return tuple(sorted(found, key=lambda row: row.model_ranks[0]))
