"""Engines of a few layers, for tests of their surroundings rather than of what they learn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe import PipelineModule as StockPipelineModule
from torch import nn

from ds_topo import PipelineParallelGrid


def settings(**more: Any) -> dict[str, Any]:
    """Return a config of two micro-batches of two samples per step, and SGD; no clipping by default."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        **more,
    }


def data_efficiency(folder: str) -> dict[str, Any]:
    """Return a config section with which DeepSpeed's own sampler for curriculum learning chooses the samples."""
    metric = {
        "difficulty_type": "value",
        "clustering_type": "single_cluster",
        "min_difficulty": 1,
        "max_difficulty": 4,
        "schedule_type": "fixed_root",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1, "root_degree": 1},
    }
    learning = {"enabled": True, "data_cluster_path": folder, "curriculum_metrics": {"any": metric}}
    sampling = {"enabled": True, "num_epochs": 4, "curriculum_learning": learning}
    return {"enabled": True, "seed": 7, "data_sampling": sampling}


def start() -> None:
    """Join the job without messages, with the same random numbers on every rank."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)


def tied_layers() -> list[Any]:
    """Return five layers, of which the first and the last are tied."""
    tied = TiedLayerSpec("tied", nn.Linear, 8, 8)
    return [tied, LayerSpec(nn.Linear, 8, 8), torch.tanh, LayerSpec(nn.Linear, 8, 8), tied]


class TiedPipe(StockPipelineModule):  # type: ignore[misc]
    """A program's subclass of DeepSpeed's class, defined before there is a grid."""

    def __init__(self, **layout: Any) -> None:
        super().__init__(tied_layers(), loss_fn=F.mse_loss, seed_layers=True, **layout)


def pipeline_losses(module: nn.Module, initialize: Callable[..., Any], grid: PipelineParallelGrid) -> list[float]:
    """Train a pipeline for three steps; return the losses."""
    engine, *_ = initialize(model=module, config=settings(gradient_clipping=0.1))
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + grid.get_sample_rank())
        micro_batches = [(torch.randn(2, 8, generator=generator), torch.ones(2, 8)) for _ in range(2)]
        found.append(engine.train_batch(iter(micro_batches)).item())
    engine.destroy()
    return found
