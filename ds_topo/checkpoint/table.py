"""Record where every element of a model is in the files of a checkpoint.

Each rank that writes files describes them while it saves (:class:`FileRecorder`), and writes the description beside
them. A :class:`Table` is such a description: for each tensor of each parameter the file, the path inside the file, and
the boxes of the whole tensor that are there, in the order of storage. Loading needs no knowledge of how DeepSpeed lays
out partitions.

A flat vector of ZeRO holds parts of many parameters, and the file has one for each state. So a table is written as
vectors, each with its tensors by key and the parts that all of them hold. :meth:`Table.rows` spells them out::

    Stored(name='0.weight', key='exp_avg', dtype='float32', whole=(8, 8), boxes=(Box((0, 0), (4, 8)),),
           file='zero_pp_rank_0_mp_rank_00_optim_states.pt',
           path=('optimizer_state_dict', 'base_optimizer_state', 'state', 0, 'exp_avg'), offset=0)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ds_topo.checkpoint.manifest import SavedTable, built_from, in_order
from ds_topo.checkpoint.saved_model import starred
from ds_topo.checkpoint.shards import Box, Slice, boxes_of
from ds_topo.errors import DamagedCheckpointError

WEIGHT, MASTER, BUFFER, GROUP = "weight", "fp32", "buffer", "group"
"""Keys of a parameter's value in the module, of its master weight, of a buffer, and of the hyperparameters of a
parameter's group. All others are those of the optimizer's states."""
FLAT_MASTERS, COPIED_MASTERS = "fp32_groups_flat", "fp32_groups"
"""Keys of the master weights of half precision without ZeRO: of ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer``."""
_STATES, _STAGE_3, _STAGE_12 = "optimizer_state_dict", "fp32_flat_groups", "single_partition_of_fp32_groups"
_BASE, _PADDINGS, _FRAGMENTS = "base_optimizer_state", "group_paddings", "frozen_param_fragments"

Path = tuple[str | int, ...]
"""Keys from the outside of a file's content to the inside."""


@dataclass(frozen=True)
class Stored:
    """One tensor of one parameter in one file; or a single value, such as a step, without boxes."""

    name: str
    """The name in the whole model."""
    key: str
    dtype: str
    whole: tuple[int, ...]
    boxes: tuple[Box, ...]
    """Places in the whole tensor, in the order of storage."""
    file: str
    path: Path
    offset: int
    """The position of the first element in the flattened tensor of the file."""


