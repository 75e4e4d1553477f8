"""Map ranks to coordinates along named axes, in any order, in closed form.

The order of axes is the order of placement. Peers along the first, outermost axis are furthest apart, on different
hosts. Peers along the last, innermost axis are adjacent ranks.

A layout gives every axis a list of *factors*, pairs ``(size, stride)``, outermost first. With coordinate ``c`` split
into mixed-radix digits ``c_f`` over the factors of its axis,

    rank = sum over all axes and factors f of  c_f * stride_f

A plain axis has one factor, and an axis of degree 1 has none. An axis into which several others were folded has one per
separate stride. Every query costs O(number of factors), for any world size.
"""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

from ds_topo.errors import CoordinateError, TopologyError, UnknownAxisError, abridged
from ds_topo.topology.axes import (
    Factors,
    Spec,
    canonical_axis,
    check_axes,
    check_declared,
    check_world_size,
    leaves_out_a_degree,
    parse_spec,
    read_config,
    spec_text,
    warn_of_misspelling,
    whole_number,
)

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]


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
        for size, stride in sorted((factor for factors in self.axes for factor in factors), key=itemgetter(1)):
            if stride != covered or size < 1:
                raise TopologyError(
                    f"layout {self.axes}: a factor has size {size} and stride {stride}, but the smaller factors cover "
                    f"{covered} ranks: sizes must be >= 1, and each stride the product of all smaller factors' sizes"
                )
            covered *= size

    @classmethod
    def row_major(cls, sizes: Sequence[int]) -> Layout:
        """Return the layout of a C array of shape ``sizes``, in which ranks along the last axis are adjacent."""
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
        return _merged(sorted(factors, key=itemgetter(1), reverse=True))

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
    """Return the distance from index 0 to ``index`` along an axis with these factors; invert ``index_along``."""
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


def _merged(factors: Iterable[tuple[int, int]]) -> Factors:
    """Return the fewest factors that give the same coordinates."""
    merged: list[tuple[int, int]] = []
    for size, stride in factors:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


@lru_cache(maxsize=256)
def coordinate_type(axes: tuple[str, ...]) -> type[Any]:
    """Return the type of coordinates along ``axes``: a picklable named tuple in which ``tensor`` is ``model``."""
    base = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
    members: dict[str, Any] = {
        "__slots__": (),
        "__reduce__": lambda self: (_coordinate, (axes, tuple(self))),
        "__module__": __name__,
    }
    if "model" in axes:
        members["tensor"] = property(lambda self: self.model, doc="The same as ``model``.")
    return type("ProcessCoord", (base,), members)


def _coordinate(axes: tuple[str, ...], values: tuple[int, ...]) -> Any:
    return coordinate_type(axes)(*values)


