"""Faults for the tiny GPT: each is planted in the engine of every rank before its first step.

A fault is a function ``(engine, grid)`` that changes the engine. It returns a context manager if something must be
restored. ``FAULTS`` has the layout of each, and what ``verify`` must report: kinds, and words in the likely causes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ds_topo import PipelineParallelGrid, clip_grad_norm_
from ds_topo.checkpoint.engine_facts import inner_optimizer
from tests.support.gpt_training import batch
from tests.support.training import own_samples
from tests.verification.recorded_training import Job

ZERO = [{"zero_optimization": {"stage": stage}} for stage in range(3)]
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
STAGES, SLICES, BOTH = Job("pipe=2,data=2"), Job("data=2,model=2", False), Job("pipe=2,model=2")
REPLICAS_1, SLICES_2 = Job("data=2,pipe=2", settings=ZERO[1]), Job("data=2,model=2", False, ZERO[2])
UNCLIPPED = Job("data=2,model=2", False, {"gradient_clipping": 0.0})
"""Clipping hides a common factor of all gradients, and makes it harmless."""
REPLICAS_16 = Job("data=4", False, FP16)
ALL = ""


@dataclass(frozen=True)
class Fault:
    """A fault, and what must be reported."""

    job: Job
    plant: Callable[..., AbstractContextManager[object] | None]
    kinds: tuple[str, ...]
    causes: tuple[str, ...] = ()
    """Words of which one is in the causes."""
    axis: str | None = None
    before: Callable[[], AbstractContextManager[object]] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


def planted(name: str, engine: Any, grid: PipelineParallelGrid) -> AbstractContextManager[object] | None:
    """Plant a fault of the table."""
    return FAULTS[name].plant(engine, grid, **FAULTS[name].arguments)


def _named(engine: Any, part: str) -> list[torch.Tensor]:
    return [parameter for name, parameter in engine.module.named_parameters() if part in name]


def _after_reduction(engine: Any, change: Callable[[torch.Tensor, torch.Tensor], None], part: str = ALL) -> None:
    """Call ``change(gradient, before)`` for gradients after reduction, with their values before it."""
    reduce = engine.buffered_allreduce_fallback

    def reduce_and_change(*arguments: Any, **options: Any) -> None:
        chosen = [parameter for parameter in _named(engine, part) if parameter.grad is not None]
        before = [parameter.grad.clone() for parameter in chosen]
        reduce(*arguments, **options)
        for parameter, old in zip(chosen, before, strict=True):
            change(parameter.grad, old)

    engine.buffered_allreduce_fallback = reduce_and_change


def unreduced(engine: Any, grid: PipelineParallelGrid, part: str = ALL) -> None:
    _after_reduction(engine, lambda gradient, before: gradient.copy_(before), part)


def scaled(engine: Any, grid: PipelineParallelGrid, factor: float, part: str = ALL) -> None:
    _after_reduction(engine, lambda gradient, _: gradient.mul_(factor), part)


def wrong_group(engine: Any, grid: PipelineParallelGrid, axis_of: str, part: str = ALL) -> None:
    group = grid.get_group(axis_of)

    def average(gradient: torch.Tensor, before: torch.Tensor) -> None:
        dist.all_reduce(before, group=group)
        gradient.copy_(before / dist.get_world_size(group))

    _after_reduction(engine, average, part)


def summed_over_slices(engine: Any, grid: PipelineParallelGrid, part: str) -> None:
    _after_reduction(engine, lambda gradient, _: dist.all_reduce(gradient, group=grid.get_group("model")), part)


def factor_of_gradient(engine: Any, grid: PipelineParallelGrid, factor: float, part: str = ALL, **where: int) -> None:
    if _is_at(grid, where):
        for parameter in _named(engine, part):
            parameter.register_hook(lambda gradient: gradient * factor)


def _is_at(grid: PipelineParallelGrid, where: dict[str, int]) -> bool:
    return all(grid.get_axis_rank(axis) == index for axis, index in where.items())


def inputs_rolled(engine: Any, grid: PipelineParallelGrid, part: str, **where: int) -> None:
    """Shift a slice of the activations by one."""
    if _is_at(grid, where):
        for name, module in engine.module.named_modules():
            if name.endswith(part):
                module.register_forward_pre_hook(lambda _, inputs: (inputs[0].roll(1, -1), *inputs[1:]))


def without_collective(engine: Any, grid: PipelineParallelGrid, part: str) -> None:
    """Leave out the all-reduce of a layer: forward of row-parallel ones, backward of column-parallel ones."""
    for name, module in engine.module.named_modules():
        if name.endswith(part):
            module.forward = partial(_alone, module)


def _alone(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    weight, bias = module.weight.flatten(0, -2), None if module.bias is None else module.bias.flatten()
    return F.linear(hidden, weight, bias)


def untied(engine: Any, grid: PipelineParallelGrid) -> None:
    engine.module.get_tied_weights_and_groups = list


def drifted_tie(engine: Any, grid: PipelineParallelGrid) -> None:
    if grid.is_last_stage:
        with torch.no_grad():
            _named(engine, "embedding")[0].mul_(1.01)


def changed_at_start(engine: Any, grid: PipelineParallelGrid, part: str, **where: int) -> None:
    if _is_at(grid, where):
        with torch.no_grad():
            _named(engine, part)[0].mul_(1.01)


def equal_slices(engine: Any, grid: PipelineParallelGrid, part: str) -> None:
    group = grid.get_group("model")
    dist.broadcast(_named(engine, part)[0].data, dist.get_global_rank(group, 0), group=group)


def stale(engine: Any, grid: PipelineParallelGrid, part: str, **where: int) -> None:
    if not _is_at(grid, where):
        return
    chosen = _named(engine, part)
    old = [parameter.detach().clone() for parameter in chosen]
    step = engine.optimizer.step

    def step_and_restore(*arguments: Any, **options: Any) -> Any:
        result = step(*arguments, **options)
        for parameter, value in zip(chosen, old, strict=True):
            parameter.data.copy_(value)
        return result

    engine.optimizer.step = step_and_restore


def before_update(engine: Any, grid: PipelineParallelGrid, factor: float, **where: int) -> None:
    """Scale the gradients that the optimizer gets."""
    inner = inner_optimizer(engine)
    assert inner is not None

    def scale(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    if _is_at(grid, where):
        inner.register_step_pre_hook(scale)


def hyperparameter(engine: Any, grid: PipelineParallelGrid, name: str, value: Any, **where: int) -> None:
    inner = inner_optimizer(engine)
    assert inner is not None
    if _is_at(grid, where):
        for group in inner.param_groups:
            group[name] = value


def lost_state(engine: Any, grid: PipelineParallelGrid, **where: int) -> None:
    inner = inner_optimizer(engine)
    assert inner is not None

    def forget(optimizer: Any, *_: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

    if _is_at(grid, where):
        inner.register_step_post_hook(forget)


def lost_micro_batch(engine: Any, grid: PipelineParallelGrid, **where: int) -> None:
    """Drop the gradient of the first micro-batch."""
    seen: dict[int, int] = {}

    def drop(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        seen[id(parameter)] = seen.get(id(parameter), 0) + 1
        return gradient if seen[id(parameter)] % 2 == 0 else torch.zeros_like(gradient)

    if _is_at(grid, where):
        for parameter in engine.module.parameters():
            parameter.register_hook(partial(drop, parameter))


def skipped_micro_batch(engine: Any, grid: PipelineParallelGrid, **where: int) -> None:
    """Accumulate nothing of the first micro-batch, after its gradients have arrived."""
    seen: dict[int, int] = {}

    def drop(parameter: torch.Tensor) -> None:
        seen[id(parameter)] = seen.get(id(parameter), 0) + 1
        if seen[id(parameter)] % 2 and parameter.grad is not None:
            parameter.grad.zero_()

    if _is_at(grid, where):
        for parameter in engine.module.parameters():
            parameter.register_post_accumulate_grad_hook(drop)


def skipped_on_one_rank(engine: Any, grid: PipelineParallelGrid, **where: int) -> None:
    if _is_at(grid, where):
        engine.optimizer.overflow_checker.check = lambda *_, **__: True


def other_samples(engine: Any, grid: PipelineParallelGrid, **where: int) -> None:
    """Train ranks on the samples of another share."""
    if _is_at(grid, where):
        size = grid.get_sample_world_size()
        inputs, labels = (part.chunk(size)[(grid.get_sample_rank() + 1) % size] for part in batch(0))
        micro = engine.train_micro_batch_size_per_gpu()
        engine.module.register_forward_pre_hook(lambda *_: (inputs[:micro], labels[:micro]))


def repeated_micro_batch(engine: Any, grid: PipelineParallelGrid) -> None:
    inputs, labels = own_samples(batch(0), grid)
    micro = engine.train_micro_batch_size_per_gpu()
    engine.module.register_forward_pre_hook(lambda *_: (inputs[:micro], labels[:micro]))


def scaled_loss(engine: Any, grid: PipelineParallelGrid, factor: float) -> None:
    loss_of = engine.module.loss_of
    engine.module.loss_of = lambda *arguments: loss_of(*arguments) * factor


def scaled_loss_of_pipeline(engine: Any, grid: PipelineParallelGrid, factor: float) -> None:
    if grid.is_last_stage:
        loss_of = engine.module.loss_fn
        engine.module.loss_fn = lambda *arguments: loss_of(*arguments) * factor
        engine.loss_model = engine.module.loss_fn


def noisy_stage(engine: Any, grid: PipelineParallelGrid, part: str, **where: int) -> None:
    if _is_at(grid, where):
        for name, module in engine.module.named_modules():
            if name == part:
                module.register_forward_hook(lambda _, __, output: output * 1.001)


def wrong_norm(engine: Any, grid: PipelineParallelGrid, which: str) -> None:
    """Clip by a norm that leaves something out, or counts it twice."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}

    def clip(parameters: list[torch.Tensor], max_norm: float) -> None:
        norm = clip_grad_norm_(parameters, float("inf"), grid)
        square = norm.double() ** 2
        own = torch.zeros((), dtype=torch.float64)
        for parameter in parameters:
            name, is_slice = names[id(parameter)], bool(getattr(parameter, "tensor_model_parallel", False))
            value = parameter.grad.double().square().sum()
            if which == "slice" and is_slice and grid.get_axis_rank("model") == 1:
                own -= value
            if which == "replicated" and not is_slice and grid.get_axis_rank("model") == 1:
                own += value
            if which == "one" and "mlp_norm.weight" in name and grid.get_axis_rank("model") == 0:
                own -= value
        dist.all_reduce(own, group=grid.get_model_parallel_group())
        square = square * 2 if which == "degree" else square + own
        norm = square.sqrt().float()
        for parameter in parameters:
            parameter.grad.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))

    parameters = list(engine.module.parameters())
    engine.clip_fp32_gradients = lambda: clip(parameters, engine.gradient_clipping())


