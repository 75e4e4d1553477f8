"""Compute the work of one rank for one micro-batch in one piece of a model, and the seconds that it takes.

Work is matrix products, memory traffic and messages, and the bytes that are kept for backward. The formulas for each
kind of layer are independent of speeds; ``pass_cost`` at the end times a pass on an accelerator. Symbols:

    T = b s / c      tokens of a micro-batch on this rank: b sequences of s positions, split over c ranks of ``seq``
    h, a, f          hidden width, heads, width of the feed-forward layer
    t                ranks of ``model``; r = t if activations between layers are split along the sequence, else 1
    B                bytes of an activation
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias, TypeVar

from ds_topo.plan.hardware import KERNEL_SECONDS, Accelerator
from ds_topo.plan.job import Job, JobLayout, Software
from ds_topo.plan.model import Attention, Block, End, Experts, FeedForward, Linear, Piece, Split

LOGIT_BYTES = 24
"""Memory traffic of one logit in the fp32 cross entropy: cast, maximum, exponential, sum, gradient."""
FP8_CAST_BYTES = 6
"""Traffic for one value of a linear layer in fp8: read for its maximum, read, written, written transposed."""
PIECES_BARE = 0.5
"""The share of a message's time that remains exposed when it alternates with pieces of a product. Pieces fill the
device less, and the message's kernels need some of its processors. Chang et al. (FLUX, arXiv:2406.06858, section 5)
measure about half for Transformer Engine on A100 and H100."""
DROPOUT_MASK_BYTES = 1
TILE = (128, 256)
"""Rows and columns of the result that one multiprocessor computes at a time."""


@dataclass(frozen=True)
class Product:
    """``count`` matrix products ``[m, k] x [k, n]``; ``result_bytes`` are moved per element of the result."""

    m: float
    n: float
    k: float
    format: str
    count: float = 1.0
    result_bytes: float = 2.0


@dataclass(frozen=True)
class Core:
    """Attention's core without scores in memory: FLOPs, positions of a sequence, features of a head, number format."""

    flops: float
    length: float
    width: int
    format: str
    backward: bool = False


class Cover(Enum):
    """The computing that hides a message."""

    NOTHING = "nothing"
    CORE = "attention's core"
    PRODUCTS = "matrix products"


@dataclass(frozen=True)
class Transfer:
    """``count`` collectives over the group of an axis; ``size`` bytes is the whole tensor, not a rank's part of it.

    They run during what covers them, except a share ``bare`` that comes before or after it.
    """

    axis: str
    operation: str
    size: float
    count: float = 1.0
    cover: Cover = Cover.NOTHING
    bare: float = 0.0


Products: TypeAlias = tuple[Product, ...]
Transfers: TypeAlias = tuple[Transfer, ...]
_Added = TypeVar("_Added", bound="Addable")


class Addable:
    """A dataclass whose instances are added field by field."""

    def __add__(self: _Added, other: _Added) -> _Added:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(mine + theirs for mine, theirs in pairs))


@dataclass(frozen=True)
class Pass(Addable):
    """Forward or backward of a piece."""

    products: Products = ()
    cores: tuple[Core, ...] = ()
    memory_bytes: float = 0.0
    kernels: int = 0
    transfers: Transfers = ()


@dataclass(frozen=True)
class Work(Addable):
    """The passes of a piece over one micro-batch.

    Args:
        forward: the forward pass, as in evaluation.
        backward: the backward pass without anything computed again.
        again: what selective recomputation adds to backward; full recomputation adds ``forward``.
        kept: bytes that are kept from forward to backward.
        selective: those that are kept under selective recomputation.
        working: bytes of gradients and copies that are alive at once inside backward, beside the kept ones.
    """

    forward: Pass
    backward: Pass
    again: Pass = Pass()
    kept: float = 0.0
    selective: float = 0.0
    working: float = 0.0


