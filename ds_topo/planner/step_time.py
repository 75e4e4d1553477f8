"""Seconds of one training step: the slowest stage's work, its waits, and what nothing hides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ds_topo.planner.communication import collective_seconds, latency_seconds, send_seconds
from ds_topo.planner.costs import Costs, Messages, PieceCost, StageKind
from ds_topo.planner.group_spans import (
    EXPERT,
    GRADIENTS,
    layout_spans,
    response_of,
    senders_on_one_link,
    shares_of_turns,
    with_link_shared,
    with_sends_shared,
)
from ds_topo.planner.layout import Layout
from ds_topo.planner.replicas import optimizer_seconds, replica_seconds
from ds_topo.planner.software import Recompute, Software
from ds_topo.planner.spans import Span, span_of_factors
from ds_topo.planner.work import Cover, Pass
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ

PIPE_BARE = 0.25
"""Of a send that runs beside another chunk's computing, the share of its time that a stage still waits."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by what the slowest stage does or waits for.

    Args:
        compute: forward and backward without anything done twice.
        recompute: what is computed again.
        model: messages of tensor parallelism that no product covers.
        seq: messages of attention over split sequences that attention does not cover.
        expert: the exchange of tokens with experts.
        pipe: sends to neighbor stages in the steady state.
        bubble: stages wait for the first micro-batch and for the last.
        gradients: their reduction, as far as backward does not hide it.
        parameters: gathering of sharded parameters, as far as it is not hidden.
        optimizer: the update.
        agreement: small collectives about losses, norms and overflows.
        program: what the training program itself does, on processors that also compute.
        sharing: what ranks that share processors wait for them, where that is more than for each other.
    """

    compute: float
    recompute: float
    model: float
    seq: float
    expert: float
    pipe: float
    bubble: float
    gradients: float
    parameters: float
    optimizer: float
    agreement: float
    program: float = 0.0
    sharing: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts().values())

    def parts(self) -> Mapping[str, float]:
        """Seconds by name."""
        return dict(vars(self))


@dataclass(frozen=True)
class PassTime:
    """Seconds that one micro-batch takes in all chunks of one stage."""

    compute_forward: float
    compute_backward: float
    recompute: float
    messages: Mapping[str, float]
    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward with messages."""
        return self.forward + self.backward


