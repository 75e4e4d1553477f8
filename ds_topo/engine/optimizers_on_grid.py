"""The classes of DeepSpeed's optimizers in an engine on a grid: every method that differs from DeepSpeed's, and why.

There is one mixin for each kind of optimizer. :func:`put_optimizer_on_grid` chooses it.

Note [Unused parameters]. ZeRO 3, and every stage with an offloaded optimizer, keep each gradient in memory that is
never cleared. The first micro-batch overwrites it, later ones add to it, and the last one hands it to an offloaded
optimizer. A parameter that a micro-batch does not use takes no part in that:

    unused in the first    its gradient is added to that of an earlier step
    unused in the last     an offloaded optimizer does not get its gradient
    unused in all          the optimizer gets its gradient of an earlier step again

Here its memory is cleared before its first gradient of a step, and what the last micro-batch left out is done before
the step. Only parameters that a micro-batch did not use cost time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.torch_autocast import get_comm_dtype
from deepspeed.runtime.utils import CheckOverflow
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import get_norm_dtype
from torch import nn

from ds_topo.base.classes import Mixin, adopt, stock_class
from ds_topo.base.differences import BF16_DISCARDS_INFINITIES
from ds_topo.engine import norms, reduction_order
from ds_topo.engine.backward_passes import BackwardPasses
from ds_topo.engine.parts import GATHERS, OVER_SHARD
from ds_topo.engine.reduction_order import ComparedBuckets, compared_buckets_of
from ds_topo.mpu import MpuGrid, has_shard

if TYPE_CHECKING:
    from ds_topo.reduction.exchange import PartitionHolders
    from ds_topo.reduction.parameters import WiderSums


@dataclass(frozen=True)
class OptimizerParts:
    """Hold what the methods of an optimizer on a grid use."""

    copies: PartitionHolders | None
    """The ranks with copies of this rank's partition; None if there are no others."""
    summed: set[int] = field(default_factory=set, init=False)
    """The parameter groups whose gradients are summed over these copies, until the step."""
    compared: ComparedBuckets | None
    """The comparison of the gradients that are reduced; None if their order does not matter."""
    passes: BackwardPasses | None
    """The backward passes of the engine's step; None in a pipeline, which runs them itself."""
    adds_zeros: bool
    """True if gradients of zeros are added for parameters that this rank does not use."""
    keeps_gradients: bool
    """True if the optimizer keeps gradients in memory that it never clears; see Note [Unused parameters]."""
    corrects_norm: bool
    """True if the optimizer's own norm would be wrong."""
    has_experts: bool
    gathering: Callable[[], AbstractContextManager[None]]
    """The context in which DeepSpeed's own gather of updated parameters runs."""
    replicas: WiderSums | None = None
    """The averages over the replicas of a ``Manager`` at ZeRO 3; without one, or with a reducer, None."""
    sums_over_seq: bool = True
    """True if gradients are summed over ``seq`` at ZeRO 3 as at every other stage."""


def put_optimizer_on_grid(
    engine: DeepSpeedEngine,
    passes: BackwardPasses | None,
    *,
    has_experts: bool,
    corrects_norms: bool,
    group_counts_differ: bool,
) -> Callable[[], object]:
    """Give the optimizer of an engine the class of its kind; return the function that gives it its own back.

    Args:
        engine: the engine, whose mpu is a grid.
        passes: the backward passes of its step.
        has_experts: expert groups exist on the grid.
        corrects_norms: the grid corrects norms.
        group_counts_differ: the stages of a pipeline have different numbers of parameter groups.
    """
    optimizer = engine.optimizer
    mixin = next((mixin for kind, mixin in _MIXINS.items() if isinstance(optimizer, kind)), None)
    if mixin is None:
        return lambda: None
    kind = stock_class(optimizer)
    is_offloaded = kind is DeepSpeedZeroOptimizer and optimizer.cpu_offload and not optimizer.zenflow
    corrects = corrects_norms and has_experts
    if mixin is ZeroOnGrid:
        has_slices = engine.mpu.get_slice_parallel_world_size() > 1
        corrects = corrects or group_counts_differ or bool(is_offloaded and has_slices)  # of which each looks at all
    elif mixin is UnfusedOnGrid:
        corrects = corrects_norms and (has_experts or engine.mpu.get_model_parallel_world_size() > 1)
    elif mixin is BF16OnGrid:
        corrects = corrects_norms
    compared = compared_buckets_of(engine)
    optimizer.on_grid = OptimizerParts(
        copies=OVER_SHARD.load().copies_of(engine.mpu) if has_shard(engine.mpu) else None,
        compared=compared,
        passes=passes,
        adds_zeros=reduction_order.adds_zeros(engine),
        keeps_gradients=kind is DeepSpeedZeroOptimizer_Stage3 or bool(is_offloaded),
        corrects_norm=corrects,
        has_experts=has_experts,
        gathering=GATHERS.load().gathering_of(optimizer) if mixin in (ZeroOnGrid, BF16OnGrid) else nullcontext,
    )
    with ExitStack() as undo:
        undo.callback(adopt(optimizer, mixin))
        if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
            undo.callback(adopt(optimizer.overflow_checker, OverflowOnGrid))
        if isinstance(optimizer, ZeROOptimizer) and engine.torch_autocast_enabled():
            undo.callback(adopt(optimizer, AutocastOnGrid))
        return undo.pop_all().close


