"""Compare the hosts that groups span, and the bytes that leave a host, with groups that are listed one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo.plan.explain import host_traffic
from ds_topo.plan.job import FP32, Job, JobLayout
from ds_topo.plan.stages import Costs
from ds_topo.plan.step_time import factors_of, gradient_messages, layout_spans, span_of
from ds_topo.topology.process_topology import ProcessTopology
from tests.plan.jobs import job, jobs_and_layouts


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


def ring_bytes(layout: JobLayout, axes: list[str], size: float, slots: int, passes: int) -> list[float]:
    """Return the bytes that each host sends for a ring over every group, edge by edge."""
    topology = layout.topology
    world = topology.world_size()
    sent = [0.0] * (world // slots)
    for group in {tuple(topology.get_axis_ranks(axes, rank)) for rank in range(world)}:
        for rank, following in zip(group, (*group[1:], group[0]), strict=True):
            if rank // slots != following // slots:
                sent[rank // slots] += passes * size * (len(group) - 1) / len(group)
    return sent


@pytest.mark.parametrize("spec", ["data=2,model=4", "model=4,data=2", "data=4,model=2", "model=2,data=4"])
def test_host_traffic_matches_rings_counted_edge_by_edge(spec: str) -> None:
    made = job(precision=FP32, tied=False)
    layout = JobLayout(ProcessTopology.from_spec(spec), micro_batch=2)
    [traffic, *_] = sorted(host_traffic(Costs(made), layout), key=lambda sent: -sum(sent.values()))
    costs = Costs(made)
    [kind] = costs.stage_kinds(layout)
    [message] = gradient_messages(costs, layout, kind)
    gradients = message.size
    flat = max(ring_bytes(layout, ["data"], gradients, 4, passes=2))
    assert message.count == 1
    if flat and traffic["gradients"] != pytest.approx(flat):
        # in two levels: each of 4 ranks sends 2 (h - 1) / h of a part, one of as many as there are peers on its host
        local = layout.data // 2
        assert traffic["gradients"] == pytest.approx(4 * gradients / local)
        assert traffic["gradients"] < flat
    # two all_reduces per layer and pass; embedding and output layer one each, and three of one value per token
    tokens = 2 * 256
    whole = tokens * 512 * 4
    messages = (8 * 4 + 2) * whole + 3 * tokens * 4
    expected = max(ring_bytes(layout, ["model"], messages, 4, passes=2)) * layout.micro_batches(made.batch)
    assert traffic.get("model", 0.0) == pytest.approx(expected)


@settings(deadline=None, max_examples=60)
@given(jobs_and_layouts())
def test_only_axes_that_cross_hosts_have_host_traffic(made: tuple[Job, JobLayout]) -> None:
    task, layout = made
    costs = Costs(task)
    spans = layout_spans(costs, layout)
    for host in host_traffic(costs, layout):
        for axis, sent in host.items():
            assert sent >= 0
            assert spans[axis].hosts > 1 or (axis == "gradients" and task.model.tied)
