"""Correct the gradient norm of each of DeepSpeed's optimizers; :mod:`ds_topo.engine.norms` says what a norm counts.

DeepSpeed's optimizers deviate from that:

    ZeRO 1 and 2             The norm omits the experts of all slices but the first. It reduces once per parameter
                             group, which hangs if stages have different numbers of groups. ``zero_gradient_norm``
                             replaces it in both cases.
    fp16, bf16 without ZeRO  ``FP16_UnfusedOptimizer`` takes the norm of gradients, which lack the marks of their
                             parameters, and omits experts. ``unfused_gradient_norm`` replaces it on stages or slices,
                             and with experts. It is refused if stages have different numbers of groups.
                             ``FP16_Optimizer`` counts an expert's replicated parameters once per slice;
                             ``fused_gradient_norm`` replaces it with experts. It hangs if stages have experts of
                             different sizes, which is refused.
    bf16, gradients in fp32  ``BF16_Optimizer`` counts an expert's replicated parameters once per slice, and hangs if
                             stages have experts of different sizes. ``bf16_gradient_norm`` replaces it with experts,
                             ``partition_norm`` with a reducer. It fails on a slice without any parameter to count;
                             without experts we add a zero there.
    ZeRO 3                   What is not finite on a later slice alone does not reach the norm; it is added.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import CheckOverflow, is_model_parallel_parameter
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import get_norm_dtype
from torch import nn

from ds_topo.base.classes import Mixin, adopt, stock_class
from ds_topo.engine.norms import (
    Counts,
    counted_here,
    divided,
    largest,
    on_this_slice,
    sum_of_squares,
    sum_over_grid,
    zero_or_nan,
)
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import EngineOptionError, ExpertGroupError
from ds_topo.mpu import MpuGrid, registry
from ds_topo.process_groups.creation import gathered


class NormsOfOptimizer(EngineOnGrid):
    """An engine with one of DeepSpeed's optimizers, which count experts and slices wrongly."""

    def complete(self) -> None:
        """Refuse norms that cannot be corrected, and correct the others."""
        super().complete()
        grid, optimizer, corrects = self.mpu, self.optimizer, self.mpu.settle_norms()
        has_experts = bool(registry.of(grid))
        counts_differ = self.is_pipeline and not has_experts and _group_counts_differ(self)
        if has_experts:
            _check_norm(self)
        mixin = self.give_optimizer(NormsOfZero, NormsOfBF16, NormsOfFused, NormsOfUnfused, NormsOfZero3)
        if mixin is None:
            return
        is_corrected = corrects and has_experts
        if mixin is NormsOfZero:
            is_offloaded = stock_class(optimizer) is DeepSpeedZeroOptimizer and optimizer.cpu_offload
            is_offloaded = is_offloaded and not optimizer.zenflow
            has_slices = grid.get_slice_parallel_world_size() > 1  # of which each looks at all
            is_corrected = is_corrected or counts_differ or bool(is_offloaded and has_slices)
        elif mixin is NormsOfUnfused:
            is_corrected = corrects and (has_experts or grid.get_model_parallel_world_size() > 1)
        elif mixin is NormsOfBF16:
            is_corrected = corrects
        optimizer.corrected_norm = CorrectedNorm(is_corrected, has_experts)
        if mixin in (NormsOfFused, NormsOfUnfused):
            grid.on_destroy(adopt(optimizer.overflow_checker, FewKernels))


class CorrectedNorm(NamedTuple):
    """The corrections that an optimizer's norm needs."""

    is_needed: bool
    """True if the optimizer's own norm would be wrong."""
    has_experts: bool


