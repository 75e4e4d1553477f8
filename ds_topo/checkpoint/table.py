"""Record where every element of a model is in the files of a checkpoint.

Each rank that writes files describes them while it saves (:class:`FileRecorder`), and writes the description beside
them. A :class:`Table` is such a description. It lists the *pieces* of the model that the rank has: parameters, with
their names in the whole model, and the slices of them. For each tensor of each file it has the path inside the file,
and the elements of which pieces are where in the tensor. Loading needs no knowledge of how DeepSpeed lays out
partitions.

A flat vector of ZeRO holds parts of many parameters, and the file has one for each state. So a table is written as
vectors, each with its tensors by key and the parts that all of them hold. A weight that is whole in a tensor of its own
is a vector, too.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ds_topo.checkpoint.manifest import Count, Saved, SavedSplit, SavedTable, Size, Text, built_from
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

# -- boxes and slices --------------------------------------------------------------------------------------------------
# A *slice* is the part of a parameter that one tensor-parallel rank holds. A *span* is a run of elements of a flattened
# slice; ZeRO cuts vectors into spans. A *box* is a range along every dimension of the whole parameter.


class Box(NamedTuple):
    """A range of elements along every dimension of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes_of_span(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the elements ``start:stop`` of a contiguous tensor as boxes, in order.

    A span of a tensor of n dimensions takes at most 2 n - 1 boxes::

        . . . . . .
        . . . 1 1 1     a span of 14 elements of a tensor with 6 columns
        2 2 2 2 2 2
        3 3 3 3 3 .

    >>> for box in boxes_of_span([4, 6], 9, 23):
    ...     print(box)
    Box(offsets=(1, 3), sizes=(1, 3))
    Box(offsets=(2, 0), sizes=(1, 6))
    Box(offsets=(3, 0), sizes=(1, 5))
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows; none if the span is inside one row
    for low, high in pairwise([start, first * row, last * row, stop] if first <= last else [start, stop]):
        number = low // row
        if low % row or high % row:
            for box in boxes_of_span(shape[1:], low - number * row, high - number * row):
                yield Box((number, *box.offsets), (1, *box.sizes))
        elif low < high:
            yield Box((number, *(0 for _ in shape[1:])), ((high - low) // row, *shape[1:]))


class Slice(NamedTuple):
    """A slice of a tensor, one of several; the whole tensor if ``dim`` is None.

    The tensor has ``stride * slices`` equal pieces along ``dim``. The slice at ``place`` holds every ``slices``-th
    piece, starting with piece ``place``.

    >>> Slice((4, 3), dim=0, slices=2, place=1, stride=2).whole_shape
    (8, 3)

    Source: Megatron-LM, ``_initialize_affine_weight_cpu`` (``partition_dim`` and ``partition_stride``).
    """

    shape: tuple[Count, ...]
    """Shape of the slice."""
    dim: Count | None = None
    slices: Size = 1
    place: Count = 0
    stride: Size = 1

    @classmethod
    def of(cls, shape: Sequence[int], split: SavedSplit | None, place: int, slices: int) -> Slice:
        """Return the slice at ``place`` of a tensor that is split as a module or a manifest declares."""
        if split is None or slices == 1:
            return cls(tuple(shape))
        return cls(tuple(shape), split.dim, slices, place, split.stride)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(size * self.slices if dim == self.dim else size for dim, size in enumerate(self.shape))

    def in_whole(self, box: Box) -> Iterator[tuple[Box, int]]:
        """Translate a box of the slice into boxes of the whole tensor, each with its start along ``dim`` in ``box``.

        >>> for box in Slice((4,), dim=0, slices=2, place=1, stride=2).in_whole(Box((1,), (3,))):
        ...     print(box)
        (Box(offsets=(3,), sizes=(1,)), 0)
        (Box(offsets=(6,), sizes=(2,)), 1)
        """
        if self.dim is None or self.slices == 1:
            yield box, 0
            return
        length, dim = self.shape[self.dim] // self.stride, self.dim
        begin, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        while begin < end:
            piece, offset = divmod(begin, length)
            until = min(end, (piece + 1) * length)
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = (piece * self.slices + self.place) * length + offset, until - begin
            yield Box(tuple(offsets), tuple(sizes)), begin - box.offsets[dim]
            begin = until

    def span_of(self, box: Box) -> tuple[int, int] | None:
        """Return the span of the flattened slice around what it has of a box of the whole tensor; None if nothing.

        >>> Slice((4, 3), dim=0, slices=2, place=1, stride=2).span_of(Box((3, 0), (2, 3)))
        (3, 6)
        """
        offsets, sizes = list(box.offsets), list(box.sizes)
        if self.dim is not None and self.slices > 1:
            length, dim = self.shape[self.dim] // self.stride, self.dim
            begin, end = offsets[dim], min(offsets[dim] + sizes[dim], self.whole_shape[dim])
            pieces = [one for one in range(begin // length, -(-end // length)) if one % self.slices == self.place]
            if not pieces:
                return None
            first, last = pieces[0], pieces[-1]
            offsets[dim] = first // self.slices * length + max(0, begin - first * length)
            sizes[dim] = last // self.slices * length + min(length, end - last * length) - offsets[dim]
        begin, end = 0, 0
        for offset, size, width in zip(offsets, sizes, self.shape, strict=True):
            size = min(offset + size, width) - offset
            if size <= 0:
                return None
            begin, end = begin * width + offset, end * width + offset + size - 1
        return begin, end + 1


class Elements(NamedTuple):
    """The elements ``start:stop`` of a flattened slice."""

    slice: Slice
    start: int
    stop: int

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes of the whole tensor that have them."""
        for box in boxes_of_span(self.slice.shape, self.start, self.stop):
            yield from (one for one, _ in self.slice.in_whole(box))


def boxes_in(
    memory: torch.Tensor, of: Slice, start: int, stop: int, rows: int | None = None
) -> dict[tuple[int, ...], torch.Tensor]:
    """Return views of the elements ``start:stop`` of a slice, by their offsets in the whole tensor.

    ``memory`` has these elements, or the whole slice, in its shape. Beyond the first ``rows`` rows of the whole tensor
    there is padding, which is left out.
    """
    boxes: dict[tuple[int, ...], torch.Tensor] = {}
    begin = 0
    for box in boxes_of_span(of.shape, start, stop):
        end = begin + math.prod(box.sizes)
        block = memory if memory.shape == box.sizes else memory[begin:end].view(box.sizes)
        for whole, first in of.in_whole(box):
            boxes[whole.offsets] = block if of.dim is None else block.narrow(of.dim, first, whole.sizes[of.dim])
        begin = end
    return boxes if rows is None else {at: box[: rows - at[0]] for at, box in boxes.items() if at[0] < rows}


# -- names of experts --------------------------------------------------------------------------------------------------


_EXPERT_NAME = re.compile(r"(?P<head>(?:.*\.)?deepspeed_experts)\.(?P<number>\d+|\*)\.(?P<tail>.+)")


def _expert(name: str) -> re.Match[str] | None:
    return _EXPERT_NAME.fullmatch(name) if "deepspeed_experts" in name else None


def head_of(name: str) -> str:
    """Return the prefix that all experts of a MoE layer share in their names; an empty string for other parameters."""
    found = _expert(name)
    return found["head"] if found is not None else ""


def number_of(name: str) -> int:
    """Return the number in the name of an expert's parameter."""
    found = _expert(name)
    assert found is not None
    return int(found["number"])


def numbered(name: str, number: int | str) -> str:
    """Return the name of the same parameter of another expert of the layer; other names as they are.

    >>> numbered("1.moe.deepspeed_moe.experts.deepspeed_experts.3.weight", 7)
    '1.moe.deepspeed_moe.experts.deepspeed_experts.7.weight'
    """
    found = _expert(name)
    return name if found is None else f"{found['head']}.{number}.{found['tail']}"


def starred(name: str) -> str:
    """Return a name that all experts of a layer have in common; the same one for other parameters."""
    return numbered(name, "*")


# -- tables ------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A parameter or buffer as a rank has it: whole, or a slice."""

    name: Text
    slice: Slice


class Part(NamedTuple):
    """Elements ``start:stop`` of a flattened piece, at ``offset`` of the tensors of a vector."""

    piece: Count
    start: Count
    stop: Count
    offset: Count


class Vector(NamedTuple):
    """Tensors of a file with the same parts: a weight, or a master weight and its states."""

    file: Text
    tensors: Mapping[Text, tuple[Path, Text]]
    """The path and the type of each tensor that has a value for each element, by key."""
    values: Mapping[Text, Path]
    """The path of each single value, by key."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Table(Saved):
    """The files that one rank wrote."""

    model_rank: Count
    pieces: tuple[Piece, ...]
    vectors: tuple[Vector, ...]

    def described(self, path: str, names: Iterable[str], partition: tuple[int, int]) -> SavedTable:
        """Return what the manifest says of the table in the file ``path``.

        Of ``names``, those of the model rank's parameters, one stands for all experts of a layer.
        """
        names_held = {self.pieces[part.piece].name for vector in self.vectors for part in vector.parts}
        known = names_held.union(map(starred, names_held))
        rows = [at for at, name in enumerate(sorted(set(names))) if name in known]
        has_buffers = any(BUFFER in vector.tensors for vector in self.vectors)
        is_cut = partition[1] > 1 and all(
            start <= part.start and part.stop <= stop
            for vector in self.vectors
            for part in (vector.parts if BUFFER not in vector.tensors else ())
            for start, stop in (partition_of(self.pieces[part.piece].slice.numel, *partition),)
        )
        return SavedTable.of(path, self.model_rank, rows, has_buffers, partition if is_cut else (0, 1))

    def to_text(self) -> str:
        """Return the text of the table's file: names once, numbers in lists."""
        return json.dumps(vars(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str, where: str) -> Table:
        """Parse the text of a table's file, or raise DamagedCheckpointError."""
        try:
            found: Table = built_from(cls, text)
            for name, (shape, dim, slices, place, _) in found.pieces:
                if dim is not None and not (dim < len(shape) and place < slices):
                    raise ValueError(f"slice {place} of {slices} along {dim} of {name!r} is impossible")
            sizes = [piece.slice.numel for piece in found.pieces]
            for part in (part for vector in found.vectors for part in vector.parts):
                if part.piece >= len(sizes) or not part.start <= part.stop <= sizes[part.piece]:
                    raise ValueError("a part lies outside of its parameter")
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{where}: {type(error).__name__}: {error}") from None
        return found


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

    def parts(self, pieces: Sequence[Piece], numel: int, *, is_by_parameter: bool = False) -> Iterator[Part]:
        """Yield the parts that a partition of ``numel`` elements holds.

        With ``is_by_parameter``, ZeRO 3, each parameter is cut into partitions, and not the vector.
        """
        for number, begin in self.begins:
            size = pieces[number].slice.numel
            if is_by_parameter:
                (start, stop), offset = partition_of(size, self.partition, self.partitions), begin
            else:
                first = self.partition * numel
                start, stop = max(begin, first) - begin, min(begin + size, first + numel) - begin
                offset = begin + start - first
            if start < stop:
                yield Part(number, start, stop, offset)


class Partition(NamedTuple):
    """A rank's partition of a tensor that the optimizer steps on, and how much of it is in the rank's files."""

    name: Text
    """A parameter in the tensor; one that is split over slices, if there is one, which tells slices apart."""
    place: Count
    """The place of its slice."""
    number: Count
    """The number of the partition."""
    total: Count
    """The number of elements in all partitions."""
    written: Count
    """The number of elements in this rank's files; 0 if another rank writes the partition."""


def missing_elements(partitions: Iterable[Partition]) -> dict[str, tuple[int, int]]:
    """Return how many elements of a tensor no rank has written, and how many it has, by the name of a parameter in it.

    Partitions that several ranks have written count once.

    >>> missing_elements([Partition("weight", 0, 0, 10, 5), Partition("weight", 0, 1, 10, 0)])
    {'weight': (5, 10)}
    """
    totals, written = dict[tuple[str, int], int](), defaultdict[tuple[str, int], Counter[int]](Counter)
    for name, place, number, total, numel in partitions:
        totals[name, place] = total
        written[name, place] |= Counter({number: numel})
    missing = {tensor: total - written[tensor].total() for tensor, total in totals.items()}
    return {tensor[0]: (numel, totals[tensor]) for tensor, numel in missing.items() if numel > 0}


class FileRecorder:
    """A description of the files of one rank, which grows with each file.

    Args:
        model_rank: the rank's stage and slice.
        pieces: its parameters and buffers, by their names in the module.
        orders: the order of parameters in each tensor of the optimizer that it saves.
        buffers: the names, in the module, of what is a buffer.
        stacked: the pieces in which AutoEP stacks experts, by name.
        layers: the prefix of the names of each layer of a pipeline.
        partition: at ZeRO 3, the number of the rank's partition of each parameter, and of all partitions.
    """

    def __init__(
        self,
        model_rank: int,
        pieces: Mapping[str, Piece],
        orders: Sequence[Order],
        buffers: Iterable[str] = (),
        *,
        stacked: Iterable[str] = (),
        layers: Sequence[str] = (),
        partition: tuple[int, int] = (0, 1),
    ) -> None:
        self._model_rank, self._layers = model_rank, layers
        self.pieces = list(pieces.values())
        self._numbers = {name: number for number, name in enumerate(pieces)}
        self._by_whole_name = {piece.name: number for number, piece in enumerate(self.pieces)}
        self._buffers, self._stacked = {self._numbers[name] for name in buffers}, set(stacked)
        self.orders, self.partition = orders, partition
        self._vectors: list[Vector] = []
        self._written = Counter[int]()
        """The number of elements in the files, by the number of the order."""
        self._is_known = True
        """False if a file has partitions in a form that is not described."""

    def partitions(self) -> list[Partition] | None:
        """Return this rank's partitions of the optimizer's tensors; None if it is unknown what the files have."""
        found = []
        for number, order in enumerate(self.orders if self._is_known else ()):
            pieces = [self.pieces[piece] for piece, _ in order.begins]
            if pieces and order.partitions > 1:
                name, of = next((one for one in pieces if one.slice.dim is not None), pieces[0])
                total = sum(one.slice.numel for one in pieces)
                found.append(Partition(name, of.place, order.partition, total, self._written[number]))
        return found if self._is_known else None

    def table(self) -> Table:
        """Return the description, with the pieces of which the files have a part."""
        used = sorted({part.piece for vector in self._vectors for part in vector.parts})
        numbers = {piece: number for number, piece in enumerate(used)}
        vectors = [
            one._replace(parts=tuple([part._replace(piece=numbers[part.piece]) for part in one.parts]))
            for one in self._vectors
        ]
        return Table(self._model_rank, tuple([self.pieces[number] for number in used]), tuple(vectors))

    def describe(self, content: Any, file: str) -> None:
        """Add a file with its content; ``file`` is its path in the checkpoint's folder."""
        if not isinstance(content, Mapping):
            return
        if layer := re.fullmatch(r"layer_(\d+)-.*model_states\.pt", file):
            self._add_state_dict(content, file, (), self._layers[int(layer[1])])
        elif file.startswith("layer_") and "_expert_" in file:
            self._add_experts(content, file)
        else:
            if isinstance(content.get("module"), Mapping):
                self._add_state_dict(content["module"], file, ("module",), "")
            for name, tensor in (content.get(_FRAGMENTS) or {}).items():
                number = self._numbers[name]
                start, stop = partition_of(self.pieces[number].slice.numel, *self.partition)
                if start < stop:
                    self._add(file, (Part(number, start, stop, 0),), {WEIGHT: ((_FRAGMENTS, name), tensor)})
            if isinstance(content.get(_STATES), Mapping):
                self._add_partition(content[_STATES], file)
            if isinstance(content.get("optimizer"), Mapping):
                self._add_optimizer(content["optimizer"], file)

    def _add_state_dict(self, content: Mapping[str, Any], file: str, path: Path, prefix: str) -> None:
        for key, value in content.items():
            number = self._numbers.get(f"{prefix}{key}")
            if number is not None and torch.is_tensor(value) and value.numel() == self.pieces[number].slice.numel:
                self._add_whole(number, value, file, (*path, key))

    def _add_experts(self, content: Mapping[str, Any], file: str) -> None:
        for name, value in content.items():
            stack, _, at = name.rpartition(".")
            if stack in self._stacked and at.isdecimal():
                whole = self.pieces[stacked := self._numbers[stack]].slice
                numel, own = whole.numel // whole.shape[0], int(at) - whole.place * whole.shape[0]
                self._add(file, (Part(stacked, own * numel, (own + 1) * numel, 0),), {WEIGHT: ((name,), value)})
            elif (number := self._by_whole_name.get(name)) is not None and torch.is_tensor(value):
                self._add_whole(number, value, file, (name,))

    def _add_whole(self, number: int, value: torch.Tensor, file: str, path: Path) -> None:
        key = BUFFER if number in self._buffers else WEIGHT
        self._add(file, (Part(number, 0, self.pieces[number].slice.numel, 0),), {key: (path, value)})

    def _add_partition(self, saved: Mapping[str, Any], file: str) -> None:
        is_stage_3 = _STAGE_3 in saved
        inner, of_masters = saved[_STATES if is_stage_3 else _BASE], _STAGE_3 if is_stage_3 else _STAGE_12
        if not isinstance(inner, Mapping):
            self._is_known = False  # elastic_checkpoint
            return
        path: Path = (_STATES, _STATES if is_stage_3 else _BASE)
        for number, (order, master) in enumerate(zip(self.orders, saved[of_masters], strict=True)):
            numel = master.numel()
            if not is_stage_3 and "zero_stage" in saved:  # BF16_Optimizer keeps the padding
                numel += int(saved[_PADDINGS][number])
            parts = tuple(order.parts(self.pieces, numel, is_by_parameter=is_stage_3) if master.numel() else ())
            masters: dict[str, tuple[Path, Any]] = {MASTER: ((_STATES, of_masters, number), master)}
            self._written[number] += sum(part.stop - part.start for part in parts)
            self._add_states(file, parts, masters, inner, path, number, numel)

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
            numel = max((begin + self.pieces[piece].slice.numel for piece, begin in order.begins), default=0)
            parts = tuple(order.parts(self.pieces, numel))
            own = {MASTER: masters[number]} if masters else {}
            self._add_states(file, parts, own, inner, path, number, numel)

    def _add_states(
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
            self._add(file, parts, tensors, values)

    def _add(
        self,
        file: str,
        parts: tuple[Part, ...],
        tensors: Mapping[str, tuple[Path, torch.Tensor]],
        values: dict[str, Path] | None = None,
    ) -> None:
        of_keys = {key: (path, name_of_type(value.dtype)) for key, (path, value) in tensors.items()}
        self._vectors.append(Vector(file, of_keys, values or {}, parts))


@cache
def name_of_type(dtype: torch.dtype) -> str:
    """Return the name of a data type, without its module."""
    return str(dtype).removeprefix("torch.")
