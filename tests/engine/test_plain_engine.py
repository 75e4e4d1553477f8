"""``deepspeed.initialize(model=..., mpu=grid)`` without a pipeline: ZeRO 0 to 3, clipping, bf16, save and load."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from gpt import Block
from parallel_layers import Parallel
from torch.utils._python_dispatch import TorchDispatchMode

from ds_topo import PipelineParallelGrid, initialize
from ds_topo.base.supported import CHECKPOINTS_ON_CPU, number
from tests.support.deepspeeds_calls import called_by
from tests.support.exhaustive import mark_exhaustive
from tests.support.gpt_training import BF16, SMALL_BUCKETS, TINY, plain_engine, train
from tests.support.small_engines import settings, start
from tests.support.training import Reference, Run, assert_trained_alike, destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

STEPS = 4
OURS = {"gradient_reducer": SMALL_BUCKETS}
CASES: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)},
    **{f"bf16-zero{stage}": {"zero_optimization": {"stage": stage}, **BF16} for stage in (0, 1)},
}
CASES |= {f"{name}-ours": {**CASES[name], **OURS} for name in ("zero0", "zero1", "bf16-zero0", "bf16-zero1")}
CASES["bf16-zero1-fp32_buffers-ours"] = {**CASES["bf16-zero1-ours"], "data_types": {"grad_accum_dtype": "fp32"}}


def _train(topology: str, settings: dict[str, Any]) -> Run:
    with plain_engine(topology, settings) as (engine, grid):
        return train(engine, grid, range(STEPS))


@pytest.fixture(scope="module")
def engine_alone(world: Worlds) -> Callable[[str], Run]:
    """``engine_alone(case)``: the same engine on one rank."""
    return cache(lambda case: world(1).run(_train, "data=1", CASES[case])[0])


def _train_and_compare(topology: str, case: str, engine_alone: Run, by_hand: Run) -> None:
    run, is_bf16 = _train(topology, CASES[case]), "bf16" in case
    tolerance = 5e-3 if is_bf16 else 1e-4
    assert_trained_alike(run, engine_alone, losses=tolerance, norms=tolerance)
    assert_trained_alike(run, by_hand, losses=2e-2 if is_bf16 else 1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("topology", "case"),
    mark_exhaustive(product(["data=4", "model=2,data=2"], CASES), default=lambda number, _: number % 3 == 0),
)
def test_training_equals_one_process(
    world: Worlds, engine_alone: Callable[[str], Run], module_alone: Reference, topology: str, case: str
) -> None:
    world(4).run(_train_and_compare, topology, case, engine_alone(case), module_alone(STEPS))


def _train_with_second_partition(expected: Run) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    assert_trained_alike(_train("data=2,model=2", {"zero_optimization": zero}), expected, losses=1e-4)


def test_second_partition_of_zero_3_stays_inside_the_data_group(
    world: Worlds, engine_alone: Callable[[str], Run]
) -> None:
    world(4).run(_train_with_second_partition, engine_alone("zero3"))


def _train_and_save(topology: str, case: str, folder: Path) -> list[float]:
    with plain_engine(topology, CASES[case]) as (engine, grid):
        train(engine, grid, range(2))
        engine.save_checkpoint(folder)
        return train(engine, grid, range(2, STEPS)).losses


def _load_and_train(topology: str, case: str, folder: Path) -> list[float]:
    with plain_engine(topology, CASES[case]) as (engine, grid):
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        return train(engine, grid, range(2, STEPS)).losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", mark_exhaustive(CASES, lambda number, _: number in (3, 7)))
def test_new_processes_continue_bit_for_bit(world: Worlds, other_world: Worlds, case: str, tmp_path: Path) -> None:
    saved = world(4).run(_train_and_save, "data=2,model=2", case, tmp_path)
    loaded = other_world(4).run(_load_and_train, "data=2,model=2", case, tmp_path)
    assert loaded == saved


def _checkpointed_gradients() -> None:
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("model=2,data=2") as grid:
        deepspeed.checkpointing.configure(grid, partition_activations=True)
        torch.manual_seed(0)
        block, inputs = Block(TINY, Parallel(grid.get_group("model"))), torch.randn(2, TINY.context, TINY.width)
        gradients = []
        for function in (partial(deepspeed.checkpointing.checkpoint, block), block):
            leaf = inputs.clone().requires_grad_()
            function(leaf).square().mean().backward()
            assert leaf.grad is not None
            gradients.append(leaf.grad)
    partitioned, plain = gradients
    torch.testing.assert_close(partitioned, plain)


@pytest.mark.skipif(
    number(deepspeed.__version__) < CHECKPOINTS_ON_CPU.oldest, reason=f"DeepSpeed alone: {CHECKPOINTS_ON_CPU.reason}"
)
def test_partitioned_activation_checkpointing_gives_the_same_gradients(world: Worlds) -> None:
    world(4).run(_checkpointed_gradients)


def _calls_of_a_step(stage: int, layers: int) -> int:
    """Return the number of functions of ds_topo that a step calls."""
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=1") as grid:
        config = settings(gradient_clipping=0.1, zero_optimization={"stage": stage})
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
        engine, *_ = deepspeed.initialize(model=model, mpu=grid, config=config)

        def step() -> None:
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(torch.ones(2, 8)).sum())
                engine.step()

        step()
        step()  # the first ones compare samples
        called = called_by(step).of_ds_topo
        engine.destroy()
    return called


@pytest.mark.thorough
@pytest.mark.backends("gloo")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_step_calls_at_most_two_functions_for_each_parameter(world: Worlds, stage: int) -> None:
    few, many = (world(1).run(_calls_of_a_step, stage, layers)[0] for layers in (2, 20))
    assert 0 < many <= few + 2 * 36


class _Kernels(TorchDispatchMode):
    """Counts operations that are not views, so that start kernels on a GPU."""

    number = 0

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        self.number += not (operation.is_view or operation is torch.ops.aten.detach.default)
        return operation(*given, **(options or {}))


def _kernels_of_a_step(config: dict[str, Any], layers: int, has_grid: bool) -> int:
    deepspeed.init_distributed(verbose=False)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
    with PipelineParallelGrid("data=1") as grid:
        start = initialize if has_grid else deepspeed.initialize
        config = settings(gradient_clipping=0.1, gradient_accumulation_steps=1, **config)
        engine, *_ = start(model=model, mpu=grid if has_grid else None, config=config)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).float().sum())
            with _Kernels() as kernels:
                engine.step()
        engine.destroy()
    return kernels.number


@pytest.mark.thorough
@pytest.mark.backends("gloo")
@pytest.mark.parametrize("ours", [{}, {"gradient_reducer": {}}], ids=["", "reducer"])
@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_step_of_zero_starts_as_many_kernels_for_many_parameters(
    world: Worlds, stage: int, precision: dict[str, Any], ours: dict[str, Any]
) -> None:
    config = {"zero_optimization": {"stage": stage}, **precision}
    few, many = (world(1).run(_kernels_of_a_step, {**config, **ours}, layers, True)[0] for layers in (2, 22))
    assert few == many
    few, many = (world(1).run(_kernels_of_a_step, config, layers, False)[0] for layers in (2, 22))
    assert many - few >= 40  # DeepSpeed alone


# -- documented functions ---------------------------------------------------------------------------------------------

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1}},
}


def _answers(side: str, stage: int, precision: str) -> list[dict[str, Any]]:
    """Return what an engine answers before training, and after each of some steps in unusual ways."""
    start()
    with ExitStack() as undo:
        grid = None if side == "stock" else undo.enter_context(PipelineParallelGrid("data=-1"))
        if grid is not None and stage == 0 and precision == "fp16":
            grid.correct_norms = False  # stock divides gradients by the loss scale, but does not multiply losses by it
        model = torch.nn.Linear(8, 8)
        config = settings(zero_optimization={"stage": stage}, gradient_clipping=0.5, **PRECISIONS[precision])
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_num_steps": 4}}
        config["gradient_reducer"] = side == "reducer"
        engine, *_ = (deepspeed.initialize if grid is None else partial(initialize, mpu=grid))(
            model=model, model_parameters=model.parameters(), config=config
        )
        found = [_answers_of(engine)]
        for way in ("plain", "scale_wrt_gas", "no_sync", "plain", "boundary"):
            if way == "no_sync" and stage >= 2:
                with pytest.raises(AssertionError, match="no_sync context manager is incompatible"), engine.no_sync():
                    pass
                continue
            for micro_batch in range(3 if way == "no_sync" else 2):
                seed = 10 * len(found) + 4 * micro_batch + torch.distributed.get_rank()
                inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)).to(engine.module.weight.dtype)
                if way == "boundary":  # from here on, the program says where steps end
                    engine.set_gradient_accumulation_boundary(micro_batch == 1)
                is_extra = way == "no_sync" and micro_batch == 0  # a backward pass that does not count
                with engine.no_sync() if is_extra else nullcontext():
                    loss = (engine(inputs).float() - inputs.float().sin()).square().mean()
                    engine.backward(loss, **({"scale_wrt_gas": False} if way == "scale_wrt_gas" else {}))
                if not is_extra:
                    engine.step()
            found.append(_answers_of(engine))
        found.append({"weights": [parameter.detach().float().clone() for parameter in _whole(model, stage)]})
        destroy_engine(engine)
    return found


def _answers_of(engine: Any) -> dict[str, Any]:
    norm = engine.get_global_grad_norm()
    return {
        "batch": [size() for size in engine.get_batch_info()],
        "rate": engine.get_lr(),
        "momentum": engine.get_mom(),
        "norm": None if norm is None else float(norm),
        "boundary": engine.is_gradient_accumulation_boundary(),
        "steps": (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps),
        "applied": engine.was_step_applied(),
        "scale": (engine.loss_scale(), engine.dynamic_loss_scale(), engine.initial_dynamic_scale()),
        "current": float(getattr(getattr(engine.optimizer, "loss_scale_config", engine.optimizer), "cur_scale", 1.0)),
    }


def _whole(model: torch.nn.Module, stage: int) -> list[torch.nn.Parameter]:
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        return [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stage", "precision"),
    mark_exhaustive(product(range(4), PRECISIONS), default=lambda _, case: case in ((1, "fp32"), (3, "fp32"))),
)
def test_documented_functions_answer_as_those_of_stock(world: Worlds, stage: int, precision: str) -> None:
    stock = world(2).run(_answers, "stock", stage, precision)
    for side in ("grid", "reducer") if stage < 3 else ("grid",):
        for found, expected in zip(world(2).run(_answers, side, stage, precision), stock, strict=True):
            for mine, theirs in zip(found, expected, strict=True):
                if stage == 0 and precision == "fp32":  # stock keeps no norm
                    mine["norm"] = theirs["norm"] = None
                near = {} if precision == "fp32" else {"rtol": 5e-3, "atol": 1e-3}
                for name, value in theirs.items():
                    if isinstance(value, bool) or value is None or name in ("batch", "momentum"):
                        assert mine[name] == value, name
                    else:
                        torch.testing.assert_close(mine[name], value, **near, msg=f"{name}: {mine}, {theirs}")
