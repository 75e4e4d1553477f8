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
        checkpoint.load(rank.engine, folder, TAG, convert=True)
        run = rank.train(range(BEFORE, STEPS))
        expected = rank.share_of(reference)
        expected.losses = expected.losses[BEFORE:]
        assert_trained_alike(run, expected, losses=1e-5, tensors=1e-5)


@contextmanager
def engine_with_slices(
    topology: str, build: Callable[[PipelineParallelGrid], nn.Module], zero: int, precision: str = "fp32"
) -> Iterator[Any]:
    """Yield an engine with AdamW that trains a model, which may be a slice, on a grid."""
    start()
    with PipelineParallelGrid(topology) as grid:
        module = build(grid)
        half = {} if precision == "fp32" else {precision: {"enabled": True}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = engine_config(2, zero_optimization={"stage": zero}, **half)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
            engine, *_ = initialize(model=module, config=config, optimizer=optimizer, mpu=grid)
        yield engine
        destroy_engine(engine)


def train_pipeline(engine: Any, steps: range) -> list[float]:
    """Train a pipeline with four inputs on two micro-batches in each step; return the losses."""
    found = []
    for step in steps:
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        found.append(float(engine.train_batch(iter([(half, half.sin()) for half in inputs.chunk(2)]))))
    return found
