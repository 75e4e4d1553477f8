"""Partition DeepSpeed's ZeRO over the axis ``shard`` alone, and keep the copies of each partition equal.

With ``data=4,shard=8``, ZeRO 1, 2 and 3 partition over 8 ranks, and 4 ranks hold each partition. DeepSpeed's optimizers
get the group along ``shard`` as theirs, so they gather parameters and count norms inside it. Gradients are also summed
over the copies, once per step:

    with a GradientReducer     the reduction of a region goes on over the copies (:mod:`ds_topo.reduction.exchange`),
                               during the last backward pass
    ZeRO 1 and 2 without one   the partition is summed after the last backward pass; with Muon, whole matrices are,
                               before updates are made of them
    BF16_Optimizer             the engine sums whole gradients over all replicas before the step, so nothing is missing
    ZeRO 3                     each bucket of the last micro-batch is summed over the copies while backward goes on

Experts stay partitioned over all of their own replicas, with and without ``shard``.

Bytes of a rank with ``N`` parameters and a degree ``s`` of ``shard``, in bf16 with Adam, besides buckets and buffers::

    ZeRO 1    2 N + 12 N / s, and 2 N of gradients until they are reduced
    ZeRO 2    2 N + 14 N / s
    ZeRO 3    16 N / s

With ``P`` bytes of gradients and copies on ``h`` hosts, one on each, a host sends ``2 P (h - 1) / h`` per step.

Sources: FSDP2's HSDP; Zhang et al., MiCS (VLDB 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    OPTIMIZER_STATE_DICT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.moe.utils import is_moe_param, is_moe_param_group
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_topo.base.classes import Mixin
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.engine.partition_sums import PartitionSum, SummedPartitions, SumsOfStep
from ds_topo.mpu import MpuGrid, has_shard
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reduction.exchange import PartitionHolders


class ShardedEngine(EngineOnGrid):
    """An engine that partitions over ``shard`` alone."""

    mixin_state = "partition_copies"
    partition_copies: PartitionHolders | None
    """The ranks with copies of this rank's partition; None if there are no others."""
    seq_data_parallel_group: Any

    def complete(self) -> None:
        """Sum gradients over the copies, too, and save each partition once, so that bytes do not grow with copies."""
        super().complete()
        if self.zero_optimization() or isinstance(self.optimizer, BF16_Optimizer):
            is_first = self.mpu.get_copy_rank() == 0
            self.save_zero_checkpoint = is_first or self.has_moe_layers
            if self.zero_optimization_partition_weights():
                self.save_non_zero_checkpoint = is_first
        self.partition_copies = copies_of(self.mpu)
        if self.partition_copies is not None:
            mixin = self.give_optimizer(ShardedZero, ShardedBF16, SummedPartitions)
            if mixin is SummedPartitions:
                self.optimizer.sums = SumsOfStep(self.partition_copies)
            elif mixin is not None:
                self.optimizer.copies = CopiesOfPartition(self.partition_copies, set())

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Partition over the axis ``shard``; DeepSpeed partitions over all replicas."""
        with self._partitioned_over_shard():
            super()._configure_optimizer(client_optimizer, model_parameters)

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        """Partition over ``shard`` for ZeRO without an optimizer, too. DeepSpeed then calls only this method."""
        with self._partitioned_over_shard() if optimizer is None else nullcontext():
            return super()._configure_zero_optimizer(optimizer)

    @contextmanager
    def _partitioned_over_shard(self) -> Iterator[None]:
        grid = self.mpu
        whole = self.seq_data_parallel_group
        partitions_parameters = self.zero_optimization_partition_weights()
        if partitions_parameters:
            _make_copies_equal(self.module.parameters(), grid)
        self.seq_data_parallel_group = grid.get_partition_group()
        try:
            if partitions_parameters:
                self.mpu = _OverPartitions.over(grid)
            yield
        finally:
            self.seq_data_parallel_group, self.mpu = whole, grid

    def save_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """Save the partitions of experts, which all replicas share, in a file of each replica."""
        with self._with_own_file():
            return super().save_checkpoint(*arguments, **options)

    def load_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """Load them from there."""
        with self._with_own_file():
            return super().load_checkpoint(*arguments, **options)

    @contextmanager
    def _with_own_file(self) -> Iterator[None]:
        """Name the file of this rank's partitions by its number among all replicas.

        Experts are partitioned over all replicas, so with them each replica has a file. Those of later copies have the
        partitions of experts alone. DeepSpeed asks ``dp_process_group`` for the number.
        """
        optimizer = self.optimizer
        copies: CopiesOfPartition | None = getattr(optimizer, "copies", None)  # None at ZeRO 0 and 3
        if copies is None or not self.has_moe_layers:
            yield
            return
        partitions, optimizer.dp_process_group = optimizer.dp_process_group, copies.holders.whole
        copies.has_own_file = True
        try:
            yield
        finally:
            optimizer.dp_process_group, copies.has_own_file = partitions, False

    def _get_all_zero_checkpoint_state_dicts(self, zero_ckpt_names: list[str]) -> Any:
        """Take dense partitions from the file of their first replica; that of this one has only those of experts."""
        states = super()._get_all_zero_checkpoint_state_dicts(zero_ckpt_names)
        copies: CopiesOfPartition | None = getattr(self.optimizer, "copies", None)
        if copies is None or not copies.has_experts_alone:
            return states
        holders = copies.holders
        own = states[dist.get_rank(holders.whole)]
        first = dist.get_group_rank(holders.whole, dist.get_global_rank(holders.group, 0))
        content = self.checkpoint_engine.load(zero_ckpt_names[first], map_location="cpu")[OPTIMIZER_STATE_DICT]
        of_dense = content[BASE_OPTIMIZER_STATE]["state"]
        for group in _dense_groups(self.optimizer):
            own[SINGLE_PARTITION_OF_FP32_GROUPS][group] = content[SINGLE_PARTITION_OF_FP32_GROUPS][group]
            own[BASE_OPTIMIZER_STATE]["state"] |= {group: of_dense[group]} if group in of_dense else {}
        return states


@dataclass
class CopiesOfPartition:
    """The copies of an optimizer's partition."""

    holders: PartitionHolders
    """The ranks with copies."""
    summed: set[int]
    """The parameter groups whose gradients are summed over the copies, until the step."""
    has_own_file: bool = False
    """True while each replica saves or loads a file of its own."""

    @property
    def has_experts_alone(self) -> bool:
        """True while this rank saves or loads the partitions of experts alone."""
        return self.has_own_file and dist.get_rank(self.holders.group) > 0


