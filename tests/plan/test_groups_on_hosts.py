"""Compare the hosts that groups span with groups that are listed one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo.plan.step_time import factors_of, span_of
from ds_topo.topology.process_topology import ProcessTopology


@st.composite
def placements(draw: st.DrawFn) -> tuple[ProcessTopology, list[str], int]:
    """Draw a topology, some of its axes, and slots."""
    axes = draw(st.permutations(["pipe", "data", "model"]))
    topology = ProcessTopology(axes, [draw(st.integers(1, 4)) for _ in axes])
    chosen = draw(st.lists(st.sampled_from(axes), min_size=1, unique=True))
    return topology, chosen, draw(st.integers(1, 9))


@settings(deadline=None, max_examples=200)
@given(placements())
def test_spans_match_groups_listed_rank_by_rank(placement: tuple[ProcessTopology, list[str], int]) -> None:
    topology, axes, slots = placement
    world = topology.world_size()
    groups = {tuple(topology.get_axis_ranks(axes, rank)) for rank in range(world)}
    hosts = range(-(-world // slots))
    edges, pairs = [], []
    for host in hosts:
        here = [[rank // slots == host for rank in group] for group in groups]
        pairs.append(sum(sum(on) * (len(on) - sum(on)) for on in here))
        edges.append(sum(on[index] and not on[(index + 1) % len(on)] for on in here for index in range(len(on))))
    span = span_of(factors_of(topology, axes), world, slots)
    size = len(next(iter(groups)))
    assert span.size == size
    if size > 1:
        assert span.hosts == max(len({rank // slots for rank in group}) for group in groups)
        sampled = len(hosts) <= 4
        assert (span.ring_edges, span.remote_pairs) == (max(edges), max(pairs)) or not sampled