def piece_work(piece: Piece, layout: JobLayout, job: Job) -> Work:
    """Return the work of a block, or of an end of the model.

    With half-precision activations, dropout and scores in memory, a block keeps Korthikanti et al.'s
    ``s b h (10/r + 24/t + 5 a s / (h t))`` bytes (their equations 2 and 4). Without scores the last term is gone.
    """
    if isinstance(piece, End):
        return _embedding_work(layout, job) if piece is End.EMBEDDING else _head_work(layout, job)
    attention = _attention_work(piece.attention, layout, job)
    if isinstance(piece.mlp, Experts):
        mlp = _experts_work(piece.mlp, layout, job)
    else:
        mlp = _feed_forward_work(piece.mlp, layout.tokens(job), layout.model, job)
    around = _around_work(piece, layout, job)
    return replace(attention + mlp + around, working=max(attention.working, mlp.working) + around.working)


def _embedding_work(layout: JobLayout, job: Job) -> Work:
    """Return the work of the vocabulary-parallel look-up of tokens (and positions). It keeps the tokens' indices."""
    result = layout.activation_bytes(job)
    traffic = 2 * result / layout.model + (3 * result if job.model.positions else 0) / layout.spread
    return Work(
        forward=Pass(memory_bytes=traffic, kernels=4, transfers=_summed(layout, result)),
        backward=Pass(memory_bytes=2 * traffic, kernels=4, transfers=_gathered(layout, result)),
        kept=layout.tokens(job) * 8,
    )


def _head_work(layout: JobLayout, job: Job) -> Work:
    """Return the work of the last norm, the output layer and the cross entropy, with logits split over ``model``.

    It keeps the norm's input and output, and the softmax in fp32 (and its logits, if they are another tensor).
    """
    hidden, logits, size = layout.activation_bytes(job), layout.logits(job), job.precision.activation_bytes
    output = Linear(job.model.hidden, job.model.vocabulary, split=Split.COLUMN)
    forward, backward, _ = _linears([output], layout.tokens(job), layout.model, job.precision.attention, size)
    gathers = _gathered(layout, hidden)
    sums = (Transfer("model", "all_reduce", layout.tokens(job) * 4, 3),)
    traffic, traffic_back = (norm * hidden / layout.spread + logits * LOGIT_BYTES / 2 for norm in (2, 3))
    summed = _summed(layout, hidden) + (gathers if job.software.regathers else ())
    return Work(
        forward=Pass(forward, (), traffic, 10, gathers + sums),
        backward=Pass(backward, (), traffic_back, 10, summed),
        kept=2 * hidden / layout.spread + logits * 4,
        working=logits * (8 + size),
    )


def _attention_work(attention: Attention, layout: JobLayout, job: Job) -> Work:
    """Return the work of projections and core, of ``2 T s a (key width + value width) / t`` FLOPs, half if causal.

    It keeps the inputs and the result of the core, and its scores if they reach memory.
    """
    precision, dropout = job.precision, job.model.dropout
    tokens, tensor, size = layout.tokens(job), layout.model, precision.activation_bytes
    forward, backward, casts = _linears(attention.linears, tokens, tensor, precision.products, size)
    queries, key_values = attention.input_widths(tensor)
    inputs = queries + key_values
    # splitting the projection into heads, and turning queries and keys
    moved = 2 * inputs + (2 * (queries + key_values / 2) if attention.rotary else 0)
    scores = tokens * job.sequence * attention.heads / tensor
    low_rank = sum(linear.outputs for linear in attention.linears[:-1] if linear.split is Split.WHOLE)
    kept = tokens * size * (inputs + attention.heads * attention.value_width / tensor + 2 * low_rank)
    forward_bytes, backward_bytes = (tokens * size * moved + cast for cast in casts)
    send, receive = _sequence_exchange(attention, layout, job)
    if job.software.flash_attention:
        flops = 2.0 * scores * (attention.key_width + attention.value_width) / 2
        core = Core(flops, job.sequence, attention.key_width, precision.attention)
        core_back = replace(core, flops=2.5 * flops, backward=True)  # it computes the scores again
        kept += tokens * attention.heads / tensor * 4
        return Work(
            forward=Pass(forward, (core,), forward_bytes, 6, send),
            backward=Pass(backward, (core_back,), backward_bytes, 10, receive),
            kept=kept,
            selective=kept,
        )
    # bytes per score: written, read and written by softmax, (by dropout, with its mask,) read
    score_forward, score_backward = (6.5 * size, 9.5 * size) if dropout else (4 * size, 7 * size)
    pairs = layout.micro_batch * attention.heads / tensor
    rows = job.sequence / layout.seq
    first = Product(rows, job.sequence, attention.key_width, precision.attention, pairs, 0.0)
    second = Product(rows, attention.value_width, job.sequence, precision.attention, pairs, 0.0)
    return Work(
        forward=Pass((*forward, first, second), (), forward_bytes + score_forward * scores, 10, send),
        backward=Pass(
            (*backward, first, second, first, second), (), backward_bytes + score_backward * scores, 18, receive
        ),
        again=Pass((first, second), (), score_forward * scores, 4),
        kept=kept + scores * (2 * size + (DROPOUT_MASK_BYTES if dropout else -size)),
        selective=kept,
        working=2 * scores * size,
    )


