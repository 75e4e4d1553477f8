"""Give an engine and its optimizer what :mod:`ds_topo.engine.hybrid_sharding` does over the axis ``shard``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_topo.base.classes import Mixin
from ds_topo.engine import hybrid_sharding
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.reduction.exchange import PartitionHolders

if TYPE_CHECKING:
    from ds_topo.reduction.managed import ReplicaSums


class ShardedEngine(EngineOnGrid):
    """An engine that partitions over ``shard`` alone."""

    mixin_state = "copies"
    copies: PartitionHolders | None
    """The ranks with copies of this rank's partition; None if there are no others."""

    def complete(self) -> None:
        """Sum gradients over the copies, too, and save each partition once."""
        super().complete()
        hybrid_sharding.save_each_partition_once(self)
        self.copies = hybrid_sharding.copies_of(self.mpu)
        if self.copies is not None and self.give_optimizer(ShardedZero, ShardedBF16, SummedPartitions):
            self.optimizer.copies = CopiesOfPartition(self.copies, set())

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Partition over the axis ``shard``; DeepSpeed partitions over all replicas."""
        with hybrid_sharding.partitioned_over_shard(self):
            super()._configure_optimizer(client_optimizer, model_parameters)

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        """Partition over ``shard`` for ZeRO without an optimizer, too. DeepSpeed then calls only this method."""
        with hybrid_sharding.partitioned_over_shard(self) if optimizer is None else nullcontext():
            return super()._configure_zero_optimizer(optimizer)

    def save_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """Save the partitions of experts, which all replicas share, in a file of each replica."""
        with self._in_own_file():
            return super().save_checkpoint(*arguments, **options)

    def load_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """Load them from there."""
        with self._in_own_file():
            return super().load_checkpoint(*arguments, **options)

    def _in_own_file(self) -> Any:
        if self.copies is None or not self.has_moe_layers:
            return nullcontext()
        return hybrid_sharding.file_of_replica(self, self.copies)

    def _get_all_zero_checkpoint_state_dicts(self, zero_ckpt_names: list[str]) -> Any:
        """Take dense partitions from the file of their first replica; that of this one has only those of experts."""
        states = super()._get_all_zero_checkpoint_state_dicts(zero_ckpt_names)
        if self.copies is not None and hybrid_sharding.is_later_copy(self, self.copies):
            hybrid_sharding.add_states_of_dense(self, self.copies, states, zero_ckpt_names)
        return states


@dataclass
class CopiesOfPartition:
    """The copies of an optimizer's partition."""

    holders: PartitionHolders
    """The ranks with copies."""
    summed: set[int]
    """The parameter groups whose gradients are summed over the copies, until the step."""


class ShardedZero(Mixin, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer``, of ZeRO 1 and 2."""

    mixin_suffix, mixin_state = "OnGrid", "copies"
    copies: CopiesOfPartition

    def get_flat_partition(self, *arguments: Any, **options: Any) -> Any:
        """Sum the partition over its copies here, where programs and DeepSpeed's functions read it until the step."""
        make = partial(super().get_flat_partition, *arguments, **options)
        group = options["param_group_idx"]
        self.copies.summed.add(group)
        return hybrid_sharding.partition_over_copies(self.copies.holders, self, group, make)

    def step(self, closure: object = None) -> Any:
        """Sum over the ranks that hold the same partition what is not summed yet."""
        hybrid_sharding.sum_over_copies(self.copies.holders, self, self.copies.summed)
        self.copies.summed.clear()
        return super().step(closure)

    def has_overflow(self, *arguments: Any, **options: Any) -> bool:
        """Look for overflows on all replicas, because experts may overflow on any of them."""
        found = bool(super().has_overflow(*arguments, **options))
        return hybrid_sharding.overflows_anywhere(self.copies.holders, self, found)

    def state_dict(self) -> dict[str, Any]:
        """Leave out partitions of dense parameters, except on the first replica of each: a partition is saved once."""
        return _states_of_replica(self, super().state_dict())


class ShardedBF16(Mixin, BF16_Optimizer):  # type: ignore[misc]
    """``BF16_Optimizer``, whose engine sums whole gradients over all replicas."""

    mixin_suffix, mixin_state = "OnGrid", "copies"
    copies: CopiesOfPartition

    def state_dict(self) -> dict[str, Any]:
        """Leave out partitions of dense parameters, except on the first replica of each: a partition is saved once."""
        return _states_of_replica(self, super().state_dict())


class SummedPartitions(Mixin, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer_Stage3``, whose partitions have copies, on other ranks or in replicas of the job."""

    mixin_suffix, mixin_state = "OnGrid", "copies"
    copies: CopiesOfPartition | None
    replicas: ReplicaSums | None = None
    """The averages over the replicas of a ``Manager``; without one, None."""

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """Start the sums of partitions over their copies and over replicas."""
        partition, holders = super().partition_grads, None if self.copies is None else self.copies.holders
        return hybrid_sharding.partition_and_sum(
            holders, self.replicas, partition, self, params_to_release, grad_partitions
        )

    def independent_gradient_partition_epilogue(self) -> None:
        """Wait for these sums."""
        super().independent_gradient_partition_epilogue()
        hybrid_sharding.wait_for_sums(None if self.copies is None else self.copies.holders, self.replicas, self)


def _states_of_replica(optimizer: ShardedZero | ShardedBF16, states: dict[str, Any]) -> dict[str, Any]:
    if not hybrid_sharding.is_later_copy(optimizer, optimizer.copies.holders):
        return states
    return hybrid_sharding.states_of_experts(optimizer, states)
