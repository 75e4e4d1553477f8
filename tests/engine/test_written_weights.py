"""Parameters that a program changes after ``initialize``: a warning with the remedy; training goes on as in stock."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from ds_topo import PipelineParallelGrid, initialize
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks
from tests.support.small_engines import settings, start
from tests.support.training import destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _loaded(engine: Any) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        torch.manual_seed(1)
        engine.module.load_state_dict({name: torch.randn_like(each) for name, each in _layers().state_dict().items()})


def _loaded_and_refreshed(engine: Any) -> None:
    _loaded(engine)
    engine.optimizer.refresh_fp32_params()


def _replaced(engine: Any) -> None:
    for parameter in engine.module.parameters():
        parameter.data = torch.ones_like(parameter)


def _frozen(engine: Any) -> None:
    engine.module[0].weight.requires_grad_(False)


def _set(engine: Any) -> None:
    for parameter in engine.module.parameters():
        value = torch.ones(getattr(parameter, "ds_shape", parameter.shape))
        deepspeed.utils.safe_set_full_fp32_param(parameter, value)


def _offloaded(engine: Any) -> None:
    """Move states away and back, which gives parameters other memory; ZeRO 3 can with DeepSpeed's FusedAdam alone."""
    if (
        engine.zero_optimization_stage() < 3
        and hasattr(engine.optimizer, "offload_states")
        and not getattr(engine, "gradient_reducer", None)
    ):
        engine.offload_states()
        engine.reload_states()


def _nothing(engine: Any) -> None:
    pass


def _warnings(zero: int, more: dict[str, Any], change: Callable[[Any], None], switch: bool) -> list[str]:
    """Change parameters after ``initialize`` and after the first step; return the warnings about that."""
    start()
    config = settings(zero_optimization={"stage": zero}, gradient_accumulation_steps=1, **more)
    with PipelineParallelGrid("data=2") as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        grid.check_weights = switch
        engine, *_ = initialize(model=_layers(), mpu=grid, config=config)
        for _ in range(2):
            change(engine)
            engine.backward(engine(torch.ones(2, 8, dtype=engine.module[1].weight.dtype)).float().square().mean())
            engine.step()
        destroy_engine(engine)
    return [str(each.message) for each in said if "after deepspeed.initialize" in str(each.message)]


_BF16, _FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 8}}
_FUSED = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
_ENGINES = [
    (1, {}),
    (3, _BF16),
    (0, _FP16),
    (1, {**_BF16, **_SUMS}),
    (2, {**_BF16, "gradient_reducer": True}),
    (0, _BF16),
    (1, _FP16),
    (2, _FP16),
    (3, {}),
    (1, {**_BF16, **_SUMS, "gradient_reducer": True}),
]
_CHANGES: list[tuple[Callable[[Any], None], str, list[str]]] = [
    (_loaded, "were written after deepspeed.initialize, but this step overwrites them", ["0.weight", "1.bias"]),
    (_loaded_and_refreshed, "", []),
    (_set, "", []),
    (_offloaded, "", []),
    (_nothing, "", []),
    (_replaced, "were replaced by other tensors after deepspeed.initialize", ["0.weight.data", "1.bias.data"]),
    (_frozen, "were frozen after deepspeed.initialize, but an optimizer with master weights", ["0.weight"]),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("zero", "more"), mark_exhaustive(_ENGINES, lambda number, _: number < 5))
def test_changed_parameters_are_named_once(world: Worlds, zero: int, more: dict[str, Any]) -> None:
    for change, what, names in _CHANGES:
        if change is _replaced and zero == 3:
            continue  # DeepSpeed itself replaces parameter.data
        if change is _replaced and zero == 0 and "optimizer" not in more:  # its step writes to the parameters
            what, names = _CHANGES[0][1:]
        ranks = world(2).run(_warnings, zero, more, change, True)
        assert all(len(said) == bool(what) for said in ranks), (change, ranks)
        said = " ".join(chain(*ranks))
        assert what in said
        assert all(repr(name) in said for name in names), (change, said)


@pytest.mark.exhaustive
def test_changed_parameters_of_a_fused_optimizer_are_named() -> None:
    """Fresh ranks: torch replaces the step of a class that it does not know for good."""
    for change, what, _ in _CHANGES:
        for said in run_ranks(2, _warnings, 0, {**_FP16, **_FUSED}, change, True):
            assert len(said) == bool(what)
            assert what in " ".join(said)


def test_the_switch_silences_the_warnings(world: Worlds) -> None:
    assert world(2).run(_warnings, 1, _BF16, _loaded, False) == [[], []]


def _only_evaluates() -> None:
    start()
    with PipelineParallelGrid("data=1") as grid:
        config = settings(bf16={"enabled": True})
        del config["optimizer"]
        engine, *_ = initialize(model=nn.Linear(2, 1), mpu=grid, config=config)
        assert engine(torch.ones(1, 2, dtype=torch.bfloat16)).shape == (1, 1)
        destroy_engine(engine)


def test_an_engine_of_bf16_without_an_optimizer_evaluates(world: Worlds) -> None:
    world(1).run(_only_evaluates)
