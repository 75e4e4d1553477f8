"""A flat span of a slice of a tensor, as boxes of the whole tensor: arithmetic.

ZeRO deals out vectors, whose cuts fall anywhere in a tensor; torch's format knows boxes, a run of consecutive places in
every dimension. A span of a tensor of n dimensions is at most 2 n - 1 of them::

    . . . . . .
    . . . 1 1 1     a span of 14 elements of a tensor of 6 columns
    2 2 2 2 2 2
    3 3 3 3 3 .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)


class Piece(NamedTuple):
    """A box of a whole tensor, and where this process has it."""

    box: Box
    """Of the whole tensor."""
    start: int
    """Where the memory of :attr:`held` begins, in elements from the beginning of the span."""
    held: tuple[int, ...]
    """Sizes of the contiguous block of memory that the piece is a part of."""
    first: int
    """Along :attr:`Slice.dim`, where the piece begins in that block."""


def boxes_of_span(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements ``start:stop`` of a contiguous tensor, in their order.

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
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_span(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


@dataclass(frozen=True)
class Slice:
    """What one of several slices has of a tensor: of ``stride * slices`` equal pieces along ``dim`` every
    ``slices``-th, from the ``place``-th on; all of it where ``dim`` is None.

    >>> Slice((4, 3), dim=0, slices=2, place=1, stride=2).whole_shape
    (8, 3)
    """

    shape: tuple[int, ...]
    """Of the slice."""
    dim: int | None = None
    slices: int = 1
    place: int = 0
    stride: int = 1

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the tensor with all of its slices."""
        return tuple(size * self.slices if dim == self.dim else size for dim, size in enumerate(self.shape))

    @property
    def numel(self) -> int:
        """Elements of the slice."""
        return math.prod(self.shape)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The elements ``start:stop`` of the slice as boxes of the whole tensor.

        >>> for piece in Slice((4,), dim=0, slices=2, place=1, stride=2).pieces(1, 4):
        ...     print(piece)
        Piece(box=Box(offsets=(3,), sizes=(1,)), start=0, held=(3,), first=0)
        Piece(box=Box(offsets=(6,), sizes=(2,)), start=0, held=(3,), first=1)
        """
        begin = 0
        for box in boxes_of_span(self.shape, start, stop):
            yield from (Piece(of_whole, begin, box.sizes, first) for of_whole, first in self._in_whole(box))
            begin += box.numel

    def _in_whole(self, box: Box) -> Iterator[tuple[Box, int]]:
        """A box of the slice as boxes of the whole, each with where along ``dim`` it begins in the former."""
        if self.dim is None or self.slices == 1:
            yield box, 0
            return
        length, dim = self.shape[self.dim] // self.stride, self.dim
        begin, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        while begin < end:
            number = begin // length
            until = min(end, (number + 1) * length)
            there = begin + ((number * self.slices + self.place) - number) * length
            offsets = (*box.offsets[:dim], there, *box.offsets[dim + 1 :])
            sizes = (*box.sizes[:dim], until - begin, *box.sizes[dim + 1 :])
            yield Box(offsets, sizes), begin - box.offsets[dim]
            begin = until
