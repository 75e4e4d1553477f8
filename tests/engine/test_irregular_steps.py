"""Engines with a reducer train as without it through exceptions, skipped, repeated and frozen layers, and hooks."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_topo import GradientReducer, PipelineModule, PipelineParallelGrid, groups, initialize
from ds_topo.engine import gradient_reducer
from ds_topo.reduction import reducer, reductions
from ds_topo.reduction.reductions import suitable_bucket_bytes
from tests.support.failing import FailsInBackward
from tests.support.ranks import run_ranks
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

SMALL = {"bucket_bytes": 600, "first_bucket_bytes": 200, "last_bucket_bytes": 200}
ZERO_1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}


def samples(step: int, width: int = 8) -> torch.Tensor:
    return samples_of(dist.get_rank(), step, width)


def samples_of(rank: int, step: int, width: int = 8) -> torch.Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(100 * step + rank))


class Unruly(nn.Module):
    """A chain of layers; one of them can fail in backward, be skipped, or be repeated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, hidden: torch.Tensor, what: str = "") -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == 2 and what == "fail":
                hidden = FailsInBackward.apply(hidden)
            for _ in range(3 if index == 2 and what == "repeat" else 1):
                if index != 2 or what != "skip":
                    hidden = hidden + checkpoint(layer, hidden, use_reentrant=True)
        return hidden


def trained(script: list[str], reduced: bool, torch_style: bool = False, **more: Any) -> dict[str, torch.Tensor]:
    """Return the parameters after a script of micro-batches, with or without our reducer."""
    with PipelineParallelGrid("data=2") as grid:
        module = Unruly()
        config = settings(gradient_reducer=SMALL if reduced else False, **more)
        engine, *_ = initialize(model=module, mpu=grid, config=config)
        dtype = next(module.parameters()).dtype
        for step, what in enumerate(script):
            if what in ("freeze", "unfreeze"):
                module.layers[1].requires_grad_(what == "unfreeze")
                continue
            hidden = samples(step).to(dtype).requires_grad_()
            loss = engine(hidden, what).square().mean()
            try:
                loss.backward() if torch_style else engine.backward(loss)
            except ArithmeticError:
                engine.optimizer.zero_grad()
                engine.zero_grad()
                continue
            engine.step()
        engine.destroy()
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


SCRIPTS = {
    "an exception in the last micro-batch": ["", "", "", "fail", "", "", ""],
    "an exception in every step": ["", "fail", "", "fail", "", "", ""],
    "a layer left out": ["", "", "skip", "skip", "", ""],
    "a layer repeated": ["", "", "repeat", "repeat", "", "repeat", "", ""],
    "a layer repeated in the first step": ["repeat", "repeat", "", "", "repeat", "repeat"],
    "frozen and unfrozen": ["", "", "freeze", "", "", "unfreeze", "", ""],
}


