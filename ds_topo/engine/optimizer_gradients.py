"""Connect a reducer to an engine's optimizer: where gradients accumulate, and which call of the engine reduces them.

There is one class for each kind of optimizer; :func:`gradients_of` chooses the class. Without ZeRO, and with optimizers
that need whole matrices, every rank gets whole gradients. At ZeRO 1 and 2 gradients go to the ranks that own them, and
DeepSpeed's optimizer runs in a balanced layout: same arithmetic, other addresses.

Each flat tensor of parameters is then cut into regions, and each region evenly over the ranks
(:mod:`ds_topo.zero.partitions`). The rank's master weights and optimizer states move to this layout once. The flat
tensors keep their memory, but parameters have other places in it. Checkpoints are in DeepSpeed's layout: states are
moved back before they are saved, and moved again after they are loaded. So any tool and any engine can read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import SINGLE_PARTITION_OF_FP32_GROUPS
from deepspeed.moe.utils import is_moe_param, is_moe_param_group
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import bwc_tensor_model_parallel_rank
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from torch import nn

from ds_topo.checkpoint.engine_facts import is_element_by_element
from ds_topo.engine import parameter_gathers
from ds_topo.engine.config_options import refusal_of_reducer
from ds_topo.engine.hybrid_sharding import copies_of, reduced_elsewhere
from ds_topo.engine.norms import counts_on_slice, norm_as_gradients, partition_norm
from ds_topo.engine.parameter_gathers import FlatGroup, PartitionedParameters, balanced_layout, lengthened
from ds_topo.ledger import Patch, always, around, ledger
from ds_topo.mpu import patches
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.mpu.releases import bind_methods
from ds_topo.process_groups.agreement import agree
from ds_topo.reducer.options import BucketSizes
from ds_topo.torch_names import job_timeout
from ds_topo.zero.partitions import PartitionedGradients, PartitionLayout, moved


def _set(values: Mapping[Patch, object], target: object, bindings: ExitStack) -> None:
    """Replace names of an object by values until the bindings are closed."""
    for row, value in values.items():
        bindings.callback(ledger.bind(row, always(value), target))


class OptimizerGradients:
    """The connection at stage 0: every rank needs whole gradients, and the optimizer reads ``parameter.grad``."""

    partitions: Sequence[PartitionedGradients] = ()
    """The gradients of which each rank needs only its own part."""
    parameters = PartitionedParameters(())
    """The parameters that arrive from other ranks after a step."""
    reduces_always = False
    """True if the gradients of every micro-batch are reduced."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.grad_buffers: dict[nn.Parameter, torch.Tensor] = {}
        """The buffers in which gradients accumulate, if not in ``parameter.grad``."""
        self.reduction: tuple[object, Patch] = (engine, patches.REDUCE_FALLBACK)
        """The object that the engine calls to reduce gradients, and the row of the method."""
        if isinstance(self.optimizer, DeepSpeedZeroOptimizer):
            is_stage_2 = int(engine.zero_optimization_stage()) == 2
            self.reduction = (self.optimizer, patches.ZERO_EPILOGUE if is_stage_2 else patches.REDUCE_ZERO)

    def bind(self, bindings: ExitStack) -> None:
        """Keep the optimizer's own hooks from gradients until the bindings are closed."""
        optimizer = self.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            _set({patches.ZERO_PROCESS: lambda parameter, group: None}, optimizer, bindings)
            reduced_elsewhere.add(optimizer)  # its step shall not sum over the copies of its partition a second time
            bindings.callback(reduced_elsewhere.discard, optimizer)
        if isinstance(optimizer, BF16_Optimizer):  # it accumulates in hooks (immediate_grad_update) or after backward
            _set({patches.HP_GRADIENTS: lambda clear_lp_grads=False: None}, optimizer, bindings)
            if optimizer._grad_acc_hooks:
                for hook in optimizer._grad_acc_hooks:
                    hook.remove()
                bindings.callback(optimizer.create_grad_acc_hooks)

    def mark_reduced(self) -> None:
        """Mark gradients as reduced for the optimizer. No-op here: its step reads ``parameter.grad``."""

    def reduce_tied(self, reduce: Callable[[], None]) -> None:
        """Sum the gradients of tied layers over their stages; ``reduce`` is the pipeline engine's own function."""
        reduce()

    def end_with_engine(self) -> None:
        """Prepare for the end of the engine; the bindings are closed next."""


