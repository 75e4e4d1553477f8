"""Bytes of one rank at its peak: states, activations in flight, and what a pass or the update needs beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_topo.planner.costs import Costs, StageKind, StageParameters
from ds_topo.planner.layout import Job, Layout
from ds_topo.planner.precision import ADAM_MOMENTS_BYTES, Precision
from ds_topo.planner.software import Software

BUCKET_PARAMETERS = 500_000_000
"""Gradients that are on their way at once, at most (``reduce_bucket_size`` of DeepSpeed's ZeRO)."""
LIVE_PARAMETERS = 1_000_000_000
"""Parameters that DeepSpeed's ZeRO 3 keeps gathered at most (``stage3_max_live_parameters``)."""
ALIGNMENT = 2
"""DeepSpeed's ZeRO 1 and 2 pad a rank's partition to a multiple of so many elements."""


@dataclass(frozen=True)
class States:
    """Bytes of what lives through all steps on one rank."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(parameters: StageParameters, layout: Layout, precision: Precision, software: Software) -> States:
    """Rajbhandari et al., section 3: ``(2 + 2 + K)`` bytes per parameter in mixed precision, each term divided by the
    replicas from its stage on: the optimizer's (K = 12: fp32 copy and two moments) from 1, gradients from 2, weights
    from 3. In fp32 it is ``(4 + 4 + 8)``, and DeepSpeed keeps a copy of what a rank updates, 4 more from stage 1 on.

    Experts are divided by the replicas of an expert alone. Programs that accumulate gradients in fp32 have 4 for the
    second term.
    """
    weight = precision.activation_bytes
    gradient = software.accumulation_bytes if precision.master_bytes else weight
    optimizer = ADAM_MOMENTS_BYTES + precision.master_bytes
    if software.eager and layout.zero and not precision.master_bytes:
        optimizer += 4
    shares = ((parameters.dense, layout.replicas), (parameters.experts, layout.replicas // layout.expert_parallel))
    weights = gradients = optimizers = 0.0
    for count, replicas in shares:
        padded = padded_count(count, replicas) if layout.zero and software.eager else count
        weights += weight * (padded // replicas if layout.zero == 3 else padded)
        gradients += gradient * (padded / replicas if layout.zero >= 2 else count)
        optimizers += optimizer * (padded / replicas if layout.zero else padded)
    return States(weights, gradients, optimizers)


def padded_count(count: int, replicas: int) -> int:
    """Parameters in partitions of equal, aligned size.

    >>> padded_count(10, 4), padded_count(16, 4)
    (16, 16)
    """
    step = ALIGNMENT * replicas
    return -(-count // step) * step


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the fullest rank at its peak, by what they are for."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> Mapping[str, float]:
        """Bytes by name."""
        return dict(vars(self))


def chunks_in_flight(stage: int, pipe: int, virtual: int, micro_batches: int) -> int:
    """Forward passes of chunks that a stage has done without their backward, at most.

    One stage per rank: ``pipe - stage`` (1F1B, Narayanan et al., section 2.2.1). Several: ``2 (pipe - stage - 1) +
    (virtual - 1) pipe + 1``, the warm-up of the interleaved schedule.

    >>> chunks_in_flight(0, pipe=4, virtual=1, micro_batches=8), chunks_in_flight(0, 4, 2, 8)
    (4, 11)
    """
    if virtual == 1:
        return min(micro_batches, pipe - stage)
    return min(micro_batches * virtual, 2 * (pipe - stage - 1) + (virtual - 1) * pipe + 1)


def memory_use(costs: Costs, layout: Layout) -> MemoryUse:
    """Bytes of the fullest rank at its peak."""
    uses = (stage_memory(costs, kind, layout) for kind in costs.stage_kinds(layout))
    return max(uses, key=lambda use: use.total)


def largest_states(costs: Costs, layout: Layout) -> float:
    """Bytes of the states of the fullest rank, computed once for all micro-batches and schedules: ``memory_use`` of
    none of them is less."""
    key = (layout.pipe, layout.virtual_stages, layout.replicas, layout.model, layout.expert_parallel, layout.zero)
    if key not in costs.states:
        job = costs.job
        held = (costs.parameters(kind, layout) for kind in costs.stage_kinds(layout))
        costs.states[key] = max(
            state_bytes(parameters, layout, job.precision, job.software).total for parameters in held
        )
    return costs.states[key]


def stage_memory(costs: Costs, kind: StageKind, layout: Layout) -> MemoryUse:
    """Bytes of a rank of one stage at its peak, which is in backward or in the update.

    In backward: the states, what forward kept of the micro-batches in flight, one block made whole again under
    recomputation, and the gradients at work. In the update: the states and its buffers.
    """
    job, parameters = costs.job, costs.parameters(kind, layout)
    states = state_bytes(parameters, layout, job.precision, job.software)
    activations, working = _activation_bytes(costs, kind, layout)
    bucket = _bucket_bytes(parameters, layout, job)
    buffers = bucket + _gathered_bytes(parameters, job, layout)
    in_update = _update_bytes(parameters, layout, job, bucket)
    if in_update > activations + working + buffers:
        activations, working, buffers = 0.0, in_update - bucket, bucket
    return MemoryUse(states.weights, states.gradients, states.optimizer, activations, working, buffers)


def _activation_bytes(costs: Costs, kind: StageKind, layout: Layout) -> tuple[float, float]:
    """What forward keeps for all micro-batches in flight, and what backward needs beside it."""
    job = costs.job
    kept = working = again = output = 0.0
    for count, cost, recompute in costs.pieces(kind, layout):
        kept += count * cost.work.kept.under(recompute)
        working = max(working, cost.work.working)
        again = max(again, cost.work.kept.none - cost.work.kept.under(recompute))
        output = cost.work.output
    micro_batches = layout.micro_batches(job.batch)
    chunks = chunks_in_flight(kind.first, layout.pipe, layout.virtual_stages, micro_batches)
    activations = kept * chunks / layout.virtual_stages
    if job.software.eager and layout.pipe > 1:
        # DeepSpeed's pipeline has at least two buffers, each with an input and an output
        buffers = max(2, chunks)
        share = layout.share(job)
        received = share.tokens * job.model.hidden * job.precision.activation_bytes / share.spread
        activations += buffers * output + (buffers - chunks) * (received if kind.first else 0.0)
    if micro_batches > 1 or layout.pipe > 1:
        # a weight's gradient exists on its own before it is added to the sum
        largest = max((block.largest_linear(layout.model) for _, block in kind.blocks), default=0)
        working += largest * job.precision.activation_bytes
    return activations, working + again


def _bucket_bytes(parameters: StageParameters, layout: Layout, job: Job) -> float:
    """Gradients on their way: with sharded states, copies of a bucket's."""
    if layout.replicas == 1 or not layout.zero:
        return 0.0
    size = job.software.reduction_bytes if job.precision.master_bytes else job.precision.activation_bytes
    return float(min(parameters.dense + parameters.experts, BUCKET_PARAMETERS) * size)


def _update_bytes(parameters: StageParameters, layout: Layout, job: Job, bucket: float) -> float:
    """What the update needs: gradients in fp32 of what this rank updates, and in a pipeline, which reduces after the
    last backward, two buckets."""
    if not job.software.eager:
        return 0.0
    owned = parameters.dense + parameters.experts
    if layout.zero:
        owned = owned // layout.replicas
    copies = 4.0 * owned if job.precision.master_bytes else 0.0
    return copies + bucket * (2 if layout.pipe > 1 else 1)


def _gathered_bytes(parameters: StageParameters, job: Job, layout: Layout) -> float:
    """What ZeRO 3 has gathered at once: the layer at work and the one fetched ahead; DeepSpeed also keeps parameters
    gathered up to a number."""
    if layout.zero < 3:
        return 0.0
    largest = max(block.parameters(layout.model) for block in job.model.blocks)
    live = 2 * largest
    if job.software.eager:
        live = max(live, min(parameters.dense, LIVE_PARAMETERS))
    return float(job.precision.activation_bytes * max(live, job.model.vocabulary * job.model.hidden // layout.model))
