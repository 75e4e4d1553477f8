"""The groups that a layout has: which hosts each spans, and how many of them use a host's link at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ds_topo.planner.costs import Costs
from ds_topo.planner.layout import Layout
from ds_topo.planner.spans import Span, ends_span, factors_of, span_of_factors, split_factors
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ
from ds_topo.topology.layout import Factors

EXPERT, EXPERT_DATA, GRADIENTS, ENDS = "expert", "expert data", "gradients", "ends"
"""Groups that are no axis: sharers of a layer's experts, replicas of an expert or parameter, first and last stage."""
_OF_A_PASS = (MODEL, SEQ, EXPERT)
"""Axes whose messages a stage waits for within a pass."""


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


def senders_on_one_link(spans: Mapping[str, Span]) -> tuple[int, int]:
    """How many stages of a pipeline send their collectives over one host's link, and how many replicas of each, which
    do not wait for each other; 1 and 1 where none leaves it. Replicas that share experts are one sender."""
    crossing = [axis for axis in _OF_A_PASS if axis in spans and spans[axis].crosses]
    if not crossing:
        return 1, 1
    replicas = 1 if EXPERT in crossing else spans[DATA].size // spans[DATA].hosts
    return spans[PIPE].size // spans[PIPE].hosts, replicas


def with_sends_shared(spans: Mapping[str, Span], share: float) -> dict[str, Span]:
    """The spans with a share of the sends to other hosts."""
    return {**spans, PIPE: replace(spans[PIPE], forward_edges=spans[PIPE].forward_edges * share)}


def with_link_shared(spans: Mapping[str, Span], share: float) -> dict[str, Span]:
    """The spans with a share of the edges over hosts: those that are busy at the same time."""
    busy = {
        axis: replace(
            spans[axis], ring_edges=spans[axis].ring_edges * share, remote_pairs=spans[axis].remote_pairs * share
        )
        for axis in _OF_A_PASS
        if axis in spans and spans[axis].crosses
    }
    return {**spans, **busy}


def response_of(senders: int, computing: float, sending: float) -> float:
    """How much longer a message takes where some take turns on a link than where one has it alone.

    Each sender computes so long, then sends so long if it has the link alone: a closed queueing network (exact mean
    value analysis: Reiser and Lavenberg, 1980).

    >>> response_of(3, computing=0.0, sending=1.0), response_of(1, 1.0, 1.0), response_of(2, 1.0, 1.0)
    (3.0, 1.0, 1.5)
    """
    response = waiting = 0.0
    for number in range(1, senders + 1):
        response = 1 + waiting
        waiting = number * response * sending / (computing + response * sending) if sending else 0.0
    return response


def shares_of_turns(stages: int, replicas: int, computing: float, sending: float, passes: int) -> tuple[float, float]:
    """Of the edges of all senders on a link, those that are busy while one sends: in a stage's own passes, and in those
    of other stages that it waits for at the beginning and at the end.

    While a stage works on m passes, one that comes d later works on m - d of them; on average over k stages d is
    (k + 1) / 3. A link that is always busy carries k m passes in all; so k - 1 passes of waiting take (k + 1) / 3 times
    what they take alone.

    >>> shares_of_turns(2, 1, computing=0.0, sending=1.0, passes=4), shares_of_turns(2, 1, 1.0, 0.0, 8)
    ((0.875, 0.5), (0.5, 0.5))
    """
    senders = stages * replicas
    response = response_of(senders, computing, sending)
    of_stages = max(0.0, 1 - (stages + 1) / 3 / passes), (stages - 2) / 3 / max(1, stages - 1)
    others = ((replicas - 1 + (stages - 1) * replicas * overlap) / (senders - 1) for overlap in of_stages)
    own, waited_for = ((1 + (response - 1) * share) / senders for share in others)
    return own, waited_for
