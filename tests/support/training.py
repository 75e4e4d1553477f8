"""Train in one process and with engines, record the runs in one form, and compare them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import clip_grad_norm_ as deepspeed_clip_grad_norm_
from torch import nn

from ds_topo import PipelineParallelGrid, ProcessGrid, clip_grad_norm_

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets."""
Loss: TypeAlias = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""The loss of a module or an engine for inputs and targets."""


@dataclass
class Run:
    """The record of a training run on one rank."""

    losses: list[float] = field(default_factory=list)
    """The loss over the whole batch of every step."""
    norms: list[float] = field(default_factory=list)
    """The norm of all gradients before clipping, of every step for which the engine reports one."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """This rank's parameters after the last step, under names that do not depend on the layout."""
    reductions: int = 0
    """The number of bucket reductions by our reducer."""
    buckets: int = 0
    """The number of our reducer's buckets."""


Reference: TypeAlias = Callable[[int], Run]
"""The type of the reference fixtures: a function of the steps that returns the run of one process."""


def assert_trained_alike(
    found: Run,
    expected: Run,
    *,
    losses: float | None = None,
    norms: float | None = None,
    elements: tuple[float, float] | None = None,
    tensors: float | None = None,
) -> None:
    """Assert that a run equals the expected one within the given tolerances, at least one.

    Args:
        found: A run whose parameters may be a part of the expected ones.
        expected: A run of the same steps.
        losses: The greatest relative difference of a loss.
        norms: The greatest relative difference of a norm of gradients.
        elements: The greatest relative and absolute difference of an element of a parameter.
        tensors: The greatest norm of a parameter's difference, relative to the norm of the parameter.
    """
    assert (losses, norms, elements, tensors) != (None,) * 4, "nothing was compared"
    if losses is not None:
        torch.testing.assert_close(found.losses, expected.losses, rtol=losses, atol=0, msg=_headed("losses"))
    if norms is not None:
        torch.testing.assert_close(found.norms, expected.norms, rtol=norms, atol=0, msg=_headed("norms of gradients"))
    if elements is None and tensors is None:
        return
    assert found.parameters
    assert found.parameters.keys() <= expected.parameters.keys()
    for name, mine in found.parameters.items():
        theirs = expected.parameters[name]
        if elements is not None:
            torch.testing.assert_close(mine, theirs, rtol=elements[0], atol=elements[1], msg=_headed(name))
        if tensors is not None:
            difference = float((mine - theirs).norm() / theirs.norm())
            assert difference < tensors, name


def _headed(what: str) -> Callable[[str], str]:
    return lambda message: f"{what}: {message}"


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a module's parameters in fp32, by name."""
    return {name: parameter.detach().float().clone() for name, parameter in module.named_parameters()}


# -- one process -----------------------------------------------------------------------------------------------------


def train_by_hand(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    loss_of: Loss,
    clip: float = math.inf,
    grid: ProcessGrid | None = None,
) -> Run:
    """Train with plain PyTorch, and clip by torch's function, or by that of ds_topo over a grid."""
    run = Run()
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = loss_of(module, inputs, targets)
        loss.backward()
        if grid is None:
            run.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip)))
        else:
            run.norms.append(float(clip_grad_norm_(module.parameters(), clip, grid)))
        optimizer.step()
        run.losses.append(loss.item())
    run.parameters = parameters_of(module)
    return run


# -- engines ---------------------------------------------------------------------------------------------------------


def engine_config(micro_batch: int, accumulation: int = 1, clip: float = 0.0, **more: Any) -> dict[str, Any]:
    """Return a DeepSpeed config for any optimizer; without clipping by default, unlike DeepSpeed."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **more,
    }


def own_samples(batch: Batch, grid: PipelineParallelGrid) -> Batch:
    """Return this rank's share of a batch."""
    inputs, targets = (part.chunk(grid.get_sample_world_size())[grid.get_sample_rank()] for part in batch)
    return inputs, targets


def train_engine(engine: Any, grid: PipelineParallelGrid, batches: Iterable[Batch], loss_of: Loss | None = None) -> Run:
    """Train one rank of a DeepSpeed engine, one step for each of its own ``batches``.

    ``loss_of`` is for engines without a pipeline. A rank's loss is its share of the mean over all samples.
    """
    run = Run()
    for batch in batches:
        inputs, targets = (part.split(engine.train_micro_batch_size_per_gpu()) for part in batch)
        micro_batches = list(zip(inputs, targets, strict=True))
        assert len(micro_batches) == engine.gradient_accumulation_steps()
        with _clipped_norms() as clipped:
            if isinstance(engine, PipelineEngine):
                loss = float(engine.train_batch(iter(micro_batches)))
            else:
                loss = _train_plain_batch(engine, grid, micro_batches, loss_of)
        run.losses.append(loss)
        norm = clipped[0] if clipped else engine.get_global_grad_norm()
        run.norms += [] if norm is None else [float(norm)]
    if getattr(engine, "gradient_reducer", None) is not None:
        run.reductions, run.buckets = engine.gradient_reducer.reduction_count, len(engine.gradient_reducer.buckets)
    return run


def _train_plain_batch(engine: Any, grid: PipelineParallelGrid, micro_batches: Sequence[Batch], loss_of: Any) -> float:
    mean = torch.zeros(())
    for inputs, targets in micro_batches:
        loss = loss_of(engine, inputs, targets)
        engine.backward(loss)
        engine.step()
        mean += loss.detach().float() / len(micro_batches)
    dist.all_reduce(mean, group=grid.get_data_parallel_group())
    return mean.item() / grid.get_data_parallel_world_size()


def destroy_engine(engine: Any) -> None:
    """Destroy an engine and free its memory.

    The hooks of the loss refer to the engine of a pipeline's last stage, and the engine to the loss. Without this
    function Python could not free the engine, its process groups and their threads.
    """
    engine.destroy()
    vars(engine).clear()


@contextmanager
def _clipped_norms() -> Iterator[list[torch.Tensor]]:
    """Record the norms by which DeepSpeed clips in fp32 without ZeRO, because its pipelines do not keep them."""
    norms: list[torch.Tensor] = []

    def clip(*arguments: Any, **options: Any) -> torch.Tensor:
        norms.append(deepspeed_clip_grad_norm_(*arguments, **options))
        return norms[-1]

    with mock.patch.object(deepspeed_engine, "clip_grad_norm_", clip):
        yield norms
