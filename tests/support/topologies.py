"""Strategies of topologies and layouts for property tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import prod

from hypothesis import strategies as st

from ds_topo import ProcessTopology
from ds_topo.topology.process_topology import Layout

AXES = ("pipe", "data", "model", "seq")
ORDERS = [order for count in range(1, 5) for order in permutations(AXES, count)]
MAX_RANKS = 512


@st.composite
def named_degrees(
    draw: st.DrawFn, axes: Sequence[str] = AXES, max_ranks: int = MAX_RANKS
) -> tuple[list[str], list[int]]:
    """Draw one to four of the axes in any order, and degrees whose product is at most ``max_ranks``."""
    names = draw(st.lists(st.sampled_from(axes), min_size=1, max_size=4, unique=True))
    degrees: list[int] = []
    for _ in names:
        degrees.append(draw(st.integers(1, min(16, max_ranks // prod(degrees)))))
    return names, draw(st.permutations(degrees))


def topologies(axes: Sequence[str] = AXES, max_ranks: int = MAX_RANKS) -> st.SearchStrategy[ProcessTopology]:
    """Draw topologies of one to four of the axes in any order."""
    return named_degrees(axes, max_ranks).map(lambda named: ProcessTopology(*named))


@st.composite
def folded_topologies(draw: st.DrawFn) -> ProcessTopology:
    """Draw a topology with some axes joined, in any order of names."""
    ours = draw(topologies())
    groups: dict[str, list[str]] = {}
    for axis in ours.axes:
        groups.setdefault(draw(st.sampled_from(AXES)), []).append(axis)
    return ours.fold({name: groups[name] for name in draw(st.permutations(list(groups)))})


def sizes() -> st.SearchStrategy[list[int]]:
    """Draw the sizes of a few axes."""
    return named_degrees().map(lambda named: named[1])


@st.composite
def foldings(draw: st.DrawFn, axes: int) -> list[list[int]]:
    """Divide the axes into one or more groups, in any order."""
    order = draw(st.permutations(range(axes)))
    ends = sorted(draw(st.sets(st.integers(1, axes))) | {axes})
    return [list(order[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw a layout of a few axes, some of which may be several axes joined in any order."""
    plain = Layout.row_major(draw(sizes()))
    return plain.fold(draw(foldings(len(plain.axes))))
