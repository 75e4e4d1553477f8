"""Explain a plan: every term of its seconds and bytes in words, its axes on hosts, and what another layout loses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_topo.planner.communication import (
    EXPERT,
    EXPERT_DATA,
    FROM_OWNERS,
    GRADIENTS,
    TO_OWNERS,
    Span,
    bytes_leaving,
    collective_seconds,
    layout_spans,
    ring_passes,
)
from ds_topo.planner.costs import Costs, StageKind
from ds_topo.planner.job import Layout, Recompute
from ds_topo.planner.memory import chunks_in_flight, stage_memory
from ds_topo.planner.search import Found, Plan, Tally
from ds_topo.planner.step_time import (
    activation_bytes,
    gradient_messages,
    shared_spans,
    stage_pass,
    tied_bytes,
    two_level_pays,
)
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.expert_tables import ExpertPlan
from ds_topo.topology.rank_tables import gradient_axes

COUNTED_HOSTS = 64
"""``host_traffic`` counts at most so many hosts."""
AXIS_NAMES = {GRADIENTS: "data", EXPERT: "experts"}


@dataclass(frozen=True)
class Term:
    """One term of a step's seconds or of a rank's bytes, with its explanation."""

    name: str
    value: float
    text: str


@dataclass(frozen=True)
class AxisUse:
    """The placement of an axis' groups on hosts, and the bytes that they send to other hosts in a step.

    Args:
        axis: the name of the axis.
        ranks: ranks of a group.
        hosts: hosts that a group spans.
        bytes_per_host: bytes that leave the busiest host in a step for this axis.
    """

    axis: str
    ranks: int
    hosts: int
    bytes_per_host: float

    @property
    def link(self) -> str:
        """The link that carries its messages."""
        return "across hosts" if self.hosts > 1 else "inside hosts"


def explain_time(costs: Costs, plan: Plan) -> list[Term]:
    """Return every term of the step's seconds."""
    layout, job = plan.layout, costs.job
    spans, _ = shared_spans(costs, layout)
    micro_batches = layout.micro_batches(job.batch)
    passes = [(stage_pass(costs, kind, layout, spans), kind) for kind in costs.stage_kinds(layout)]
    slowest, kind = max(passes, key=lambda one: one[0].total)
    blocks = sum(count for count, _ in kind.blocks)
    held = (costs.parameters(kind, layout) for kind in costs.stage_kinds(layout))
    updated = max(one.dense + one.experts for one in held) / (layout.replicas if layout.zero else 1)
    texts = {
        "compute": f"{micro_batches} micro-batches x ({_ms(slowest.compute_forward)} forward + "
        f"{_ms(slowest.compute_backward)} backward) in stage {kind.first} ({blocks} layers"
        f"{', output' if kind.has_head else ''})",
        "recompute": f"{micro_batches} x {_ms(slowest.recompute)}, {layout.recompute.value}",
        "model": f"{micro_batches} x {_ms(slowest.messages[MODEL])} of messages among model={layout.model}, "
        f"{_where(spans[MODEL])}",
        "seq": f"{micro_batches} x {_ms(slowest.messages[SEQ])} that attention does not hide, {_where(spans[SEQ])}",
        "expert": f"{micro_batches} x {_ms(slowest.messages[EXPERT])} of tokens sent to experts and back",
        "pipe": f"{micro_batches} x 2 sends of {bytes_text(activation_bytes(costs, layout) / layout.model)} per stage, "
        f"{_where(spans[PIPE])}",
        "bubble": f"(p - 1) / (v m) = {layout.pipe - 1} / ({layout.virtual_stages} x {micro_batches}) where stages "
        "are equal",
        "gradients": _gradients_text(costs, layout, spans),
        "parameters": f"ZeRO {layout.zero} gathers what is sharded over {layout.replicas} ranks",
        "optimizer": f"Adam on {updated / 1e6:,.1f} M parameters, bound by memory",
        "agreement": f"{job.software.agreements} small collectives about losses, norms and overflows",
        "program": f"what {job.software.name} itself does in a step and {micro_batches} x in a micro-batch",
        "sharing": f"ranks share {job.cluster.processors:g} processors",
    }
    return [Term(name, seconds, texts[name]) for name, seconds in plan.time.parts().items() if seconds > 0]


def _gradients_text(costs: Costs, layout: Layout, spans: Mapping[str, Span]) -> str:
    kind = max(costs.stage_kinds(layout), key=lambda one: costs.parameters(one, layout).dense)
    span, cluster = spans[GRADIENTS], costs.job.cluster
    texts = []
    for operation, size, group, times in gradient_messages(costs, layout, kind):
        if group == GRADIENTS and operation not in ("all_gather", FROM_OWNERS):
            leaving = bytes_leaving(operation, size, span, cluster)
            texts.append(
                f"{operation} of {bytes_text(size)} over {span.size} ranks, {_where(span)}"
                + (f" ({bytes_text(leaving)} leave a host)" if leaving else "")
                + f", {_ms(collective_seconds(operation, size, span, cluster))}"
                + (f" x {times:g}" if times > 1 else "")
            )
    if two_level_pays(costs, layout, spans):
        texts.append("in two levels")
    hidden = "behind backward as far as it goes" if costs.job.software.overlaps_gradients else "after backward"
    return ", ".join([*texts, hidden])