def _feed_forward_work(layer: FeedForward, tokens: float, tensor: int, job: Job, count: float = 1.0) -> Work:
    """Return the work of two linear layers and the activation between them, in ``count`` equal feed-forward layers.

    They keep the inputs of the activation, and its result. Selective recomputation computes the result again if it has
    no scores to save.
    """
    precision, has_scores = job.precision, not job.software.flash_attention
    size = precision.activation_bytes
    forward, backward, casts = _linears(layer.linears, tokens, tensor, precision.products, size, count)
    width = tokens * layer.width / tensor
    before = (2 if layer.gated else 1) * width
    activation = (before + width) * size
    gradient = (2 * before + width) * size
    kept = before * size + width * precision.input_bytes
    return Work(
        forward=Pass(forward, (), (activation + casts[0]) * count, round(3 * count)),
        backward=Pass(backward, (), (gradient + casts[1]) * count, round(6 * count)),
        again=Pass() if has_scores else Pass((), (), activation * count, round(count)),
        kept=kept * count,
        selective=(kept if has_scores else before * size) * count,
        working=before * size * count,
    )


def _experts_work(experts: Experts, layout: JobLayout, job: Job) -> Work:
    """Return the work of routing, the exchange of tokens over the expert group, experts, and shared experts.

    Each rank sends its ``T top_k`` rows of ``h`` values (and the rows that pad experts to equal load) out and gets them
    back, in forward and again in backward. It keeps the rows as the experts get them, the results before they are
    weighted, and the router's scores.
    """
    hidden, size = experts.expert.hidden, job.precision.activation_bytes
    tokens = layout.tokens(job)
    rows, local = tokens * experts.top_k * job.expert_load, experts.count / layout.expert_parallel
    moved = rows * hidden * size
    scores = tokens * experts.count * 4
    router = Product(tokens, experts.count, hidden, job.precision.attention)
    exchange = (Transfer("expert", "all_to_all", moved, 2),)
    kept = moved + tokens * experts.top_k * hidden * size + 2 * scores
    routing = Work(
        forward=Pass((router,), (), 6 * moved + 6 * scores, 12, exchange),
        backward=Pass((router, router), (), 8 * moved + 12 * scores, 20, exchange),
        kept=kept,
        selective=kept,
        working=moved,
    )
    work = routing + _feed_forward_work(experts.expert, rows / local, 1, job, local)
    if experts.shared:
        work += _feed_forward_work(experts.shared, tokens, layout.model, job)
    return work