def nothing(engine: Any, grid: PipelineParallelGrid) -> None:
    """Plant nothing in the engine."""


def without_corrected_norms() -> AbstractContextManager[object]:
    """Build every grid without our corrections of DeepSpeed's norms."""
    return mock.patch.object(PipelineParallelGrid, "settle_norms", return_value=False)


def _fault(
    job: Job,
    plant: Callable[..., AbstractContextManager[object] | None],
    kinds: str,
    causes: str = "",
    axis: str | None = None,
    before: Callable[[], AbstractContextManager[object]] | None = None,
    **arguments: Any,
) -> Fault:
    return Fault(job, plant, tuple(kinds.split("|")), tuple(filter(None, causes.split("|"))), axis, before, arguments)


REDUCED, GRADIENT, NORM = "reduced gradient", "gradient", "norm|reduced gradient"
FAULTS: dict[str, Fault] = {
    "gradients are not reduced": _fault(SLICES, unreduced, REDUCED, "not reduced", "data"),
    "gradients of stages are not reduced": _fault(STAGES, unreduced, REDUCED, "not reduced", "data"),
    "one parameter is not reduced": _fault(SLICES, unreduced, REDUCED, "not reduced", "data", part="mlp_norm.weight"),
    "gradients are divided twice": _fault(UNCLIPPED, scaled, REDUCED, "divided by the number", "data", factor=0.5),
    "gradients are summed": _fault(UNCLIPPED, scaled, REDUCED, "without a division", "data", factor=2.0),
    "one gradient has a wrong factor": _fault(SLICES, scaled, REDUCED, "", factor=3.0, part="blocks.1.qkv.weight"),
    "averaged over model": _fault(SLICES, wrong_group, REDUCED, "not reduced|wrong group", axis_of="model"),
    "averaged over pipe": _fault(
        STAGES, wrong_group, REDUCED, "not reduced|wrong group", part="embedding", axis_of="pipe"
    ),
    "replicated gradient is summed over slices": _fault(
        SLICES, summed_over_slices, REDUCED, "replicated along 'model'", part="attention_norm.weight"
    ),
    "backward pass doubles a gradient": _fault(UNCLIPPED, factor_of_gradient, GRADIENT, "times 2", factor=2.0),
    "stage 0 gets half of its gradient": _fault(STAGES, factor_of_gradient, GRADIENT, "times 0.5", factor=0.5, pipe=0),
    "one slice gets half of its gradient": _fault(
        SLICES, factor_of_gradient, GRADIENT, "times 0.5", "model", factor=0.5, part="qkv.weight", model=1
    ),
    "off by one in a slice": _fault(SLICES, inputs_rolled, "output", "", None, part="1.projection", model=1),
    "off by one in a stage": _fault(BOTH, inputs_rolled, "output", "", None, part="contract", model=1),
    "outputs of rows are not summed": _fault(
        SLICES, without_collective, "output", "not reduced", "model", part="projection"
    ),
    "gradients of columns are not summed": _fault(
        SLICES, without_collective, GRADIENT, "not reduced", "model", part="expand"
    ),
    "tied weight is not summed": _fault(STAGES, untied, REDUCED, "tied weight", "pipe"),
    "tied weight differs": _fault(STAGES, drifted_tie, "replicas", "", "pipe"),
    "replicas start differently": _fault(
        SLICES, changed_at_start, "replicas", "random state", "data", part="position", data=1
    ),
    "slices of a replicated weight start differently": _fault(
        SLICES, changed_at_start, "replicas", "random state", "model", part="position", model=1
    ),
    "slices start with equal values": _fault(
        SLICES, equal_slices, "first weight", "random state", "model", part="blocks.0.qkv.weight"
    ),
    "stale weight on one replica": _fault(SLICES, stale, "replicas|weight", "", "data", part="mlp_norm.bias", data=1),
    "stale weight on one slice": _fault(SLICES, stale, "weight|replicas", "stale", "model", part="qkv.weight", model=1),
    "stale weight with ZeRO 1": _fault(
        REPLICAS_1, stale, "replicas|weight", "", "data", part="attention_norm.weight", data=1
    ),
    "ZeRO 2 halves gradients": _fault(SLICES_2, before_update, REDUCED, "divided|0.5", factor=0.5),
    "ZeRO 1 doubles gradients of one partition": _fault(
        REPLICAS_1, before_update, REDUCED, "", "data", factor=2.0, data=1
    ),
    "gradients are not clipped": _fault(SLICES, before_update, NORM, "", factor=7.0),
    "another learning rate on one slice": _fault(
        SLICES, hyperparameter, "weight|replicas", "", "model", name="lr", value=6e-3, model=1
    ),
    "another weight decay on a stage": _fault(
        STAGES, hyperparameter, "weight|replicas", "", "pipe", name="weight_decay", value=5.0, pipe=1
    ),
    "lost optimizer state": _fault(SLICES, lost_state, "replicas|exp_avg", "", "data", data=1),
    "lost micro-batch of a replica": _fault(SLICES, lost_micro_batch, GRADIENT, "", "data", data=1),
    "micro-batch is not accumulated": _fault(SLICES, skipped_micro_batch, REDUCED, "", data=1),
    "overflow on one rank": _fault(REPLICAS_16, skipped_on_one_rank, "skipped step", "overflow", data=0),
    "samples of another share": _fault(SLICES, other_samples, "output", "share", "data", data=1),
    "first micro-batch is repeated": _fault(SLICES, repeated_micro_batch, "loss"),
    "loss has a wrong factor": _fault(SLICES, scaled_loss, "loss|output", "times 2", factor=2.0),
    "loss of a pipeline has a wrong factor": _fault(
        BOTH, scaled_loss_of_pipeline, "loss|gradient", "times 2|times 0.5", factor=2.0
    ),
    "activations change between stages": _fault(STAGES, noisy_stage, "output", "", part="3", pipe=1),
    "norm without one slice": _fault(SLICES, wrong_norm, NORM, "leaves out the slices", "model", which="slice"),
    "norm counts replicated parameters twice": _fault(
        SLICES, wrong_norm, NORM, "counted twice", "model", which="replicated"
    ),
    "norm without one parameter": _fault(SLICES, wrong_norm, NORM, "leaves out", which="one"),
    "norm times the root of the degree": _fault(SLICES, wrong_norm, NORM, "root", which="degree"),
    "DeepSpeed's norm of a pipeline": _fault(BOTH, nothing, NORM, "", before=without_corrected_norms),
}
