"""Predict the bytes of a rank at its peak: its states, what forward keeps for backward, and buffers.

``memory_use`` adds them up for the fullest rank. ``work`` has what each kind of layer keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_topo.plan.job import ADAM_MOMENTS_BYTES, Job, JobLayout, Precision, Recompute, Software
from ds_topo.plan.stages import Costs, Stage, StageParameters, Sum

BUCKET_PARAMETERS = 500_000_000
"""The most gradients in one bucket (``reduce_bucket_size`` of DeepSpeed's ZeRO)."""
LIVE_PARAMETERS = 1_000_000_000
"""The most parameters that DeepSpeed's ZeRO 3 keeps gathered (``stage3_max_live_parameters``)."""
ALIGNMENT = 2
"""DeepSpeed's ZeRO 1 and 2 pad a rank's partition to a multiple of this number of elements."""


@dataclass(frozen=True)
class MemoryUse(Sum):
    """The bytes of the fullest rank at its peak, by purpose. Weights, gradients and optimizer are the states."""

    weights: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    working: float = 0.0
    buffers: float = 0.0


def state_bytes(parameters: StageParameters, layout: JobLayout, precision: Precision, software: Software) -> MemoryUse:
    """Return the bytes of the states of one rank, which live through all steps.

    In mixed precision they are ``(2 + 2 + K)`` bytes per parameter. Each term is divided by the replicas from its stage
    on: the optimizer's (K = 12: fp32 copy and two moments) from 1, gradients from 2, weights from 3 (Rajbhandari et
    al., section 3). In fp32 they are ``(4 + 4 + 8)``, and DeepSpeed keeps a copy of what a rank updates, 4 more from
    stage 1 on.

    Experts are divided by the replicas of an expert alone, and other parameters by the degree of ``shard``, if the
    layout has that axis. Programs that accumulate gradients in fp32 have 4 for the second term.
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


def memory_use(costs: Costs, layout: JobLayout) -> MemoryUse:
    """Return the bytes of the fullest rank at its peak."""
    uses = (stage_memory(costs, kind, layout) for kind in costs.stage_kinds(layout))
    return max(uses, key=lambda use: use.total)


def largest_states(costs: Costs, layout: JobLayout) -> float:
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


def stage_memory(costs: Costs, kind: Stage, layout: JobLayout) -> MemoryUse:
    """Return the bytes of a rank of one stage at its peak, which is in backward or in the update.

    Backward needs the states, the kept activations of the micro-batches in flight, one block's activations again under
    recomputation, and the temporary gradients of backward. The update needs the states and its buffers.
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


def _activation_bytes(costs: Costs, kind: Stage, layout: JobLayout) -> tuple[float, float]:
    """Return the bytes that forward keeps for all micro-batches in flight, and those that backward adds."""
    job = costs.job
    kept = working = again = 0.0
    for count, cost, recompute in costs.pieces(kind, layout):
        kept += count * cost.kept[recompute]
        working = max(working, cost.working)
        again = max(again, cost.kept[Recompute.NONE] - cost.kept[recompute])
    micro_batches = layout.micro_batches(job.batch)
    chunks = chunks_in_flight(kind.first, layout.pipe, layout.virtual_stages, micro_batches, job.software.mirrors)
    activations = kept * chunks / layout.virtual_stages
    if job.software.eager and layout.pipe > 1:
        # DeepSpeed's pipeline has at least two buffers, each with an input and an output
        buffers, between = max(2, chunks), layout.activation_bytes(job) / layout.spread
        output = layout.logits(job) * job.precision.activation_bytes if kind.has_head else between
        activations += buffers * output + (buffers - chunks) * (between if kind.first else 0.0)
    if micro_batches > 1 or layout.pipe > 1:
        # a weight's gradient exists on its own before it is added to the sum
        largest = max((block.largest_linear(layout.model) for _, block in kind.runs), default=0)
        working += largest * job.precision.activation_bytes
    return activations, working + again


def _update_bytes(parameters: StageParameters, layout: JobLayout, job: Job, bucket: float) -> float:
    """Return the bytes of DeepSpeed's update: this rank's gradients in fp32, and buckets, two in a pipeline."""
    if not job.software.eager:
        return 0.0
    owned = parameters.total // (layout.partitions if layout.zero else 1)
    copies = 4.0 * owned if job.precision.is_mixed else 0.0
    return copies + bucket * (2 if layout.pipe > 1 else 1)


def _gathered_bytes(parameters: StageParameters, job: Job, layout: JobLayout) -> float:
    """Return the bytes that ZeRO 3 has gathered at once: two layers, and with DeepSpeed more up to a limit."""
    if layout.zero < 3:
        return 0.0
    live = 2 * max(block.parameters(layout.model) for block in job.model.blocks)
    if job.software.eager:
        live = max(live, min(parameters.dense, LIVE_PARAMETERS))
    return float(job.precision.activation_bytes * max(live, job.model.vocabulary * job.model.hidden // layout.model))
