"""Clip gradients by their norm over a grid.

The norm of a model must count every parameter once: one replica of each, all slices of a tensor-parallel parameter, one
slice of any other, a tied layer on one of its stages, and every expert. In fp32 without ZeRO, DeepSpeed's engine does
not keep the norm, and on stages it counts the first one alone. With experts it averages the norms of ranks that hold
different experts. ``clip_grad_norm_`` replaces it. :mod:`ds_topo.engine.optimizer_norms` corrects the norms of
DeepSpeed's optimizers.

What is not finite in a gradient that slices share makes the norm nan on all of them, also where it is so on another
slice than the first, which counts it. Otherwise one slice would take the step, and the others skip it, or would clip by
another norm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups as deepspeed_groups
from deepspeed.utils import log_dist
from torch import nn
from torch.nn.utils import get_total_norm

from ds_topo.base.marks import expert_group_name, owners
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import ExpertGroupError, abridged, listed
from ds_topo.mpu import registry
from ds_topo.process_groups.process_grid import ProcessGrid
from ds_topo.topology.axes import MODEL
from ds_topo.topology.rank_tables import gradient_axes, model_parallel_axes


class ClippedByGrid(EngineOnGrid):
    """An engine in fp32 without ZeRO that clips gradients, where DeepSpeed's norm counts the first stage alone."""

    def complete(self) -> None:
        """Log that a pipeline clips by another norm than DeepSpeed's own does."""
        super().complete()
        if self.mpu.settle_norms():
            _log_clipping(self)

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over the grid, by a few kernels, and keep it."""
        if self.mpu.settle_norms():
            self._global_grad_norm = clip_grad_norm_(self.module.parameters(), self.gradient_clipping(), self.mpu)
        else:
            super().clip_fp32_gradients()


# -- clipping ---------------------------------------------------------------------------------------------------------


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    grid: ProcessGrid,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their norm over the whole model is at most ``max_norm``; return the norm.

    It is ``torch.nn.utils.clip_grad_norm_`` for training loops on a grid, with or without FSDP2 or a
    ``GradientReducer``. The norm spans all ranks of the grid, and every parameter counts once: one replica of each,
    every slice of a parameter that is marked ``tensor_model_parallel`` or ``model_parallel``, one slice of any other,
    every expert, and every shard of a DTensor. Call it after gradients are reduced; it waits for them. Collective over
    the grid.

    Args:
        parameters: this rank's parameters, or one of them. Those without a gradient count as zero.
        max_norm: the limit.
        grid: the grid of the program; also a ``ProcessGrid``.
        norm_type: 2, any other positive number, or ``inf`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is nan or inf; otherwise scale by it, as torch does.
        foreach: as in torch.

    Raises:
        TypeError, ValueError: the grid, the limit or the type of norm is something else; or a DTensor's mesh covers a
            part of an axis.
        RuntimeError: gradients are not reduced, or are inside an optimizer of ZeRO; or the norm is not finite. If this
            happens on some ranks only, all others raise, too.

    >>> import torch, torch.distributed as dist
    >>> from ds_topo import ProcessGrid
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with ProcessGrid("data=1") as grid:
    ...     weight = torch.nn.Parameter(torch.zeros(2))
    ...     weight.grad = torch.tensor([3.0, 4.0])
    ...     clip_grad_norm_([weight], 1.0, grid), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    >>> dist.destroy_process_group()
    """
    kind, limit = _checked_arguments(max_norm, grid, norm_type)
    if isinstance(parameters, nn.Module):
        raise TypeError(f"parameters={type(parameters).__name__}(...): give model.parameters()")
    given: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    trained = [parameter for parameter in given if parameter.grad is not None]
    local = [
        _local_gradient(parameter) if hasattr(parameter.grad, "device_mesh") else parameter.grad.detach()
        for parameter in trained
    ]
    device = given[0].device if given else get_accelerator().current_device_name()
    own, failure, is_largest = torch.zeros((), device=device), None, math.isinf(kind)
    try:
        _require_reduced(given)
        counted, others = divided(zip(trained, local, strict=True), counted_here(grid))
        if kind == 2:
            own = sum_of_squares(counted, device, foreach=foreach)
        elif counted:
            own = get_total_norm(counted, kind, foreach=foreach).to(device)
            own = own if is_largest else own**kind
        own = own + zero_or_nan(others, device)
    except Exception as error:  # of any kind, because the other ranks must raise, too
        failure = error
    total, failed = sum_over_grid(own, grid, is_largest=is_largest, failed=failure is not None)
    norm = total if is_largest else total ** (1 / kind)
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError("clip_grad_norm_() failed on other ranks of the grid; their own errors say why")
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the total norm of order {kind} of the gradients on all ranks is {float(norm)}, so they cannot be "
            "clipped: skip this step, or pass error_if_nonfinite=False to scale by it anyway"
        )
    # torch divides by the reciprocal, which may differ from DeepSpeed's quotient in the last bit.
    coefficient = (norm.new_tensor(limit) / (norm + 1e-6)).clamp(max=1.0)
    for gradients in _at_once(local, foreach):  # also the shards of DTensors
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].device))
    return norm