def _around_work(block: Block, layout: JobLayout, job: Job) -> Work:
    """Return the work of two norms, two residual sums (with dropout), and the messages of tensor parallelism.

    It keeps the inputs and outputs of the norms, and the masks of dropout.
    """
    software, dropout = job.software, job.model.dropout
    values = layout.tokens(job) * block.hidden
    whole = values * job.precision.activation_bytes
    part = whole / layout.spread
    norm_outputs = 2 * values * job.precision.input_bytes / (layout.spread if software.regathers else 1)
    kept = 2 * part + (2 * values * DROPOUT_MASK_BYTES / layout.spread if dropout else 0.0)
    forward_bytes = part * (4 + (7 if dropout else 6))
    backward_bytes = part * (6 + (11 if dropout else 6))
    forward, backward = _tensor_messages(layout, whole, software)
    return Work(
        forward=Pass((), (), forward_bytes, 4, forward),
        backward=Pass((), (), backward_bytes, 6, backward),
        again=Pass((), (), 4 * part, 2) if software.flash_attention else Pass(),
        kept=kept + norm_outputs,
        selective=kept if software.flash_attention else kept + norm_outputs,
        working=whole,
    )


def _tensor_messages(layout: JobLayout, size: float, software: Software) -> tuple[Transfers, Transfers]:
    """Return the messages of tensor parallelism in one block, in forward and in backward.

    It sums ``T h B`` bytes after attention and after the feed-forward layer, and again in backward (Narayanan et al.,
    section 3.2). With split activations each sum is a reduce_scatter and an all_gather, and inputs are gathered again
    for the weights' gradients (Korthikanti et al., section 4.2.2).

    In backward the sums of inputs' gradients, and those gathers, can run beside the products for the weights'
    gradients. Products can also be cut into pieces that alternate with the other messages, in forward too (Wang et al.,
    ASPLOS 2023): the first message is exposed, and pieces are slower than the whole.
    """
    beside = Cover.PRODUCTS if software.overlaps_model_backward else Cover.NOTHING
    pieces = Cover.PRODUCTS if software.overlaps_model else Cover.NOTHING
    first = max(1 / layout.model, PIECES_BARE)
    if not layout.sequence_parallel:
        return (Transfer("model", "all_reduce", size, 2),), (Transfer("model", "all_reduce", size, 2, beside),)
    gather = Transfer("model", "all_gather", size, 2, pieces, first)
    scatter = Transfer("model", "reduce_scatter", size, 2, pieces, first)
    again = (Transfer("model", "all_gather", size, 2, beside),) if software.regathers else ()
    return (gather, scatter), (gather, Transfer("model", "reduce_scatter", size, 2, beside), *again)


def _summed(layout: JobLayout, size: float) -> Transfers:
    """Return the sum of partial results over the model axis; it may be split along the sequence."""
    return (Transfer("model", "reduce_scatter" if layout.sequence_parallel else "all_reduce", size),)


def _gathered(layout: JobLayout, size: float) -> Transfers:
    return (Transfer("model", "all_gather", size),) if layout.sequence_parallel else ()


def _sequence_exchange(attention: Attention, layout: JobLayout, job: Job) -> tuple[Transfers, Transfers]:
    """Return the messages of attention over a split sequence, in forward and in backward.

    ``ring``: keys and values go around while the core computes on what has arrived, in backward with their gradients
    (Liu et al., arXiv:2310.01889). ``all_to_all``: queries, keys, values and the result exchange positions for heads
    (Jacobs et al., arXiv:2309.14509).
    """
    per_head = layout.tokens(job) * job.precision.activation_bytes
    keys_values = per_head * attention.input_widths(layout.model)[1]
    if job.software.seq_exchange == "ring":
        gathered = keys_values * layout.seq
        forward = Transfer("seq", "all_gather", gathered, cover=Cover.CORE)
        return (forward,), (forward, Transfer("seq", "reduce_scatter", gathered, cover=Cover.CORE))
    queries_result = per_head * attention.heads / layout.model * (attention.key_width + attention.value_width)
    moved = (Transfer("seq", "all_to_all", keys_values + queries_result),)
    return moved, moved


