"""Gradients of which every rank keeps its partition: where they accumulate, and where their sums go."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

from ds_topo.partition.exchange import Exchange, exchange_of
from ds_topo.partition.layout import PartitionLayout, Region
from ds_topo.process_groups.creation import ProcessGroup

_LENT = 3
"""So many regions are under way at a time where gradients are not kept."""


class Reducing(Protocol):
    """The reduction of a region under way."""

    def wait(self) -> None:
        """Until its sum is collected. Idempotent."""


class PartitionedGradients:
    """The gradients of one flat tensor's parameters.

    Args:
        parameters: of the flat tensor, in the layout's numbering.
        layout: where they and this rank's slices are.
        group: of the ranks that share it.
        dtype: what gradients accumulate in.
        keeps: whether gradients of all micro-batches accumulate whole, and are exchanged after the last one (ZeRO 1).
            If not, every micro-batch's are exchanged, and only this rank's partition accumulates (ZeRO 2).
        whole: indices of regions that every rank needs whole, as those of tied layers.
        memory: of all gradients, where there is some already.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: PartitionLayout,
        group: ProcessGroup,
        dtype: torch.dtype,
        *,
        keeps: bool,
        whole: Collection[int] = (),
        memory: torch.Tensor | None = None,
    ) -> None:
        self.layout, self.group, self.keeps, self.whole = layout, group, keeps, frozenset(whole)
        device = parameters[0].device if parameters else torch.device("cpu")
        self.dtype, self._device = dtype, device
        self._memory = self._zeros(layout.numel if keeps else 0) if memory is None else memory
        """Of all gradients, if they are kept; the sums of this rank's slices are moved to its front in the end. Else of
        the partition, from the first exchange of a step until it is taken."""
        self._lent: deque[Reducing] = deque()
        self.regions = {
            parameters[member]: owned
            for owned in (RegionOfGradients(self, region) for region in layout.regions)
            for member in owned.region.members
        }
        """Of every parameter."""
        self.offsets = dict(zip(parameters, layout.offsets, strict=True))
        """Where the gradient of every parameter starts in the flat tensor."""

    @cached_property
    def exchange(self) -> Exchange:
        """How slices travel; the first time collective over the group."""
        return exchange_of(self.group, self._device)

    @property
    def partition(self) -> torch.Tensor:
        """This rank's partition, ``[partition_numel]``, of gradients that are kept; after :meth:`take`."""
        return self._memory[: self.layout.partition_numel]

    def take(self, rank: int) -> torch.Tensor:
        """The partition of ``rank``, ``[partition_numel]``: kept gradients are valid until the next backward.

        Slices that are kept are moved next to each other, to the front.

        Region by region: a slice moves to or before the place where its region starts, so nothing that is still needed
        is overwritten.
        """
        if not self.keeps:
            taken, self._memory = self._accumulator(), self._zeros(0)
            return taken
        for region in self.layout.regions:
            end, position = region.address + region.slice_numel, region.start + rank * region.slice_numel
            if position != region.address:
                own = self._memory[position : position + region.slice_numel]
                self._memory[region.address : end].copy_(own.clone() if position < end else own)
        return self.partition

    def place(self, region: Region) -> torch.Tensor:
        """Memory for a region's gradients, padding included: its own if they are kept, else lent for one exchange."""
        if self.keeps:
            return self._memory[region.start : region.start + region.numel]
        while len(self._lent) >= _LENT:
            self._lent.popleft().wait()
        return torch.empty(region.numel, dtype=self.dtype, device=self._device)

    def place_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Where the gradient of a parameter is, ``[numel]``, if gradients are kept."""
        return self._memory[self.offsets[parameter] : self.offsets[parameter] + parameter.numel()]

    def note(self, reduction: Reducing) -> None:
        """A region is under way; its memory can be lent again when that has been waited for."""
        if not self.keeps:
            self._lent.append(reduction)

    def collect(self, region: Region, own_slice: torch.Tensor) -> None:
        """Add the sum of this rank's slice to its partition, where that is not the same memory."""
        if not self.keeps:
            self._accumulator()[region.address : region.address + region.slice_numel].add_(own_slice)

    def add(self, parameter: nn.Parameter, rank: int, gradient: torch.Tensor) -> None:
        """Add a reduced gradient of a whole parameter to the partition of ``rank``; where they are not kept."""
        region, offset = self.regions[parameter].region, self.offsets[parameter]
        start = region.start + rank * region.slice_numel
        first, last = max(start, offset), min(start + region.slice_numel, offset + gradient.numel())
        if first < last:
            own = self._accumulator()[region.address + first - start : region.address + last - start]
            own.add_(gradient.reshape(-1)[first - offset : last - offset])

    def discard(self) -> None:
        """Forget what has accumulated; kept gradients are overwritten by the next ones."""
        if not self.keeps:
            self._memory = self._zeros(0)

    def _accumulator(self) -> torch.Tensor:
        if not len(self._memory):
            self._memory = self._zeros(self.layout.partition_numel)
        return self._memory

    def _zeros(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=self.dtype, device=self._device)


@dataclass(frozen=True, eq=False)
class RegionOfGradients:
    """One region and the gradients that it is part of."""

    gradients: PartitionedGradients
    region: Region

    @property
    def is_whole(self) -> bool:
        """Whether every rank needs all of it."""
        return self.region.index in self.gradients.whole