def _as_without(script: str, torch_style: bool, more: dict[str, Any]) -> None:
    start()
    expected = trained(SCRIPTS[script], False, torch_style, **more)
    found = trained(SCRIPTS[script], True, torch_style, **more)
    tolerance = 2e-2 if "bf16" in more else 1e-6
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=f"{script}: {name}")
        everyone = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(everyone, found[name])
        assert torch.equal(*everyone), "replicas are bit-equal"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("more", [{}, ZERO_1, BF16], ids=["ZeRO 0", "ZeRO 1", "bf16"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_plain_engines_train_as_without_the_reducer(world: Worlds, script: str, more: dict[str, Any]) -> None:
    world(2).run(_as_without, script, False, more)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("script", [name for name in SCRIPTS if "exception" not in name])
def test_loss_backward_trains_as_without_the_reducer(world: Worlds, script: str) -> None:
    """DeepSpeed accepts ``loss.backward()`` under ZeRO, but cannot continue after an exception in it."""
    world(2).run(_as_without, script, True, ZERO_1)


def _fail_in_step(stage: int, function: str) -> None:
    """Train with an error on rank 1, whose process lives on, within ``finish()`` or in the optimizer."""
    start()
    with PipelineParallelGrid("data=2") as grid:
        zero = {"stage": stage}
        engine, *_ = initialize(
            model=_layers(), mpu=grid, config=settings(gradient_reducer=SMALL, zero_optimization=zero)
        )
        for step in range(8):
            fails = mock.Mock(side_effect=MemoryError("no memory"))
            owner = reducer if function == "hand_out" else torch.optim.SGD
            is_due = dist.get_rank() == 1 and step == 3
            with mock.patch.object(owner, function, fails) if is_due else nullcontext():
                engine.backward(engine(samples(step)).square().mean())
                engine.step()


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("function", ["hand_out", "step"])
def test_others_name_the_rank_that_fails_in_step(stage: int, function: str) -> None:
    waiting, failed = run_ranks(2, _fail_in_step, stage, function, timeout=4, deadline=60, expect_failure=True)
    assert "no memory" in str(failed)
    assert re.match("rank 1 [(]data=1[)] on .* failed in (backward|step) after 1 step, so this rank", str(waiting))
    assert "MemoryError: no memory" in str(waiting)


# -- pipelines --------------------------------------------------------------------------------------------------------


class MayFail(nn.Linear):
    """A stage's layer whose backward fails while ``fails`` is set."""

    fails = False

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden).tanh()
        return FailsInBackward.apply(hidden) if self.fails else hidden


def _pipeline_after_an_exception(zero: int) -> None:
    """Make backward fail in two steps; each rank is a replica with one stage."""
    start()
    results = []
    for reduced in (False, True):
        with PipelineParallelGrid("data=4") as grid:
            module = PipelineModule([LayerSpec(MayFail)] * 4, grid=grid, loss_fn=F.mse_loss, seed_layers=True)
            config = settings(gradient_reducer=SMALL if reduced else False, zero_optimization={"stage": zero})
            engine, *_ = initialize(model=module, config=config)
            for step in range(6):
                MayFail.fails = step in (1, 3)
                batches = [(samples(10 * step + index), samples(10 * step + index).roll(1, 1)) for index in range(2)]
                try:
                    engine.train_batch(iter(batches))
                except ArithmeticError:
                    engine.timers("train_batch").stop()  # without this, DeepSpeed refuses the next batch
                    engine.optimizer.zero_grad()
                    engine.zero_grad()
            results.append([parameter.detach().clone() for parameter in module.parameters()])
            engine.destroy()
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("zero", [0, 1])
def test_pipeline_continues_after_an_exception(world: Worlds, zero: int) -> None:
    world(4).run(_pipeline_after_an_exception, zero)


def _frozen_middle_stage(zero: int) -> None:
    start()
    results = []
    for reduced in (False, True):
        with PipelineParallelGrid("pipe=3,data=2") as grid:
            module = PipelineModule([LayerSpec(nn.Linear, 8, 8)] * 3, grid=grid, loss_fn=F.mse_loss, seed_layers=True)
            if grid.stage_id == 1:
                module.requires_grad_(False)
            config = settings(gradient_reducer=SMALL if reduced else False, zero_optimization={"stage": zero})
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            config.pop("optimizer")
            engine, *_ = initialize(model=module, config=config, optimizer=optimizer)
            for step in range(3):
                data = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + grid.get_sample_rank()))
                engine.train_batch(iter([(data, data.roll(1, 1))] * 2))
            if reduced and grid.stage_id == 1:
                assert engine.gradient_reducer.buckets == [["idle_stage_placeholders.0"]]
            results.append([parameter.detach().clone() for parameter in module.parameters()])
            engine.destroy()
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_frozen_stage_reduces_its_placeholder_alone(world: Worlds) -> None:
    world(6).run(_frozen_middle_stage, 0)


# -- two engines ------------------------------------------------------------------------------------------------------


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def _adversaries(
    reduced: bool, through_engine: bool, clears: bool, torch_style: bool, freezes: bool = False, **more: Any
) -> torch.Tensor:
    """Train a generator and a discriminator, each with an engine; return the last loss and all parameters.

    The generator's loss passes through the discriminator. If its gradients are not cleared, they are added to those of
    the discriminator's own loss. With ``freezes`` the discriminator gets no gradients of the generator's loss.
    """
    torch.manual_seed(0)
    with PipelineParallelGrid("data=2") as grid:
        config = settings(gradient_reducer=SMALL if reduced else False, **more)
        generator, *_ = initialize(model=_layers(), mpu=grid, config=dict(config))
        judge, *_ = initialize(model=_layers(), mpu=grid, config=dict(config))
        try:
            for step in range(8):
                noise = samples(2 * step)
                made = generator(noise)
                judge.module.requires_grad_(not freezes)
                loss = ((judge if through_engine else judge.module)(made) - 1).square().mean()
                judge.module.requires_grad_(True)
                generator.backward(loss)
                generator.step()
                if clears:
                    judge.zero_grad()
                    judge.optimizer.zero_grad()
                both = judge(torch.cat([samples(2 * step + 1), made.detach()]))
                loss = (both - torch.tensor([[1.0]] * 2 + [[0.0]] * 2)).square().mean()
                loss.backward() if torch_style else judge.backward(loss)
                judge.step()
            found = [loss.detach().reshape(1)]
            found += [each.detach().flatten() for engine in (generator, judge) for each in engine.module.parameters()]
            return torch.cat(found)
        finally:  # also if a backward pass was refused
            generator.destroy()
            judge.destroy()


