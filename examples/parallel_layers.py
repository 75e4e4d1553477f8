"""Layers of the example's GPT that are split over a model-parallel group, besides those of ``ds_topo.layers``.

Shapes: b sequences, s positions, h features, v vocabulary; n ranks in the group. With *sequence parallelism* the
activations between the layers are split along the sequence, ``[b, s/n, h]``; otherwise every rank has all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ds_topo.layers import Parallel, own_rows

__all__ = ["LayerNorm", "Parallel", "VocabularyParallelEmbedding"]


class LayerNorm(nn.LayerNorm):
    """A layer norm of ``[b, s, h]`` or ``[b, s/n, h]``."""

    def __init__(self, width: int, parallel: Parallel) -> None:
        super().__init__(width)
        self.parallel = parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = self.parallel.whole(self.weight), self.parallel.whole(self.bias)
        return F.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps)


class VocabularyParallelEmbedding(nn.Module):
    """An embedding ``[b, s]`` -> ``[b, s, h]`` with the rows of some of the vocabulary on each rank."""

    def __init__(self, vocabulary: int, width: int, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = parallel.own(torch.randn(vocabulary, width) * 0.02, 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, is_own = own_rows(tokens, len(self.weight), self.parallel.group)
        return self.parallel.leave(F.embedding(rows, self.weight) * is_own.unsqueeze(-1))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores ``[b, s, v/n]`` of this rank's part of the vocabulary."""
        return F.linear(self.parallel.enter(hidden), self.weight)
