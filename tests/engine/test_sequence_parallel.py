"""DeepSpeed-Ulysses over a ``seq`` axis trains as one process does, in every order and ZeRO stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

from ds_topo import PipelineParallelGrid
from tests.support.ranks import run_ranks

BATCH, POSITIONS, WIDTH, HEADS, STEPS = 4, 8, 16, 4, 3
DESCENT = {"lr": 0.5, "momentum": 0.9}
OPTIONS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"stage": 0},
    "ZeRO 1": {"stage": 1},
    "ZeRO 2": {"stage": 2, "reduce_scatter": True},
    "ZeRO 2, all-reduce": {"stage": 2, "reduce_scatter": False},
    "ZeRO 3": {"stage": 3, "reduce_scatter": True},
    "ZeRO 3, all-reduce": {"stage": 3, "reduce_scatter": False},
    "ZeRO 3, small buckets": {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": 300},
    "ZeRO 3, separate gradients": {"stage": 3, "reduce_scatter": False, "contiguous_gradients": False},
}


class Model(nn.Module):
    """One layer of attention, ``[b, s, h]`` -> ``[b, s, h]``; ``attention`` maps three ``[b, s, n, d]`` to one."""

    def __init__(self, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = attention

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = (part.unflatten(-1, (HEADS, -1)) for part in self.qkv(hidden).chunk(3, dim=-1))
        attended: torch.Tensor = self.output(self.attention(*parts).flatten(2))
        return hidden + attended


def local_attention(*parts: torch.Tensor) -> torch.Tensor:
    query, key, value = (part.transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Ulysses(nn.Module):
    """The same over a group whose ranks have a part of the positions each."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.distributed = DistributedAttention(local_attention, group, scatter_idx=2, gather_idx=1)

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.distributed(*parts, batch_dim_idx=0)
        return attended


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets ``[b, s, h]`` of a step."""
    inputs = torch.randn(BATCH, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.roll(1, dims=1).sin()


def train_alone() -> dict[str, torch.Tensor]:
    model = Model(local_attention)
    optimizer = torch.optim.SGD(model.parameters(), **DESCENT)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _train(topology: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    grid = PipelineParallelGrid(topology)
    sequences, pieces = BATCH // grid.get_data_parallel_world_size(), grid.get_sequence_parallel_world_size()
    config = {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": DESCENT},
        "zero_optimization": options,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    model = Model(Ulysses(grid.get_sequence_parallel_group()))
    engine, *_ = deepspeed.initialize(model=model, mpu=grid, config=config, model_parameters=list(model.parameters()))
    for step in range(STEPS):
        inputs, targets = (
            whole.split(sequences)[grid.get_data_parallel_rank()].chunk(pieces, 1)[grid.get_sequence_parallel_rank()]
            for whole in batch(step)
        )
        engine.backward(F.mse_loss(engine(inputs), targets) / pieces)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.destroy()
    grid.destroy()
    return parameters


def _train_all(topology: str) -> dict[str, dict[str, torch.Tensor]]:
    warnings.simplefilter("ignore", FutureWarning)
    deepspeed.init_distributed(verbose=False)
    untouched = DeepSpeedEngine._configure_zero_optimizer
    parameters = {name: _train(topology, options) for name, options in OPTIONS.items()}
    assert DeepSpeedEngine._configure_zero_optimizer is untouched
    dist.barrier()
    return parameters


@pytest.mark.parametrize("topology", ["data=2,seq=2", "seq=2,data=2", "seq=4"])
def test_attention_over_seq_equals_one_process(topology: str) -> None:
    reference = run_ranks(1, train_alone)[0]
    for runs in run_ranks(4, _train_all, topology, deadline=240):
        for name, parameters in runs.items():
            for key, value in reference.items():
                difference = float((parameters[key] - value).norm() / value.norm())
                assert difference < 1e-5, (name, key, difference)
