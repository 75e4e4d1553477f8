"""The work of each kind of layer: formulas for products, memory traffic, messages and bytes kept.

Nothing here knows how fast anything is. Symbols of the formulas:

    T = b s / c      tokens of a micro-batch on this rank: b sequences of s positions, split over c ranks of ``seq``
    h, a, f          hidden width, heads, width of the feed-forward layer
    t                ranks of ``model``; r = t where activations between layers are split along the sequence, else 1
    B                bytes of an activation
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_topo.planner.layers import Attention, Block, Experts, FeedForward, Linear, MeasuredLayer, Split
from ds_topo.planner.model import Model
from ds_topo.planner.precision import Precision
from ds_topo.planner.software import Software
from ds_topo.planner.work import Core, Cover, Kept, Pass, Product, Share, Transfer, Work

DROPOUT_MASK_BYTES = 1
LOGIT_BYTES = 24
"""Memory traffic of one logit in the fp32 cross entropy: cast, maximum, exponential, sum, gradient."""
FP8_CAST_BYTES = 6
"""Traffic for one value of a linear layer in fp8: read for its maximum, read, written, written transposed."""

PIECES_BARE = 0.5
"""Of a message that takes turns with pieces of a product, the share of its time that is won back is the rest: pieces
fill the device less, and the message's kernels need some of its processors. Chang et al. (FLUX, arXiv:2406.06858,
section 5) measure about that for Transformer Engine on A100 and H100."""


def block_work(block: Block, share: Share, precision: Precision, software: Software, dropout: bool = False) -> Work:
    """A transformer layer's work.

    Kept bytes, with half-precision activations, dropout and scores in memory, are Korthikanti et al.'s
    ``s b h (10/r + 24/t + 5 a s / (h t))`` (their equations 2 and 4); without scores the last term is gone, and for
    other layers each term is counted in the same way.

    >>> from ds_topo.planner.model import transformer
    >>> from ds_topo.planner.precision import FP16
    >>> from ds_topo.planner.software import MEGATRON_2022
    >>> block = transformer(layers=1, hidden=1024, heads=16, vocabulary=8, sequence=2048).blocks[0]
    >>> work = block_work(block, Share(4, 2048, tensor=8, sequence_parallel=True), FP16, MEGATRON_2022, dropout=True)
    >>> work.kept.none / (4 * 2048 * 1024) == 34 / 8 + 5 * 16 * 2048 / 1024 / 8
    True
    """
    attention = _attention_work(block.attention, share, precision, software, dropout)
    if isinstance(block.mlp, Experts):
        mlp = _experts_work(block.mlp, share, precision, software)
    else:
        mlp = _feed_forward_work(block.mlp, share.tokens, share, precision, software)
    around = _around_work(block, share, precision, software, dropout)
    whole = share.tokens * block.hidden * precision.activation_bytes
    kept = attention.kept + mlp.kept + around.kept
    return Work(
        forward=attention.forward + mlp.forward + around.forward,
        backward=attention.backward + mlp.backward + around.backward,
        again=attention.again + mlp.again + around.again,
        kept=Kept(kept.none, kept.selective, whole / share.spread),
        working=max(attention.working, mlp.working) + around.working,
        output=whole / share.spread,
    )


def measured_work(layer: MeasuredLayer, share: Share, precision: Precision) -> Work:
    """A live module's layer for a micro-batch, from what one sequence showed: products have twice their work in
    backward, other operators twice their traffic."""
    size, count = precision.activation_bytes, share.micro_batch * share.sequence / layer.positions / share.seq
    forward: list[Product] = []
    backward: list[Product] = []
    for item in layer.products:
        rows, times = (item.rows, item.count * count) if item.batched else (item.rows * count, float(item.count))
        forward.append(Product(rows, item.columns, item.inner, precision.products, times, float(size)))
        backward.append(Product(rows, item.inner, item.columns, precision.products, times, float(size)))
        backward.append(Product(item.inner, item.columns, rows, precision.products, times, 8.0))
    cores: tuple[Core, ...] = ()
    cores_back: tuple[Core, ...] = ()
    if layer.core_flops:
        flops, width = layer.core_flops * count, layer.core_width
        cores = (Core(flops, share.sequence, width, precision.attention),)
        cores_back = (Core(2.5 * flops, share.sequence, width, precision.attention, backward=True),)
    traffic, output = layer.values * size * count, layer.output * size * count
    kept = layer.kept * size * count + layer.kept_indices * count
    return Work(
        forward=Pass(tuple(forward), cores, traffic, layer.operators),
        backward=Pass(tuple(backward), cores_back, 2 * traffic, 2 * layer.operators),
        kept=Kept(kept, kept, output),
        working=2 * output,
        output=output,
    )


def embedding_work(model: Model, share: Share, precision: Precision, software: Software) -> Work:
    """The vocabulary-parallel look-up of tokens (and positions)."""
    result = share.tokens * model.hidden * precision.activation_bytes
    traffic = 2 * result / share.tensor + (3 * result if model.positions else 0) / share.spread
    forward = _summed(share, result)
    backward = (Transfer("model", "all_gather", result),) if share.tensor > 1 and share.sequence_parallel else ()
    indices = share.tokens * 8
    return Work(
        forward=Pass(memory_bytes=traffic, kernels=4, transfers=forward),
        backward=Pass(memory_bytes=2 * traffic, kernels=4, transfers=backward),
        kept=Kept(indices, indices, indices),
        output=result / share.spread,
    )


def head_work(model: Model, share: Share, precision: Precision, software: Software) -> Work:
    """The last norm, the output layer and the cross entropy, whose logits stay split over the vocabulary."""
    columns = model.vocabulary / share.tensor
    hidden = share.tokens * model.hidden * precision.activation_bytes
    logits = share.tokens * columns
    linear = Linear(model.hidden, model.vocabulary, split=Split.COLUMN)
    products = _products(linear, share.tokens, share.tensor, precision.attention, precision.activation_bytes)
    gathers = (Transfer("model", "all_gather", hidden),) if share.tensor > 1 and share.sequence_parallel else ()
    sums = (Transfer("model", "all_reduce", share.tokens * 4, 3),) if share.tensor > 1 else ()
    # kept: the norm's input and output, the softmax in fp32 (and its logits, where they are another tensor)
    kept = 2 * hidden / share.spread + logits * 4
    return Work(
        forward=Pass((products[0],), (), 2 * hidden / share.spread + logits * LOGIT_BYTES / 2, 10, gathers + sums),
        backward=Pass(
            products[1:],
            (),
            3 * hidden / share.spread + logits * LOGIT_BYTES / 2,
            10,
            _summed(share, hidden) + (gathers if software.regathers else ()),
        ),
        kept=Kept(kept, kept, kept),
        working=logits * (8 + precision.activation_bytes),
        output=logits * precision.activation_bytes,
    )


def _attention_work(
    attention: Attention, share: Share, precision: Precision, software: Software, dropout: bool
) -> Work:
    """Projections and core. FLOPs of the core: ``2 T s a (key width + value width) / t``, half of it if causal."""
    tokens, tensor, size = share.tokens, share.tensor, precision.activation_bytes
    forward, backward, casts = _linears(attention.linears, tokens, tensor, precision)
    queries = attention.heads * attention.key_width / tensor
    values = attention.heads * attention.value_width / tensor
    key_values = max(attention.kv_heads, tensor) / tensor * (attention.key_width + attention.value_width)
    inputs = queries + key_values
    # splitting the projection into heads, and turning queries and keys
    moved = 2 * inputs + (2 * (queries + key_values / 2) if attention.rotary else 0)
    low_rank = sum(linear.outputs for linear in attention.linears[:-1] if linear.split is Split.WHOLE)
    kept = tokens * size * (inputs + values + 2 * low_rank)
    scores = tokens * share.sequence * attention.heads / tensor
    flops = 2.0 * scores * (attention.key_width + attention.value_width)
    forward_bytes = tokens * size * moved + casts[0]
    backward_bytes = tokens * size * moved + casts[1]
    again = Pass()
    kept_selective = kept
    cores: tuple[Core, ...] = ()
    backward_cores: tuple[Core, ...] = ()
    if software.flash_attention:
        cores = (Core(flops / 2, share.sequence, attention.key_width, precision.attention),)
        backward_cores = (
            Core(2.5 * flops / 2, share.sequence, attention.key_width, precision.attention, backward=True),
        )
        kept += tokens * attention.heads / tensor * 4
        kept_selective = kept
    else:
        # bytes per score: written, read and written by softmax, (by dropout, with its mask,) read
        score_forward, score_backward = (6.5 * size, 9.5 * size) if dropout else (4 * size, 7 * size)
        pairs = share.micro_batch * attention.heads / tensor
        rows = share.sequence / share.seq
        first = Product(rows, share.sequence, attention.key_width, precision.attention, pairs, 0.0)
        second = Product(rows, attention.value_width, share.sequence, precision.attention, pairs, 0.0)
        again = Pass((first, second), (), score_forward * scores, 4)
        forward += (first, second)
        backward += (first, second, first, second)
        forward_bytes += score_forward * scores
        backward_bytes += score_backward * scores
        kept += scores * (2 * size + (DROPOUT_MASK_BYTES if dropout else -size))
    send, receive = _sequence_exchange(attention, share, precision, software)
    return Work(
        forward=Pass(forward, cores, forward_bytes, 6 if software.flash_attention else 10, send),
        backward=Pass(backward, backward_cores, backward_bytes, 10 if software.flash_attention else 18, receive),
        again=again,
        kept=Kept(kept, kept_selective),
        working=0.0 if software.flash_attention else 2 * scores * size,
    )


def _feed_forward_work(
    layer: FeedForward, tokens: float, share: Share, precision: Precision, software: Software
) -> Work:
    """Two linear layers and the activation between them, whose result selective recomputation computes again where it
    has no scores to save."""
    tensor, size = share.tensor, precision.activation_bytes
    forward, backward, casts = _linears(layer.linears, tokens, tensor, precision)
    width = tokens * layer.width / tensor
    before = (2 if layer.gated else 1) * width
    activation = (before + width) * size
    gradient = (2 * before + width) * size
    kept = before * size
    whole = kept + width * precision.input_bytes
    return Work(
        forward=Pass(forward, (), activation + casts[0], 3),
        backward=Pass(backward, (), gradient + casts[1], 6),
        again=Pass((), (), activation, 1) if software.flash_attention else Pass(),
        kept=Kept(whole, kept if software.flash_attention else whole),
        working=before * size,
    )


def _experts_work(experts: Experts, share: Share, precision: Precision, software: Software) -> Work:
    """Routing, the exchange of tokens over the expert group, experts, and shared experts.

    Each rank sends its ``T top_k`` rows of ``h`` values (and the rows that pad experts to equal load) out and gets them
    back, in forward and again in backward.
    """
    hidden, size = experts.expert.hidden, precision.activation_bytes
    rows = share.tokens * experts.top_k * share.expert_load
    local = experts.count / share.expert_parallel
    moved = rows * hidden * size
    scores = share.tokens * experts.count * 4
    router = Product(share.tokens, experts.count, hidden, precision.attention)
    exchange = (Transfer("expert", "all_to_all", moved, 2),) if share.expert_parallel > 1 else ()
    routing = Pass((router,), (), 6 * moved + 6 * scores, 12, exchange)
    routing_back = Pass((router, router), (), 8 * moved + 12 * scores, 20, exchange)
    # kept: rows as the experts get them, results as they are weighed, the router's scores
    kept = moved + share.tokens * experts.top_k * hidden * size + 2 * scores
    every = Work(routing, routing_back, Pass(), Kept(kept, kept), moved)
    whole = Share(share.micro_batch, share.sequence, 1, share.seq)
    one = _feed_forward_work(experts.expert, rows / local, whole, precision, software)
    parts = [_times(one, local)]
    if experts.shared:
        parts.append(_feed_forward_work(experts.shared, share.tokens, share, precision, software))
    for part in parts:
        every = Work(
            every.forward + part.forward,
            every.backward + part.backward,
            every.again + part.again,
            every.kept + part.kept,
            every.working + part.working,
        )
    return every


def _times(one: Work, count: float) -> Work:
    """The same work ``count`` times over."""
    forward, backward, again = (_repeated(each, count) for each in (one.forward, one.backward, one.again))
    return Work(forward, backward, again, one.kept.times(count), one.working * count)


def _around_work(block: Block, share: Share, precision: Precision, software: Software, dropout: bool) -> Work:
    """Two norms, two residual sums (with dropout), and the messages of tensor parallelism."""
    whole = share.tokens * block.hidden * precision.activation_bytes
    part = whole / share.spread
    forward_bytes = part * (4 + (7 if dropout else 6))
    backward_bytes = part * (6 + (11 if dropout else 6))
    forward, backward = _tensor_messages(share, whole, software)
    norm_outputs = share.tokens * block.hidden * precision.input_bytes
    norm_outputs /= share.spread if software.regathers else 1
    masks = share.tokens * block.hidden * DROPOUT_MASK_BYTES / share.spread if dropout else 0.0
    kept = 2 * part + 2 * masks
    norms_again = Pass((), (), 4 * part, 2) if software.flash_attention else Pass()
    return Work(
        forward=Pass((), (), forward_bytes, 4, forward),
        backward=Pass((), (), backward_bytes, 6, backward),
        again=norms_again,
        kept=Kept(kept + 2 * norm_outputs, kept + (0.0 if software.flash_attention else 2 * norm_outputs)),
        working=whole,
    )


def _tensor_messages(
    share: Share, size: float, software: Software
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Tensor parallelism's messages of one block, in forward and in backward.

    It sums ``T h B`` bytes after attention and after the feed-forward layer, and again in backward (Narayanan et al.,
    section 3.2); with split activations each sum is a reduce_scatter and an all_gather, and inputs are gathered again
    for the weights' gradients (Korthikanti et al., section 4.2.2). In backward the sums of inputs' gradients, and those
    gathers, can run beside the products for the weights' gradients; in forward and for the others, too, products can
    be cut into pieces that take turns with the messages (Wang et al., ASPLOS 2023): the first is bare, and pieces are
    slower than the whole.
    """
    if share.tensor == 1:
        return (), ()
    beside = Cover.PRODUCTS if software.overlaps_model_backward else Cover.NOTHING
    pieces = Cover.PRODUCTS if software.overlaps_model else Cover.NOTHING
    first = max(1 / share.tensor, PIECES_BARE)
    if not share.sequence_parallel:
        return (Transfer("model", "all_reduce", size, 2),), (Transfer("model", "all_reduce", size, 2, beside),)
    gather = Transfer("model", "all_gather", size, 2, pieces, first)
    scatter = Transfer("model", "reduce_scatter", size, 2, pieces, first)
    again = (Transfer("model", "all_gather", size, 2, beside),) if software.regathers else ()
    return (gather, scatter), (gather, Transfer("model", "reduce_scatter", size, 2, beside), *again)


