"""Steps of several micro-batches, losses and engines equal those of one process, or are refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, initialize
from ds_topo.errors import EngineOptionError
from tests.support.exhaustive import mark_exhaustive
from tests.support.small_engines import settings, start
from tests.support.training import destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

RANKS, RATE, NO_LIMIT = 2, 0.1, 1e9
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}
WIDE = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
Losses: TypeAlias = Callable[[Any, torch.Tensor], Iterator[torch.Tensor]]


def kind(stage: int, precision: dict[str, Any] | None = None, **zero: Any) -> dict[str, Any]:
    """Return the part of a config that chooses the optimizer."""
    return {"zero_optimization": {"stage": stage, **zero}, **(precision or {})}


KINDS = {
    "zero0": kind(0),
    "zero1": kind(1),
    "zero2": kind(2),
    "zero3": kind(3),
    "zero1-offload": kind(1, **OFFLOAD),
    "zero2-offload": kind(2, **OFFLOAD),
    "zero3-offload": kind(3, **OFFLOAD),
    "bf16-zero0": kind(0, BF16),
    "wide-zero1": kind(1, WIDE),
    "wide-zero2-offload": kind(2, WIDE, **OFFLOAD),
    "wide-zero3": kind(3, WIDE),
}


def configured(name: str, micro_batches: int = 2, reduced: bool = False) -> dict[str, Any]:
    return settings(
        gradient_accumulation_steps=micro_batches,
        gradient_clipping=NO_LIMIT,
        gradient_reducer=reduced,
        optimizer={"type": "SGD", "params": {"lr": RATE}},
        **KINDS[name],
    )


def sample(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


class Net(nn.Module):
    """Layers of which a call may use some, and two outputs."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in "ABC"})

    def forward(self, hidden: torch.Tensor, use: str = "AB") -> tuple[torch.Tensor, torch.Tensor]:
        for name in use:
            hidden = hidden + torch.tanh(self.layers[name](hidden))
        return hidden, self.layers["C"](hidden)


