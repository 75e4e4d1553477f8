"""Make ranks reduce the same gradients together where DeepSpeed pairs them by their places in a bucket.

Without a :class:`~ds_topo.GradientReducer`, DeepSpeed's ZeRO sums gradients as they come. If ranks use other parameters
of a model, or use them in another order, it adds gradients of different parameters, or fails on buckets of different
sizes.

    ZeRO 0, BF16_Optimizer       DeepSpeed itself adds zeros for missing gradients, in the order of the parameters
    ZeRO 1                       the same here, before its reduction: results are averages, as in one process. ZeRO 1
                                 and 2 do the same at the end of ``with engine.coalesce_grad_reduction():``
    ZeRO 2 and 3, and ZeRO 1     gradients are reduced while backward goes on, in the order in which they come. Before
    with ``overlap_comm``        each bucket the ranks compare a digest of its parameters, and raise if they differ

A digest is a sum of 16 bytes beside each bucket, which has half a billion elements by default. On gloo it is read at
once, so nothing wrong is sent. If a backend orders collectives by streams, it is read where DeepSpeed waits for the
device anyway, at the end of backward; ZeRO 1 and 2 without ``overlap_comm`` read it at the start of the optimizer's
step. In all cases it is read before weights change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_topo.base.backends import SideStream, current_device, traits_of
from ds_topo.base.classes import Mixin
from ds_topo.base.torch_names import devices_of, job_timeout
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import DisagreementError
from ds_topo.launch.council import agree
from ds_topo.mpu import has_shard
from ds_topo.process_groups.creation import ProcessGroup


class ComparedReduction(EngineOnGrid):
    """An engine whose optimizer reduces gradients by their places in buckets."""

    def complete(self) -> None:
        """Compare buckets between the ranks, or fill them alike."""
        super().complete()
        if not _has_others(self):
            return
        self.give_optimizer(OrderedZero, OrderedZero3)
        optimizer, stage = self.optimizer, int(self.zero_optimization_stage())
        reduces_at_once = isinstance(optimizer, DeepSpeedZeroOptimizer) and not (
            optimizer.partition_gradients or optimizer.overlap_comm or optimizer.zenflow
        )
        optimizer.compared_buckets = None if reduces_at_once else ComparedBuckets(self.module, _group_of(self), stage)

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Add gradients of zeros where this rank has none."""
        with super().coalesce_grad_reduction():
            try:
                yield
            finally:  # gradients are reduced after an error, too
                if isinstance(self.optimizer, DeepSpeedZeroOptimizer) and _has_others(self):
                    fill_missing(self.optimizer)