class ZeroOnGrid(Mixin, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer``, of ZeRO 1 and 2, in an engine on a grid."""

    mixin_suffix, mixin_state = "OnGrid", "on_grid"
    on_grid: OptimizerParts
    mpu: MpuGrid
    _hp_optimizer_states_linked: bool

    def reduce_gradients(self, *arguments: Any, **options: Any) -> Any:
        """Add gradients of zeros where this rank has none, before ZeRO 1 reduces all of them.

        DeepSpeed leaves them out, so ranks that use other parameters sum gradients of different ones, or fail.
        """
        if self.on_grid.adds_zeros and self.on_grid.compared is None:
            reduction_order.fill_missing(self)
        return super().reduce_gradients(*arguments, **options)

    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> Any:
        """Compare the bucket's parameters between the ranks first.

        Buckets are added position by position. With other parameters, or in another order, gradients of different
        parameters would be added.
        """
        if self.on_grid.compared is not None:
            reduction_order.compare_buckets(self.on_grid.compared, self, comm_dtype)
        return super().reduce_ipg_grads(comm_dtype=comm_dtype)

    def async_accumulate_grad_in_cpu_via_gpu(self, param: torch.nn.Parameter) -> Any:
        """Clear the memory of a gradient before the first one of a step is added; see Note [Unused parameters]."""
        if self.on_grid.keeps_gradients and self.micro_step_id > 0:
            number = self.get_param_id(param)
            earlier = self.accumulated_grads_in_cpu.get(number)
            if earlier is not None and number not in self._offload_accumulated_param_ids:
                earlier.zero_()
        return super().async_accumulate_grad_in_cpu_via_gpu(param)

    def get_flat_partition(self, *arguments: Any, **options: Any) -> Any:
        """Sum the partition over its copies here, where programs and DeepSpeed's functions read it until the step."""
        make = partial(super().get_flat_partition, *arguments, **options)
        if self.on_grid.copies is None:
            return make()
        group = options["param_group_idx"]
        self.on_grid.summed.add(group)
        return OVER_SHARD.load().partition_over_copies(self.on_grid.copies, self, group, make)

    def step(self, closure: object = None) -> Any:
        """Step after gradients left out were handed over, comparisons were read, and copies were summed.

        DeepSpeed hands only gradients of the last micro-batch to an offloaded optimizer. It does not sum over the ranks
        that hold the same partition. It gathers parameters by collectives that use a link in one direction at a time.
        It links states to parameters after the step of the first group, when other groups have none.
        """
        parts = self.on_grid
        if parts.keeps_gradients:
            _hand_over_offloaded(self)
        if parts.compared is not None:
            parts.compared.read()
        if parts.copies is not None:
            OVER_SHARD.load().sum_over_copies(parts.copies, self, parts.summed)
            parts.summed.clear()
        with parts.gathering():
            before, result = self._hp_optimizer_states_linked, super().step(closure)
        if before != self._hp_optimizer_states_linked:
            self._hp_optimizer_states_linked = False
            self._lazy_init_hp_params_optimizer_state()
        return result

    def update_lp_params(self) -> Any:
        """Gather updated parameters point to point on gloo."""
        with self.on_grid.gathering():
            return super().update_lp_params()

    def has_overflow(self, *arguments: Any, **options: Any) -> bool:
        """Look for overflows on all replicas, because experts may overflow on any of them."""
        found = bool(super().has_overflow(*arguments, **options))
        copies = self.on_grid.copies
        return found if copies is None else OVER_SHARD.load().overflows_anywhere(copies, self, found)

    def has_overflow_partitioned_grads_serial(self) -> torch.Tensor:
        """Look at all gradients by a few kernels: DeepSpeed runs 13 operations for each."""
        gradients = (part for group in range(len(self.bit16_groups)) for part in self.averaged_gradients[group])
        found = norms.overflows(part for part in gradients if part is not None)
        return found.reshape(1).to(get_accelerator().current_device_name())

    def scaled_global_norm(self, norm_type: int = 2) -> torch.Tensor:
        """Return the norm over the grid.

        DeepSpeed's counts the experts of the first slice only, and hangs where stages differ in parameter groups.
        """
        if self.on_grid.corrects_norm:
            return norms.zero_gradient_norm(self, self.mpu)
        norm: torch.Tensor = super().scaled_global_norm(norm_type)
        return norm

    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: int = 2) -> torch.Tensor:
        """Return the norm of a group, or -1 for inf and nan, to the last bit as DeepSpeed, but by a few kernels.

        DeepSpeed starts several for each parameter. It asks for norms of type 2 only.
        """
        total = norms.square_of_partition(gradients, params, self.mpu, get_norm_dtype())
        for group in (self.dp_process_group, self.mpu.get_model_parallel_group()):
            if group.size() > 1:
                dist.all_reduce(total, group=group)
        return torch.where(total.isfinite(), total.sqrt(), -1.0)

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Note that the step may have another backward pass: programs discard gradients by this method, too."""
        super().zero_grad(*arguments, **options)
        if self.on_grid.passes is not None:
            self.on_grid.passes.are_discarded = True

    def state_dict(self) -> dict[str, Any]:
        """Leave out partitions of dense parameters, except on the first replica of each: a partition is saved once."""
        return _states_of_replica(self, super().state_dict())


class BF16OnGrid(Mixin, BF16_Optimizer):  # type: ignore[misc]
    """``BF16_Optimizer``, which accumulates gradients of bf16 in fp32, in an engine on a grid."""

    mixin_suffix, mixin_state = "OnGrid", "on_grid"
    on_grid: OptimizerParts
    mpu: MpuGrid

    def step(self, closure: Any = None) -> None:
        """Discard gradients that are not finite: DeepSpeed before 0.19.8 steps with them."""
        if not BF16_DISCARDS_INFINITIES:
            self.overflow = not torch.isfinite(norms.bf16_gradient_norm(self, self.mpu)).item()
            if self.overflow:
                self._global_grad_norm = torch.inf
                self.clear_hp_grads()
                self.clear_lp_grads()
                return
        super().step(closure)

    def update_lp_params(self) -> Any:
        """Gather updated parameters point to point on gloo, whose all_gather uses a link in one direction at a time."""
        with self.on_grid.gathering():
            return super().update_lp_params()

    def get_grads_for_norm(self, for_clipping: bool = False) -> Any:
        """Return our norm as the only gradient with experts; without them, a zero if no gradient counts.

        DeepSpeed counts an expert's replicated parameters once per slice, and fails where no gradient counts.
        """
        parts = self.on_grid
        if for_clipping or not parts.corrects_norm:
            return super().get_grads_for_norm(for_clipping)
        if parts.has_experts:
            return norms.norm_as_gradients(norms.bf16_gradient_norm(self, self.mpu), self.mpu)
        counted, of_experts = super().get_grads_for_norm(for_clipping)
        counted += norms.bf16_uncounted(self, self.mpu)
        return counted or [torch.zeros(1, device=get_accelerator().current_device_name())], of_experts

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Note that sums of earlier micro-batches are lost."""
        super().zero_grad(*arguments, **options)
        if self.on_grid.passes is not None:
            self.on_grid.passes.are_discarded = True

    def state_dict(self) -> dict[str, Any]:
        """Leave out partitions of dense parameters, except on the first replica of each: a partition is saved once."""
        return _states_of_replica(self, super().state_dict())


