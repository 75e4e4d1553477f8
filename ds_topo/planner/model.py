"""A whole model: parameters and floating-point operations, exact to the last one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from ds_topo.errors import TopologyError
from ds_topo.planner.layers import Block, Experts, FeedForward, MeasuredLayer, dense_attention


@dataclass(frozen=True)
class Model:
    """A decoder: embedding, blocks, a norm and the output layer.

    Args:
        name: for tables.
        hidden: width of the activations between blocks.
        vocabulary: rows of the embedding.
        sequence: positions of a training sequence unless the job says otherwise.
        blocks: in order.
        positions: rows of a learned position embedding (GPT-2), 0 for rotary ones.
        final_norm_parameters: of the norm after the last block.
        tied: the output layer is the embedding.
        dropout: the layers drop activations in training (GPT-2's generation).
    """

    name: str
    hidden: int
    vocabulary: int
    sequence: int
    blocks: tuple[Block, ...] | tuple[MeasuredLayer, ...]
    positions: int = 0
    final_norm_parameters: int = 0
    tied: bool = False
    dropout: bool = False

    @property
    def layers(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    @property
    def embedding_parameters(self) -> int:
        """Of tokens and positions."""
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def output_parameters(self) -> int:
        """Of the output layer, where it is not the embedding."""
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def is_measured(self) -> bool:
        """Whether its blocks are a live module's layers, the embedding and the output among them."""
        return isinstance(self.blocks[0], MeasuredLayer)

    @cached_property
    def expert_parameters(self) -> int:
        """Of all experts of all blocks."""
        return sum(block.expert_parameters for block in self.blocks)

    @cached_property
    def parameters(self) -> int:
        """Every parameter, exactly."""
        blocks = sum(block.parameters() + block.expert_parameters for block in self.blocks)
        return self.embedding_parameters + blocks + self.final_norm_parameters + self.output_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token meets: all but the experts that it is not sent to."""
        idle = 0
        for block in self.blocks:
            if isinstance(block, Block) and isinstance(block.mlp, Experts):
                idle += (block.mlp.count - block.mlp.top_k) * block.mlp.expert.parameters()
        return self.parameters - idle

    @cached_property
    def heads(self) -> int:
        """The greatest common divisor of the blocks' heads: the model axis must divide it."""
        return gcd(*(block.attention.heads if isinstance(block, Block) else 1 for block in self.blocks))

    @cached_property
    def split_widths(self) -> frozenset[int]:
        """Widths of feed-forward layers, which tensor parallelism splits."""
        return frozenset(width for block in self.blocks for width in block.split_widths)

    @cached_property
    def expert_count(self) -> int:
        """The greatest common divisor of the blocks' numbers of experts, 0 without experts."""
        mixtures = [block.mlp for block in self.blocks if isinstance(block, Block)]
        return gcd(*(mlp.count for mlp in mixtures if isinstance(mlp, Experts)))

    def flops_per_token(self, sequence: int, *, causal: bool = True) -> float:
        """Floating-point operations of forward and backward for one token: ``6 x multiplications + attention``.

        Backward costs twice what forward does, so that ``3 x 2`` operations come for every weight that a token meets
        (Narayanan et al., SC 2021, appendix; the embedding's look-up counts nothing). Attention takes
        ``3 x 2 x s x heads x (key width + value width)`` more with a full mask, half of it with a causal one.
        """
        flops = sum(block.flops_per_token for block in self.blocks if isinstance(block, MeasuredLayer))
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        weights = sum(block.multiplications for block in blocks) + self.hidden * self.vocabulary
        pairs = sum(
            block.attention.heads * (block.attention.key_width + block.attention.value_width) for block in blocks
        )
        return flops + 6.0 * weights + 6.0 * sequence * pairs * (0.5 if causal else 1.0)


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    sequence: int,
    kv_heads: int | None = None,
    ffn: int | None = None,
    experts: int = 0,
    top_k: int = 0,
    gated: bool | None = None,
    tied: bool | None = None,
    name: str = "",
) -> Model:
    """A model from numbers by hand.

    Without ``kv_heads`` or with as many as heads, and ``ffn`` of at least three times the hidden width, it is a GPT
    (GPT-2's layers: biases, LayerNorm, GELU, learned positions, tied output); else it has Llama's layers (no biases,
    RMSNorm, SwiGLU, rotary positions, an output layer of its own). ``gated`` and ``tied`` say otherwise.

    >>> transformer(layers=12, hidden=768, heads=12, vocabulary=50257, sequence=1024).parameters
    124439808
    >>> llama = transformer(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, sequence=8192)
    >>> llama.parameters
    8030261248

    Raises:
        TopologyError: a number that is not positive, heads that do not divide the width or are not divided by kv_heads.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    ffn = 4 * hidden if ffn is None else ffn
    numbers = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv-heads": kv_heads,
        "ffn": ffn,
        "vocab": vocabulary,
        "sequence": sequence,
    }
    for field, value in numbers.items():
        if value < 1:
            raise TopologyError(f"--{field} {value}: a model needs at least 1")
    if hidden % heads:
        raise TopologyError(f"--heads {heads} must divide --hidden {hidden}: every head has hidden / heads features")
    if heads % kv_heads:
        raise TopologyError(f"--kv-heads {kv_heads} must divide --heads {heads}: each is shared by heads / kv-heads")
    if min(experts, top_k) < 0 or (experts > 0) != (top_k > 0):
        raise TopologyError(f"--experts {experts} --top-k {top_k}: give both, with 1 <= top-k <= experts")
    if top_k > experts:
        raise TopologyError(
            f"--top-k {top_k}: a token goes through at most all --experts {experts}, 1 <= top-k <= experts"
        )
    gpt = not gated if gated is not None else (kv_heads == heads and ffn >= 3 * hidden and not experts)
    width = hidden // heads
    attention = dense_attention(hidden, heads, kv_heads, width, bias_in=gpt, bias_out=gpt, rotary=not gpt)
    mlp: FeedForward | Experts = FeedForward(hidden, ffn, gated=not gpt, bias=gpt)
    if experts:
        mlp = Experts(experts, top_k, FeedForward(hidden, ffn, gated=not gpt, bias=gpt), hidden * experts)
    norm = 2 * hidden if gpt else hidden
    return Model(
        name=name or f"{layers} layers of {hidden}",
        hidden=hidden,
        vocabulary=vocabulary,
        sequence=sequence,
        blocks=(Block(hidden, attention, mlp, 2 * norm),) * layers,
        positions=sequence if gpt else 0,
        final_norm_parameters=norm,
        tied=gpt if tied is None else tied,
        dropout=gpt,
    )