def _checked_arguments(max_norm: float, grid: object, norm_type: float) -> tuple[float, float]:
    """Return the type of norm and the limit as numbers."""
    if not isinstance(grid, ProcessGrid):
        raise TypeError(f"grid={abridged(grid)}: pass a live grid, such as ProcessGrid('data=2,model=2')")
    numbers = []
    for name, value in (("norm_type", norm_type), ("max_norm", max_norm)):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, bool) or not number > 0:
            raise ValueError(f"{name}={abridged(value)}: give a positive number, or inf")
        numbers.append(number)
    return numbers[0], numbers[1]


def _require_reduced(parameters: list[nn.Parameter]) -> None:
    """Refuse gradients that are not reduced yet, and those that an optimizer of DeepSpeed keeps."""
    by_reducer: dict[Any, list[nn.Parameter]] = {}
    has_reducers = len(owners) > 0
    for parameter in parameters:
        if has_reducers and parameter in owners:
            by_reducer.setdefault(owners[parameter](), []).append(parameter)
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            raise RuntimeError(
                "clip_grad_norm_() on parameters of an engine with ZeRO or bf16, whose optimizer keeps the gradients: "
                'set "gradient_clipping" in the config; engine.get_global_grad_norm() returns the norm'
            )
    for reducer, owned in by_reducer.items():
        if reducer is not None:
            reducer.require_reduced(owned, "clip_grad_norm_()")


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of a DTensor's gradient, in the same memory; summed over the ranks of a partial one."""
    from torch.distributed.tensor import Replicate  # which takes half a second to import

    gradient: Any = parameter.grad
    wanted = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    if tuple(wanted) != gradient.placements:
        gradient = parameter.grad = gradient.redistribute(placements=wanted)
    found: torch.Tensor = gradient.to_local().detach()
    return found


Counts: TypeAlias = Callable[[nn.Parameter], "bool | None"]
"""Tells whether this rank adds its part of a parameter's gradient to the norm.

False if another slice or stage does, and None if another replica does, whose gradient is the same to the last bit.
"""


def counted_here(grid: ProcessGrid) -> Counts:
    """Return the function that tells which ranks add their part of a parameter's gradient to the norm."""
    on_slice, is_first_of_dense = on_this_slice(grid), dist.get_rank(grid.get_data_parallel_group()) == 0

    def counts(parameter: nn.Parameter) -> bool | None:
        if hasattr(parameter.grad, "device_mesh"):
            return _is_first_copy(parameter.grad, grid, bool(on_slice(parameter)))
        if getattr(parameter, "allreduce", True):  # not of an expert
            return on_slice(parameter) if is_first_of_dense else None
        return on_slice(parameter) if dist.get_rank(_replicas_of_expert(parameter)) == 0 else None

    return counts


def _is_first_copy(gradient: Any, grid: ProcessGrid, on_slice: bool) -> bool | None:
    """Tell whether this rank adds its shard of a DTensor, which may cover ``model`` and is then on every slice."""
    mesh, axes = gradient.device_mesh, grid.topology().axes
    ranks = set(mesh.mesh.flatten().tolist())
    covered = [axis for axis in axes if grid.get_axis_size(axis) > 1 and ranks.issuperset(grid.get_ranks(axis))]
    if sorted(ranks) != grid.get_ranks(covered):
        raise ValueError(
            f"a DTensor on the mesh of ranks {listed(sorted(ranks))}: they are not all ranks of this rank along any "
            f"axes of {grid.topology().spec!r}; build the mesh by grid.device_mesh()"
        )
    place = mesh.get_coordinate()
    copies = zip(place or (), gradient.placements, strict=True)
    is_first_copy = all(index == 0 for index, placement in copies if placement.is_replicate())
    others = [axis for axis in gradient_axes(grid.topology()) if axis not in covered]
    is_first_replica = all(grid.get_axis_rank(axis) == 0 for axis in others)
    return (MODEL in covered or on_slice) if is_first_copy and is_first_replica else None


