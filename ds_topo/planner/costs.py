"""What the pieces of a model cost on one rank, computed once for every part of a micro-batch that layouts ask about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

from ds_topo.planner.accelerators import Accelerator
from ds_topo.planner.compute import pass_seconds
from ds_topo.planner.layer_work import block_work, embedding_work, head_work, measured_work
from ds_topo.planner.layers import AnyBlock, MeasuredLayer, count_by_kind
from ds_topo.planner.layout import Job, Layout
from ds_topo.planner.software import Recompute
from ds_topo.planner.stages import Stage, even_stages, parameter_stages
from ds_topo.planner.work import Cover, Pass, Share, Work


@dataclass(frozen=True)
class PieceCost:
    """A piece of the model on one rank: its work, and seconds of its computing without messages. What not every layout
    asks for is computed when one does."""

    work: Work
    accelerator: Accelerator
    forward: float
    backward: float

    @cached_property
    def selective(self) -> float:
        """Seconds of what selective recomputation does again."""
        return pass_seconds(self.work.again, self.accelerator)

    @cached_property
    def covers_forward(self) -> Mapping[Cover, float]:
        """Seconds in forward of what messages can hide behind."""
        return _covers(self.work.forward, self.accelerator)

    @cached_property
    def covers_backward(self) -> Mapping[Cover, float]:
        """Seconds in backward of what messages can hide behind."""
        return _covers(self.work.backward, self.accelerator)

    def again(self, recompute: Recompute) -> float:
        """Seconds of what backward computes again."""
        if recompute is Recompute.NONE:
            return 0.0
        return self.selective if recompute is Recompute.SELECTIVE else self.forward


Messages: TypeAlias = tuple[float, float, float]
"""Seconds of messages over ``model``, over ``seq``, and to and from experts."""


@dataclass(frozen=True)
class StageKind:
    """Stages that hold the same: their numbers, ascending. The first of them keeps most and waits least."""

    stages: tuple[int, ...]
    stage: Stage
    blocks: tuple[tuple[int, AnyBlock], ...]

    @property
    def first(self) -> int:
        """The number of the first."""
        return self.stages[0]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.stages)


@dataclass(frozen=True)
class StageParameters:
    """Parameters of one rank of a stage before any sharding by ZeRO: outside experts, and experts'."""

    dense: int
    experts: int


class Costs:
    """Costs for one job. What depends on few numbers of a layout is computed once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._pieces: dict[tuple[object, Share], PieceCost] = {}
        self._kinds: dict[tuple[int, int], list[StageKind]] = {}
        self.messages: dict[tuple[object, ...], tuple[Messages, Messages]] = {}
        """Seconds of the messages of pieces, by piece and by the spans of their axes."""
        self.states: dict[tuple[int, ...], float] = {}
        """Bytes of the states of the fullest rank, by degrees, virtual stages, sharers of experts and ZeRO stage."""
        self._parameters: dict[tuple[int, int, int, int, int], StageParameters] = {}

    def stage_kinds(self, layout: Layout) -> list[StageKind]:
        """The stages of the layout's pipeline, equal ones together, in the order of their first."""
        key = (layout.pipe, layout.virtual_stages)
        if key not in self._kinds:
            self._kinds[key] = _kinds_of(self._stages(*key))
        return self._kinds[key]

    def _stages(self, pipe: int, virtual: int) -> list[Stage]:
        if self.job.software.balances_parameters and virtual == 1:
            return parameter_stages(self.job.model, pipe)
        return even_stages(self.job.model, pipe, virtual)

    def pieces(self, kind: StageKind, layout: Layout) -> list[tuple[int, PieceCost, Recompute]]:
        """How many of which pieces a stage has, and what of each is recomputed."""
        job, share = self.job, layout.share(self.job)
        with_experts, share = share, replace(share, expert_parallel=1, expert_load=1.0)
        pieces = []
        for count, block in kind.blocks:
            part = with_experts if block.expert_parameters else share
            cost = self._piece(id(block), part, partial(_block, job, block, part))
            pieces.append((count, cost, layout.recompute))
        if kind.stage.has_embedding and not job.model.is_measured:
            cost = self._piece(
                "embedding", share, lambda: embedding_work(job.model, share, job.precision, job.software)
            )
            pieces.append((1, cost, Recompute.NONE))
        if kind.stage.has_head and not job.model.is_measured:
            cost = self._piece("head", share, lambda: head_work(job.model, share, job.precision, job.software))
            pieces.append((1, cost, Recompute.NONE))
        return pieces

    def parameters(self, kind: StageKind, layout: Layout) -> StageParameters:
        """Parameters of one rank of a stage."""
        key = (layout.pipe, layout.virtual_stages, kind.first, layout.model, layout.expert_parallel)
        if key not in self._parameters:
            self._parameters[key] = stage_parameters(self.job, kind, layout)
        return self._parameters[key]

    def _piece(self, key: object, share: Share, make: Callable[[], Work]) -> PieceCost:
        found = self._pieces.get((key, share))
        if found is None:
            work, accelerator = make(), self.job.cluster.accelerator
            forward, backward = (pass_seconds(one, accelerator) for one in (work.forward, work.backward))
            found = PieceCost(work, accelerator, forward, backward)
            self._pieces[key, share] = found
        return found


def stage_parameters(job: Job, kind: StageKind, layout: Layout) -> StageParameters:
    """Exactly what one rank of a stage holds of the model; a tied embedding is on both ends of a pipeline."""
    model, held, tensor = job.model, kind.stage, layout.model
    dense = sum(count * block.parameters(tensor) for count, block in kind.blocks)
    experts = sum(count * block.expert_parameters for count, block in kind.blocks) // layout.expert_parallel
    rows = -(-model.vocabulary // tensor)  # a vocabulary that the degree does not divide is padded
    if held.has_embedding:
        dense += (rows + model.positions) * model.hidden
    if held.has_head:
        dense += model.final_norm_parameters
        dense += 0 if model.tied and held.has_embedding else rows * model.hidden
    return StageParameters(dense, experts)


def _block(job: Job, block: AnyBlock, share: Share) -> Work:
    if isinstance(block, MeasuredLayer):
        return measured_work(block, share, job.precision)
    return block_work(block, share, job.precision, job.software, job.model.dropout)


def _kinds_of(stages: list[Stage]) -> list[StageKind]:
    kinds: dict[tuple[object, ...], StageKind] = {}
    for index, stage in enumerate(stages):
        blocks = tuple(count_by_kind(stage.blocks))
        key = (tuple((count, id(block)) for count, block in blocks), stage.has_embedding, stage.has_head)
        known = kinds.get(key)
        kinds[key] = StageKind((*known.stages, index) if known else (index,), stage, blocks)
    return list(kinds.values())


def _covers(work: Pass, accelerator: Accelerator) -> dict[Cover, float]:
    """Seconds of what messages can hide behind."""
    return {
        Cover.CORE: pass_seconds(Pass(cores=work.cores), accelerator),
        Cover.PRODUCTS: pass_seconds(Pass(products=work.products), accelerator),
    }
