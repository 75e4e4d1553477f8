"""Bytes that each host sends to others in one step, axis by axis, as its interface counts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ds_topo.planner.communication import FROM_OWNERS, TO_OWNERS, ring_passes
from ds_topo.planner.costs import Costs, StageKind
from ds_topo.planner.group_spans import EXPERT, EXPERT_DATA, GRADIENTS, layout_spans
from ds_topo.planner.layout import Layout
from ds_topo.planner.replicas import gradient_messages, tied_bytes, two_level_pays
from ds_topo.planner.software import Recompute
from ds_topo.planner.step_time import activation_bytes
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.expert_tables import ExpertPlan
from ds_topo.topology.rank_tables import gradient_axes

SAMPLED_HOSTS = 64


@dataclass
class HostTraffic:
    """Bytes that leave one host in a step, by axis (``data``: gradients and gathered parameters)."""

    host: int
    bytes_by_axis: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Over all axes."""
        return sum(self.bytes_by_axis.values())

    def add(self, axis: str, count: float) -> None:
        """Count bytes of an axis."""
        if count:
            self.bytes_by_axis[axis] = self.bytes_by_axis.get(axis, 0.0) + count


def host_traffic(costs: Costs, layout: Layout) -> list[HostTraffic]:
    """Every host's bytes; of many hosts, the first ones' and the last one's.

    Rings visit the ranks of a group in order, as gloo's and NCCL's do where ranks of a host are adjacent.
    """
    slots = costs.job.cluster.slots
    hosts = -(-layout.topology.world_size() // slots)
    sampled = range(hosts) if hosts <= SAMPLED_HOSTS else [*range(SAMPLED_HOSTS - 1), hosts - 1]
    counter = _Counter(costs, layout)
    return [counter.of_host(host) for host in sampled]


@dataclass(frozen=True)
class _Message:
    """``times`` collectives of a group of ranks along an axis."""

    axis: str
    operation: str
    size: float
    times: float
    ranks: Sequence[int]


class _Counter:
    """Counts what ranks of a host send to ranks elsewhere."""

    def __init__(self, costs: Costs, layout: Layout) -> None:
        self.costs, self.layout, self.job = costs, layout, costs.job
        self.slots = costs.job.cluster.slots
        self.kinds = costs.stage_kinds(layout)
        self.micro_batches = layout.micro_batches(costs.job.batch)
        self.kind_of_stage = _kind_of_stage(self.kinds, layout)
        self.levels = two_level_pays(costs, layout, layout_spans(costs, layout))
        self.tied_bytes = tied_bytes(costs, layout)

    def of_host(self, host: int) -> HostTraffic:
        traffic = HostTraffic(host)
        for rank in range(host * self.slots, min((host + 1) * self.slots, self.layout.topology.world_size())):
            stage = self._stage(rank)
            for message in self._messages(rank, self.kind_of_stage[stage]):
                traffic.add(message.axis, self._sent(rank, message))
            traffic.add(PIPE, self._sent_along_pipe(rank, stage))
            traffic.add(MODEL, self._sent_to_gather(rank, stage))
            traffic.add(GRADIENTS, self._sent_for_tied(rank, stage))
        return traffic

    def _stage(self, rank: int) -> int:
        topology = self.layout.topology
        return topology.layout.index_of(rank, topology.axes.index(PIPE)) if PIPE in topology.axes else 0

    def _messages(self, rank: int, kind: StageKind) -> Iterator[_Message]:
        """Collectives that a rank takes part in."""
        topology, layout = self.layout.topology, self.layout
        ranks = {axis: topology.get_axis_ranks(axis, rank) for axis in (MODEL, SEQ)}
        ranks[GRADIENTS] = topology.get_axis_ranks(gradient_axes(topology), rank)
        if self.job.model.expert_count:
            plan = ExpertPlan(topology, layout.expert_parallel, expert_tensor_parallel=True)
            ranks[EXPERT], ranks[EXPERT_DATA] = plan.expert_ranks(rank), plan.expert_data_ranks(rank)
        for count, cost, recompute in self.costs.pieces(kind, layout):
            passes = [cost.work.forward, cost.work.backward]
            if recompute is Recompute.FULL:
                passes.append(cost.work.forward)
            for one in passes:
                for item in one.transfers:
                    times = count * item.count * self.micro_batches
                    yield _Message(item.axis, item.operation, item.size, times, ranks[item.axis])
        for operation, size, group, times in gradient_messages(self.costs, layout, kind):
            yield _Message(group, operation, size, times, ranks[group])

    def _sent(self, rank: int, message: _Message) -> float:
        """Bytes that ``rank`` itself sends to other hosts."""
        ranks, place = message.ranks, message.ranks.index(rank)
        if len(ranks) == 1:
            return 0.0
        if message.operation == "all_to_all":
            away = sum(1 for peer in ranks if peer // self.slots != rank // self.slots)
            return message.times * message.size / len(ranks) * away
        hosts = len({peer // self.slots for peer in ranks})
        if message.operation in (TO_OWNERS, FROM_OWNERS) and self.job.cluster.accelerator.transport == "gloo":
            return message.times * message.size / len(ranks) * (hosts - 1)
        passes = ring_passes(message.operation, self.job.cluster)
        if message.operation == "all_reduce" and message.axis == GRADIENTS and self.levels:
            return message.times * passes * message.size / (len(ranks) / hosts) * (hosts - 1) / hosts
        following = ranks[(place + 1) % len(ranks)]
        if following // self.slots == rank // self.slots:
            return 0.0
        return message.times * passes * message.size * (len(ranks) - 1) / len(ranks)

    def _sent_along_pipe(self, rank: int, stage: int) -> float:
        """Activations to the next stage and gradients to the one before; chunks wrap around. Peers along ``model`` send
        a part each."""
        layout = self.layout
        if layout.pipe == 1:
            return 0.0
        line = layout.topology.get_axis_ranks(PIPE, rank)
        size = activation_bytes(self.costs, layout) / layout.model
        before, after = self._neighbors(stage)
        sent = 0.0
        for times, peer in ((after, line[(stage + 1) % len(line)]), (before, line[stage - 1])):
            if peer // self.slots != rank // self.slots:
                sent += times * size
        return sent * self.micro_batches

    def _sent_to_gather(self, rank: int, stage: int) -> float:
        """Peers along ``model`` bring together what each got from another stage: where activations arrive and where
        gradients do, and in DeepSpeed activations again before backward."""
        layout = self.layout
        if layout.pipe == 1 or layout.model == 1 or layout.sequence_parallel:
            return 0.0
        before, after = self._neighbors(stage)
        gathers = before + after + (after if self.job.software.eager else 0)
        peers = layout.topology.get_axis_ranks(MODEL, rank)
        message = _Message(MODEL, "all_gather", activation_bytes(self.costs, layout), gathers, peers)
        return self._sent(rank, message) * self.micro_batches

    def _neighbors(self, stage: int) -> tuple[int, int]:
        """Chunks of a stage that get activations from the stage before, and that send them to the one after."""
        virtual, last = self.layout.virtual_stages, self.layout.pipe - 1
        return virtual - (stage == 0), virtual - (stage == last)

    def _sent_for_tied(self, rank: int, stage: int) -> float:
        """The gradient of a tied embedding, summed between the first stage and the last."""
        if not self.tied_bytes or stage not in (0, self.layout.pipe - 1):
            return 0.0
        line = self.layout.topology.get_axis_ranks(PIPE, rank)
        message = _Message(PIPE, "all_reduce", self.tied_bytes, 1.0, [line[0], line[-1]])
        return self._sent(rank, message)


def _kind_of_stage(kinds: list[StageKind], layout: Layout) -> dict[int, StageKind]:
    """The kind of every stage."""
    return {stage: kind for kind in kinds for stage in kind.stages if stage < layout.pipe}
