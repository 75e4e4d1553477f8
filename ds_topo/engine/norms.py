"""Everything about norms of gradients: which parameters count where, in each of DeepSpeed's optimizers.

The norm of a model counts every parameter once: one replica of each, every slice of what is tensor parallel, one slice
of what is not, a tied layer on one of its stages, every expert. What DeepSpeed does, and what is done about it:

    fp32 without ZeRO        counts what is marked ``model_parallel``, and everything on model parallel rank 0. In a
                             pipeline ``count_each_parameter_once`` marks what each rank is to add. With experts it
                             averages the norms of ranks that hold different ones: ``clip_gradients`` in its place.
    ZeRO 1 and 2             leave out experts of all slices but the first, and reduce once per parameter group, which
                             hangs where stages have unequal numbers of them: ``zero_gradient_norm`` in their place.
    fp16, bf16 without ZeRO  ``FP16_UnfusedOptimizer`` takes the norm of gradients, which carry no marks: they get their
                             parameters'. It leaves experts out, ``BF16_Optimizer`` hangs where ranks differ in the
                             experts that they have: ``check_norm`` refuses both. Without any parameter that counts on
                             a slice ``BF16_Optimizer`` fails: such ranks add a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, is_moe_param_group
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import bwc_tensor_model_parallel_rank, is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from ds_topo.engine import changes
from ds_topo.engine.expert_registry import registry
from ds_topo.engine.mpu import MpuGrid
from ds_topo.errors import ExpertGroupError
from ds_topo.ledger import Change, Make
from ds_topo.partition.gradients import PartitionedGradients
from ds_topo.process_groups.creation import ProcessGroup

# -- marks ------------------------------------------------------------------------------------------------------------


def mark_tensor_parallel_gradients(module: nn.Module) -> Callable[[], None]:
    """Let each gradient carry its parameter's ``model_parallel`` mark, where the ``mpu`` is not one of our grids.

    For fp16 and bf16 without ZeRO and with an optimizer that is not fused, DeepSpeed's ``FP16_UnfusedOptimizer`` takes
    the norm of gradients, which unlike their parameters have no mark: the shards of all tensor-parallel ranks but the
    first are then missing from the norm, and clipping is too weak. An engine whose mpu is a ``PipelineParallelGrid``
    has this mended already; elsewhere call it once before ``deepspeed.initialize``.

    Args:
        module: a module whose tensor-parallel parameters have ``tensor_model_parallel`` or ``model_parallel`` set, as
            Megatron's and DeepSpeed's have.

    Returns:
        A function that takes the marks' hooks back.
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

    Without ZeRO, DeepSpeed's ``clip_grad_norm_`` takes, beside everything on model parallel rank 0, what is marked
    ``model_parallel``: unmarked, all later stages are missing from the norm. Every parameter must count once over
    pipe x model: a tensor-parallel shard on each slice, a replicated one on slice 0, a tied one on its first stage.
    """
    first_slice = grid.get_slice_parallel_rank() == 0
    for parameter in module.parameters():
        counts = not _is_copy_of_tied(parameter) and (first_slice or bool(is_model_parallel_parameter(parameter)))
        parameter.model_parallel = counts  # type: ignore[attr-defined]
        if _is_copy_of_tied(parameter):
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


def _with_marks(step: Any) -> Any:
    @wraps(step)
    def marked_step(optimizer: FP16_UnfusedOptimizer, closure: object = None) -> Any:
        if isinstance(optimizer.mpu, MpuGrid):
            for parameters in optimizer.fp16_groups:
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.model_parallel = bool(is_model_parallel_parameter(parameter))
                        parameter.grad.ds_pipe_replicated = _is_copy_of_tied(parameter)
        return step(optimizer, closure)

    return marked_step


def _with_a_zero(get_gradients: Any) -> Any:
    @wraps(get_gradients)
    def gradients_for_norm(optimizer: BF16_Optimizer, for_clipping: bool = False) -> Any:
        found = get_gradients(optimizer, for_clipping)
        if for_clipping or not isinstance(optimizer.mpu, MpuGrid):
            return found
        counted, of_experts = found
        return counted or [torch.zeros(1, device=get_accelerator().current_device_name())], of_experts

    return gradients_for_norm


WHILE_A_GRID_EXISTS: tuple[tuple[Change, Make], ...] = (
    (changes.UNFUSED_STEP, _with_marks),
    (changes.BF16_GRADIENTS, _with_a_zero),
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
    """The norm, ``[]``, of gradients that ZeRO-1 or 2 has partitioned; -1 where DeepSpeed expects that: inf or nan.

    Collective over the grid. In place of ``DeepSpeedZeroOptimizer.scaled_global_norm``.
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
        if registry.of(engine.mpu):
            limit = engine.gradient_clipping()
            engine._global_grad_norm = clip_gradients(engine.module.parameters(), limit, engine.mpu)
        else:
            clip(engine)

    return clip_fp32_gradients


def _normed(norm: Any) -> Any:
    @wraps(norm)
    def scaled_global_norm(optimizer: DeepSpeedZeroOptimizer, norm_type: int = 2) -> Any:
        if registry.of(optimizer.mpu):
            return zero_gradient_norm(optimizer, optimizer.mpu)
        return norm(optimizer, norm_type)

    return scaled_global_norm