def schedule_bound(costs: Costs, layout: Layout, *, even: bool = False) -> float:
    """Seconds that a layout does not beat in any order of its axes and with any ZeRO stage: the passes with every
    axis' messages on the best links that it can have, and the bubble.

    With ``even``, also over smaller micro-batches, virtual stages and divisions of the layers: the passes' mean over
    stages, and the bubble of single sequences in the most virtual stages.
    """
    job, slots, ranks = costs.job, costs.job.cluster.slots, costs.job.cluster.ranks
    best = {
        axis: span_of_factors(((degree, 1),) if degree > 1 else (), ranks, slots)
        for axis, degree in (
            (PIPE, layout.pipe),
            (SEQ, layout.seq),
            (MODEL, layout.model),
            (EXPERT, layout.expert_parallel),
        )
    }
    kinds = costs.stage_kinds(layout)
    totals = [stage_pass(costs, kind, layout, best).total for kind in kinds]
    every = sum(kind.count * total for kind, total in zip(kinds, totals, strict=True))
    micro_batches = layout.micro_batches(job.batch)
    if even:
        stages = min(job.software.virtual_stages, -(-job.model.layers // layout.pipe))
        bubble = every / layout.micro_batch * (layout.pipe - 1) / layout.pipe / stages
        return micro_batches * every / layout.pipe + bubble
    slowest = max(totals)
    return micro_batches * slowest + (every - slowest) / layout.virtual_stages


def step_time(costs: Costs, layout: Layout, spans: Mapping[str, Span] | None = None) -> StepTime:
    """Seconds of one step: ``m t + (the other stages' t) / v`` for m micro-batches that take t in the slowest stage
    and v virtual stages (Narayanan et al., section 2.2: a bubble of ``(p - 1) / (v m)`` where stages are equal).
    """
    job, software = costs.job, costs.job.software
    spans, spans_in_bubble = shared_spans(costs, layout, spans)
    micro_batches, virtual = layout.micro_batches(job.batch), layout.virtual_stages
    kinds = costs.stage_kinds(layout)
    passes = [stage_pass(costs, kind, layout, spans) for kind in kinds]
    slowest = max(passes, key=lambda one: one.total)
    send = _send_seconds(costs, layout, spans)
    in_bubble = (
        passes if spans_in_bubble is spans else [stage_pass(costs, one, layout, spans_in_bubble) for one in kinds]
    )
    others = sum(kind.count * one.total for kind, one in zip(kinds, in_bubble, strict=True))
    others -= in_bubble[passes.index(slowest)].total
    bubble = others / virtual + 2 * (layout.pipe - 1) * _send_seconds(costs, layout, spans_in_bubble)
    waits = _pipe_waits(layout, software) * send
    reduced, gathered = replica_seconds(costs, layout, spans, kinds, passes)
    update = optimizer_seconds(costs, layout)
    bubble = bubble if layout.pipe > 1 else 0.0
    program = _program_seconds(costs, kinds[passes.index(slowest)], layout, spans)
    computing = slowest.compute_forward + slowest.compute_backward + slowest.recompute
    own = micro_batches * computing + update + program + bubble
    return StepTime(
        compute=micro_batches * (slowest.compute_forward + slowest.compute_backward),
        recompute=micro_batches * slowest.recompute,
        model=micro_batches * slowest.messages[MODEL],
        seq=micro_batches * slowest.messages[SEQ],
        expert=micro_batches * slowest.messages[EXPERT],
        pipe=micro_batches * waits,
        bubble=bubble,
        gradients=reduced,
        parameters=gathered,
        optimizer=update,
        agreement=_agreement_seconds(costs, spans),
        program=program,
        sharing=max(0.0, _shared_seconds(costs, layout, kinds, passes, update + program) - own),
    )


def shared_spans(
    costs: Costs, layout: Layout, spans: Mapping[str, Span] | None = None
) -> tuple[Mapping[str, Span], Mapping[str, Span]]:
    """The spans of a layout's axes, where stages of a pipeline and replicas share a host's link with the edges that are
    busy at the same time: in a stage's own passes, and in those of others that make its bubble. GPUs have adapters of
    their own: what others do not use is no use to them."""
    spans = spans or layout_spans(costs, layout)
    if costs.job.cluster.accelerator.transport != "gloo":
        return spans, spans
    own, waited_for = _with_collectives_shared(costs, layout, spans)
    replicas = own[DATA].size // own[DATA].hosts
    if not own[PIPE].crosses or replicas == 1:
        return own, waited_for
    computing = max(stage_pass(costs, kind, layout, own).total for kind in costs.stage_kinds(layout))
    waits = _pipe_waits(layout, costs.job.software)
    sending = waits * _send_seconds(costs, layout, with_sends_shared(own, 1 / replicas))
    share = response_of(replicas, computing, sending) / replicas
    return with_sends_shared(own, share), with_sends_shared(waited_for, share)


def _with_collectives_shared(
    costs: Costs, layout: Layout, spans: Mapping[str, Span]
) -> tuple[Mapping[str, Span], Mapping[str, Span]]:
    stages, replicas = senders_on_one_link(spans)
    if stages * replicas == 1:
        return spans, spans
    alone = with_link_shared(spans, 1 / (stages * replicas))
    passes = [stage_pass(costs, kind, layout, alone) for kind in costs.stage_kinds(layout)]
    slowest = max(passes, key=lambda one: one.total)
    sending = sum(seconds for axis, seconds in slowest.messages.items() if axis in alone and alone[axis].crosses)
    turns = layout.micro_batches(costs.job.batch) * layout.virtual_stages
    own, waited_for = shares_of_turns(stages, replicas, slowest.total - sending, sending, turns)
    return with_link_shared(spans, own), with_link_shared(spans, waited_for)


def _pipe_waits(layout: Layout, software: Software) -> float:
    """Sends that a stage waits for in the steady state, per micro-batch.

    In 1F1B the first stage gets a gradient for the micro-batch that it began p micro-batches ago. That loop has p
    passes of a stage and ``2 (p - 1)`` sends, and so every micro-batch waits for ``2 (p - 1) / p`` of them. Virtual
    stages have two sends for each chunk.
    """
    if layout.virtual_stages == 1:
        return 2 * (layout.pipe - 1) / layout.pipe
    return 2 * layout.virtual_stages * (PIPE_BARE if software.overlaps_pipe else 1.0)


def _agreement_seconds(costs: Costs, spans: Mapping[str, Span]) -> float:
    """Seconds of a step's collectives that carry next to nothing, each over the axis where that takes longest."""
    axes = [spans[axis] for axis in (PIPE, MODEL, GRADIENTS) if spans[axis].size > 1]
    longest = max((latency_seconds("all_reduce", span, costs.job.cluster) for span in axes), default=0.0)
    return costs.job.software.agreements * longest


def _program_seconds(costs: Costs, kind: StageKind, layout: Layout, spans: Mapping[str, Span]) -> float:
    """Seconds of the program's own work in a step of one rank; a GPU computes meanwhile."""
    accelerator = costs.job.cluster.accelerator
    if accelerator.transport != "gloo":
        return 0.0
    in_step, in_micro_batch, in_collective = costs.job.software.own_starts
    collectives = sum(
        count * transfer.count
        for count, cost, _ in costs.pieces(kind, layout)
        for transfer in (*cost.work.forward.transfers, *cost.work.backward.transfers)
        if spans[transfer.axis].size > 1
    )
    starts = in_step + layout.micro_batches(costs.job.batch) * (in_micro_batch + collectives * in_collective)
    return starts * accelerator.efficiency.kernel_seconds


def _shared_seconds(costs: Costs, layout: Layout, kinds: list[StageKind], passes: list[PassTime], each: float) -> float:
    """Seconds that all ranks' computing, what each of them does besides, and copies of what stages send take on the
    processors that they share; 0 where each has its own. Messages inside hosts were measured with all ranks at work.
    """
    cluster = costs.job.cluster
    if cluster.processors >= cluster.ranks:
        return 0.0
    micro_batches = layout.micro_batches(costs.job.batch)
    ranks_per_stage = cluster.ranks / layout.pipe
    work = sum(
        kind.count * micro_batches * (one.compute_forward + one.compute_backward + one.recompute)
        for kind, one in zip(kinds, passes, strict=True)
    )
    sent = layout.replicas * micro_batches * 2 * (layout.pipe - 1) * activation_bytes(costs, layout)
    copies = sent / cluster.inside.bandwidth / cluster.ranks
    return (work * ranks_per_stage + each * cluster.ranks) / cluster.processors + copies


def stage_pass(costs: Costs, kind: StageKind, layout: Layout, spans: Mapping[str, Span]) -> PassTime:
    """One micro-batch in one stage, all its chunks."""
    compute_forward = compute_backward = recomputed = forward = backward = 0.0
    model = seq = expert = 0.0
    for count, cost, recompute in costs.pieces(kind, layout):
        ahead, back = _messages(costs, cost, spans)
        again = cost.again(recompute)
        compute_forward += count * cost.forward
        compute_backward += count * cost.backward
        recomputed += count * again
        times = 2 if recompute is Recompute.FULL else 1
        forward += count * (cost.forward + sum(ahead))
        backward += count * (cost.backward + again + sum(back) + (times - 1) * sum(ahead))
        model += count * (times * ahead[0] + back[0])
        seq += count * (times * ahead[1] + back[1])
        expert += count * (times * ahead[2] + back[2])
    messages = {MODEL: model, SEQ: seq, EXPERT: expert}
    return PassTime(compute_forward, compute_backward, recomputed, messages, forward, backward)


def _messages(costs: Costs, cost: PieceCost, spans: Mapping[str, Span]) -> tuple[Messages, Messages]:
    """Seconds of a piece's messages in forward and in backward that nothing covers; remembered by what they depend
    on."""
    key = (id(cost), spans.get(MODEL), spans.get(SEQ), spans.get(EXPERT))
    found = costs.messages.get(key)
    if found is None:
        found = (
            _bare_seconds(costs, cost.work.forward, spans, lambda: cost.covers_forward),
            _bare_seconds(costs, cost.work.backward, spans, lambda: cost.covers_backward),
        )
        costs.messages[key] = found
    return found


def _bare_seconds(
    costs: Costs, work: Pass, spans: Mapping[str, Span], covers: Callable[[], Mapping[Cover, float]]
) -> Messages:
    """Seconds of a pass's messages over ``model``, ``seq`` and experts, without those that something covers."""
    seconds = {MODEL: 0.0, SEQ: 0.0, EXPERT: 0.0}
    covered: dict[tuple[Cover, str], float] = {}
    for transfer in work.transfers:
        span = spans[transfer.axis]
        if span.size == 1:
            continue
        each = collective_seconds(transfer.operation, transfer.size, span, costs.job.cluster) * transfer.count
        if transfer.cover is Cover.NOTHING:
            seconds[transfer.axis] += each
        else:
            seconds[transfer.axis] += each * transfer.bare
            key = (transfer.cover, transfer.axis)
            covered[key] = covered.get(key, 0.0) + each * (1 - transfer.bare)
    for (cover, axis), hidden in covered.items():
        seconds[axis] += max(0.0, hidden - covers()[cover])
    return seconds[MODEL], seconds[SEQ], seconds[EXPERT]


def activation_bytes(costs: Costs, layout: Layout) -> float:
    """Bytes of a micro-batch's activations between stages, over all ranks of ``model``."""
    return layout.share(costs.job).tokens * costs.job.model.hidden * costs.job.precision.activation_bytes


def _send_seconds(costs: Costs, layout: Layout, spans: Mapping[str, Span]) -> float:
    """Seconds of one activation on its way to the next stage, on average over stages: tensor-parallel peers send a part
    each, and bring it together there unless it stays split along the sequence (Narayanan et al., section 4.1);
    DeepSpeed gathers every activation once more before backward.
    """
    if layout.pipe == 1:
        return 0.0
    cluster, size = costs.job.cluster, activation_bytes(costs, layout)
    span, ends = spans[PIPE], 1 if layout.virtual_stages == 1 else 0  # virtual stages go around
    within = send_seconds(size / layout.model, replace(span, hosts=1), cluster)
    leaving = (span.hosts - ends) / (layout.pipe - ends) if span.crosses else 0.0
    sent = within + leaving * (send_seconds(size / layout.model, span, cluster) - within)
    if layout.sequence_parallel:
        return sent
    gathers = 1.5 if costs.job.software.eager else 1.0
    return sent + gathers * collective_seconds("all_gather", size, spans[MODEL], cluster)