def _refused_adversaries(reduced: bool, stage: int, *program: bool) -> None:
    """At ZeRO 1 and 2 gradients of the generator's loss cannot be kept beside those of the discriminator's own.

    Nor can they be discarded alone: earlier micro-batches of the step have gradients, too.
    """
    with pytest.raises(RuntimeError, match="a second backward pass in the last micro-batch of a step"):
        _adversaries(reduced, *program, zero_optimization={"stage": stage})


def _adversaries_as_without(stage: int, through_engine: bool, clears: bool, torch_style: bool) -> None:
    start()
    program = (through_engine, clears, torch_style)
    if stage and through_engine:
        _refused_adversaries(False, stage, *program)
        return
    zero = {"stage": stage}
    expected, found = (_adversaries(reduced, *program, zero_optimization=zero) for reduced in (False, True))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def _adversaries_alone(clears: bool, freezes: bool) -> torch.Tensor:
    """Train as :func:`_adversaries`, with torch alone, on the samples of two ranks."""
    torch.manual_seed(0)
    generator, judge = _layers(), _layers()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (generator, judge)]
    loss = torch.zeros(())
    for step in range(8):
        noise, real = (
            torch.cat([samples_of(rank, number) for rank in range(2)]) for number in (2 * step, 2 * step + 1)
        )
        made = generator(noise)
        judge.requires_grad_(not freezes)
        ((judge(made) - 1).square().mean() / 2).backward()
        judge.requires_grad_(True)
        if clears:
            judge.zero_grad()
        loss = ((judge(real) - 1).square().mean() + judge(made.detach()).square().mean()) / 2
        (loss / 2).backward()
        if step % 2 == 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for module in (generator, judge) for each in module.parameters()])


def _adversaries_as_alone(cases: list[tuple[int, bool, bool, bool, bool]]) -> None:
    start()
    for stage, through_engine, clears, freezes, reduced in cases:
        if stage and through_engine:
            _refused_adversaries(reduced, stage, through_engine, clears, False, freezes)
            continue
        found = _adversaries(reduced, through_engine, clears, False, freezes, zero_optimization={"stage": stage})
        message = f"stage {stage}, {through_engine=}, {clears=}, {freezes=}, {reduced=}: {{}}".format
        alone = _adversaries_alone(clears, freezes)
        torch.testing.assert_close(found[1:], alone, rtol=1e-5, atol=1e-6, msg=message)


@pytest.mark.exhaustive
def test_adversaries_train_as_in_one_process(world: Worlds) -> None:
    """A loss that passes through another engine is a backward pass of that engine for DeepSpeed."""
    programs = [
        *((stage, False, clears, False) for stage in (0, 1) for clears in (False, True)),
        *((stage, False, False, True) for stage in (0, 1, 2)),
        *((stage, True, clears, False) for stage in (1, 2) for clears in (False, True)),
    ]
    world(2).run(_adversaries_as_alone, [(*program, reduced) for program in programs for reduced in (False, True)])


