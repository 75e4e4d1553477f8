"""Read weights and optimizer states of single parameters from DeepSpeed's checkpoint files, whatever their layout.

:class:`DeepSpeedFiles` looks them up in the tables that the saving ranks wrote, maps the files into memory, and puts
the wanted slices together. Only the requested elements are read. For checkpoints of DeepSpeed alone, which have no
tables, :func:`tables_of_files` makes them from the files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from ds_topo.checkpoint.by_name import ReadRequest, Source, require_reachable
from ds_topo.checkpoint.folder import text_of
from ds_topo.checkpoint.manifest import FLAT_OPTIMIZER, SavedLayout, SavedOptions, SavedPlace, SavedStructure
from ds_topo.checkpoint.safe_reading import allowed_types, damaged, how_to_verify
from ds_topo.checkpoint.saved_model import WholeModel
from ds_topo.checkpoint.table import (
    BUFFER,
    GROUP,
    MASTER,
    WEIGHT,
    Elements,
    FileRecorder,
    Order,
    Part,
    Piece,
    Slice,
    Table,
    Vector,
    boxes_in,
    starred,
)
from ds_topo.errors import CheckpointLayoutError, DamagedCheckpointError, abridged
from ds_topo.topology.axes import MODEL
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import sample_axes


def name_of_model_states(layout: SavedLayout, model_rank: int, replica: int = 0) -> str:
    """Return the file of the module and the engine."""
    prefix = f"zero_pp_rank_{replica}_" if layout.zero_stage == 3 else ""
    return f"{prefix}mp_rank_{model_rank:02d}_model_states.pt"


def name_of_partition(layout: SavedLayout, place: SavedPlace) -> str:
    """Return the file of a rank's optimizer partition."""
    prefix = "bf16_" if layout.precision == "bf16" else ""
    return f"{prefix}zero_pp_rank_{place.replica}_mp_rank_{place.model_rank:02d}_optim_states.pt"