def _linears(
    linears: Iterable[Linear], tokens: float, tensor: int, number_format: str, size: float, count: float = 1.0
) -> tuple[Products, Products, list[float]]:
    """Return the products of forward and of backward, and the bytes that casts to fp8 move in each.

    Backward computes the gradients of the inputs, and those of the weights, which are added to fp32 sums.
    """
    shapes = [linear.shape(tensor) for linear in linears]
    forward: list[Product] = []
    backward: list[Product] = []
    for inputs, outputs in shapes:
        forward.append(Product(tokens, outputs, inputs, number_format, count, size))
        backward.append(Product(tokens, inputs, outputs, number_format, count, size))
        backward.append(Product(inputs, outputs, tokens, number_format, count, 8.0))
    cast = FP8_CAST_BYTES * tokens if number_format == "fp8" else 0.0
    return tuple(forward), tuple(backward), [cast * sum(sizes) for sizes in zip(*shapes, strict=True)]


@dataclass(frozen=True)
class PassCost:
    """The seconds of a pass without its messages, its messages, and the seconds of computing that can hide them."""

    seconds: float
    transfers: Transfers
    covers: Mapping[Cover, float]


def pass_cost(work: Pass, accelerator: Accelerator) -> PassCost:
    """Return the seconds of a pass: of its kernels, but no less than the processor takes to launch them."""
    efficiency = accelerator.efficiency
    products = sum(_product_seconds(product, accelerator) for product in work.products)
    cores = sum(_core_seconds(core, accelerator) for core in work.cores)
    moving = work.memory_bytes / (accelerator.memory_bandwidth * efficiency.memory)
    kernels = work.kernels + len(work.products)
    gaps, launches = kernels * KERNEL_SECONDS, kernels * efficiency.launch_seconds
    computing = products + len(work.products) * KERNEL_SECONDS
    covers = {Cover.NOTHING: 0.0, Cover.CORE: cores, Cover.PRODUCTS: computing}
    return PassCost(max(products + cores + moving + gaps, launches), work.transfers, covers)


def _product_seconds(product: Product, accelerator: Accelerator) -> float:
    """Return the seconds of a matrix product: the longer of computing and of moving its operands.

    Computing reaches ``e x w / (w + 1/2) x k / (k + k0)`` of the peak. ``e`` is the share of the largest products.
    ``w`` counts tiles per multiprocessor, of which on average half a round is lost at the end (tile and wave
    quantization: Anthony et al., arXiv:2401.14489). ``k0`` terms are lost at a tile's start and end.
    """
    efficiency = accelerator.efficiency
    share = efficiency.products[product.format]
    if efficiency.processors:
        tiles = max(1.0, product.m / TILE[0]) * max(1.0, product.n / TILE[1]) * max(1.0, product.count)
        waves = tiles / efficiency.processors
        share *= waves / (waves + 0.5)
    share *= product.k / (product.k + efficiency.product_depth)
    flops = 2.0 * product.m * product.n * product.k * product.count
    computing = flops / (accelerator.peak(product.format) * share)
    operand = {"fp8": 1.0, "fp32": 4.0}.get(product.format, 2.0)
    moved = operand * product.k * (product.m + product.n) + product.result_bytes * product.m * product.n
    moving = moved * product.count / (accelerator.memory_bandwidth * efficiency.memory)
    return max(computing, moving)


def _core_seconds(core: Core, accelerator: Accelerator) -> float:
    """Return the seconds of attention's core; head width and length decide which share of the peak it reaches."""
    efficiency = accelerator.efficiency
    share = efficiency.attention_backward if core.backward else efficiency.attention_forward
    share *= core.length / (core.length + efficiency.attention_length)
    if efficiency.processors:
        share *= min(1.0, (core.width / 128) ** 0.5)
    return core.flops / (accelerator.peak(core.format) * share)