@dataclass(frozen=True)
class Piece:
    """A parameter or buffer as a rank has it: whole, or a slice."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    slices: int = 1
    place: int = 0
    stride: int = 1

    def __post_init__(self) -> None:
        is_split = self.dim is not None
        if is_split and not (0 <= (self.dim or 0) < len(self.shape) and 0 <= self.place < self.slices):
            raise ValueError(f"slice {self.place} of {self.slices} along {self.dim} of {self.name!r} is impossible")
        if self.stride < 1 or any(size < 0 for size in self.shape):
            raise ValueError(f"{list(self.shape)} of {self.name!r} in {self.stride} pieces is impossible")

    @classmethod
    def of(cls, name: str, own: Slice) -> Piece:
        """Return a slice with its name."""
        return cls(name, own.shape, own.dim, own.slices, own.place, own.stride)

    @property
    def slice(self) -> Slice:
        """The slice."""
        return Slice(self.shape, self.dim, self.slices, self.place, self.stride)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Part(NamedTuple):
    """Elements ``start:stop`` of a flattened piece, at ``offset`` of the tensors of a vector."""

    piece: int
    start: int
    stop: int
    offset: int


class Vector(NamedTuple):
    """Tensors of a file with the same parts: a weight, or a master weight and its states."""

    file: str
    tensors: Mapping[str, tuple[Path, str]]
    """The path and the type of each tensor that has a value for each element, by key."""
    values: Mapping[str, Path]
    """The path of each single value, by key."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Table:
    """The files that one rank wrote."""

    model_rank: int
    pieces: tuple[Piece, ...]
    vectors: tuple[Vector, ...]

    def rows(self) -> Iterator[Stored]:
        """Spell out every tensor of every parameter."""
        for vector in self.vectors:
            for part in vector.parts:
                piece = self.pieces[part.piece]
                whole, boxes = piece.slice.whole_shape, tuple(boxes_of(piece.slice, part.start, part.stop))
                for key, (path, dtype) in vector.tensors.items():
                    yield Stored(piece.name, key, dtype, whole, boxes, vector.file, path, part.offset)
                for key, path in vector.values.items():
                    yield Stored(piece.name, key, "", (), (), vector.file, path, 0)

    def described(self, path: str, names: Iterable[str], partition: tuple[int, int] = (0, 1)) -> SavedTable:
        """Return what the manifest says of the table.

        Args:
            path: its file.
            names: the names of the model rank's parameters, of which one stands for all experts of a layer.
            partition: the number of the rank's partition of each parameter, and of all partitions: ZeRO 3.
        """
        positions = {name: at for at, name in enumerate(in_order(names))}
        held = {self.pieces[part.piece].name for vector in self.vectors for part in vector.parts}
        rows = [positions[row] for name in held for row in {name, starred(name)} if row in positions]
        has_buffers = any(BUFFER in vector.tensors for vector in self.vectors)
        found = SavedTable.of(path, self.model_rank, set(rows), has_buffers=has_buffers)
        is_right = all(
            start <= part.start and part.stop <= stop
            for vector in self.vectors
            for part in (vector.parts if BUFFER not in vector.tensors else ())
            for start, stop in (partition_of(self.pieces[part.piece].numel, *partition),)
        )
        return replace(found, partition=partition[0], partitions=partition[1]) if is_right else found

    def to_text(self) -> str:
        """Return the text of the table's file: names once, numbers in lists."""
        vectors = [
            [
                one.file,
                {key: [dtype, *map(_encoded, path)] for key, (path, dtype) in one.tensors.items()},
                {key: [*map(_encoded, path)] for key, path in one.values.items()},
                [[part.piece, part.start, part.stop, part.offset] for part in one.parts],
            ]
            for one in self.vectors
        ]
        pieces = [[one.name, one.shape, one.dim, one.slices, one.place, one.stride] for one in self.pieces]
        content = {"model_rank": self.model_rank, "pieces": pieces, "vectors": vectors}
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str, where: str) -> Table:
        """Parse the text of a table's file.

        Raises:
            DamagedCheckpointError: it is no table.
        """
        try:
            content = json.loads(text)
            fields = list(Piece.__dataclass_fields__)
            pieces = [built_from(Piece, dict(zip(fields, row, strict=True))) for row in content["pieces"]]
            vectors = []
            for file, tensors, values, parts in content["vectors"]:
                of_keys = {key: (_path_of(path), str(dtype)) for key, (dtype, *path) in tensors.items()}
                of_values = {key: _path_of(path) for key, path in values.items()}
                found = tuple(Part(*row) for row in parts)
                for one in found:
                    numel = pieces[one.piece].numel if one.piece >= 0 else -1
                    if {*map(type, one)} != {int} or not 0 <= one.start <= one.stop <= numel:
                        raise ValueError("a part lies outside of its parameter")
                    if one.offset < 0:
                        raise ValueError("an offset is negative")
                vectors.append(Vector(built_from(str, file), of_keys, of_values, found))
            return cls(built_from(int, content["model_rank"]), tuple(pieces), tuple(vectors))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(f"{where}: {type(error).__name__}: {error}") from None


def _encoded(key: str | int) -> str:
    return f"#{key}" if isinstance(key, int) or key.startswith("#") else key


def _path_of(keys: Sequence[str]) -> Path:
    return tuple([_decoded(key) for key in keys])


def _decoded(key: str) -> str | int:
    return key if not key.startswith("#") else key[1:] if key.startswith("##") else int(key[1:])