class BF16Gradients(OptimizerGradients):
    """``BF16_Optimizer`` with Muon: gradients accumulate in flat buffers, one for each group of parameters."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__(engine)
        buffers = zip(self.optimizer.bf16_groups, self.optimizer.fp32_groups_gradients, strict=True)
        for parameters, gradients in buffers:
            self.grad_buffers |= zip(parameters, gradients, strict=True)

    def bind(self, bindings: ExitStack) -> None:
        """Remove the optimizer's hooks, and set the gradients that the pipeline engine reads."""
        super().bind(bindings)
        for parameter, gradient in self.grad_buffers.items():
            _set({patches.HP_GRADIENT: gradient}, parameter, bindings)

    def mark_reduced(self) -> None:
        """Mark all buffers as filled."""
        for flags in self.optimizer.fp32_groups_has_gradients:
            flags[:] = [True] * len(flags)


class Zero1Gradients(OptimizerGradients):
    """ZeRO stage 1 with Muon, which needs whole matrices: it takes its partition from reduced ``parameter.grad``."""

    def bind(self, bindings: ExitStack) -> None:
        """Limit its hooks to counting backward passes, and its epilogue to collecting the partition."""
        super().bind(bindings)
        values = {patches.ZERO_OVERLAP: False, patches.ZERO_REDUCE_REST: lambda comm_dtype=None: None}
        _set(values, self.optimizer, bindings)

    def mark_reduced(self) -> None:
        """Collect this rank's partition."""
        self.optimizer.overlapping_partition_gradients_reduce_epilogue()


def _refuse_offload(*_: object, **__: object) -> None:
    raise RuntimeError(
        "offload_states() with a GradientReducer attached: detach() it first; its layout of the partition differs"
    )


# -- ZeRO 1 and 2 in our layout --------------------------------------------------------------------------------------


