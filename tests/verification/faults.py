"""Faults for the tiny GPT: each is planted in the engine of every rank before its first step.

A fault is a function ``(engine, grid)`` that changes the engine. It returns a context manager if something must be
restored. ``FAULTS`` has the layout of each, and what ``verify`` must report: kinds, and words in the likely causes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as deepspeed_groups

from ds_topo import PipelineParallelGrid, clip_grad_norm_, layers
from ds_topo.base.classes import stock_class
from ds_topo.checkpoint.engine_facts import inner_optimizer
from ds_topo.engine import config_options, shard
from ds_topo.engine.grid import PipelineEngineGrid
from ds_topo.engine.partition_sums import PartitionSum
from ds_topo.mpu import registry
from ds_topo.topology.rank_tables import ExpertPlan, gradient_axes
from tests.support import gpt_training
from tests.support.gpt_training import batch
from tests.support.training import own_samples
from tests.verification.recorded_training import Job

ZERO = [{"zero_optimization": {"stage": stage}} for stage in range(3)]
BF16 = {"bf16": {"enabled": True}}
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


def scaled_backward(engine: Any, grid: PipelineParallelGrid, factor: float) -> None:
    """Multiply the loss that a program passes to ``engine.backward``."""
    backward = engine.backward
    engine.backward = lambda loss, *arguments, **named: backward(loss * factor, *arguments, **named)


def same_samples(engine: Any, grid: PipelineParallelGrid) -> None:
    """Train all replicas on the samples of the first one, as with a data loader without a sampler."""
    first = [part.chunk(grid.get_sample_world_size())[0] for part in batch(0)]
    micro_batches = itertools.cycle(zip(*(part.chunk(2) for part in first), strict=True))
    forward = engine.forward
    engine.forward = lambda *_: forward(*next(micro_batches))


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


# -- defects of DeepSpeed: our fix is switched off, and its own function or formula is in force ------------------------


def deepspeeds_expert_groups() -> AbstractContextManager[object]:
    """Take the tables of experts from DeepSpeed, which assumes pipe x data x model."""

    def groups_of(kind: int, plan: ExpertPlan, rank: int) -> list[int]:
        return next(list(ranks) for ranks in _stock_tables(plan)[kind] if rank in ranks)

    undo = ExitStack()
    for kind, name in enumerate(("expert_ranks", "expert_data_ranks")):
        undo.enter_context(mock.patch.object(ExpertPlan, name, partialmethod(partial(groups_of, kind))))
    return undo


def _stock_tables(plan: ExpertPlan) -> Any:
    sizes = plan.topology.get_dim("model"), plan.expert_parallel_size, max(1, plan.topology.get_dim("pipe"))
    return deepspeed_groups._get_expert_parallel_ranks(plan.topology.world_size(), *sizes)


def experts_in_data_groups() -> AbstractContextManager[object]:
    """Deal whole experts over the ranks of one slice only."""
    return mock.patch.object(ExpertPlan, "_pool_axes", property(lambda plan: gradient_axes(plan.topology)))


def neighbors_share_partitions() -> AbstractContextManager[object]:
    """Let DeepSpeed create the groups of the second partition (hpZ), and check neither them nor the equal logits."""
    undo = ExitStack()
    create = lambda _, size: deepspeed_groups._create_zero_param_parallel_group(size)  # noqa: E731
    undo.enter_context(mock.patch.object(gpt_training.groups, "create_zero_partition_groups", create))
    undo.enter_context(mock.patch.object(config_options, "refusals", return_value=()))
    undo.enter_context(mock.patch.object(layers, "_require_parts"))
    undo.callback(setattr, deepspeed_groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", None)
    return undo


def data_groups_without_seq() -> AbstractContextManager[object]:
    """Return the ranks along data alone, as DeepSpeed's own grid does."""
    return mock.patch.object(PipelineParallelGrid, "get_data_parallel_group", lambda grid: grid.get_group("data"))


def pipelines_with_sequence_queries() -> AbstractContextManager[object]:
    """Offer the sequence methods to engines of pipelines."""
    return mock.patch.object(PipelineEngineGrid, "offers_sequence_queries", True)


def one_rank_in_the_config() -> AbstractContextManager[object]:
    """Raise AttributeError the first time that DeepSpeed asks for the size, in its config, which counts one rank."""
    size = PipelineParallelGrid.get_data_parallel_world_size
    answers = iter([True])

    def fails_once(grid: PipelineParallelGrid) -> int:
        if sys._getframe(1).f_code.co_filename.endswith("runtime/config.py") and next(answers, False):
            raise AttributeError("'NoneType' object has no attribute 'size'")
        return size(grid)

    return mock.patch.object(PipelineParallelGrid, "get_data_parallel_world_size", fails_once)


