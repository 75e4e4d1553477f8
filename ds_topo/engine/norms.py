"""Correct the norms of gradients on a grid, for each of DeepSpeed's optimizers.

The norm of a model must count every parameter once: one replica of each, all slices of a tensor-parallel parameter, one
slice of any other, a tied layer on one of its stages, and every expert. DeepSpeed's optimizers deviate from that:

    fp32 without ZeRO        ``clip_grad_norm_`` counts parameters marked ``model_parallel``, and all parameters on
                             model parallel rank 0. In a pipeline, ``count_each_parameter_once`` sets these marks. The
                             engine of a pipeline does not keep the norm, and with experts it averages the norms of
                             ranks that hold different experts. ``clip_gradients`` replaces it in both.
    ZeRO 1 and 2             The norm omits the experts of all slices but the first. It reduces once per parameter
                             group, which hangs if stages have different numbers of groups. ``zero_gradient_norm``
                             replaces it.
    fp16, bf16 without ZeRO  ``FP16_UnfusedOptimizer`` takes the norm of gradients, which have no marks, so we copy the
                             marks of their parameters. It omits experts, and ``BF16_Optimizer`` hangs if ranks have
                             different expert sizes; ``check_norm`` refuses both. ``BF16_Optimizer`` fails on a slice
                             without any parameter to count; there we add a zero.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups
from deepspeed.utils import log_dist
from torch import nn

from ds_topo.errors import ExpertGroupError
from ds_topo.ledger import Make, Patch
from ds_topo.mpu import patches
from ds_topo.mpu.expert_registry import registry
from ds_topo.mpu.mpu import MpuGrid

# -- marks ------------------------------------------------------------------------------------------------------------


def mark_tensor_parallel_gradients(module: nn.Module) -> Callable[[], None]:
    """Copy each parameter's ``model_parallel`` mark to its gradient, for an ``mpu`` that is not one of our grids.

    For fp16 and bf16 without ZeRO and with an optimizer that is not fused, DeepSpeed's ``FP16_UnfusedOptimizer`` takes
    the norm of gradients, which unlike their parameters have no mark: the shards of all tensor-parallel ranks but the
    first are then missing from the norm, and clipping is too weak. An engine whose mpu is a ``PipelineParallelGrid``
    does this by itself; elsewhere call it once before ``deepspeed.initialize``.

    Args:
        module: a module whose tensor-parallel parameters have ``tensor_model_parallel`` or ``model_parallel`` set, as
            Megatron's and DeepSpeed's have.

    Returns:
        A function that removes the hooks that set the marks.
    """
    handles = [
        parameter.register_post_accumulate_grad_hook(_mark)
        for parameter in module.parameters()
        if parameter.requires_grad and is_model_parallel_parameter(parameter)
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _mark(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:  # ZeRO has taken it already
        parameter.grad.model_parallel = True  # type: ignore[attr-defined]


def count_each_parameter_once(module: nn.Module, grid: MpuGrid) -> None:
    """Mark the parameters of a pipeline stage that this rank adds to the norm of all gradients.

    Without ZeRO, DeepSpeed's ``clip_grad_norm_`` counts all parameters on model parallel rank 0, and on other ranks
    those marked ``model_parallel``. Without marks, all later stages are missing from the norm. Every parameter must
    count once over pipe x model: a tensor-parallel shard on each slice, a replicated parameter on slice 0, and a tied
    one on its first stage.
    """
    if not grid.settle_norms():
        return
    first_slice = grid.get_slice_parallel_rank() == 0
    for parameter in module.parameters():
        counts = not is_copy_of_tied(parameter) and (first_slice or bool(is_model_parallel_parameter(parameter)))
        parameter.model_parallel = counts  # type: ignore[attr-defined]
        if is_copy_of_tied(parameter):
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


def _with_marks(step: Any) -> Any:
    @wraps(step)
    def marked_step(optimizer: FP16_UnfusedOptimizer, closure: object = None) -> Any:
        for parameter in chain.from_iterable(optimizer.fp16_groups):
            if parameter.grad is not None:
                parameter.grad.model_parallel = bool(is_model_parallel_parameter(parameter))
                parameter.grad.ds_pipe_replicated = is_copy_of_tied(parameter)
        return step(optimizer, closure)

    return marked_step


def _with_a_zero(get_gradients: Any) -> Any:
    @wraps(get_gradients)
    def gradients_for_norm(optimizer: BF16_Optimizer, for_clipping: bool = False) -> Any:
        found = get_gradients(optimizer, for_clipping)
        if for_clipping:
            return found
        counted, of_experts = found
        return counted or [torch.zeros(1, device=get_accelerator().current_device_name())], of_experts

    return gradients_for_norm


OF_OPTIMIZERS: tuple[tuple[Patch, Make], ...] = (
    (patches.UNFUSED_STEP, _with_marks),
    (patches.BF16_GRADIENTS, _with_a_zero),
)


# -- norms with experts -----------------------------------------------------------------------------------------------


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, grid: MpuGrid) -> torch.Tensor:
    """Scale whole, reduced gradients so that their norm over the grid is at most ``limit``; return the norm, ``[]``.

    Collective over the grid. For fp32 without ZeRO, where DeepSpeed uses ``deepspeed.runtime.utils.clip_grad_norm_``.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    norms = [
        _norm_of(parameter.grad)
        for parameter in trained
        if _counts_on_this_slice(parameter, grid) and _replica(parameter, grid) == 0
    ]
    norm = _norm_over_grid(norms, grid)
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for parameter in trained:
        assert parameter.grad is not None
        parameter.grad.mul_(scale)
    return norm


