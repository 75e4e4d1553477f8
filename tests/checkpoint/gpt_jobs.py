"""Run jobs that save in one layout and continue in another: the example's GPT, as a pipeline and as a plain module.

Its embedding is tied and split over the vocabulary. Every job trains three steps, saves, and trains three more. The
other job loads the checkpoint and trains the same three.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import deepspeed

from ds_topo import checkpoint
from ds_topo.topology import ProcessTopology
from tests.support import gpt_training

BEFORE, AFTER = 3, 3
TOLERANCE = 1e-5
TAG = "saved"


@dataclass(frozen=True)
class Layout:
    """The layout and settings of a job."""

    topology: str
    zero: int = 1
    is_pipeline: bool = True
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        precision = ", bf16" if "bf16" in self.settings else ""
        return f"{self.topology}, ZeRO {self.zero}{precision}"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return ProcessTopology.from_spec(self.topology).world_size()


def orders() -> list[str]:
    """Return the six orders of pipe=2, data=2, model=2."""
    return [",".join(f"{axis}=2" for axis in axes) for axes in permutations(("pipe", "data", "model"))]


def save(layout: Layout, folder: Path) -> list[float]:
    """Train, save and continue on one rank. Return the losses after the save."""
    with job(layout) as (engine, grid):
        gpt_training.train(engine, grid, range(BEFORE))
        checkpoint.save(engine, folder, TAG, {"of the program": 7})
        return gpt_training.train(engine, grid, range(BEFORE, BEFORE + AFTER)).losses


def go_on(layout: Layout, folder: Path, options: dict[str, Any]) -> list[float]:
    """Load and continue on one rank. Return the losses."""
    with job(layout) as (engine, grid):
        _, state = checkpoint.load(engine, folder, **options)
        assert (state["of the program"], engine.global_steps) == (7, BEFORE)
        return gpt_training.train(engine, grid, range(BEFORE, BEFORE + AFTER)).losses


def job(layout: Layout) -> Any:
    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if layout.is_pipeline:
        replicas = ProcessTopology.from_spec(layout.topology).get_dim("data")
        gas = min(gpt_training.MICRO_BATCHES, gpt_training.BATCH // max(1, replicas))
        return gpt_training.pipeline(layout.topology, zero=layout.zero, gas=gas, **layout.settings)
    settings = {"zero_optimization": {"stage": layout.zero}, **layout.settings}
    return gpt_training.plain_engine(layout.topology, settings)


def greatest_difference(found: list[float], expected: list[float]) -> float:
    """Return the greatest relative difference of two series of losses."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
