"""A byte-level GPT as a list of pipeline layers, with the embedding tied to the output.

Shapes: b sequences, s positions, h width, v = 256 bytes; each layer's are in ``parallel_layers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from parallel_layers import LayerNorm, Parallel, VocabularyParallelEmbedding
from torch import nn

from ds_topo import collectives
from ds_topo.layers import ParallelLinear, parallel_cross_entropy

VOCABULARY = 256
FIRST_BLOCK = 2
"""The index of the first block among the layers, after the embedding and the positions."""


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model."""

    context: int = 128
    width: int = 128
    heads: int = 4
    depth: int = 4


class PositionEmbedding(nn.Module):
    """Add one learned vector per position to ``[b, s, h]``."""

    def __init__(self, config: GPTConfig, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = nn.Parameter(torch.randn(config.context, config.width) * 0.02)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.parallel.sequence:
            return hidden + collectives.scatter(self.weight, self.parallel.group, 0)
        return hidden + self.weight


class FeedForward(nn.Module):
    """Two linear layers for each position, ``[b, s, h]`` -> ``[b, s, h]``."""

    def __init__(self, config: GPTConfig, parallel: Parallel) -> None:
        super().__init__()
        self.expand = ParallelLinear(config.width, 4 * config.width, dim=-1, group=parallel)
        self.contract = ParallelLinear(4 * config.width, config.width, dim=0, group=parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        contracted: torch.Tensor = self.contract(F.gelu(self.expand(hidden)))
        return contracted


MakeFeedForward = Callable[[GPTConfig, Parallel], nn.Module]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, ``[b, s, h]`` -> ``[b, s, h]``."""

    def __init__(self, config: GPTConfig, parallel: Parallel, feed_forward: MakeFeedForward = FeedForward) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.attention_norm = LayerNorm(config.width, parallel)
        self.qkv = ParallelLinear(config.width, 3 * config.width, dim=-1, group=parallel, pieces=3)
        self.projection = ParallelLinear(config.width, config.width, dim=0, group=parallel)
        self.mlp_norm = LayerNorm(config.width, parallel)
        self.feed_forward = feed_forward(config, parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.projection(self.attention(self.attention_norm(hidden)))
        fed_forward: torch.Tensor = self.feed_forward(self.mlp_norm(hidden))
        return hidden + fed_forward

    def attention(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute attention with this rank's heads, ``[b, s, h]`` -> ``[b, s, h/n]``."""
        query, key, value = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def next_byte_loss(parallel: Parallel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the mean cross entropy of logits ``[b, s, v/n]`` and labels ``[b, s]``, in nats per byte."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return parallel_cross_entropy(logits, labels, group=parallel)

    return loss


def gpt_layers(config: GPTConfig, parallel: Parallel, feed_forward: MakeFeedForward = FeedForward) -> list[Any]:
    """Return the layers in order; DeepSpeed builds each on its stage."""
    size = parallel.group.size()
    if config.heads % size or VOCABULARY % size or (parallel.sequence and config.context % size):
        raise ValueError(f"the model axis has degree {size}, which must divide {config.heads} heads and the context")
    embedding = partial(TiedLayerSpec, "embedding", VocabularyParallelEmbedding, VOCABULARY, config.width, parallel)
    return [
        embedding(),
        LayerSpec(PositionEmbedding, config, parallel),
        *(LayerSpec(Block, config, parallel, feed_forward) for _ in range(config.depth)),
        LayerSpec(LayerNorm, config.width, parallel),
        embedding(forward_fn=VocabularyParallelEmbedding.logits),
    ]
