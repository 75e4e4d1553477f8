"""Gather updated parameters from their owners, in the optimizer's step or during the next forward pass.

The parameters are in the layout of a reducer. They may arrive during the next forward pass; whatever reads a parameter
then waits for it (:mod:`ds_topo.reduction.arrivals`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from ds_topo.errors import warn
from ds_topo.reduction.arrivals import Arrival, Arrivals, Seat, SharedMemory, hide, seats_of, show, unaware_of_arrivals
from ds_topo.reduction.buckets import BucketTiming, plan_buckets
from ds_topo.reduction.options import BucketSizes
from ds_topo.reduction.partitions import Fragment, PartitionedGradients, PartitionLayout, Region


def balanced_layout(
    parameters: Sequence[nn.Parameter],
    itemsize: int,
    size: int,
    sizes: BucketSizes,
    whole: Collection[nn.Parameter],
    copies: int,
) -> tuple[PartitionLayout, set[int]]:
    """Lay parameters out in regions of about a bucket; return also the indices of the regions that are needed whole.

    The parameters keep their order. Backward makes the last region's gradients first, and forward needs the first
    region's parameters first, so both of them are small.
    """
    numels = [parameter.numel() for parameter in parameters]
    kinds = [parameter in whole for parameter in parameters]
    backward = range(len(parameters) - 1, -1, -1)
    buckets = plan_buckets([numel * itemsize for numel in numels], kinds, backward, sizes) if parameters else []
    layout = PartitionLayout.balanced(numels, [members[::-1] for members in reversed(buckets)], size, copies)
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
    layout: PartitionLayout = field(init=False)
    """The layout in force."""
    averaged: torch.Tensor | None = field(default=None, init=False)
    """The averaged gradients of this rank's partition, from backward to the step."""
    parts: list[torch.Tensor] = field(default_factory=list, init=False)
    """Its parts that belong to single parameters, as programs find them."""
    has_linked_states: bool = field(default=False, init=False)
    """True if ``safe_get_full_optimizer_state`` and similar functions find the optimizer states, in this layout."""

    def __post_init__(self) -> None:
        self.layout = self.theirs

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
        """Return this rank's slices of the parameters, in the layout in force, each with its place in the partition."""
        for region in self.layout.regions:
            start = region.start + self.gradients.rank * region.slice_numel
            place = slice(region.address, region.address + region.slice_numel)
            yield self.memory[start : start + region.slice_numel], place

    def arrange(self, layout: PartitionLayout) -> None:
        """Move the parameters to their places in a layout."""
        self.layout = layout
        values = [parameter.detach().clone() for parameter in self.parameters]
        self.memory.zero_()
        for parameter, value, offset in zip(self.parameters, values, layout.offsets, strict=True):
            parameter.data = self.memory[offset : offset + value.numel()].view(value.shape)
            parameter.data.copy_(value)


@dataclass(eq=False)
class _RegionOfParameters:
    """A region of a flat tensor."""

    group: FlatGroup
    region: Region
    seats: Sequence[Seat] = ()
    """The parameters of the region, since they were laid out."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the region."""
        return [self.group.parameters[member] for member in self.region.members]


class PartitionedParameters:
    """The parameters of an optimizer in our layout, which are gathered from their owners."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self._flats = [group.memory for group in groups]
        self._groups = groups
        self._regions = [_RegionOfParameters(group, region) for group in groups for region in group.ours.regions]
        self._in_flight: list[tuple[Arrival, BucketTiming]] = []
        """The regions of the last gather."""
        self._arrivals = Arrivals()
        self._memory: SharedMemory | None = None
        """Set while parameters may arrive after the step."""
        self._has_warned = False

    @property
    def overlaps(self) -> bool:
        """True if parameters may arrive during the next forward pass."""
        return self._memory is not None

    def gather(self) -> None:
        """Send the updated parameters from their owners to all ranks; collective."""
        self._arrivals.end()
        self._in_flight = []  # it shares the parameters' memory
        is_hidden = self._memory is not None
        if is_hidden:
            hide(self._seats())
        arrives_later = self._memory is not None and not self._is_shared(self._memory)
        try:
            for entry in self._regions:
                self._in_flight.append(self._launch(entry, entry.seats if is_hidden else ()))
        finally:
            self._arrivals.expect(arrival for arrival, _ in self._in_flight)
        if not arrives_later:
            self.wait()
        if is_hidden and self._memory is None:  # they stopped arriving later meanwhile
            show(self._seats())

    def wait(self) -> None:
        """Wait until all parameters have arrived."""
        self._arrivals.wait()

    def timings(self) -> list[BucketTiming]:
        """Return the timings of the last gather, after it has ended."""
        for arrival, timing in self._in_flight:
            arrival.wait()  # nothing may have read this region
            timing.done_ns = arrival.done_ns
            timing.wait_started_ns, timing.wait_ended_ns = arrival.done_ns - arrival.waited_ns, arrival.done_ns
        return [timing for _, timing in self._in_flight]

    def _launch(self, entry: _RegionOfParameters, seats: Sequence[Seat]) -> tuple[Arrival, BucketTiming]:
        region, gradients = entry.region, entry.group.gradients
        flat = entry.group.memory[region.start : region.start + region.numel]
        timing = BucketTiming(
            region.index, flat.nbytes, len(region.members), "parameters from owners", time.perf_counter_ns()
        )
        return Arrival(gradients.exchange.gather(flat), flat.device, seats), timing

    # -- during the next forward pass

    def start_overlapping(self, module: nn.Module) -> None:
        """Receive parameters while the program goes on; see Note [Readers] in :mod:`ds_topo.reduction.arrivals`.

        They are sent in the order of the module's parameters, which is the order in which forward needs them.
        """
        part = unaware_of_arrivals(module)
        if part is not None:
            self._warn(f"{part} may read parameters without waiting for them")
            return
        order = {parameter: place for place, parameter in enumerate(module.parameters())}
        # regions in the order of their first use
        self._regions.sort(key=lambda entry: min(order.get(parameter, 0) for parameter in entry.parameters))
        self._memory = self._users_of_memory()

    def renew(self) -> None:
        """Accept the places of parameters, and the tensors that share their memory now, after a new layout."""
        for entry in self._regions:
            entry.seats = seats_of(entry.parameters)
        if self._memory is not None:
            self._memory = self._users_of_memory()

    def _users_of_memory(self) -> SharedMemory:
        hide(self._seats())  # what parameters show now is none of the flat tensors at any later look
        memory = SharedMemory(self._flats)
        show(self._seats())
        return memory

    def _seats(self) -> Iterator[Seat]:
        return (seat for entry in self._regions for seat in entry.seats)

    def stop_overlapping(self) -> None:
        """Let parameters arrive in the step from now on. Idempotent."""
        self._memory = None
        self._arrivals.end()

    def rest(self) -> None:
        """Stop all background work."""
        self.stop_overlapping()
        for group in self._groups:
            group.gradients.exchange.rest()

    def _is_shared(self, memory: SharedMemory) -> bool:
        """Tell whether other tensors share the parameters' memory, such as ``parameter.data`` that a program keeps."""
        shared = memory.has_new_users()
        if shared and not self._has_warned:
            self._warn("tensors such as parameter.data, or a graph of an earlier step, share their memory")
        return shared

    def _warn(self, reason: str) -> None:
        self._has_warned = True
        warn(f"overlap_parameters: {reason}, so parameters arrive within step(); correct, but slower")
