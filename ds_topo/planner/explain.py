"""Where a plan's seconds and bytes come from, in words and numbers; what another layout loses, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_topo.planner.communication import FROM_OWNERS, bytes_leaving, collective_seconds
from ds_topo.planner.costs import Costs
from ds_topo.planner.group_spans import EXPERT, GRADIENTS, layout_spans
from ds_topo.planner.layout import Layout
from ds_topo.planner.memory import chunks_in_flight, stage_memory
from ds_topo.planner.replicas import gradient_messages, two_level_pays
from ds_topo.planner.search import Found, Plan, Tally
from ds_topo.planner.software import Recompute
from ds_topo.planner.spans import Span
from ds_topo.planner.step_time import activation_bytes, shared_spans, stage_pass
from ds_topo.planner.traffic import host_traffic
from ds_topo.topology.axes import MODEL, PIPE, SEQ

AXIS_NAMES = {GRADIENTS: "data", EXPERT: "experts"}


@dataclass(frozen=True)
class Term:
    """One term of a step's seconds or of a rank's bytes, and how it comes about."""

    name: str
    value: float
    text: str


@dataclass(frozen=True)
class AxisUse:
    """How the groups of an axis lie on the hosts, and what they send to others in a step.

    Args:
        axis: its name.
        ranks: of a group.
        hosts: that a group spans.
        bytes_per_host: that leave the busiest host in a step for this axis.
    """

    axis: str
    ranks: int
    hosts: int
    bytes_per_host: float

    @property
    def link(self) -> str:
        """Which link carries it."""
        return "across hosts" if self.hosts > 1 else "inside hosts"


def explain_time(costs: Costs, plan: Plan) -> list[Term]:
    """Every term of the step's seconds."""
    layout, job = plan.layout, costs.job
    spans, _ = shared_spans(costs, layout)
    micro_batches = layout.micro_batches(job.batch)
    kinds = costs.stage_kinds(layout)
    passes = [stage_pass(costs, kind, layout, spans) for kind in kinds]
    place = max(range(len(passes)), key=lambda index: passes[index].total)
    slowest, kind = passes[place], kinds[place]
    blocks = sum(count for count, _ in kind.blocks)
    stage = f"stage {kind.first} ({blocks} layers{', output' if kind.stage.has_head else ''})"
    texts = {
        "compute": f"{micro_batches} micro-batches x ({_ms(slowest.compute_forward)} forward + "
        f"{_ms(slowest.compute_backward)} backward) in {stage}",
        "recompute": f"{micro_batches} x {_ms(slowest.recompute)}, {layout.recompute.value}",
        "model": f"{micro_batches} x {_ms(slowest.messages[MODEL])} of messages among model={layout.model}, "
        f"{_where(spans[MODEL])}",
        "seq": f"{micro_batches} x {_ms(slowest.messages[SEQ])} that attention does not hide, {_where(spans[SEQ])}",
        "expert": f"{micro_batches} x {_ms(slowest.messages['expert'])} of tokens on their way to experts",
        "pipe": f"{micro_batches} x 2 sends of {bytes_text(activation_bytes(costs, layout) / layout.model)} per stage, "
        f"{_where(spans[PIPE])}",
        "bubble": f"(p - 1) / (v m) = {layout.pipe - 1} / ({layout.virtual_stages} x {micro_batches}) where stages "
        "are equal",
        "gradients": _gradients_text(costs, layout, spans),
        "parameters": f"ZeRO {layout.zero} gathers what is sharded over {layout.replicas} ranks",
        "optimizer": f"Adam on {_owned(costs, layout) / 1e6:,.1f} M parameters, bound by memory",
        "agreement": f"{job.software.agreements} small collectives about losses, norms and overflows",
        "program": f"what {job.software.name} itself does in a step and {micro_batches} x in a micro-batch",
        "sharing": f"ranks share {job.cluster.processors:g} processors",
    }
    return [Term(name, seconds, texts[name]) for name, seconds in plan.time.parts().items() if seconds > 0]


def explain_memory(costs: Costs, plan: Plan) -> list[Term]:
    """Every term of the bytes of the fullest rank."""
    layout, job = plan.layout, costs.job
    kind = max(costs.stage_kinds(layout), key=lambda one: stage_memory(costs, one, layout).total)
    parameters = costs.parameters(kind, layout)
    chunks = chunks_in_flight(kind.first, layout.pipe, layout.virtual_stages, layout.micro_batches(job.batch))
    shards = f" / {layout.replicas} replicas"
    experts = f" + {parameters.experts / 1e6:,.1f} M of experts" if parameters.experts else ""
    held = f"{parameters.dense / 1e6:,.1f} M{experts} parameters of stage {kind.first}"
    whole = layout.recompute is Recompute.NONE
    texts = {
        "weights": held + (shards if layout.zero == 3 else ""),
        "gradients": held + (shards if layout.zero >= 2 else ""),
        "optimizer": held + (shards if layout.zero else ""),
        "activations": f"{chunks} chunks in flight of {layout.virtual_stages} per micro-batch, kept "
        + ("whole" if whole else f"for recomputation: {layout.recompute.value}"),
        "working": "gradients of activations in backward" + ("" if whole else ", one layer made whole again"),
        "buffers": "buckets of gradients, gathered parameters",
    }
    return [Term(name, size, texts[name]) for name, size in plan.memory.parts().items() if size > 0]


