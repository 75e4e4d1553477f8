"""Frameworks that deal samples and count batches over all ranks of the world: accelerate, and Trainer on top of it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist

from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.ledger import Change, Release, ledger
from ds_topo.topology.axes import SEQ

Config: TypeAlias = "str | Path | dict[str, Any] | None"
_CALLERS = ("accelerate", "transformers")


def deal_samples(grid: PipelineParallelGrid) -> list[Release]:
    """Let accelerate deal a data loader's batches over distinct samples; return what takes it back.

    It deals over all ranks, so that the slices and stages of one replica would train on different samples. Nothing
    where neither it nor transformers has been imported.
    """
    if not any(name in sys.modules for name in _CALLERS) or importlib.util.find_spec("accelerate") is None:
        return []
    import accelerate.accelerator

    change = Change(
        accelerate.accelerator,
        "prepare_data_loader",
        instead="the same for this rank's samples",
        why="it deals over all ranks: model parallel peers would train on different samples",
        during="ds_topo.use(grid)",
    )

    def make(prepare: Any) -> Any:
        signature = inspect.signature(prepare)

        @wraps(prepare)
        def prepare_samples_of_grid(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options)
            if given.arguments.get("dispatch_batches"):
                raise ValueError(
                    "dispatch_batches: rank 0 would read all samples and deal them over all ranks, but only "
                    f"{grid.get_sample_world_size()} of {grid.world_size} work on different ones in "
                    f"{grid.topology().spec!r}: leave it out"
                )
            count, index = _share_of(grid)
            given.arguments |= {
                "num_processes": count,
                "process_index": index,
                "dispatch_batches": False,
                "torch_device_mesh": None,
            }
            return prepare(*given.args, **given.kwargs)

        return prepare_samples_of_grid

    return [ledger.bind(change, make)]


def warn_of_undealt_samples(grid: PipelineParallelGrid) -> None:
    """Say that accelerate was imported too late for :func:`deal_samples`."""
    is_dealt = any(change.name == "prepare_data_loader" for change in ledger.in_force())
    if "accelerate" in sys.modules and not is_dealt and grid.get_sample_world_size() < grid.world_size:
        warnings.warn(
            "accelerate was imported after ds_topo.use(grid), and deals samples over all ranks: import it, or "
            "transformers, before",
            RuntimeWarning,
            stacklevel=4,
        )


def _share_of(grid: PipelineParallelGrid) -> tuple[int, int]:
    """Among how many a data loader is dealt, and which of them this rank is.

    Long sequence training wants other samples on each rank along ``seq``: it shards every rank's over all of them.
    """
    from accelerate.state import AcceleratorState

    count, index = grid.get_sample_world_size(), grid.get_sample_rank()
    parallelism = getattr(AcceleratorState(), "parallelism_config", None)
    if getattr(parallelism, "sp_size", 1) > 1 and SEQ in grid.topology().axes:
        size = grid.get_axis_size(SEQ)
        return count * size, index * size + grid.get_axis_rank(SEQ)
    return count, index


def with_samples_of(grid: PipelineParallelGrid, config: Config) -> Config:
    """The config, its ``train_batch_size`` counted over samples where it was counted over all ranks.

    Frameworks fill in ``"auto"`` with the number of ranks, and DeepSpeed would refuse that.
    """
    if not isinstance(config, dict):
        return config
    micro, steps = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps", 1)
    samples, ranks = grid.get_sample_world_size(), dist.get_world_size()
    if samples == ranks or not isinstance(micro, int) or not isinstance(steps, int):
        return config
    if config.get("train_batch_size") != micro * steps * ranks:
        return config
    batch = micro * steps * samples
    if dist.get_rank() == 0:
        warnings.warn(
            f"train_batch_size {config['train_batch_size']} counts {micro} x {steps} samples on each of {ranks} ranks, "
            f"but {grid.topology().spec!r} works on {samples} at a time: it is {batch}",
            RuntimeWarning,
            stacklevel=4,
        )
    return {**config, "train_batch_size": batch}
