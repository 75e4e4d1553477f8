"""Mistakes that raise no error are named by a warning, once."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ds_topo import PipelineModule, PipelineParallelGrid, initialize
from tests.support.exhaustive import mark_exhaustive
from tests.support.small_engines import settings, start
from tests.support.world import Worlds, names_threads

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
    from ds_topo.engine.unseen_changes import DirectSteps  # deleting it leaves the other tests

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


CLEARING = ("never", "after step", "optimizer", "engine", "module", "zeros")


def _clear(stage: int, reduced: bool, config: dict[str, Any]) -> dict[str, tuple[float, int]]:
    """Train four steps of two micro-batches, with another ``zero_grad()`` each time; return weights and warnings."""
    start()
    zero = {"stage": stage, **{name: value for name, value in config.items() if "offload" in name}}
    config = {name: value for name, value in config.items() if "offload" not in name}
    options = settings(zero_optimization=zero, gradient_reducer=reduced, **config)
    kind, found = torch.bfloat16 if "bf16" in config else torch.float32, {}
    for name in CLEARING:
        torch.manual_seed(0)
        with PipelineParallelGrid("data=2") as grid, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            engine, *_ = initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mpu=grid, config=options)
            for number in range(8):
                if name == "optimizer":
                    engine.optimizer.zero_grad()
                elif name == "engine":
                    engine.zero_grad()
                elif name == "module":
                    engine.module.zero_grad()
                elif name == "zeros" and number % 2:
                    engine.optimizer.zero_grad(set_to_none=False)
                rows = torch.randn(2, 8, generator=torch.Generator().manual_seed(2 * number + grid.grid_rank))
                engine.backward(engine(rows.to(kind)).square().mean())
                engine.step()
                if name == "after step" and number % 2:
                    engine.optimizer.zero_grad()
                    engine.zero_grad()
            parameters = [*engine.module.parameters()]
            with deepspeed.zero.GatheredParameters(parameters) if stage == 3 else nullcontext():
                total = sum(float(each.detach().double().abs().sum()) for each in parameters)
            engine.destroy()
        found[name] = total, len([each for each in said if "has discarded" in str(each.message)])
    return found


_BF16: dict[str, Any] = {"bf16": {"enabled": True}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("stage", "reduced", "config"),
    mark_exhaustive(
        [
            *((stage, reduced, {}) for stage in range(4) for reduced in (False, True) if stage < 3 or not reduced),
            *((stage, False, _BF16) for stage in range(4)),
            *((1, reduced, {**_BF16, "data_types": {"grad_accum_dtype": "fp32"}}) for reduced in (False, True)),
            *((stage, False, {"offload_optimizer": {"device": "cpu"}}) for stage in (1, 2, 3)),
        ],
        lambda _, case: case in [(0, False, {}), (1, True, {}), (3, False, {})],
    ),
)
def test_gradients_that_zero_grad_discards_are_named(
    world: Worlds, stage: int, reduced: bool, config: dict[str, Any]
) -> None:
    first, second = world(2).run(_clear, stage, reduced, config)
    assert not any(number for _, number in second.values())
    right = first["never"][0]
    are_lost = {name: total != pytest.approx(right, rel=1e-6) for name, (total, _) in first.items()}
    assert {name: number for name, (_, number) in first.items()} == are_lost
    assert not are_lost["after step"]
    assert are_lost["optimizer"] == (stage != 2)


def _train_inside_no_sync(stage: int, reduced: bool, passes: str) -> tuple[list[str], float]:
    start()
    options = settings(zero_optimization={"stage": stage}, gradient_reducer=reduced)
    with PipelineParallelGrid("data=2") as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine, *_ = initialize(model=nn.Linear(8, 8), mpu=grid, config=options)
        try:
            for number in range(4):
                is_local = passes != "none" and (passes != "first" or number % 2 == 0)
                with engine.no_sync() if is_local else nullcontext():
                    engine.backward(engine(torch.randn(2, 8) + grid.grid_rank).square().mean())
                if passes == "reduced later":
                    engine.allreduce_gradients()
                engine.step()
            total = engine.module.weight.detach().double().sum()
        finally:
            engine.destroy()
        replicas = total.clone()
        dist.all_reduce(replicas)
    return [str(each.message) for each in said if "no_sync" in str(each.message)], float(replicas - 2 * total)


def test_steps_inside_no_sync_are_named(world: Worlds) -> None:
    for passes in ("none", "first", "reduced later"):
        assert world(2).run(_train_inside_no_sync, 0, False, passes) == [([], 0.0)] * 2
    (first, drift), (second, _) = world(2).run(_train_inside_no_sync, 0, False, "all")
    assert (len(first), len(second), abs(drift) > 0) == (1, 0, True)
    assert "not averaged over the 2 replicas" in first[0]
    for reduced in (False, True):
        assert world(2).run(_train_inside_no_sync, 1, reduced, "first") == [([], 0.0)] * 2
        errors = world(2).run(_train_inside_no_sync, 1, reduced, "all", expect_failure=True)
        assert all("leave no_sync() before the forward pass of the last" in str(error) for error in errors)


LONE = ("nothing", "weights", "lr", "lr later", "one weight", "seed", "samples", "epoch", "dataset")


def _change_alone(kind: str, spec: str, config: dict[str, Any]) -> list[str]:
    """Train five steps; the last rank does one thing otherwise. Return the warnings."""
    start()
    options = settings(gradient_accumulation_steps=1, **config)
    with PipelineParallelGrid(spec) as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        is_alone = grid.get_sample_rank() == grid.get_sample_world_size() - 1
        alone = kind if is_alone else ""
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        engine, *_ = initialize(model=model, mpu=grid, config=options)
        dataset = torch.randn(64 if alone == "dataset" else 40, 8)
        sizes = 1 if alone == "samples" else 2
        loader = grid.data_loader(dataset, sizes, shuffle=True, seed=int(alone == "seed"))
        loader.sampler.set_epoch(int(alone == "epoch"))  # type: ignore[attr-defined]
        if alone == "weights":
            engine.module.load_state_dict({name: each * 2 for name, each in model.state_dict().items()})
        if alone == "one weight":
            engine.module[1].bias.data[3] += 1e-6
        for step, rows in zip(range(5), loader, strict=False):
            if alone == "lr" or (alone == "lr later" and step == 2):
                engine.optimizer.param_groups[0]["lr"] = 0.01
            engine.backward(engine(rows).square().mean())
            engine.step()
        engine.destroy()
    marks = ("start with", "take step", "divide samples", "a batch with tensors")
    return [str(each.message) for each in said if any(mark in str(each.message) for mark in marks)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", LONE)
def test_what_a_program_changes_on_one_replica_is_named_once(world: Worlds, kind: str) -> None:
    said = world(2).run(_change_alone, kind, "data=2", {})
    found = [text for own in said for text in own]
    expected = {
        "weights": r"weights, 4 of 4 parameters, first '0\.weight'",
        "one weight": r"weights, 1 of 4 parameters, first '1\.bias'",
        "lr": r"take step 1 with.*\n  ranks \[0\] on .* have lr=0\.1 .*\n  ranks \[1\] on .* have lr=0\.01 ",
        "lr later": r"take step 4 with.*\n  ranks \[0\] on .* have lr=0\.1 .*\n  ranks \[1\] on .* have lr=0\.01 ",
        "seed": r"ranks \[0\] on .* seed 0 in epoch 0\n  ranks \[1\] .* 40 samples shuffled by seed 1 in epoch 0",
        "epoch": r"ranks \[1\] on .* seed 0 in epoch 1",
        "dataset": r"ranks \[1\] on .* have 64 samples shuffled by seed 0 in epoch 0",
        "samples": r"shape \[\[1, 8\]\] on rank 1, unlike other ranks, but train_micro_batch_size_per_gpu is 2",
    }
    assert len(found) == (kind != "nothing")
    if found:
        assert re.search(expected[kind], found[0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("spec", "config"),
    mark_exhaustive(
        [
            ("data=2,model=2", {}),
            ("seq=2,data=2", {}),
            ("data=2,model=2", {"zero_optimization": {"stage": 1}, "gradient_reducer": True}),
            ("data=2,shard=2", {"zero_optimization": {"stage": 3}}),
            ("data=4", {"zero_optimization": {"stage": 2}}),
        ],
        lambda _, case: case[0] == "data=2,model=2",
    ),
)
def test_replicas_of_other_layouts_look_for_lone_changes(world: Worlds, spec: str, config: dict[str, Any]) -> None:
    assert world(4).run(_change_alone, "nothing", spec, config) == [[]] * 4
    for kind, text in (("lr", "take step 1"), ("seed", "divide samples")):
        if kind == "seed" and "shard" in spec:
            continue  # no group joins these replicas
        said = [each for own in world(4).run(_change_alone, kind, spec, config) for each in own]
        assert said
        assert all(text in each for each in said)
    found = [each for own in world(4).run(_change_alone, "weights", spec, config) for each in own]
    assert bool(found) == (not config), "master weights overwrite what a program writes"


def _freeze(spec: str, is_pipeline: bool, reduced: bool, frozen_after: int, is_alone: bool) -> None:
    from ds_topo.engine import unseen_changes

    start()
    unseen_changes.FREEZING = timedelta(seconds=3 if is_alone else 60)
    config = settings(gradient_accumulation_steps=1, gradient_reducer=reduced)
    with PipelineParallelGrid(spec) as grid:
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        whole = PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss) if is_pipeline else None
        engine, *_ = initialize(model=whole or nn.Sequential(*layers), mpu=None if whole else grid, config=config)
        for step in range(4):
            if step == frozen_after and (grid.get_sample_rank() == 1 or not is_alone):
                next(engine.module.parameters()).requires_grad_(False)
            if is_pipeline:
                engine.train_batch(iter([(torch.ones(2, 8), torch.ones(2, 8))]))
            else:
                engine.backward(engine(torch.randn(2, 8)).square().mean())
                engine.step()


@names_threads
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("spec", "is_pipeline", "reduced", "frozen_after"),
    [("data=2", False, False, 0), ("data=2", False, True, 2), ("pipe=2,data=2", True, False, 1)],
)
def test_parameters_that_one_replica_freezes_are_named(
    world: Worlds, spec: str, is_pipeline: bool, reduced: bool, frozen_after: int
) -> None:
    case, ranks = (spec, is_pipeline, reduced, frozen_after), world(2 * spec.count("="))
    texts = [str(error) for error in ranks.run(_freeze, *case, True, expect_failure=True)]
    named = [text for text in texts if re.match(r"rank \d on \S+: requires_grad", text)]
    assert named
    told = rf"requires_grad of \['[01]\.weight'\] has changed since step {frozen_after}, .* on 1 of 2 replicas alone"
    assert all(re.search(told, text) for text in named)
    ranks.run(_freeze, *case, False)


def _draw_alone(is_alone: bool, probability: float) -> list[str]:
    start()
    with PipelineParallelGrid("model=2") as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(probability))
        engine, *_ = initialize(model=model, mpu=grid, config=settings(gradient_accumulation_steps=1))
        torch.manual_seed(grid.grid_rank if is_alone else 3)
        engine.backward(0 * engine(torch.ones(2, 8)).square().mean())
        engine.step()
        engine.destroy()
    return [str(each.message) for each in said if "random states" in str(each.message)]


def test_slices_with_other_random_states_are_named_if_there_is_dropout(world: Worlds) -> None:
    (text,), others = world(2).run(_draw_alone, True, 0.5)
    assert "torch.manual_seed(seed + grid.get_sample_rank())" in text
    assert others == []
    assert world(2).run(_draw_alone, False, 0.5) == [[], []]
    assert world(2).run(_draw_alone, True, 0.0) == [[], []]


def _evaluate_first(is_wrong: bool) -> list[str]:
    start()
    with PipelineParallelGrid("data=2") as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine, *_ = initialize(model=nn.Linear(8, 8), mpu=grid, config=settings(gradient_accumulation_steps=1))
        engine.eval()
        with torch.no_grad():
            engine(torch.randn(32, 8))  # the same on all ranks, and larger batches
        engine.train()
        torch.manual_seed(0 if is_wrong else grid.grid_rank)
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 8)).square().mean())
            engine.step()
        engine.destroy()
    return [str(each.message) for each in said if "same samples" in str(each.message) or "shape" in str(each.message)]


def test_batches_of_an_evaluation_are_not_taken_for_those_of_training(world: Worlds) -> None:
    assert world(2).run(_evaluate_first, False) == [[], []]
    (text,), others = world(2).run(_evaluate_first, True)
    assert "have read the same samples" in text
    assert others == []
