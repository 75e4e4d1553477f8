"""Clip gradients by their norm over a grid, and correct that norm for each of DeepSpeed's optimizers.

The norm of a model must count every parameter once: one replica of each, all slices of a tensor-parallel parameter, one
slice of any other, a tied layer on one of its stages, and every expert. DeepSpeed's optimizers deviate from that:

    fp32 without ZeRO        The engine does not keep the norm, and on stages it counts the first one alone. With
                             experts it averages the norms of ranks that hold different experts. Our
                             ``clip_grad_norm_`` replaces it.
    ZeRO 1 and 2             The norm omits the experts of all slices but the first. It reduces once per parameter
                             group, which hangs if stages have different numbers of groups. ``zero_gradient_norm``
                             replaces it in both cases.
    fp16, bf16 without ZeRO  ``FP16_UnfusedOptimizer`` takes the norm of gradients, which lack the marks of their
                             parameters, and omits experts. ``unfused_gradient_norm`` replaces it on stages or slices,
                             and with experts. ``group_counts_differ`` refuses it if stages have different numbers of
                             groups. ``FP16_Optimizer`` counts an expert's replicated parameters once per slice;
                             ``fused_gradient_norm`` replaces it with experts. It hangs if stages have experts of
                             different sizes, which ``check_norm`` refuses.
    bf16, gradients in fp32  ``BF16_Optimizer`` counts an expert's replicated parameters once per slice, and hangs if
                             stages have experts of different sizes. ``bf16_gradient_norm`` replaces it with experts,
                             ``partition_norm`` with a reducer. It fails on a slice without any parameter to count;
                             without experts we add a zero there.

What is not finite in a gradient that slices share makes the norm nan on all of them, also where it is so on another
slice than the first, which counts it: ``with_uncounted`` does this at ZeRO 3. Otherwise one slice would take the step,
and the others skip it, or would clip by another norm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups
from deepspeed.utils import log_dist
from torch import nn
from torch.nn.utils import get_total_norm

from ds_topo.base.classes import stock_class
from ds_topo.errors import EngineOptionError, ExpertGroupError, abridged, listed
from ds_topo.mpu import MpuGrid, registry
from ds_topo.process_groups.creation import gathered
from ds_topo.process_groups.process_grid import ProcessGrid
from ds_topo.reduction.parameters import expert_group_name, owners
from ds_topo.topology.axes import MODEL
from ds_topo.topology.rank_tables import gradient_axes, model_parallel_axes

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
    handles = ExitStack()
    for parameter in module.parameters():
        if parameter.requires_grad and is_model_parallel_parameter(parameter):
            handles.callback(parameter.register_post_accumulate_grad_hook(_mark).remove)
    return handles.close


def _mark(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:  # ZeRO has taken it already
        parameter.grad.model_parallel = True  # type: ignore[attr-defined]


def norm_as_gradients(norm: torch.Tensor, grid: MpuGrid) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    """Return gradients from which ``BF16_Optimizer`` computes this norm: it sums squares over stages and slices."""
    own = norm if grid.get_model_parallel_rank() == 0 else torch.zeros_like(norm)
    return [own.reshape(1)], {}


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
        counted, others = _divided(zip(trained, local, strict=True), _counted_here(grid))
        if kind == 2:
            own = sum_of_squares(counted, device, foreach=foreach)
        elif counted:
            own = get_total_norm(counted, kind, foreach=foreach).to(device)
            own = own if is_largest else own**kind
        own = own + _zero_or_nan(others, device)
    except Exception as error:  # of any kind, because the other ranks must raise, too
        failure = error
    total, failed = _sum_over_grid(own, grid, is_largest=is_largest, failed=failure is not None)
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


def _counted_here(grid: ProcessGrid) -> Counts:
    """Return the function that tells which ranks add their part of a parameter's gradient to the norm."""
    on_slice, is_first_of_dense = _on_this_slice(grid), dist.get_rank(grid.get_data_parallel_group()) == 0

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


