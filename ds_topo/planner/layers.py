"""The layers of a transformer: exact numbers of parameters and of multiply-adds, whole and for a rank.

Shapes: ``h`` hidden width, ``v`` vocabulary, ``t`` ranks of the model (tensor) axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TypeAlias


class Split(Enum):
    """What tensor parallelism splits of a weight (Shoeybi et al., arXiv:1909.08053)."""

    COLUMN = "outputs"
    ROW = "inputs"
    WHOLE = "nothing: every rank has all of it"


@dataclass(frozen=True)
class Linear:
    """``[tokens, inputs] -> [tokens, outputs]``.

    >>> [Linear(8, 8, bias=True, split=split).parameters(tensor=2) for split in Split]
    [36, 40, 72]
    """

    inputs: int
    outputs: int
    bias: bool = False
    split: Split = Split.WHOLE

    def parameters(self, tensor: int = 1) -> int:
        """Parameters on one of ``tensor`` ranks: the bias of a row-parallel layer is whole on each."""
        weight = self.inputs * self.outputs
        bias = self.outputs if self.bias else 0
        if self.split is Split.WHOLE:
            return weight + bias
        return weight // tensor + (bias // tensor if self.split is Split.COLUMN else bias)

    def shape(self, tensor: int = 1) -> tuple[int, int]:
        """``(inputs, outputs)`` on one of ``tensor`` ranks."""
        if self.split is Split.COLUMN:
            return self.inputs, self.outputs // tensor
        if self.split is Split.ROW:
            return self.inputs // tensor, self.outputs
        return self.inputs, self.outputs

    @property
    def multiplications(self) -> int:
        """Multiply-adds for one token, over all ranks."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Attention:
    """Causal self-attention.

    Args:
        heads: of the queries; the model axis splits them.
        kv_heads: of keys and values (grouped queries, Ainslie et al., arXiv:2305.13245).
        key_width: features of a head's queries and keys.
        value_width: features of a head's values.
        linears: projections, the output's last.
        norm_parameters: of norms inside (of queries and keys, or of compressed ones), whole on every rank.
        rotary: positions turn queries and keys (Su et al., arXiv:2104.09864).
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    linears: tuple[Linear, ...]
    norm_parameters: int = 0
    rotary: bool = True

    def parameters(self, tensor: int = 1) -> int:
        """On one of ``tensor`` ranks."""
        return sum(linear.parameters(tensor) for linear in self.linears) + self.norm_parameters


@dataclass(frozen=True)
class FeedForward:
    """``[tokens, h] -> [tokens, width] -> [tokens, h]``; ``gated``: with two inputs (SwiGLU, arXiv:2002.05202)."""

    hidden: int
    width: int
    gated: bool
    bias: bool = False

    @cached_property
    def linears(self) -> tuple[Linear, Linear]:
        """Into the middle, both gates at once, and out of it."""
        into = Linear(self.hidden, (2 if self.gated else 1) * self.width, self.bias, Split.COLUMN)
        return into, Linear(self.width, self.hidden, self.bias, Split.ROW)

    def parameters(self, tensor: int = 1) -> int:
        """On one of ``tensor`` ranks."""
        return sum(linear.parameters(tensor) for linear in self.linears)


@dataclass(frozen=True)
class Experts:
    """A mixture of ``count`` feed-forward layers, of which each token goes through ``top_k`` and all ``shared`` ones.

    ``router_parameters`` are whole on every rank.
    """

    count: int
    top_k: int
    expert: FeedForward
    router_parameters: int
    shared: FeedForward | None = None

    def shared_parameters(self, tensor: int = 1) -> int:
        """Parameters that are no expert's: router and shared experts, on one of ``tensor`` ranks."""
        return self.router_parameters + (self.shared.parameters(tensor) if self.shared else 0)