class NormsOfZero(Mixin, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer``, of ZeRO 1 and 2."""

    mixin_state = "corrected_norm"
    corrected_norm: CorrectedNorm
    mpu: MpuGrid

    def has_overflow_partitioned_grads_serial(self) -> torch.Tensor:
        """Look at all gradients by a few kernels: DeepSpeed runs 13 operations for each."""
        gradients = (part for group in range(len(self.bit16_groups)) for part in self.averaged_gradients[group])
        found = overflows(part for part in gradients if part is not None)
        return found.reshape(1).to(get_accelerator().current_device_name())

    def scaled_global_norm(self, norm_type: int = 2) -> torch.Tensor:
        """Return the norm over the grid.

        DeepSpeed's counts the experts of the first slice only, and hangs where stages differ in parameter groups.
        """
        if self.corrected_norm.is_needed:
            return zero_gradient_norm(self, self.mpu)
        norm: torch.Tensor = super().scaled_global_norm(norm_type)
        return norm

    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: int = 2) -> torch.Tensor:
        """Return the norm of a group, or -1 for inf and nan, to the last bit as DeepSpeed, but by a few kernels.

        DeepSpeed starts several for each parameter. It asks for norms of type 2 only. Its own rule for experts, which
        is in force with ``correct_norms = False``, counts those of the first slice.
        """
        if self.corrected_norm.has_experts:
            norm: torch.Tensor = super().get_grad_norm_direct(gradients, params, norm_type)
            return norm
        real = (part for part in gradients if not getattr(part, "_zero_padding", False))
        counted, others = divided(zip(params, real, strict=False), on_this_slice(self.mpu))
        device = get_accelerator().current_device_name()
        total = sum_of_squares(counted, device, get_norm_dtype()).float() + zero_or_nan(others, device).float()
        for group in (self.dp_process_group, self.mpu.get_model_parallel_group()):
            if group.size() > 1:
                dist.all_reduce(total, group=group)
        return torch.where(total.isfinite(), total.sqrt(), -1.0)


class NormsOfBF16(Mixin, BF16_Optimizer):  # type: ignore[misc]
    """``BF16_Optimizer``, which accumulates gradients of bf16 in fp32."""

    mixin_state = "corrected_norm"
    corrected_norm: CorrectedNorm
    mpu: MpuGrid

    def get_grads_for_norm(self, for_clipping: bool = False) -> Any:
        """Return our norm as the only gradient with experts; without them, a zero if no gradient counts."""
        if for_clipping or not self.corrected_norm.is_needed:
            return super().get_grads_for_norm(for_clipping)
        if self.corrected_norm.has_experts:
            return norm_as_gradients(bf16_gradient_norm(self, self.mpu), self.mpu)
        counted, of_experts = super().get_grads_for_norm(for_clipping)
        device = get_accelerator().current_device_name()
        if others := divided(_pairs_of_bf16(self), on_this_slice(self.mpu))[1]:
            counted.append(zero_or_nan(others, device))
        return counted or [torch.zeros(1, device=device)], of_experts


class NormsOfFused(Mixin, FP16_Optimizer):  # type: ignore[misc]
    """``FP16_Optimizer``, of fp16 and bf16 without ZeRO with a fused optimizer."""

    mixin_state = "corrected_norm"
    corrected_norm: CorrectedNorm
    mpu: MpuGrid

    def unscale_and_clip_grads(self, grad_groups_flat: list[torch.Tensor], total_norm: Any, *options: Any) -> Any:
        """Clip by the norm over the grid: DeepSpeed's counts what slices of an expert replicate on each slice."""
        if self.corrected_norm.is_needed:
            total_norm = float(fused_gradient_norm(self, grad_groups_flat, self.mpu))
            self._global_grad_norm = total_norm / self.loss_scale_config.cur_scale
        return super().unscale_and_clip_grads(grad_groups_flat, total_norm, *options)


class NormsOfUnfused(Mixin, FP16_UnfusedOptimizer):  # type: ignore[misc]
    """``FP16_UnfusedOptimizer``, of fp16 and bf16 without ZeRO."""

    mixin_state = "corrected_norm"
    corrected_norm: CorrectedNorm
    mpu: MpuGrid

    def unscale_and_clip_grads(self, total_norm: Any, apply_scale: bool = True) -> Any:
        """Clip by the norm over the grid, on stages or slices and with experts."""
        if self.corrected_norm.is_needed:
            total_norm = self._global_grad_norm = float(unfused_gradient_norm(self, self.mpu))
        return super().unscale_and_clip_grads(total_norm, apply_scale)


class FewKernels(Mixin, CheckOverflow):  # type: ignore[misc]
    """``CheckOverflow`` of an optimizer of fp16 or bf16 without ZeRO."""

    def has_overflow_serial(self, params: list[nn.Parameter]) -> bool:
        """Look at all gradients by a few kernels: DeepSpeed runs 13 operations for each, and waits for the device."""
        return bool(overflows(parameter.grad for parameter in params if parameter.grad is not None))


class NormsOfZero3(Mixin, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer_Stage3``."""

    mixin_state = "corrected_norm"

    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: int = 2) -> torch.Tensor:
        """Look at what later slices do not count, too: a nan there alone would not reach the norm."""
        if self.model_parallel_rank > 0:
            _, others = divided(zip(params, gradients, strict=True), is_model_parallel_parameter)
            gradients = [*gradients, zero_or_nan(others, gradients[0].device)]
            params = [*params, _Counted(params[0])]
        norm: torch.Tensor = super().get_grad_norm_direct(gradients, params, norm_type)
        return norm

    def complete_grad_norm_calculation_for_cpu_offload(self, params: Any) -> torch.Tensor:
        """Count all parameters on later slices, too, if an uncounted one has a norm that is not finite."""
        if self.model_parallel_rank > 0:
            norms, others = self.norm_for_param_grads, []  # those of this rank's partitions
            for number in (self.get_param_id(each) for each in params if not is_model_parallel_parameter(each)):
                others += [torch.as_tensor(norms[number]).float()] if number in norms else []
            params = params if largest(others).isfinite() else [*map(_Counted, params)]
        norm: torch.Tensor = super().complete_grad_norm_calculation_for_cpu_offload(params)
        return norm


def norm_as_gradients(norm: torch.Tensor, grid: MpuGrid) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    """Return gradients from which ``BF16_Optimizer`` computes this norm: it sums squares over stages and slices."""
    own = norm if grid.get_model_parallel_rank() == 0 else torch.zeros_like(norm)
    return [own.reshape(1)], {}


class _Counted:
    """Stand for a parameter in DeepSpeed's norm, which then counts it on every slice."""

    model_parallel = True

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)


def zero_gradient_norm(optimizer: DeepSpeedZeroOptimizer, grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of gradients that ZeRO-1 or 2 has partitioned; -1 for inf or nan, as DeepSpeed expects.

    Collective over the grid. ``NormsOfZero.scaled_global_norm`` returns it in place of DeepSpeed's.
    """
    owned: list[tuple[nn.Parameter, torch.Tensor]] = []
    for group, parameters in enumerate(optimizer.params_in_partition):
        if optimizer.cpu_offload:
            known = optimizer.norm_for_param_grads
            pairs = [(parameter, known.get(optimizer.get_param_id(parameter))) for parameter in parameters]
            owned += [(parameter, torch.as_tensor(norm).float()) for parameter, norm in pairs if norm is not None]
            continue
        gradients = [part for part in optimizer.averaged_gradients[group] if not getattr(part, "_zero_padding", False)]
        if group in getattr(optimizer, "groups_lacking_loss_scale", ()):  # updates of Muon, which have no loss scale
            gradients = [part.float() * optimizer.loss_scale for part in gradients]
        owned += zip(parameters, gradients, strict=False)
    norm = partition_norm(owned, grid)
    return torch.where(norm.isfinite(), norm, -1.0).to(optimizer.device)


def partition_norm(owned: Iterable[tuple[nn.Parameter, torch.Tensor]], grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of gradients of which each rank has its own partition; collective over the grid."""
    is_copy = grid.get_copy_rank() > 0  # the first copy of a partition counts it; experts have no copies
    counts = on_this_slice(grid)
    return _total_norm(
        owned, lambda parameter: None if is_copy and not is_moe_param(parameter) else counts(parameter), grid
    )


def bf16_gradient_norm(optimizer: BF16_Optimizer, grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of the whole gradients that ``BF16_Optimizer`` holds; collective over the grid."""
    return _total_norm(_pairs_of_bf16(optimizer), counted_here(grid), grid)


def _pairs_of_bf16(optimizer: BF16_Optimizer) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
    return zip(chain(*optimizer.bf16_groups), chain(*optimizer.fp32_groups_gradients), strict=True)


def fused_gradient_norm(optimizer: FP16_Optimizer, flat_gradients: list[torch.Tensor], grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of the flat gradients of ``FP16_Optimizer``, one for each group; collective."""
    pairs: list[tuple[nn.Parameter, torch.Tensor]] = []
    for parameters, flat in zip(optimizer.fp16_groups, flat_gradients, strict=True):
        pairs += zip(parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True)
    return _total_norm(pairs, counted_here(grid), grid)


def unfused_gradient_norm(optimizer: FP16_UnfusedOptimizer, grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of the gradients of an engine in fp16 or bf16 without ZeRO.

    Collective over the grid. It replaces the norm that ``FP16_UnfusedOptimizer`` clips by.
    """
    parameters = chain.from_iterable(optimizer.fp16_groups)
    pairs = ((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
    return _total_norm(pairs, counted_here(grid), grid)


def _group_counts_differ(engine: EngineOnGrid) -> bool:
    """Tell whether the stages of a pipeline have different numbers of parameter groups; collective.

    DeepSpeed removes the groups of which a stage has no parameter, and reduces the norm once for each that remains.
    Refuse an optimizer whose norm would hang then.
    """
    counts = gathered(len(getattr(engine.optimizer, "param_groups", ())), engine.mpu.get_pipe_parallel_group())
    are_different = len({*counts}) > 1
    if are_different and isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        raise EngineOptionError(
            f"the stages have parameters in {counts} groups of the optimizer: DeepSpeed's FP16_UnfusedOptimizer would "
            "hang in the first step; use ZeRO stage 1, or give every stage a parameter of each group"
        )
    return are_different


def _check_norm(engine: EngineOnGrid) -> None:
    """Refuse optimizers of fp16 and bf16 whose own norm is wrong, or hangs, with these experts; collective."""
    grid: MpuGrid = engine.mpu
    corrected = (DeepSpeedZeroOptimizer, FP16_UnfusedOptimizer, *([BF16_Optimizer] if grid.correct_norms else []))
    if isinstance(engine.optimizer, corrected) or not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        return
    optimizer = stock_class(engine.optimizer).__name__
    names = {module.expert_group_name for module in engine.module.modules() if isinstance(module, MoE)}
    has_dense_share = grid.get_slice_parallel_rank() == 0 or any(
        is_model_parallel_parameter(parameter) and not is_moe_param(parameter)
        for parameter in engine.module.parameters()
    )
    own = (grid.get_stage_id(), sorted(names), has_dense_share)
    everyone = gathered(own, grid.get_model_parallel_group())
    remedy = "use fp32, or ZeRO stage 1 without fp32 accumulation of gradients"
    sizes: dict[int, list[str]] = {stage: names for stage, names, _ in sorted(everyone)}
    if any(others != sizes[0] for others in sizes.values()):
        raise ExpertGroupError(
            f"pipeline stages have experts of different sizes, {sizes} (stage: sizes): DeepSpeed's {optimizer} would "
            f"hang in the first step; {remedy}, or give every stage MoE layers of the same sizes"
        )
    if any(sizes.values()) and not all(has_share for _, _, has_share in everyone):
        raise ExpertGroupError(
            f"some slices hold no tensor-parallel parameters beside experts: DeepSpeed's {optimizer} would fail in the "
            f"first step, on those ranks only; {remedy}"
        )


def overflows(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Tell, as ``[]``, whether an element of any gradient is infinite or nan, by a few kernels for all gradients."""
    return ~largest(gradients).isfinite()


def _total_norm(pairs: Iterable[tuple[nn.Parameter, torch.Tensor]], counts: Counts, grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of all gradients of the model, of which this rank counts some."""
    device, (counted, others) = get_accelerator().current_device_name(), divided(pairs, counts)
    square = sum_of_squares(counted, device, torch.float32) + zero_or_nan(others, device)
    return sum_over_grid(square, grid)[0].sqrt()
