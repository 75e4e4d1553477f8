"""Explain a plan: every term of its seconds and bytes in words, its axes on hosts, and what another layout loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_topo.errors import bytes_text
from ds_topo.plan import step_time
from ds_topo.plan.job import JobLayout, Recompute
from ds_topo.plan.memory import chunks_in_flight, stage_memory
from ds_topo.plan.search import TIE, Found, Plan, Tally
from ds_topo.plan.stages import Costs
from ds_topo.plan.step_time import EXPERT, FROM_OWNERS, GRADIENTS, Span, Spans
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import gradient_axes


@dataclass(frozen=True)
class Term:
    """One term of a step's seconds or of a rank's bytes, with its explanation."""

    name: str
    value: float
    text: str


def explain_time(costs: Costs, plan: Plan) -> list[Term]:
    """Return every term of the step's seconds."""
    layout, job = plan.layout, costs.job
    spans = step_time.layout_spans(costs, layout)
    micro_batches = layout.micro_batches(job.batch)
    passes = ((step_time.stage_pass(costs, kind, layout, spans), kind) for kind in costs.stage_kinds(layout))
    slowest, kind = max(passes, key=lambda one: one[0].total)
    updated = max(step_time.updated_parameters(costs, layout))
    factor = step_time.mirrored_bubble(layout.pipe, slowest)
    mirrored = f", x {factor:.2f} by DualPipeV" if job.software.mirrors else ""
    texts = {
        "compute": f"{micro_batches} micro-batches x ({_ms(slowest.compute_forward)} forward + "
        f"{_ms(slowest.compute_backward)} backward) in stage {kind.first} ({len(kind.blocks)} layers"
        f"{', output' if kind.has_head else ''})",
        "recompute": f"{micro_batches} x {_ms(slowest.recompute)}, {layout.recompute.value}",
        "model": f"{micro_batches} x {_ms(slowest.messages[MODEL])} of messages among model={layout.model}, "
        f"{_where(spans[MODEL])}",
        "seq": f"{micro_batches} x {_ms(slowest.messages[SEQ])} that attention does not hide, {_where(spans[SEQ])}",
        "expert": f"{micro_batches} x {_ms(slowest.messages[EXPERT])} of tokens sent to experts and back",
        "pipe": f"{micro_batches} x 2 sends of {bytes_text(layout.activation_bytes(job) / layout.model)} "
        f"per stage, {_where(spans[PIPE])}",
        "bubble": f"(p - 1) / (v m) = {layout.pipe - 1} / ({layout.virtual_stages} x {micro_batches}) where stages "
        f"are equal{mirrored}",
        "gradients": _gradients_text(costs, layout, spans),
        "parameters": f"ZeRO {layout.zero} gathers what is sharded over {layout.partitions} ranks",
        "optimizer": f"Adam on {updated / 1e6:,.1f} M parameters, bound by memory",
        "agreement": f"{job.software.agreements} small collectives about losses, norms and overflows",
    }
    return [Term(name, seconds, texts[name]) for name, seconds in plan.time.parts().items() if seconds > 0]


def _gradients_text(costs: Costs, layout: JobLayout, spans: Spans) -> str:
    kind = max(costs.stage_kinds(layout), key=lambda one: costs.parameters(one, layout).dense)
    span, cluster = spans[GRADIENTS], costs.job.cluster
    times = layout.micro_batches(costs.job.batch) if layout.zero >= 2 else 1
    texts = []
    for message in step_time.gradient_messages(costs, layout, kind):
        operation, size = message.operation, message.size
        if message.axis == GRADIENTS and operation not in ("all_gather", FROM_OWNERS):
            leaving = step_time.bytes_leaving(operation, size, span)
            texts.append(
                f"{operation} of {bytes_text(size)} over {span.size} ranks, {_where(span)}"
                + (f" ({bytes_text(leaving)} leave a host)" if leaving else "")
                + f", {_ms(step_time.collective_seconds(operation, size, span, cluster))}"
                + (f" x {times}" if times > 1 else "")
            )
    if step_time.two_level_pays(costs, layout, spans):
        texts.append("in two levels")
    hidden = "behind backward as far as it goes" if costs.job.software.overlaps_gradients else "after backward"
    return ", ".join([*texts, hidden])


