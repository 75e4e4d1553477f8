"""Engines of a layer or two, for what is asked of their surroundings and not of what they learn."""

from __future__ import annotations

import warnings
from typing import Any

import deepspeed
import torch


def settings(**more: Any) -> dict[str, Any]:
    """A config of two micro-batches of two samples per step, and plain SGD; no clipping unless ``more`` says so."""
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


def start() -> None:
    """Join, quietly, with the same random numbers on every rank."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
