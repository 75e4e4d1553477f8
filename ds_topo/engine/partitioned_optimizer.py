"""ZeRO 1 and 2 in a balanced layout: DeepSpeed's optimizers keep their arithmetic, and get other addresses.

Each flat tensor of parameters is cut into regions, each region evenly over the ranks (:mod:`ds_topo.partition.layout`).
The rank's master weights and optimizer states move there once; the flat tensors keep their memory, in which parameters
change places. Checkpoints are DeepSpeed's own: what is saved has been moved back, what is loaded is moved here, so any
tool, and any engine, reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import SINGLE_PARTITION_OF_FP32_GROUPS
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from torch import nn

from ds_topo.engine import changes
from ds_topo.engine.flat_groups import FlatGroup, OwnSlices, balanced_layout, lengthened
from ds_topo.engine.norms import partitioned_norms
from ds_topo.engine.parameter_gathers import PartitionedParameters
from ds_topo.ledger import Change, Make, always, ledger
from ds_topo.partition.gradients import PartitionedGradients
from ds_topo.partition.layout import PartitionLayout
from ds_topo.partition.moving import moved
from ds_topo.reducer.planning import BucketSizes


class PartitionedOptimizer(ABC):
    """One of DeepSpeed's two optimizers for ZeRO 1 and 2 in our layout, from :meth:`enter` to :meth:`leave`."""

    def __init__(self, optimizer: Any, sizes: BucketSizes, whole: Collection[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.groups = [self._flat_group(index, sizes, whole) for index in range(len(self._masters))]
        self.parameters = PartitionedParameters(self.groups)
        self._bindings = ExitStack()

    # -- what differs between the two

    _rows_of_methods: ClassVar[tuple[Change, Change, Change]]
    """Of saving, loading and refreshing."""

    @property
    @abstractmethod
    def _masters(self) -> list[torch.Tensor]:
        """This rank's partitions of the master weights."""

    @abstractmethod
    def _flat_group(self, index: int, sizes: BucketSizes, whole: Collection[nn.Parameter]) -> FlatGroup:
        """A group of parameters as DeepSpeed has laid it out."""

    @abstractmethod
    def _addresses(self) -> list[tuple[Change, object]]:
        """What the optimizer finds at the names of its addresses meanwhile."""

    @abstractmethod
    def _gradient_fragments(self) -> dict[int, list[torch.Tensor]]:
        """Where DeepSpeed's functions for single parameters find gradients."""

    @abstractmethod
    def hand_over(self) -> None:
        """Give the optimizer this rank's partition of reduced gradients."""

    # -- both

    def enter(self) -> None:
        """Move everything to our layout; collective."""
        for group in self.groups:
            group.arrange(group.ours)
            _ = group.gradients.exchange  # which ranks build together, and not in the middle of a backward
        self._move(to_ours=True)
        self._bind()
        self._relink(self._link_fragments)

    def leave(self) -> None:
        """Move everything back to DeepSpeed's layout; collective."""
        self.parameters.wait()
        self._bindings.close()
        self._move(to_ours=False)
        for group in self.groups:
            group.arrange(group.theirs)
        self._relink(self.optimizer._link_all_hp_params)

    def end(self) -> None:
        """Leave everything where it is; the optimizer is not used any more."""
        self._bindings.close()

    def _bind(self) -> None:
        rows: list[tuple[Change, Make]] = [(row, always(value)) for row, value in self._addresses()]
        rows += zip(self._rows_of_methods, (self._saving, self._loading, always(self._refresh)), strict=True)
        for row, make in rows:
            self._bindings.callback(ledger.bind(row, make, self.optimizer))

    def _move(self, *, to_ours: bool) -> None:
        for group, tensors in zip(self.groups, self._states_in(to_ours=to_ours), strict=True):
            _put(self.optimizer.optimizer, group.master, *tensors)

    def _states_in(self, *, to_ours: bool) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Master weights and optimizer states of every group in a layout; collective."""
        result = []
        for group in self.groups:
            source, target = (group.theirs, group.ours) if to_ours else (group.ours, group.theirs)
            states = self.optimizer.optimizer.state.get(group.master, {})
            partitions = {
                name: moved(value, source, target, group.group)
                for name, value in sorted(states.items())
                if torch.is_tensor(value) and value.shape == group.master.shape
            }
            result.append((moved(group.master.detach(), source, target, group.group), partitions))
        return result

    # -- DeepSpeed's functions for single parameters

    def _relink(self, link: Callable[[], None]) -> None:
        link()
        optimizer = self.optimizer
        if optimizer._hp_optimizer_states_linked:
            optimizer._hp_optimizer_states_linked = False
            if all(group.master in optimizer.optimizer.state for group in self.groups):
                optimizer._lazy_init_hp_params_optimizer_state()

    def _link_fragments(self) -> None:
        """What ``deepspeed.utils.safe_get_full_fp32_param`` and its like look up, as ``link_hp_params`` leaves it."""
        gradients = self._gradient_fragments()
        for group in self.groups:
            for parameter in group.parameters:
                parameter._hp_mapping = None  # type: ignore[attr-defined]
            for place, part in enumerate(group.own):
                parameter = group.parameters[part.parameter]
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

    def _saving(self, state_dict: Any) -> Any:
        @wraps(state_dict)
        def in_deepspeeds_layout() -> dict[str, Any]:
            """Collective."""
            inner = self.optimizer.optimizer
            kept = [(group.master.data, dict(inner.state.get(group.master, {}))) for group in self.groups]
            theirs = self._states_in(to_ours=False)
            try:
                for group, tensors in zip(self.groups, theirs, strict=True):
                    _put(inner, group.master, *tensors)
                with self._without_addresses():
                    result: dict[str, Any] = state_dict()
            finally:
                for group, (master, states) in zip(self.groups, kept, strict=True):
                    _put(inner, group.master, master, states)
            live = {id(group.master): master for group, (master, _) in zip(self.groups, theirs, strict=True)}
            saved = result[SINGLE_PARTITION_OF_FP32_GROUPS]
            result[SINGLE_PARTITION_OF_FP32_GROUPS] = [live.get(id(tensor), tensor) for tensor in saved]
            return result

        return in_deepspeeds_layout

    def _loading(self, load_state_dict: Any) -> Any:
        @wraps(load_state_dict)
        def from_deepspeeds_layout(*arguments: Any, **options: Any) -> None:
            """Collective."""
            with self._without_layout():
                load_state_dict(*arguments, **options)

        return from_deepspeeds_layout

    @contextmanager
    def _without_layout(self) -> Iterator[None]:
        self.leave()
        try:
            yield
        finally:
            self.enter()

    @contextmanager
    def _without_addresses(self) -> Iterator[None]:
        self._bindings.close()
        try:
            yield
        finally:
            self._bind()

    def _refresh(self) -> None:
        """Master weights from the parameters, in place of ``_restore_from_bit16_weights``."""
        self.parameters.wait()
        for group in self.groups:
            for own, where in group.slices():
                group.master.data[where].copy_(own)


class PartitionedZero(PartitionedOptimizer):
    """``DeepSpeedZeroOptimizer``."""

    optimizer: DeepSpeedZeroOptimizer

    @property
    def _masters(self) -> list[torch.Tensor]:
        masters: list[torch.Tensor] = self.optimizer.single_partition_of_fp32_groups
        return masters

    _rows_of_methods = changes.METHODS_OF_PARTITIONS[DeepSpeedZeroOptimizer]

    def _flat_group(self, index: int, sizes: BucketSizes, whole: Collection[nn.Parameter]) -> FlatGroup:
        optimizer = self.optimizer
        parameters, process_group = optimizer.bit16_groups[index], optimizer.real_dp_process_group[index]
        in_place = optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index]
        offsets = dict(zip(*in_place, strict=True))
        size = dist.get_world_size(process_group)
        theirs = PartitionLayout.flat(
            [parameter.numel() for parameter in parameters],
            [offsets[parameter] for parameter in parameters],
            int(optimizer.partition_size[index]),
            size,
        )
        flat = optimizer.bit16_groups_flat[index]
        separate = optimizer.use_separate_grad_accum
        dtype = optimizer.gradient_accumulation_dtype if separate else flat.dtype
        ours, needed_whole = balanced_layout(parameters, dtype.itemsize, size, sizes, whole)
        gradients = PartitionedGradients(
            parameters, ours, process_group, dtype, keeps=not optimizer.partition_gradients, whole=needed_whole
        )
        return FlatGroup(index, parameters, flat, self._masters[index], process_group, theirs, ours, gradients)

    def _addresses(self) -> list[tuple[Change, object]]:
        groups = self.groups
        return [
            (changes.ZERO_FLATS, self.parameters),
            (changes.ZERO_PARTITIONS, [[OwnSlices(group, self.parameters)] * (group.rank + 1) for group in groups]),
            (changes.ZERO_PARTITION_SIZE, [group.ours.partition_numel for group in groups]),
            (changes.ZERO_OWNED, [group.owned for group in groups]),
            (changes.ZERO_OFFSETS, [self._offsets_in_their_order(group) for group in groups]),
        ]

    def _offsets_in_their_order(self, group: FlatGroup) -> list[int]:
        offsets = group.gradients.offsets
        return [offsets[parameter] for parameter in self.optimizer.round_robin_bit16_groups[group.index]]

    def _gradient_fragments(self) -> dict[int, list[torch.Tensor]]:
        fragments: dict[int, list[torch.Tensor]] = self.optimizer.averaged_gradients
        return fragments

    def hand_over(self) -> None:
        """As its epilogue would, after the last micro-batch."""
        for group in self.groups:
            partition = group.gradients.take()
            self.optimizer.averaged_gradients[group.index] = _Gradients(group.fragments_of(partition), partition)


class _Gradients(list[torch.Tensor]):
    """Gradients of single parameters, which ``DeepSpeedZeroOptimizer`` takes the norm of, and all of them as one."""

    def __init__(self, fragments: list[torch.Tensor], partition: torch.Tensor) -> None:
        super().__init__(fragments)
        self.flat_partition = partition


class PartitionedBF16(PartitionedOptimizer):
    """``BF16_Optimizer``, which accumulates in a second data type."""

    optimizer: BF16_Optimizer

    @property
    def _masters(self) -> list[torch.Tensor]:
        masters: list[torch.Tensor] = self.optimizer.fp32_groups_flat_partition
        return masters

    _rows_of_methods = changes.METHODS_OF_PARTITIONS[BF16_Optimizer]

    def _flat_group(self, index: int, sizes: BucketSizes, whole: Collection[nn.Parameter]) -> FlatGroup:
        optimizer = self.optimizer
        parameters, process_group = optimizer.bf16_groups[index], optimizer.real_dp_process_group[index]
        size, flat = dist.get_world_size(process_group), optimizer.bf16_groups_flat[index]
        numels = [parameter.numel() for parameter in parameters]
        offsets = [end - numel for end, numel in zip(accumulate(numels), numels, strict=True)]
        theirs = PartitionLayout.flat(numels, offsets, flat.numel() // size, size)
        dtype = optimizer.grad_acc_dtype
        ours, needed_whole = balanced_layout(parameters, dtype.itemsize, size, sizes, whole)
        gradients = PartitionedGradients(
            parameters,
            ours,
            process_group,
            dtype,
            keeps=True,
            whole=needed_whole,
            memory=lengthened(optimizer.fp32_groups_gradients_flat[index], ours.numel),
        )
        return FlatGroup(index, parameters, flat, self._masters[index], process_group, theirs, ours, gradients)

    def _addresses(self) -> list[tuple[Change, object]]:
        groups = self.groups
        return [
            (changes.BF16_FLATS, self.parameters),
            (changes.BF16_PARTITIONS, [[OwnSlices(group, self.parameters)] * (group.rank + 1) for group in groups]),
            (changes.BF16_ALL_GRADIENTS, []),
            (changes.BF16_PARTITION_OF_GRADIENTS, [group.gradients.partition for group in groups]),
            (changes.BF16_NORM, partitioned_norms(self.optimizer, groups)),
        ]

    def _gradient_fragments(self) -> dict[int, list[torch.Tensor]]:
        return {group.index: group.fragments_of(group.gradients.partition) for group in self.groups}

    def hand_over(self) -> None:
        """Its step reads the partition where it is."""
        for group in self.groups:
            group.gradients.take()
        for flags in self.optimizer.fp32_groups_has_gradients:
            flags[:] = [True] * len(flags)


def partitioned(
    optimizer: Any, sizes: Callable[[], BucketSizes], whole: Collection[nn.Parameter]
) -> PartitionedOptimizer | None:
    """The optimizer in our layout; None if its arithmetic needs whole parameters in DeepSpeed's."""
    if getattr(optimizer, "autoep_folding_tp_group", None) is not None:
        return None
    if isinstance(optimizer, BF16_Optimizer):
        return None if optimizer._uses_muon else PartitionedBF16(optimizer, sizes(), whole)
    if any(optimizer._is_muon_group(parameters) for parameters in optimizer.bit16_groups):
        return None
    return PartitionedZero(optimizer, sizes(), whole)


def _put(inner: torch.optim.Optimizer, master: torch.Tensor, data: torch.Tensor, states: dict[str, Any]) -> None:
    master.data = data
    if states:  # a new dictionary: what state_dict() has handed out keeps the old one
        inner.state[master] = {**inner.state[master], **states}
