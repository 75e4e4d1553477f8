"""Sum partitions of gradients over the ranks that hold copies of them, and over replicas of the job.

ZeRO 3 sums each bucket of the last micro-batch while backward goes on, for an axis ``shard``
(:mod:`ds_topo.engine.shard`) and for the section ``"replicas"`` (:mod:`ds_topo.engine.quorum`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_topo.base.classes import Mixin
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reduction.exchange import PartitionHolders

if TYPE_CHECKING:
    from ds_topo.reduction.managed import ReplicaSums


@dataclass
class CopiesOfPartition:
    """The copies of an optimizer's partition."""

    holders: PartitionHolders
    """The ranks with copies."""
    summed: set[int]
    """The parameter groups whose gradients are summed over the copies, until the step."""


class SummedPartitions(Mixin, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer_Stage3``, whose partitions have copies, on other ranks or in replicas of the job."""

    mixin_suffix, mixin_state = "OnGrid", "copies"
    copies: CopiesOfPartition | None
    replicas: ReplicaSums | None = None
    """The averages over the replicas of a ``Manager``; without one, None."""

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """Start the sums of partitions over their copies and over replicas."""
        partition, holders = super().partition_grads, None if self.copies is None else self.copies.holders
        return partition_and_sum(holders, self.replicas, partition, self, params_to_release, grad_partitions)

    def independent_gradient_partition_epilogue(self) -> None:
        """Wait for these sums."""
        super().independent_gradient_partition_epilogue()
        wait_for_sums(None if self.copies is None else self.copies.holders, self.replicas, self)


class PartitionSum:
    """A sum of tensors over the copies of a partition, in flight.

    Args:
        tensors: the tensors, which get the sums in :meth:`wait`.
        group: the ranks that hold copies; None if there is nothing to sum, only to scale.
        scale: a factor.
        dtype: the type in which they travel.
        replicas: continues the sum over replicas of this job; None if there are none.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        group: ProcessGroup | None,
        scale: float,
        dtype: torch.dtype,
        replicas: ReplicaSums | None = None,
    ) -> None:
        self._tensors = tensors
        device = get_accelerator().current_device_name()
        self._payload = torch.cat([tensor.reshape(-1).to(device, dtype) for tensor in tensors]).mul_(scale)
        work = None if group is None else dist.all_reduce(self._payload, group=group, async_op=True)
        wait: Callable[[], object] = (lambda: None) if work is None else work.wait
        self._wait = wait if replicas is None else replicas.start(wait, self._payload).wait

    def wait(self) -> None:
        """Wait, and write the sums to the tensors."""
        for tensor, total in zip(self._tensors, self.take(), strict=True):
            tensor.copy_(total)

    def take(self) -> list[torch.Tensor]:
        """Wait, and return the sums."""
        self._wait()
        parts = self._payload.split([tensor.numel() for tensor in self._tensors])
        return [part.view(tensor.shape) for tensor, part in zip(self._tensors, parts, strict=True)]


_steps: WeakKeyDictionary[Any, tuple[dict[int, torch.Tensor], list[PartitionSum]]] = WeakKeyDictionary()
"""The gradients of a step that are not summed over the copies yet, by optimizer: those of earlier micro-batches, by the
identity of their parameter, and sums in flight."""


def partition_and_sum(
    copies: PartitionHolders | None,
    replicas: ReplicaSums | None,
    partition_gradients: Callable[[list[Any], list[torch.Tensor]], Any],
    optimizer: DeepSpeedZeroOptimizer_Stage3,
    parameters: list[Any],
    partitions: list[torch.Tensor],
) -> Any:
    """Call ``partition_grads`` of ZeRO 3; in the last micro-batch, also start the sum of a bucket over the copies.

    An offloaded optimizer gets the gradients after that.
    """
    ends_step = optimizer.is_gradient_accumulation_boundary()
    optimizer.set_gradient_accumulation_boundary(ends_step and not optimizer.offload_optimizer)
    try:
        buffers = partition_gradients(parameters, partitions)
    finally:
        optimizer.set_gradient_accumulation_boundary(ends_step)
    kept, in_flight = _steps.setdefault(optimizer, ({}, []))
    rank = dist.get_rank(optimizer.dp_process_group)
    filled = [parameter for parameter in parameters if parameter.partition_numel() * rank < parameter.ds_numel]
    kept |= {id(parameter): buffer for parameter, buffer in zip(filled, buffers, strict=True)}
    if ends_step and buffers:
        for parameter in filled:
            del kept[id(parameter)]
        group, scale = (None, 1.0) if copies is None else (copies.group, 1 / copies.number)
        in_flight.append(PartitionSum(buffers, group, scale, optimizer.get_param_comm_dtype(filled[0]), replicas))
    return buffers


def wait_for_sums(
    copies: PartitionHolders | None, replicas: ReplicaSums | None, optimizer: DeepSpeedZeroOptimizer_Stage3
) -> None:
    """Wait for the sums of all buckets over copies and replicas, at the end of ZeRO 3's reduction."""
    if optimizer not in _steps or not optimizer.is_gradient_accumulation_boundary():
        return
    kept, in_flight = _steps.pop(optimizer)
    stream = optimizer.reduce_and_partition_stream
    with get_accelerator().stream(stream):
        if unused := list(kept.values()):  # of parameters that the last micro-batch did not use
            group, scale = (None, 1.0) if copies is None else (copies.group, 1 / copies.number)
            in_flight.append(PartitionSum(unused, group, scale, unused[0].dtype, replicas))
        for sum_over_copies in in_flight:
            sum_over_copies.wait()
    if not get_accelerator().resolves_data_dependency():
        stream.synchronize()
    if optimizer.offload_optimizer:
        optimizer._finalize_offload_gradient_accumulation()
