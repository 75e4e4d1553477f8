"""Layers that are split over a model-parallel group, after Megatron-LM (arXiv:1909.08053, 2205.05198).

Shapes: b sequences, s positions, h features in, g features out, v vocabulary; n ranks in the group. With *sequence
parallelism* the activations between the layers are split along the sequence, ``[b, s/n, h]``; otherwise every rank has
all of them. Every layer first creates its full weight and then keeps its part, so that any n starts from the same
model. In a group of one rank the collectives do nothing, and these are plain layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_topo import collectives

SEQUENCE = 1


@dataclass(frozen=True)
class Parallel:
    """The group over which layers are split, and whether sequences are split, too."""

    group: dist.ProcessGroup
    sequence: bool = False

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Prepare the input of a column-parallel layer: keep ``[b, s, h]``, or gather ``[b, s/n, h]``."""
        if self.sequence:
            return collectives.all_gather(hidden, self.group, SEQUENCE)
        return collectives.copy(hidden, self.group)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Sum the outputs ``[b, s, h]`` of a row-parallel layer; return all of it, or this rank's ``[b, s/n, h]``."""
        if self.sequence:
            return collectives.reduce_scatter(hidden, self.group, SEQUENCE)
        return collectives.reduce(hidden, self.group)

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """Use a parameter that is not split. If the sequence is split, sum its gradient over the ranks."""
        return collectives.copy(parameter, self.group) if self.sequence else parameter

    def own(self, full: torch.Tensor, dim: int) -> nn.Parameter:
        """Return this rank's part of a full weight, marked for the gradient norm and for checkpoints."""
        part = nn.Parameter(collectives.scatter(full.detach(), self.group, dim))
        part.tensor_model_parallel = True  # type: ignore[attr-defined]
        part.partition_dim = dim  # type: ignore[attr-defined]
        return part


class LayerNorm(nn.LayerNorm):
    """A layer norm of ``[b, s, h]`` or ``[b, s/n, h]``."""

    def __init__(self, width: int, parallel: Parallel) -> None:
        super().__init__(width)
        self.parallel = parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = self.parallel.whole(self.weight), self.parallel.whole(self.bias)
        return F.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps)


class ColumnParallelLinear(nn.Module):
    """A linear layer ``[b, s, h]`` -> ``[b, s, g/n]`` that computes some of the outputs on each rank.

    ``pieces`` equal outputs, such as query, key and value, are each split over the ranks.
    """

    def __init__(self, inputs: int, outputs: int, parallel: Parallel, pieces: int = 1) -> None:
        super().__init__()
        self.parallel = parallel
        full = nn.Linear(inputs, outputs)
        self.weight = parallel.own(full.weight.view(pieces, -1, inputs), 1)
        self.bias = parallel.own(full.bias.view(pieces, -1), 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(self.parallel.enter(hidden), self.weight.flatten(0, 1), self.bias.flatten())


class RowParallelLinear(nn.Module):
    """A linear layer ``[b, s, h/n]`` -> ``[b, s, g]`` that sums the results of some of the inputs on each rank."""

    def __init__(self, inputs: int, outputs: int, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        full = nn.Linear(inputs, outputs)
        self.weight = parallel.own(full.weight, 1)
        self.bias = full.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.parallel.leave(F.linear(hidden, self.weight)) + self.parallel.whole(self.bias)


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


def vocabulary_parallel_loss(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mean cross entropy of ``[b, s, v/n]`` and ``[b, s]`` in nats, without gathering the vocabulary."""
    logits = logits.float()
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - largest.unsqueeze(-1)
    rows, is_own = own_rows(labels, logits.shape[-1], group)
    of_label = shifted.gather(-1, rows.unsqueeze(-1)).squeeze(-1) * is_own
    both = torch.stack([shifted.exp().sum(-1), of_label])
    total, of_label = collectives.reduce(both, group).unbind()
    return (total.log() - of_label).mean()


def own_rows(tokens: torch.Tensor, rows: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's row among the ``rows`` of this rank, or 0, and a mask of the tokens that have one."""
    local = tokens - group.rank() * rows
    is_own = (local >= 0) & (local < rows)
    return local * is_own, is_own
