"""Predict the seconds of one training step: the work and waits of the slowest stage, and messages that nothing hides.

The first part finds the hosts that groups of ranks span in a layout, and times their collectives. A ring moves
``(n - 1) / n`` of a tensor over each of its edges in an all_gather or a reduce_scatter, twice that in an all_reduce
(Thakur et al., 2005; Narayanan et al., section 3.3). Its edges inside a host have a link each; those that leave a host
share that host's adapters. In an all_to_all every rank sends ``1 / n`` of its tensor to each peer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, gcd, log2
from typing import TypeAlias

from ds_topo.plan.hardware import START_SECONDS, Cluster
from ds_topo.plan.job import ADAM_MOMENTS_BYTES, JobLayout, Recompute, Software
from ds_topo.plan.stages import Costs, PieceCost, Stage, Sum
from ds_topo.plan.work import Cover, PassCost, Transfer
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ, SHARD, Factors
from ds_topo.topology.process_topology import ProcessTopology, offsets_of

EXPERT, EXPERT_DATA, GRADIENTS, ENDS, COPIES = "expert", "expert data", "gradients", "ends", "copies"
"""Names of groups that do not belong to one axis: the ranks over which a layer's experts are distributed, the replicas
of an expert, the replicas of a parameter, the first and last stage, and the ranks that hold one partition of ZeRO."""
PASS_AXES = (MODEL, SEQ, EXPERT)
"""Axes whose messages a stage waits for within a pass."""
TO_OWNERS, FROM_OWNERS = "sum_to_owners", "gather_from_owners"
"""The reduce_scatter and the all_gather of ``ds_topo.reduction`` at ZeRO 1 and 2."""
SAMPLED_HOSTS = 4
"""Irregular groups are counted on at most so many hosts; the others look like them."""
PIPE_BARE = 0.25
"""The share of a send's time that a stage still waits if the send runs beside another chunk's computing."""
LAST_BUCKET_BYTES = 1 << 20
"""The size of the last bucket by default in :class:`ds_topo.GradientReducer`."""
COVERED_FELT = 0.15
"""Hidden ZeRO 3 messages slow computing down by this share of their time: they use processors and memory bandwidth
(Rashidi et al., ISCA 2021, measure 10 to 20%)."""


# -- groups on hosts, and their collectives ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The groups of one axis (or of several together) as the busiest host sees them.

    Args:
        size: ranks of a group.
        hosts: hosts on which a group has ranks.
        ring_edges: neighbors in the groups' rings of which the first is on the host and the second is not.
        remote_pairs: ordered pairs of group members of which the first is on the host and the second is not.
        forward_edges: ranks on the host whose next rank along the axis (without wrap-around) is elsewhere.
    """

    size: int
    hosts: int
    ring_edges: float
    remote_pairs: float
    forward_edges: float


Spans: TypeAlias = Mapping[str, Span]
"""The span of every group of a layout, by axis or group."""


def layout_spans(costs: Costs, layout: JobLayout) -> dict[str, Span]:
    """Return the span of every group of the layout, by axis or group."""
    topology, slots, world = layout.topology, costs.job.cluster.slots, costs.job.cluster.ranks
    axes = {PIPE: [PIPE], SEQ: [SEQ], MODEL: [MODEL], GRADIENTS: [DATA, SHARD, SEQ]}
    if SHARD in topology.axes:
        axes |= {SHARD: [SHARD], COPIES: [DATA, SEQ]}
    factors = {group: factors_of(topology, along) for group, along in axes.items()}
    if costs.job.model.expert_count:
        factors[EXPERT], factors[EXPERT_DATA] = split_factors(factors[GRADIENTS], layout.expert_parallel)
    spans = {group: span_of(each, world, slots) for group, each in factors.items()}
    if costs.job.model.tied and layout.pipe > 1:
        ends = span_of(factors[PIPE], world, slots, of_ends=True)
        spans[ENDS] = replace(ends, ring_edges=ends.forward_edges)
    return spans


def factors_of(topology: ProcessTopology, axes: Collection[str]) -> Factors:
    """Return ``(size, stride)`` of every axis of more than one rank, outermost first.

    >>> factors_of(ProcessTopology.from_spec("pipe=2,data=4,model=1"), ["data", "model"])
    ((4, 1),)
    """
    present = [position for position, axis in enumerate(topology.axes) if axis in axes]
    return tuple(factor for position in present for factor in topology.layout.axes[position] if factor[0] > 1)