class FusedOnGrid(Mixin, FP16_Optimizer):  # type: ignore[misc]
    """``FP16_Optimizer``, of fp16 and bf16 without ZeRO with a fused optimizer, in an engine on a grid."""

    mixin_suffix, mixin_state = "OnGrid", "on_grid"
    on_grid: OptimizerParts
    mpu: MpuGrid

    def unscale_and_clip_grads(self, grad_groups_flat: list[torch.Tensor], total_norm: Any, *options: Any) -> Any:
        """Clip by the norm over the grid: DeepSpeed's counts what slices of an expert replicate on each slice."""
        if self.on_grid.corrects_norm:
            total_norm = float(norms.fused_gradient_norm(self, grad_groups_flat, self.mpu))
            self._global_grad_norm = total_norm / self.loss_scale_config.cur_scale
        return super().unscale_and_clip_grads(grad_groups_flat, total_norm, *options)


class UnfusedOnGrid(Mixin, FP16_UnfusedOptimizer):  # type: ignore[misc]
    """``FP16_UnfusedOptimizer``, of fp16 and bf16 without ZeRO, in an engine on a grid."""

    mixin_suffix, mixin_state = "OnGrid", "on_grid"
    on_grid: OptimizerParts
    mpu: MpuGrid

    def unscale_and_clip_grads(self, total_norm: Any, apply_scale: bool = True) -> Any:
        """Clip by the norm over the grid, on stages or slices and with experts.

        DeepSpeed's norm omits experts. It is that of gradients, which lack the marks of slices and of tied copies.
        """
        if self.on_grid.corrects_norm:
            total_norm = self._global_grad_norm = float(norms.unfused_gradient_norm(self, self.mpu))
        return super().unscale_and_clip_grads(total_norm, apply_scale)


