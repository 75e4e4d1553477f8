"""Locate the parts of whole parameters: boxes, slices of tensor parallelism and partitions of ZeRO.

A *slice* is the part of a parameter that one tensor-parallel rank holds. A *span* is a run of elements of a flattened
slice; ZeRO cuts vectors into spans. A *box* is a range along every dimension of the whole parameter.

:func:`boxes_of_span` and :class:`Slice` translate spans into boxes. :func:`vectors_of` lays out parameters as a
:class:`FlatGroup` (ZeRO 1 and 2) or :class:`PartitionedGroup` (ZeRO 3, and without ZeRO), which compute the spans of
each partition as DeepSpeed does.
:func:`elements_of_slice` reads a slice out of slices of another degree. :class:`PartOfTensor` presents the boxes of
this process to ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from ds_topo.checkpoint.manifest import BF16_OPTIMIZER, SavedLayout, SavedOptions

if TYPE_CHECKING:  # with DTensor and SymPy behind them, they take a third of the start of the commands
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


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


@dataclass(frozen=True)
class Slice:
    """A slice of a tensor, one of several; the whole tensor if ``dim`` is None.

    The tensor has ``stride * slices`` equal pieces along ``dim``. The slice at ``place`` holds every ``slices``-th
    piece, starting with piece ``place``.

    >>> Slice((4, 3), dim=0, slices=2, place=1, stride=2).whole_shape
    (8, 3)

    Source: Megatron-LM, ``_initialize_affine_weight_cpu`` (``partition_dim`` and ``partition_stride``).
    """

    shape: tuple[int, ...]
    """Shape of the slice."""
    dim: int | None = None
    slices: int = 1
    place: int = 0
    stride: int = 1

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


def elements_of_slice(
    read: Callable[[int, int, int], torch.Tensor], wanted: Slice, slices: int, start: int, stop: int
) -> torch.Tensor:
    """Return the elements ``start:stop`` of the flattened slice ``wanted``, read from slices of another degree.

    >>> halves = [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])]  # two pieces each
    >>> read = lambda number, start, stop: halves[number][start:stop]
    >>> quarters = [Slice((2,), dim=0, slices=4, place=place, stride=2) for place in range(4)]
    >>> [elements_of_slice(read, quarter, 2, 0, 2).tolist() for quarter in quarters]
    [[0, 4], [1, 5], [2, 6], [3, 7]]

    Args:
        read: returns a span of one of the existing slices, flat. Its arguments are the slice's number, start and stop.
        wanted: slice to assemble; ``dim`` is not None.
        slices: number of existing slices.
        start: first element.
        stop: end of the elements, exclusive.
    """
    assert wanted.dim is not None
    size = wanted.shape[wanted.dim] * wanted.slices // slices  # of an existing slice along dim
    inner = math.prod(wanted.shape[wanted.dim + 1 :])
    runs = [(number, low * inner, high * inner) for number, low, high in _runs(wanted, slices, size // wanted.stride)]
    if wanted.dim == 0:
        return torch.cat([read(*run) for run in _cut(runs, start, stop)] or [read(0, 0, 1)[:0]])
    width, row = wanted.shape[wanted.dim] * inner, size * inner
    top, bottom = start // width, -(-stop // width)
    rows = {number: read(number, top * row, bottom * row).view(-1, row) for number in {number for number, *_ in runs}}
    together = torch.cat([rows[number][:, low:high] for number, low, high in runs], 1)
    return together.reshape(-1)[start - top * width : stop - top * width]


def resliced(values: Sequence[torch.Tensor], dim: int, stride: int, slices: int, place: int) -> torch.Tensor:
    """Return a slice of a tensor, one of ``slices``, from all of its slices of another degree.

    >>> resliced([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])], 0, 2, 4, 2)
    tensor([2, 6])
    """
    together = torch.cat([one.unflatten(dim, (stride, -1)) for one in values], dim + 1)
    pieces: torch.Tensor = together.unflatten(dim + 1, (slices, -1))
    return pieces.select(dim + 1, place).flatten(dim, dim + 1)


def _runs(wanted: Slice, slices: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield (slice, start, stop) along ``dim`` for what ``wanted`` needs of slices whose pieces have ``length``."""
    own = length * slices // wanted.slices
    for piece in range(wanted.stride):
        begin = (piece * wanted.slices + wanted.place) * own
        end = begin + own
        while begin < end:
            number, offset = divmod(begin, length)
            until = min(end, (number + 1) * length)
            low = number // slices * length + offset
            yield number % slices, low, low + until - begin
            begin = until


