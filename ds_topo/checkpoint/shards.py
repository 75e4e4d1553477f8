"""Locate the parts of whole parameters: boxes, and slices of tensor parallelism.

A *slice* is the part of a parameter that one tensor-parallel rank holds. A *span* is a run of elements of a flattened
slice; ZeRO cuts vectors into spans. A *box* is a range along every dimension of the whole parameter.

:func:`boxes_of_span` and :class:`Slice` translate spans into boxes. :class:`PartOfTensor` presents the boxes of this
process to ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

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


def boxes_of(own: Slice, start: int, stop: int) -> Iterator[Box]:
    """Yield the elements ``start:stop`` of a flattened slice as boxes of the whole tensor, in the order of storage.

    A box of the slice that is several boxes of the whole one is cut along the dimensions before it, so that the
    elements of each of them are adjacent.

    >>> for box in boxes_of(Slice((2, 4), dim=1, slices=2, place=1, stride=2), 0, 8):
    ...     print(box)
    Box(offsets=(0, 2), sizes=(1, 2))
    Box(offsets=(0, 6), sizes=(1, 2))
    Box(offsets=(1, 2), sizes=(1, 2))
    Box(offsets=(1, 6), sizes=(1, 2))
    """
    for box in boxes_of_span(own.shape, start, stop):
        found = [one for one, _ in own.in_whole(box)]
        if len(found) == 1 or own.dim in (None, 0):
            yield from found
            continue
        outer = box.sizes[: own.dim]
        for number in range(math.prod(outer)):
            digits = []
            for size in reversed(outer):
                number, digit = divmod(number, size)
                digits.append(digit)
            for one in found:
                first = [start + digit for start, digit in zip(box.offsets, reversed(digits), strict=False)]
                yield Box((*first, *one.offsets[len(outer) :]), (*(1 for _ in outer), *one.sizes[len(outer) :]))


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
    return PartOfTensor(of.whole_shape, boxes_in(memory, of, start, stop), memory, is_written)


def boxes_in(memory: torch.Tensor, of: Slice, start: int, stop: int) -> dict[tuple[int, ...], torch.Tensor]:
    """Return views of the elements ``start:stop`` of a slice, by their offsets in the whole tensor.

    Args:
        memory: the elements, ``[stop - start]``; or the whole slice, in its shape.
        of: the slice.
        start: first element of the flattened slice.
        stop: end of the elements, exclusive.
    """
    boxes: dict[tuple[int, ...], torch.Tensor] = {}
    begin = 0
    for box in boxes_of_span(of.shape, start, stop):
        end = begin + math.prod(box.sizes)
        block = memory if memory.shape == box.sizes else memory[begin:end].view(box.sizes)
        for whole, first in of.in_whole(box):
            boxes[whole.offsets] = block if of.dim is None else block.narrow(of.dim, first, whole.sizes[of.dim])
        begin = end
    return boxes