class OwnSlices:
    """Replaces DeepSpeed's tensor of this rank's part of the flat parameters, which its optimizers only write."""

    def __init__(self, group: FlatGroup, parameters: PartitionedParameters) -> None:
        self._group, self._parameters = group, parameters

    @property
    def data(self) -> OwnSlices:
        """The object itself, in place of ``Tensor.data``."""
        return self

    def copy_(self, partition: torch.Tensor) -> OwnSlices:
        """Write the updated partition of this rank to its places in the flat parameters."""
        self._parameters.wait()  # the previous values may not have been sent yet
        for own, place in self._group.slices():
            own.copy_(partition[place])
        return self

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each slice of the parameters, which have all arrived, and the same elements of the master weights."""
        self._parameters.wait()
        for own, place in self._group.slices():
            yield own, self._group.master.data[place]


class PartitionedOptimizer(OptimizerGradients, ABC):
    """The connection at ZeRO 1 and 2: DeepSpeed's optimizer runs in our layout while the reducer is attached.

    Args:
        engine: the engine.
        sizes: the sizes of the regions.
        whole: parameters that every rank needs whole.
    """

    def __init__(self, engine: DeepSpeedEngine, sizes: BucketSizes, whole: Collection[nn.Parameter]) -> None:
        super().__init__(engine)
        self._sizes, self._whole, self._copies = sizes, whole, copies_of(engine.mpu)
        self.reduces_always = int(engine.zero_optimization_stage()) == 2
        self.groups = list(self._flat_groups())
        self.partitions = [group.gradients for group in self.groups]
        self.parameters = PartitionedParameters(self.groups)
        self._bindings = ExitStack()
        """The patches of our layout, which end while DeepSpeed saves or loads."""
        self._engine_ends = False

    # -- differences between the two optimizers

    @abstractmethod
    def _flat_groups(self) -> Iterator[FlatGroup]:
        """Yield the parameter groups as DeepSpeed has laid them out."""

    @abstractmethod
    def _addresses(self) -> dict[Patch, object]:
        """Return the replacements of the optimizer's addresses, by their rows."""

    @abstractmethod
    def _gradient_fragments(self) -> dict[int, list[torch.Tensor]]:
        """Return the gradients that DeepSpeed's functions for single parameters read, by group."""

    @abstractmethod
    def _hand_over(self, group: FlatGroup, partition: torch.Tensor) -> None:
        """Pass this rank's partition of a group's reduced gradients to the optimizer."""

    # -- the reducer's calls

    def bind(self, bindings: ExitStack) -> None:
        """Move the optimizer to our layout and disable its own hooks; collective, and so is its end."""
        super().bind(bindings)
        bindings.push(bind_methods(parameter_gathers.OF_OPTIMIZERS, self.optimizer))
        self._enter()
        bindings.callback(self._end)

    def _end(self) -> None:
        self.parameters.rest()
        if self._engine_ends:
            self._bindings.close()
        else:
            self._leave()

    def end_with_engine(self) -> None:
        """Skip the move back to DeepSpeed's layout, which is no longer needed."""
        self._engine_ends = True

    def mark_reduced(self) -> None:
        """Pass the optimizer its partition after the last micro-batch."""
        if self.engine.is_gradient_accumulation_boundary():
            for group in self.groups:
                self._hand_over(group, group.gradients.take())

    def reduce_tied(self, reduce: Callable[[], None]) -> None:
        """Sum the whole gradients in the partitions' memory, since stages own different parts of them."""
        for weight, group in self.engine.module.get_tied_weights_and_groups():
            for partition in self.partitions:
                if weight in partition.regions:
                    dist.all_reduce(partition.place_of(weight), group=group)

    # -- our layout

    def _enter(self) -> None:
        """Move parameters and states to our layout; collective."""
        for group in self.groups:
            group.arrange(group.ours)
            _ = group.gradients.exchange  # created here by all ranks together, not during a backward pass
        self._move(to_ours=True)
        self._bind_names()
        self._relink(self._link_fragments)
        self.parameters.renew()

    def _leave(self) -> None:
        """Move parameters and states back to DeepSpeed's layout; collective."""
        self.parameters.wait()
        self._bindings.close()
        self._move(to_ours=False)
        for group in self.groups:
            group.arrange(group.theirs)
        self._relink(self.optimizer._link_all_hp_params)

    def _flat_group(
        self,
        index: int,
        parameters: list[nn.Parameter],
        flat: torch.Tensor,
        master: torch.Tensor,
        offsets: Sequence[int],
        dtype: torch.dtype,
        flat_gradients: torch.Tensor | None = None,
    ) -> FlatGroup:
        process_group = self.optimizer.real_dp_process_group[index]
        size = dist.get_world_size(process_group)
        theirs = PartitionLayout.flat([parameter.numel() for parameter in parameters], offsets, master.numel(), size)
        copies = None if any(map(is_moe_param, parameters)) else self._copies
        number = 1 if copies is None else copies.number
        ours, needed_whole = balanced_layout(parameters, dtype.itemsize, size, self._sizes, self._whole, number)
        memory = None if flat_gradients is None else lengthened(flat_gradients, ours.numel)
        gradients = PartitionedGradients(
            parameters,
            ours,
            process_group,
            dtype,
            keeps=not self.reduces_always,
            whole=needed_whole,
            memory=memory,
            copies=copies,
            ends_step=self.engine.is_gradient_accumulation_boundary,
        )
        return FlatGroup(index, parameters, flat, master, theirs, gradients)

    def _own_slices(self) -> list[list[OwnSlices]]:
        """Return the replacement of each group's list of all ranks' partitions."""
        return [[OwnSlices(group, self.parameters)] * (group.gradients.rank + 1) for group in self.groups]

    def _bind_names(self) -> None:
        _set(self._addresses(), self.optimizer, self._bindings)
        rows = [row for row in patches.METHODS_OF_PARTITIONS if row.owner is type(self.optimizer)]
        makes = (around(self._save), around(self._load), always(self._refresh))
        for row, make in zip(rows, makes, strict=True):
            self._bindings.callback(ledger.bind(row, make, self.optimizer))

    def _move(self, *, to_ours: bool) -> None:
        """Move the master weights and optimizer states of every group to the other layout; collective."""
        inner = self.optimizer.optimizer
        for group in self.groups:
            source, target = (group.theirs, group.ours) if to_ours else (group.ours, group.theirs)
            partitions = {
                name: moved(value, source, target, group.gradients.group)
                for name, value in sorted(inner.state.get(group.master, {}).items())
                if torch.is_tensor(value) and value.shape == group.master.shape
            }
            _put(inner, group.master, moved(group.master.detach(), source, target, group.gradients.group), partitions)

    # -- DeepSpeed's functions for single parameters

    def _relink(self, link: Callable[[], None]) -> None:
        link()
        optimizer = self.optimizer
        if optimizer._hp_optimizer_states_linked:
            optimizer._hp_optimizer_states_linked = False
            if all(group.master in optimizer.optimizer.state for group in self.groups):
                optimizer._lazy_init_hp_params_optimizer_state()

    def _link_fragments(self) -> None:
        """Set the links that ``safe_get_full_fp32_param`` and similar functions follow, as ``link_hp_params`` does."""
        gradients = self._gradient_fragments()
        for group in self.groups:
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

    # -- checkpoints

    def _save(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's ``state_dict()`` in DeepSpeed's layout.

        Collective over the ranks that share the first flat tensor. Ranks that do not come are named.
        """
        agree(
            "",
            sorted(dist.get_process_group_ranks(self.groups[0].gradients.group)),
            job_timeout(),
            subject="optimizer.state_dict(), which all ranks must call together with a GradientReducer attached",
        )
        inner = self.optimizer.optimizer
        kept = [(group.master.data, inner.state.get(group.master, {})) for group in self.groups]
        self._bindings.close()
        try:
            self._move(to_ours=False)
            result = state_dict()
            masters = result[SINGLE_PARTITION_OF_FP32_GROUPS]
            result[SINGLE_PARTITION_OF_FP32_GROUPS] = [master.detach() for master in masters]  # in this layout
        finally:
            for group, (master, states) in zip(self.groups, kept, strict=True):
                _put(inner, group.master, master, states)
            self._bind_names()
        return result

    def _load(self, load_state_dict: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Load states in DeepSpeed's layout; collective."""
        self._leave()
        try:
            load_state_dict(*arguments, **options)
        finally:
            self._enter()

    def _refresh(self) -> None:
        """Copy the parameters to the master weights, in place of ``_restore_from_bit16_weights``."""
        self.parameters.wait()
        for group in self.groups:
            for own, place in group.slices():
                group.master.data[place].copy_(own)


class PartitionedZero(PartitionedOptimizer):
    """``DeepSpeedZeroOptimizer`` in our layout."""

    optimizer: DeepSpeedZeroOptimizer

    def _flat_groups(self) -> Iterator[FlatGroup]:
        optimizer = self.optimizer
        for index, parameters in enumerate(optimizer.bit16_groups):
            in_place = optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index]
            offset_of = dict(zip(*in_place, strict=True))
            offsets = [offset_of[parameter] for parameter in parameters]
            flat, master = optimizer.bit16_groups_flat[index], optimizer.single_partition_of_fp32_groups[index]
            dtype = optimizer.gradient_accumulation_dtype if optimizer.use_separate_grad_accum else flat.dtype
            yield self._flat_group(index, parameters, flat, master, offsets, dtype)

    def _addresses(self) -> dict[Patch, object]:
        offsets = [
            [group.gradients.offsets[parameter] for parameter in in_their_order]
            for group, in_their_order in zip(self.groups, self.optimizer.round_robin_bit16_groups, strict=True)
        ]
        return {
            patches.ZERO_FLATS: self.parameters,
            patches.ZERO_PARTITIONS: self._own_slices(),
            patches.ZERO_PARTITION_SIZE: [group.ours.partition_numel for group in self.groups],
            patches.ZERO_OWNED: [group.owned for group in self.groups],
            patches.ZERO_OFFSETS: offsets,
            patches.ZERO_SET_VIEWS: lambda group_index: None,
        }

    def _gradient_fragments(self) -> dict[int, list[torch.Tensor]]:
        fragments: dict[int, list[torch.Tensor]] = self.optimizer.averaged_gradients
        return fragments

    def bind(self, bindings: ExitStack) -> None:
        """Move the optimizer to our layout; also refuse what would move it to another one."""
        super().bind(bindings)
        _set({patches.OFFLOAD_STATES: _refuse_offload}, self.optimizer, bindings)

    def _hand_over(self, group: FlatGroup, partition: torch.Tensor) -> None:
        self.optimizer.averaged_gradients[group.index] = _Gradients(group.fragments_of(partition), partition)