def stock_method(engine: Any, grid: PipelineParallelGrid, name: str) -> AbstractContextManager[object]:
    """Put a method of DeepSpeed's optimizer in force again."""
    optimizer, stock = engine.optimizer, stock_class(engine.optimizer)
    assert getattr(type(optimizer), name) is not getattr(stock, name), "ds_topo does not replace it"
    return mock.patch.object(optimizer, name, getattr(stock, name).__get__(optimizer))


def copies_stay_apart(engine: Any, grid: PipelineParallelGrid) -> AbstractContextManager[object]:
    """Keep the gradients of each copy of a partition."""
    apart = lambda tensors, group, scale, dtype: PartitionSum(tensors, None, 1.0, dtype)  # noqa: E731
    return mock.patch.object(shard, "PartitionSum", apart)


def reloaded_experts(engine: Any, grid: PipelineParallelGrid) -> AbstractContextManager[object]:
    """Save and load between two steps, by DeepSpeed's own functions and with its numbers of experts."""
    (experts,) = registry.of(grid)
    tables = _stock_tables(experts.plan)

    def number_of(table: Any) -> Callable[[str], int]:
        return lambda _: next(ranks.index(grid.global_rank) for ranks in table if grid.global_rank in ranks)

    def write_whole(content: Any, path: str) -> None:
        own = f"{path}.{grid.global_rank}"
        torch.save(content, own)
        os.replace(own, path)  # two ranks write it

    def reload(*_: Any) -> None:
        if engine.global_steps != 1 or not engine.is_first_of_step:
            return
        engine.is_first_of_step = False
        name = [tempfile.mkdtemp() if grid.global_rank == 0 else ""]
        dist.broadcast_object_list(name)
        with ExitStack() as stock:
            for function, table in zip(("_get_expert_parallel_rank", "_get_expert_data_parallel_rank"), tables):  # noqa: B905
                stock.enter_context(mock.patch.object(deepspeed_groups, function, number_of(table)))
            stock.enter_context(mock.patch.object(engine.checkpoint_engine, "save", write_whole))
            method = DeepSpeedEngine._save_moe_checkpoint.__get__(engine)
            stock.enter_context(mock.patch.object(engine, "_save_moe_checkpoint", method))
            DeepSpeedEngine.save_checkpoint(engine, name[0], tag="saved")
            dist.barrier()
            DeepSpeedEngine.load_checkpoint(engine, name[0], tag="saved")
            dist.barrier()
        if grid.global_rank == 0:
            shutil.rmtree(name[0])

    engine.is_first_of_step = True
    engine.module.register_forward_pre_hook(reload)