WHILE_EXPERTS_EXIST: tuple[tuple[Change, Make], ...] = (
    (changes.CLIP_FP32, _clipped),
    (changes.ZERO_NORM, _normed),
)


# -- norms of partitions ----------------------------------------------------------------------------------------------


class PartitionOfGradients(Protocol):
    """What a rank owns of one flat tensor of gradients."""

    group: ProcessGroup
    gradients: PartitionedGradients

    @property
    def owned(self) -> list[nn.Parameter]:
        """The parameters behind the fragments."""
        ...

    def fragments_of(self, partition: torch.Tensor) -> list[torch.Tensor]:
        """Parts of single parameters."""
        ...


def partitioned_norms(optimizer: BF16_Optimizer, groups: Sequence[PartitionOfGradients]) -> Callable[..., Any]:
    """In place of ``BF16_Optimizer.get_grads_for_norm``, which expects whole gradients on every rank.

    It hands out the norm over the ranks that share them, as the only gradient there is: the norm of that is the same.
    Collective over these ranks.
    """

    def gradients_for_norm(for_clipping: bool = False) -> Any:
        if for_clipping:
            return [group.gradients.partition for group in groups]
        first_slice = optimizer.mpu is None or bwc_tensor_model_parallel_rank(mpu=optimizer.mpu) == 0
        dense: list[torch.Tensor] = []
        of_experts: dict[str, list[torch.Tensor]] = {}
        for index, group in enumerate(groups):
            fragments = group.fragments_of(group.gradients.partition)
            counted = [
                fragment
                for fragment, parameter in zip(fragments, group.owned, strict=True)
                if not _is_copy_of_tied(parameter)
                and (first_slice or is_model_parallel_parameter(parameter) or is_moe_param(parameter))
            ]
            square = _sum_of_squares(counted, group.gradients.partition.device)
            dist.all_reduce(square, group=group.group)
            settings = optimizer.optimizer.param_groups[index]
            kind = of_experts.setdefault(settings["name"], []) if is_moe_param_group(settings) else dense
            kind.append(square.sqrt().reshape(1))
        return dense or [torch.zeros(1, device=get_accelerator().current_device_name())], of_experts

    return gradients_for_norm


def _sum_of_squares(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    return torch.stack([_norm_of(tensor) for tensor in tensors]).square().sum()


# -- norms that cannot be mended --------------------------------------------------------------------------------------


def check_norm(engine: DeepSpeedEngine) -> None:
    """Refuse optimizers of fp16 and bf16 whose own norm is wrong, or hangs, with these experts; collective.

    Raises:
        ExpertGroupError: on every rank of the model parallel group; names the optimizer and what to use.
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
            f"first step, on those ranks alone; {remedy}"
        )


def _has_dense_share(engine: DeepSpeedEngine) -> bool:
    """Whether anything but experts on this rank counts in the norm of DeepSpeed's BF16_Optimizer."""
    return engine.mpu.get_slice_parallel_rank() == 0 or any(
        is_model_parallel_parameter(parameter) and not is_moe_param(parameter)
        for parameter in engine.module.parameters()
    )


# -- what counts where ------------------------------------------------------------------------------------------------


def _is_copy_of_tied(parameter: nn.Parameter) -> bool:
    """Whether an earlier stage has the same parameter, and counts it."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def _counts_on_this_slice(parameter: nn.Parameter, grid: MpuGrid) -> bool:
    """Whether this rank's replica of the model has its own share of the parameter here.

    Experts are shards on every slice unless marked ``tensor_model_parallel = False`` (Megatron's mark of what slices
    replicate); everything else counts on the first slice alone unless marked as a shard.
    """
    if _is_copy_of_tied(parameter):
        return False
    if not is_moe_param(parameter):
        return bool(is_model_parallel_parameter(parameter)) or grid.get_model_parallel_rank() == 0
    replicated = getattr(parameter, "tensor_model_parallel", None) is False
    sliced = any(groups.plan.expert_tensor_parallel for groups in registry.of(grid))
    return grid.get_slice_parallel_rank() == 0 if sliced and replicated else True


def _replica(parameter: nn.Parameter, grid: MpuGrid) -> int:
    """Which of the replicas of the parameter this rank holds."""
    if is_moe_param(parameter):
        return int(deepspeed_groups._get_expert_data_parallel_rank(parameter.group_name))  # type: ignore[attr-defined]
    return dist.get_rank(grid.get_data_parallel_group())


def _norm_of(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    norm: torch.Tensor = torch.linalg.vector_norm(gradient.detach().float())
    return norm


def _norm_over_grid(norms: list[torch.Tensor], grid: MpuGrid) -> torch.Tensor:
    """Root of the sum of squares over all ranks, in groups that exist already: model parallel x data parallel."""
    device = get_accelerator().current_device_name()
    total = torch.stack(norms).to(device).square().sum() if norms else torch.zeros((), device=device)
    dist.all_reduce(total, group=grid.get_model_parallel_group())
    dist.all_reduce(total, group=grid.get_data_parallel_group())
    return total.sqrt()
