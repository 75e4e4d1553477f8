"""Gather updated parameters from their owners, in the optimizer's step or during the next forward pass.

DeepSpeed gathers at the end of its step, by one collective for each flat tensor. On gloo, slices sent point to point
arrive in about half that time, in DeepSpeed's layout and in ours. In ours they may arrive during the next forward pass,
in which modules wait for the parameters that they look up (:mod:`ds_topo.zero.arrivals`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_topo.ledger import Make, Patch, ledger
from ds_topo.mpu import patches
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.buckets import plan_buckets
from ds_topo.reducer.options import BucketSizes
from ds_topo.reducer.report import BucketTiming
from ds_topo.zero.arrivals import Arrival, Arrivals, AwaitingParameters, used_by_reference
from ds_topo.zero.exchange import exchange_of
from ds_topo.zero.partitions import Fragment, PartitionedGradients, PartitionLayout, Region

_SECONDS_UNTIL_SENT = 0.1
"""The longest time for which parameters wait while the previous stage, which needs its own first, uses the link."""


def balanced_layout(
    parameters: Sequence[nn.Parameter], itemsize: int, size: int, sizes: BucketSizes, whole: Collection[nn.Parameter]
) -> tuple[PartitionLayout, set[int]]:
    """Lay parameters out in regions of about a bucket; return also the indices of the regions that are needed whole.

    The parameters keep their order. Backward makes the last region's gradients first, and forward needs the first
    region's parameters first, so both of them are small.
    """
    numels = [parameter.numel() for parameter in parameters]
    kinds = [parameter in whole for parameter in parameters]
    backward = range(len(parameters) - 1, -1, -1)
    buckets = plan_buckets([numel * itemsize for numel in numels], kinds, backward, sizes) if parameters else []
    layout = PartitionLayout.balanced(numels, [members[::-1] for members in reversed(buckets)], size)
    return layout, {region.index for region in layout.regions if kinds[region.members[0]]}


def lengthened(flat: torch.Tensor, numel: int) -> torch.Tensor:
    """Lengthen the memory of a tensor in place and return it, ``[numel]``. Existing views stay valid."""
    storage = flat.untyped_storage()
    needed = (flat.storage_offset() + numel) * flat.itemsize
    if storage.nbytes() < needed:
        storage.resize_(int(needed))
    return flat.detach().as_strided((numel,), (1,))


@dataclass(eq=False)
class FlatGroup:
    """A parameter group of an optimizer, in both layouts; its parameters are views of a flat tensor."""

    index: int
    parameters: list[nn.Parameter]
    flat: torch.Tensor
    """DeepSpeed's flat tensor."""
    master: torch.Tensor
    """This rank's partition, on which the optimizer steps. The length of its data depends on the layout."""
    theirs: PartitionLayout
    """DeepSpeed's layout."""
    gradients: PartitionedGradients
    """The gradients, in our layout."""

    @property
    def ours(self) -> PartitionLayout:
        """Our layout."""
        return self.gradients.layout

    @cached_property
    def memory(self) -> torch.Tensor:
        """The flat tensor's memory, of the length that our layout needs."""
        return lengthened(self.flat, self.ours.numel)

    @cached_property
    def own(self) -> list[Fragment]:
        """The fragments that this rank owns in our layout, in the order of its partition."""
        return list(self.ours.fragments(self.gradients.rank))

    @cached_property
    def owned(self) -> list[nn.Parameter]:
        """The parameter of each fragment that this rank owns."""
        return [self.parameters[part.parameter] for part in self.own]

    def fragments_of(self, partition: torch.Tensor) -> list[torch.Tensor]:
        """Return the fragments of a partition, without padding, in the order of :attr:`owned`."""
        return [partition[part.address : part.address + part.numel] for part in self.own]

    def slices(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Return this rank's slices of the parameters, each with its place in the rank's partition."""
        for region in self.ours.regions:
            start = region.start + self.gradients.rank * region.slice_numel
            place = slice(region.address, region.address + region.slice_numel)
            yield self.memory[start : start + region.slice_numel], place

    def arrange(self, layout: PartitionLayout) -> None:
        """Move the parameters to their places in a layout."""
        values = [parameter.detach().clone() for parameter in self.parameters]
        self.memory.zero_()
        for parameter, value, offset in zip(self.parameters, values, layout.offsets, strict=True):
            parameter.data = self.memory[offset : offset + value.numel()].view(value.shape)
            parameter.data.copy_(value)


class PartitionedParameters(list[torch.Tensor]):
    """The flat tensors of an optimizer in our layout, as DeepSpeed passes them to its gather."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        super().__init__(group.memory for group in groups)
        self._groups = groups
        self._arrivals = Arrivals()
        self._regions = [(group, region) for group in groups for region in group.ours.regions]
        self._early: list[nn.Parameter] = []
        """Parameters that the program uses without looking them up in their module."""
        self._overlap = ExitStack()
        """Restores the modules' dictionaries of parameters."""
        self.overlaps = False
        """True if parameters arrive during the next forward pass."""
        self.waits_for_use = False
        """True if parameters are sent only when the first one is looked up: other transfers need the link first."""
        self._under_way: list[tuple[Arrival, BucketTiming]] = []

    def gather(self) -> None:
        """Send the updated parameters from their owners to all ranks; collective."""
        self.wait()
        if self.overlaps and self.waits_for_use:
            self._arrivals.expect(self._everything(), Arrival(OnDemand(self._launch_all).wait))
            return
        self._launch_all()
        if not self.overlaps:
            self.wait()

    def wait(self) -> None:
        """Wait until all parameters have arrived."""
        self._arrivals.wait()

    def timings(self) -> list[BucketTiming]:
        """Return the timings of the last gather."""
        for arrival, timing in self._under_way:
            timing.done_ns = arrival.done_ns
            timing.wait_started_ns, timing.wait_ended_ns = arrival.done_ns - arrival.waited_ns, arrival.done_ns
        return [timing for _, timing in self._under_way]

    def _launch_all(self) -> None:
        self._under_way = [self._launch(group, region) for group, region in self._regions]

    def _launch(self, group: FlatGroup, region: Region) -> tuple[Arrival, BucketTiming]:
        flat = group.memory[region.start : region.start + region.numel]
        timing = BucketTiming(
            region.index, flat.nbytes, len(region.members), "parameters from owners", time.perf_counter_ns()
        )
        arrival = Arrival(group.gradients.exchange.gather(flat).wait)
        self._arrivals.expect([group.parameters[member] for member in region.members], arrival)
        return arrival, timing

    def _everything(self) -> list[nn.Parameter]:
        return [parameter for group in self._groups for parameter in group.parameters]

    # -- during the next forward pass

    def start_overlapping(self, module: nn.Module) -> None:
        """Receive parameters while the module runs, which waits for each one when it looks it up.

        They are sent in the order of the module's parameters, which is the order in which forward needs them.
        """
        order = {parameter: place for place, parameter in enumerate(module.parameters())}

        def first_use(entry: tuple[FlatGroup, Region]) -> int:
            group, region = entry
            return min(order.get(group.parameters[member], 0) for member in region.members)

        self._regions.sort(key=first_use)
        served = {id(parameter) for parameter in self._everything()}
        for part in module.modules():
            if any(id(parameter) in served for parameter in part._parameters.values()):
                self._overlap.callback(_await_parameters(part, self._arrivals))
        self.overlaps = True

    def stop_overlapping(self) -> None:
        """Restore the modules' dictionaries. Idempotent."""
        self.wait()
        self.overlaps = False
        self._overlap.close()

    def rest(self) -> None:
        """Stop all background work."""
        self.stop_overlapping()
        for group in self._groups:
            group.gradients.exchange.rest()

    def before_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a forward pass so that it also waits for parameters that it uses without looking them up.

        The first pass determines which parameters these are.
        """
        is_first = True

        @wraps(forward)
        def with_parameters(*args: Any, **options: Any) -> Any:
            nonlocal is_first
            for parameter in self._early:
                self._arrivals.wait_for(parameter)
            if not is_first or not self.overlaps:
                return forward(*args, **options)
            with used_by_reference(self._everything(), self._arrivals) as self._early:
                result = forward(*args, **options)
            is_first = False
            return result

        return with_parameters


class OnDemand:
    """A gather that starts when a parameter is read, or after a short time, because other ranks may have read one."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch: Callable[[], None] | None = launch
        self._lock = threading.Lock()
        self._timer = threading.Timer(_SECONDS_UNTIL_SENT, self.wait)
        self._timer.daemon = True
        self._timer.start()

    def wait(self) -> int:
        """Launch the gather; readers then wait for their own parts of it."""
        self._timer.cancel()
        with self._lock:
            if self._launch is not None:
                self._launch()
                self._launch = None
        return time.perf_counter_ns()


def _await_parameters(module: nn.Module, arrivals: Arrivals) -> Callable[[], None]:
    """Make a module wait for the parameters that it looks up; return a function that restores its dictionary."""
    plain = module._parameters
    release = ledger.bind(patches.PARAMETERS, lambda found: AwaitingParameters(found, arrivals), module)

    def put_back() -> None:
        current = dict(module._parameters)
        release()
        plain.clear()
        plain.update(current)

    return put_back


def _in_slices(gather: Any) -> Any:
    def is_on_gloo(flat: torch.Tensor, group: ProcessGroup) -> bool:
        return flat.device.type == "cpu" and dist.get_backend(group) == "gloo"

    @wraps(gather)
    def all_gather_dp_groups(
        groups_flat: Sequence[torch.Tensor],
        partitioned_param_groups: Sequence[Sequence[torch.Tensor]],
        dp_process_group: Sequence[ProcessGroup],
        *arguments: Any,
        **options: Any,
    ) -> None:
        if isinstance(groups_flat, PartitionedParameters):
            groups_flat.gather()
        elif all(is_on_gloo(flat, dp_process_group[index]) for index, flat in enumerate(groups_flat)):
            for index, flat in enumerate(groups_flat):
                exchange_of(dp_process_group[index], flat.device).gather_now(flat)
        else:
            gather(groups_flat, partitioned_param_groups, dp_process_group, *arguments, **options)

    return all_gather_dp_groups


def _gathering_in_slices(method: Any) -> Any:
    @wraps(method)
    def gather_in_slices(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        with ExitStack() as bindings:
            for patch in patches.GATHERS:
                bindings.enter_context(ledger.bound(patch, _in_slices))
            return method(optimizer, *arguments, **options)

    return gather_in_slices


OF_OPTIMIZERS: tuple[tuple[Patch, Make], ...] = tuple((row, _gathering_in_slices) for row in patches.GATHERING_METHODS)
