"""The loss scale of ``torch_autocast`` in fp16 falls after an overflow, and rises after many steps without one."""

from __future__ import annotations

import math
from unittest import mock

import torch
from torch import nn

from ds_topo import PipelineParallelGrid
from ds_topo.engine import loss_scales
from tests.support.fake_world import fake_world


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