def _experts(topology: str, is_pipeline: bool = False, sizes: tuple[int, ...] = (0, 2), **settings: Any) -> Job:
    return Job(topology, is_pipeline, {"sizes": sizes, **settings}, "experts")


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
    "off by one in a slice": _fault(
        SLICES, inputs_rolled, "output", "since `blocks.1.qkv`", None, part="1.projection", model=1
    ),
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
    "stale weight on one replica": _fault(
        SLICES, stale, "replicas|weight", "stale", "data", part="mlp_norm.bias", data=1
    ),
    "stale weight on one slice": _fault(SLICES, stale, "weight|replicas", "stale", "model", part="qkv.weight", model=1),
    "stale weight with ZeRO 1": _fault(
        REPLICAS_1, stale, "replicas|weight", "", "data", part="attention_norm.weight", data=1
    ),
    "ZeRO 2 halves gradients": _fault(SLICES_2, before_update, REDUCED, "divided|0.5", factor=0.5),
    "ZeRO 1 doubles gradients of one partition": _fault(
        REPLICAS_1, before_update, REDUCED, "", "data", factor=2.0, data=1
    ),
    "gradients are not clipped": _fault(SLICES, before_update, NORM, "clipping", factor=7.0),
    "another learning rate on one slice": _fault(
        SLICES, hyperparameter, "weight|replicas", "the learning rate is", "model", name="lr", value=6e-3, model=1
    ),
    "another weight decay on a stage": _fault(
        STAGES, hyperparameter, "weight|replicas", "", "pipe", name="weight_decay", value=5.0, pipe=1
    ),
    "lost optimizer state": _fault(SLICES, lost_state, "replicas|exp_avg", "exp_avg is zero", "data", data=1),
    "lost micro-batch of a replica": _fault(
        SLICES, lost_micro_batch, GRADIENT, "a micro-batch is lost", "data", data=1
    ),
    "micro-batch is not accumulated": _fault(SLICES, skipped_micro_batch, REDUCED, "not accumulated", data=1),
    "overflow on one rank": _fault(REPLICAS_16, skipped_on_one_rank, "skipped step", "overflow", data=0),
    "samples of another share": _fault(SLICES, other_samples, "output", "share", "data", data=1),
    "first micro-batch is repeated": _fault(SLICES, repeated_micro_batch, "loss", "has the loss of micro-batch 1"),
    "loss has a wrong factor": _fault(SLICES, scaled_loss, "loss|output", "times 2", factor=2.0),
    "loss of a pipeline has a wrong factor": _fault(
        BOTH, scaled_loss_of_pipeline, "loss|gradient", "times 2|times 0.5", factor=2.0
    ),
    "loss along seq is too large, and clipping hides it": _fault(
        Job("data=2,seq=2", False, {"gradient_clipping": 0.05}, "sequences"),
        scaled_backward,
        REDUCED,
        "losses along 'seq' add up to 2 times",
        "seq",
        factor=2.0,
    ),
    "loss along seq is too small": _fault(
        Job("data=2,seq=2", False, {"gradient_clipping": 0.05}, "sequences"),
        scaled_backward,
        "loss",
        "times 0.5, 1/ the degree of 'data' or 'seq'",
        factor=0.5,
    ),
    "replicas train on the same samples": _fault(SLICES, same_samples, "samples", "without a sampler", "data"),
    "loss of another temperature": _fault(SLICES, scaled_loss, "loss", "the loss function", factor=0.921),
    "activations change between stages": _fault(STAGES, noisy_stage, "output", "", part="3", pipe=1),
    "norm without one slice": _fault(SLICES, wrong_norm, NORM, "leaves out the slices", "model", which="slice"),
    "norm counts replicated parameters twice": _fault(
        SLICES, wrong_norm, NORM, "counted twice", "model", which="replicated"
    ),
    "norm without one parameter": _fault(SLICES, wrong_norm, NORM, "mlp_norm.weight", which="one"),
    "norm times the root of the degree": _fault(SLICES, wrong_norm, NORM, "root", which="degree"),
    "DeepSpeed's norm of a pipeline": _fault(BOTH, nothing, NORM, "", before=without_corrected_norms),
    "DeepSpeed's norm of the first stage": _fault(
        _experts("pipe=2,data=2", True, sizes=(0, 0, 0, 0), clip=0.1),
        nothing,
        NORM,
        "leaves out the stages [1]",
        "pipe",
        before=without_corrected_norms,
    ),
    "DeepSpeed's norm of the first slice in bf16": _fault(
        Job("data=2,model=2", False, BF16), nothing, NORM, "slices [1]", "model", before=without_corrected_norms
    ),
    "DeepSpeed's norm of the experts of one slice": _fault(
        _experts("data=2,model=2", zero=1, tensor_parallel=True, clip=0.1),
        nothing,
        NORM,
        "slices [1]",
        "model",
        before=without_corrected_norms,
    ),
    "DeepSpeed's expert groups in pipe, model, data": _fault(
        _experts("pipe=2,model=2,data=2", sizes=(2, 2), tensor_parallel=True, is_pipeline=True),
        nothing,
        "first weight",
        "a wrong group",
        before=deepspeeds_expert_groups,
    ),
    "DeepSpeed's expert groups in model, data": _fault(
        _experts("model=2,data=2", tensor_parallel=True),
        nothing,
        "first weight",
        "a wrong group",
        before=deepspeeds_expert_groups,
    ),
    "whole experts are not summed over slices": _fault(
        _experts("model=2,data=2"), nothing, REDUCED, "not reduced along 'model'", "model", experts_in_data_groups
    ),
    "experts are reloaded under DeepSpeed's names": _fault(
        _experts("model=2,data=2", tensor_parallel=True), reloaded_experts, "output", "changed or loaded"
    ),
    "DeepSpeed's second partition of ZeRO 3": _fault(
        Job("data=2,model=2", False, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}),
        nothing,
        "output",
        "ZeRO 3 has gathered",
        before=neighbors_share_partitions,
    ),
    "ZeRO 3 over data without seq": _fault(
        Job("data=2,seq=2", False, {"zero_optimization": {"stage": 3}}, "sequences"),
        nothing,
        REDUCED,
        "not reduced along 'seq'",
        "seq",
        before=data_groups_without_seq,
    ),
    "ZeRO 3 averages over seq": _fault(
        Job("seq=2", False, {"zero_optimization": {"stage": 3}}, "sequences"),
        stock_method,
        REDUCED,
        "the degree of 'seq'",
        "seq",
        name="_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
    ),
    "replicas along an axis of ours are not reduced": _fault(
        Job("+rows=2,data=2", False), nothing, REDUCED, "along 'rows'", "rows", before=data_groups_without_seq
    ),
    "ZeRO 1 of a pipeline sums over seq": _fault(
        Job("pipe=2,seq=2", settings=ZERO[1] | {"gradient_clipping": 0.0}),
        nothing,
        REDUCED,
        "the degree of 'seq'",
        "seq",
        before=pipelines_with_sequence_queries,
    ),
    "config counts one rank": _fault(
        Job("data=2,model=2", False, {"train_batch_size": 8, "gradient_accumulation_steps": None}),
        nothing,
        "loss",
        "micro-batches",
        before=one_rank_in_the_config,
    ),
    "copies of a partition are not summed": _fault(
        Job("data=2,shard=2", False, ZERO[1]), copies_stay_apart, REDUCED, "not reduced along 'data'", "data"
    ),
}