@dataclass(frozen=True)
class Block:
    """One transformer layer: attention, then a feed-forward layer or experts (``mlp``)."""

    hidden: int
    attention: Attention
    mlp: FeedForward | Experts
    norm_parameters: int

    def parameters(self, tensor: int = 1) -> int:
        """Parameters outside experts, on one of ``tensor`` ranks."""
        mlp = self.mlp.shared_parameters(tensor) if isinstance(self.mlp, Experts) else self.mlp.parameters(tensor)
        return self.attention.parameters(tensor) + mlp + self.norm_parameters

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of all experts."""
        return self.mlp.count * self.mlp.expert.parameters() if isinstance(self.mlp, Experts) else 0

    def largest_linear(self, tensor: int = 1) -> int:
        """Parameters of the largest linear layer on one of ``tensor`` ranks, experts aside."""
        linears = list(self.attention.linears)
        if isinstance(self.mlp, FeedForward):
            linears += self.mlp.linears
        return max(linear.parameters(tensor) for linear in linears)

    @cached_property
    def split_widths(self) -> tuple[int, ...]:
        """Widths of feed-forward layers, which tensor parallelism splits."""
        if isinstance(self.mlp, FeedForward):
            return (self.mlp.width,)
        return (self.mlp.shared.width,) if self.mlp.shared else ()

    @cached_property
    def multiplications(self) -> int:
        """Multiply-adds of weights that one token meets."""
        linears: list[Linear] = list(self.attention.linears)
        if isinstance(self.mlp, FeedForward):
            linears += self.mlp.linears
            return sum(linear.multiplications for linear in linears)
        linears += self.mlp.shared.linears if self.mlp.shared else ()
        active = self.mlp.top_k * sum(linear.multiplications for linear in self.mlp.expert.linears)
        return sum(linear.multiplications for linear in linears) + active + self.mlp.router_parameters


@dataclass(frozen=True)
class MeasuredProduct:
    """``count`` products ``[rows, inner] x [inner, columns]`` of one sequence; ``batched`` ones grow in number with the
    sequences, others in rows."""

    rows: int
    columns: int
    inner: int
    count: int = 1
    batched: bool = False

    @property
    def multiplications(self) -> int:
        """Multiply-adds of all of them."""
        return self.rows * self.columns * self.inner * self.count


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer of a live module, as one forward pass of one sequence showed it. Tensor parallelism cannot split it.

    Args:
        name: its path in the module.
        weights: parameters.
        largest_weight: parameters of its largest one.
        products: matrix products.
        core_flops: of attention's core in forward.
        core_width: features of its heads.
        values: that operators other than products read and write.
        operators: their number.
        kept: values that stay for backward.
        kept_indices: bytes that stay and are no floating-point values.
        output: values of its result.
        positions: of the sequence.
    """

    name: str
    weights: int
    largest_weight: int
    products: tuple[MeasuredProduct, ...]
    core_flops: float
    core_width: int
    values: float
    operators: int
    kept: float
    kept_indices: float
    output: float
    positions: int
    expert_parameters: int = 0
    split_widths: tuple[int, ...] = ()

    def parameters(self, tensor: int = 1) -> int:
        """All of them, on every rank."""
        return self.weights

    def largest_linear(self, tensor: int = 1) -> int:
        """Parameters of the largest one."""
        return self.largest_weight

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward, which is twice forward; two and a half times for attention's core."""
        products = sum(product.multiplications for product in self.products)
        return (3 * 2 * products + 3 * self.core_flops) / self.positions


def dense_attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    width: int,
    *,
    bias_in: bool = False,
    bias_out: bool = False,
    norm_parameters: int = 0,
    rotary: bool = True,
) -> Attention:
    """Queries, keys and values from one projection (three are the same work), and the output's."""
    into = Linear(hidden, (heads + 2 * kv_heads) * width, bias_in, Split.COLUMN)
    out = Linear(heads * width, hidden, bias_out, Split.ROW)
    return Attention(heads, kv_heads, width, width, (into, out), norm_parameters, rotary)


AnyBlock: TypeAlias = "Block | MeasuredLayer"


def count_by_kind(blocks: Iterable[AnyBlock]) -> list[tuple[int, AnyBlock]]:
    """Runs of equal blocks with their lengths.

    >>> from ds_topo.planner.model import transformer
    >>> model = transformer(layers=3, hidden=64, heads=4, vocabulary=256, sequence=16)
    >>> [(count, block.hidden) for count, block in count_by_kind(model.blocks)]
    [(3, 64)]
    """
    runs: list[tuple[int, AnyBlock]] = []
    for block in blocks:
        if runs and (runs[-1][1] is block or runs[-1][1] == block):
            runs[-1] = (runs[-1][0] + 1, block)
        else:
            runs.append((1, block))
    return runs