class ShardedZero(Mixin, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer``, of ZeRO 1 and 2."""

    mixin_state = "copies"
    copies: CopiesOfPartition

    def get_flat_partition(self, *arguments: Any, **options: Any) -> Any:
        """Sum the partition over its copies here, where programs and DeepSpeed's functions read it until the step.

        DeepSpeed has summed gradients over ``shard``, and divided by the degree of that axis instead of the number of
        replicas. The whole gradients, from which it cuts the partition, stay as they are, because a checkpointed module
        that runs again adds to them.
        """
        make, group = partial(super().get_flat_partition, *arguments, **options), options["param_group_idx"]
        self.copies.summed.add(group)
        if hasattr(self, "reduction"):  # a reducer has summed over the copies
            return make()
        uses_muon = "muon" in type(self.optimizer).__name__.lower()  # DeepSpeed's own criterion
        if uses_muon and any(getattr(each, "use_muon", False) for each in self.bit16_groups[group]):
            # Gradients become updates before the step, and a sum of updates is no update of the sum.
            if gradients := self.all_grad_tensors[group]:
                self.all_grad_tensors[group] = self._sum_of(group, gradients).take()
            return make()
        parts = make()
        sums = self._sum_of(group, parts).take()
        for part, total in zip(parts, sums, strict=True):
            if getattr(part, "_zero_padding", False):
                total._zero_padding = True  # type: ignore[attr-defined]
        return sums

    def step(self, closure: object = None) -> Any:
        """Sum over the ranks that hold the same partition what is not summed yet.

        These are gradients in host memory, and those of another type than the parameters, which DeepSpeed collects in
        memory of the partition.
        """
        if not hasattr(self, "reduction"):
            for group in set(range(len(self.bit16_groups))).difference(self.copies.summed):
                if self.cpu_offload:
                    self._sum_offloaded(group)
                elif gradients := self.averaged_gradients.get(group):
                    self._sum_of(group, gradients).wait()
        self.copies.summed.clear()
        return super().step(closure)

    def _sum_of(self, group: int, tensors: list[torch.Tensor], dtype: torch.dtype | None = None) -> PartitionSum:
        """Start the sum of tensors of a parameter group over the copies."""
        copies = self.copies.holders
        among = None if any(map(is_moe_param, self.bit16_groups[group])) else copies.group
        scale = 1 / copies.number if self.gradient_average else 1.0
        return PartitionSum(tensors, among, scale, dtype or tensors[0].dtype)

    def _sum_offloaded(self, group: int) -> None:
        """Sum a partition of gradients in host memory, in pieces of a bucket, and take its norms and overflow anew."""
        get_accelerator().synchronize()  # gradients may still be on their way to host memory
        (master,) = self.param_groups[group]["params"]
        gradients = master.grad.view(-1)
        for piece in gradients.split(int(self.reduce_bucket_size)):
            self._sum_of(group, [piece], self.bit16_groups_flat[group].dtype).wait()
        self.local_overflow |= not bool(gradients.isfinite().all())
        for parameter in self.params_in_partition[group]:
            number = self.get_param_id(parameter)
            _, _, start, numel = self.grad_position[number]
            self.norm_for_param_grads[number] = gradients[start : start + numel].norm()

    def has_overflow(self, *arguments: Any, **options: Any) -> bool:
        """Look for overflows on all replicas, because experts may overflow on any of them."""
        found = bool(super().has_overflow(*arguments, **options))
        if not self.has_moe_layers:
            return found
        flag = torch.tensor([found], dtype=torch.uint8, device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.copies.holders.group)
        return bool(flag.item())

    def state_dict(self) -> dict[str, Any]:
        """Leave out partitions of dense parameters, except on the first replica of each: a partition is saved once."""
        return _states_of_replica(self, super().state_dict())


class ShardedBF16(Mixin, BF16_Optimizer):  # type: ignore[misc]
    """``BF16_Optimizer``, whose engine sums whole gradients over all replicas."""

    mixin_state = "copies"
    copies: CopiesOfPartition

    def state_dict(self) -> dict[str, Any]:
        """Leave out partitions of dense parameters, except on the first replica of each: a partition is saved once."""
        return _states_of_replica(self, super().state_dict())


def copies_of(grid: object) -> PartitionHolders | None:
    """Return the ranks with copies of this rank's partition; None if there are no others."""
    if not has_shard(grid):
        return None
    group = grid.get_copy_group()
    return PartitionHolders(group, grid.get_data_parallel_group()) if dist.get_world_size(group) > 1 else None


# -- construction -----------------------------------------------------------------------------------------------------


class _OverPartitions(MpuGrid):
    """The view of a grid whose data parallel group is the one that ZeRO 3 partitions over."""

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.get_partition_group()


def _make_copies_equal(parameters: Iterable[nn.Parameter], grid: MpuGrid) -> None:
    """Give all copies of a partition the values of the first: ``zero.Init`` makes those of one partition equal."""
    copies = grid.get_copy_group()
    if dist.get_world_size(copies) == 1:
        return
    for parameter in parameters:
        if hasattr(parameter, "ds_tensor"):
            dist.broadcast(parameter.ds_tensor.data, dist.get_global_rank(copies, 0), group=copies)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _states_of_replica(optimizer: ShardedZero | ShardedBF16, states: dict[str, Any]) -> dict[str, Any]:
    if not optimizer.copies.has_experts_alone:
        return states
    masters = list(states[SINGLE_PARTITION_OF_FP32_GROUPS])  # the optimizer may have the list itself
    for group in _dense_groups(optimizer):
        masters[group] = torch.tensor([])
        states[BASE_OPTIMIZER_STATE]["state"].pop(group, None)
    return {**states, SINGLE_PARTITION_OF_FP32_GROUPS: masters}


def _dense_groups(optimizer: Any) -> list[int]:
    """Return the numbers of the groups of parameters that are not experts."""
    groups = optimizer.optimizer.param_groups
    return [number for number, group in enumerate(groups) if not is_moe_param_group(group)]
