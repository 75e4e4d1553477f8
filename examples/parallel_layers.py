"""Layers that are split over a model-parallel group, after Megatron-LM (arXiv:1909.08053, 2205.05198).

Shapes: b sequences, s positions, h features in, g features out, v vocabulary; n ranks in the group. With *sequence
parallelism* the activations between the layers are split along the sequence, ``[b, s/n, h]``; else every rank has them
whole. Every layer makes its full weight first and keeps its part, so that any n starts from the same model. In a group
of one they are plain layers: the collectives do nothing.
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
    """How the layers are split."""

    group: dist.ProcessGroup
    sequence: bool = False

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Before a column-parallel layer: ``[b, s, h]``, or ``[b, s/n, h]`` made whole."""
        if self.sequence:
            return collectives.all_gather(hidden, self.group, SEQUENCE)
        return collectives.copy(hidden, self.group)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """After a row-parallel layer: sum ``[b, s, h]``; keep all of it, or this rank's ``[b, s/n, h]``."""
        if self.sequence:
            return collectives.reduce_scatter(hidden, self.group, SEQUENCE)
        return collectives.reduce(hidden, self.group)

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter that every rank has whole, used on this rank's positions alone if the sequence is split.

        Its gradient is then the sum of what the ranks find.
        """
        return collectives.copy(parameter, self.group) if self.sequence else parameter

    def own(self, full: torch.Tensor, dim: int) -> nn.Parameter:
        """This rank's part of a full weight, marked for the norm of all gradients and for checkpoints."""
        part = nn.Parameter(collectives.scatter(full.detach(), self.group, dim))
        part.tensor_model_parallel = True  # type: ignore[attr-defined]
        part.partition_dim = dim  # type: ignore[attr-defined]
        return part


class LayerNorm(nn.LayerNorm):
    """``[b, s, h]`` or ``[b, s/n, h]`` -> the same."""

    def __init__(self, width: int, parallel: Parallel) -> None:
        super().__init__(width)
        self.parallel = parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = self.parallel.whole(self.weight), self.parallel.whole(self.bias)
        return F.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps)


class ColumnParallelLinear(nn.Module):
    """``[b, s, h]`` -> ``[b, s, g/n]``: each rank has some of the outputs.

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
    """``[b, s, h/n]`` -> ``[b, s, g]``: each rank has some of the inputs, and the results are summed."""

    def __init__(self, inputs: int, outputs: int, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        full = nn.Linear(inputs, outputs)
        self.weight = parallel.own(full.weight, 1)
        self.bias = full.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.parallel.leave(F.linear(hidden, self.weight)) + self.parallel.whole(self.bias)


class VocabularyParallelEmbedding(nn.Module):
    """Tokens ``[b, s]`` -> ``[b, s, h]``: each rank has the rows of some of the vocabulary."""

    def __init__(self, vocabulary: int, width: int, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = parallel.own(torch.randn(vocabulary, width) * 0.02, 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, is_own = own_rows(tokens, len(self.weight), self.parallel.group)
        return self.parallel.leave(F.embedding(rows, self.weight) * is_own.unsqueeze(-1))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[b, s, h]`` -> scores of this rank's part of the vocabulary, ``[b, s, v/n]``."""
        return F.linear(self.parallel.enter(hidden), self.weight)


def vocabulary_parallel_loss(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Mean cross entropy in nats of ``[b, s, v/n]`` against ``[b, s]``, without bringing the vocabulary together."""
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
    """Each token's row among the ``rows`` of this rank (0 for others' tokens), and whether it is here."""
    local = tokens - group.rank() * rows
    is_own = (local >= 0) & (local < rows)
    return local * is_own, is_own