def _cut(runs: Sequence[tuple[int, int, int]], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the part of consecutive runs that lies in ``start:stop``."""
    position = 0
    for number, low, high in runs:
        first, last = max(start, position), min(stop, position + high - low)
        if first < last:
            yield number, low + first - position, low + last - position
        position += high - low


class Span(NamedTuple):
    """Elements ``start:stop`` of a parameter, stored at ``offset`` of a partition."""

    name: str
    offset: int
    start: int
    stop: int


class FlatGroup:
    """Parameters joined into one vector, which is cut into equal partitions (ZeRO 1 and 2).

    >>> group = FlatGroup({"weight": 6, "bias": 3}, replicas=2)
    >>> group.partition_numel, group.spans(1), group.padding(1)
    (6, [Span(name='bias', offset=0, start=0, stop=3)], 3)

    Args:
        numels: number of elements of each parameter, in the optimizer's order.
        replicas: ranks that share the vector.
        round_robin: value of ``zero_optimization.round_robin_gradients``.
        alignment: parameters start at multiples of so many elements.

    Source: the constructor of ``DeepSpeedZeroOptimizer``.
    """

    _START_ALIGNMENT: ClassVar[int] = 2
    """Elements to which partitions are aligned: DeepSpeed's ``nccl_start_alignment_factor``."""

    def __init__(
        self, numels: Mapping[str, int], replicas: int, *, round_robin: bool = False, alignment: int = 1
    ) -> None:
        names = list(numels)
        if round_robin:
            names = [name for first in range(min(replicas, len(names))) for name in names[first::replicas]]
        self.numels = {name: numels[name] for name in names}
        self.replicas = replicas
        self.paddings: list[int] = []
        """Elements of padding after each parameter."""
        self._begins: list[int] = []
        end = 0
        for name, numel in self.numels.items():
            self._begins.append(end)
            self.paddings.append(0 if name == names[-1] else -(end + numel) % alignment)
            end += numel + self.paddings[-1]
        self.numel = end
        """Elements of the vector, with the paddings between parameters."""
        self.partition_numel = -(-end // (self._START_ALIGNMENT * replicas)) * self._START_ALIGNMENT

    def padding(self, replica: int) -> int:
        """Return the number of elements at the end of a partition that belong to no parameter."""
        return min(self.partition_numel, max(0, (replica + 1) * self.partition_numel - self.numel))

    def spans(self, replica: int) -> list[Span]:
        """List what a partition holds."""
        first, last = replica * self.partition_numel, (replica + 1) * self.partition_numel
        low, high = max(0, bisect_right(self._begins, first) - 1), bisect_left(self._begins, last)
        found = []
        for name, begin in zip(list(self.numels)[low:high], self._begins[low:high], strict=True):
            start, stop = max(begin, first), min(begin + self.numels[name], last)
            if start < stop:
                found.append(Span(name, start - first, start - begin, stop - begin))
        return found


@dataclass(frozen=True)
class PartitionedGroup:
    """Parameters that are each cut into as many parts as there are replicas: a sub-group of ZeRO 3.

    With one replica they are whole, one after the other, as in an optimizer without ZeRO.

    >>> group = PartitionedGroup({"weight": 5, "bias": 2}, replicas=2)
    >>> group.partition_numel, group.spans(1)
    (4, [Span(name='weight', offset=0, start=3, stop=5), Span(name='bias', offset=3, start=1, stop=2)])

    Source: ``DeepSpeedZeroOptimizer_Stage3`` and ``zero.Init``.
    """

    numels: Mapping[str, int]
    replicas: int

    @property
    def partition_numel(self) -> int:
        """The number of elements of every partition."""
        return sum(-(-numel // self.replicas) for numel in self.numels.values())

    def spans(self, replica: int) -> list[Span]:
        """List what a partition holds."""
        found, offset = [], 0
        for name, numel in self.numels.items():
            part = -(-numel // self.replicas)
            start, stop = min(numel, replica * part), min(numel, (replica + 1) * part)
            if start < stop:
                found.append(Span(name, offset, start, stop))
            offset += part
        return found


def in_sub_groups(numels: Mapping[str, int], replicas: int, limit: int) -> list[PartitionedGroup]:
    """Split a group of ZeRO 3 into sub-groups of about ``limit`` elements of a partition.

    >>> [list(group.numels) for group in in_sub_groups({"a": 4, "b": 4, "c": 4}, 2, 3)]
    [['a', 'b'], ['c']]

    Source: ``DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups``.
    """
    if limit >= PartitionedGroup(numels, replicas).partition_numel:
        return [PartitionedGroup(numels, replicas)]
    groups: list[dict[str, int]] = [{}]
    held = 0
    for name, numel in numels.items():
        if held >= limit:
            groups.append({})
            held = 0
        groups[-1][name] = numel
        held += -(-numel // replicas)
    return [PartitionedGroup(group, replicas) for group in groups]


FLAT_OPTIMIZER = "FP16_Optimizer"
"""DeepSpeed's optimizer for half precision without ZeRO that joins the parameters of a group into one vector."""
_ALIGNED_BYTES = 16
"""Bytes to whose multiples ``zero_optimization.parameter_alignment`` aligns parameters."""


def vectors_of(
    numels: Mapping[str, int], layout: SavedLayout, options: SavedOptions, replicas: int, itemsize: int
) -> Sequence[FlatGroup | PartitionedGroup]:
    """Return the vectors of one group of the optimizer: without ZeRO one for each parameter, or one in half precision.

    Args:
        numels: number of elements of each parameter, in the optimizer's order.
        layout: the job's layout.
        options: its options of ZeRO.
        replicas: ranks that share the group.
        itemsize: bytes of an element of a parameter.
    """
    if not layout.has_partitions:
        of_vectors = [numels] if layout.optimizer == FLAT_OPTIMIZER else [{name: numels[name]} for name in numels]
        return [PartitionedGroup(of_vector, 1) for of_vector in of_vectors]
    if layout.zero_stage == 3:
        return in_sub_groups(numels, replicas, options.sub_group_size)
    if layout.optimizer == BF16_OPTIMIZER:  # it ignores them
        options = SavedOptions()
    alignment = _ALIGNED_BYTES // math.gcd(_ALIGNED_BYTES, itemsize) if options.parameter_alignment else 1
    return [FlatGroup(numels, replicas, round_robin=options.round_robin_gradients, alignment=alignment)]


_ATEN = torch.ops.aten


class PartOfTensor(torch.Tensor):
    """The boxes of a tensor that this process holds, with the shape of the whole tensor.

    ``torch.distributed.checkpoint`` writes and reads it like a ``DTensor``, through three methods that it looks for on
    tensors. Nothing is gathered or copied, and a reader gets only the boxes that it needs.

    Args:
        shape: shape of the whole tensor.
        boxes: memory of each box, by its offsets in the whole tensor. They are views, read and written in place.
        like: a tensor with the data type and the device of all boxes.
        is_written: whether this process saves the boxes. If not, another process that holds them does.

    >>> memory = torch.arange(5.0)
    >>> part = part_of(memory, Slice((3, 4)), 2, 7)
    >>> part.shape, part.boxes
    (torch.Size([3, 4]), {(0, 2): tensor([[0., 1.]]), (1, 0): tensor([[2., 3., 4.]])})

    Source: torch, ``distributed/_checkpointable.py`` (the methods) and ``distributed/tensor/_shards_wrapper.py``
    (a tensor in several boxes).
    """

    boxes: dict[tuple[int, ...], torch.Tensor]
    is_written: bool

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        boxes: Mapping[tuple[int, ...], torch.Tensor],
        like: torch.Tensor,
        is_written: bool = True,
    ) -> PartOfTensor:
        self: PartOfTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=like.dtype, device=like.device
        )
        self.boxes, self.is_written = dict(boxes), is_written
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartOfTensor({list(self.shape)}, {len(self.boxes)} boxes here)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PartOfTensor, (tuple(self.shape), self.boxes, torch.empty(0, dtype=self.dtype), self.is_written)

    # The methods that torch.distributed.checkpoint calls.

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self.is_written:
            return []
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(memory), size=self.shape
                ),
            )
            for chunk, memory in zip(self.__create_chunk_list__(), self.boxes.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), memory.shape) for offsets, memory in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.boxes[tuple(index.offset)]

    # Torch's stagers copy the boxes to host memory by these operations while training continues.

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        part = next(value for value in args if isinstance(value, PartOfTensor))
        device = (kwargs or {}).get("device") or part.device
        if function is _ATEN.new_empty.default:  # the stager copies the attribute boxes itself
            return cls(part.shape, {}, torch.empty(0, dtype=part.dtype, device=device), part.is_written)
        if function in (_ATEN.zeros_like.default, _ATEN.empty_like.default):
            return part._each(lambda memory: torch.empty_like(memory, device=device))
        if function in (_ATEN.detach.default, _ATEN.clone.default):
            return part._each(function)
        if function is _ATEN.copy_.default:
            target, source = args[:2]  # of the same boxes; or into a plain tensor of a single number
            into = target.boxes if isinstance(target, PartOfTensor) else {(0,) * target.dim(): target}
            assert into.keys() == source.boxes.keys()
            for offsets, memory in source.boxes.items():
                into[offsets].copy_(memory)
            return target
        raise NotImplementedError(  # Python's operators would replace a TypeError by one that says nothing
            f"{function}: {part!r} does not support this operation. It holds boxes of a tensor and can be saved and "
            "loaded by torch.distributed.checkpoint only. Compute with the engine's own tensors instead"
        )

    def _each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PartOfTensor:
        boxes = {offsets: function(memory) for offsets, memory in self.boxes.items()}
        like = next(iter(boxes.values()), torch.empty(0, dtype=self.dtype, device=self.device))
        return PartOfTensor(self.shape, boxes, like, self.is_written)


def part_of(memory: torch.Tensor, of: Slice, start: int, stop: int, is_written: bool = True) -> PartOfTensor:
    """Present the elements ``start:stop`` of a slice as a part of the whole tensor.

    Args:
        memory: the elements, ``[stop - start]``; or the whole slice, in its shape.
        of: the slice.
        start: first element of the flattened slice.
        stop: end of the elements, exclusive.
        is_written: whether this process saves them.
    """
    boxes: dict[tuple[int, ...], torch.Tensor] = {}
    begin = 0
    for box in boxes_of_span(of.shape, start, stop):
        end = begin + math.prod(box.sizes)
        block = memory if memory.shape == box.sizes else memory[begin:end].view(box.sizes)
        for whole, first in of.in_whole(box):
            boxes[whole.offsets] = block if of.dim is None else block.narrow(of.dim, first, whole.sizes[of.dim])
        begin = end
    return PartOfTensor(of.whole_shape, boxes, memory, is_written)