def explain_memory(costs: Costs, plan: Plan) -> list[Term]:
    """Return every term of the bytes of the fullest rank."""
    layout, job = plan.layout, costs.job
    kind = max(costs.stage_kinds(layout), key=lambda one: stage_memory(costs, one, layout).total)
    parameters = costs.parameters(kind, layout)
    micro_batches = layout.micro_batches(job.batch)
    chunks = chunks_in_flight(kind.first, layout.pipe, layout.virtual_stages, micro_batches, job.software.mirrors)
    shards = f" / {layout.partitions} {'partitions' if layout.partitions < layout.replicas else 'replicas'}"
    experts = f" + {parameters.experts / 1e6:,.1f} M of experts" if parameters.experts else ""
    held = f"{parameters.dense / 1e6:,.1f} M{experts} parameters of stage {kind.first}"
    whole = layout.recompute is Recompute.NONE
    texts = {
        "weights": held + (shards if layout.zero == 3 else ""),
        "gradients": held + (shards if layout.zero >= 2 else ""),
        "optimizer": held + (shards if layout.zero else ""),
        "activations": f"{chunks} chunks in flight of {layout.virtual_stages} per micro-batch, kept "
        + ("whole" if whole else f"for recomputation: {layout.recompute.value}"),
        "working": "gradients of activations in backward" + ("" if whole else ", one layer computed again"),
        "buffers": "buckets of gradients, gathered parameters",
    }
    return [Term(name, size, texts[name]) for name, size in plan.memory.parts().items() if size > 0]


def explain_axes(costs: Costs, layout: JobLayout) -> list[dict[str, Any]]:
    """Return the hosts that each axis' groups span.

    The axis of gradients is all axes of replicas, such as ``data+seq (gradients)``.
    """
    spans = step_time.layout_spans(costs, layout)
    replicas = "+".join(axis for axis in gradient_axes(layout.topology) if layout.topology.get_dim(axis) > 1)
    names = {GRADIENTS: f"{replicas} (gradients)", EXPERT: "experts"}
    return [
        {
            "axis": names.get(axis, axis),
            "ranks": span.size,
            "hosts": span.hosts,
            "link": "across hosts" if span.hosts > 1 else "inside hosts",
        }
        for axis in (PIPE, GRADIENTS, SEQ, EXPERT, MODEL)
        if (span := spans.get(axis)) and span.size > 1
    ]


def reason(found: Found) -> str:
    """Return why the first plan is the best, as a sentence: the terms in which the next set of degrees loses most."""
    best, other = found.best, found.runner_up
    if other is None:
        return "No other degrees fit." if found.tally.degrees > 1 else "No other degrees were tried."
    spec = other.layout.topology.spec
    if other.seconds <= best.seconds * (1 + TIE):
        axes, others = (sum(degree > 1 for degree in plan.layout.topology.dims) for plan in (best, other))
        if axes < others:
            return f"The first is as fast as {spec} and has fewer axes."
        if best.memory.total < 0.999 * other.memory.total:
            return f"The first is as fast as {spec} and needs less memory."
        return f"The first and {spec} are equally fast. No other is faster."
    losses = sorted(differences(best, other), key=lambda term: term.value, reverse=True)
    named = ", ".join(f"{term.name} takes {_ms(term.value)} longer" for term in losses[:2] if term.value > 0)
    return f"The next best, {spec}, is {other.seconds / best.seconds - 1:.1%} slower: {named}."


def needs(found: Found) -> list[str]:
    """Return what a program needs for the axes of the plans, as sentences."""
    layouts, software = [plan.layout for plan in found.plans], found.job.software
    module = "DualPipeVModule" if software.mirrors else "PipelineModule"
    texts = {
        PIPE: f"a {module}" if software.eager else "a schedule of micro-batches",
        SEQ: "ring attention" if software.seq_exchange == "ring" else "Ulysses attention",
        MODEL: "layers that split their weights",
    }
    used = [
        f"{axis} needs {text}" for axis, text in texts.items() if any(one.topology.get_dim(axis) > 1 for one in layouts)
    ]
    if any(layout.expert_parallel > 1 for layout in layouts):
        used.append("experts over ranks need expert groups")
    return used


def differences(best: Plan, other: Plan) -> list[Term]:
    """Return the seconds that ``other`` takes longer (or less), term by term."""
    mine, theirs = best.time.parts(), other.time.parts()
    return [
        Term(name, theirs[name] - mine[name], f"{_ms(mine[name])} against {_ms(theirs[name])}")
        for name in mine
        if max(mine[name], theirs[name]) > 0
    ]


def rejections(tally: Tally) -> list[str]:
    """Return what became of the layouts that are no plan, as lines of text."""
    timed = f"{tally.evaluated:,} layouts timed, {tally.bounded:,} branches cut by their bounds"
    lines = [f"{timed}, {tally.too_large:,} do not fit into memory"]
    if tally.smallest is not None:
        layout, memory = tally.smallest
        lines.append(f"closest to fitting: {layout}: {memory.total / 1e9:.1f} GB")
    problems = tally.degree_problems + tally.layout_problems
    return lines + [f"{count:,} x {problem}" for problem, count in problems.most_common(5)]


def _where(span: Span) -> str:
    return f"across {span.hosts} hosts" if span.hosts > 1 else "inside hosts"


def _ms(seconds: float) -> str:
    """Return seconds or milliseconds with three digits.

    >>> _ms(2.345), _ms(0.01234)
    ('2.35 s', '12.3 ms')
    """
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.3g} ms"
