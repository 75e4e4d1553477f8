"""Seconds of one training step: the slowest stage's work, its waits, and what nothing hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ds_topo.planner.cluster import Cluster
from ds_topo.planner.communication import collective_seconds, send_seconds
from ds_topo.planner.costs import Costs, Messages, PieceCost, StageKind
from ds_topo.planner.layout import Job, Layout
from ds_topo.planner.precision import ADAM_MOMENTS_BYTES
from ds_topo.planner.software import Recompute, Software
from ds_topo.planner.spans import Span, ends_span, factors_of, span_of_factors, split_factors
from ds_topo.planner.work import Cover, Pass
from ds_topo.topology.layout import Factors
from ds_topo.topology.rank_tables import DATA, MODEL, PIPE, SEQ

EXPERT, EXPERT_DATA, GRADIENTS, ENDS = "expert", "expert data", "gradients", "ends"
"""Groups that are no axis: sharers of a layer's experts, replicas of an expert or parameter, first and last stage."""

PIPE_BARE = 0.25
"""Of a send that runs beside another chunk's computing, the share of its time that a stage still waits."""

COVERED_FELT = 0.15
"""Of the messages of ZeRO 3 that every pass covers, the share of their time by which computing slows down: they take
processors and memory bandwidth from it (Rashidi et al., ISCA 2021, measure 10 to 20%)."""


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
        axis: replace(spans[axis], ring_edges=spans[axis].ring_edges * share, remote_pairs=spans[axis].remote_pairs * share)
        for axis in (MODEL, SEQ, EXPERT)
        if axis in spans and spans[axis].crosses
    }
    return {**spans, **busy}


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
    spans = taking_turns(spans or layout_spans(costs, layout), layout, job)
    micro_batches, virtual = layout.micro_batches(job.batch), layout.virtual_stages
    kinds = costs.stage_kinds(layout)
    passes = [stage_pass(costs, kind, layout, spans) for kind in kinds]
    slowest = max(passes, key=lambda one: one.total)
    send = _send_seconds(costs, layout, spans)
    every = sum(kind.count * one.total for kind, one in zip(kinds, passes, strict=True))
    bubble = (every - slowest.total) / virtual + 2 * (layout.pipe - 1) * send
    waits = _pipe_waits(layout, software) * send
    reduced, gathered = _replica_seconds(costs, layout, spans, kinds, passes)
    update = optimizer_seconds(costs, layout)
    bubble = bubble if layout.pipe > 1 else 0.0
    own = micro_batches * (slowest.compute_forward + slowest.compute_backward + slowest.recompute) + update + bubble
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
        sharing=max(0.0, _shared_seconds(costs, layout, kinds, passes, update) - own),
    )


def _pipe_waits(layout: Layout, software: Software) -> float:
    """Sends that a stage waits for in the steady state, per micro-batch.

    In 1F1B the first stage gets a gradient for the micro-batch that it began p micro-batches ago. That loop has p passes
    of a stage and ``2 (p - 1)`` sends, and so every micro-batch waits for ``2 (p - 1) / p`` of them. Virtual stages
    have two sends for each chunk.
    """
    if layout.virtual_stages == 1:
        return 2 * (layout.pipe - 1) / layout.pipe
    return 2 * layout.virtual_stages * (PIPE_BARE if software.overlaps_pipe else 1.0)


def _shared_seconds(
    costs: Costs, layout: Layout, kinds: list[StageKind], passes: list[PassTime], update: float
) -> float:
    """Seconds that all ranks' computing takes on the processors that they share; 0 where each has its own."""
    cluster = costs.job.cluster
    if cluster.processors >= cluster.ranks:
        return 0.0
    micro_batches = layout.micro_batches(costs.job.batch)
    ranks_per_stage = cluster.ranks / layout.pipe
    work = sum(
        kind.count * micro_batches * (one.compute_forward + one.compute_backward + one.recompute)
        for kind, one in zip(kinds, passes, strict=True)
    )
    return (work * ranks_per_stage + update * cluster.ranks) / cluster.processors


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
            _bare_seconds(costs, cost.work.forward, spans, cost.covers_forward),
            _bare_seconds(costs, cost.work.backward, spans, cost.covers_backward),
        )
        costs.messages[key] = found
    return found


