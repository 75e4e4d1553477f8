"""Placements count what crosses hosts as a count of single pairs does, and number ranks as Slurm does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations, pairwise, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo import ProcessTopology
from ds_topo.errors import HostError, TopologyError, UnknownAxisError, WorldSizeError
from ds_topo.launch.hosts import Host, HostMap, Hosts, slurm_map
from ds_topo.launch.launchers import address_of, in_step
from ds_topo.launch.placement import (
    AxisSpan,
    Placement,
    gradients_across_hosts,
    group_axes,
    host_patterns,
    host_runs,
)
from ds_topo.topology.rank_tables import copy_axes, created_groups, partition_axes


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Draw axes on hosts with uneven slots, numbered host by host or otherwise."""
    axes = draw(st.lists(st.sampled_from(["pipe", "data", "model", "seq"]), min_size=1, max_size=3, unique=True))
    dims = draw(st.lists(st.integers(1, 4), min_size=len(axes), max_size=len(axes)))
    topology = ProcessTopology(axes, dims)
    left, counts = topology.world_size(), []
    while left:
        counts.append(draw(st.integers(1, left)))
        left -= counts[-1]
    hosts = Hosts(tuple(Host.of(f"h{index}", count) for index, count in enumerate(counts)))
    order = [index for index, count in enumerate(counts) for _ in range(count)]
    host_map = HostMap(hosts, tuple(draw(st.permutations(order)))) if draw(st.booleans()) else HostMap.block(hosts)
    return Placement(topology, host_map)


@settings(deadline=None)
@given(placements())
def test_pairs_and_links_across_hosts_match_a_count_one_by_one(placement: Placement) -> None:
    host = placement.host_map.host_of
    for axes in group_axes(placement.topology):
        groups = placement.topology.get_axis_comm_lists(axes)
        pairs = [pair for ranks in groups for pair in combinations(ranks, 2)]
        rings = [pairwise([*ranks, ranks[0]] if len(ranks) > 2 else ranks) for ranks in groups]
        links = [link for ring in rings for link in ring]
        hosts = [len({host(rank) for rank in ranks}) for ranks in groups]
        assert [len(placement.hosts_of(ranks)) for ranks in groups] == hosts
        assert placement.span(axes) == AxisSpan(
            hosts_per_group=(min(hosts), max(hosts)),
            groups_across_hosts=sum(number > 1 for number in hosts),
            pairs=len(pairs),
            pairs_across_hosts=sum(host(a) != host(b) for a, b in pairs),
            ring_links=len(links),
            ring_links_across_hosts=sum(host(a) != host(b) for a, b in links),
        )


@settings(deadline=None)
@given(placements())
def test_every_rank_has_its_own_slot(placement: Placement) -> None:
    host_map = placement.host_map
    taken = {(host_map.host_of(rank).name, host_map.slot_of(rank)) for rank in range(host_map.size)}
    assert taken == {(host.name, slot) for host in host_map.hosts for slot in host.slots}
    assert [host_map.host_index(rank) for rank in range(host_map.size)] == list(host_map.host_indices)
    assert sorted(rank for ranks in host_map.ranks_on_hosts for rank in ranks) == list(range(host_map.size))


@settings(deadline=None)
@given(placements())
def test_runs_of_hosts_cover_every_rank(placement: Placement) -> None:
    ranks = placement.host_map.ranks_on_hosts
    runs = host_runs(placement.topology, placement.host_map.hosts.names, ranks)
    assert sum(run.count for run in runs) == len(ranks)
    assert min(run.ranks[0] for run in runs) == 0
    assert max(run.ranks[1] for run in runs) == placement.host_map.size - 1
    assert sum(count for count, _ in host_patterns(placement.topology, ranks)) == len(ranks)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pipe=2,data=8", r"more ranks than slots: 2 hosts with 8 slots .* Nearest that does: 'pipe=2,data=4'"),
        ("pipe=2,data=2", r"slots would be left over.* Nearest that does: 'pipe=2,data=4'"),
        ("pipe=3,data=-1", r"degree -1 cannot be computed.* Nearest that does: 'pipe=2,data=4'"),
        ("pipe=2:2,data=2:1", r"slots would be left over"),
    ],
)
def test_a_spec_that_does_not_fit_suggests_the_nearest(spec: str, message: str) -> None:
    with pytest.raises(WorldSizeError, match=message):
        Placement.of(spec, Hosts.uniform(2, slots=4))


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_the_suggested_spec_fits(degrees: list[int], count: int, slots: int, left_out: bool) -> None:
    axes = ["pipe", "data", "model", "seq"][: len(degrees)]
    given_degrees = [*degrees[:-1], -1] if left_out else degrees
    spec = ",".join(f"{axis}={degree}" for axis, degree in zip(axes, given_degrees, strict=True))
    hosts = Hosts.uniform(count, slots)
    try:
        Placement.of(spec, hosts)
    except WorldSizeError as error:
        nearest = str(error).rpartition("Nearest that does: ")[2].strip("'")
        assert set(axes) <= set(Placement.of(nearest, hosts).topology.axes) <= {*axes, "data"}


