"""Closed-form layouts: which rank sits at which coordinate, without a table of the whole world.

A layout gives every axis a list of *factors*, pairs ``(size, stride)``, outermost first. With coordinate ``c`` split
into mixed-radix digits ``c_f`` over the factors of its axis,

    rank = sum over all axes and factors f of  c_f * stride_f

A plain axis has one factor; an axis that several others were folded into has one factor for each of them. Every
question costs O(number of factors), whatever the world size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

Factors: TypeAlias = tuple[tuple[int, int], ...]
"""``((size, stride), ...)`` of one axis, outermost first."""


@dataclass(frozen=True)
class Layout:
    """A bijection between ranks ``0 .. size - 1`` and coordinates.

    >>> layout = Layout.row_major((2, 3))
    >>> layout.rank_of((1, 2)), layout.coordinate_of(5)
    (5, (1, 2))
    >>> layout.fold([(1,), (0,)]).coordinate_of(5)
    (2, 1)
    """

    axes: tuple[Factors, ...]

    @classmethod
    def row_major(cls, sizes: Sequence[int]) -> Layout:
        """The layout of a C array of shape ``sizes``: the last axis is adjacent.

        >>> Layout.row_major((2, 4, 2)).axes
        (((2, 8),), ((4, 2),), ((2, 1),))
        """
        return cls(tuple(((size, prod(sizes[axis + 1 :])),) for axis, size in enumerate(sizes)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of coordinates along each axis."""
        return tuple(prod(size for size, _ in factors) for factors in self.axes)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes)

    def rank_of(self, coordinate: Sequence[int]) -> int:
        """The rank at ``coordinate``, one index per axis; indices must be in range."""
        rank = 0
        for factors, index in zip(self.axes, coordinate, strict=True):
            if len(factors) == 1:
                rank += index * factors[0][1]
                continue
            for size, stride in reversed(factors):
                index, digit = divmod(index, size)
                rank += digit * stride
        return rank

    def coordinate_of(self, rank: int) -> tuple[int, ...]:
        """The coordinate of ``rank``, one index per axis; ``rank`` must be in range."""
        return tuple(self.index_of(rank, axis) for axis in range(len(self.axes)))

    def index_of(self, rank: int, axis: int) -> int:
        """The index of ``rank`` along one axis."""
        index = 0
        for size, stride in self.axes[axis]:
            index = index * size + rank // stride % size
        return index

    def offsets(self, axes: Iterable[int]) -> list[int]:
        """Distances from coordinate 0 to every coordinate of these axes, the last axis fastest.

        >>> Layout.row_major((2, 3)).offsets([0]), Layout.row_major((2, 3)).offsets([1, 0])
        ([0, 3], [0, 3, 1, 4, 2, 5])
        """
        offsets = [0]
        for axis in axes:
            for size, stride in self.axes[axis]:
                offsets = [base + step for base in offsets for step in range(0, size * stride, stride)]
        return offsets

    def fold(self, groups: Sequence[Sequence[int]]) -> Layout:
        """One axis for each group of axes; within a group the first axis is the slowest."""
        return Layout(tuple(tuple(factor for axis in group for factor in self.axes[axis]) for group in groups))