def _divided(
    pairs: Iterable[tuple[nn.Parameter, torch.Tensor]], counts: Counts
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients that this rank counts, and those that another slice or stage counts."""
    counted, others = list[torch.Tensor](), list[torch.Tensor]()
    for parameter, gradient in pairs:
        is_counted = counts(parameter)
        if is_counted is not None:
            (counted if is_counted else others).append(gradient.detach())
    return counted, others


def _zero_or_nan(others: list[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """Return 0, ``[]``, or nan if an element is not finite."""
    return 0.0 * _largest(others).to(device) if others else torch.zeros((), device=device)


def with_uncounted(
    gradients: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]
) -> tuple[Sequence[torch.Tensor], Sequence[nn.Parameter]]:
    """Add a gradient for DeepSpeed's norm of ZeRO 3 on later slices: 0, or nan if an uncounted one is not finite."""
    _, others = _divided(zip(parameters, gradients, strict=True), is_model_parallel_parameter)
    extra = _zero_or_nan(others, gradients[0].device)
    return [*gradients, extra], [*parameters, cast("Any", _Counted(parameters[0]))]


def counting_infinities(
    parameters: Sequence[nn.Parameter], norms: Mapping[Any, Any], number_of: Callable[[Any], Any]
) -> Sequence[nn.Parameter]:
    """Return the parameters for DeepSpeed's norm of ZeRO 3 with an offloaded optimizer on later slices.

    All of them count if the norm of an uncounted one is not finite. ``norms`` has those of this rank's partitions.
    """
    uncounted = [number_of(each) for each in parameters if not is_model_parallel_parameter(each)]
    others = [torch.as_tensor(norms[number]).float() for number in uncounted if number in norms]
    return parameters if _largest(others).isfinite() else [cast("Any", _Counted(each)) for each in parameters]


class _Counted:
    """Stand for a parameter in DeepSpeed's norm, which then counts it on every slice."""

    model_parallel = True

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)


def square_of_partition(
    gradients: Iterable[torch.Tensor], parameters: Iterable[nn.Parameter], grid: MpuGrid, dtype: torch.dtype
) -> torch.Tensor:
    """Return the sum, ``[]``, of the squares of this rank's partition of a group of ZeRO 1 or 2.

    Args:
        gradients: those of a partition, maybe with DeepSpeed's padding.
        parameters: their parameters.
        grid: the engine's grid.
        dtype: the type of the sums.
    """
    real = (part for part in gradients if not getattr(part, "_zero_padding", False))
    counted, others = _divided(zip(parameters, real, strict=False), _on_this_slice(grid))
    device = get_accelerator().current_device_name()
    return sum_of_squares(counted, device, dtype).float() + _zero_or_nan(others, device).float()


# -- norms with experts -----------------------------------------------------------------------------------------------


