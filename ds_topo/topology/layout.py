"""Map ranks to coordinates and back in closed form, without a table of the whole world.

A layout gives every axis a list of *factors*, pairs ``(size, stride)``, outermost first. With coordinate ``c`` split
into mixed-radix digits ``c_f`` over the factors of its axis,

    rank = sum over all axes and factors f of  c_f * stride_f

A plain axis has one factor, and an axis of degree 1 has none. An axis into which several others were folded has one per
separate stride. Every query costs O(number of factors), for any world size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

from ds_topo.errors import TopologyError

Factors: TypeAlias = tuple[tuple[int, int], ...]
"""``((size, stride), ...)`` of one axis, outermost first."""


@dataclass(frozen=True)
class Layout:
    """A bijection between ranks ``0 .. size - 1`` and coordinates.

    Layouts are canonical: construction drops factors of size 1 and merges contiguous ones, so that layouts with equal
    mappings are equal and have equal hashes.

    Args:
        axes: the factors of each axis.

    Raises:
        TopologyError: a rank would have no coordinate, or more than one.

    >>> layout = Layout.row_major((2, 3))
    >>> layout.rank_of((1, 2)), layout.coordinate_of(5)
    (5, (1, 2))
    >>> layout.fold([(1,), (0,)]).coordinate_of(5)
    (2, 1)
    >>> Layout.row_major((2, 3, 4)).fold([(0,), (1, 2)]) == Layout.row_major((2, 12))
    True
    """

    axes: tuple[Factors, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(_merged(factors) for factors in self.axes))
        covered = 1
        for size, stride in sorted((factor for factors in self.axes for factor in factors), key=_by_stride):
            if stride != covered or size < 1:
                raise TopologyError(
                    f"layout {self.axes}: a factor has size {size} and stride {stride}, but the smaller factors cover "
                    f"{covered} ranks: sizes must be >= 1, and each stride the product of all smaller factors' sizes"
                )
            covered *= size

    @classmethod
    def row_major(cls, sizes: Sequence[int]) -> Layout:
        """Return the layout of a C array of shape ``sizes``, in which ranks along the last axis are adjacent.

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

    @property
    def is_row_major(self) -> bool:
        """True if the sizes alone determine the mapping."""
        return self == Layout.row_major(self.sizes)

    def rank_of(self, coordinate: Sequence[int]) -> int:
        """Return the rank at ``coordinate``, one index per axis; indices must be in range."""
        return sum(offset_at(index, factors) for factors, index in zip(self.axes, coordinate, strict=True))

    def coordinate_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of ``rank``, one index per axis; ``rank`` must be in range."""
        return tuple(index_along(rank, factors) for factors in self.axes)

    def index_of(self, rank: int, axis: int) -> int:
        """Return the index of ``rank`` along one axis."""
        return index_along(rank, self.axes[axis])

    def offsets(self, axes: Iterable[int]) -> list[int]:
        """Return the distances from coordinate 0 to every coordinate of these axes, the last axis fastest.

        >>> Layout.row_major((2, 3)).offsets([0]), Layout.row_major((2, 3)).offsets([1, 0])
        ([0, 3], [0, 3, 1, 4, 2, 5])
        """
        return offsets_of([factor for axis in axes for factor in self.axes[axis]])

    def span(self, axes: Iterable[int]) -> Factors:
        """Return several axes as one along which ranks ascend, the order in which torch numbers the ranks of a group.

        >>> Layout.row_major((2, 3, 4)).span([2, 0]), Layout.row_major((2, 3, 4)).span([2, 1])
        (((2, 12), (4, 1)), ((12, 1),))
        """
        factors = (factor for axis in axes for factor in self.axes[axis])
        return _merged(sorted(factors, key=_by_stride, reverse=True))

    def fold(self, groups: Sequence[Sequence[int]]) -> Layout:
        """Fold each group of axes into one axis; within a group the first axis is the slowest."""
        return Layout(tuple(tuple(factor for axis in group for factor in self.axes[axis]) for group in groups))


def index_along(rank: int, factors: Factors) -> int:
    """Return the index of ``rank`` along an axis with these factors.

    >>> [index_along(rank, ((2, 12), (4, 1))) for rank in (0, 3, 4, 15)]
    [0, 3, 0, 7]
    """
    index = 0
    for size, stride in factors:
        index = index * size + rank // stride % size
    return index


def offset_at(index: int, factors: Factors) -> int:
    """Return the distance from index 0 to ``index`` along an axis with these factors; invert ``index_along``.

    >>> [offset_at(index, ((2, 12), (4, 1))) for index in (0, 3, 4, 7)]
    [0, 3, 12, 15]
    """
    if len(factors) == 1:
        return index * factors[0][1]
    offset = 0
    for size, stride in reversed(factors):
        index, digit = divmod(index, size)
        offset += digit * stride
    return offset


def offsets_of(factors: Iterable[tuple[int, int]]) -> list[int]:
    """Return ``offset_at`` of every index, the last factor fastest."""
    offsets = [0]
    for size, stride in factors:
        offsets = [base + step for base in offsets for step in range(0, size * stride, stride)]
    return offsets


def _by_stride(factor: tuple[int, int]) -> int:
    return factor[1]


def _merged(factors: Iterable[tuple[int, int]]) -> Factors:
    """Return the fewest factors that give the same coordinates.

    >>> _merged([(2, 8), (4, 2), (1, 1), (2, 1)])
    ((16, 1),)
    """
    merged: list[tuple[int, int]] = []
    for size, stride in factors:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)
