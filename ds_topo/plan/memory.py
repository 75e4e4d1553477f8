"""Predict the bytes of a rank at its peak: its states, what forward keeps for backward, and buffers.

The first part adds them up for the fullest rank (``memory_use``), the second has the formula of each kind of layer.
``work`` explains the symbols.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_topo.plan.job import ADAM_MOMENTS_BYTES, Job, JobLayout, Precision, Recompute, Software
from ds_topo.plan.model import Attention, Block, End, Experts, FeedForward, Piece, Split
from ds_topo.plan.stages import Costs, PieceBytes, Stage, StageParameters, Sum
from ds_topo.plan.work import Addable

BUCKET_PARAMETERS = 500_000_000
"""The most gradients in one bucket (``reduce_bucket_size`` of DeepSpeed's ZeRO)."""
LIVE_PARAMETERS = 1_000_000_000
"""The most parameters that DeepSpeed's ZeRO 3 keeps gathered (``stage3_max_live_parameters``)."""
ALIGNMENT = 2
"""DeepSpeed's ZeRO 1 and 2 pad a rank's partition to a multiple of this number of elements."""
DROPOUT_MASK_BYTES = 1


# -- a rank ------------------------------------------------------------------------------------------------------------


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
    kept = working = again = output = 0.0
    for count, cost, recompute in costs.pieces(kind, layout):
        if id(cost) not in costs.bytes:
            costs.bytes[id(cost)] = piece_bytes(cost.piece, layout, job)
        one = costs.bytes[id(cost)]
        kept += count * one.kept[recompute]
        working = max(working, one.working)
        again = max(again, one.kept[Recompute.NONE] - one.kept[recompute])
        output = one.output
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


# -- a piece of the model ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part(Addable):
    """The bytes of a part of a block: kept whole, kept under selective recomputation, and temporary in backward."""

    kept: float
    selective: float
    working: float = 0.0


def piece_bytes(piece: Piece, layout: JobLayout, job: Job) -> PieceBytes:
    """Return the bytes of a block, or of an end of the model."""
    if isinstance(piece, Block):
        return block_bytes(piece, layout, job)
    if piece is End.HEAD:
        return _head_bytes(layout, job)
    indices = layout.tokens(job) * 8  # of the tokens, which the embedding keeps
    return PieceBytes(dict.fromkeys(Recompute, indices), 0.0, layout.activation_bytes(job) / layout.spread)


def block_bytes(block: Block, layout: JobLayout, job: Job) -> PieceBytes:
    """Return the bytes of a transformer layer.

    Kept bytes, with half-precision activations, dropout and scores in memory, are Korthikanti et al.'s
    ``s b h (10/r + 24/t + 5 a s / (h t))`` (their equations 2 and 4). Without scores the last term is gone. Other
    layers count each term in the same way.

    >>> from ds_topo.plan.hardware import accelerator_of, cluster_of
    >>> from ds_topo.plan.job import FP16, MEGATRON_2022
    >>> from ds_topo.plan.model import transformer
    >>> from ds_topo.topology.process_topology import ProcessTopology
    >>> model = transformer(layers=1, hidden=1024, heads=16, vocabulary=8, sequence=2048)
    >>> job = Job(model, cluster_of(accelerator_of("A100"), 1), 4, 2048, FP16, MEGATRON_2022)
    >>> layout = JobLayout(ProcessTopology.from_spec("model=8"), micro_batch=4, sequence_parallel=True)
    >>> kept = block_bytes(model.blocks[0], layout, job).kept[Recompute.NONE]
    >>> kept / (4 * 2048 * 1024) == 34 / 8 + 5 * 16 * 2048 / 1024 / 8
    True
    """
    attention = _attention_bytes(block.attention, layout, job)
    if isinstance(block.mlp, Experts):
        mlp = _experts_bytes(block.mlp, layout, job)
    else:
        mlp = _feed_forward_bytes(block.mlp, layout.tokens(job), layout.model, job)
    around = _around_bytes(block, layout, job)
    whole = attention + mlp + around
    output = layout.tokens(job) * block.hidden * job.precision.activation_bytes / layout.spread
    kept = {Recompute.NONE: whole.kept, Recompute.SELECTIVE: whole.selective, Recompute.FULL: output}
    return PieceBytes(kept, max(attention.working, mlp.working) + around.working, output)


def _head_bytes(layout: JobLayout, job: Job) -> PieceBytes:
    """Return the bytes of the last norm, the output layer and the cross entropy.

    It keeps the norm's input and output, and the softmax in fp32 (and its logits, if they are another tensor).
    """
    logits = layout.tokens(job) * (job.model.vocabulary / layout.model)
    kept = 2 * layout.activation_bytes(job) / layout.spread + logits * 4
    size = job.precision.activation_bytes
    return PieceBytes(dict.fromkeys(Recompute, kept), working=logits * (8 + size), output=logits * size)


def _attention_bytes(attention: Attention, layout: JobLayout, job: Job) -> _Part:
    """Return the bytes of projections and core: inputs and result of the core, and its scores if they reach memory."""
    tokens, tensor, size = layout.tokens(job), layout.model, job.precision.activation_bytes
    queries, key_values = attention.input_widths(tensor)
    values = attention.heads * attention.value_width / tensor
    low_rank = sum(linear.outputs for linear in attention.linears[:-1] if linear.split is Split.WHOLE)
    kept = tokens * size * (queries + key_values + values + 2 * low_rank)
    if job.software.flash_attention:
        kept += tokens * attention.heads / tensor * 4
        return _Part(kept, kept)
    scores = tokens * job.sequence * attention.heads / tensor
    kept_scores = scores * (2 * size + (DROPOUT_MASK_BYTES if job.model.dropout else -size))
    return _Part(kept + kept_scores, kept, working=2 * scores * size)


def _feed_forward_bytes(layer: FeedForward, tokens: float, tensor: int, job: Job, count: float = 1.0) -> _Part:
    """Return the bytes of ``count`` equal feed-forward layers: the inputs of the activation, and its result."""
    size, width = job.precision.activation_bytes, tokens * layer.width / tensor
    kept = (2 if layer.gated else 1) * width * size
    whole = kept + width * job.precision.input_bytes
    selective = kept if job.software.flash_attention else whole
    return _Part(whole * count, selective * count, working=kept * count)


def _experts_bytes(experts: Experts, layout: JobLayout, job: Job) -> _Part:
    """Return the bytes of routing, experts and shared experts.

    Routing keeps the rows as the experts get them, the results before they are weighted, and the router's scores.
    """
    hidden, size = experts.expert.hidden, job.precision.activation_bytes
    rows, local = layout.expert_rows(experts, job)
    moved = rows * hidden * size
    scores = layout.tokens(job) * experts.count * 4
    kept = moved + layout.tokens(job) * experts.top_k * hidden * size + 2 * scores
    part = _Part(kept, kept, working=moved) + _feed_forward_bytes(experts.expert, rows / local, 1, job, local)
    if experts.shared:
        part += _feed_forward_bytes(experts.shared, layout.tokens(job), layout.model, job)
    return part


def _around_bytes(block: Block, layout: JobLayout, job: Job) -> _Part:
    """Return the bytes of two norms and two residual sums: their inputs, outputs and masks of dropout."""
    precision, software = job.precision, job.software
    whole = layout.tokens(job) * block.hidden * precision.activation_bytes
    norm_outputs = layout.tokens(job) * block.hidden * precision.input_bytes
    norm_outputs /= layout.spread if software.regathers else 1
    masks = layout.tokens(job) * block.hidden * DROPOUT_MASK_BYTES / layout.spread if job.model.dropout else 0.0
    kept = 2 * (whole / layout.spread) + 2 * masks
    selective = kept + (0.0 if software.flash_attention else 2 * norm_outputs)
    return _Part(kept + 2 * norm_outputs, selective, working=whole)