class OrderedZero(Mixin, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer``, of ZeRO 1 and 2."""

    mixin_state = "compared_buckets"
    compared_buckets: ComparedBuckets | None
    """The comparison of gradients that are reduced as they come; None if they are reduced at once, by parameters."""

    def reduce_gradients(self, *arguments: Any, **options: Any) -> Any:
        """Add gradients of zeros where this rank has none, before ZeRO 1 reduces all of them."""
        if self.compared_buckets is None:
            fill_missing(self)
        return super().reduce_gradients(*arguments, **options)

    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> Any:
        """Compare the bucket's parameters between the ranks first."""
        if (compared := self.compared_buckets) is not None:
            compared.waits_for_device = comm_dtype is None and self.overlap_comm
            buckets = self.ipg_buckets
            for dtype in sorted(buckets, key=str) if comm_dtype is None else [comm_dtype]:  # all at the end of backward
                places = buckets[dtype].params
                members = [self.bit16_groups[group][index] for group, index, _ in places]
                compared.compare(places, {"": members})
        return super().reduce_ipg_grads(comm_dtype=comm_dtype)

    def step(self, closure: object = None) -> Any:
        """Read comparisons before weights change."""
        if self.compared_buckets is not None:
            self.compared_buckets.read()
        return super().step(closure)


class OrderedZero3(Mixin, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer_Stage3``."""

    mixin_state = "compared_buckets"
    compared_buckets: ComparedBuckets

    def _DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(self, comm_dtype: torch.dtype) -> Any:  # noqa: N802
        """Compare the bucket's parameters between the ranks first."""
        compare_partitioned_bucket(self.compared_buckets, self, comm_dtype)
        return super()._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(comm_dtype)

    def independent_gradient_partition_epilogue(self) -> None:
        """Read comparisons here, where ZeRO 3 waits for the device."""
        compared = self.compared_buckets
        compared.waits_for_device = True
        try:
            super().independent_gradient_partition_epilogue()
        finally:
            compared.waits_for_device = False


def _has_others(engine: DeepSpeedEngine) -> bool:
    """Tell whether an optimizer of ZeRO reduces gradients together with other ranks."""
    kinds = DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
    return isinstance(engine.optimizer, kinds) and dist.get_world_size(_group_of(engine)) > 1


def _group_of(engine: DeepSpeedEngine) -> ProcessGroup:
    if has_shard(engine.mpu) and engine.has_moe_layers:  # experts are partitioned over all replicas
        return engine.mpu.get_data_parallel_group()
    group: ProcessGroup = engine.optimizer.dp_process_group
    return group


def fill_missing(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Set missing gradients to zeros, as which the optimizer reads them anyway where no rank has one."""
    name = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"
    for parameters in optimizer.bit16_groups:
        for parameter in parameters:
            if getattr(parameter, name, None) is None:
                dtype = optimizer.gradient_accumulation_dtype if name == "grad_accum" else parameter.dtype
                setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype, requires_grad=False))


Named: TypeAlias = Mapping[str, Sequence[object]]
"""Parameters, and modules for which parameters were gathered, by what a message says before their names."""


class ComparedBuckets:
    """A comparison of the buckets of one optimizer between the ranks that reduce them together."""

    def __init__(self, module: nn.Module, group: ProcessGroup, stage: int) -> None:
        self._group, self._stage = group, stage
        self._device = torch.device("cpu") if "cpu" in devices_of(group) else current_device()
        self._reads_later = traits_of(group, self._device).ordered_by_stream
        self._side = SideStream(self._device)
        self._unread: list[tuple[torch.Tensor, torch.Event | None, Named, Sequence[str]]] = []
        """The extremes of digests that are on their way, and what they are of on this rank."""
        self._module = module
        attributes = map(vars, module.modules())
        self._external = [each["_external_params"] for each in attributes if "_external_params" in each]
        """The parameters that ZeRO 3 finds outside of their modules: a dictionary for each, which it fills later."""
        self.waits_for_device = False
        """True while DeepSpeed reduces the last buckets of a backward pass, and then waits for the device."""

    def compare(self, content: Sequence[object], named: Named, facts: Sequence[str] = ()) -> None:
        """Compare what a bucket holds; collective over the group, without a wait if streams order collectives.

        Args:
            content: integers, in nested tuples, that are equal on all ranks if the buckets are.
            named: what the content is of, for the message.
            facts: what else the content holds, for the message.
        """
        number = hash(tuple(content))
        extremes = torch.tensor([number, ~number])
        with self._side.after_current():
            extremes = extremes.to(self._device, non_blocking=True)
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group, async_op=True).wait()
            extremes = extremes.to("cpu", non_blocking=True)
        self._unread.append((extremes, self._side.mark(), named, facts))
        if not self._reads_later or self.waits_for_device:
            self.read()

    def read(self) -> None:
        """Wait for the comparisons on their way, and raise on all ranks of the group if buckets differ."""
        unread, self._unread = self._unread, []
        for extremes, event, named, facts in unread:
            if event is not None:
                event.synchronize()
            highest, lowest = extremes.tolist()
            if highest != ~lowest:
                self._refuse(named, facts)

    def external_parameters(self) -> list[Any]:
        """Return the parameters that ZeRO 3 has found outside of their own modules, in that order for each module."""
        return [parameter for each in filter(None, self._external) for parameter in each.values()]

    def _refuse(self, named: Named, facts: Sequence[str]) -> NoReturn:
        """Name the first ones that differ, through the store: the group may be blocked by what was reduced."""
        names: dict[object, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        names |= {module: f"module {name!r}" for name, module in self._module.named_modules()}
        lines = [*facts]
        lines += [
            f"{place}. {what}{names.get(each, 'unnamed')}"
            for what, several in named.items()
            for place, each in enumerate(several, start=1)
        ]
        members = sorted(dist.get_process_group_ranks(self._group))
        problem = "the ranks do not agree on the gradients that they reduce together, but have the same names for them"
        try:
            agree("", members, job_timeout(), subject="the gradients that they reduce together", lines=lines)
        except DisagreementError as error:
            problem = str(error)
        remedy = 'attach a GradientReducer ({"gradient_reducer": true}), which averages by parameter, in any order'
        if self._stage == 3:
            remedy = "use ZeRO 1, or stage 1 or 2 with a GradientReducer, which averages by parameter, in any order"
        raise DisagreementError(
            f"{problem}\nZeRO {self._stage} adds gradients by places in a bucket, in the order in which backward "
            "produces them, so it would mix up parameters. Use the same parameters on all ranks, in the same order "
            f"in every micro-batch (multiply what a rank does not need by 0), or {remedy}"
        )


def compare_partitioned_bucket(
    compared: ComparedBuckets, optimizer: DeepSpeedZeroOptimizer_Stage3, comm_dtype: torch.dtype
) -> None:
    """Compare the bucket that ZeRO 3 reduces next. ZeRO 3 sorts a bucket, unless it reduces it as a whole.

    With the last bucket, ranks also compare in which order they have gathered parameters.
    """
    parameters: list[Any] = list(optimizer.ipg_buckets[comm_dtype].params)
    if optimizer.reduce_scatter or not optimizer.contiguous_gradients:
        parameters.sort(key=lambda parameter: parameter.ds_id)
    content = [parameter.ds_id for parameter in parameters]
    named: dict[str, Sequence[Any]] = {"": parameters}
    facts = []
    if compared.waits_for_device:
        coordinator = optimizer.parameter_offload.get_param_coordinator()
        is_known, number = coordinator.is_complete_trace(), vars(coordinator)[_GATHERED]
        content += [is_known, number]
        order = "in the order of earlier steps" if is_known else "in an order that earlier steps did not have"
        facts = [f"{number} modules have gathered parameters, {order}"]
        named["forward of "] = gathered = [] if is_known else list(vars(coordinator)[_ORDER])
        named["read outside of its module: "] = external = compared.external_parameters()
        content += [-1, *(module.ds_id for module in gathered), -1, *(parameter.ds_id for parameter in external)]
    compared.compare(content, named, facts)


_GATHERED, _ORDER = "_PartitionedParameterCoordinator__step_id", "_PartitionedParameterCoordinator__submodule_order"
