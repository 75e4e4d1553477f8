"""Tables of expert groups have the required properties in every axis order, and DeepSpeed's values in its order."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from itertools import permutations, product

import pytest
from deepspeed.utils import groups as deepspeed_groups
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo import ProcessTopology, groups
from ds_topo.errors import ExpertSizeError
from ds_topo.topology.axes import divisors
from ds_topo.topology.rank_tables import (
    ExpertPlan,
    gradient_axes,
    zero_partition_ranks,
)
from tests.support.topologies import topologies

DEGREES = [
    {"pipe": 2, "data": 4, "model": 2},
    {"pipe": 2, "data": 3, "model": 3},
    {"data": 4, "expert": 2, "model": 2},
    {"pipe": 2, "seq": 3, "data": 2, "model": 2},
    {"data": 6},
]
SPECS = [
    ",".join(f"{axis}={degrees[axis]}" for axis in order) for degrees in DEGREES for order in permutations(degrees)
]
every_order = pytest.mark.parametrize("spec", SPECS)


@st.composite
def plans(draw: st.DrawFn) -> ExpertPlan:
    """Any plan of a small job."""
    topology = draw(topologies(axes=("pipe", "data", "model", "seq", "expert"), max_ranks=48))
    tensor_parallel, data_first = draw(st.booleans()), draw(st.booleans())
    pool = len(ExpertPlan(topology, 1, tensor_parallel).pool(0))
    return ExpertPlan(topology, draw(st.sampled_from(divisors(pool))), tensor_parallel, data_first)


def _plans(topology: ProcessTopology) -> Iterator[ExpertPlan]:
    for tensor_parallel, data_first in product((False, True), (False, True)):
        pool = len(ExpertPlan(topology, 1, tensor_parallel).pool(0))
        for size in divisors(pool):
            yield ExpertPlan(topology, size, tensor_parallel, data_first)


@every_order
def test_groups_partition_the_pools_and_each_slice_has_one_checkpoint_writer(spec: str) -> None:
    for plan in _plans(ProcessTopology.from_spec(spec)):
        _check_groups(plan)
        _check_writers(plan)


@settings(deadline=None)
@given(plans())
def test_groups_of_any_plan_partition_the_pools_and_each_slice_has_one_writer(plan: ExpertPlan) -> None:
    _check_groups(plan)
    _check_writers(plan)


def _check_groups(plan: ExpertPlan) -> None:
    topology, world = plan.topology, range(plan.topology.world_size())
    experts, replicas = plan.expert_tables(), plan.expert_data_tables()
    assert sorted(rank for ranks in experts for rank in ranks) == list(world)
    assert sorted(rank for ranks in replicas for rank in ranks) == list(world)
    assert {len(ranks) for ranks in experts} == {plan.expert_parallel_size}
    assert all(ranks == sorted(ranks) for ranks in experts + replicas)
    for rank in world:
        mine, same = plan.expert_ranks(rank), plan.expert_data_ranks(rank)
        assert mine in experts
        assert same in replicas
        assert set(mine) & set(same) == {rank}
        # one expert: all replicas have the same place in their own expert group
        assert {plan.expert_ranks(peer).index(peer) for peer in same} == {mine.index(rank)}
        shared = ("pipe", "model") if plan.expert_tensor_parallel else ("pipe",)
        coordinates = [topology.get_coord(peer)._asdict() for peer in {*mine, *same}]
        for axis in shared:
            assert len({coordinate.get(axis) for coordinate in coordinates}) == 1
        # together the groups reach all of the pool, and nothing else
        assert {peer for member in mine for peer in plan.expert_data_ranks(member)} == set(plan.pool(rank))


def _check_writers(plan: ExpertPlan) -> None:
    topology = plan.topology
    writers: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(topology.world_size()):
        coordinate = topology.get_coord(rank)._asdict()
        place = (coordinate.get("pipe", 0), coordinate.get("model", 0), plan.expert_ranks(rank).index(rank))
        writers.setdefault(place, []).extend([rank] if plan.writes_checkpoint(rank) else [])
        if rank == min(topology.get_axis_ranks(gradient_axes(topology), rank)):
            assert plan.writes_checkpoint(rank)  # this rank also writes what is not experts
    assert {len(ranks) for ranks in writers.values()} == {1}


@every_order
def test_a_position_determines_the_positions_for_dividing_sizes(spec: str) -> None:
    """One optimizer file per stage, slice and place in the greatest group then holds what each of its readers wants."""
    topology = ProcessTopology.from_spec(spec)
    for great, small in product(list(_plans(topology)), repeat=2):
        same_pools = (great.expert_tensor_parallel, great.use_data_before_expert) == (
            small.expert_tensor_parallel,
            small.use_data_before_expert,
        )
        if same_pools and great.expert_parallel_size % small.expert_parallel_size == 0:
            seen: dict[tuple[int, ...], int] = {}
            for rank in range(topology.world_size()):
                place = small.expert_ranks(rank).index(rank)
                assert seen.setdefault(_file_of(great, rank), place) == place


def _file_of(plan: ExpertPlan, rank: int) -> tuple[int, ...]:
    coordinate = plan.topology.get_coord(rank)._asdict()
    return coordinate.get("pipe", 0), coordinate.get("model", 0), plan.expert_ranks(rank).index(rank)


@pytest.mark.parametrize("data_first", [False, True])
@pytest.mark.parametrize(("world", "tensor", "pipe"), [(8, 1, 1), (16, 2, 1), (16, 2, 2), (24, 3, 2)])
def test_tensor_parallel_tables_equal_deepspeeds(world: int, tensor: int, pipe: int, data_first: bool) -> None:
    for size in divisors(world // tensor // pipe):
        ours = groups._get_expert_parallel_ranks(world, tensor, size, pipe, data_first)
        assert ours == deepspeed_groups._get_expert_parallel_ranks(world, tensor, size, pipe, data_first)


@pytest.mark.parametrize("data_first", [False, True])
def test_default_order_equals_what_deepspeed_creates(monkeypatch: pytest.MonkeyPatch, data_first: bool) -> None:
    create = deepspeed_groups._create_expert_and_data_parallel
    if "pp_size" not in signature(create).parameters:
        pytest.skip("this release of DeepSpeed creates no such groups for pipelines")
    topology = ProcessTopology.from_spec("pipe=2,data=4,model=2")
    for size in divisors(8):
        created: list[list[int]] = []
        monkeypatch.setattr(deepspeed_groups.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(deepspeed_groups.dist, "get_world_size", lambda: 16)
        monkeypatch.setattr(deepspeed_groups.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(deepspeed_groups.dist, "new_group", lambda ranks, seen=created: seen.append(list(ranks)))
        monkeypatch.setattr(deepspeed_groups, "log_dist", lambda *_, **__: None)
        for name in ("", "_RANKS"):
            monkeypatch.setattr(deepspeed_groups, f"_EXPERT_PARALLEL_GROUP{name}", {})
            monkeypatch.setattr(deepspeed_groups, f"_EXPERT_DATA_PARALLEL_GROUP{name}", {})
        create(size, 1, 2, use_data_before_expert_parallel_=data_first)
        plan = ExpertPlan(topology, size, use_data_before_expert=data_first)
        assert created == plan.expert_data_tables() + plan.expert_tables()


def test_an_expert_axis_is_the_expert_group() -> None:
    plan = ExpertPlan(ProcessTopology.from_spec("expert=2,data=2,model=2"), 2)
    assert plan.expert_tables() == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("order", list(permutations(["pipe=2", "data=4", "model=2"])), ids="-".join)
def test_second_partitions_are_inside_the_data_group(order: tuple[str, ...]) -> None:
    topology = ProcessTopology.from_spec(",".join(order))
    for rank in range(16):
        ranks = zero_partition_ranks(topology, 2, rank)
        assert rank in ranks
        assert set(ranks) <= set(topology.get_axis_ranks("data", rank))
        assert all(zero_partition_ranks(topology, 2, peer) == ranks for peer in ranks)
        assert zero_partition_ranks(topology, 1, rank) == [rank]


def test_errors_list_valid_sizes() -> None:
    topology = ProcessTopology.from_spec("pipe=2,data=6,model=2")
    with pytest.raises(ExpertSizeError, match=r"size 5 must divide the 12 ranks.*\[1, 2, 3, 4, 6, 12\]"):
        ExpertPlan(topology, 5)
    with pytest.raises(AssertionError, match=r"size 4 must divide the 6 ranks.*\[1, 2, 3, 6\]"):
        ExpertPlan(topology, 4, expert_tensor_parallel=True)
    with pytest.raises(ExpertSizeError, match="not an integer"):
        ExpertPlan(topology, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ExpertSizeError, match=r"zero_hpz_partition_size 4.*\[1, 2, 3, 6\]"):
        zero_partition_ranks(topology, 4, 0)
    with pytest.raises(ExpertSizeError, match="zero_hpz_partition_size 0 must divide"):
        zero_partition_ranks(topology, 0, 0)
    with pytest.raises(ExpertSizeError, match="3 slices x 1 stages do not divide 8 ranks"):
        groups._get_expert_parallel_ranks(8, 3, 1)