class _Gradients(list[torch.Tensor]):
    """The gradients of single parameters, for the norm of ``DeepSpeedZeroOptimizer``, and their flat tensor."""

    def __init__(self, fragments: list[torch.Tensor], partition: torch.Tensor) -> None:
        super().__init__(fragments)
        self.flat_partition = partition


class PartitionedBF16(PartitionedOptimizer):
    """``BF16_Optimizer``, which accumulates gradients in a second data type, in our layout."""

    optimizer: BF16_Optimizer

    def _flat_groups(self) -> Iterator[FlatGroup]:
        optimizer = self.optimizer
        for index, parameters in enumerate(optimizer.bf16_groups):
            offsets = list(accumulate((parameter.numel() for parameter in parameters), initial=0))[:-1]
            flat, master = optimizer.bf16_groups_flat[index], optimizer.fp32_groups_flat_partition[index]
            gradients, dtype = optimizer.fp32_groups_gradients_flat[index], optimizer.grad_acc_dtype
            yield self._flat_group(index, parameters, flat, master, offsets, dtype, gradients)

    def _addresses(self) -> dict[Patch, object]:
        return {
            patches.BF16_FLATS: self.parameters,
            patches.BF16_PARTITIONS: self._own_slices(),
            patches.BF16_ALL_GRADIENTS: [],
            patches.BF16_PARTITION_OF_GRADIENTS: [group.gradients.partition for group in self.groups],
            patches.BF16_NORM: self._gradients_for_norm,
        }

    def _gradient_fragments(self) -> dict[int, list[torch.Tensor]]:
        return {group.index: group.fragments_of(group.gradients.partition) for group in self.groups}

    def _gradients_for_norm(self, for_clipping: bool = False) -> Any:
        """Replace ``get_grads_for_norm``, which expects whole gradients on every rank.

        Collective over the grid, or without one over the ranks that share gradients. Return the norm as the only
        gradient, or that of each kind, dense and expert. For clipping, return the partitions themselves.
        """
        if for_clipping:
            return [group.gradients.partition for group in self.groups]
        mpu = self.optimizer.mpu
        owned = [zip(group.owned, group.fragments_of(group.gradients.partition), strict=True) for group in self.groups]
        if isinstance(mpu, MpuGrid) and mpu.correct_norms:
            return norm_as_gradients(partition_norm(chain.from_iterable(owned), mpu), mpu)
        is_first = mpu is None or bwc_tensor_model_parallel_rank(mpu=mpu) == 0
        dense: list[torch.Tensor] = []
        of_experts: dict[str, list[torch.Tensor]] = {}
        for group, pairs in zip(self.groups, owned, strict=True):
            parts = [part.float() for parameter, part in pairs if counts_on_slice(parameter, is_first)]
            norms = [torch.linalg.vector_norm(part) for part in parts]
            device = group.gradients.partition.device
            square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
            dist.all_reduce(square, group=group.gradients.group)
            settings = self.optimizer.optimizer.param_groups[group.index]
            kind = of_experts.setdefault(settings["name"], []) if is_moe_param_group(settings) else dense
            kind.append(square.sqrt().reshape(1))
        return dense or [torch.zeros(1, device=get_accelerator().current_device_name())], of_experts

    def _hand_over(self, group: FlatGroup, partition: torch.Tensor) -> None:
        flags = self.optimizer.fp32_groups_has_gradients[group.index]
        flags[:] = [True] * len(flags)