def explain_memory(costs: Costs, plan: Plan) -> list[Term]:
    """Return every term of the bytes of the fullest rank."""
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
        "working": "gradients of activations in backward" + ("" if whole else ", one layer computed again"),
        "buffers": "buckets of gradients, gathered parameters",
    }
    return [Term(name, size, texts[name]) for name, size in plan.memory.parts().items() if size > 0]


def explain_axes(costs: Costs, layout: Layout) -> list[AxisUse]:
    """Return the hosts that each axis' groups span, and the bytes that they send between hosts."""
    spans = layout_spans(costs, layout)
    traffic = max(host_traffic(costs, layout), key=lambda sent: sum(sent.values()))
    uses = []
    for axis in (PIPE, GRADIENTS, SEQ, EXPERT, MODEL):
        span = spans.get(axis)
        if span is not None and span.size > 1:
            uses.append(AxisUse(AXIS_NAMES.get(axis, axis), span.size, span.hosts, traffic.get(axis, 0.0)))
    return uses


def reason(found: Found) -> str:
    """Return why the best is the best: the terms in which the next set of degrees loses most."""
    best, other = found.best, found.runner_up
    if other is None:
        return "no other degrees fit" if found.tally.degrees > 1 else "no other degrees were tried"
    spec = other.layout.topology.spec
    if other.seconds <= best.seconds * 1.001:
        if best.memory.total < 0.999 * other.memory.total:
            return f"as fast as {spec}, with less memory"
        return f"no other is faster; {spec} is as fast"
    losses = sorted(differences(best, other), key=lambda term: term.value, reverse=True)
    named = ", ".join(f"{_ms(term.value)} more {term.name}" for term in losses[:2] if term.value > 0)
    return f"the next, {spec}, is {other.seconds / best.seconds - 1:.1%} slower: {named}"


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
    return lines + [f"{count:,} x {problem}" for problem, count in tally.problems.most_common(5)]


def _where(span: Span) -> str:
    return f"across {span.hosts} hosts" if span.crosses else "inside hosts"


def _ms(seconds: float) -> str:
    """Return seconds or milliseconds with three digits.

    >>> _ms(2.345), _ms(0.01234)
    ('2.35 s', '12.3 ms')
    """
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.3g} ms"


