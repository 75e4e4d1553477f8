"""Sum partitions of gradients over the ranks that hold copies of them, and over replicas of the job.

ZeRO 3 sums each bucket of the last micro-batch while backward goes on, for an axis ``shard``
(:mod:`ds_topo.engine.shard`) and for the section ``"replicas"`` (:mod:`ds_topo.engine.quorum`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_topo.base.classes import Mixin
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reduction.exchange import PartitionHolders

if TYPE_CHECKING:
    from ds_topo.reduction.managed import ReplicaSums


class SummedPartitions(Mixin, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer_Stage3``, whose partitions have copies, on other ranks or in replicas of the job."""

    mixin_state = "sums"
    sums: SumsOfStep

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """Start the sums of partitions over their copies and over replicas."""
        return self.sums.start(super().partition_grads, self, params_to_release, grad_partitions)

    def independent_gradient_partition_epilogue(self) -> None:
        """Wait for these sums."""
        super().independent_gradient_partition_epilogue()
        self.sums.end(self)


class PartitionSum:
    """A sum of tensors over the ranks with copies of a partition, in flight; continued over replicas if there are some.

    Without a group they are only scaled. They travel in the type ``dtype``.
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


@dataclass(eq=False)
class SumsOfStep:
    """The gradients of a step of ZeRO 3, which are summed over the copies of a partition in the last micro-batch."""

    copies: PartitionHolders | None
    """The ranks with copies; None if there are none."""
    replicas: ReplicaSums | None = None
    """The averages over the replicas of a ``Manager``; without one, None."""
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    """The gradients of earlier micro-batches, by the identity of their parameter."""
    in_flight: list[PartitionSum] = field(default_factory=list)
    has_begun: bool = False
    """True if the step has gradients, on whichever rank."""

    def start(
        self,
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
        self.has_begun = True
        rank = dist.get_rank(optimizer.dp_process_group)
        filled = [parameter for parameter in parameters if parameter.partition_numel() * rank < parameter.ds_numel]
        self.kept |= {id(parameter): buffer for parameter, buffer in zip(filled, buffers, strict=True)}
        if ends_step and buffers:
            for parameter in filled:
                del self.kept[id(parameter)]
            self._sum(buffers, optimizer.get_param_comm_dtype(filled[0]))
        return buffers

    def end(self, optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
        """Wait for the sums of all buckets over copies and replicas, at the end of ZeRO 3's reduction."""
        if not self.has_begun or not optimizer.is_gradient_accumulation_boundary():
            return
        stream = optimizer.reduce_and_partition_stream
        with get_accelerator().stream(stream):
            if unused := list(self.kept.values()):  # of parameters that the last micro-batch did not use
                self._sum(unused, unused[0].dtype)
            for sum_over_copies in self.in_flight:
                sum_over_copies.wait()
        self.kept, self.in_flight, self.has_begun = {}, [], False
        if not get_accelerator().resolves_data_dependency():
            stream.synchronize()
        if optimizer.offload_optimizer:
            optimizer._finalize_offload_gradient_accumulation()

    def _sum(self, tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
        group, scale = (None, 1.0) if self.copies is None else (self.copies.group, 1 / self.copies.number)
        self.in_flight.append(PartitionSum(tensors, group, scale, dtype, self.replicas))
