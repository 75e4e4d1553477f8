"""``deepspeed.initialize(model=..., mpu=grid)`` without a pipeline: ZeRO 0 to 3, clipping, bf16, save and load."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from gpt import Block
from parallel_layers import Parallel
from torch import nn

from ds_topo import PipelineParallelGrid, groups, initialize, mark_tensor_parallel_gradients
from tests.support.gpt_training import BATCH, TINY, PlainGPT, batch, config, optimizer_of
from tests.support.ranks import run_ranks

STEPS = 6
CASES: list[tuple[str, dict[str, Any]]] = [
    *((f"ZeRO {stage}", {"zero_optimization": {"stage": stage}}) for stage in (0, 1, 2, 3)),
    *((f"bf16 ZeRO {stage}", {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}) for stage in (0, 1)),
]
REDUCER = {"bucket_bytes": 16_000, "first_bucket_bytes": 4_000, "last_bucket_bytes": 4_000}
CASES += [
    (f"{name}, our reduction", {**settings, "gradient_reducer": REDUCER})
    for name, settings in CASES
    if settings["zero_optimization"]["stage"] < 2
]
CASES.append(("bf16 in fp32 buffers, our reduction", {**CASES[-1][1], "data_types": {"grad_accum_dtype": "fp32"}}))


def _engine(topology: str, settings: dict[str, Any]) -> tuple[Any, PipelineParallelGrid]:
    warnings.simplefilter("ignore", FutureWarning)
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid(topology)
    model = PlainGPT(Parallel(grid.get_group("model")))
    mark_tensor_parallel_gradients(model)
    if "zero_hpz_partition_size" in settings["zero_optimization"]:
        groups.create_zero_partition_groups(grid, settings["zero_optimization"]["zero_hpz_partition_size"])
    settings = config(replicas=grid.get_data_parallel_world_size(), **settings)
    engine, *_ = initialize(model=model, mpu=grid, config=settings, optimizer=optimizer_of(model.parameters()))
    return engine, grid


def _train(engine: Any, grid: PipelineParallelGrid, steps: range) -> list[float]:
    """Mean losses over the whole batch."""
    losses, share = [], BATCH // grid.get_data_parallel_world_size()
    first = grid.get_data_parallel_rank() * share
    for step in steps:
        inputs, labels = batch(step, range(first, first + share))
        size = engine.train_micro_batch_size_per_gpu()
        micro_batches = list(zip(inputs.split(size), labels.split(size), strict=True))
        mean = torch.zeros(())
        for micro_inputs, micro_labels in micro_batches:
            loss = engine(micro_inputs, micro_labels)
            engine.backward(loss)
            engine.step()
            mean += loss.detach().float() / len(micro_batches)
        dist.all_reduce(mean, group=grid.get_data_parallel_group())
        losses.append(mean.item() / grid.get_data_parallel_world_size())
    return losses


def _train_cases(topology: str) -> dict[str, list[float]]:
    """Losses, and the norm of the last step's gradients (0 where DeepSpeed keeps none)."""
    losses = {}
    for name, settings in CASES:
        engine, grid = _engine(topology, settings)
        losses[name] = [*_train(engine, grid, range(STEPS)), float(engine.get_global_grad_norm() or 0.0)]
        engine.destroy()
        grid.destroy()
    return losses


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    losses: dict[str, list[float]] = run_ranks(1, _train_cases, "data=1")[0]
    return losses


def _train_by_hand() -> list[float]:
    model = PlainGPT(Parallel(dist.group.WORLD))
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("topology", ["data=4", "model=2,data=2"])
def test_training_equals_one_process(alone: dict[str, list[float]], topology: str) -> None:
    by_hand = run_ranks(1, _train_by_hand)[0]
    for losses in run_ranks(4, _train_cases, topology, deadline=240):
        for name, _ in CASES:
            is_bf16 = name.startswith("bf16")
            torch.testing.assert_close(losses[name], alone[name], rtol=5e-3 if is_bf16 else 1e-4, atol=0, msg=name)
            torch.testing.assert_close(losses[name][:-1], by_hand, rtol=2e-2 if is_bf16 else 1e-4, atol=0, msg=name)


def _train_with_second_partition() -> list[float]:
    settings = {
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    }
    engine, grid = _engine("data=2,model=2", settings)
    return _train(engine, grid, range(STEPS))


def test_second_partition_of_zero_3_stays_inside_the_data_group(alone: dict[str, list[float]]) -> None:
    for losses in run_ranks(4, _train_with_second_partition):
        torch.testing.assert_close(losses, alone["ZeRO 3"][:-1], rtol=1e-4, atol=0)


def _train_and_save(topology: str, folder: str) -> dict[str, list[float]]:
    losses = {}
    for name, settings in CASES:
        engine, grid = _engine(topology, settings)
        _train(engine, grid, range(3))
        engine.save_checkpoint(f"{folder}/{name}")
        losses[name] = _train(engine, grid, range(3, STEPS))
        engine.destroy()
        grid.destroy()
    return losses


def _load_and_train(topology: str, folder: str) -> dict[str, list[float]]:
    losses = {}
    for name, settings in CASES:
        engine, grid = _engine(topology, settings)
        path, _ = engine.load_checkpoint(f"{folder}/{name}")
        assert path is not None
        losses[name] = _train(engine, grid, range(3, STEPS))
        engine.destroy()
        grid.destroy()
    return losses


@pytest.mark.parametrize("topology", ["data=2,model=2"])
def test_a_fresh_process_set_continues_bit_for_bit(topology: str, tmp_path: Path) -> None:
    saved = run_ranks(4, _train_and_save, topology, str(tmp_path), deadline=240)
    loaded = run_ranks(4, _load_and_train, topology, str(tmp_path), deadline=240)
    assert loaded == saved


def _checkpointed_gradients() -> list[torch.Tensor]:
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid("model=2,data=2")
    deepspeed.checkpointing.configure(grid, partition_activations=True)
    torch.manual_seed(0)
    block, inputs = Block(TINY, Parallel(grid.get_group("model"))), torch.randn(2, TINY.context, TINY.width)
    gradients = []
    for function in (partial(deepspeed.checkpointing.checkpoint, block), block):
        leaf = inputs.clone().requires_grad_()
        function(leaf).square().mean().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return gradients


def test_partitioned_activation_checkpointing_gives_the_same_gradients() -> None:
    for partitioned, plain in run_ranks(4, _checkpointed_gradients):
        torch.testing.assert_close(partitioned, plain)
