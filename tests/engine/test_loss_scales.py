"""Losses are scaled, and half precision without ZeRO trains as with it."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from torch import nn

from ds_topo import PipelineParallelGrid
from ds_topo.engine import loss_scales
from tests.support.fake_world import fake_world
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "NAdam": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
}


def _scales(gradients: list[float]) -> list[float]:
    """Take a step with each of these gradients; return the loss scale after it."""
    weight, seen = nn.Parameter(torch.zeros(1)), []
    optimizer = torch.optim.SGD([weight, nn.Parameter(torch.zeros(1))], lr=1.0)  # one has no gradient
    rank = mock.patch("deepspeed.comm.get_rank", return_value=1)  # which its scaler asks for, to log on rank 0
    with fake_world(0, 1), PipelineParallelGrid("data=1") as grid, rank:
        scaler = loss_scales.AutocastScaler(grid)
        for gradient in gradients:
            weight.grad = scaler.scale(torch.tensor([gradient]))
            before = weight.item()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert weight.item() == (before - gradient if math.isfinite(gradient) else before)
            seen.append(float(scaler.scale(torch.ones(()))))
    return seen


def test_loss_is_multiplied_by_the_scale_of_fp16() -> None:
    scaler = loss_scales.LossScaler(mock.Mock(cur_scale=3.0))
    assert scaler.scale(torch.tensor(0.5, dtype=torch.float16)) == 1.5


def test_scale_is_halved_by_an_overflow_and_doubled_after_many_steps_without_one() -> None:
    with mock.patch.multiple(loss_scales, FIRST_SCALE=8.0, STEPS_TO_GROW=3, LOWEST_SCALE=2.0):
        assert _scales([1.0] * 5) == [8.0, 8.0, 8.0, 16.0, 16.0]
        assert _scales([1.0, math.inf, *[1.0] * 5]) == [8.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0]
        assert _scales([math.nan, math.inf, math.inf, math.nan, 1.0]) == [4.0, 2.0, 2.0, 2.0, 2.0]


def _losses(optimizer: str, precision: str, zero: int, corrects: bool = True) -> list[float]:
    start()
    with PipelineParallelGrid("data=1") as grid:
        grid.correct_norms = corrects
        module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        own = getattr(torch.optim, optimizer)(module.parameters(), **OPTIMIZERS[optimizer])
        half = {"enabled": True} | ({"initial_scale_power": 4} if precision == "fp16" else {})
        config = settings(gradient_accumulation_steps=1, zero_optimization={"stage": zero}, **{precision: half})
        engine, *_ = deepspeed.initialize(model=module, optimizer=own, mpu=grid, config=config)
        losses = []
        for step in range(4):
            inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
            loss = (engine(inputs.to(module[0].weight.dtype)).float() - inputs.sin()).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    return losses


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_first_step_without_zero_is_that_of_zero_1(world: Worlds, optimizer: str, precision: str) -> None:
    """DeepSpeed takes a step with gradients of zero before it, so that Adam counts two."""
    [without] = world(1).run(_losses, optimizer, precision, 0)
    assert without == pytest.approx(world(1).run(_losses, optimizer, precision, 1)[0], rel=2e-3)


def test_grid_without_corrections_keeps_the_step_of_zeros(world: Worlds) -> None:
    kept, undone = (world(1).run(_losses, "AdamW", "bf16", 0, each)[0] for each in (False, True))
    assert kept[1] != pytest.approx(undone[1], rel=2e-3)