def bytes_text(size: float) -> str:
    """Return bytes as MB, GB or TB with three digits.

    >>> bytes_text(12_345_678), bytes_text(2.5e12)
    ('12.3 MB', '2.5 TB')
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e6:.3g} MB"


def host_traffic(costs: Costs, layout: Layout) -> list[dict[str, float]]:
    """Return the bytes that leave each host in a step, by axis, as its interface counts them.

    ``GRADIENTS`` stands for gradients and gathered parameters. Of many hosts, only the first ones and the last one are
    counted. Rings visit the ranks of a group in order, as gloo's and NCCL's do if ranks of a host are adjacent.
    """
    hosts = -(-layout.topology.world_size() // costs.job.cluster.slots)
    counted = range(hosts) if hosts <= COUNTED_HOSTS else [*range(COUNTED_HOSTS - 1), hosts - 1]
    counter = _TrafficCounter(costs, layout)
    return [counter.of_host(host) for host in counted]


@dataclass(frozen=True)
class _Message:
    """``times`` collectives of a group of ranks along an axis."""

    axis: str
    operation: str
    size: float
    times: float
    ranks: Sequence[int]


class _TrafficCounter:
    """Counts the bytes that ranks of a host send to ranks elsewhere."""

    def __init__(self, costs: Costs, layout: Layout) -> None:
        self.costs, self.layout, self.job = costs, layout, costs.job
        self.slots, self.topology = costs.job.cluster.slots, layout.topology
        self.micro_batches = layout.micro_batches(costs.job.batch)
        self.kind_of_stage = {stage: kind for kind in costs.stage_kinds(layout) for stage in kind.stages}
        self.two_level = two_level_pays(costs, layout, layout_spans(costs, layout))
        self.tied_bytes = tied_bytes(costs, layout)

    def of_host(self, host: int) -> dict[str, float]:
        traffic: dict[str, float] = {}
        topology = self.topology
        for rank in range(host * self.slots, min((host + 1) * self.slots, topology.world_size())):
            stage = topology.layout.index_of(rank, topology.axes.index(PIPE)) if PIPE in topology.axes else 0
            messages = self._messages(rank, self.kind_of_stage[stage])
            sent = [(message.axis, self._sent(rank, message)) for message in messages]
            sent.append((PIPE, self._sent_along_pipe(rank, stage)))
            sent.append((MODEL, self._sent_to_gather(rank, stage)))
            sent.append((GRADIENTS, self._sent_for_tied(rank, stage)))
            for axis, count in sent:
                if count:
                    traffic[axis] = traffic.get(axis, 0.0) + count
        return traffic

    def _messages(self, rank: int, kind: StageKind) -> Iterator[_Message]:
        """Yield the collectives that a rank takes part in."""
        topology, layout = self.topology, self.layout
        ranks = {axis: topology.get_axis_ranks(axis, rank) for axis in (MODEL, SEQ)}
        ranks[GRADIENTS] = topology.get_axis_ranks(gradient_axes(topology), rank)
        if self.job.model.expert_count:
            plan = ExpertPlan(topology, layout.expert_parallel, expert_tensor_parallel=True)
            ranks[EXPERT], ranks[EXPERT_DATA] = plan.expert_ranks(rank), plan.expert_data_ranks(rank)
        for count, cost, recompute in self.costs.pieces(kind, layout):
            again = [cost.work.forward] if recompute is Recompute.FULL else []
            for one in (cost.work.forward, cost.work.backward, *again):
                for item in one.transfers:
                    times = count * item.count * self.micro_batches
                    yield _Message(item.axis, item.operation, item.size, times, ranks[item.axis])
        for operation, size, group, times in gradient_messages(self.costs, layout, kind):
            yield _Message(group, operation, size, times, ranks[group])

    def _sent(self, rank: int, message: _Message) -> float:
        """Return the bytes that ``rank`` itself sends to other hosts."""
        ranks, place, host = message.ranks, message.ranks.index(rank), rank // self.slots
        if len(ranks) == 1:
            return 0.0
        if message.operation == "all_to_all":
            away = sum(1 for peer in ranks if peer // self.slots != host)
            return message.times * message.size / len(ranks) * away
        hosts = len({peer // self.slots for peer in ranks})
        if message.operation in (TO_OWNERS, FROM_OWNERS) and self.job.cluster.is_cpu:
            return message.times * message.size / len(ranks) * (hosts - 1)
        passes = ring_passes(message.operation, self.job.cluster)
        if message.operation == "all_reduce" and message.axis == GRADIENTS and self.two_level:
            return message.times * passes * message.size / (len(ranks) / hosts) * (hosts - 1) / hosts
        if ranks[(place + 1) % len(ranks)] // self.slots == host:
            return 0.0
        return message.times * passes * message.size * (len(ranks) - 1) / len(ranks)

    def _sent_along_pipe(self, rank: int, stage: int) -> float:
        """Return the bytes of activations to the next stage and gradients to the one before; chunks wrap around.

        Peers along ``model`` send a part each.
        """
        layout = self.layout
        if layout.pipe == 1:
            return 0.0
        line = self.topology.get_axis_ranks(PIPE, rank)
        size = activation_bytes(self.costs, layout) / layout.model
        before, after = self._neighbors(stage)
        sent = 0.0
        for times, peer in ((after, line[(stage + 1) % len(line)]), (before, line[stage - 1])):
            if peer // self.slots != rank // self.slots:
                sent += times * size
        return sent * self.micro_batches

    def _sent_to_gather(self, rank: int, stage: int) -> float:
        """Return the bytes by which peers along ``model`` gather the parts that each received from another stage.

        They gather activations and gradients; DeepSpeed gathers activations again before backward.
        """
        layout = self.layout
        if layout.pipe == 1 or layout.model == 1 or layout.sequence_parallel:
            return 0.0
        before, after = self._neighbors(stage)
        gathers = before + after + (after if self.job.software.eager else 0)
        peers = self.topology.get_axis_ranks(MODEL, rank)
        message = _Message(MODEL, "all_gather", activation_bytes(self.costs, layout), gathers, peers)
        return self._sent(rank, message) * self.micro_batches

    def _neighbors(self, stage: int) -> tuple[int, int]:
        """Return how many chunks of a stage receive activations from the stage before, and send them to the next."""
        virtual, last = self.layout.virtual_stages, self.layout.pipe - 1
        return virtual - (stage == 0), virtual - (stage == last)

    def _sent_for_tied(self, rank: int, stage: int) -> float:
        """Return the bytes of a tied embedding's gradient, summed between the first stage and the last."""
        if not self.tied_bytes or stage not in (0, self.layout.pipe - 1):
            return 0.0
        line = self.topology.get_axis_ranks(PIPE, rank)
        message = _Message(PIPE, "all_reduce", self.tied_bytes, 1.0, [line[0], line[-1]])
        return self._sent(rank, message)