def zero_gradient_norm(optimizer: DeepSpeedZeroOptimizer, grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of gradients that ZeRO-1 or 2 has partitioned; -1 for inf or nan, as DeepSpeed expects.

    Collective over the grid. ``ZeroOnGrid.scaled_global_norm`` returns it in place of DeepSpeed's.
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
    """Return the norm, ``[]``, of gradients of which each rank has its own partition; collective over the grid.

    Args:
        owned: this rank's parts of gradients, or their norms, with the parameters.
        grid: the engine's grid.
    """
    is_copy = grid.get_copy_rank() > 0  # the first copy of a partition counts it; experts have no copies
    counts = _on_this_slice(grid)
    return _total_norm(
        owned, lambda parameter: None if is_copy and not is_moe_param(parameter) else counts(parameter), grid
    )


def bf16_gradient_norm(optimizer: BF16_Optimizer, grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of the whole gradients that ``BF16_Optimizer`` holds; collective over the grid."""
    pairs = zip(
        chain.from_iterable(optimizer.bf16_groups), chain.from_iterable(optimizer.fp32_groups_gradients), strict=True
    )
    return _total_norm(pairs, _counted_here(grid), grid)


def bf16_uncounted(optimizer: BF16_Optimizer, grid: MpuGrid) -> list[torch.Tensor]:
    """Return a gradient to add to those that ``BF16_Optimizer`` counts: 0, or nan if another one is not finite."""
    pairs = zip(
        chain.from_iterable(optimizer.bf16_groups), chain.from_iterable(optimizer.fp32_groups_gradients), strict=True
    )
    _, others = _divided(pairs, _on_this_slice(grid))
    return [_zero_or_nan(others, get_accelerator().current_device_name())] if others else []


def fused_gradient_norm(optimizer: FP16_Optimizer, flat_gradients: list[torch.Tensor], grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of the flat gradients of ``FP16_Optimizer``, one for each group; collective."""
    pairs: list[tuple[nn.Parameter, torch.Tensor]] = []
    for parameters, flat in zip(optimizer.fp16_groups, flat_gradients, strict=True):
        pairs += zip(parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True)
    return _total_norm(pairs, _counted_here(grid), grid)


def unfused_gradient_norm(optimizer: FP16_UnfusedOptimizer, grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of the gradients of an engine in fp16 or bf16 without ZeRO.

    Collective over the grid. It replaces the norm that ``FP16_UnfusedOptimizer`` clips by.
    """
    parameters = chain.from_iterable(optimizer.fp16_groups)
    pairs = ((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
    return _total_norm(pairs, _counted_here(grid), grid)


def group_counts_differ(engine: DeepSpeedEngine) -> bool:
    """Tell whether the stages of a pipeline have different numbers of parameter groups; collective.

    DeepSpeed removes the groups of which a stage has no parameter, and reduces the norm once for each that remains.

    Raises:
        EngineOptionError: raised on every rank; this optimizer's norm would hang in the first step.
    """
    counts = gathered(len(getattr(engine.optimizer, "param_groups", ())), engine.mpu.get_pipe_parallel_group())
    are_different = len({*counts}) > 1
    if are_different and isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        raise EngineOptionError(
            f"the stages have parameters in {counts} groups of the optimizer: DeepSpeed's FP16_UnfusedOptimizer would "
            "hang in the first step; use ZeRO stage 1, or give every stage a parameter of each group"
        )
    return are_different


def log_clipping(engine: PipelineEngine) -> None:
    """Log on rank 0 that a pipeline in fp32 without ZeRO clips by another norm than DeepSpeed's own pipeline does."""
    limit, stages = engine.gradient_clipping(), engine.mpu.get_pipe_parallel_world_size()
    is_fp32 = not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization())
    if limit > 0 and stages > 1 and is_fp32:
        log_dist(
            f"ds_topo: gradient_clipping={limit} (DeepSpeed's default is {GRADIENT_CLIPPING_DEFAULT}) clips by the "
            f"norm of all {stages} pipeline stages. DeepSpeed's own pipeline without ZeRO counts the first stage "
            "alone, so losses differ from those of earlier runs. To compare runs, set grid.correct_norms = False",
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
    corrected = (DeepSpeedZeroOptimizer, FP16_UnfusedOptimizer, *([BF16_Optimizer] if grid.correct_norms else []))
    if isinstance(engine.optimizer, corrected) or not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        return
    optimizer = stock_class(engine.optimizer).__name__
    names = {module.expert_group_name for module in engine.module.modules() if isinstance(module, MoE)}
    own = (grid.get_stage_id(), sorted(names), _has_dense_share(engine))
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


def _has_dense_share(engine: DeepSpeedEngine) -> bool:
    """Tell whether this rank has a parameter, not of an expert, that counts in the norm of ``BF16_Optimizer``."""
    return engine.mpu.get_slice_parallel_rank() == 0 or any(
        is_model_parallel_parameter(parameter) and not is_moe_param(parameter)
        for parameter in engine.module.parameters()
    )


# -- what counts where ------------------------------------------------------------------------------------------------


def counts_on_slice(parameter: nn.Parameter, is_first: bool, slices_experts: bool = False) -> bool:
    """Tell whether a rank counts a parameter in the norm, or another slice or stage does.

    A tied parameter counts on the first of its stages. Parameters of experts are shards on every slice unless experts
    are sliced and it is marked ``tensor_model_parallel = False`` (Megatron's mark of replicated parameters). Any other
    parameter counts on the first slice only, unless it is marked as a shard.

    Args:
        parameter: the parameter.
        is_first: this rank holds the first slice.
        slices_experts: experts are split along ``model``.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    if is_first:
        return True
    if is_moe_param(parameter):
        return not slices_experts or getattr(parameter, "tensor_model_parallel", None) is not False
    return bool(is_model_parallel_parameter(parameter))


def _on_this_slice(grid: ProcessGrid) -> Counts:
    """Return the function that tells whether this rank's slice counts a parameter."""
    if grid.get_axis_rank(MODEL) == 0:
        return lambda parameter: not getattr(parameter, "ds_pipe_replicated", False)  # as counts_on_slice, but fast
    slices_experts = any(groups.plan.expert_tensor_parallel for groups in registry.of(grid))
    return lambda parameter: counts_on_slice(parameter, False, slices_experts)


def _replicas_of_expert(parameter: nn.Parameter) -> dist.ProcessGroup:
    """Return the ranks that hold the same expert.

    Raises:
        ExpertGroupError: neither DeepSpeed nor its reducer knows its groups.
    """
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


def overflows(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Tell, as ``[]``, whether an element of any gradient is infinite or nan, by a few kernels for all gradients."""
    return ~_largest(gradients).isfinite()


def _largest(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value, ``[]``, of all gradients; infinite or nan if an element is."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return get_total_norm([gradient for gradient in dense if gradient.numel()], math.inf)


def _total_norm(pairs: Iterable[tuple[nn.Parameter, torch.Tensor]], counts: Counts, grid: MpuGrid) -> torch.Tensor:
    """Return the norm, ``[]``, of all gradients of the model, of which this rank counts some."""
    device, (counted, others) = get_accelerator().current_device_name(), _divided(pairs, counts)
    square = sum_of_squares(counted, device, torch.float32) + _zero_or_nan(others, device)
    return _sum_over_grid(square, grid)[0].sqrt()


def sum_of_squares(
    gradients: list[torch.Tensor],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the sum, ``[]``, of the squares of all elements, by a few kernels, and to the last bit as DeepSpeed does.

    Args:
        gradients: dense gradients.
        device: the device of the result.
        dtype: the type of the sums; that of the gradients by default.
        foreach: whether one kernel may work on several gradients.
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


def _sum_over_grid(
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
