"""Divide a model into pipeline stages: the work of their pieces on one rank, and the bytes of a rank at its peak.

The bytes are states, activations in flight, and buffers of a pass or of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby, pairwise
from math import inf

from ds_topo.planner.job import ADAM_MOMENTS_BYTES, Job, Layout, Precision, Recompute, Software
from ds_topo.planner.model import AnyBlock, Block, MeasuredLayer, Model
from ds_topo.planner.work import PassCost, Work, block_work, embedding_work, head_work, measured_work, pass_cost


@dataclass(frozen=True)
class Stage:
    """The layers that one pipeline rank holds: the blocks of all its virtual stages, and the ends of the model.

    Several stages can hold the same layers. ``numbers`` are those of all of them, ascending; the first of them keeps
    the most activations and waits the least.
    """

    blocks: tuple[AnyBlock, ...]
    has_embedding: bool
    has_head: bool
    numbers: tuple[int, ...] = ()

    @cached_property
    def runs(self) -> list[tuple[int, AnyBlock]]:
        """The blocks, equal neighbors together, with how many there are of each."""
        return [(len(list(run)), block) for block, run in groupby(self.blocks)]

    @property
    def first(self) -> int:
        """The number of the first stage."""
        return self.numbers[0]

    @property
    def count(self) -> int:
        """The number of stages with these layers."""
        return len(self.numbers)


def even_stages(model: Model, pipe: int, virtual: int = 1) -> list[Stage]:
    """Divide the blocks evenly into ``pipe x virtual`` chunks, of which chunk ``c`` is on rank ``c % pipe``.

    If the number of blocks is not a multiple, the ends have one fewer, since they hold the embedding and the output
    layer (Llama Team, arXiv:2407.21783, section 3.3.2).

    >>> from ds_topo.planner.model import transformer
    >>> model = transformer(layers=6, hidden=64, heads=4, vocabulary=256, sequence=16)
    >>> [len(stage.blocks) for stage in even_stages(model, pipe=4)]
    [1, 2, 2, 1]
    """
    chunks = pipe * virtual
    base, more = divmod(model.layers, chunks)
    first_longer = (chunks - more) // 2
    lengths = (base + (first_longer <= chunk < first_longer + more) for chunk in range(chunks))
    parts = [model.blocks[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
    return [Stage(tuple(chain(*parts[rank::pipe])), rank == 0, rank == pipe - 1) for rank in range(pipe)]


def parameter_stages(model: Model, pipe: int) -> list[Stage]:
    """Divide the layers as DeepSpeed's ``partition_method="parameters"`` does.

    The layers are those of the examples: embedding, positions, blocks, norm, output (a tied output counts again).

    >>> from ds_topo.planner.model import transformer
    >>> model = transformer(layers=4, hidden=128, heads=4, vocabulary=256, sequence=128)
    >>> [len(stage.blocks) for stage in parameter_stages(model, pipe=2)]
    [2, 2]
    """
    embedding = model.vocabulary * model.hidden
    before = [embedding, *([model.positions * model.hidden] if model.positions else [])]
    blocks = [block.parameters() + block.expert_parameters for block in model.blocks]
    after = [model.final_norm_parameters, embedding]
    if model.is_measured:
        before, after = [], []
    bounds = balanced_parts((*before, *blocks, *after), pipe)
    first = len(before)
    return [
        Stage(
            model.blocks[max(0, start - first) : max(0, min(end - first, model.layers))],
            start == 0 < end,
            end == bounds[-1] > start and not model.is_measured,
        )
        for start, end in pairwise(bounds)
    ]


def balanced_parts(weights: Sequence[int], parts: int) -> list[int]:
    """Return the bounds of ``parts`` consecutive parts of nearly equal weight.

    They are the same as those of ``deepspeed.runtime.utils.partition_balanced``.

    >>> balanced_parts([1, 1, 4, 1, 1], 2)
    [0, 3, 5]
    """
    count = len(weights)
    if count <= parts:
        return [min(part, count) for part in range(parts + 1)]
    partitions = [_partitions(tuple(weights), part) for part in range(parts + 1)]
    bounds = [count]
    for partition in reversed(partitions[1:]):
        bounds.append(partition[bounds[-1]][2])
    return bounds[::-1]


@lru_cache(maxsize=1024)
def _partitions(weights: tuple[int, ...], parts: int) -> list[tuple[float, float, int]]:
    """Return each prefix's best partition, by its end: heaviest part, lightest part, and where the last part starts.

    The best has the least difference of the two; of several, the one whose last part starts last.
    """
    count = len(weights)
    if parts == 0:
        return [(0.0, inf, 0), *[(inf, inf, 0)] * count]
    before, sums = _partitions(weights, parts - 1), list(accumulate(weights, initial=0))
    partitions = [(inf, inf, 0)] * (count + 1)
    for end in range(parts, count + 1):
        best = inf
        for start in range(end):
            weight = sums[end] - sums[start]
            heaviest, lightest = max(before[start][0], weight), min(before[start][1], weight)
            if heaviest - lightest <= best:
                best = heaviest - lightest
                partitions[end] = heaviest, lightest, start
    return partitions


@dataclass(frozen=True)
class StageParameters:
    """The parameters of one rank of a stage before any sharding by ZeRO: outside experts, and experts'."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.dense + self.experts


