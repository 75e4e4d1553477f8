"""Change the methods of DeepSpeed's optimizers while a reducer averages their gradients.

An optimizer gets one of three classes of ours until the reducer is detached (:func:`ds_topo.base.classes.adopt`):

    ReducedZero      ZeRO 1 with an optimizer that needs whole matrices: its partition is cut from whole gradients
    PartitionedZero  ZeRO 1 and 2 in our layout, with a step of our own
    PartitionedBF16  ``BF16_Optimizer`` in our layout, with a step of our own

In our layout each flat tensor of parameters is cut into regions, and each region evenly over the ranks
(:mod:`ds_topo.reduction.partitions`). The flat tensors keep their memory, but parameters have other places in it.
Master weights and optimizer states are moved when the reducer is attached. The steps do DeepSpeed's arithmetic, in its
order. Checkpoints are in DeepSpeed's layout: states are moved back before they are saved, and moved again after they
are loaded. So any tool and any engine can read them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import SINGLE_PARTITION_OF_FP32_GROUPS
from deepspeed.moe.utils import is_moe_param_group
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import (
    bwc_tensor_model_parallel_rank,
    clip_tensors_by_global_norm,
    get_global_norm_of_tensors,
    get_norm_with_moe_layers,
)
from deepspeed.runtime.zero.stage_1_and_2 import (
    OPTIMIZER_ALLGATHER_TIMER,
    OPTIMIZER_GRADIENTS_TIMER,
    OPTIMIZER_STEP_TIMER,
    OPTIMIZER_TIMERS,
    DeepSpeedZeroOptimizer,
)
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from torch import nn

from ds_topo.base.classes import REDUCED, Mixin, adopt
from ds_topo.base.torch_names import job_timeout
from ds_topo.engine.engine_driver import EngineDriver, OptimizerGradients
from ds_topo.engine.norms import counts_on_slice
from ds_topo.engine.optimizer_norms import norm_as_gradients, partition_norm
from ds_topo.engine.parameter_gathers import FlatGroup, PartitionedParameters
from ds_topo.launch.council import agree
from ds_topo.mpu import MpuGrid
from ds_topo.reduction.partitions import moved


class WrapperGradients(OptimizerGradients):
    """The connection to an optimizer that gets a class of ours, whose ``reduction`` this is."""

    mixin: type[Mixin]
    """The class."""
    driver: EngineDriver
    """The driver of the reducer; set by :meth:`bind`."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__(engine)
        self.groups: list[FlatGroup] = []
        """The parameter groups, in both layouts; none if the optimizer stays in DeepSpeed's."""

    def bind(self, driver: EngineDriver, bindings: ExitStack, overlaps: bool) -> None:
        """Give the optimizer its class; see :class:`OptimizerGradients`."""
        kind = PartitionedParameters
        if overlaps:
            from ds_topo.engine.late_parameters import LateParameters  # which the option asks for

            kind = LateParameters
        self.driver, self.parameters = driver, kind(self.groups)
        self.optimizer.reduction = self
        bindings.callback(adopt(self.optimizer, self.mixin))


def _is_finite(norm: torch.Tensor) -> bool:
    """Tell whether gradients with this norm are finite; DeepSpeed's norm of others may be -1."""
    return 0 <= float(norm) < math.inf


# -- in DeepSpeed's layout --------------------------------------------------------------------------------------------


