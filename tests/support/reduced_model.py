"""A model with every kind of parameter, and its expected gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

SMALL = {"bucket_bytes": 1000, "first_bucket_bytes": 300, "last_bucket_bytes": 600, "two_level": False}
"""Bucket sizes with which a small model has several buckets."""
SAMPLES = 4


class Model(nn.Module):
    """A model with tied, strided, frozen and conditionally used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.convolution = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.hidden = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.hidden[0].bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, branch: int | None = None) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.convolution(hidden.unsqueeze(1)).mean(1)
        for index, layer in enumerate(self.hidden):
            hidden = hidden + F.gelu(layer(hidden)) / (index + 1)
        for index, layer in enumerate(self.branches):
            if branch is None or branch == index:
                hidden = hidden + layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten().roll(1))


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def tokens(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(13, (SAMPLES, 5), generator=generator)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name.removeprefix("module."): None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
    }


def assert_equal_on_all_ranks(found: dict[str, torch.Tensor | None], group: Any = None) -> None:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, found, group=group)
    for other in everyone[1:]:
        assert found.keys() == other.keys()
        for name, gradient in everyone[0].items():
            assert (gradient is None) == (other[name] is None), name
            assert gradient is None or torch.equal(gradient.to_dense(), other[name].to_dense()), name


def assert_close(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None), name
        if gradient is not None:
            assert found[name].dtype == gradient.dtype
            scale = float(gradient.to_dense().abs().max())
            torch.testing.assert_close(found[name].to_dense(), gradient.to_dense(), rtol=rtol, atol=rtol * scale)


def alone(step: int, micro_batches: int, world_size: int) -> dict[str, torch.Tensor | None]:
    """Compute the gradients in one process from every rank's samples."""
    module = model()
    for micro_batch in range(micro_batches):
        for rank in range(world_size):
            (module(tokens(10 * step + micro_batch, rank)) / world_size).backward()
    return gradients(module)


def backward(module: Model, step: int = 0) -> None:
    module(tokens(step, dist.get_rank())).backward()
