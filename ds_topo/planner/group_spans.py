"""The groups that a layout has: which hosts each spans, and how many of them use a host's link at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ds_topo.planner.costs import Costs
from ds_topo.planner.layout import Job, Layout
from ds_topo.planner.spans import Span, ends_span, factors_of, span_of_factors, split_factors
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ
from ds_topo.topology.layout import Factors

EXPERT, EXPERT_DATA, GRADIENTS, ENDS = "expert", "expert data", "gradients", "ends"
"""Groups that are no axis: sharers of a layer's experts, replicas of an expert or parameter, first and last stage."""


def layout_spans(costs: Costs, layout: Layout) -> dict[str, Span]:
    """Which hosts the groups of the layout span."""
    topology = layout.topology
    factors = {axis: factors_of(topology, [axis]) for axis in topology.axes}
    return spans_of_factors(costs, factors, topology.axes, layout.expert_parallel)


def spans_of_factors(
    costs: Costs, factors: Mapping[str, Factors], order: Sequence[str], expert_parallel: int
) -> dict[str, Span]:
    """The same from every axis' ``(size, stride)``, and the axes outermost first."""
    slots, world = costs.job.cluster.slots, costs.job.cluster.ranks
    spans = {axis: span_of_factors(factors.get(axis, ()), world, slots) for axis in (PIPE, DATA, SEQ, MODEL)}
    replicas = tuple(factor for axis in order if axis not in (PIPE, MODEL) for factor in factors[axis])
    spans[GRADIENTS] = span_of_factors(replicas, world, slots)
    if costs.job.model.tied:
        spans[ENDS] = ends_span(factors.get(PIPE, ()), world, slots)
    if costs.job.model.expert_count:
        near, far = split_factors(replicas, expert_parallel)
        spans[EXPERT] = span_of_factors(near, world, slots)
        spans[EXPERT_DATA] = span_of_factors(far, world, slots)
    return spans


def taking_turns(spans: Mapping[str, Span], layout: Layout, job: Job) -> dict[str, Span]:
    """The spans with the edges that are busy at the same time, where several stages of a pipeline share a host's link.

    While a stage works on m micro-batches, another one that comes d later works on m - d of them; on average over k
    stages of one host d is (k + 1) / 3. With one micro-batch the stages take turns, and each has the link alone.
    """
    pipe = spans[PIPE]
    together = pipe.size // pipe.hosts
    if together == 1:
        return dict(spans)
    overlap = max(0.0, 1 - (together + 1) / 3 / (layout.micro_batches(job.batch) * layout.virtual_stages))
    share = 1 / together + (1 - 1 / together) * overlap
    busy = {
        axis: replace(
            spans[axis], ring_edges=spans[axis].ring_edges * share, remote_pairs=spans[axis].remote_pairs * share
        )
        for axis in (MODEL, SEQ, EXPERT)
        if axis in spans and spans[axis].crosses
    }
    return {**spans, **busy}