def explain_axes(costs: Costs, layout: Layout) -> list[AxisUse]:
    """Where the order of axes puts each axis' groups, and what they send between hosts."""
    spans = layout_spans(costs, layout)
    traffic = max(host_traffic(costs, layout), key=lambda host: host.total)
    uses = []
    for axis in (PIPE, GRADIENTS, SEQ, EXPERT, MODEL):
        span = spans.get(axis)
        if span is None or span.size == 1 or (axis == SEQ and SEQ not in layout.topology.axes):
            continue
        sent = traffic.bytes_by_axis.get(axis, 0.0)
        uses.append(AxisUse(AXIS_NAMES.get(axis, axis), span.size, span.hosts, sent))
    return uses


def reason(found: Found) -> str:
    """Why the best is the best: the terms in which the next set of degrees loses most."""
    best, other = found.best, found.runner_up
    if other is None:
        return "no other degrees fit" if found.tally.degrees > 1 else "no other degrees were tried"
    if other.seconds <= best.seconds * 1.001:
        if best.memory.total < 0.999 * other.memory.total:
            return f"as fast as {other.layout.topology.spec}, with less memory"
        return f"no other is faster; {other.layout.topology.spec} is as fast"
    losses = sorted(differences(best, other), key=lambda term: term.value, reverse=True)
    named = ", ".join(f"{_ms(term.value)} more {term.name}" for term in losses[:2] if term.value > 0)
    lost = other.seconds / best.seconds - 1
    return f"the next, {other.layout.topology.spec}, is {lost:.1%} slower: {named}"


def differences(best: Plan, other: Plan) -> list[Term]:
    """Seconds that ``other`` takes longer (or less), term by term."""
    mine, theirs = best.time.parts(), other.time.parts()
    return [
        Term(name, theirs[name] - mine[name], f"{_ms(mine[name])} against {_ms(theirs[name])}")
        for name in mine
        if max(mine[name], theirs[name]) > 0
    ]


def rejections(tally: Tally) -> list[str]:
    """What became of the layouts that are no plan."""
    timed = f"{tally.evaluated:,} layouts timed, {tally.bounded:,} branches cut by their bounds"
    lines = [f"{timed}, {tally.too_large:,} do not fit into memory"]
    if tally.smallest is not None:
        layout, memory = tally.smallest
        lines.append(f"closest to fitting: {layout}: {memory.total / 1e9:.1f} GB")
    lines += [f"{count:,} x {problem}" for problem, count in tally.problems.most_common(5)]
    return lines


def _gradients_text(costs: Costs, layout: Layout, spans: Mapping[str, Span]) -> str:
    kind = max(costs.stage_kinds(layout), key=lambda one: costs.parameters(one, layout).dense)
    span, cluster = spans[GRADIENTS], costs.job.cluster
    texts = []
    for operation, size, group, times in gradient_messages(costs, layout, kind):
        if group == GRADIENTS and operation not in ("all_gather", FROM_OWNERS):
            seconds = collective_seconds(operation, size, span, cluster)
            leaving = bytes_leaving(operation, size, span, cluster)
            texts.append(
                f"{operation} of {bytes_text(size)} over {span.size} ranks, {_where(span)}"
                + (f" ({bytes_text(leaving)} leave a host)" if leaving else "")
                + f", {_ms(seconds)}"
                + (f" x {times:g}" if times > 1 else "")
            )
    if two_level_pays(costs, layout, spans):
        texts.append("in two levels")
    hidden = "behind backward as far as it goes" if costs.job.software.overlaps_gradients else "after backward"
    return ", ".join([*texts, hidden])


def _owned(costs: Costs, layout: Layout) -> float:
    """Parameters that the busiest rank updates."""
    largest = 0.0
    for kind in costs.stage_kinds(layout):
        parameters = costs.parameters(kind, layout)
        shards = layout.replicas if layout.zero else 1
        largest = max(largest, (parameters.dense + parameters.experts) / shards)
    return largest


def _where(span: Span) -> str:
    return f"across {span.hosts} hosts" if span.crosses else "inside hosts"


def _ms(seconds: float) -> str:
    """Seconds or milliseconds, three digits.

    >>> _ms(2.345), _ms(0.01234)
    ('2.35 s', '12.3 ms')
    """
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.3g} ms"


def bytes_text(size: float) -> str:
    """Bytes as MB, GB or TB, three digits.

    >>> bytes_text(12_345_678), bytes_text(2.5e12)
    ('12.3 MB', '2.5 TB')
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e6:.3g} MB"