def config_in(states: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return DeepSpeed's config of the job that saved; empty if the program has put something else in its place."""
    config = states.get("ds_config")
    return config if isinstance(config, Mapping) else {}


def options_of_files(states: Mapping[str, Any]) -> SavedOptions:
    """Return the options of ZeRO that a checkpoint was saved with, from the config in its file of weights."""
    section = config_in(states).get("zero_optimization") or {}
    return SavedOptions(**{key: section[key] for key in asdict(SavedOptions()) if key in section})


def batch_size_of_files(states: Mapping[str, Any], layout: SavedLayout) -> int | None:
    """Return the samples of a step that a checkpoint was saved with, from the same config; None if it does not say.

    >>> layout = SavedLayout("data=2,model=2", 4, 2, 2, 0, None, "fp32")
    >>> batch_size_of_files({"ds_config": {"train_micro_batch_size_per_gpu": 8}}, layout)
    16
    """
    config = config_in(states)
    whole, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if isinstance(whole, int):
        return whole
    passes, shares = config.get("gradient_accumulation_steps", 1), layout.replicas
    if layout.topology is not None:
        topology = ProcessTopology.from_spec(layout.topology)
        shares = math.prod(map(topology.get_dim, sample_axes(topology)))
    return micro * passes * shares if isinstance(micro, int) and isinstance(passes, int) else None


def names_of_vectors(
    layout: SavedLayout, model_rank: int, states: Mapping[str, Any], partition: Callable[[SavedPlace], Any]
) -> Sequence[Iterable[str]]:
    """Return the names in each vector of an optimizer with partitions, from a model rank's file of weights.

    Without ZeRO that of ``BF16_Optimizer`` has none, but each ``partition`` lists the names of its own part.
    """
    if states["param_shapes"] is not None:
        return list(states["param_shapes"])
    partitions = [partition(SavedPlace(model_rank, replica)) for replica in range(layout.partitions)]
    of_vectors = zip(*(one["param_slice_mappings"] for one in partitions), strict=True)
    return [list(dict.fromkeys(chain.from_iterable(mappings))) for mappings in of_vectors]


def opened(path: Path) -> dict[str, Any]:
    """Return the content of a file, or raise DamagedCheckpointError; its tensors are read when they are used."""
    try:
        with allowed_types():
            content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # of any class: torch raises whatever a changed byte leads to
        raise damaged(path, error, path.parent) from error
    return content


class Located(NamedTuple):
    """A part of a parameter in a file."""

    model_rank: int
    piece: Piece
    vector: Vector
    part: Part


class DeepSpeedFiles(Source):
    """An open checkpoint, in its own folder, whose files are mapped into memory, each once."""

    def __init__(self, model: WholeModel, folder: Path) -> None:
        super().__init__(model, f"the checkpoint {folder.name!r} of {folder.parent}")
        self.layout, self.folder = model.layout, folder
        self._open: dict[str, dict[str, Any]] = {}
        self._rows: dict[tuple[str, str], list[Located]] = defaultdict(list)
        """The parts of each parameter and key, of the tables that were read."""
        self._known: set[str] = set()
        """The tables whose rows are there."""
        self._of_vectors: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        """The hyperparameters and states of vectors that were asked for, by their ids."""
        self._groups: dict[Any, dict[str, Any]] = {}
        """The hyperparameters of each group that was asked for: one object for all parameters of the group."""
        self._of_groups: dict[tuple[int, int], dict[str, Any]] = {}
        """The hyperparameters of each group, by its stage and number."""
        self._buffers: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        """The buffers of slices that were asked for, by the number of the slice and of all slices."""

    def content(self, name: str) -> dict[str, Any]:
        """Return the content of a file, which is opened once."""
        if name not in self._open:
            self._open[name] = opened(self.folder / name)
        return self._open[name]

    def entry(self, file: str, *keys: str | int) -> Any:
        """Return an entry of a file, by its keys from the outside to the inside, or raise DamagedCheckpointError."""
        content: Any = self.content(file)
        try:
            for key in keys:
                content = content[key]
        except (KeyError, IndexError, TypeError):
            raise DamagedCheckpointError(
                f"{self.folder / file} has no entry {abridged(list(keys))}, so it does not fit its manifest. Find "
                f"changed files by {how_to_verify(self.folder)}"
            ) from None
        return content

    def require(self, is_right: bool, what: str) -> None:
        """Raise DamagedCheckpointError unless the files hold what the manifest says."""
        if not is_right:
            raise DamagedCheckpointError(
                f"{self.folder}: {what} do not fit the manifest. Find changed files by {how_to_verify(self.folder)}"
            )

    # -- tables

    def _parts(self, name: str, key: str, wanted: Elements | None = None) -> list[Located]:
        """Return the parts of a parameter's tensor in all tables that have some of the wanted elements, or any."""
        if not self.model.tables and not self._known:
            for table in list(tables_of_files(self)):
                self._add(table)
            self._known.add("")
        for path in self.model.tables_of(name, wanted) if self.model.tables else ():
            if path not in self._known:
                self._known.add(path)
                self._add(Table.from_text(text_of(self.folder / path), path))
        return self._rows.get((name, key), [])

    def _add(self, table: Table) -> None:
        for vector in table.vectors:
            for part in vector.parts:
                located = Located(table.model_rank, table.pieces[part.piece], vector, part)
                for key in (*vector.tensors, *vector.values):
                    self._rows[located.piece.name, key].append(located)

    def _of_slice(
        self, name: str, key: str, model_rank: int | None = None, wanted: Elements | None = None
    ) -> dict[int, list[Located]]:
        """Return the parts of each saved slice that have some of the wanted elements, or any, each element once.

        They are in the order of elements. By default they are of the first rank with each slice, or of ``model_rank``.
        """
        found_parts = self._parts(name, key, wanted if model_rank is None else None)
        found: dict[int, dict[int, Located]] = {}
        of_rank: dict[int, int] = {}
        of_model = self.model.parameters.get(name)
        is_expert = of_model is not None and of_model.experts > 0
        for one in sorted(found_parts, key=lambda one: one.model_rank):
            place, own = one.piece.slice.place, one.model_rank
            if model_rank not in (None, own):
                continue
            if is_expert or of_rank.setdefault(place, own) == own:  # ranks of several slices share experts
                found.setdefault(place, {}).setdefault(one.part.start, one)
        return {place: [parts[start] for start in sorted(parts)] for place, parts in found.items()}

    def _flat(self, one: Located, key: str) -> torch.Tensor:
        path, _ = one.vector.tensors[key]
        tensor = self.entry(one.vector.file, *path)
        flat: torch.Tensor = tensor.detach().reshape(-1) if torch.is_tensor(tensor) else torch.empty(0)
        stop = one.part.offset + one.part.stop - one.part.start
        self.require(stop <= flat.numel(), f"the size of {one.piece.name!r}")
        return flat[one.part.offset : stop]

    # -- values

    def elements(
        self, name: str, key: str, place: int, slices: int, start: int, stop: int, model_rank: int | None = None
    ) -> torch.Tensor:
        """Return the elements ``start:stop`` of one of ``slices`` slices of a parameter, flat. Nothing else is read.

        ``key`` is :data:`WEIGHT`, :data:`MASTER` or that of a state. Slices are parts of the experts if AutoEP stacks
        them. Their number may differ from the saved one. With ``model_rank`` the elements are those of its own copy.
        """
        one = self.model.parameters[name]
        wanted = Elements(one.slice_of(place, slices), start, stop)
        of_masters = (MASTER, WEIGHT) if one.is_trained else (WEIGHT,)
        keys = {WEIGHT: (WEIGHT, MASTER), MASTER: of_masters}.get(key, (key,))
        for own in keys:
            if (found := self._assembled(name, own, wanted, model_rank)) is not None:
                return found.to(one.dtype) if key == WEIGHT else found
        self.require(key not in (WEIGHT, MASTER), f"parts of {name!r}")
        return torch.zeros(stop - start)

    def weight(self, name: str, place: int = 0, slices: int = 1) -> torch.Tensor:
        """Return one of ``slices`` slices of a parameter's weight; all of it by default."""
        one = self.model.parameters[name]
        flat = self.elements(name, WEIGHT, place, slices, 0, one.numel_of_slice(slices))
        return flat.view(one.shape_of_slice(slices))

    def _assembled(self, name: str, key: str, wanted: Elements, model_rank: int | None = None) -> torch.Tensor | None:
        """Return elements of a parameter or buffer, from the saved slices, or from one rank's; None if it has none."""
        saved, numel = self._of_slice(name, key, model_rank, wanted), wanted.stop - wanted.start
        if not saved:
            return None
        real = self.model.parameters[name].real if name in self.model.parameters else None
        for parts in saved.values():
            if real is None and parts[0].piece.slice == wanted.slice:
                return self._joined(parts, key, wanted, name)
        first = next(iter(saved.values()))[0]
        found = self._flat(first, key).new_zeros(numel)
        into, count = boxes_in(found, *wanted, rows=real), 0
        for one in chain.from_iterable(saved.values()):
            own = boxes_in(self._flat(one, key), one.piece.slice, one.part.start, one.part.stop)
            for at, memory in own.items():
                count += sum(_copied(at, memory, to, room) for to, room in into.items())
        self.require(real is not None or count == numel, f"parts of {name!r}")
        return found

    def _joined(self, parts: Sequence[Located], key: str, wanted: Elements, name: str) -> torch.Tensor:
        """Return elements of a slice that was saved, from its parts."""
        found, position = [], wanted.start
        for one in parts:
            begin, end = max(wanted.start, one.part.start), min(wanted.stop, one.part.stop)
            if begin < end:
                self.require(begin == position, f"parts of {name!r}")
                found.append(self._flat(one, key)[begin - one.part.start : end - one.part.start])
                position = end
        self.require(position == wanted.stop, f"parts of {name!r}")
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)

    @override
    def of_parameter(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        beginning = Elements(Slice(self.model.parameters[name].shape), 0, 1)  # the rank that holds it has the states
        first = next(iter(self._of_slice(name, GROUP, None, beginning).values()), [None])[0]
        if first is None:
            return {}, {}
        vector = first.vector
        if (known := self._of_vectors.get(id(vector))) is not None:
            return known
        states: dict[str, Any] = {}
        for key, path in vector.values.items():
            value = self.entry(vector.file, *path)
            if torch.is_tensor(value) and value.numel() > 1:
                raise CheckpointLayoutError(
                    f"the optimizer's state {key!r} of {name!r} has the shape {list(value.shape)}. Only states of "
                    "every element, and single values, can be loaded into another layout. Load the checkpoint in the "
                    "layout that saved it"
                )
            states[key] = value
        states |= {
            key: getattr(torch, kind) for key, (_, kind) in vector.tensors.items() if key not in (WEIGHT, MASTER)
        }
        group = states.pop(GROUP)
        path = vector.values[GROUP]
        own = {key: group[key] for key in group if key not in ("params", "param_names")}
        self._of_vectors[id(vector)] = found = self._groups.setdefault((vector.file, path), own), states
        return found

    @override
    def group_of(self, name: str) -> dict[str, Any]:
        if (number := self._numbers_of_groups.get(starred(name))) is None:
            return self.of_parameter(name)[0]
        if not self._of_groups.get(number):  # the first parameter of a group may have no states
            self._of_groups[number] = self.of_parameter(name)[0]
        return self._of_groups[number]

    @cached_property
    def _numbers_of_groups(self) -> dict[str, tuple[int, int]]:
        """The stage and the number of each parameter's group; not of those that experts of a layer have in several."""
        found: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for stage, groups in enumerate(self.model.structure.groups):
            for number, names in enumerate(groups):
                for name in names:
                    found[starred(name)].add((stage, number))
        return {name: min(places) for name, places in found.items() if len({of for _, of in places}) == 1}

    @override
    def tensors(self) -> dict[str, tuple[int, ...]]:
        found = {name: one.shape for name, one in self.model.parameters.items()}
        return found | {name: tuple(one.shape) for name, one in self.buffers().items()}

    @override
    def shape_of_buffer(self, name: str, place: int, slices: int) -> tuple[int, ...] | None:
        found = self.buffers(place, slices).get(name)
        return None if found is None else tuple(found.shape)

    @override
    def read(self, wanted: Sequence[ReadRequest]) -> None:
        for one in wanted:
            if one.key == BUFFER:
                found = self.buffers(one.place, one.slices)[one.name]
            else:
                stop = one.start + one.into.numel()
                found = self.elements(one.name, one.key, one.place, one.slices, one.start, stop)
            one.into.copy_(found.view(one.into.shape))

    @override
    def require_reachable(self, layout: SavedLayout, structure: SavedStructure, *, has_states: bool) -> None:
        require_reachable(self.model, layout, structure, has_states=has_states)
        self.require_equal_copies(layout.degree(MODEL), has_states=has_states)

    # -- the engine's own files

    def model_states(self, model_rank: int) -> dict[str, Any]:
        """Return the file of the module and the engine."""
        return self.content(name_of_model_states(self.layout, model_rank))

    def partition(self, place: SavedPlace) -> dict[str, Any]:
        """Return the state of a rank's partition of the optimizer."""
        found: dict[str, Any] = self.entry(name_of_partition(self.layout, place), "optimizer_state_dict")
        return found

    def require_equal_copies(self, slices: int, *, has_states: bool) -> None:
        """Check that slices hold equal copies of whatever does not declare how they split it, bit by bit."""
        saved = self.model.slices
        if slices == saved:
            return
        for name, one in self.model.parameters.items():
            if one.split is not None or not one.numel_of_slice(saved):
                continue
            keys = [WEIGHT]
            if has_states and (states := self.of_parameter(name)[1]):
                keys += [MASTER, *(key for key, value in states.items() if isinstance(value, torch.dtype))]
            holders = [None if one.experts else one.stage * saved + place for place in range(saved)]
            for key in keys:
                copies = (self.elements(name, key, 0, saved, 0, one.numel_of_slice(saved), rank) for rank in holders)
                self._require_equal(f"parameter {name!r}" if key == WEIGHT else f"{key} of {name!r}", copies)
        of_slices = [self.buffers(place, saved) for place in range(saved)]
        for name in of_slices[0]:
            values = [buffers[name] for buffers in of_slices]
            if (split := self.model.structure.splits.get(name)) is None:
                self._require_equal(f"buffer {name!r}", values)
            elif split.dim >= values[0].dim() or values[0].shape[split.dim] * saved % (split.stride * slices):
                raise CheckpointLayoutError(
                    f"the buffer {name!r} {list(values[0].shape)} of {saved} slices cannot become {slices} slices "
                    f"along dimension {split.dim} (stride {split.stride}). Choose another degree of model"
                )

    def _require_equal(self, what: str, copies: Iterable[torch.Tensor]) -> None:
        first, *others = (one.detach().contiguous().view(-1).view(torch.uint8) for one in copies)
        for place, other in enumerate(others, 1):
            if not torch.equal(first, other):
                raise CheckpointLayoutError(
                    f"slices 0 and {place} of model={self.model.slices} hold different values of {what}, which does "
                    "not declare how slices split it: another degree of model would keep slice 0's alone. If slices "
                    "split it, set tensor_model_parallel and partition_dim on it, as Megatron's layers do, and save "
                    "once more. partition_dim of a buffer must be set after deepspeed.initialize, which may replace "
                    "it. Register a buffer that follows from the slice itself with persistent=False"
                )

    def state_dict_of(self, place: int) -> dict[str, torch.Tensor]:
        """Return the state dict of a plain engine's module, of one of the saved slices."""
        slices = self.model.slices
        found = {name: self.weight(name, place, slices) for name in self.model.parameters}
        aliases = {alias: found[name] for alias, name in self.model.structure.aliases.items()}
        return {**found, **aliases, **self.buffers(place, slices)}

    def buffers(self, place: int = 0, slices: int = 1) -> dict[str, torch.Tensor]:
        """Return the buffers of one of ``slices`` slices, under the module's names."""
        if (place, slices) not in self._buffers:
            self._buffers[place, slices] = dict(self._cut_buffers(place, slices))
        return self._buffers[place, slices]

    def _cut_buffers(self, place: int, slices: int) -> Iterator[tuple[str, torch.Tensor]]:
        self._parts("", BUFFER)  # reads the tables
        for name in [name for name, key in self._rows if key == BUFFER]:
            first = next(iter(self._of_slice(name, BUFFER).values()))[0]
            saved, split = first.piece.slice, self.model.structure.splits.get(name)
            wanted, found = Slice(saved.whole_shape), None
            if saved.dim is None and slices == self.model.slices:  # each slice has its own
                own_rank = first.model_rank // slices * slices + place
                found = self._assembled(name, BUFFER, Elements(wanted, 0, wanted.numel), own_rank)
            elif split is not None and split.dim < len(wanted.shape):
                shape = [size // slices if dim == split.dim else size for dim, size in enumerate(wanted.shape)]
                wanted = Slice.of(shape, split, place, slices)
            if found is None:
                found = self._assembled(name, BUFFER, Elements(wanted, 0, wanted.numel))
            assert found is not None
            yield name, found.view(wanted.shape)

    def is_like(self, layout: SavedLayout) -> bool:
        """Return True if a layout has the same numbers of stages, slices and replicas."""
        counts = [(one.model_ranks, one.degree(MODEL), one.replicas) for one in (self.layout, layout)]
        return counts[0] == counts[1]

    def loss_scale(self) -> dict[str, Any]:
        """Return the state of the loss scale; empty if none was saved."""
        if not self.layout.has_partitions:
            return dict(self.model_states(0).get("optimizer") or {})
        scaler = self.partition(SavedPlace(0, 0)).get("loss_scaler")
        return vars(scaler) if scaler is not None else {}


def _copied(at: Sequence[int], memory: torch.Tensor, to: Sequence[int], room: torch.Tensor) -> int:
    """Copy what two boxes of a tensor have in common, given their offsets in it; return the number of its elements."""
    both = zip(at, memory.shape, to, room.shape, strict=True)
    spans = [(max(first, begin), min(first + size, begin + width)) for first, size, begin, width in both]
    if any(begin >= end for begin, end in spans):
        return 0
    values = memory[tuple(slice(begin - base, end - base) for (begin, end), base in zip(spans, at, strict=True))]
    room[tuple(slice(begin - base, end - base) for (begin, end), base in zip(spans, to, strict=True))].copy_(values)
    return values.numel()


# -- checkpoints without tables ----------------------------------------------------------------------------------------


def tables_of_files(source: DeepSpeedFiles) -> Iterator[Table]:
    """Yield the tables of a checkpoint of DeepSpeed alone from what its files record.

    With ZeRO they record the order of parameters (``param_shapes``), paddings, and which rank they are of. Without ZeRO
    they have positions, and the structure the names. CheckpointLayoutError is raised for experts.
    """
    if source.model.experts:
        raise CheckpointLayoutError(
            f"{source.where} has experts, and no tables that say where they are. Load it in the layout that saved it"
        )
    for model_rank in range(source.layout.model_ranks):
        for replica in range(source.layout.partitions) if source.layout.has_partitions else (0,):
            yield _table_of(source, SavedPlace(model_rank, replica))


def _table_of(source: DeepSpeedFiles, place: SavedPlace) -> Table:
    model, layout = source.model, source.layout
    of = place.model_rank % model.slices
    names_here = model.names_on(place.model_rank)
    pieces = {name: Piece(name, model.parameters[name].slice_of(of, model.slices)) for name in names_here}
    buffers = {
        name: Piece(name, Slice.of(shape, model.structure.splits.get(name), of, model.slices))
        for name, shape in model.structure.buffers.items()
    }
    pieces |= buffers
    orders = _orders_of(source, place, pieces)
    partition = (place.replica, layout.partitions) if layout.zero_stage == 3 else (0, 1)
    layers = [layer.prefix(number) for number, layer in enumerate(model.structure.layers)]
    recorder = FileRecorder(place.model_rank, pieces, orders, buffers, layers=layers, partition=partition)
    for name in _files_of(source, place):
        recorder.describe(source.content(name), name)
    return recorder.table()


def _files_of(source: DeepSpeedFiles, place: SavedPlace) -> Iterator[str]:
    """Yield the files with parameters of a rank."""
    model, layout, folder = source.model, source.layout, source.folder
    stage, of = divmod(place.model_rank, model.slices)
    if place.replica == 0 or layout.zero_stage == 3:
        yield name_of_model_states(layout, place.model_rank, place.replica)
    own = model.names_on(place.model_rank)
    for number, layer in enumerate(model.structure.layers) if place.replica == 0 else ():
        prefix = layer.prefix(number)
        names = sorted(path.name for path in folder.glob(f"layer_{number:02d}-*model_states.pt"))
        if names and len(names) != model.slices:
            raise DamagedCheckpointError(
                f"{folder}: layer {number} has {len(names)} files, but there are {model.slices} slices"
            )
        is_without_parameters = stage == 0 and not any(name.startswith(prefix) for name in model.parameters)
        if names and (is_without_parameters or any(name.startswith(prefix) for name in own)):
            yield names[of]
    if layout.has_partitions:
        yield name_of_partition(layout, place)


def _orders_of(source: DeepSpeedFiles, place: SavedPlace, pieces: Mapping[str, Piece]) -> list[Order]:
    model, layout = source.model, source.layout
    states = source.model_states(place.model_rank)
    numbers = {name: number for number, name in enumerate(pieces)}

    def order(names: Iterable[str], paddings: Mapping[str, int], partition: int, partitions: int) -> Order:
        begins, end = list[tuple[int, int]](), 0
        for name in names:
            if name not in numbers:
                raise CheckpointLayoutError(
                    f"{name!r} is in the optimizer and not in the checkpoint, so that the places of others are "
                    "unknown. Load the checkpoint in the layout that saved it"
                )
            begins.append((numbers[name], end))
            numel = pieces[name].slice.numel
            end += -(-numel // partitions) if layout.zero_stage == 3 else numel + int(paddings.get(name, 0))
        return Order(begins, partition, partitions)

    if not layout.has_partitions:
        found: list[Sequence[str]] = []
        for names in model.structure.groups[place.model_rank // model.slices]:
            found += [names] if layout.optimizer == FLAT_OPTIMIZER else [[name] for name in names]
        return [order(names, {}, 0, 1) for names in found]
    saved = source.partition(place)
    vectors = names_of_vectors(layout, place.model_rank, states, source.partition)
    paddings: Sequence[Any] = saved.get("param_alignment_paddings") or [()] * len(vectors)
    result = []
    for vector, own in zip(vectors, paddings, strict=True):
        gaps = dict(zip(vector, own, strict=False)) if layout.zero_stage in (1, 2) else {}
        result.append(order(vector, gaps, place.replica, layout.partitions))
    return result