@dataclass(frozen=True)
class PieceCost:
    """The work of a piece of the model on one rank, and the cost of its passes.

    ``again`` are the seconds of what backward computes again, by kind of recomputation.
    """

    work: Work
    forward: PassCost
    backward: PassCost
    again: Mapping[Recompute, float]


class Sum:
    """A dataclass whose fields add up to a total."""

    def parts(self) -> dict[str, float]:
        """Return the terms by name."""
        return dict(vars(self))

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return sum(self.parts().values())


class Costs:
    """The costs of one job. Values that depend on few numbers of a layout are computed once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.messages: dict[tuple[object, ...], list[dict[str, float]]] = {}
        """Seconds of the messages of pieces in forward and backward, by piece and by the spans of their axes."""
        self.states: dict[tuple[int, ...], float] = {}
        """Bytes of the states of the fullest rank, by the numbers of a layout that decide them."""
        self._pieces: dict[tuple[int, ...], PieceCost] = {}
        self._kinds: dict[tuple[int, int], list[Stage]] = {}
        self._parameters: dict[tuple[int, ...], StageParameters] = {}

    def stage_kinds(self, layout: Layout) -> list[Stage]:
        """Return the stages of the layout's pipeline, equal ones together, in the order of their first."""
        pipe, virtual = key = layout.pipe, layout.virtual_stages
        if key not in self._kinds:
            by_parameters = self.job.software.balances_parameters and virtual == 1
            model = self.job.model
            parts = 2 * pipe if self.job.software.mirrors and pipe > 1 else pipe
            stages = parameter_stages(model, parts) if by_parameters else even_stages(model, parts, virtual)
            if parts > pipe:
                pairs = zip(stages[:pipe], reversed(stages[pipe:]), strict=True)
                stages = [Stage(one.blocks + other.blocks, one.has_embedding, other.has_head) for one, other in pairs]
            kinds: dict[tuple[object, ...], Stage] = {}
            for number, stage in enumerate(stages):
                same = (tuple(map(id, stage.blocks)), stage.has_embedding, stage.has_head)
                kinds[same] = replace(stage, numbers=(*kinds.get(same, stage).numbers, number))
            self._kinds[key] = list(kinds.values())
        return self._kinds[key]

    def pieces(self, kind: Stage, layout: Layout) -> list[tuple[int, PieceCost, Recompute]]:
        """Return how many of which pieces a stage has, and what of each is recomputed."""
        pieces = [(count, self._piece(block, layout), layout.recompute) for count, block in kind.runs]
        for end, is_there in ((embedding_work, kind.has_embedding), (head_work, kind.has_head)):
            if is_there and not self.job.model.is_measured:
                pieces.append((1, self._piece(end, layout), Recompute.NONE))
        return pieces

    def _piece(self, piece: AnyBlock | Callable[[Layout, Job], Work], layout: Layout) -> PieceCost:
        """Return the cost of a block, or of an end of the model, given by the function that computes its work."""
        has_experts = not callable(piece) and piece.expert_parameters
        sharers = layout.expert_parallel if has_experts else 1
        key = (id(piece), layout.micro_batch, layout.model, layout.seq, layout.spread, sharers)
        if key not in self._pieces:
            if isinstance(piece, MeasuredLayer):
                work = measured_work(piece, layout, self.job)
            elif isinstance(piece, Block):
                work = block_work(piece, layout, self.job)
            else:
                work = piece(layout, self.job)
            passes = (work.forward, work.backward, work.again)
            forward, backward, again = (pass_cost(one, self.job.cluster.accelerator) for one in passes)
            seconds = {Recompute.NONE: 0.0, Recompute.SELECTIVE: again.seconds, Recompute.FULL: forward.seconds}
            self._pieces[key] = PieceCost(work, forward, backward, seconds)
        return self._pieces[key]

    def all_parameters(self, layout: Layout) -> list[StageParameters]:
        """Return the parameters of one rank of each kind of stage."""
        return [self.parameters(kind, layout) for kind in self.stage_kinds(layout)]

    def parameters(self, kind: Stage, layout: Layout) -> StageParameters:
        """Return the exact parameters of one rank of a stage. Both ends of a pipeline have a tied embedding."""
        key = (layout.pipe, layout.virtual_stages, kind.first, layout.model, layout.expert_parallel)
        if key not in self._parameters:
            model, tensor = self.job.model, layout.model
            dense = sum(count * block.parameters(tensor) for count, block in kind.runs)
            experts = sum(count * block.expert_parameters for count, block in kind.runs) // layout.expert_parallel
            rows = -(-model.vocabulary // tensor)  # a vocabulary that the degree does not divide is padded
            if kind.has_embedding:
                dense += (rows + model.positions) * model.hidden
            if kind.has_head:
                dense += model.final_norm_parameters
                dense += 0 if model.tied and kind.has_embedding else rows * model.hidden
            self._parameters[key] = StageParameters(dense, experts)
        return self._parameters[key]


# -- bytes of a rank at its peak ---------------------------------------------------------------------------------------


BUCKET_PARAMETERS = 500_000_000
"""The most gradients in one bucket (``reduce_bucket_size`` of DeepSpeed's ZeRO)."""
LIVE_PARAMETERS = 1_000_000_000
"""The most parameters that DeepSpeed's ZeRO 3 keeps gathered (``stage3_max_live_parameters``)."""
ALIGNMENT = 2
"""DeepSpeed's ZeRO 1 and 2 pad a rank's partition to a multiple of so many elements."""


@dataclass(frozen=True)
class MemoryUse(Sum):
    """The bytes of the fullest rank at its peak, by purpose. Weights, gradients and optimizer are the states."""

    weights: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    working: float = 0.0
    buffers: float = 0.0


def state_bytes(parameters: StageParameters, layout: Layout, precision: Precision, software: Software) -> MemoryUse:
    """Return the bytes of the states of one rank, which live through all steps.

    In mixed precision they are ``(2 + 2 + K)`` bytes per parameter. Each term is divided by the replicas from its stage
    on: the optimizer's (K = 12: fp32 copy and two moments) from 1, gradients from 2, weights from 3 (Rajbhandari et
    al., section 3). In fp32 they are ``(4 + 4 + 8)``, and DeepSpeed keeps a copy of what a rank updates, 4 more from
    stage 1 on.

    Experts are divided by the replicas of an expert alone, and other parameters by the degree of ``shard``, if the
    layout has that axis. Programs that accumulate gradients in fp32 have 4 for the
    second term.
    """
    weight, gradient = precision.activation_bytes, software.accumulated_bytes(precision)
    optimizer = ADAM_MOMENTS_BYTES + precision.master_bytes
    if software.eager and layout.zero and not precision.is_mixed:
        optimizer += 4
    shares = ((parameters.dense, layout.partitions), (parameters.experts, layout.replicas // layout.expert_parallel))
    weights = gradients = optimizers = 0.0
    for count, replicas in shares:
        step = ALIGNMENT * replicas if layout.zero and software.eager else 1
        padded = -(-count // step) * step
        weights += weight * (padded // replicas if layout.zero == 3 else padded)
        gradients += gradient * (padded / replicas if layout.zero >= 2 else count)
        optimizers += optimizer * (padded / replicas if layout.zero else padded)
    return MemoryUse(weights, gradients, optimizers)


def chunks_in_flight(stage: int, pipe: int, virtual: int, micro_batches: int, mirrors: bool = False) -> float:
    """Return the most forward passes of chunks that a stage has done without their backward.

    With one stage per rank: ``pipe - stage`` (1F1B, Narayanan et al., section 2.2.1). With several:
    ``2 (pipe - stage - 1) + (virtual - 1) pipe + 1``, the warm-up of the interleaved schedule. With DualPipeV every
    stage keeps ``2 pipe + 1`` halves of a chunk.

    >>> chunks_in_flight(0, pipe=4, virtual=1, micro_batches=8), chunks_in_flight(0, 4, 2, 8)
    (4, 11)
    >>> chunks_in_flight(3, pipe=4, virtual=1, micro_batches=8, mirrors=True)
    4.5
    """
    if mirrors and pipe > 1:
        return min(micro_batches, pipe + 0.5)
    if virtual == 1:
        return min(micro_batches, pipe - stage)
    return min(micro_batches * virtual, 2 * (pipe - stage - 1) + (virtual - 1) * pipe + 1)


def memory_use(costs: Costs, layout: Layout) -> MemoryUse:
    """Return the bytes of the fullest rank at its peak."""
    uses = (stage_memory(costs, kind, layout) for kind in costs.stage_kinds(layout))
    return max(uses, key=lambda use: use.total)


def largest_states(costs: Costs, layout: Layout) -> float:
    """Return the bytes of the states of the fullest rank.

    They are the same for all micro-batches and schedules, and never more than the total of ``memory_use``.
    """
    sharing = layout.replicas, layout.partitions, layout.model, layout.expert_parallel
    key = (layout.pipe, layout.virtual_stages, *sharing, layout.zero)
    if key not in costs.states:
        job = costs.job
        states = (state_bytes(held, layout, job.precision, job.software) for held in costs.all_parameters(layout))
        costs.states[key] = max(one.total for one in states)
    return costs.states[key]


def stage_memory(costs: Costs, kind: Stage, layout: Layout) -> MemoryUse:
    """Return the bytes of a rank of one stage at its peak, which is in backward or in the update.

    Backward needs the states, the kept activations of the micro-batches in flight, one block's activations again under
    recomputation, and the gradients at work. The update needs the states and its buffers.
    """
    job, parameters = costs.job, costs.parameters(kind, layout)
    states = state_bytes(parameters, layout, job.precision, job.software)
    activations, working = _activation_bytes(costs, kind, layout)
    bucket = 0.0
    if layout.replicas > 1 and layout.zero:  # sharded gradients are copied into buckets
        bucket = float(min(parameters.total, BUCKET_PARAMETERS) * job.software.reduced_bytes(job.precision))
    buffers = bucket + _gathered_bytes(parameters, job, layout)
    in_update = _update_bytes(parameters, layout, job, bucket)
    if in_update > activations + working + buffers:
        activations, working, buffers = 0.0, in_update - bucket, bucket
    return replace(states, activations=activations, working=working, buffers=buffers)


def _activation_bytes(costs: Costs, kind: Stage, layout: Layout) -> tuple[float, float]:
    """Return the bytes that forward keeps for all micro-batches in flight, and those that backward adds."""
    job = costs.job
    kept = working = again = output = 0.0
    for count, cost, recompute in costs.pieces(kind, layout):
        kept += count * cost.work.kept.under(recompute)
        working = max(working, cost.work.working)
        again = max(again, cost.work.kept.none - cost.work.kept.under(recompute))
        output = cost.work.output
    micro_batches = layout.micro_batches(job.batch)
    chunks = chunks_in_flight(kind.first, layout.pipe, layout.virtual_stages, micro_batches, job.software.mirrors)
    activations = kept * chunks / layout.virtual_stages
    if job.software.eager and layout.pipe > 1:
        # DeepSpeed's pipeline has at least two buffers, each with an input and an output
        buffers = max(2, chunks)
        received = layout.activation_bytes(job) / layout.spread if kind.first else 0.0
        activations += buffers * output + (buffers - chunks) * received
    if micro_batches > 1 or layout.pipe > 1:
        # a weight's gradient exists on its own before it is added to the sum
        largest = max((block.largest_linear(layout.model) for _, block in kind.runs), default=0)
        working += largest * job.precision.activation_bytes
    return activations, working + again


def _update_bytes(parameters: StageParameters, layout: Layout, job: Job, bucket: float) -> float:
    """Return the bytes of DeepSpeed's update: fp32 gradients of the parameters that this rank updates, and buckets.

    A pipeline reduces after the last backward and has two buckets.
    """
    if not job.software.eager:
        return 0.0
    owned = parameters.total // (layout.partitions if layout.zero else 1)
    copies = 4.0 * owned if job.precision.is_mixed else 0.0
    return copies + bucket * (2 if layout.pipe > 1 else 1)


def _gathered_bytes(parameters: StageParameters, job: Job, layout: Layout) -> float:
    """Return the bytes that ZeRO 3 has gathered at once: the layer at work and the next one.

    DeepSpeed also keeps parameters gathered up to a number.
    """
    if layout.zero < 3:
        return 0.0
    live = 2 * max(block.parameters(layout.model) for block in job.model.blocks)
    if job.software.eager:
        live = max(live, min(parameters.dense, LIVE_PARAMETERS))
    return float(job.precision.activation_bytes * max(live, job.model.vocabulary * job.model.hidden // layout.model))