class AutocastOnGrid(Mixin, ZeROOptimizer):  # type: ignore[misc]
    """An optimizer of ZeRO with ``torch_autocast``, in an engine on a grid."""

    mixin_suffix = "Autocast"

    def get_param_comm_dtype(self, param: torch.nn.Parameter) -> torch.dtype:
        """Return the type in which gradients travel: DeepSpeed asks for the last engine of the process."""
        dtype: torch.dtype = get_comm_dtype(param)
        return dtype


class OverflowOnGrid(Mixin, CheckOverflow):  # type: ignore[misc]
    """``CheckOverflow`` of an optimizer of fp16 or bf16 without ZeRO, in an engine on a grid."""

    mixin_suffix = "OnGrid"

    def has_overflow_serial(self, params: list[nn.Parameter]) -> bool:
        """Look at all gradients by a few kernels: DeepSpeed runs 13 operations for each, and waits for the device."""
        return bool(norms.overflows(parameter.grad for parameter in params if parameter.grad is not None))


class Zero3OnGrid(Mixin, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer_Stage3`` in an engine on a grid."""

    mixin_suffix, mixin_state = "OnGrid", "on_grid"
    on_grid: OptimizerParts

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(self, *arguments: Any) -> list[torch.Tensor]:  # noqa: N802
        """Scale averages by the degree of ``seq``, so that they are sums over ``seq``.

        Every other stage sums gradients over ``seq`` and averages them over ``data``. ZeRO 3 does the same except where
        it uses reduce-scatter, which divides by all ranks: with ``reduce_scatter`` true (the default), without
        ``contiguous_gradients``, and for parameters larger than ``reduce_bucket_size``. The losses of programs for
        DeepSpeed alone fit its own scale; see :func:`keep_scale`.
        """
        partitions: list[torch.Tensor] = super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(*arguments)
        factor = self.sequence_parallel_size if self.on_grid.sums_over_seq else 1
        return [partition.mul(factor) for partition in partitions] if factor > 1 else partitions

    def _DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(self, comm_dtype: torch.dtype) -> Any:  # noqa: N802
        """Compare the bucket's parameters between the ranks first.

        Buckets are added position by position. With other parameters, or in another order, gradients of different
        parameters would be added.
        """
        if self.on_grid.compared is not None:
            reduction_order.compare_partitioned_bucket(self.on_grid.compared, self, comm_dtype)
        return super()._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(comm_dtype)

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """Clear gradients of an earlier step first, and sum partitions over their copies and over replicas.

        DeepSpeed adds to gradients of an earlier step if the first micro-batch does not use a parameter. It does not
        sum over the ranks that hold the same partition.
        """
        parts = self.on_grid
        if parts.keeps_gradients and self.micro_step_id > 0:
            for parameter in params_to_release:
                if parameter.ds_id not in self._offload_boundary_param_ids:
                    _clear(self, parameter)
        partition = super().partition_grads
        if parts.copies is None and parts.replicas is None:
            return partition(params_to_release, grad_partitions)
        return OVER_SHARD.load().partition_and_sum(
            parts.copies, parts.replicas, partition, self, params_to_release, grad_partitions
        )

    def independent_gradient_partition_epilogue(self) -> None:
        """Read comparisons here, where ZeRO 3 waits for the device.

        Wait for the sums over copies of a partition and over replicas.
        """
        parts = self.on_grid
        if parts.compared is not None:
            parts.compared.waits_for_device = True
        try:
            super().independent_gradient_partition_epilogue()
            if parts.copies is not None or parts.replicas is not None:
                OVER_SHARD.load().wait_for_sums(parts.copies, parts.replicas, self)
        finally:
            if parts.compared is not None:
                parts.compared.waits_for_device = False

    def step(self, closure: object = None) -> Any:
        """Clear the gradients of unused parameters first, and hand them over; see Note [Unused parameters]."""
        if self.on_grid.keeps_gradients:
            _hand_over_partitions(self)
        return super().step(closure)

    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: int = 2) -> torch.Tensor:
        """Look at what later slices do not count, too: a nan there alone would not reach the norm."""
        if self.model_parallel_rank > 0:
            gradients, params = norms.with_uncounted(gradients, params)
        norm: torch.Tensor = super().get_grad_norm_direct(gradients, params, norm_type)
        return norm

    def complete_grad_norm_calculation_for_cpu_offload(self, params: Any) -> torch.Tensor:
        """Count what is not finite on later slices, too: a nan there alone would not reach the norm."""
        if self.model_parallel_rank > 0:
            params = norms.counting_infinities(params, self.norm_for_param_grads, self.get_param_id)
        norm: torch.Tensor = super().complete_grad_norm_calculation_for_cpu_offload(params)
        return norm

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Note that the step may have another backward pass: programs discard gradients by this method, too."""
        super().zero_grad(*arguments, **options)
        if self.on_grid.passes is not None:
            self.on_grid.passes.are_discarded = True

    def destroy(self) -> None:
        """Free the module with all states: DeepSpeed has the module of each engine in a list until the process ends."""
        super().destroy()
        places = [place for place, module in enumerate(FWD_MODULE_STACK) if module is self.module]
        if places:
            del FWD_MODULE_STACK[places[0]]


def keep_scale(engine: DeepSpeedEngine) -> None:
    """Let an engine average gradients over ``seq`` at ZeRO 3 where DeepSpeed does.

    The loss of transformers, which DeepSpeed's guide to long sequences has, too, is that of the whole sequence on each
    rank. Its gradient is the whole one times the degree of ``seq`` where gradients are summed, at ZeRO 0 to 2.
    """
    if isinstance(engine.optimizer, Zero3OnGrid):
        engine.optimizer.on_grid = replace(engine.optimizer.on_grid, sums_over_seq=False)


def _hand_over_offloaded(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Hand gradients that the last micro-batch left out over to an offloaded optimizer of ZeRO 1 or 2."""
    used = optimizer._offload_accumulated_param_ids
    handed_over = optimizer.norm_for_param_grads
    if used or handed_over:  # else a compiled graph has reduced the gradients
        missing = set()
        for parameter in chain.from_iterable(optimizer.params_in_partition):
            number = optimizer.get_param_id(parameter)
            if number in handed_over or not parameter.requires_grad:
                continue
            missing.add(number)
            if number not in used:
                group, _, start, numel = optimizer.grad_position[number]
                (master,) = optimizer.param_groups[group]["params"]
                master.grad.view(-1)[start : start + numel].zero_()
        if missing & used:
            optimizer._offload_accumulated_param_ids = missing & used
            optimizer._finalize_cpu_offload_gradient_accumulation()


def _hand_over_partitions(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Clear the gradients of parameters that no micro-batch used at ZeRO 3, and hand over those left out."""
    used = optimizer._offload_boundary_param_ids
    if used:  # else a compiled graph has reduced the gradients
        trained = [each for each in chain.from_iterable(optimizer.fp16_groups) if each.requires_grad]
        for parameter in trained:
            if parameter.ds_id not in used:
                _clear(optimizer, parameter)
        if optimizer.offload_optimizer:
            handed_over = optimizer.norm_for_param_grads
            missing = {each.ds_id for each in trained if optimizer.get_param_id(each) not in handed_over}
            if missing:
                optimizer._offload_boundary_param_ids = missing
                optimizer._finalize_offload_gradient_accumulation()


def _clear(optimizer: DeepSpeedZeroOptimizer_Stage3, parameter: Any) -> None:
    """Clear the memory of a parameter's gradient at ZeRO 3."""
    optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter.ds_id].zero_()


def _states_of_replica(optimizer: Any, states: dict[str, Any]) -> dict[str, Any]:
    copies = optimizer.on_grid.copies
    if copies is None or not OVER_SHARD.load().is_later_copy(optimizer, copies):
        return states
    of_experts: dict[str, Any] = OVER_SHARD.load().states_of_experts(optimizer, states)
    return of_experts


_MIXINS: dict[type, type[Mixin]] = {
    DeepSpeedZeroOptimizer: ZeroOnGrid,
    DeepSpeedZeroOptimizer_Stage3: Zero3OnGrid,
    BF16_Optimizer: BF16OnGrid,
    FP16_Optimizer: FusedOnGrid,
    FP16_UnfusedOptimizer: UnfusedOnGrid,
}


def keep_groups_of_adagrad(engine: DeepSpeedEngine) -> None:
    """Put the Adagrad of an engine back into ZeRO, whose constructor builds another one, of one group.

    With several groups DeepSpeed's step fails. With one, the group's own settings, a scheduler of the program and a
    subclass have no effect.
    """
    optimizer, basic = engine.optimizer, engine.basic_optimizer
    kinds = DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
    if not isinstance(basic, torch.optim.Adagrad) or not isinstance(optimizer, kinds) or optimizer.optimizer is basic:
        return
    states, optimizer.optimizer = optimizer.optimizer.state, basic
    basic.state.clear()
    basic.state.update(states)  # that of each partition, which torch's Adagrad creates in its constructor
    for group in basic.param_groups:
        for master in group["params"]:
            if master in states:
                states[master]["sum"].fill_(group["initial_accumulator_value"])
    if isinstance(optimizer, DeepSpeedZeroOptimizer):  # which has done this for the first group alone
        optimizer._link_all_hp_params()
        optimizer._param_slice_mappings = optimizer._create_param_mapping()
        if optimizer.cpu_offload:
            optimizer._create_optimizer_mapping()


def undo_step_of_zeros(optimizer: Any) -> None:
    """Undo the first step of an optimizer of fp16 or bf16 without ZeRO, which DeepSpeed takes with gradients of zero.

    DeepSpeed allocates the optimizer's states by this step. Adam counts it, so that its first updates of training are a
    quarter too small, and weight decay changes the master weights. Only torch's optimizers and DeepSpeed's Adam are
    known to start again without states; others keep the step.
    """
    if isinstance(optimizer, FP16_Optimizer):
        pairs = zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True)
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        pairs = zip(chain(*optimizer.fp32_groups), chain(*optimizer.fp16_groups), strict=True)
    else:
        return
    inner = optimizer.optimizer
    if not type(inner).__module__.startswith(("torch.optim.", "deepspeed.ops.adam.")):
        return
    with torch.no_grad():
        for master, parameter in pairs:
            master.copy_(parameter)
    inner.state.clear()
