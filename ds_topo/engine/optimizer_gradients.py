"""Connect a reducer to ZeRO 1 and 2 and to ``BF16_Optimizer``: where gradients accumulate, and which call reduces them.

:func:`gradients_of_wrapper` chooses the connection. Gradients go to the ranks that own them, in a balanced layout; with
optimizers that need whole matrices, every rank gets whole gradients. While the reducer is attached, the optimizer has a
class of :mod:`ds_topo.engine.partitioned_optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_topo.base.marks import is_element_by_element, offsets_in_flat_groups
from ds_topo.engine.engine_driver import EngineDriver, OptimizerGradients
from ds_topo.engine.parameter_gathers import FlatGroup, balanced_layout, lengthened
from ds_topo.engine.partitioned_optimizers import PartitionedBF16, PartitionedZero, ReducedZero, WrapperGradients
from ds_topo.reduction.options import BucketSizes
from ds_topo.reduction.partitions import PartitionedGradients, PartitionLayout

if TYPE_CHECKING:
    from ds_topo.reduction.managed import ReplicaSums


class Zero1Gradients(WrapperGradients):
    """ZeRO stage 1 with Muon, which needs whole matrices: it takes its partition from reduced ``parameter.grad``."""

    mixin = ReducedZero
    reduced_by = "DeepSpeedZeroOptimizer.reduce_gradients"

    def mark_reduced(self) -> None:
        """Collect this rank's partition."""
        self.optimizer.independent_gradient_partition_epilogue()


class PartitionGradients(WrapperGradients):
    """The connection at ZeRO 1 and 2: the optimizer runs in our layout while the reducer is attached.

    Every rank needs the parameters ``whole`` as a whole; ``wider`` continues sums beyond the engine's ranks.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        sizes: BucketSizes,
        whole: Collection[nn.Parameter],
        wider: ReplicaSums | None,
    ) -> None:
        super().__init__(engine)
        self._sizes, self._whole, self._wider = sizes, whole, wider
        self._copies = getattr(engine, "partition_copies", None)
        self.reduces_always = int(engine.zero_optimization_stage()) == 2
        if isinstance(self.optimizer, BF16_Optimizer):
            self.mixin, self.groups = PartitionedBF16, list(self._groups_of_bf16(self.optimizer))
        else:
            self.mixin, self.groups = PartitionedZero, list(self._groups_of_zero(self.optimizer))
            called = "overlapping_partition_gradients_reduce_epilogue" if self.reduces_always else "reduce_gradients"
            self.reduced_by = f"DeepSpeedZeroOptimizer.{called}"
        self.partitions: list[PartitionedGradients] = [group.gradients for group in self.groups]
        self._engine_ends = False

    # -- the reducer's calls

    def bind(self, driver: EngineDriver, bindings: ExitStack, overlaps: bool) -> None:
        """Also move the optimizer to our layout; collective, and so is the end of the bindings."""
        super().bind(driver, bindings, overlaps)
        self.optimizer.enter()
        if overlaps:
            self.parameters.start_overlapping(self.engine.module)
        bindings.callback(self._end)

    def _end(self) -> None:
        self.parameters.rest()
        if not self._engine_ends:
            self.optimizer.leave()
            if isinstance(self.optimizer, BF16_Optimizer):  # it adds the next gradients to the memory of ours
                BF16_Optimizer.clear_hp_grads(self.optimizer)

    def end_with_engine(self) -> None:
        """Skip the move back to DeepSpeed's layout, which is no longer needed."""
        self._engine_ends = True

    def mark_reduced(self) -> None:
        """Pass the optimizer its partition after the last micro-batch."""
        if self.engine.is_gradient_accumulation_boundary():
            self.optimizer.take_gradients()

    def reduce_tied(self, reduce: Callable[[], None]) -> None:
        """Sum the whole gradients in the partitions' memory, since stages own different parts of them."""
        for weight, group in self.engine.module.get_tied_weights_and_groups():
            for partition in self.partitions:
                if weight in partition.regions:
                    dist.all_reduce(partition.place_of(weight), group=group)

    # -- DeepSpeed's layout, and ours

    def _groups_of_zero(self, optimizer: DeepSpeedZeroOptimizer) -> Iterator[FlatGroup]:
        for index, parameters in enumerate(optimizer.bit16_groups):
            in_place = optimizer.round_robin_bit16_groups[index], offsets_in_flat_groups(optimizer)[index]
            offset_of = {p: offset for p, offset in zip(*in_place, strict=True) if p.numel()}
            parameters = [parameter for parameter in parameters if parameter.numel()]  # before DeepSpeed 0.19.8
            offsets = [offset_of[parameter] for parameter in parameters]
            flat, dtype = optimizer.bit16_groups_flat[index], optimizer.gradient_accumulation_dtype
            dtype = flat.dtype if dtype == optimizer.dtype else dtype
            yield self._flat_group(index, parameters, flat, offsets, dtype)

    def _groups_of_bf16(self, optimizer: BF16_Optimizer) -> Iterator[FlatGroup]:
        for index, whole_group in enumerate(optimizer.bf16_groups):
            parameters = [parameter for parameter in whole_group if parameter.numel()]  # before DeepSpeed 0.19.8
            offsets = list(accumulate((parameter.numel() for parameter in parameters), initial=0))[:-1]
            flat, gradients = optimizer.bf16_groups_flat[index], optimizer.fp32_groups_gradients_flat[index]
            yield self._flat_group(index, parameters, flat, offsets, gradients.dtype, gradients)

    def _flat_group(
        self,
        index: int,
        parameters: list[nn.Parameter],
        flat: torch.Tensor,
        offsets: Sequence[int],
        dtype: torch.dtype,
        flat_gradients: torch.Tensor | None = None,
    ) -> FlatGroup:
        (master,) = self.optimizer.param_groups[index]["params"]
        process_group = self.optimizer.real_dp_process_group[index]
        size = dist.get_world_size(process_group)
        theirs = PartitionLayout.flat([parameter.numel() for parameter in parameters], offsets, master.numel(), size)
        copies = None if any(map(is_moe_param, parameters)) else self._copies
        number = 1 if copies is None else copies.number
        ours, needed_whole = balanced_layout(parameters, dtype.itemsize, size, self._sizes, self._whole, number)
        gradients = PartitionedGradients(
            parameters,
            ours,
            process_group,
            dtype,
            memory=None if flat_gradients is None else lengthened(flat_gradients, ours.numel),
            reduces_always=self.reduces_always,
            whole=needed_whole,
            copies=copies,
            wider=self._wider,
            ends_step=self.engine.is_gradient_accumulation_boundary,
        )
        return FlatGroup(index, parameters, flat, master, theirs, gradients)


# -- the choice -------------------------------------------------------------------------------------------------------


def gradients_of_wrapper(
    engine: DeepSpeedEngine, sizes: Callable[[], BucketSizes], wider: ReplicaSums | None
) -> OptimizerGradients:
    """Return the connection to this engine's optimizer, ``BF16_Optimizer`` or that of ZeRO 1 and 2.

    The function ``sizes``, which is collective, is called only if a layout depends on the sizes of buckets.
    """
    optimizer = engine.optimizer
    tied: set[nn.Parameter] = set()  # their stages sum gradients, and own different parts of them
    if isinstance(engine, PipelineEngine):
        tied = {weight for weight, _ in engine.module.get_tied_weights_and_groups()}
    if is_element_by_element(optimizer.optimizer):  # their arithmetic does not depend on the layout
        return PartitionGradients(engine, sizes(), tied, wider)
    return Zero1Gradients(engine)