def _put(inner: torch.optim.Optimizer, master: torch.Tensor, data: torch.Tensor, states: dict[str, Any]) -> None:
    master.data = data
    if states:  # a new dictionary: the result of an earlier state_dict() keeps the old one
        inner.state[master] = {**inner.state[master], **states}


# -- the choice -------------------------------------------------------------------------------------------------------


def gradients_of(engine: DeepSpeedEngine, sizes: Callable[[], BucketSizes]) -> OptimizerGradients:
    """Return the connection to this engine's optimizer.

    Args:
        engine: the engine.
        sizes: returns the sizes of buckets; called only if a layout depends on them.

    Raises:
        ValueError: no reducer can be attached to the engine; the message says why, and what to use.
    """
    if (reason := _refusal(engine)) is not None:
        raise ValueError(f"GradientReducer.attach: {reason}")
    optimizer = engine.optimizer
    if not isinstance(optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer)):
        return OptimizerGradients(engine)
    tied: set[nn.Parameter] = set()  # their stages sum gradients, and own different parts of them
    if isinstance(engine, PipelineEngine):
        tied = {weight for weight, _ in engine.module.get_tied_weights_and_groups()}
    is_bf16 = isinstance(optimizer, BF16_Optimizer)
    if _can_move(optimizer):
        return (PartitionedBF16 if is_bf16 else PartitionedZero)(engine, sizes(), tied)
    return BF16Gradients(engine) if is_bf16 else Zero1Gradients(engine)


