"""Mistakes that raise no error are named by a warning, once."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ds_topo import PipelineParallelGrid, initialize
from ds_topo.engine.checks import DirectSteps
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

SAID = ("were frozen after", "LambdaLR.step() was called", "compute different losses", "have read the same inputs")


def _warnings(has_mistakes: bool) -> list[str]:
    """Train three steps, on sequences of one sample in two parts; return the warnings."""
    start()
    layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(layer.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 0.1)
    config = settings(zero_optimization={"stage": 1}, gradient_accumulation_steps=1)
    del config["optimizer"]
    with PipelineParallelGrid("seq=2,model=2") as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        part, piece = grid.get_axis_rank("seq"), grid.get_axis_rank("model")
        engine, *_ = initialize(model=layer, optimizer=optimizer, lr_scheduler=scheduler, mpu=grid, config=config)
        for step in range(4):
            rows = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(step))
            loss = engine(rows[:, 0 if has_mistakes else part]).square().mean()
            engine.backward(loss * (1 + 0.01 * piece) if has_mistakes else loss)
            engine.step()
            if has_mistakes:
                engine.module[0].requires_grad_(False)
                scheduler.step()
        engine.destroy()
    return [str(each.message) for each in said if any(text in str(each.message) for text in SAID)]


def test_each_silent_mistake_is_named_once(world: Worlds) -> None:
    first, *others = world(4).run(_warnings, True)
    for text in SAID:
        assert sum(text in each for each in first) == 1, text
    assert "['0.weight', '0.bias'] were frozen" in "".join(first)
    assert all(sum(text in each for each in own) == 1 for own in others for text in SAID[:2])
    assert not any(text in each for own in others for each in own for text in SAID[2:]), "the first rank says it"
    assert world(4).run(_warnings, False) == [[]] * 4


@pytest.mark.parametrize(("ahead", "number"), [((0, 0, 0), 0), ((1, 0, 0), 0), ((1, 0, 1), 1), ((5, 5, -3), 0)])
def test_a_scheduler_that_is_one_step_ahead_twice_is_named(ahead: tuple[int, ...], number: int) -> None:
    scheduler = SimpleNamespace(last_epoch=0)
    engine: Any = SimpleNamespace(mpu=SimpleNamespace(check_weights=True), optimizer=None, lr_scheduler=scheduler)
    steps = DirectSteps(engine)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for further in (*ahead, 0):
            with steps.of_engine(engine):
                scheduler.last_epoch += 1
            scheduler.last_epoch += further
    assert len(said) == number


def _leave_out(is_frozen: bool) -> list[str]:
    start()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(not is_frozen)
    config = settings()
    del config["optimizer"]
    with PipelineParallelGrid("data=2") as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        initialize(model=model, optimizer=optimizer, mpu=grid, config=config)[0].destroy()
    return [str(each.message) for each in said if "lacks the parameters" in str(each.message)]


def test_parameters_that_the_optimizer_lacks_are_named_once(world: Worlds) -> None:
    (text,), others = world(2).run(_leave_out, False)
    assert "SGD lacks the parameters ['1.weight', '1.bias'] of the model" in text
    assert others == []
    assert world(2).run(_leave_out, True) == [[], []]