class ReducedZero(Mixin, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """ZeRO 1 or 2 whose gradients a reducer averages."""

    mixin_order = REDUCED  # a grid's own changes of DeepSpeed's reduction do not concern a reducer
    mixin_state = "reduction"
    reduction: WrapperGradients

    def process_gradients(self, param: nn.Parameter, i: int) -> None:
        """No-op: DeepSpeed's hooks would reduce gradients during backward, too."""

    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """No-op: the epilogue of stage 1 would reduce what its hooks have collected."""

    def reduce_gradients(self, *_: object, **__: object) -> None:
        """Wait for the reducer. Stage 1 would reduce gradients here, after the last backward pass."""
        self.reduction.driver.reduce()

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Wait for the reducer. Stage 2 would end its own reduction here, after every backward pass."""
        self.reduction.driver.reduce()

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Clear also what the reducer has accumulated: it is not in ``parameter.grad``."""
        self.reduction.driver.reducer.forget_unreduced()
        super().zero_grad(*arguments, **options)


# -- in our layout ----------------------------------------------------------------------------------------------------


class PartitionedOptimizer(Mixin, ZeROOptimizer):  # type: ignore[misc]
    """Do what both optimizers do alike in our layout."""

    has_sent_to_owners = True
    """Gradients that were reduced are no averages on every rank."""
    reduction: WrapperGradients

    @abstractmethod
    def gradients_by_group(self) -> dict[int, list[torch.Tensor]]:
        """Return the gradients that DeepSpeed's functions for single parameters read, by group."""

    def take_gradients(self) -> None:
        """Take this rank's partition of the averaged gradients, after the last micro-batch."""
        for group in self.reduction.groups:
            group.averaged = group.gradients.take()

    # -- weights

    def own_parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's slices of the parameters, which have all arrived, each with its master weights."""
        self.reduction.parameters.wait()
        for group in self.reduction.groups:
            for own, place in group.slices():
                yield own, group.master.data[place]

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Write the master weights to this rank's slices of the parameters, and send these to the other ranks."""
        for own, master in self.own_parts():
            own.copy_(master)
            del own, master  # a view that lives on shares the memory of parameters in flight
        self.reduction.parameters.gather()

    def _restore_from_bit16_weights(self) -> None:
        """Copy the parameters to the master weights, for ``refresh_fp32_params()`` and checkpoints without these."""
        for own, master in self.own_parts():
            master.copy_(own)

    @property
    def flats(self) -> list[torch.Tensor]:
        """The flat tensors, in the layout in force, after all parameters have arrived."""
        self.reduction.parameters.wait()
        return [group.memory[: group.layout.numel] for group in self.reduction.groups]

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the states in DeepSpeed's layout.

        Collective over the ranks that share the first flat tensor. Ranks that do not come are named.
        """
        groups = self.reduction.groups
        agree(
            "",
            sorted(dist.get_process_group_ranks(groups[0].gradients.group)),
            job_timeout(),
            subject="optimizer.state_dict(), which all ranks must call together with a GradientReducer attached",
        )
        kept = [(group.master.data, self.optimizer.state.get(group.master, {})) for group in groups]
        try:
            self._move(to_ours=False)
            result: dict[str, Any] = super().state_dict()
            masters = result[SINGLE_PARTITION_OF_FP32_GROUPS]
            result[SINGLE_PARTITION_OF_FP32_GROUPS] = [master.detach() for master in masters]  # in this layout
        finally:
            for group, (master, states) in zip(groups, kept, strict=True):
                self._put(group.master, master, states)
        return result

    def load_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Load states in DeepSpeed's layout, from which everything is then moved to ours; collective."""
        self.leave()
        try:
            super().load_state_dict(*arguments, **options)
        finally:
            self.enter()

    # -- from one layout to the other

    def enter(self) -> None:
        """Move parameters, master weights and optimizer states to our layout; collective."""
        for group in self.reduction.groups:
            group.arrange(group.ours)
            _ = group.gradients.exchange  # created here by all ranks together, not during a backward pass
        self._move(to_ours=True)
        self._link_own_parts()
        self._link_states()
        self.reduction.parameters.renew()

    def leave(self) -> None:
        """Move parameters, master weights and optimizer states back to DeepSpeed's layout; collective."""
        self.reduction.parameters.wait()
        self._move(to_ours=False)
        for group in self.reduction.groups:
            group.arrange(group.theirs)
        self._link_all_hp_params()
        self._link_states()

    def _move(self, *, to_ours: bool) -> None:
        """Move the master weights and optimizer states of every group to the other layout; collective."""
        for group in self.reduction.groups:
            source, target = (group.theirs, group.ours) if to_ours else (group.ours, group.theirs)
            states = {
                name: moved(value, source, target, group.gradients.group)
                for name, value in sorted(self.optimizer.state.get(group.master, {}).items())
                if torch.is_tensor(value) and value.shape == group.master.shape
            }
            self._put(group.master, moved(group.master.detach(), source, target, group.gradients.group), states)

    def _put(self, master: torch.Tensor, data: torch.Tensor, states: dict[str, Any]) -> None:
        master.data = data
        if states:  # a new dictionary: the result of an earlier state_dict() keeps the old one
            self.optimizer.state[master] = {**self.optimizer.state[master], **states}

    # -- DeepSpeed's functions for single parameters

    def _link_own_parts(self) -> None:
        """Set the links that ``safe_get_full_fp32_param`` and similar functions follow, as ``link_hp_params`` does."""
        gradients = self.gradients_by_group()
        for group in self.reduction.groups:
            for parameter in group.parameters:
                parameter._hp_mapping = None  # type: ignore[attr-defined]
            for place, (part, parameter) in enumerate(zip(group.own, group.owned, strict=True)):
                parameter._index_in_param_group = place  # type: ignore[attr-defined]
                parameter._hp_mapping = tensor_fragment(  # type: ignore[attr-defined]
                    lp_fragment=parameter.detach().flatten()[part.start : part.start + part.numel],
                    lp_fragment_address=fragment_address(numel=part.numel, start=part.start),
                    hp_fragment=group.master.detach()[part.address : part.address + part.numel],
                    hp_fragment_address=fragment_address(numel=part.numel, start=part.address),
                    gradient_dict=gradients,
                    offload_gradient_dict=None,
                    use_offload=False,
                    param_group_index=group.index,
                )

    def _link_states(self) -> None:
        """Link the optimizer states to the parameters, where the optimizer has states."""
        for group in self.reduction.groups:
            group.has_linked_states = group.master in self.optimizer.state
            if group.has_linked_states:
                lazy_init_hp_params_optimizer_state(group.parameters, group.master, self.optimizer.state)


class PartitionedZero(PartitionedOptimizer, ReducedZero):
    """ZeRO 1 or 2 in our layout."""

    bit16_groups_flat = PartitionedOptimizer.flats

    @property
    def params_in_partition(self) -> list[list[nn.Parameter]]:
        """The parameters of which this rank owns a part, in the order of ``averaged_gradients``."""
        return [group.owned for group in self.reduction.groups]

    @property
    def round_robin_gradients(self) -> bool:
        """False: regions have the order of the parameters, whatever the config says."""
        return False

    def gradients_by_group(self) -> dict[int, list[torch.Tensor]]:
        """Return the averaged gradients, which exist from backward to the step."""
        found: dict[int, list[torch.Tensor]] = self.averaged_gradients
        return found

    def take_gradients(self) -> None:
        """Take this rank's partition, also as parts of single parameters, for overflow, norm and programs."""
        super().take_gradients()
        for group in self.reduction.groups:
            assert group.averaged is not None
            group.parts = group.fragments_of(group.averaged)
            self.averaged_gradients[group.index] = list(group.parts)

    def step(self, closure: None = None) -> None:
        """Step on this rank's partitions, and send the updated parameters to the other ranks.

        If a gradient of any rank is not finite, gradients are discarded and the loss scale decreases instead.
        """
        norm, scale = self._checked_norm(), self.loss_scale
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            self.discard_gradients()
            for name in OPTIMIZER_TIMERS:
                with self._timed(name):
                    pass
            return
        if norm is not None:
            self._global_grad_norm = norm / scale
        for group in self.reduction.groups:
            with self._timed(OPTIMIZER_GRADIENTS_TIMER):
                self.free_grad_in_param_list(group.parameters)
                group.master.grad = self._averaged(group).to(group.master.dtype)
                self._drop_gradients(group)
                self.unscale_and_clip_grads([group.master.grad], norm)
            with self._timed(OPTIMIZER_STEP_TIMER):
                self._optimizer_step(group.index)
                group.master.grad = None  # one group at a time has gradients in the type of master weights
        if not all(group.has_linked_states for group in self.reduction.groups):
            self._link_states()
        with self._timed(OPTIMIZER_ALLGATHER_TIMER):
            self.update_lp_params()
        self.timers.log(OPTIMIZER_TIMERS)

    def _averaged(self, group: FlatGroup) -> torch.Tensor:
        """Return a partition of the averaged gradients, with what the program has put in place of its parts."""
        now = self.averaged_gradients[group.index]
        if len(now) != len(group.parts) or not all(map(is_, now, group.parts)):
            for part, new in zip(group.parts, now, strict=True):
                part.copy_(new)
        assert group.averaged is not None
        return group.averaged

    def _checked_norm(self) -> torch.Tensor | None:
        """Return the norm of scaled gradients, or None without one; find out whether any rank has an overflow."""
        with_norm = getattr(self, "compute_grad_norm", True)  # DeepSpeed 0.19.6 has no such option
        self.overflow = False
        self._global_grad_norm = math.inf if with_norm else None  # of a step that is skipped
        if self.check_grad_overflow:
            self.check_overflow()
        if not with_norm or self.overflow:
            return None
        norm: torch.Tensor = self.scaled_global_norm()
        if self.dtype != torch.bfloat16 or self.check_grad_overflow:
            self.overflow = not _is_finite(norm)
        return norm

    def discard_gradients(self) -> None:
        """Discard the averaged gradients of a step that is not taken."""
        self.zero_grad()
        for group in self.reduction.groups:
            self._drop_gradients(group)

    def _drop_gradients(self, group: FlatGroup) -> None:
        group.averaged = self.averaged_gradients[group.index] = None
        group.parts = []

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self.timers(name).start()
        yield
        self.timers(name).stop()

    def offload_states(self, *_: object, **__: object) -> None:
        """Refuse to offload: it cuts flat tensors anew, in DeepSpeed's layout."""
        raise RuntimeError(
            "offload_states() with a GradientReducer attached: detach() it first; its layout of the partition differs"
        )


class PartitionedBF16(PartitionedOptimizer, BF16_Optimizer):  # type: ignore[misc]
    """``BF16_Optimizer``, which accumulates gradients in a second data type, in our layout."""

    mixin_order, mixin_state = REDUCED, "reduction"

    def accumulate_hp_grads_and_remove_lp(self, lp_param: nn.Parameter, group_idx: int, param_idx: int) -> None:
        """No-op: with immediate_grad_update the optimizer's hooks would accumulate each gradient a second time."""

    def update_hp_grads(self, *_: object, **__: object) -> None:
        """No-op: after backward it would accumulate the gradients of incomplete buckets a second time."""

    bf16_groups_flat = PartitionedOptimizer.flats

    def gradients_by_group(self) -> dict[int, list[torch.Tensor]]:
        """Return the averaged gradients, whose memory lasts."""
        return {group.index: group.fragments_of(group.gradients.partition) for group in self.reduction.groups}

    def clear_hp_grads(self) -> None:
        """Discard what the reducer has accumulated; nothing is zeroed, because the next gradients overwrite memory."""
        self.reduction.driver.reducer.forget_unreduced()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step on this rank's partitions, and send the updated parameters to the other ranks.

        If a gradient of any rank is not finite, gradients are discarded instead.
        """
        self.overflow = False
        norm = self._global_grad_norm = self._norm()
        if not _is_finite(norm):
            self.overflow, self._global_grad_norm = True, math.inf
            self.clear_hp_grads()
            self.clear_lp_grads()
            return
        partitions = [group.gradients.partition for group in self.reduction.groups]
        if self.clip_grad > 0.0:
            clip_tensors_by_global_norm(partitions, max_norm=self.clip_grad, global_norm=norm, mpu=self.mpu)
        for group, partition in zip(self.reduction.groups, partitions, strict=True):
            group.master.grad = partition.to(group.master.dtype)
        self.optimizer.step()
        for group in self.reduction.groups:
            if group.gradients.dtype is not torch.float32:
                group.master.grad = None
        if not all(group.has_linked_states for group in self.reduction.groups):
            self._link_states()
        self.update_lp_params()
        self.clear_hp_grads()

    def _norm(self) -> Any:
        """Return the norm of all gradients, by DeepSpeed's functions; collective over the grid, or all replicas."""
        dense, of_experts = self.get_grads_for_norm()
        norm = get_global_norm_of_tensors(input_tensors=dense, mpu=self.mpu, norm_type=self.norm_type)
        if not self.has_moe_layers:
            return norm
        return get_norm_with_moe_layers(norm, mpu=self.mpu, expert_tensors=of_experts, norm_type=self.norm_type)

    def get_grads_for_norm(self, for_clipping: bool = False) -> Any:
        """Return the norm as the only gradient, or that of each kind, dense and expert.

        DeepSpeed expects whole gradients on every rank. For clipping, return the partitions themselves. Collective over
        the grid, or without one over the ranks that share gradients.
        """
        groups = self.reduction.groups
        if for_clipping:
            return [group.gradients.partition for group in groups]
        mpu = self.mpu
        owned = [zip(group.owned, group.fragments_of(group.gradients.partition), strict=True) for group in groups]
        if isinstance(mpu, MpuGrid) and mpu.correct_norms:
            return norm_as_gradients(partition_norm(chain.from_iterable(owned), mpu), mpu)
        is_first = bwc_tensor_model_parallel_rank(mpu=mpu) == 0
        dense: list[torch.Tensor] = []
        of_experts: dict[str, list[torch.Tensor]] = {}
        for group, pairs in zip(groups, owned, strict=True):
            parts = [part.float() for parameter, part in pairs if counts_on_slice(parameter, is_first)]
            norms = [torch.linalg.vector_norm(part) for part in parts]
            device = group.gradients.partition.device
            square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
            dist.all_reduce(square, group=group.gradients.group)
            settings = self.optimizer.param_groups[group.index]
            kind = of_experts.setdefault(settings["name"], []) if is_moe_param_group(settings) else dense
            kind.append(square.sqrt().reshape(1))
        return dense or [torch.zeros(1, device=get_accelerator().current_device_name())], of_experts