def _summed(share: Share, size: float, count: int = 1) -> tuple[Transfer, ...]:
    """Partial results made whole: summed, or summed and split along the sequence."""
    if share.tensor == 1:
        return ()
    return (Transfer("model", "reduce_scatter" if share.sequence_parallel else "all_reduce", size, count),)


def _linears(
    linears: Iterable[Linear], tokens: float, tensor: int, precision: Precision
) -> tuple[tuple[Product, ...], tuple[Product, ...], tuple[float, float]]:
    """Products of forward and of backward, and the bytes that casts to fp8 move in either."""
    forward: tuple[Product, ...] = ()
    backward: tuple[Product, ...] = ()
    inputs = outputs = 0
    for linear in linears:
        products = _products(linear, tokens, tensor, precision.products, precision.activation_bytes)
        forward, backward = (*forward, products[0]), (*backward, *products[1:])
        inputs, outputs = inputs + linear.shape(tensor)[0], outputs + linear.shape(tensor)[1]
    cast = FP8_CAST_BYTES * tokens if precision.products == "fp8" else 0.0
    return forward, backward, (cast * inputs, cast * outputs)


def _products(
    linear: Linear, tokens: float, tensor: int, number_format: str, size: float
) -> tuple[Product, Product, Product]:
    """Of forward, of the input's gradient, and of the weight's, which is added to an fp32 sum."""
    inputs, outputs = linear.shape(tensor)
    return (
        Product(tokens, outputs, inputs, number_format, result_bytes=size),
        Product(tokens, inputs, outputs, number_format, result_bytes=size),
        Product(inputs, outputs, tokens, number_format, result_bytes=8.0),
    )