def zero_gradient_norm(optimizer: DeepSpeedZeroOptimizer, grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of gradients that ZeRO-1 or 2 has partitioned; -1 for inf or nan, as DeepSpeed expects.

    Collective over the grid. It replaces ``DeepSpeedZeroOptimizer.scaled_global_norm``.
    """
    norms: list[torch.Tensor] = []
    for group, parameters in enumerate(optimizer.params_in_partition):
        if optimizer.cpu_offload:
            known = optimizer.norm_for_param_grads
            pairs = [(known.get(optimizer.get_param_id(parameter)), parameter) for parameter in parameters]
            norms += [norm for norm, parameter in pairs if norm is not None and _counts_on_this_slice(parameter, grid)]
            continue
        gradients = [part for part in optimizer.averaged_gradients[group] if not getattr(part, "_zero_padding", False)]
        norms += [
            _norm_of(gradient)
            for gradient, parameter in zip(gradients, parameters, strict=False)
            if _counts_on_this_slice(parameter, grid)
        ]
    norm = _norm_over_grid(norms, grid)
    return torch.where(norm.isfinite(), norm, -1.0).to(optimizer.device)


def _clipped(clip: Any) -> Any:
    @wraps(clip)
    def clip_fp32_gradients(engine: DeepSpeedEngine) -> None:
        limit = engine.gradient_clipping()
        engine._global_grad_norm = clip_gradients(engine.module.parameters(), limit, engine.mpu)

    return clip_fp32_gradients


def _normed(norm: Any) -> Any:
    @wraps(norm)
    def scaled_global_norm(optimizer: DeepSpeedZeroOptimizer, norm_type: int = 2) -> Any:
        return zero_gradient_norm(optimizer, optimizer.mpu)

    return scaled_global_norm


OF_PIPELINES: tuple[tuple[Patch, Make], ...] = ((patches.CLIP_FP32, _clipped),)
WITH_EXPERTS: tuple[tuple[Patch, Make], ...] = (
    (patches.CLIP_FP32, _clipped),
    (patches.ZERO_NORM, _normed),
)


def log_clipping(engine: DeepSpeedEngine) -> None:
    """Log on rank 0 that a pipeline in fp32 without ZeRO clips by another norm than DeepSpeed's own pipeline does."""
    limit, stages = engine.gradient_clipping(), engine.mpu.get_pipe_parallel_world_size()
    is_fp32 = not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization())
    if limit > 0 and stages > 1 and is_fp32:
        log_dist(
            f"ds_topo: gradient_clipping={limit} (DeepSpeed's default is {GRADIENT_CLIPPING_DEFAULT}) clips by the "
            f"norm of all {stages} pipeline stages. DeepSpeed's own pipeline without ZeRO counts the first stage "
            "alone, so losses differ from those of earlier runs after the first step that is clipped. "
            "engine.get_global_grad_norm() returns the norm; to compare runs, set grid.correct_norms = False",
            ranks=[0],
            level=logging.WARNING,
        )


