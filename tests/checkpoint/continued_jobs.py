"""Jobs that several tests of checkpoints save and continue."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_topo import PipelineParallelGrid, checkpoint, initialize
from tests.support.moe_training import Case, trainer
from tests.support.small_engines import start
from tests.support.training import Run, assert_trained_alike, destroy_engine, engine_config

BEFORE, STEPS, TAG = 2, 4, "saved"


def save_experts(case: Case, folder: Path) -> None:
    """Train ``BEFORE`` steps and save."""
    with trainer(case) as rank:
        rank.train(range(BEFORE))
        checkpoint.save(rank.engine, folder, TAG)


def continue_experts(case: Case, folder: Path, reference: Run) -> None:
    """Load into an engine that has trained on other samples, and continue as a single process does."""
    with trainer(case) as rank:
        rank.train(range(7, 8))
        checkpoint.load(rank.engine, folder, TAG)
        run = rank.train(range(BEFORE, STEPS))
        expected = rank.share_of(reference)
        expected.losses = expected.losses[BEFORE:]
        assert_trained_alike(run, expected, losses=1e-5, tensors=1e-5)


def hop_experts(case: Case, before: Path, after: Path) -> None:
    """Load and save again."""
    with trainer(case) as rank:
        checkpoint.load(rank.engine, before, TAG)
        checkpoint.save(rank.engine, after, TAG)


def values_in(folder: Path) -> dict[str, object]:
    """Return every tensor, number and string of all files, by its place."""
    found: dict[str, object] = {}

    def add(value: object, where: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                add(item, f"{where}.{key}")
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                add(item, f"{where}.{number}")
        elif torch.is_tensor(value):
            found[where] = (value.dtype, value.tolist())
        elif isinstance(value, (int, float, str)):
            found[where] = value

    for path in sorted(folder.glob("*_states.pt")):
        if not path.name.startswith("random"):
            add(torch.load(path, weights_only=False), path.name)
    return found


@contextmanager
def engine_with_slices(
    topology: str,
    build: Callable[[PipelineParallelGrid], nn.Module],
    zero: int | dict[str, Any],
    precision: str = "fp32",
    *,
    micro_batch: int = 2,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Iterator[Any]:
    """Yield an engine that trains a model, which may be a slice, on a grid, at a stage of ZeRO or with its options."""
    start()
    with PipelineParallelGrid(topology) as grid:
        module = build(grid)
        half = {} if precision == "fp32" else {precision: {"enabled": True}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"stage": zero} if isinstance(zero, int) else zero
            config = engine_config(micro_batch, zero_optimization=options, **half)
            trained = [one for one in module.parameters() if one.requires_grad]
            engine, *_ = initialize(model=module, config=config, optimizer=optimizer(trained, lr=0.01), mpu=grid)
        yield engine
        destroy_engine(engine)


def train_pipeline(engine: Any, steps: range) -> list[float]:
    """Train a pipeline with four inputs on two micro-batches in each step; return the losses."""
    found, dtype = [], next(engine.module.parameters()).dtype
    for step in steps:
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        found.append(float(engine.train_batch(iter([(half, half.sin()) for half in inputs.chunk(2)]))))
    return found