def _repeated(one: Pass, count: float) -> Pass:
    """The same pass over ``count`` equal parts: each product is done so many times."""
    products = tuple(
        Product(item.m, item.n, item.k, item.format, item.count * count, item.result_bytes) for item in one.products
    )
    return Pass(products, one.cores, one.memory_bytes * count, round(one.kernels * count), one.transfers)


def _sequence_exchange(
    attention: Attention, share: Share, precision: Precision, software: Software
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """What attention over a split sequence sends in forward and in backward.

    ``ring``: keys and values go around while the core works on what is here, in backward with their gradients
    (Liu et al., arXiv:2310.01889). ``all_to_all``: queries, keys, values and the result trade positions for heads
    (Jacobs et al., arXiv:2309.14509).
    """
    if share.seq == 1:
        return (), ()
    per_head = share.tokens * precision.activation_bytes
    kv_heads = max(attention.kv_heads, share.tensor) / share.tensor
    keys_values = per_head * kv_heads * (attention.key_width + attention.value_width)
    if software.seq_exchange == "ring":
        gathered = keys_values * share.seq
        forward = Transfer("seq", "all_gather", gathered, cover=Cover.CORE)
        return (forward,), (forward, Transfer("seq", "reduce_scatter", gathered, cover=Cover.CORE))
    queries_result = per_head * attention.heads / share.tensor * (attention.key_width + attention.value_width)
    moved = (Transfer("seq", "all_to_all", keys_values + queries_result),)
    return moved, moved