@pytest.mark.parametrize(
    ("stage", "through_engine", "torch_style"),
    [
        (0, False, False),  # at stage 0 DeepSpeed refuses a pass through the engine
        (1, False, False),  # through the module, loss.backward() ends in its KeyError
        (1, True, True),
        pytest.param(1, True, False, marks=pytest.mark.exhaustive),
        pytest.param(2, True, False, marks=pytest.mark.exhaustive),  # at stage 2 it refuses a pass through the module
        pytest.param(2, True, True, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("clears", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["kept", "cleared"])
def test_gradients_of_another_engines_loss_are_added(
    world: Worlds, stage: int, through_engine: bool, torch_style: bool, clears: bool
) -> None:
    world(2).run(_adversaries_as_without, stage, through_engine, clears, torch_style)


# -- optimizers that are not element by element -----------------------------------------------------------------------


class BlockWise(torch.optim.Optimizer):
    """Adagrad with one state for four adjacent elements, as 8-bit optimizers have one scale for a block."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    blocks = nn.functional.pad(parameter.grad.flatten(), (0, -parameter.numel() % 4)).view(-1, 4)
                    state = self.state[parameter]
                    state["sums"] = state.get("sums", torch.zeros(len(blocks))) + blocks.square().mean(1)
                    steps = blocks / (state["sums"].sqrt() + 1e-8)[:, None]
                    parameter -= group["lr"] * steps.flatten()[: parameter.numel()].view_as(parameter)


class Lars(torch.optim.SGD):
    """SGD whose rate follows the norm of what it updates."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.norm() / parameter.grad.norm() * parameter.grad


def _unusual_optimizer(kind: type[torch.optim.Optimizer], bf16: bool) -> None:
    """Train with the reducer from step 2 to step 5, and without it before and after."""
    start()
    results = []
    for reduced in (False, True):
        torch.manual_seed(0)
        with PipelineParallelGrid("data=2") as grid:
            config = settings(**ZERO_1, **(BF16 if bf16 else {}))
            del config["optimizer"]
            module = _layers()
            engine, *_ = initialize(
                model=module,
                mpu=grid,
                config=config,
                optimizer=kind(module.parameters(), lr=0.01),  # type: ignore[call-arg]
            )
            dtype = next(module.parameters()).dtype
            for step in range(14):
                if reduced and step == 4:
                    reducer = GradientReducer.attach(engine, **SMALL)  # type: ignore[arg-type]
                if reduced and step == 10:
                    reducer.detach()
                engine.backward(engine(samples(step).to(dtype)).square().mean())
                engine.step()
            results.append([parameter.detach().clone() for parameter in module.parameters()])
            engine.destroy()
    tolerance = 2e-2 if bf16 else 1e-5
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [BlockWise, Lars])
def test_optimizers_of_blocks_and_norms_keep_deepspeeds_layout(
    world: Worlds, kind: type[torch.optim.Optimizer], bf16: bool
) -> None:
    world(2).run(_unusual_optimizer, kind, bf16)


def _unusual_optimizer_at_stage_2() -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        config = settings(zero_optimization={"stage": 2})
        del config["optimizer"]
        module = _layers()
        engine, *_ = deepspeed.initialize(
            model=module, mpu=grid, config=config, optimizer=BlockWise(module.parameters())
        )
        with pytest.raises(ValueError, match=r"BlockWise.*use stage 0 or 1"):
            GradientReducer.attach(engine)
        engine.destroy()


def test_optimizers_of_blocks_are_refused_at_stage_2(world: Worlds) -> None:
    world(2).run(_unusual_optimizer_at_stage_2)


# -- experts ----------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(256, 256)
        self.moe = MoE(
            256, nn.Linear(256, 256), num_experts=4, ep_size=size, k=1, drop_tokens=False, use_rts=False, min_capacity=0
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.moe(self.dense(hidden))[0]
        return output


def _links_of_different_speed() -> list[list[str]]:
    """Make one data parallel group measure a slow link, the other a fast one; expert-data groups span both."""
    start()
    with PipelineParallelGrid("data=2,model=2") as grid:
        grid.check_samples = False  # only the buckets matter here
        groups.create_expert_groups(grid, 1)
        engine, *_ = deepspeed.initialize(model=Mixture(1), mpu=grid, config=settings(**ZERO_1))
        slow = dist.get_process_group_ranks(grid.get_data_parallel_group()) == [0, 2]

        def measured(group: Any, device: Any) -> int:
            sizes = suitable_bucket_bytes(group, device)  # its collectives, whatever they contain
            spans_both = dist.get_world_size(group) == 4
            return max(sizes, 1) * 0 + (700_000 if spans_both or slow else 2_000_000)

        with mock.patch.object(reductions, "suitable_bucket_bytes", measured):
            reducer = GradientReducer.attach(engine)
        for step in range(4):
            engine.backward(engine(samples(step, 256)).square().mean())
            engine.step()
        buckets = [[name for name in bucket if "experts" in name] for bucket in reducer.buckets]
        engine.destroy()
        return [bucket for bucket in buckets if bucket]


def test_expert_buckets_are_equal_on_all_replicas(world: Worlds) -> None:
    layouts = world(4).run(_links_of_different_speed)
    assert layouts[0] == layouts[1] == layouts[2] == layouts[3]
    assert len(layouts[0]) > 1


def test_gradient_reducer_derives_from_the_standalone_reducer() -> None:
    assert gradient_reducer.GradientReducer.__mro__[1].__module__ == "ds_topo.reduction.reducer"