class ProcessTopology:
    """A mapping of n-dimensional coordinates, one axis per kind of parallelism, to ranks; the last axis is adjacent.

    It is a drop-in for ``deepspeed.runtime.pipe.topology.ProcessTopology``, with the same constructor, methods and
    results. It has no table: every query about one rank costs O(axes). Topologies are immutable and picklable, and
    compare and hash by value.

    Args:
        axes: the names of the axes, outermost first. ``tensor`` is a synonym of ``model``.
        dims: the degree of each axis, integers >= 1.

    Raises:
        TopologyError: an axis is malformed or given twice, or a degree is not a positive integer.

    >>> topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 4, 2])
    >>> topology
    ProcessTopology('pipe=2,data=4,model=2')
    >>> topology.get_coord(13)
    ProcessCoord(pipe=1, data=2, model=1)
    >>> topology.get_rank(pipe=1, data=2, model=1)
    13
    >>> topology.get_axis_comm_lists("pipe")[:3]
    [[0, 8], [1, 9], [2, 10]]
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        names, degrees = check_axes(axes, dims)
        self._set(names, Layout.row_major(degrees))

    def _set(self, names: tuple[str, ...], layout: Layout, extra_axes: frozenset[str] = frozenset()) -> None:
        self._axes = names
        self._extra_axes = extra_axes
        self._layout = layout
        self._position = {name: position for position, name in enumerate(names)}

    @property
    def ProcessCoord(self) -> type[Any]:  # noqa: N802
        """The type of the coordinates, a named tuple."""
        return coordinate_type(self._axes)

    @classmethod
    def from_spec(cls, spec: Spec, world_size: int | None = None) -> ProcessTopology:
        """Create a topology from text, pairs or a mapping; with ``world_size``, one degree may be -1.

        Raises:
            TopologyError: the spec is malformed.
            WorldSizeError: the product of the degrees is not ``world_size``. The message gives the nearest degrees.

        >>> ProcessTopology.from_spec("pipe=2,data=-1,tensor=2", world_size=16)
        ProcessTopology('pipe=2,data=4,model=2')
        >>> ProcessTopology.from_spec([("data", 2), ("pipe", 2)]) == ProcessTopology.from_spec({"data": 2, "pipe": 2})
        True
        """
        axes, degrees, extra_axes, factors = parse_spec(spec, world_size)
        layout = Layout.row_major(degrees) if factors is None else Layout(factors)
        return cls._laid_out(axes, layout).with_extra_axes(extra_axes)

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, object], world_size: int | None = None) -> ProcessTopology:
        """Create a topology from the ``"topology"`` section of a DeepSpeed config, given as a path or mapping.

        A degree of -1 is computed from ``world_size``, or from the ``WORLD_SIZE`` of the environment.

        >>> ProcessTopology.from_config({"train_batch_size": 8, "topology": "data=2,pipe=2"})
        ProcessTopology('data=2,pipe=2')

        Raises:
            TopologyError: the section is missing or malformed.
        """
        spec, launched = read_config(config), os.environ.get("WORLD_SIZE", "")
        if world_size is None and launched.isdecimal() and leaves_out_a_degree(spec):
            world_size = int(launched)
        return cls.from_spec(spec, world_size)

    # -- the topology as a whole ---------------------------------------------------------------------------------

    @property
    def axes(self) -> list[str]:
        """The names of the axes, outermost first."""
        return list(self._axes)

    @property
    def dims(self) -> list[int]:
        """The degrees, in the order of ``axes``."""
        return list(self._layout.sizes)

    @property
    def extra_axes(self) -> frozenset[str]:
        """The axes that are declared to be replicas without another meaning. Equality does not compare them."""
        return self._extra_axes

    def with_extra_axes(self, axes: Iterable[str]) -> ProcessTopology:
        """Return the same topology with these axes declared as extra axes, too.

        >>> ProcessTopology(["data", "copy"], [2, 2]).with_extra_axes(["copy"])
        ProcessTopology('data=2,+copy=2')

        Raises:
            TopologyError: an axis is not in the topology, or has a meaning.
        """
        declared = self._extra_axes.union([axes] if isinstance(axes, str) else axes)
        check_declared(self._axes, declared)
        if declared == self._extra_axes:
            return self
        return self._laid_out(self._axes, self._layout, declared)

    @property
    def layout(self) -> Layout:
        """The rank <-> coordinate arithmetic behind this topology."""
        return self._layout

    @cached_property
    def spec(self) -> str:
        """The topology as text for ``from_spec``, with strides where degrees do not determine it.

        >>> topology = ProcessTopology.from_spec("data=2,pipe=2,seq=2")
        >>> topology.spec, topology.fold({"pipe": ["pipe"], "data": ["data", "seq"]}).spec
        ('data=2,pipe=2,seq=2', 'pipe=2:2,data=2:4*2:1')
        """
        degrees: Sequence[object] = self._layout.sizes
        if not self._layout.is_row_major:
            strided = [[f"{size}:{stride}" for size, stride in factors] for factors in self._layout.axes]
            degrees = ["*".join(factors) or "1" for factors in strided]
        return spec_text(self._axes, degrees, self._extra_axes)

    @property
    def mapping(self) -> dict[Any, int]:
        """A new dict of all coordinates and their ranks; each access builds it in O(world size)."""
        ranks = range(self._layout.size)
        return dict(sorted(((self._coordinate_at(rank), rank) for rank in ranks), key=lambda item: tuple(item[0])))

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._layout.size

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, outermost first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the degree of an axis; 0 for an absent axis, as in DeepSpeed.

        >>> ProcessTopology(["data"], [4]).get_dim("pipe")
        0
        """
        position = self._position.get(canonical_axis(axis))
        if position is None:
            warn_of_misspelling(axis, self._axes)
            return 0
        return self._layout.sizes[position]

    # -- one rank, one coordinate --------------------------------------------------------------------------------

    def get_rank(self, **coordinate: int) -> int:
        """Return the rank at a coordinate; every axis must be given.

        Raises:
            UnknownAxisError: an axis that does not exist.
            TopologyError: an axis is missing.
            CoordinateError: an index out of range.
        """
        indices = self._indices(coordinate)
        missing = [axis for axis, position in self._position.items() if position not in indices]
        if missing:
            raise TopologyError(
                f"get_rank() needs one index for every axis of {self._axes}, {missing} missing; "
                "filter_match() takes some of them"
            )
        return self._layout.rank_of([self._checked(indices[position], position) for position in range(len(self._axes))])

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of ``rank``, a named tuple with one field per axis.

        Raises:
            TopologyError: a rank out of range.
        """
        return self._coordinate_at(self._checked(rank))

    def get_rank_repr(
        self, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return the coordinate of a rank as text for file names, without the axes in ``omit_axes``.

        >>> topology = ProcessTopology(["pipe", "data", "model"], [2, 2, 2])
        >>> topology.get_rank_repr(3), topology.get_rank_repr(3, omit_axes=["data"])
        ('model_01', 'pipe_00-model_01')
        """
        indices = self.get_coord(rank)._asdict()
        omitted = {canonical_axis(axis) for axis in omit_axes}
        return outer_sep.join(f"{axis}{inner_sep}{indices[axis]:02d}" for axis in indices if axis not in omitted)

    # -- sets of ranks -------------------------------------------------------------------------------------------

    def filter_match(self, **coordinate: int) -> list[int]:
        """Return the ranks, ascending, whose coordinate has all these indices; ``[]`` for an index out of range.

        >>> ProcessTopology(["pipe", "data", "model"], [2, 2, 2]).filter_match(pipe=0, model=1)
        [1, 3]

        Raises:
            UnknownAxisError: an axis that does not exist.
        """
        indices: dict[int, int] = {}
        for position, given in self._indices(coordinate).items():
            index = whole_number(given)
            if index is None or not 0 <= index < self._layout.sizes[position]:
                return []
            indices[position] = index
        base = self._layout.rank_of([indices.get(position, 0) for position in range(len(self._axes))])
        free = [position for position in range(len(self._axes)) if position not in indices]
        return sorted(base + offset for offset in self._layout.offsets(free))

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks, ascending, at index ``idx`` of ``axis``; ``[]`` for an index out of range.

        Raises:
            UnknownAxisError: an axis that does not exist.
        """
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str | Iterable[str]) -> list[list[int]]:
        """Return lists of the ranks that differ only along ``axis``, which may be one axis or several.

        With one axis the result is DeepSpeed's; with several, too, the ranks of a list ascend. An axis that the
        topology does not have gives ``[]``, as in DeepSpeed; among several axes an absent one has degree 1.

        >>> topology = ProcessTopology(["pipe", "data", "model"], [2, 2, 2])
        >>> topology.get_axis_comm_lists("data")
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        >>> topology.get_axis_comm_lists(("data", "model"))
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        """
        selected = self._positions([axis] if isinstance(axis, str) else axis)
        if not selected:
            if isinstance(axis, str):
                warn_of_misspelling(axis, self._axes)
            return []
        others = [position for position in range(len(self._axes)) if position not in selected]
        members = offsets_of(self._layout.span(selected))
        return [[base + offset for offset in members] for base in self._layout.offsets(others)]

    def get_axis_ranks(self, axis: str | Iterable[str], rank: int) -> list[int]:
        """Return the list of ``get_axis_comm_lists(axis)`` with ``rank`` in it, without building the others.

        >>> ProcessTopology(["pipe", "data", "model"], [2, 2, 2]).get_axis_ranks("data", rank=5)
        [5, 7]

        An axis that the topology does not have has degree 1: the list is ``[rank]``.
        """
        rank = self._checked(rank)
        span = self._span(axis)
        origin = rank - offset_at(index_along(rank, span), span)
        return [origin + offset for offset in offsets_of(span)]

    def get_axis_index(self, axis: str | Iterable[str], rank: int) -> int:
        """Return the position of ``rank`` in ``get_axis_ranks(axis, rank)``, without building that list.

        >>> ProcessTopology(["pipe", "data", "model"], [2, 2, 2]).get_axis_index(("pipe", "model"), rank=6)
        2
        """
        return index_along(self._checked(rank), self._span(axis))

    def get_axis_peer(self, axis: str | Iterable[str], rank: int, index: int) -> int:
        """Return ``get_axis_ranks(axis, rank)[index]`` without building that list; any ``index`` wraps around.

        >>> ProcessTopology(["pipe", "data", "model"], [2, 2, 2]).get_axis_peer(("pipe", "model"), rank=6, index=-1)
        7
        """
        rank = self._checked(rank)
        span = self._span(axis)
        wrapped = index % prod(size for size, _ in span)
        return rank - offset_at(index_along(rank, span), span) + offset_at(wrapped, span)

    # -- derived topologies --------------------------------------------------------------------------------------

    def fold(self, axes: Mapping[str, Sequence[str]]) -> ProcessTopology:
        """Fold axes: each new axis spans several old ones, outermost first. A new axis over none has degree 1.

        Every old axis must be named, in an order in which ranks ascend along the new axis: torch sorts the ranks of a
        group, so index and group rank would differ otherwise.

        >>> folded = ProcessTopology.from_spec("data=2,pipe=2,seq=2").fold({"pipe": ["pipe"], "data": ["data", "seq"]})
        >>> folded.get_axis_comm_lists("data")
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        groups = [[self._known_position(axis) for axis in olds] for olds in axes.values()]
        folded = sorted(position for group in groups for position in group)
        if folded != list(range(len(self._axes))):
            raise TopologyError(f"fold({dict(axes)}) must name each axis of {self._axes} exactly once")
        layout = self._layout.fold(groups)
        for (new, olds), factors in zip(axes.items(), layout.axes, strict=True):
            if not _ranks_ascend(factors):
                raise TopologyError(f"fold({new!r}: {list(olds)}) must name the axes of {self._axes} outermost first")
        return self._laid_out(axes, layout).with_extra_axes(self._extra_axes.intersection(axes))

    @classmethod
    def _laid_out(
        cls, axes: Iterable[str], layout: Layout, extra_axes: frozenset[str] = frozenset()
    ) -> ProcessTopology:
        """Create a topology of any layout in which ranks ascend along each axis."""
        names = tuple(axes)
        for axis, factors in zip(names, layout.axes, strict=True):
            if not _ranks_ascend(factors):
                raise TopologyError(f"axis {axis!r}: strides of {factors} must fall, so that ranks ascend along it")
        topology = ProcessTopology.__new__(ProcessTopology)
        topology._set(names, layout, extra_axes)
        return topology

    # -- value semantics -----------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessTopology):
            return NotImplemented
        return (self._axes, self._layout) == (other._axes, other._layout)

    def __hash__(self) -> int:
        return hash((self._axes, self._layout))

    def __repr__(self) -> str:
        return f"ProcessTopology({self.spec!r})"

    def __str__(self) -> str:
        """Return the mapping as text, as in DeepSpeed; abridged above 64 ranks."""
        if self._layout.size <= 64:
            return str(self.mapping)
        return f"{self!r} of {self._layout.size} ranks"

    # -- checks --------------------------------------------------------------------------------------------------

    def check_world_size(self, world_size: int) -> None:
        """Raise ``WorldSizeError``, with the nearest valid topology, unless this one has ``world_size`` ranks."""
        check_world_size(self._axes, self._layout.sizes, world_size, self._extra_axes)

    def get_data_parallel_world_size(self) -> int:
        """Refuse a topology that was passed as ``mpu=``, of which DeepSpeed asks this first, by a ``TypeError``."""
        raise TypeError(f"mpu={self!r}: DeepSpeed needs a live grid, such as PipelineParallelGrid({self.spec!r})")

    def _coordinate_at(self, rank: int) -> Any:
        return self.ProcessCoord._make(self._layout.coordinate_of(rank))

    def _positions(self, axes: Iterable[str]) -> list[int]:
        names = {canonical_axis(axis) for axis in axes}
        return [position for axis, position in self._position.items() if axis in names]

    def _span(self, axes: str | Iterable[str]) -> Factors:
        return self._layout.span(self._positions([axes] if isinstance(axes, str) else axes))

    def _known_position(self, axis: str) -> int:
        position = self._position.get(canonical_axis(axis))
        if position is None:
            raise UnknownAxisError(f"axis {axis!r} is not in the topology {self.spec!r}; its axes are {self._axes}")
        return position

    def _indices(self, coordinate: Mapping[str, int]) -> dict[int, int]:
        """Return the index at each axis position for a coordinate given by axis names."""
        indices = {self._known_position(axis): index for axis, index in coordinate.items()}
        if len(indices) < len(coordinate):
            raise TopologyError(f"coordinate {dict(coordinate)} names an axis twice ('tensor' is a synonym of 'model')")
        return indices

    def _checked(self, number: int, position: int | None = None) -> int:
        """Return a rank, or the index along the axis at a position, as an integer; raise if it is out of range."""
        whole, count = whole_number(number), self._layout.size if position is None else self._layout.sizes[position]
        if whole is None or not 0 <= whole < count:
            problem = "is not a whole number" if whole is None else "is out of range"
            if position is None:
                raise TopologyError(f"rank {abridged(number)} {problem}: {self.spec!r} has ranks 0 to {count - 1}")
            raise CoordinateError(
                f"index {abridged(number)} of axis {self._axes[position]!r} {problem}: {self.spec!r} has 0 to "
                f"{count - 1}"
            )
        return whole


def _ranks_ascend(factors: Factors) -> bool:
    strides = [stride for _, stride in factors]
    return strides == sorted(strides, reverse=True)


class PipeDataParallelTopology(ProcessTopology):
    """A topology with ``pipe`` outermost and ``data`` innermost, so that gradients use the fastest links.

    It is a drop-in for ``deepspeed.runtime.pipe.topology.PipeDataParallelTopology``.

    >>> PipeDataParallelTopology(num_pp=2, num_dp=4)
    ProcessTopology('pipe=2,data=4')
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A topology with ``pipe`` outermost, then ``data``, and ``model`` innermost.

    It is a drop-in for ``deepspeed.runtime.pipe.topology.PipeModelDataParallelTopology``.

    >>> PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=4)
    ProcessTopology('pipe=2,data=4,model=2')
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])