def of_one_process(modules: list[nn.Module], step_losses: list[list[Losses]]) -> list[float]:
    """Return the norms of each module in each step, with the mean of all samples' losses."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=RATE) for module in modules]
    norms = []
    for step, micro_batches in enumerate(step_losses):
        for micro, losses in enumerate(micro_batches):
            for rank in range(RANKS):
                own = modules if len(modules) > 1 else modules[0]
                sum(losses(own, sample(step, micro, rank))).div(len(micro_batches) * RANKS).backward()
        norms += [float(nn.utils.clip_grad_norm_(module.parameters(), math.inf)) for module in modules]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms


def of_engines(
    configs: list[dict[str, Any]], modules: list[nn.Module], step_losses: list[list[Losses]], own: bool = True
) -> list[float]:
    """Return the norms that engines report for the same; ``own`` calls ``engine.backward(loss)`` of the last engine."""
    start()
    norms = []
    with PipelineParallelGrid(f"data={RANKS}") as grid:
        engines = [
            initialize(model=module, mpu=grid, config=config)[0]
            for module, config in zip(modules, configs, strict=True)
        ]
        dtype = torch.bfloat16 if "bf16" in configs[0] else torch.float32
        try:
            for step, micro_batches in enumerate(step_losses):
                for micro, losses in enumerate(micro_batches):
                    data = sample(step, micro, grid.get_sample_rank()).to(dtype)
                    for loss in losses(engines if len(engines) > 1 else engines[0], data):
                        if own:
                            engines[-1].backward(loss, retain_graph=True)
                        else:
                            loss.backward(retain_graph=True)
                    for engine in engines:
                        engine.step()
                norms += [float(engine.get_global_grad_norm()) for engine in engines]
        finally:  # also if a backward pass was refused
            for engine in engines:
                destroy_engine(engine)
    return norms


# -- parameters that some micro-batches do not use ---------------------------------------------------------------------

USES = [["AB", "A"], ["A", "AB"], ["A", "A"], ["AB", "AB"], ["A", "B"]]
"""The layers that each micro-batch of each step uses."""


def _with(use: str) -> Losses:
    return lambda net, data: iter([net(data, use)[1].square().mean()])


def _some_unused(name: str, reduced: bool) -> None:
    steps = [[_with(use) for use in uses] for uses in USES]
    found = of_engines([configured(name, reduced=reduced)], [Net()], steps)
    assert found == pytest.approx(of_one_process([Net()], steps), rel=1e-2 if "bf16" in KINDS[name] else 1e-5)


@pytest.mark.parametrize(
    ("name", "reduced"),
    [
        *(("zero1-offload", False), ("zero2-offload", False), ("zero3", False), ("zero3-offload", False)),
        *mark_exhaustive([(name, False) for name in KINDS], lambda *_: False),
        *mark_exhaustive([(name, True) for name in ("zero0", "zero1", "zero2", "wide-zero1")], lambda *_: False),
    ],
)
def test_parameters_that_some_micro_batches_do_not_use(world: Worlds, name: str, reduced: bool) -> None:
    world(RANKS).run(_some_unused, name, reduced)


# -- several losses and forward passes ---------------------------------------------------------------------------------


def two_losses(net: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
    first, second = net(data)
    yield first.square().mean()
    yield second.abs().mean()


def one_by_one(net: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
    for scale in (1, 2):
        first, second = net(scale * data)
        yield (first * second).mean()


def two_forwards(net: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
    first, second = net(data), net(-data)
    yield (first[0] * second[0]).mean() + (first[1] - second[1]).square().mean()


def recurrent(net: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
    first = net(data)
    yield net(first[0])[1].square().mean() + first[1].abs().mean()


def penalty(net: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
    data = data.clone().requires_grad_()
    first, second = net(data)
    (gradient,) = torch.autograd.grad(first.sum(), data, create_graph=True)
    yield gradient.square().mean() + second.square().mean()


ONE_PASS = "a second backward pass in the last micro-batch of a step, whose gradients are reduced already"
OF_PENALTY = "contains a gradient [(]torch.autograd.grad[(]create_graph=True[)] of an engine.s output[)], with gradient"


def _refusal(losses: Losses, name: str, own: bool, reduced: bool) -> str | None:
    if losses is two_losses and name == "zero3":
        return "a second backward pass through one forward pass at ZeRO stage 3"
    if losses in (two_losses, one_by_one) and (name not in ("zero0", "wide-zero1") or reduced):
        return None if name == "zero0" else ONE_PASS
    if losses is penalty and name == "zero3":
        return "create_graph=True[)] of an engine's output at ZeRO stage 3: its backward pass needs"
    return OF_PENALTY if losses is penalty and not own else None


def _several(losses: Losses, name: str, own: bool, reduced: bool = False) -> None:
    config, steps = configured(name, reduced=reduced), [[losses] * 2] * 2
    refusal = _refusal(losses, name, own, reduced)
    if refusal is not None:
        with pytest.raises(RuntimeError, match=refusal):
            of_engines([config], [Net()], steps, own)
        return
    close = 1e-2 if "bf16" in config else 1e-5
    assert of_engines([config], [Net()], steps, own) == pytest.approx(of_one_process([Net()], steps), rel=close)


PASSES = (two_losses, one_by_one, two_forwards, recurrent, penalty)
STAGES = ("zero0", "zero1", "zero2", "zero3", "wide-zero1")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("losses", PASSES)
@pytest.mark.parametrize(
    ("name", "own", "reduced"),
    [
        ("zero3", True, False),
        ("zero1", False, False),
        *mark_exhaustive(
            [
                (name, own, reduced)
                for name in STAGES
                for own in (True, False)
                for reduced in (False, True)
                if not (name == "zero0" and not own) and not (name == "zero3" and reduced)
            ],
            lambda *_: False,
        ),
    ],
)
def test_several_losses_and_forward_passes(world: Worlds, losses: Losses, name: str, own: bool, reduced: bool) -> None:
    world(RANKS).run(_several, losses, name, own, reduced)


def _further_passes() -> None:
    start()
    with PipelineParallelGrid(f"data={RANKS}") as grid:
        for micro_batches in (1, 2):
            engine, *_ = initialize(model=Net(), mpu=grid, config=configured("zero1", micro_batches))

            def train(engine: Any = engine) -> None:
                engine.backward(engine(sample(0, 0, 0))[1].mean())

            for _ in range(2):
                with engine.coalesce_grad_reduction():
                    train()
                    train()
                for _ in range(micro_batches):  # the first of two steps is none
                    with pytest.raises(RuntimeError, match=ONE_PASS), engine.coalesce_grad_reduction():
                        pass
                    with pytest.raises(RuntimeError, match=ONE_PASS):
                        train()
                    engine.step()
            for _ in range(micro_batches):
                train()
                if engine.is_gradient_accumulation_boundary():
                    with pytest.raises(RuntimeError, match=ONE_PASS):
                        train()
                    engine.zero_grad()  # leaves gradients of earlier micro-batches in the optimizer, if there are any
                    with pytest.raises(RuntimeError, match=ONE_PASS) if micro_batches > 1 else nullcontext():
                        train()
                engine.step()
            assert engine.global_steps == 3
            destroy_engine(engine)


def test_further_passes_after_a_reduction_are_refused(world: Worlds) -> None:
    world(RANKS).run(_further_passes)


@dataclass
class Scores:
    """The output of a critic, in a class of the program's own."""

    values: torch.Tensor