def _bare_seconds(costs: Costs, work: Pass, spans: Mapping[str, Span], covers: Mapping[Cover, float]) -> Messages:
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
        seconds[axis] += max(0.0, hidden - covers[cover])
    return seconds[MODEL], seconds[SEQ], seconds[EXPERT]


def activation_bytes(costs: Costs, layout: Layout) -> float:
    """Bytes of a micro-batch's activations between stages, over all ranks of ``model``."""
    return layout.share(costs.job).tokens * costs.job.model.hidden * costs.job.precision.activation_bytes


def _send_seconds(costs: Costs, layout: Layout, spans: Mapping[str, Span]) -> float:
    """Seconds of one activation on its way to the next stage: tensor-parallel peers send a part each, and bring it
    together there unless it stays split along the sequence (Narayanan et al., section 4.1); DeepSpeed gathers every
    activation once more before backward.
    """
    if layout.pipe == 1:
        return 0.0
    cluster, size = costs.job.cluster, activation_bytes(costs, layout)
    sent = send_seconds(size / layout.model, spans[PIPE], cluster)
    if layout.sequence_parallel:
        return sent
    gathers = 1.5 if costs.job.software.eager else 1.0
    return sent + gathers * collective_seconds("all_gather", size, spans[MODEL], cluster)


def _replica_seconds(
    costs: Costs, layout: Layout, spans: Mapping[str, Span], kinds: list[StageKind], passes: list[PassTime]
) -> tuple[float, float]:
    """Exposed seconds of reducing gradients (a tied embedding's between the ends included), of gathering parameters.

    A stage's reduction runs while its own last backward goes on, and while the stages before it still compute; ZeRO 2
    reduces after every micro-batch, ZeRO 3 gathers in every pass too.
    """
    job, software, cluster = costs.job, costs.job.software, costs.job.cluster
    micro_batches = layout.micro_batches(job.batch)
    reduced = gathered = 0.0
    for kind, one in zip(kinds, passes, strict=True):
        reduce, gather = _replica_collectives(costs, layout, spans, kind)
        layers = max(1, sum(count for count, _ in kind.blocks))
        last_layer = 1 / layers
        if layout.zero == 3:
            bare = last_layer if software.overlaps_parameters else 1.0
            exposed = max(0.0, gather - one.forward) + max(0.0, gather + reduce - one.backward)
            felt = COVERED_FELT * (2 * gather + reduce - exposed)
            gathered = max(gathered, micro_batches * (exposed + felt + 2 * gather * bare))
            continue
        cover = one.backward * (1 - last_layer) if software.overlaps_gradients else 0.0
        after_each = max(0.0, reduce - cover)
        after_last = max(0.0, after_each - kind.first * one.backward / layout.virtual_stages)
        times = micro_batches if layout.zero == 2 else 1
        reduced = max(reduced, (times - 1) * after_each + after_last)
        cover = one.forward * (1 - last_layer) if software.overlaps_update else 0.0
        gathered = max(gathered, gather - cover)
    if job.model.tied and layout.pipe > 1:
        size = job.model.vocabulary * job.model.hidden / layout.model * reduction_bytes(costs)
        reduced += collective_seconds("all_reduce", size, spans[ENDS], cluster)
    return reduced, gathered


