"""Gather updated parameters, which are in the layout of a reducer, from their owners in the optimizer's step.

:mod:`ds_topo.engine.late_parameters` lets them arrive during the next forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from ds_topo.reduction.buckets import BucketTiming, plan_buckets
from ds_topo.reduction.exchange import Pending
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


class PartitionedParameters:
    """The parameters of an optimizer in our layout, which are gathered from their owners."""

    overlaps = False
    """True if parameters may arrive during the next forward pass."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self._groups = groups
        self._timings: list[BucketTiming] = []
        """Those of the last gather."""

    def gather(self) -> None:
        """Send the updated parameters from their owners to all ranks; collective."""
        in_flight = [launched(group, region) for group in self._groups for region in group.ours.regions]
        for pending, timing in in_flight:
            timing.wait_started_ns = time.perf_counter_ns()
            timing.done_ns = pending.wait()
            timing.wait_ended_ns = time.perf_counter_ns()
        self._timings = [timing for _, timing in in_flight]

    def wait(self) -> None:
        """Wait until all parameters have arrived."""

    def timings(self) -> list[BucketTiming]:
        """Return the timings of the last gather, after it has ended."""
        return self._timings

    def stop_overlapping(self) -> None:
        """Let parameters arrive in the step from now on. Idempotent."""

    def renew(self) -> None:
        """Accept the places of parameters after a new layout."""

    def rest(self) -> None:
        """Stop all background work."""
        self.stop_overlapping()
        for group in self._groups:
            group.gradients.exchange.rest()


def launched(group: FlatGroup, region: Region) -> tuple[Pending, BucketTiming]:
    """Start to gather a region of parameters."""
    flat = group.memory[region.start : region.start + region.numel]
    numbers = region.index, flat.nbytes, len(region.members)
    timing = BucketTiming(*numbers, "parameters from owners", time.perf_counter_ns())
    return group.gradients.exchange.gather(flat), timing