def test_malformed_hosts_are_refused() -> None:
    with pytest.raises(HostError, match="host 'a' is named twice"):
        Hosts((Host.of("a", 1), Host.of("a", 2)))
    with pytest.raises(HostError, match="there are no hosts"):
        Hosts(())
    with pytest.raises(HostError, match="host 'a' has no slots"):
        Host("a", ())
    with pytest.raises(HostError, match="must ascend"):
        Host("a", (1, 0))
    with pytest.raises(HostError, match="has 1 slots, but gets 2 ranks"):
        HostMap(Hosts.uniform(2, 1), (0, 0))
    with pytest.raises(UnknownAxisError, match="expert"):
        Placement.of("data=2", Hosts.uniform(1, 2)).span("expert")
    for count, slots in ((0, 1), (1, 0)):
        with pytest.raises(HostError, match="must be >= 1"):
            Hosts.uniform(count, slots)


def test_a_name_without_an_address_is_named() -> None:
    assert address_of("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(HostError, match=r"host 'no-such-host\.invalid' cannot be resolved to an address"):
        address_of("no-such-host.invalid")


# -- Slurm -------------------------------------------------------------------------------------------------------------

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "host[0-1]"}


@pytest.mark.parametrize(
    ("environ", "order"),
    [
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, [0, 0, 1, 1]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_DISTRIBUTION": "cyclic"}, [0, 1, 0]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_DISTRIBUTION": "block:cyclic"}, [0, 0, 1]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_DISTRIBUTION": "cyclic:block,pack"}, [0, 1, 1, 1]),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1,2", "SLURM_PROCID": "0"}, [0, 1, 1]),
        # a step of fewer nodes than its job
        (
            STEP
            | {"SLURM_JOB_NODELIST": "host[0-7]", "SLURM_TASKS_PER_NODE": "1(x8)", "SLURM_STEP_TASKS_PER_NODE": "1,1"},
            [0, 1],
        ),
    ],
)
def test_tasks_are_numbered_as_slurm_does(environ: dict[str, str], order: list[int]) -> None:
    assert list(slurm_map(environ, of_step=in_step(environ)).host_indices) == order


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "not inside a Slurm job"),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, r"the Slurm job has no tasks \(SLURM_TASKS_PER_NODE is not set\).*salloc"),
        (STEP, "has no tasks"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2"}, "is for 1 nodes, but the job has 2"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,0"}, "node 'host1' has no task"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "counts 'two'"),
        (
            STEP | {"SLURM_STEP_NODELIST": "host[0-", "SLURM_STEP_TASKS_PER_NODE": "2"},
            "expected names and bracketed ranges",
        ),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,1", "SLURM_DISTRIBUTION": "plane=1"}, "not one of block and cyclic"),
    ],
)
def test_incomplete_slurm_variables_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(HostError, match=message):
        slurm_map(environ, of_step=in_step(environ))


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_TASKS_PER_NODE"),
                *("SLURM_STEP_TASKS_PER_NODE", "SLURM_DISTRIBUTION"),
            ]
        ),
        st.sampled_from(["0", "1", "2(x2)", "n[1-2]", "n1,n2", "cyclic", "plane=2", "n[2-1]", "", "\u0662"]),
    )
)
def test_any_slurm_variables_raise_only_documented_errors(environ: dict[str, str]) -> None:
    with suppress(HostError):
        assert slurm_map(environ, of_step=in_step(environ)).size


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", list(permutations(["pipe", "data", "model"])))
def test_a_world_of_16384_ranks_is_placed_quickly(axes: Any) -> None:
    degrees = {"pipe": 16, "data": 128, "model": 8}
    placement = Placement.of([(axis, degrees[axis]) for axis in axes], Hosts.uniform(2048, 8))
    innermost = axes[-1]
    crossing = placement.span(innermost).groups_across_hosts
    assert crossing == (0 if degrees[innermost] <= 8 else 16384 // degrees[innermost])
    assert isinstance(placement.topology, ProcessTopology)
    with pytest.raises(TopologyError):
        placement.host_map.host_of(16384)


@pytest.mark.parametrize(
    "asked", [(0, 9, 8192, 16383), pytest.param(range(16384), marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_every_rank_of_16384_shards_inside_its_host(asked: Sequence[int]) -> None:
    """Four groups besides the world's on each rank, and 2 (h - 1) / h of the gradients across its host's link."""
    topology = ProcessTopology.from_spec("pipe=2,data=1024,shard=8")
    for rank in range(topology.world_size()):
        assert topology.get_axis_ranks(partition_axes(topology), rank)[0] == rank // 8 * 8
        assert topology.get_axis_index(copy_axes(topology), rank) == rank // 8 % 1024
    for rank in asked:
        groups = {group.name: len(group.ranks) for group in created_groups(topology, rank)}
        assert groups == {"pipe": 2, "data": 1024, "shard": 8, "data+shard": 8192}
    for copies in topology.get_axis_comm_lists(copy_axes(topology)):
        assert len({rank // 8 for rank in copies}) == len(copies), "each rank sends its eighth to other hosts alone"
    found = gradients_across_hosts(Placement(topology, HostMap.block(Hosts.uniform(2048, 8))))
    assert found == (pytest.approx(2 * 1023 / 1024), 0.0)
