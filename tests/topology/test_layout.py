"""Layouts are bijections between ranks and coordinates, also after folding."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo.topology.process_topology import Layout, index_along
from tests.support.topologies import foldings, layouts, sizes

without_deadline = settings(deadline=None)


def coordinates_of(layout: Layout) -> list[tuple[int, ...]]:
    """Every coordinate, the last axis fastest."""
    return list(product(*map(range, layout.sizes)))


@without_deadline
@given(layouts())
def test_ranks_and_coordinates_are_a_bijection(layout: Layout) -> None:
    coordinates = coordinates_of(layout)
    ranks = [layout.rank_of(coordinate) for coordinate in coordinates]
    assert sorted(ranks) == list(range(layout.size))
    assert [layout.coordinate_of(rank) for rank in ranks] == coordinates
    for axis in range(len(layout.axes)):
        assert [index_along(rank, layout.axes[axis]) for rank in ranks] == [
            coordinate[axis] for coordinate in coordinates
        ]


@without_deadline
@given(sizes())
def test_row_major_is_numpys_order(shape: list[int]) -> None:
    layout = Layout.row_major(shape)
    assert (layout.sizes, layout.size) == (tuple(shape), prod(shape))
    table = np.arange(layout.size).reshape(shape)
    assert all(layout.rank_of(coordinate) == table[coordinate] for coordinate in coordinates_of(layout))


@without_deadline
@given(sizes(), st.data())
def test_folding_joins_coordinates_with_the_first_axis_slowest(shape: list[int], data: st.DataObject) -> None:
    groups = data.draw(foldings(len(shape)))
    plain = Layout.row_major(shape)
    folded = plain.fold(groups)
    assert folded.sizes == tuple(prod(shape[axis] for axis in group) for group in groups)
    joined = np.arange(prod(shape)).reshape(shape).transpose([axis for group in groups for axis in group])
    assert [folded.rank_of(coordinate) for coordinate in coordinates_of(folded)] == joined.flatten().tolist()
    for rank in range(plain.size):
        for axis, group in enumerate(groups):
            index = 0
            for part in group:
                index = index * shape[part] + index_along(rank, plain.axes[part])
            assert index_along(rank, folded.axes[axis]) == index


@without_deadline
@given(layouts())
def test_folding_axis_by_axis_changes_nothing(layout: Layout) -> None:
    same = layout.fold([[axis] for axis in range(len(layout.axes))])
    assert same == layout
    assert hash(same) == hash(layout)


@without_deadline
@given(layouts(), st.data())
def test_offsets_give_the_peers_of_any_rank(layout: Layout, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(range(len(layout.axes))), unique=True))
    rank = data.draw(st.integers(0, layout.size - 1))
    own = layout.coordinate_of(rank)
    first = layout.rank_of([0 if axis in axes else index for axis, index in enumerate(own)])
    peers = []
    for indices in product(*(range(layout.sizes[axis]) for axis in axes)):
        moved = dict(zip(axes, indices, strict=True))
        peers.append(layout.rank_of([moved.get(axis, index) for axis, index in enumerate(own)]))
    assert [first + offset for offset in layout.offsets(axes)] == peers
    assert rank in peers
