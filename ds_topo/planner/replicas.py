"""What replicas of parameters cost: reducing gradients, gathering sharded parameters, the optimizer's update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ds_topo.planner.cluster import Cluster
from ds_topo.planner.communication import FROM_OWNERS, TO_OWNERS, collective_seconds
from ds_topo.planner.costs import Costs, StageKind
from ds_topo.planner.group_spans import ENDS, EXPERT_DATA, GRADIENTS
from ds_topo.planner.layout import Layout
from ds_topo.planner.precision import ADAM_MOMENTS_BYTES
from ds_topo.planner.spans import Span

LAST_BUCKET_BYTES = 1 << 20
"""By default of :class:`ds_topo.GradientReducer`."""
COVERED_FELT = 0.15
"""Of the messages of ZeRO 3 that every pass covers, the share of their time by which computing slows down: they take
processors and memory bandwidth from it (Rashidi et al., ISCA 2021, measure 10 to 20%)."""


class Passes(Protocol):
    """Seconds of one micro-batch in a stage, messages included."""

    @property
    def forward(self) -> float: ...

    @property
    def backward(self) -> float: ...


def replica_seconds(
    costs: Costs, layout: Layout, spans: Mapping[str, Span], kinds: list[StageKind], passes: Sequence[Passes]
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
        after_each = max(reduce - cover, reduce * _last_share(costs, layout, kind))
        after_last = max(0.0, after_each - kind.first * one.backward / layout.virtual_stages)
        times = micro_batches if layout.zero == 2 else 1
        reduced = max(reduced, (times - 1) * after_each + after_last)
        cover = one.forward * (1 - last_layer) if software.overlaps_update else 0.0
        gathered = max(gathered, gather - cover)
    if tied := tied_bytes(costs, layout):
        reduced += collective_seconds("all_reduce", tied, spans[ENDS], cluster)
    return reduced, gathered


def _last_share(costs: Costs, layout: Layout, kind: StageKind) -> float:
    """Of a stage's gradients, those in the last bucket, which are there when backward is over; all of a small stage."""
    parameters = costs.parameters(kind, layout)
    size = (parameters.dense + parameters.experts) * reduction_bytes(costs)
    return min(1.0, LAST_BUCKET_BYTES / size) if size else 0.0


def tied_bytes(costs: Costs, layout: Layout) -> float:
    """Of the gradient of a tied embedding that two stages have, on a rank; 0 if there is none."""
    job = costs.job
    if not job.model.tied or layout.pipe == 1:
        return 0.0
    return job.model.vocabulary * job.model.hidden / layout.model * reduction_bytes(costs)


def gradient_messages(costs: Costs, layout: Layout, kind: StageKind) -> list[tuple[str, float, str, float]]:
    """``(operation, bytes, group, times)`` of a step's reductions of gradients and gatherings of parameters.

    ZeRO 2 reduces after every micro-batch; ZeRO 3 gathers in forward and in backward of each, too. The gradient of a
    tied embedding, which first and last stage sum, goes to all replicas, not to its owners alone.
    """
    job, parameters = costs.job, costs.parameters(kind, layout)
    whole, owners = layout.zero in job.software.reduces_whole, layout.zero in job.software.sends_to_owners
    micro_batches = layout.micro_batches(job.batch)
    messages: list[tuple[str, float, str, float]] = []
    for count, group in ((parameters.dense, GRADIENTS), (parameters.experts, EXPERT_DATA)):
        if not count:
            continue
        reductions = micro_batches if layout.zero >= 2 else 1
        operation = "all_reduce" if whole else TO_OWNERS if owners else "reduce_scatter"
        is_end = kind.stage.has_embedding or kind.stage.has_head
        tied = tied_bytes(costs, layout) if owners and is_end and group == GRADIENTS else 0.0
        if tied:
            messages.append(("all_reduce", tied, group, float(reductions)))
        messages.append((operation, count * reduction_bytes(costs) - tied, group, float(reductions)))
        if layout.zero:
            gathers = 2 * micro_batches if layout.zero == 3 else 1
            gather = FROM_OWNERS if owners else "all_gather"
            messages.append((gather, float(count * job.precision.activation_bytes), group, float(gathers)))
    return messages


def two_level_pays(costs: Costs, layout: Layout, spans: Mapping[str, Span]) -> bool:
    """Whether gradients are reduced faster inside hosts and across hosts apart than in one ring."""
    span = spans[GRADIENTS]
    local = span.size // span.hosts
    if not costs.job.software.two_level or span.hosts == 1 or local == 1:
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
        if operation in ("all_gather", FROM_OWNERS):
            gather += seconds
        elif levels and group == GRADIENTS and operation == "all_reduce":
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