# -- norms that cannot be corrected -----------------------------------------------------------------------------------


def check_norm(engine: DeepSpeedEngine) -> None:
    """Refuse optimizers of fp16 and bf16 whose own norm is wrong, or hangs, with these experts; collective.

    Raises:
        ExpertGroupError: raised on every rank of the model parallel group; names the optimizer and an alternative.
    """
    grid: MpuGrid = engine.mpu
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) or not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        return
    optimizer = type(engine.optimizer).__name__
    if engine.has_moe_layers and engine.gradient_clipping() > 0 and isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        raise ExpertGroupError(
            f"gradient_clipping={engine.gradient_clipping()} in fp16 or bf16 without ZeRO: DeepSpeed's {optimizer} "
            "leaves experts out of the norm that it clips by; use ZeRO stage 1 or 2, or gradient_clipping 0"
        )
    names = {module.expert_group_name for module in engine.module.modules() if isinstance(module, MoE)}
    gathered: list[Any] = [None] * grid.get_model_parallel_world_size()
    own = (grid.get_stage_id(), sorted(names), _has_dense_share(engine))
    dist.all_gather_object(gathered, own, group=grid.get_model_parallel_group())
    remedy = "use fp32, or ZeRO stage 1 without fp32 accumulation of gradients"
    sizes: dict[int, list[str]] = {stage: names for stage, names, _ in sorted(gathered)}
    if any(others != sizes[0] for others in sizes.values()):
        raise ExpertGroupError(
            f"pipeline stages have experts of different sizes, {sizes} (stage: sizes): DeepSpeed's {optimizer} would "
            f"hang in the first step; {remedy}, or give every stage MoE layers of the same sizes"
        )
    if any(sizes.values()) and not all(has_share for _, _, has_share in gathered):
        raise ExpertGroupError(
            f"some slices hold no tensor-parallel parameters beside experts: DeepSpeed's {optimizer} would fail in the "
            f"first step, on those ranks only; {remedy}"
        )


def _has_dense_share(engine: DeepSpeedEngine) -> bool:
    """Tell whether this rank has a parameter, not of an expert, that counts in the norm of ``BF16_Optimizer``."""
    return engine.mpu.get_slice_parallel_rank() == 0 or any(
        is_model_parallel_parameter(parameter) and not is_moe_param(parameter)
        for parameter in engine.module.parameters()
    )


# -- what counts where ------------------------------------------------------------------------------------------------


def is_copy_of_tied(parameter: nn.Parameter) -> bool:
    """Tell whether an earlier stage holds the same tied parameter and counts it."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def _counts_on_this_slice(parameter: nn.Parameter, grid: MpuGrid) -> bool:
    """Tell whether this rank's slice counts the parameter.

    Parameters of experts are shards on every slice unless marked ``tensor_model_parallel = False`` (Megatron's mark of
    replicated parameters). Any other parameter counts on the first slice only, unless it is marked as a shard.
    """
    if is_copy_of_tied(parameter):
        return False
    if not is_moe_param(parameter):
        return bool(is_model_parallel_parameter(parameter)) or grid.get_model_parallel_rank() == 0
    replicated = getattr(parameter, "tensor_model_parallel", None) is False
    sliced = any(groups.plan.expert_tensor_parallel for groups in registry.of(grid))
    return grid.get_slice_parallel_rank() == 0 if sliced and replicated else True


def _replica(parameter: nn.Parameter, grid: MpuGrid) -> int:
    """Return the index of this rank among the replicas of the parameter."""
    if is_moe_param(parameter):
        return int(deepspeed_groups._get_expert_data_parallel_rank(parameter.group_name))  # type: ignore[attr-defined]
    return dist.get_rank(grid.get_data_parallel_group())


def _norm_of(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    norm: torch.Tensor = torch.linalg.vector_norm(gradient.detach().float())
    return norm


def _norm_over_grid(norms: list[torch.Tensor], grid: MpuGrid) -> torch.Tensor:
    """Return the root of the sum of squares over all ranks, reduced over the model and then the data parallel group."""
    device = get_accelerator().current_device_name()
    total = torch.stack(norms).to(device).square().sum() if norms else torch.zeros((), device=device)
    dist.all_reduce(total, group=grid.get_model_parallel_group())
    dist.all_reduce(total, group=grid.get_data_parallel_group())
    return total.sqrt()
