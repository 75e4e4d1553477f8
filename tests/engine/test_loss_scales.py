"""Losses are scaled, and half precision without ZeRO trains as with it."""

from __future__ import annotations

import math
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, initialize
from ds_topo.base.patches import BF16_DISCARDS_INFINITIES
from ds_topo.engine.repairs import loss_scales
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
        scaler = loss_scales.AutocastScaler(grid, optimizer)
        for gradient in gradients:
            weight.grad = scaler.scale(torch.tensor([gradient]))
            before = weight.item()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert weight.item() == (before - gradient if math.isfinite(gradient) else before)
            assert optimizer.overflow is not math.isfinite(gradient)  # type: ignore[attr-defined]
            seen.append(float(scaler.scale(torch.ones(()))))
        scaler.release()
        assert not hasattr(optimizer, "overflow")
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


@pytest.mark.parametrize(
    ("kind", "overflows", "expected"),
    [(FP16_UnfusedOptimizer, False, 2.0), (FP16_UnfusedOptimizer, True, 16.0), (FP16_Optimizer, False, 16.0)],
)
def test_norm_of_scaled_gradients_is_divided_after_a_step(kind: type, overflows: bool, expected: float) -> None:
    optimizer = mock.Mock(spec=kind, overflow=overflows, _global_grad_norm=16.0)
    state: Any = SimpleNamespace(cur_scale=8.0)
    optimizer.step.side_effect = lambda: setattr(state, "cur_scale", 4.0)
    loss_scales.LossScaler(state).step(optimizer)
    assert optimizer._global_grad_norm == expected, "by the scale before the step"


def test_scaler_is_restored_unless_the_engine_was_destroyed() -> None:
    engine: Any = type("Engine", (), {})()
    engine.torch_autocast_z0_gradscaler = loss_scales.LossScaler(mock.Mock())
    for scaler in ("first", "second"):
        loss_scales._restore_scaler(weakref.ref(engine), scaler)
        assert engine.torch_autocast_z0_gradscaler == "first"
    kept = weakref.ref(engine)
    del engine
    loss_scales._restore_scaler(kept, "third")


# -- torch_autocast ---------------------------------------------------------------------------------------------------

AUTOCAST: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 8}}


def _steps_of_which_one_overflows(stages: int, zero: int, reduced: bool, clip: float) -> list[tuple[Any, ...]]:
    """Return what an engine reports after each step; in the second one, a gradient of one rank is nan."""
    start()
    with PipelineParallelGrid("pipe=2" if stages > 1 else "data=-1") as grid:
        layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
        module: Any = nn.Sequential(*layers)
        given: dict[str, Any] = {"mpu": grid}
        if stages > 1:
            module, given = PipelineModule(layers, grid=grid, loss_fn=_loss), {}
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        config = settings(
            gradient_accumulation_steps=1,
            zero_optimization={"stage": zero},
            gradient_clipping=clip,
            gradient_reducer=reduced,
            scheduler=SCHEDULE,
            **AUTOCAST,
        )
        engine, *_ = initialize(model=module, optimizer=optimizer, config=config, **given)
        found: list[tuple[Any, ...]] = []
        for step in range(3):
            inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
            breaks = step == 1 and grid.get_sample_rank() == grid.get_sample_world_size() - 1
            targets = inputs * math.inf if breaks else inputs.sin()
            if stages > 1:
                engine.train_batch(iter([(inputs, targets)]))
            else:
                engine.backward(_loss(engine(inputs), targets))
                engine.step()
            has_norm = engine.was_step_applied() or BF16_DISCARDS_INFINITIES  # DeepSpeed before 0.19.8 keeps an old one
            norm = engine.get_global_grad_norm() if clip and has_norm else 0.0
            weight = next(module.parameters()).detach().abs().sum()
            found.append(
                (engine.was_step_applied(), engine.skipped_steps, *engine.get_lr(), float(norm), float(weight))
            )
        engine.destroy()
        assert not hasattr(optimizer, "overflow")
    return found


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - targets).square().mean()


@pytest.mark.parametrize("clip", [0.5, pytest.param(0.0, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("stages", [1, 2])
def test_skipped_step_of_autocast_does_not_count_without_zero_either(world: Worlds, stages: int, clip: float) -> None:
    """Learning rate, norm and weights are those of ZeRO 1, whose optimizer reports an overflow."""
    expected = world(2).run(_steps_of_which_one_overflows, stages, 1, False, clip)
    assert [(applied, skipped) for applied, skipped, *_ in expected[0]] == [(True, 0), (False, 1), (True, 1)]
    for reduced in (False, True):
        found = world(2).run(_steps_of_which_one_overflows, stages, 0, reduced, clip)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def _engines_after_one_with_autocast(zero: int) -> None:
    start()
    with PipelineParallelGrid("data=-1") as grid:
        found = []
        for config in (AUTOCAST, {"communication_data_type": "fp32"}, AUTOCAST):
            module = nn.Linear(8, 8)
            for parameter in module.parameters() if found else ():
                parameter.comm_dtype = torch.float16  # as an earlier engine with the same layer has left it
            own = settings(gradient_accumulation_steps=1, zero_optimization={"stage": zero}, **config)
            engine, *_ = initialize(model=module, model_parameters=module.parameters(), mpu=grid, config=own)
            found.append(engine)
        assert not torch_autocast.is_autocast_initialized()
        for engine in found:  # all of them live
            engine.backward(_loss(engine(torch.ones(2, 8)), torch.ones(2, 8)))
            engine.step()
        scales = [engine.optimizer.cur_scale for engine in found]
        types = [{*map(str, engine.optimizer.ipg_buckets)} for engine in found]
        assert scales == [loss_scales.FIRST_SCALE, 1.0, loss_scales.FIRST_SCALE]
        assert types == [{"torch.float16"}, {"torch.float32"}, {"torch.float16"}]
        for engine in found:
            engine.destroy()


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_engine_beside_one_with_autocast_has_no_loss_scale(world: Worlds, zero: int) -> None:
    """Also with layers whose gradients an earlier engine has reduced in fp16."""
    world(2).run(_engines_after_one_with_autocast, zero)
