"""Gradient norms of bf16 engines count every shard, and engines without tensor-parallel parameters train on slices."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_topo import PipelineParallelGrid, initialize
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

ZERO_1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}


def _norm_of_shards(reduced: bool) -> float:
    start()
    with PipelineParallelGrid("data=2,model=2") as grid:
        torch.manual_seed(grid.get_slice_parallel_rank())
        module = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 8))
        for parameter in module.parameters():
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        config = settings(**BF16, gradient_accumulation_steps=1, gradient_clipping=1.0, gradient_reducer=reduced)
        engine, *_ = initialize(model=module, mpu=grid, config=config)
        data = torch.ones(2, 128, dtype=torch.bfloat16)
        engine.backward(engine(data).float().square().sum())
        own = [parameter.grad.float().square().sum() for parameter in module.parameters()]
        total = torch.stack(own).sum()
        dist.all_reduce(total, group=grid.get_slice_parallel_group())
        engine.step()
        norm = float(engine.get_global_grad_norm())
        engine.destroy()
        return norm / float(total.sqrt())


@pytest.mark.parametrize("reduced", [False, True])
def test_norm_counts_every_shard(world: Worlds, reduced: bool) -> None:
    """In bf16 without ZeRO, marks on parameters are enough; ``mark_tensor_parallel_gradients`` is not called."""
    for ratio in world(4).run(_norm_of_shards, reduced):
        assert ratio == pytest.approx(1.0, rel=1e-2)


def _whole_model_on_slices(topology: str, wide: bool) -> None:
    start()
    more: dict[str, Any] = {**ZERO_1, "data_types": {"grad_accum_dtype": "fp32"}} if wide else {}
    with PipelineParallelGrid(topology) as grid:
        module = nn.Linear(8, 8)
        config = settings(**BF16, **more, gradient_accumulation_steps=1)
        engine, *_ = deepspeed.initialize(model=module, mpu=grid, config=config)
        hidden = torch.ones(2, 8, dtype=torch.bfloat16)  # the same on all replicas
        alone = torch.autograd.grad(engine.module(hidden).float().square().mean(), list(module.parameters()))
        for step in range(2):
            engine.backward(engine(hidden).float().square().mean())
            engine.step()
            if step == 0:
                norm = torch.stack([gradient.float().norm() for gradient in alone]).norm()
                assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-2)
        engine.destroy()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("topology", ["data=2,model=2", "model=4"])
def test_slices_without_tensor_parallel_parameters_train(world: Worlds, topology: str, wide: bool) -> None:
    world(4).run(_whole_model_on_slices, topology, wide)