def _can_move(optimizer: BF16_Optimizer | DeepSpeedZeroOptimizer) -> bool:
    """Return whether the optimizer can run in our layout: its arithmetic does not depend on DeepSpeed's."""
    if not is_element_by_element(optimizer.optimizer):
        return False
    if isinstance(optimizer, BF16_Optimizer):
        return not optimizer._uses_muon
    return not any(optimizer._is_muon_group(parameters) for parameters in optimizer.bit16_groups)


def _refusal(engine: DeepSpeedEngine) -> str | None:
    """Return the reason why no reducer can be attached to an engine, or None."""
    if (reason := refusal_of_reducer(engine._config)) is not None:
        return reason
    if not getattr(engine.optimizer, "param_groups", None):
        return "the engine has no optimizer, so it never reduces gradients: give deepspeed.initialize one"
    if not engine.enable_backward_allreduce and not engine.pipeline_parallelism:
        return f"the optimizer {engine.optimizer_name()!r} communicates by itself: choose one that does not"
    is_stage_2 = int(engine.zero_optimization_stage()) == 2
    if is_stage_2 and not is_element_by_element(engine.optimizer.optimizer):
        return (
            f"{type(engine.optimizer.optimizer).__name__} is not known to update each element by itself, so its "
            "partition cannot move to another layout, as stage 2 requires: use stage 0 or 1, or DeepSpeed's reduction"
        )
    if is_stage_2 and engine.micro_steps % engine.gradient_accumulation_steps():
        return "a step has begun, and its gradients are in DeepSpeed's partition: attach the reducer after the step"
    if engine.is_deepcompile_active():
        return "DeepCompile reduces gradients inside the compiled graph: switch it off"
    return None
