"""The norm of all gradients of a model with experts: every parameter of the whole model once.

DeepSpeed averages the norms of ranks that hold different experts (fp32 without ZeRO), leaves out the experts of all
slices but the first (ZeRO), and reduces once per parameter group, which hangs where stages have unequal numbers of them
(ZeRO). Here every rank adds up what it alone is to count, and one sum over the grid does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine.grid import PipelineParallelGrid


def clip_gradients(parameters: Iterable[torch.nn.Parameter], limit: float, grid: PipelineParallelGrid) -> torch.Tensor:
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


def zero_gradient_norm(optimizer: Any, grid: PipelineParallelGrid) -> torch.Tensor:
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


def _counts_on_this_slice(parameter: torch.nn.Parameter, grid: PipelineParallelGrid) -> bool:
    """Whether this rank's replica of the model has its own share of the parameter here.

    Experts are shards on every slice unless marked ``tensor_model_parallel = False`` (Megatron's mark of what slices
    replicate); everything else counts on the first slice alone unless marked as a shard.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    if not is_moe_param(parameter):
        return bool(is_model_parallel_parameter(parameter)) or grid.get_model_parallel_rank() == 0
    replicated = getattr(parameter, "tensor_model_parallel", None) is False
    sliced = deepspeed_groups._get_expert_model_parallel_world_size() > 1
    return grid.get_slice_parallel_rank() == 0 if sliced and replicated else True


def _replica(parameter: torch.nn.Parameter, grid: PipelineParallelGrid) -> int:
    """Which of the replicas of the parameter this rank holds."""
    if is_moe_param(parameter):
        return int(deepspeed_groups._get_expert_data_parallel_rank(parameter.group_name))  # type: ignore[attr-defined]
    return dist.get_rank(grid.get_data_parallel_group())


def _norm_of(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    norm: torch.Tensor = torch.linalg.vector_norm(gradient.detach().float())
    return norm


def _norm_over_grid(norms: list[torch.Tensor], grid: PipelineParallelGrid) -> torch.Tensor:
    """Root of the sum of squares over all ranks, in groups that exist already: model parallel x data parallel."""
    device = get_accelerator().current_device_name()
    total = torch.stack(norms).to(device).square().sum() if norms else torch.zeros((), device=device)
    dist.all_reduce(total, group=grid.get_model_parallel_group())
    dist.all_reduce(total, group=grid.get_data_parallel_group())
    return total.sqrt()