def split_factors(factors: Factors, inner: int) -> tuple[Factors, Factors]:
    """Return the factors of groups of ``inner`` neighbors, and of the groups of their counterparts.

    >>> split_factors(((2, 8), (4, 1)), inner=2)
    (((2, 1),), ((2, 8), (2, 2)))
    """
    near: list[tuple[int, int]] = []
    far: list[tuple[int, int]] = []
    for size, stride in reversed(factors):
        taken = gcd(inner, size)
        inner //= taken
        near += [(taken, stride)] if taken > 1 else []
        far += [(size // taken, stride * taken)] if size > taken else []
    return tuple(reversed(near)), tuple(reversed(far))


@lru_cache(maxsize=65536)
def span_of(factors: Factors, world: int, slots: int, *, of_ends: bool = False) -> Span:
    """Return the span of the groups ``{base + sum of digit x stride}`` if every host has ``slots`` consecutive ranks.

    With ``of_ends``, groups are the first and the last rank of each of these.

    >>> span_of(((2, 1),), world=8, slots=4).hosts, span_of(((2, 4),), world=8, slots=4)
    (1, Span(size=2, hosts=2, ring_edges=4, remote_pairs=4, forward_edges=4))
    """
    ends = [end for size, stride in factors for end in (stride, stride * size)]
    offsets = sorted(offsets_of(factors))
    if of_ends:
        offsets = [offsets[0], offsets[-1]]
    hosts = -(-world // slots)
    sampled = {0, min(1, hosts - 1), hosts // 2, hosts - 1} if hosts > SAMPLED_HOSTS else set(range(hosts))
    if world % slots == 0 and all(slots % end == 0 or end % slots == 0 for end in ends):
        sampled = {0}  # all hosts have equally many ranks of each of their groups
    spans = [_span_at(host, offsets, factors, world, slots) for host in sampled]
    by_field = zip(*map(astuple, spans), strict=True)
    return Span(*(max(values) for values in by_field))


def _span_at(host: int, offsets: list[int], factors: Factors, world: int, slots: int) -> Span:
    most_hosts = ring_edges = remote_pairs = forward_edges = 0
    ranks = range(host * slots, min((host + 1) * slots, world))
    bases = {rank - sum(rank // stride % size * stride for size, stride in factors) for rank in ranks}
    for base in bases:
        hosts = [(base + offset) // slots for offset in offsets]
        is_here = [other == host for other in hosts]
        leaving = sum(here and not after for here, after in pairwise(is_here))
        forward_edges += leaving
        ring_edges += leaving + (is_here[-1] and not is_here[0])
        remote_pairs += sum(is_here) * (len(hosts) - sum(is_here))
        most_hosts = max(most_hosts, len(set(hosts)))
    return Span(len(offsets), most_hosts, ring_edges, remote_pairs, forward_edges)


def ring_passes(operation: str) -> int:
    """Return how often a collective sends a tensor around the ring."""
    return 2 if operation == "all_reduce" else 1


def collective_seconds(operation: str, size: float, span: Span, cluster: Cluster, calls: int = 1) -> float:
    """Return the seconds of a collective that all groups of an axis run at the same time.

    Args:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``TO_OWNERS`` or ``FROM_OWNERS``.
        size: bytes of the whole tensor; for an all_to_all, what one rank sends, its own part included.
        calls: the number of pieces of equal size.
    """
    ranks = span.size
    if ranks == 1 or not size:
        return 0.0
    leaving = bytes_leaving(operation, size, span)
    if operation == "all_to_all":
        local = size * (ranks - 1) / ranks - leaving / cluster.slots
    else:
        local = ring_passes(operation) * size * (ranks - 1) / ranks
    # if no two ranks of a group are on one host, nothing travels inside
    inside = local / cluster.inside.bandwidth if span.size > span.hosts else 0.0
    moving = max(inside, leaving / cluster.across.bandwidth)
    return moving + calls * latency_seconds(operation, span, cluster)


def latency_seconds(operation: str, span: Span, cluster: Cluster) -> float:
    """Return the seconds of an empty collective: its start, and its hops one after the other.

    A ring passes every rank once per pass. NCCL takes a tree over hosts for an all_reduce, whose depth is the logarithm
    of their number (NCCL 2.4's double binary trees).
    """
    across = span.hosts if span.hosts > 1 else 0
    inside = max(0, span.size - max(1, span.hosts))
    if operation == "all_to_all":
        hops = (min(inside, span.size // span.hosts - 1), min(across, 1) * ceil(log2(span.size)))
    elif operation == "all_reduce":
        hops = (2 * min(inside, span.size // span.hosts - 1), 2 * ceil(log2(max(1, across))) if across else 0)
    else:
        hops = (inside, across)
    return START_SECONDS + hops[0] * cluster.inside.latency + hops[1] * cluster.across.latency


def bytes_leaving(operation: str, size: float, span: Span) -> float:
    """Return the bytes that the busiest host sends to others in one such collective of all groups."""
    if operation == "all_to_all":
        return size / span.size * span.remote_pairs
    return ring_passes(operation) * size * (span.size - 1) / span.size * span.ring_edges


# -- a step ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTime(Sum):
    """The seconds of one step, by what the slowest stage does or waits for.

    Args:
        compute: forward and backward without anything done twice.
        model: messages of tensor parallelism that no product covers.
        seq: messages of attention over split sequences that attention does not cover.
        expert: the exchange of tokens with experts.
        pipe: sends to neighbor stages in the steady state.
        bubble: waiting for the first micro-batch and for the last.
        gradients: the part of their reduction that backward does not hide.
        parameters: the part of gathering sharded parameters that is not hidden.
        agreement: small collectives about losses, norms and overflows, each over the axis that takes longest.
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


@dataclass(frozen=True)
class PassTime:
    """The seconds that one micro-batch takes in all chunks of one stage; ``messages`` by axis, without hidden ones."""

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


def step_time(costs: Costs, layout: JobLayout) -> StepTime:
    """Return the seconds of one step.

    The passes take ``m t + (the other stages' t) / v`` for m micro-batches that take t in the slowest stage and v
    virtual stages (Narayanan et al., section 2.2: a bubble of ``(p - 1) / (v m)`` if stages are equal).
    """
    job = costs.job
    spans = layout_spans(costs, layout)
    micro_batches = layout.micro_batches(job.batch)
    kinds = costs.stage_kinds(layout)
    passes = [stage_pass(costs, kind, layout, spans) for kind in kinds]
    slowest = max(passes, key=lambda one: one.total)
    sending = _send_seconds(costs, layout, spans)
    bubble = 0.0
    if layout.pipe > 1:
        others = sum(len(kind.numbers) * one.total for kind, one in zip(kinds, passes, strict=True)) - slowest.total
        if job.software.mirrors:
            others *= mirrored_bubble(layout.pipe, slowest)
        bubble = others / layout.virtual_stages + 2 * (layout.pipe - 1) * sending
    reduced, gathered = _replica_seconds(costs, layout, spans, passes)
    wide = [spans[axis] for axis in (PIPE, MODEL, GRADIENTS) if spans[axis].size > 1]
    longest = max((latency_seconds("all_reduce", span, job.cluster) for span in wide), default=0.0)
    return StepTime(
        compute=micro_batches * (slowest.compute_forward + slowest.compute_backward),
        recompute=micro_batches * slowest.recompute,
        model=micro_batches * slowest.messages[MODEL],
        seq=micro_batches * slowest.messages[SEQ],
        expert=micro_batches * slowest.messages[EXPERT],
        pipe=micro_batches * (_pipe_waits(layout, job.software) * sending),
        bubble=bubble,
        gradients=reduced,
        parameters=gathered,
        optimizer=_optimizer_seconds(costs, layout),
        agreement=job.software.agreements * longest,
    )


def schedule_bound(costs: Costs, layout: JobLayout, *, even: bool = False) -> float:
    """Return seconds that a layout cannot beat in any order of its axes and with any ZeRO stage.

    These are the passes with every axis' messages on the best possible links, and the bubble. With ``even``, they also
    hold for smaller micro-batches, virtual stages and other divisions of the layers: the mean of the passes over
    stages, and the bubble of single sequences in the most virtual stages.
    """
    job, ranks = costs.job, costs.job.cluster.ranks
    degrees = {PIPE: layout.pipe, SEQ: layout.seq, MODEL: layout.model, EXPERT: layout.expert_parallel}
    best = {axis: span_of(((degree, 1),), ranks, job.cluster.slots) for axis, degree in degrees.items()}
    kinds = costs.stage_kinds(layout)
    totals = [stage_pass(costs, kind, layout, best).total for kind in kinds]
    every = sum(len(kind.numbers) * total for kind, total in zip(kinds, totals, strict=True))
    micro_batches = layout.micro_batches(job.batch)
    if even:
        stages = 2 if job.software.mirrors else min(job.software.virtual_stages, -(-job.model.layers // layout.pipe))
        bubble = every / layout.micro_batch * (layout.pipe - 1) / layout.pipe / stages
        return micro_batches * every / layout.pipe + bubble
    slowest = max(totals)
    return micro_batches * slowest + (every - slowest) / (2 if job.software.mirrors else layout.virtual_stages)


def mirrored_bubble(pipe: int, one: PassTime) -> float:
    """Return the bubble of DeepSpeed's DualPipeV schedule, divided by that of 1F1B; never less than a half.

    With f and b for forward and backward of a half stage and ``b >= 2 f``, the bubble is ``(2b + f) p - 2 (b + f)``
    instead of ``2 (p - 1) (b + f)``. ``tests/engine/test_dualpipe.py`` simulates the schedule.
    """
    forward, backward = one.forward, max(one.backward, 2 * one.forward)
    if pipe == 1:
        return 1.0
    both = forward + backward
    return ((2 * backward + forward) * pipe - 2 * both) / (2 * (pipe - 1) * both)


def stage_pass(costs: Costs, kind: Stage, layout: JobLayout, spans: Spans) -> PassTime:
    """Return the seconds of one micro-batch in all chunks of one stage."""
    compute_forward = compute_backward = recomputed = forward = backward = 0.0
    messages = dict.fromkeys(PASS_AXES, 0.0)
    for count, cost, recompute in costs.pieces(kind, layout):
        ahead, back = _messages(costs, cost, spans)
        again = cost.again[recompute]
        times = 2 if recompute is Recompute.FULL else 1
        compute_forward += count * cost.forward.seconds
        compute_backward += count * cost.backward.seconds
        recomputed += count * again
        forward += count * (cost.forward.seconds + sum(ahead.values()))
        backward += count * (cost.backward.seconds + again + sum(back.values()) + (times - 1) * sum(ahead.values()))
        for axis in PASS_AXES:
            messages[axis] += count * (times * ahead[axis] + back[axis])
    return PassTime(compute_forward, compute_backward, recomputed, messages, forward, backward)


def _messages(costs: Costs, cost: PieceCost, spans: Spans) -> list[dict[str, float]]:
    """Return the seconds of a piece's messages in forward and in backward that nothing covers, by axis."""
    key = (id(cost), *(spans.get(axis) for axis in PASS_AXES))
    if key not in costs.messages:
        costs.messages[key] = [_bare_seconds(costs, one, spans) for one in (cost.forward, cost.backward)]
    return costs.messages[key]


def _bare_seconds(costs: Costs, cost: PassCost, spans: Spans) -> dict[str, float]:
    seconds = dict.fromkeys(PASS_AXES, 0.0)
    covered: dict[tuple[Cover, str], float] = defaultdict(float)
    for transfer in cost.transfers:
        one = collective_seconds(transfer.operation, transfer.size, spans[transfer.axis], costs.job.cluster)
        each = one * transfer.count
        seconds[transfer.axis] += each * transfer.bare
        covered[transfer.cover, transfer.axis] += each * (1 - transfer.bare)
    for (cover, axis), hidden in covered.items():
        seconds[axis] += max(0.0, hidden - cost.covers[cover])
    return seconds


def _pipe_waits(layout: JobLayout, software: Software) -> float:
    """Return the sends that a stage waits for in the steady state, per micro-batch.

    In 1F1B the first stage gets a gradient for the micro-batch that it began p micro-batches ago. That loop has p
    passes of a stage and ``2 (p - 1)`` sends, and so every micro-batch waits for ``2 (p - 1) / p`` of them. Virtual
    stages have two sends for each chunk.
    """
    if layout.virtual_stages == 1:
        return (4 if software.mirrors else 2) * (layout.pipe - 1) / layout.pipe
    return 2 * layout.virtual_stages * (PIPE_BARE if software.overlaps_pipe else 1.0)


def _send_seconds(costs: Costs, layout: JobLayout, spans: Spans) -> float:
    """Return the seconds to send one activation to the next stage, on average over stages.

    Tensor-parallel peers send a part each. They gather it there unless it stays split along the sequence (Narayanan et
    al., section 4.1). DeepSpeed gathers every activation once more before backward.
    """
    if layout.pipe == 1:
        return 0.0
    cluster, size = costs.job.cluster, layout.activation_bytes(costs.job)
    span, ends = spans[PIPE], 1 if layout.virtual_stages == 1 else 0  # virtual stages wrap around
    within = size / layout.model / cluster.inside.bandwidth + cluster.inside.latency
    edges = max(span.forward_edges, cluster.slots)  # a rank cannot use the adapters of others
    across = size / layout.model * edges / cluster.across.bandwidth + cluster.across.latency
    leaving = (span.hosts - ends) / (layout.pipe - ends) if span.hosts > 1 else 0.0
    sent = START_SECONDS + within + leaving * (across - within)
    if layout.sequence_parallel:
        return sent
    gathers = 1.5 if costs.job.software.eager else 1.0
    return sent + gathers * collective_seconds("all_gather", size, spans[MODEL], cluster)


def _replica_seconds(costs: Costs, layout: JobLayout, spans: Spans, passes: list[PassTime]) -> tuple[float, float]:
    """Return the exposed seconds of reducing gradients, and of gathering parameters.

    A stage's reduction runs during its own last backward, and while the stages before it still compute. ZeRO 2 reduces
    after every micro-batch, ZeRO 3 gathers in every pass too. Reducing includes a tied embedding between the ends.
    """
    job, software = costs.job, costs.job.software
    micro_batches = layout.micro_batches(job.batch)
    reduced = gathered = 0.0
    for kind, one in zip(costs.stage_kinds(layout), passes, strict=True):
        reduce, gather, of_copies = _replica_collectives(costs, layout, spans, kind)
        last_layer = 1 / max(1, len(kind.blocks))
        if layout.zero == 3:
            exposed = max(0.0, gather - one.forward) + max(0.0, gather + reduce - one.backward)
            felt = COVERED_FELT * (2 * gather + reduce - exposed)
            last = max(0.0, gather + reduce + of_copies - one.backward) - max(0.0, gather + reduce - one.backward)
            gathered = max(gathered, micro_batches * (exposed + felt + 2 * gather * last_layer) + last)
            continue
        cover = one.backward * (1 - last_layer) if software.overlaps_gradients else 0.0
        held = costs.parameters(kind, layout)
        # the last bucket is ready when backward ends
        last_bucket = min(1.0, LAST_BUCKET_BYTES / max(1, held.total * software.reduced_bytes(job.precision)))
        after_each, last = (max(one - cover, one * last_bucket) for one in (reduce, reduce + of_copies))
        after_last = max(0.0, last - kind.first * one.backward / layout.virtual_stages)
        times = micro_batches if layout.zero == 2 else 1
        reduced = max(reduced, (times - 1) * after_each + after_last)
        cover = one.forward * (1 - last_layer) if software.overlaps_update else 0.0
        gathered = max(gathered, gather - cover)
    if tied := tied_bytes(costs, layout):
        reduced += collective_seconds("all_reduce", tied, spans[ENDS], job.cluster)
    return reduced, gathered


def _replica_collectives(costs: Costs, layout: JobLayout, spans: Spans, kind: Stage) -> tuple[float, float, float]:
    """Return the seconds of one reduction of a stage's gradients, one gathering of its parameters, and one sum.

    The sum is that of a partition's gradients over its copies, in the last micro-batch.
    """
    cluster = costs.job.cluster
    reduce = gather = of_copies = 0.0
    calls = max(1, len(kind.blocks))  # about one for each layer
    levels = two_level_pays(costs, layout, spans)
    for message in gradient_messages(costs, layout, kind):
        operation, span = message.operation, spans[message.axis]
        seconds = collective_seconds(operation, message.size, span, cluster, calls)
        if operation in ("all_gather", FROM_OWNERS):
            gather += seconds
        elif message.axis == COPIES:
            of_copies += seconds
        elif levels and message.axis == GRADIENTS and operation == "all_reduce":
            reduce += _two_level_seconds(message.size, span, cluster)
        else:
            reduce += seconds
    return reduce, gather, of_copies


def gradient_messages(costs: Costs, layout: JobLayout, kind: Stage) -> Iterator[Transfer]:
    """Yield the messages of one reduction of a stage's gradients, and of one gathering of its parameters.

    The gradient of a tied embedding, which first and last stage sum, goes to all replicas, not to its owners alone.
    With an axis ``shard``, partitions are reduced and gathered along it, and once per step summed over their copies.
    """
    job, parameters = costs.job, costs.parameters(kind, layout)
    owners = layout.zero in job.software.sends_to_owners
    operation = "all_reduce" if layout.zero == 0 else TO_OWNERS if owners else "reduce_scatter"
    for count, group in ((parameters.dense, GRADIENTS), (parameters.experts, EXPERT_DATA)):
        if not count:
            continue
        is_end = kind.has_embedding or kind.has_head
        tied = tied_bytes(costs, layout) if owners and is_end and group == GRADIENTS else 0.0
        if tied:
            yield Transfer(group, "all_reduce", tied)
        size = count * job.software.reduced_bytes(job.precision) - tied
        if layout.zero and group == GRADIENTS and SHARD in layout.topology.axes:
            group = SHARD
            yield Transfer(COPIES, "all_reduce", size / layout.partitions)
        yield Transfer(group, operation, size)
        if layout.zero:
            gather = FROM_OWNERS if owners else "all_gather"
            yield Transfer(group, gather, float(count * job.precision.activation_bytes))


def tied_bytes(costs: Costs, layout: JobLayout) -> float:
    """Return the bytes of a tied embedding's gradient on a rank if two stages have it, else 0."""
    job = costs.job
    if not job.model.tied or layout.pipe == 1 or job.software.mirrors:  # DualPipeV has both ends on one rank
        return 0.0
    return job.model.vocabulary * job.model.hidden / layout.model * job.software.reduced_bytes(job.precision)


def two_level_pays(costs: Costs, layout: JobLayout, spans: Spans) -> bool:
    """Return True if reducing gradients inside hosts and then across hosts is faster than one ring."""
    job, span = costs.job, spans[GRADIENTS]
    if not job.software.two_level or span.hosts == 1 or span.size // span.hosts == 1:
        return False
    largest = max(held.dense for held in costs.all_parameters(layout))
    size = largest * job.software.reduced_bytes(job.precision)
    return _two_level_seconds(size, span, job.cluster) < collective_seconds("all_reduce", size, span, job.cluster)


def _two_level_seconds(size: float, span: Span, cluster: Cluster) -> float:
    """Time a reduce_scatter inside hosts, an all_reduce of each part across them, and an all_gather inside."""
    local = span.size // span.hosts
    inner = Span(local, 1, 0, 0, 0)
    outer = Span(span.hosts, span.hosts, cluster.slots, cluster.slots * (span.hosts - 1), 0)
    inside = sum(collective_seconds(operation, size, inner, cluster) for operation in ("reduce_scatter", "all_gather"))
    return inside + collective_seconds("all_reduce", size / local, outer, cluster)


def updated_parameters(costs: Costs, layout: JobLayout) -> list[float]:
    """Return the parameters that a rank's optimizer updates in each kind of stage: with ZeRO those of its partition."""
    shards = layout.partitions if layout.zero else 1
    sparse_shards = layout.replicas // layout.expert_parallel if layout.zero else 1
    return [held.dense / shards + held.experts / sparse_shards for held in costs.all_parameters(layout)]


def _optimizer_seconds(costs: Costs, layout: JobLayout) -> float:
    """Return the seconds of Adam's update, which memory bandwidth limits.

    It reads and writes moments and masters, reads gradients twice (once for their norm), writes weights, and sets all
    gradients to zero.
    """
    job, accelerator = costs.job, costs.job.cluster.accelerator
    precision, gradient = job.precision, job.software.accumulated_bytes(job.precision)
    moved: float = 2 * (precision.master_bytes + ADAM_MOMENTS_BYTES) + 2 * gradient + precision.activation_bytes
    if accelerator.efficiency.update_bytes is not None:
        moved = accelerator.efficiency.update_bytes
    largest = max(
        updated * moved + held.total * gradient
        for updated, held in zip(updated_parameters(costs, layout), costs.all_parameters(layout), strict=True)
    )
    return largest / (accelerator.memory_bandwidth * accelerator.efficiency.memory)