class Critic(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> Any:
        return Scores(super().forward(hidden))


def _adversaries(name: str, own: bool) -> None:
    """Train a generator through its critic, which is frozen meanwhile, or whose gradients are discarded."""
    start()
    results = []
    for is_alone in (True, False):
        with PipelineParallelGrid(f"data={RANKS}") as grid:
            torch.manual_seed(5)
            nets: list[Any] = [Critic(8, 8), nn.Linear(8, 8)]
            models = list(nets)
            if is_alone:
                optimizers = [torch.optim.SGD(net.parameters(), lr=RATE) for net in nets]
            else:
                nets = [initialize(model=net, mpu=grid, config=configured(name, 1))[0] for net in nets]
            for step in range(3):
                models[1].requires_grad_(False)
                for player, frozen in ((0, 1), (1, 0)):
                    models[player].requires_grad_(True)
                    models[frozen].requires_grad_(step == 2)
                    data = [sample(step, player, rank) for rank in range(RANKS)]
                    data = data if is_alone else [data[dist.get_rank()]]
                    for each in data:
                        loss = nets[0](nets[1](each)).values.square().mean() / len(data)
                        if is_alone or not own:
                            loss.backward()
                        else:
                            nets[player].backward(loss)
                    if is_alone:
                        optimizers[player].step()
                    else:
                        nets[player].step()
                    for net in nets:
                        net.zero_grad()
            results.append([each.detach().clone() for model in models for each in model.parameters()])
            for net in () if is_alone else nets:
                destroy_engine(net)
    for ours, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "own"),
    [("zero1", True), *mark_exhaustive([("zero1", False), ("zero2", True), ("zero2", False)], lambda *_: False)],
)
def test_a_generator_trains_through_its_critic(world: Worlds, name: str, own: bool) -> None:
    world(RANKS).run(_adversaries, name, own)