def divided(
    pairs: Iterable[tuple[nn.Parameter, torch.Tensor]], counts: Counts
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients that this rank counts, and those that another slice or stage counts."""
    counted, others = list[torch.Tensor](), list[torch.Tensor]()
    for parameter, gradient in pairs:
        is_counted = counts(parameter)
        if is_counted is not None:
            (counted if is_counted else others).append(gradient.detach())
    return counted, others


def zero_or_nan(others: list[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """Return 0, ``[]``, or nan if an element is not finite."""
    return 0.0 * largest(others).to(device) if others else torch.zeros((), device=device)


# -- what counts where ------------------------------------------------------------------------------------------------


def counts_on_slice(parameter: nn.Parameter, is_first: bool, slices_experts: bool = False) -> bool:
    """Tell whether a rank counts a parameter in the norm, or another slice or stage does.

    A tied parameter counts on the first of its stages. Parameters of experts are shards on every slice unless experts
    are sliced and it is marked ``tensor_model_parallel = False`` (Megatron's mark of replicated parameters). Any other
    parameter counts on the first slice only, unless it is marked as a shard.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    if is_first:
        return True
    if is_moe_param(parameter):
        return not slices_experts or getattr(parameter, "tensor_model_parallel", None) is not False
    return bool(is_model_parallel_parameter(parameter))


def on_this_slice(grid: ProcessGrid) -> Counts:
    """Return the function that tells whether this rank's slice counts a parameter."""
    if grid.get_axis_rank(MODEL) == 0:
        return lambda parameter: not getattr(parameter, "ds_pipe_replicated", False)  # as counts_on_slice, but fast
    slices_experts = any(groups.plan.expert_tensor_parallel for groups in registry.of(grid))
    return lambda parameter: counts_on_slice(parameter, False, slices_experts)


def _replicas_of_expert(parameter: nn.Parameter) -> dist.ProcessGroup:
    """Return the ranks that hold the same expert."""
    name = expert_group_name(parameter)
    reducer: Any = owners[parameter]() if parameter in owners else None
    group = reducer.options.expert_groups.get(name) if reducer is not None else None
    group = group or deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP.get(name)
    if group is None:
        raise ExpertGroupError(
            f"a parameter is an expert of group {name!r}, which does not exist: call "
            "groups.create_expert_groups(grid), or pass expert_groups= to its GradientReducer"
        )
    found: dist.ProcessGroup = group
    return found


def largest(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value, ``[]``, of all gradients; infinite or nan if an element is."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return get_total_norm([gradient for gradient in dense if gradient.numel()], math.inf)


def sum_of_squares(
    gradients: list[torch.Tensor],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the sum, ``[]``, of the squares of all elements, by a few kernels, and to the last bit as DeepSpeed does.

    Sums have the type of the gradients, which are dense, unless ``dtype`` is given.
    """
    parts = _at_once(gradients, foreach)
    norms = [norm.to(device) for part in parts for norm in torch._foreach_norm(part, 2.0, dtype=dtype)]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)


def _at_once(gradients: Iterable[torch.Tensor], foreach: bool | None) -> Iterable[list[torch.Tensor]]:
    """Return lists of gradients on which one kernel may work: those of a device; or each alone."""
    if foreach is False:
        return [[gradient] for gradient in gradients]
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        on_device.setdefault(gradient.device, []).append(gradient)
    return on_device.values()


def sum_over_grid(
    own: torch.Tensor, grid: ProcessGrid, *, is_largest: bool = False, failed: bool = False
) -> tuple[torch.Tensor, bool]:
    """Return the sum, ``[]``, of the values of all ranks, or the largest one, and whether any rank has failed.

    As DeepSpeed does, sum over the data parallel group and then the model parallel one.
    """
    if grid.world_size == 1:
        return own, failed
    own = own.float()
    # The largest of some numbers and nan may be either.
    values = torch.stack([own, own.isnan().float(), torch.full_like(own, failed)])
    for axes in (gradient_axes(grid.topology()), model_parallel_axes(grid.topology())):
        group = grid.get_group(axes)
        if group.size() > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=group)
    total, nans, failures = values.unbind()
    return torch.where(nans > 0, torch.nan, total), bool(failures)


def _log_clipping(engine: EngineOnGrid) -> None:
    """Log on rank 0 that a pipeline in fp32 without ZeRO clips by another norm than DeepSpeed's own pipeline does."""
    limit, stages = engine.gradient_clipping(), engine.mpu.get_pipe_parallel_world_size()
    if engine.is_pipeline and stages > 1:
        log_dist(
            f"ds_topo: gradient_clipping={limit} (DeepSpeed's default is {GRADIENT_CLIPPING_DEFAULT}) clips by the "
            f"norm of all {stages} pipeline stages. DeepSpeed's own pipeline without ZeRO counts the first stage "
            "alone, so losses differ from those of earlier runs. To compare runs, set grid.correct_norms = False",
            ranks=[0],
            level=logging.WARNING,
        )