def gradient_messages(costs: Costs, layout: Layout, kind: StageKind) -> list[tuple[str, float, str, float]]:
    """``(operation, bytes, group, times)`` of a step's reductions of gradients and gatherings of parameters.

    ZeRO 2 reduces after every micro-batch; ZeRO 3 gathers in forward and in backward of each, too.
    """
    job, parameters = costs.job, costs.parameters(kind, layout)
    whole = layout.zero in job.software.reduces_whole
    micro_batches = layout.micro_batches(job.batch)
    messages: list[tuple[str, float, str, float]] = []
    for count, group in ((parameters.dense, GRADIENTS), (parameters.experts, EXPERT_DATA)):
        if not count:
            continue
        reductions = micro_batches if layout.zero >= 2 else 1
        operation = "all_reduce" if whole else "reduce_scatter"
        messages.append((operation, count * reduction_bytes(costs), group, float(reductions)))
        if layout.zero:
            gathers = 2 * micro_batches if layout.zero == 3 else 1
            messages.append(("all_gather", float(count * job.precision.activation_bytes), group, float(gathers)))
    return messages


def two_level_pays(costs: Costs, layout: Layout, spans: Mapping[str, Span]) -> bool:
    """Whether gradients are reduced faster inside hosts and across hosts apart than in one ring."""
    span = spans[GRADIENTS]
    local = span.size // span.hosts
    if not costs.job.software.two_level or span.hosts == 1 or local == 1 or layout.zero not in (0, 1):
        return False
    size = max(costs.parameters(kind, layout).dense for kind in costs.stage_kinds(layout)) * reduction_bytes(costs)
    flat = collective_seconds("all_reduce", size, span, costs.job.cluster)
    return two_level_seconds(size, span, costs.job.cluster) < flat


def two_level_seconds(size: float, span: Span, cluster: Cluster) -> float:
    """An all_reduce as a reduce_scatter inside hosts, an all_reduce of each part across them, and an all_gather."""
    local = span.size // span.hosts
    inner = Span(local, 1, span.groups, 0, 0, 0)
    outer = Span(span.hosts, span.hosts, cluster.slots, cluster.slots, cluster.slots * (span.hosts - 1), 0)
    inside = sum(collective_seconds(operation, size, inner, cluster) for operation in ("reduce_scatter", "all_gather"))
    return inside + collective_seconds("all_reduce", size / local, outer, cluster)


def _replica_collectives(
    costs: Costs, layout: Layout, spans: Mapping[str, Span], kind: StageKind
) -> tuple[float, float]:
    """Seconds of one reduction of all gradients of a stage, and of one gathering of its parameters."""
    cluster = costs.job.cluster
    reduce = gather = 0.0
    calls = max(1, sum(layers for layers, _ in kind.blocks))  # about one for each layer
    levels = two_level_pays(costs, layout, spans)
    for operation, size, group, _ in gradient_messages(costs, layout, kind):
        seconds = collective_seconds(operation, size, spans[group], cluster, calls)
        if operation == "all_gather":
            gather += seconds
        elif levels and group == GRADIENTS:
            reduce += two_level_seconds(size, spans[group], cluster)
        else:
            reduce += seconds
    return reduce, gather


def reduction_bytes(costs: Costs) -> int:
    """Of a gradient on the wire."""
    precision = costs.job.precision
    return costs.job.software.reduction_bytes if precision.master_bytes else precision.activation_bytes


def optimizer_seconds(costs: Costs, layout: Layout) -> float:
    """Adam's update, bound by memory: moments and masters read and written, gradients read twice (once for their
    norm), weights written; all gradients set to zero.
    """
    job, accelerator = costs.job, costs.job.cluster.accelerator
    precision = job.precision
    gradient = job.software.accumulation_bytes if precision.master_bytes else precision.activation_bytes
    moved: float = 2 * (precision.master_bytes + ADAM_MOMENTS_BYTES) + 2 * gradient + precision.activation_bytes
    if accelerator.efficiency.update_bytes is not None:
        moved = accelerator.efficiency.update_bytes
    largest = 0.0
    for kind in costs.stage_kinds(layout):
        parameters = costs.parameters(kind, layout)
        held = parameters.dense + parameters.experts
        shards = layout.replicas if layout.zero else 1
        sparse_shards = layout.replicas // layout.expert_parallel if layout.zero else 1
        owned = parameters.dense / shards + parameters.experts / sparse_shards
        largest = max(largest, owned * moved + held * gradient)
    return largest / (accelerator.memory_bandwidth * accelerator.efficiency.memory)
