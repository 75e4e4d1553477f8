"""A byte-level GPT as a list of pipeline layers, with the embedding tied to the output.

Shapes: b sequences, s positions, h width, v = 256 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model."""

    context: int = 128
    width: int = 128
    heads: int = 4
    depth: int = 4


class TokenEmbedding(nn.Module):
    """Bytes ``[b, s]`` -> ``[b, s, h]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, config.width) * 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)


class PositionEmbedding(nn.Module):
    """``[b, s, h]`` plus one learned vector per position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.context, config.width) * 0.02)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.weight[: hidden.shape[1]]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, ``[b, s, h]`` -> ``[b, s, h]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.projection(self.attention(self.attention_norm(hidden)))
        feed_forward: torch.Tensor = self.contract(F.gelu(self.expand(self.mlp_norm(hidden))))
        return hidden + feed_forward

    def attention(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def output_logits(embedding: TokenEmbedding, hidden: torch.Tensor) -> torch.Tensor:
    """``[b, s, h]`` -> scores of the next byte ``[b, s, v]``, with the weight of the embedding."""
    return F.linear(hidden, embedding.weight)


def next_byte_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per byte of ``[b, s, v]`` against ``[b, s]``."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def gpt_layers(config: GPTConfig) -> list[Any]:
    """The layers in order; DeepSpeed builds each on the stage that owns it."""
    return [
        TiedLayerSpec("embedding", TokenEmbedding, config),
        LayerSpec(PositionEmbedding, config),
        *(LayerSpec(Block, config) for _ in range(config.depth)),
        LayerSpec(nn.LayerNorm, config.width),
        TiedLayerSpec("embedding", TokenEmbedding, config, forward_fn=output_logits),
    ]
