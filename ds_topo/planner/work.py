"""Values of what one rank does for one micro-batch in one piece of a model: products, memory traffic, messages, bytes
kept. Nothing here knows how fast anything is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from ds_topo.planner.software import Recompute


@dataclass(frozen=True)
class Share:
    """The part of a micro-batch that one rank works on.

    >>> Share(micro_batch=2, sequence=1024, seq=4).tokens
    512.0
    """

    micro_batch: int
    sequence: int
    tensor: int = 1
    seq: int = 1
    sequence_parallel: bool = False
    expert_parallel: int = 1
    expert_load: float = 1.0

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch whose attention and feed-forward layers this rank computes (its part of)."""
        return self.micro_batch * self.sequence / self.seq

    @property
    def spread(self) -> int:
        """Ranks that share the activations between tensor-parallel layers (``r``)."""
        return self.tensor if self.sequence_parallel else 1


@dataclass(frozen=True)
class Product:
    """``count`` matrix products ``[m, k] x [k, n]``; ``result_bytes`` are moved per element of the result."""

    m: float
    n: float
    k: float
    format: str
    count: float = 1.0
    result_bytes: float = 2.0

    @property
    def flops(self) -> float:
        """Floating-point operations of all of them."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Core:
    """Attention's core without scores in memory: FLOPs, positions of a sequence, features of a head, number format."""

    flops: float
    length: float
    width: int
    format: str
    backward: bool = False


class Cover(Enum):
    """What is computed while a message travels."""

    NOTHING = "nothing"
    CORE = "attention's core"
    PRODUCTS = "matrix products"


@dataclass(frozen=True)
class Transfer:
    """``count`` collectives over the group of an axis; ``size`` bytes is the whole tensor, not a rank's part of it.

    They run while what covers them is computed, all but a share that comes before or after it.
    """

    axis: str
    operation: str
    size: float
    count: float = 1.0
    cover: Cover = Cover.NOTHING
    bare: float = 0.0


@dataclass(frozen=True)
class Pass:
    """Forward or backward of a piece."""

    products: tuple[Product, ...] = ()
    cores: tuple[Core, ...] = ()
    memory_bytes: float = 0.0
    kernels: int = 0
    transfers: tuple[Transfer, ...] = ()

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.products + other.products,
            self.cores + other.cores,
            self.memory_bytes + other.memory_bytes,
            self.kernels + other.kernels,
            self.transfers + other.transfers,
        )

    @cached_property
    def flops(self) -> float:
        """Of products and attention."""
        return sum(product.flops for product in self.products) + sum(core.flops for core in self.cores)


@dataclass(frozen=True)
class Kept:
    """Bytes that stay from forward to backward, by kind of recomputation."""

    none: float = 0.0
    selective: float = 0.0
    full: float = 0.0

    def under(self, recompute: Recompute) -> float:
        """Bytes kept under a kind of recomputation."""
        if recompute is Recompute.NONE:
            return self.none
        return self.selective if recompute is Recompute.SELECTIVE else self.full

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.none + other.none, self.selective + other.selective, self.full + other.full)

    def times(self, count: float) -> Kept:
        """So many times as much."""
        return Kept(self.none * count, self.selective * count, self.full * count)


@dataclass(frozen=True)
class Work:
    """A piece's passes over one micro-batch, and what it keeps from the one for the other.

    Args:
        forward: as in evaluation.
        backward: without anything computed again.
        again: what selective recomputation adds to backward; full recomputation adds ``forward``.
        kept: bytes that stay from forward to backward, by kind of recomputation.
        working: bytes of gradients and copies that are alive at once inside backward, beside what is kept.
        output: bytes of the result, which the next piece (or stage) gets.
    """

    forward: Pass
    backward: Pass
    again: Pass = field(default_factory=Pass)
    kept: Kept = field(default_factory=Kept)
    working: float = 0.0
    output: float = 0.0