def nested(nets: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
    yield nets[1](2 * nets[0](data)[1] + 1)[1].square().mean()


def mixed(nets: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
    hidden = nets[0](data)[1]
    yield (nets[1](hidden)[1] + hidden).square().mean()


def parallel(nets: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
    yield (nets[0](data)[1] + nets[1](data)[1]).square().mean()


def _two_engines(losses: Losses, name: str, own: bool) -> None:
    steps = [[losses] * 2] * 2
    found = of_engines([configured(name)] * 2, [Net(1), Net(2)], steps, own)
    assert found == pytest.approx(of_one_process([Net(1), Net(2)], steps), rel=1e-5)


@pytest.mark.parametrize(
    ("losses", "name", "own"),
    [
        (nested, "zero1", False),
        (mixed, "zero3", False),
        *mark_exhaustive(
            [
                (losses, name, own)
                for losses in (nested, mixed, parallel)
                for name in ("zero1", "zero2", "zero3")
                for own in (True, False)
            ],
            lambda *_: False,
        ),
    ],
)
def test_a_loss_through_two_engines_is_divided_once(world: Worlds, losses: Losses, name: str, own: bool) -> None:
    world(RANKS).run(_two_engines, losses, name, own)


def _after_the_grid() -> None:
    start()
    with PipelineParallelGrid(f"data={RANKS}") as grid:
        engine, *_ = initialize(model=Net(), mpu=grid, config=configured("zero1"))
        (loss,) = _with("AB")(engine, sample(0, 0, 0))
    loss.backward()
    alone = Net()
    (loss,) = _with("AB")(alone, sample(0, 0, 0))
    (loss / 2).backward()
    for ours, wanted in zip(engine.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad)
    destroy_engine(engine)


def test_backward_after_the_end_of_the_grid_divides_once(world: Worlds) -> None:
    world(RANKS).run(_after_the_grid)


# -- outputs and inputs that a program changes in place ----------------------------------------------------------------


class Chosen(Net):
    """The net with other outputs, which may first change its input in place."""

    def __init__(self, choose: Callable[..., Any], changes_input: bool = False) -> None:
        super().__init__(4 if changes_input else 3)
        self.choose, self.changes_input = choose, changes_input

    def forward(self, hidden: torch.Tensor, use: str = "AB") -> Any:
        return self.choose(*super().forward(hidden.mul_(2) if self.changes_input else hidden, use))


CHOICES: list[Callable[..., Any]] = [
    lambda first, second: (second + 1, first),
    lambda first, second: second,
    lambda first, second: second.t()[1:],
    lambda first, second: {"a": second, "b": second},
]


def changed_outputs(net: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
    outputs = net(data)
    if isinstance(outputs, torch.Tensor):
        outputs = (outputs,)
    tensors = list(outputs.values() if isinstance(outputs, dict) else outputs)
    tensors[0] /= 3
    tensors[0].masked_fill_(tensors[0] > 0.5, 0.0)
    yield torch.stack([each.square().mean() for each in tensors]).sum().div_(5)


def changed_input(nets: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
    yield nets[1](nets[0](data)).square().mean()


def changed_view(net: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
    first, _ = net(data)
    yield first.mul_(2).mean()


def _in_place(name: str, own: bool) -> None:
    for choose in CHOICES[: 3 if name == "zero3" else None]:
        steps = [[changed_outputs] * 2]
        found = of_engines([configured(name)], [Chosen(choose)], steps, own)
        assert found == pytest.approx(of_one_process([Chosen(choose)], steps), rel=1e-5)
    pick = CHOICES[1]
    if name == "zero3":  # whose hooks give modules inputs that are no views
        found = of_engines([configured(name)] * 2, [Chosen(pick), Chosen(pick, True)], [[changed_input] * 2], own)
        expected = of_one_process([Chosen(pick), Chosen(pick, True)], [[changed_input] * 2])
        assert found == pytest.approx(expected, rel=1e-5)
    else:
        with pytest.raises(RuntimeError, match=r"InputOfEngine.* is a view and is being modified inplace"):
            of_engines([configured(name)] * 2, [Chosen(pick), Chosen(pick, True)], [[changed_input] * 2], own)
    with pytest.raises(RuntimeError, match=r"OverlappingOutputOfEngine.* is a view and is being modified inplace"):
        of_engines([configured(name)], [Chosen(lambda first, second: (first, first[0]))], [[changed_view] * 2], own)
    if name == "zero3":  # whose hooks return two tensors for one
        with pytest.raises(RuntimeError, match=r"OverlappingOutputOfEngine.* is a view and is being modified inplace"):
            of_engines([configured(name)], [Chosen(CHOICES[3])], [[changed_outputs] * 2], own)


@pytest.mark.parametrize(
    ("name", "own"),
    mark_exhaustive(
        [(name, own) for own in (False, True) for name in ("zero1", "zero2", "zero3")], lambda number, _: number == 0
    ),
)
def test_changes_in_place_keep_the_division(world: Worlds, name: str, own: bool) -> None:
    world(RANKS).run(_in_place, name, own)


# -- another number of micro-batches -----------------------------------------------------------------------------------

NUMBERS = [2, 3, 3, 2]


def _change(name: str, by_assignment: bool, reduced: bool) -> None:
    start()
    expected = of_one_process([Net()], [[_with("AB")] * number for number in NUMBERS])
    with PipelineParallelGrid(f"data={RANKS}") as grid:
        engine, *_ = initialize(model=Net(), mpu=grid, config=configured(name, reduced=reduced))

        def train(step: int, micro: int) -> None:
            (loss,) = _with("AB")(engine, sample(step, micro, grid.get_sample_rank()))
            engine.backward(loss)
            engine.step()

        norms = []
        for step, number in enumerate(NUMBERS):
            if by_assignment:
                engine._config.gradient_accumulation_steps = number
            else:
                engine.set_train_batch_size(number * 2 * RANKS)
            for micro in range(number):
                assert engine.global_steps == step
                train(step, micro)
            norms.append(float(engine.get_global_grad_norm()))
        assert norms == pytest.approx(expected, rel=1e-5)

        train(len(NUMBERS), 0)
        engine.set_train_batch_size(2 * 2 * RANKS)  # the same
        with pytest.raises(EngineOptionError, match=r"set_train_batch_size\(12\) after 1 of the 2 micro-batches of a"):
            engine.set_train_batch_size(3 * 2 * RANKS)
        for wrong in (0, -4, 5, 8.0, True):
            with pytest.raises(EngineOptionError, match=r"each of 2 replicas reads 2 samples .* a multiple of 4, such"):
                engine.set_train_batch_size(wrong)
        engine._config.gradient_accumulation_steps = 3
        with pytest.raises(EngineOptionError, match="has become 3 after 1 of the 2 micro-batches of a step"):
            train(len(NUMBERS), 1)
        destroy_engine(engine)


@pytest.mark.parametrize(
    ("name", "by_assignment", "reduced"),
    mark_exhaustive(
        [
            (name, by_assignment, reduced)
            for name in ("zero1", "zero0", "zero2", "zero3", "zero2-offload")
            for by_assignment in (False, True)
            for reduced in (False, True)
            if not (reduced and name in ("zero3", "zero2-offload"))
        ],
        lambda number, _: number in (0, 3),
    ),
)
def test_steps_end_after_a_changed_number_of_micro_batches(
    world: Worlds, name: str, by_assignment: bool, reduced: bool
) -> None:
    world(RANKS).run(_change, name, by_assignment, reduced)


def _change_of_own_steps() -> None:
    start()
    with PipelineParallelGrid(f"data={RANKS}") as grid:
        config = {**configured("zero1"), "managed_gradient_accumulation": False}
        engine, *_ = initialize(model=Net(), mpu=grid, config=config)
        for number in (3, 2, 1):
            engine.backward(engine(sample(0, 0, 0))[1].mean())
            with pytest.raises(EngineOptionError, match=r"after 1 of the . micro-batches of a step"):
                engine.set_train_batch_size(number * 2 * RANKS)
            engine.step()
            engine.set_train_batch_size(number * 2 * RANKS)
        assert engine.micro_steps == 3
        destroy_engine(engine)


def test_programs_that_end_steps_change_the_number_between_them(world: Worlds) -> None:
    world(RANKS).run(_change_of_own_steps)


def _clear_between_own_steps() -> None:
    start()
    with PipelineParallelGrid(f"data={RANKS}") as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = {**configured("zero1"), "managed_gradient_accumulation": False}
        engine, *_ = initialize(model=Net(), mpu=grid, config=config)
        for step in range(2):
            for micro in range(2):
                engine(sample(step, micro, grid.grid_rank))[1].mean().backward()
            engine.step()
            engine.zero_grad()
        destroy_engine(engine)
    assert not [each for each in said if "zero_grad()" in str(each.message)]


def test_programs_that_end_steps_clear_gradients_between_them(world: Worlds) -> None:
    world(RANKS).run(_clear_between_own_steps)


def _change_in_a_pipeline() -> None:
    start()
    norms = []
    for changed in (False, True):
        with PipelineParallelGrid(f"pipe={RANKS}") as grid:
            layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
            module = PipelineModule(layers, grid=grid, loss_fn=F.mse_loss, seed_layers=True)
            engine, *_ = initialize(model=module, config=configured("zero0", micro_batches=2 if changed else 3))
            if changed:
                engine.set_train_batch_size(3 * 2)
            data = [(sample(0, micro, 0), sample(0, micro, 1)) for micro in range(3)]
            engine.train_batch(iter(data))
            norms.append(float(engine.get_global_grad_norm()))
            engine._config.gradient_accumulation_steps = 4
            with pytest.raises(EngineOptionError, match="runs 3 micro-batches in a step, but gradient_acc"):
                engine.train_batch(iter(data))
            destroy_engine(engine)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_pipelines_run_a_changed_number_of_micro_batches(world: Worlds) -> None:
    world(RANKS).run(_change_in_a_pipeline)


def _change_with_a_loader() -> None:
    start()
    with PipelineParallelGrid(f"data={RANKS}") as grid:
        dataset = [torch.zeros(8) for _ in range(16)]
        for given in (dataset, None):
            engine, *_ = initialize(model=Net(), mpu=grid, config=configured("zero1"), training_data=given)
            if grid.get_sample_rank() == 0:  # as set_dataloader() and set_dataiterator() on some stages of a pipeline
                engine.training_dataloader = None if given else [dataset]
            engine.set_train_micro_batch_size(2)
            with pytest.raises(EngineOptionError, match="give a number of samples, at least 1"):
                engine.set_train_micro_batch_size(0)
            if given:
                with pytest.raises(
                    EngineOptionError, match="loader of training_data= goes on with batches of 2 samples"
                ):
                    engine.set_train_micro_batch_size(4)
            else:
                engine.set_train_micro_batch_size(4)
                assert engine.train_batch_size() == 4 * 2 * RANKS
            destroy_engine(engine)


def test_micro_batches_of_training_data_keep_their_size(world: Worlds) -> None:
    world(RANKS).run(_change_with_a_loader)


# -- memory and sizes --------------------------------------------------------------------------------------------------


class Strided(nn.Module):
    """A module whose parameters are a transposed matrix, and every other column of one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Parameter(torch.randn(8, 8).t())
        self.second = nn.Parameter(torch.randn(8, 16)[:, ::2])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden @ self.first) @ self.second


def _strided(name: str) -> None:
    def losses(net: Any, data: torch.Tensor) -> Iterator[torch.Tensor]:
        yield net(data).square().mean()

    steps = [[losses] * 2] * 2
    expected = of_one_process([Strided()], steps)
    assert of_engines([configured(name)], [Strided()], steps) == pytest.approx(expected, rel=1e-5)
    shared = Strided()
    shared.second = nn.Parameter(shared.first.detach().t())
    with pytest.raises(EngineOptionError, match=r"is a strided view .* of the memory of \['second'\]"):
        of_engines([configured(name)], [shared], steps)


@pytest.mark.parametrize("name", mark_exhaustive(["zero1", "zero0", "zero2", "zero3"], lambda number, _: number == 0))
def test_strided_parameters_become_contiguous(world: Worlds, name: str) -> None:
    world(RANKS).run(_strided, name)


def _sizes() -> None:
    start()
    with PipelineParallelGrid("model=2,data=2") as grid:
        with pytest.raises(EngineOptionError, match="train_batch_size 16 is not "):
            initialize(model=Net(), mpu=grid, config={**settings(), "train_batch_size": 16})
        destroy_engine(initialize(model=Net(), mpu=grid, config={**settings(), "train_batch_size": 8})[0])


def test_batch_sizes_are_compared_with_the_axes_that_count(world: Worlds) -> None:
    world(4).run(_sizes)


def _warnings_of_steps(passes: int, forwards: int) -> int:
    with PipelineParallelGrid("data=1") as grid, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = initialize(model=nn.Linear(2, 1), mpu=grid, config=settings(gradient_accumulation_steps=2))
        for _ in range(2):
            outputs = [engine(torch.ones(2, 2)).mean() for _ in range(forwards)]
            for number in range(passes):
                engine.backward(outputs[number % forwards] * 1.0, retain_graph=True)
            engine.step()
        destroy_engine(engine)
    return sum("counts one micro-batch" in str(each.message) for each in caught)


def _several_rhythms() -> None:
    start()
    assert [_warnings_of_steps(2, 2), _warnings_of_steps(1, 1), _warnings_of_steps(2, 1)] == [1, 0, 0]


def test_step_called_once_for_all_micro_batches_is_warned_of_once(world: Worlds) -> None:
    """DeepSpeed's engine would step after four passes, with twice the gradients."""
    world(1).run(_several_rhythms)
