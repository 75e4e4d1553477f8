"""Build an engine of equal linear layers that has taken a step; its checkpoints have a chosen number of bytes."""

from __future__ import annotations

from typing import Any

import torch

from ds_topo import PipelineParallelGrid, initialize


def engine_of_layers(grid: PipelineParallelGrid, width: int, layers: int, zero: int) -> Any:
    """Return an engine with Adam in fp32; it has at least 16 bytes for each of ``layers * width ** 2`` weights.

    Layers are in blocks of 100: torch's ``load_state_dict`` takes quadratic time in the number of children of a module.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    linear = [torch.nn.Linear(width, width) for _ in range(layers)]
    module = torch.nn.Sequential(
        *(torch.nn.Sequential(*linear[first : first + 100]) for first in range(0, layers, 100))
    )
    engine, *_ = initialize(model=module, config=config, mpu=grid)
    engine.backward(engine(torch.ones(1, width)).sum())
    engine.step()
    return engine