def partition_of(numel: int, partition: int, partitions: int) -> tuple[int, int]:
    """Return the first element and the end of a partition of a flattened parameter at ZeRO 3.

    >>> [partition_of(7, number, 4) for number in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 7)]
    """
    size = -(-numel // partitions)
    return min(numel, partition * size), min(numel, (partition + 1) * size)


# -- describing files --------------------------------------------------------------------------------------------------


@dataclass
class Order:
    """The parameters of one tensor that the optimizer steps on, in their order."""

    begins: list[tuple[int, int]]
    """The number of the piece, and where it begins in the vector of all partitions; at ZeRO 3, in a partition."""
    partition: int = 0
    """The number of this rank's partition."""
    partitions: int = 1

    def parts(self, pieces: Sequence[Piece], numel: int | None, *, is_by_parameter: bool = False) -> Iterator[Part]:
        """Yield the parts that a partition holds.

        Args:
            pieces: all pieces.
            numel: the number of elements of a partition; None if it is the whole vector.
            is_by_parameter: each parameter is cut into partitions, and not the vector: ZeRO 3.
        """
        for number, begin in self.begins:
            size = pieces[number].numel
            if is_by_parameter:
                (start, stop), offset = partition_of(size, self.partition, self.partitions), begin
            else:
                first = 0 if numel is None else self.partition * numel
                start, stop = (
                    max(begin, first) - begin,
                    (size if numel is None else min(begin + size, first + numel) - begin),
                )
                offset = max(begin, first) - first
            if start < stop:
                yield Part(number, start, stop, offset)


class FileRecorder:
    """A description of the files of one rank, which grows with each file.

    Args:
        model_rank: the rank's stage and slice.
        pieces: its parameters and buffers, by their names in the module.
        stacked: the pieces in which AutoEP stacks experts, by name.
        orders: the order of parameters in each tensor of the optimizer that it saves.
        buffers: the names, in the module, of what is a buffer.
    """

    def __init__(
        self,
        model_rank: int,
        pieces: Mapping[str, Piece],
        orders: Sequence[Order],
        buffers: Iterable[str] = (),
        *,
        stacked: Iterable[str] = (),
        partition: tuple[int, int] = (0, 1),
    ) -> None:
        self._model_rank = model_rank
        self.pieces = list(pieces.values())
        self._numbers = {name: number for number, name in enumerate(pieces)}
        self._by_whole_name = {piece.name: number for number, piece in enumerate(self.pieces)}
        self._buffers, self._stacked = set(buffers), set(stacked)
        self.orders, self.partition = orders, partition
        self._vectors: list[Vector] = []

    def table(self) -> Table:
        """Return the description, with the pieces of which the files have a part."""
        used = sorted({part.piece for vector in self._vectors for part in vector.parts})
        if len(used) == len(self.pieces):
            return Table(self._model_rank, tuple(self.pieces), tuple(self._vectors))
        numbers = {piece: number for number, piece in enumerate(used)}
        vectors = tuple(
            one._replace(parts=tuple([part._replace(piece=numbers[part.piece]) for part in one.parts]))
            for one in self._vectors
        )
        return Table(self._model_rank, tuple(self.pieces[number] for number in used), vectors)

    def describe(self, content: Any, file: str, prefix: str | None = None) -> None:
        """Add a file.

        Args:
            content: what is saved.
            file: its path in the checkpoint's folder.
            prefix: of the names of a layer of a pipeline, whose file this is.
        """
        if not isinstance(content, Mapping):
            return
        if prefix is not None:
            self._add_state_dict(content, file, (), prefix)
        elif file.startswith("layer_") and "_expert_" in file:
            self._add_experts(content, file)
        else:
            if isinstance(content.get("module"), Mapping):
                self._add_state_dict(content["module"], file, ("module",), "")
            for name, tensor in (content.get(_FRAGMENTS) or {}).items():
                self._add_fragment(name, tensor, file)
            if isinstance(content.get(_STATES), Mapping):
                self._add_partition(content[_STATES], file)
            if isinstance(content.get("optimizer"), Mapping):
                self._add_optimizer(content["optimizer"], file)

    def _add_state_dict(self, content: Mapping[str, Any], file: str, path: Path, prefix: str) -> None:
        for key, value in content.items():
            number = self._numbers.get(f"{prefix}{key}")
            if number is not None and torch.is_tensor(value) and value.numel() == self.pieces[number].numel:
                kind = BUFFER if f"{prefix}{key}" in self._buffers else WEIGHT
                self._add_whole(number, kind, value, file, (*path, key))

    def _add_experts(self, content: Mapping[str, Any], file: str) -> None:
        for name, value in content.items():
            stack, _, at = name.rpartition(".")
            if stack in self._stacked and at.isdecimal():
                piece = self.pieces[stacked := self._numbers[stack]]
                numel, own = piece.numel // piece.shape[0], int(at) - piece.place * piece.shape[0]
                tensors = {WEIGHT: ((name,), _dtype(value))}
                parts = (Part(stacked, own * numel, (own + 1) * numel, 0),)
                self._vectors.append(Vector(file, tensors, {}, parts))
            elif (number := self._by_whole_name.get(name)) is not None and torch.is_tensor(value):
                kind = BUFFER if self._is_buffer(number) else WEIGHT
                self._add_whole(number, kind, value, file, (name,))

    def _is_buffer(self, number: int) -> bool:
        return any(self._numbers.get(name) == number for name in self._buffers)

    def _add_whole(self, number: int, key: str, value: torch.Tensor, file: str, path: Path) -> None:
        part = Part(number, 0, self.pieces[number].numel, 0)
        self._vectors.append(Vector(file, {key: (path, _dtype(value))}, {}, (part,)))

    def _add_fragment(self, name: str, tensor: torch.Tensor, file: str) -> None:
        number = self._numbers[name]
        partition, partitions = self.partition
        order = Order([(number, 0)], partition, partitions)
        for part in order.parts(self.pieces, None, is_by_parameter=True):
            self._vectors.append(Vector(file, {WEIGHT: ((_FRAGMENTS, name), _dtype(tensor))}, {}, (part,)))

    def _add_partition(self, saved: Mapping[str, Any], file: str) -> None:
        is_stage_3 = _STAGE_3 in saved
        inner, of_masters = saved[_STATES if is_stage_3 else _BASE], _STAGE_3 if is_stage_3 else _STAGE_12
        if not isinstance(inner, Mapping):
            return  # elastic_checkpoint
        path: Path = (_STATES, _STATES if is_stage_3 else _BASE)
        for number, (order, master) in enumerate(zip(self.orders, saved[of_masters], strict=True)):
            numel = master.numel()
            if not is_stage_3 and "zero_stage" in saved:  # BF16_Optimizer keeps the padding
                numel += int(saved[_PADDINGS][number])
            parts = order.parts(self.pieces, numel, is_by_parameter=is_stage_3) if master.numel() else ()
            masters: dict[str, tuple[Path, Any]] = {MASTER: ((_STATES, of_masters, number), master)}
            self._add_vector(file, tuple(parts), masters, inner, path, number, numel)

    def _add_optimizer(self, saved: Mapping[str, Any], file: str) -> None:
        """Add an optimizer without ZeRO."""
        path: Path = ("optimizer",)
        inner = saved
        if _STATES in saved:
            path, inner = ("optimizer", _STATES), saved[_STATES]
        if "state" not in inner:
            return  # BF16_Optimizer without ZeRO has files of partitions, too
        masters: list[tuple[Path, Any]] = []
        for kind in (FLAT_MASTERS, COPIED_MASTERS):
            for group, one in enumerate(saved.get(kind) or ()):
                copies = [one] if torch.is_tensor(one) else one
                places = [(group,) if torch.is_tensor(one) else (group, at) for at in range(len(copies))]
                masters += [(("optimizer", kind, *at), each) for at, each in zip(places, copies, strict=True)]
        for number, order in enumerate(self.orders):
            parts = tuple(order.parts(self.pieces, None))
            numel = sum(self.pieces[part.piece].numel for part in parts)
            own = {MASTER: masters[number]} if masters else {}
            self._add_vector(file, parts, own, inner, path, number, numel)

    def _add_vector(
        self,
        file: str,
        parts: tuple[Part, ...],
        tensors: dict[str, tuple[Path, Any]],
        inner: Mapping[str, Any],
        path: Path,
        number: int,
        numel: int,
    ) -> None:
        """Add a tensor of the optimizer with its states, which have ``numel`` elements."""
        values: dict[str, Path] = {}
        for key, value in inner["state"].get(number, {}).items():
            place = (*path, "state", number, key)
            if torch.is_tensor(value) and value.dim() > 0 and value.numel() == numel:
                tensors[key] = place, value
            else:
                values[key] = place
        group = next((at for at, one in enumerate(inner["param_groups"]) if number in one["params"]), None)
        if group is not None:
            values[GROUP] = (*path, "param_groups", group)
        if parts:
            of_keys = {key: (place, _dtype(value)) for key, (place, value) in tensors.items()}
            self._vectors.append(Vector(file, of_keys, values, parts))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
