"""Divide a model into pipeline stages, and price the pieces of each stage on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby, pairwise
from math import inf

from ds_topo.plan.job import Job, JobLayout, Recompute
from ds_topo.plan.model import Block, End, Model, Piece
from ds_topo.plan.work import PassCost, pass_cost, piece_work


@dataclass(frozen=True)
class Stage:
    """The layers that one pipeline rank holds: the blocks of all its virtual stages, and the ends of the model.

    ``numbers`` are those of all stages with the same layers, ascending. The first of them keeps the most activations
    and waits the least.
    """

    blocks: tuple[Block, ...]
    has_embedding: bool
    has_head: bool
    numbers: tuple[int, ...] = ()

    @cached_property
    def runs(self) -> list[tuple[int, Block]]:
        """The blocks, equal neighbors together, with how many there are of each."""
        return [(len(list(run)), block) for block, run in groupby(self.blocks)]

    @property
    def first(self) -> int:
        """The number of the first stage."""
        return self.numbers[0]


def even_stages(model: Model, pipe: int, virtual: int = 1) -> list[Stage]:
    """Divide the blocks evenly into ``pipe x virtual`` chunks, of which chunk ``c`` is on rank ``c % pipe``.

    If the number of blocks is not a multiple, the ends have one fewer, since they hold the embedding and the output
    layer (Llama Team, arXiv:2407.21783, section 3.3.2).

    >>> from ds_topo.plan.model import transformer
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

    >>> from ds_topo.plan.model import transformer
    >>> model = transformer(layers=4, hidden=128, heads=4, vocabulary=256, sequence=128)
    >>> [len(stage.blocks) for stage in parameter_stages(model, pipe=2)]
    [2, 2]
    """
    embedding = model.vocabulary * model.hidden
    before = [embedding, *([model.positions * model.hidden] if model.positions else [])]
    blocks = [block.parameters() + block.expert_parameters for block in model.blocks]
    after = [model.final_norm_parameters, embedding]
    bounds = balanced_parts((*before, *blocks, *after), pipe)
    first = len(before)
    return [
        Stage(
            model.blocks[max(0, start - first) : max(0, min(end - first, model.layers))],
            start == 0 < end,
            end == bounds[-1] > start,
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
    """The cost of a piece of the model on one rank for one micro-batch.

    Args:
        again: seconds of what backward computes again, by kind of recomputation.
        kept: bytes that are kept from forward to backward, by kind of recomputation.
        working: bytes of gradients and copies that are alive at once inside backward, beside the kept ones.
    """

    forward: PassCost
    backward: PassCost
    again: Mapping[Recompute, float]
    kept: Mapping[Recompute, float]
    working: float


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

    def stage_kinds(self, layout: JobLayout) -> list[Stage]:
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

    def pieces(self, kind: Stage, layout: JobLayout) -> list[tuple[int, PieceCost, Recompute]]:
        """Return how many of which pieces a stage has, and what of each is recomputed."""
        pieces = [(count, self.piece(block, layout), layout.recompute) for count, block in kind.runs]
        for end, is_there in ((End.EMBEDDING, kind.has_embedding), (End.HEAD, kind.has_head)):
            if is_there:
                pieces.append((1, self.piece(end, layout), Recompute.NONE))
        return pieces

    def piece(self, piece: Piece, layout: JobLayout) -> PieceCost:
        """Return the cost of a block, or of an end of the model."""
        has_experts = isinstance(piece, Block) and piece.expert_parameters
        sharers = layout.expert_parallel if has_experts else 1
        key = (id(piece), layout.micro_batch, layout.model, layout.seq, layout.spread, sharers)
        if key not in self._pieces:
            work = piece_work(piece, layout, self.job)
            passes = (work.forward, work.backward, work.again)
            forward, backward, again = (pass_cost(one, self.job.cluster.accelerator) for one in passes)
            seconds = {Recompute.NONE: 0.0, Recompute.SELECTIVE: again.seconds, Recompute.FULL: forward.seconds}
            inputs = layout.activation_bytes(self.job) / layout.spread
            kept = {Recompute.NONE: work.kept, Recompute.SELECTIVE: work.selective, Recompute.FULL: inputs}
            self._pieces[key] = PieceCost(forward, backward, seconds, kept, work.working)
        return self._pieces[key]

    def all_parameters(self, layout: JobLayout) -> list[StageParameters]:
        """Return the parameters of one rank of each kind of stage."""
        return [self.parameters(kind, layout) for kind in self.stage_kinds(layout)]

    def parameters(self, kind: Stage, layout: JobLayout) -> StageParameters:
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
