"""Tables of ranks: DeepSpeed's default topology, and extra axes folded into data."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe import topology as deepspeed_topology
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo import PipeDataParallelTopology, ProcessTopology
from ds_topo.errors import UnknownAxisError
from ds_topo.topology.rank_tables import (
    _prime_factors,
    axes_of,
    created_groups,
    degree,
    factorized_topology,
    fold_extra_axes,
    gradient_axes,
    grid_groups,
    has_two_levels,
    model_parallel_axes,
    neighbor,
    sample_axes,
    two_level_ranks,
)
from tests.support.topologies import topologies


def test_the_default_topology_is_deepspeeds() -> None:
    for number in range(1, 200):
        found, expected = _prime_factors(number), deepspeed_topology._prime_factors(number)
        assert found == expected
        assert [type(found), *map(type, found)] == [type(expected), *map(type, expected)]
    assert factorized_topology(64) == PipeDataParallelTopology(num_pp=8, num_dp=8)
    assert factorized_topology(24) == PipeDataParallelTopology(num_pp=4, num_dp=6), "2 and 2, then 2 and 3"
    assert factorized_topology(5) == PipeDataParallelTopology(num_pp=5, num_dp=1)


@settings(deadline=None)
@given(topologies())
def test_folding_keeps_stage_and_slice_and_counts_all_replicas(ours: ProcessTopology) -> None:
    folded = fold_extra_axes(ours)
    assert set(folded.axes) >= {"pipe", "data"}
    assert set(folded.axes) <= {"pipe", "data", "model"}
    replicas = [axis for axis in ours.axes if axis in ("data", "seq")]
    if replicas:
        assert sorted(folded.get_axis_comm_lists("data")) == sorted(ours.get_axis_comm_lists(replicas))
    assert folded.mapping == {folded.get_coord(rank): rank for rank in range(folded.world_size())}
    for rank in range(ours.world_size()):
        old, new = ours.get_coord(rank), folded.get_coord(rank)
        assert (new.pipe, getattr(new, "model", 0)) == (getattr(old, "pipe", 0), getattr(old, "model", 0))
        assert folded.get_rank(**new._asdict()) == rank
        assert folded.filter_match(**new._asdict()) == [rank]


@settings(deadline=None)
@given(topologies(max_ranks=48), st.data())
def test_groups_and_neighbors_of_a_rank_match_the_tables(ours: ProcessTopology, data: st.DataObject) -> None:
    rank, world = data.draw(st.integers(0, ours.world_size() - 1)), ours.world_size()
    groups = grid_groups(ours, rank)
    for group in groups:
        assert rank in group.ranks
        assert group.ranks == tuple(sorted(group.ranks))
        assert degree(ours, group.axes) == len(group.ranks)
        assert axes_of(ours, group.axes[::-1]) == group.axes
        assert group in grid_groups(ours, group.ranks[-1])
    assert {(axis,) for axis in ours.axes} <= {group.axes for group in groups}
    created = created_groups(ours, rank)
    assert [group.ranks for group in created] == list(
        dict.fromkeys(group.ranks for group in groups if len(group.ranks) not in (1, world))
    )
    for axis in ours.axes:
        line = next(group.ranks for group in groups if group.axes == (axis,))
        assert {neighbor(ours, axis, rank, step) for step in range(len(line))} == set(line)
        assert neighbor(ours, axis, neighbor(ours, axis, rank, 1), -1) == rank
        assert ours.get_axis_index(axis, neighbor(ours, axis, rank, 1)) in (0, ours.get_axis_index(axis, rank) + 1)


def test_axes_are_returned_in_the_order_of_placement() -> None:
    topology = ProcessTopology.from_spec("data=2,pipe=2,seq=2")
    assert axes_of(topology, "pipe") == ("pipe",)
    assert axes_of(ProcessTopology.from_spec("data=2,model=2"), {"tensor", "data"}) == ("data", "model")
    assert axes_of(topology, ["seq", "model", "data"]) == ("data", "seq")
    assert axes_of(topology, []) == ()
    with pytest.raises(UnknownAxisError, match=r"axis \['rows'\] is not in the topology 'data=2,pipe=2,seq=2'"):
        axes_of(topology, ["data", "rows"])
    assert degree(topology, ["model"]) == 1
    assert degree(topology, []) == 1


@settings(deadline=None)
@given(topologies())
def test_every_axis_splits_a_model_a_batch_or_its_sequences(ours: ProcessTopology) -> None:
    gradients, samples = gradient_axes(ours), sample_axes(ours)
    assert sorted((*gradients, *model_parallel_axes(ours))) == sorted(ours.axes)
    assert {*gradients}.isdisjoint({"pipe", "model"})
    assert {*gradients} - {*samples} == {"seq"} & {*ours.axes}, "peers along it share a sample"
    assert {*samples} <= {*gradients}


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_two_levels_share_one_rank(hosts: int, slots: int, random: object) -> None:
    names = [f"host{index % hosts}" for index in range(hosts * slots)]
    random.shuffle(names)  # type: ignore[attr-defined]
    ranks = dict(enumerate(names, start=5))
    assert has_two_levels(ranks) is (hosts > 1 and slots > 1)
    assert not has_two_levels({**ranks, 4: "host0"}) or hosts * slots == 1
    for rank in ranks:
        inside, across = two_level_ranks([*ranks][::-1], ranks, rank)
        assert set(inside) & set(across) == {rank}
        assert inside == [other for other in ranks if ranks[other] == ranks[rank]]
        assert across == sorted(across)
        assert {ranks[other] for other in across} == set(names)
        assert len(across) == hosts
        assert all(two_level_ranks([*ranks], ranks, other)[1] == across for other in across)
