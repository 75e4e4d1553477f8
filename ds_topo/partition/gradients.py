"""Gradients of which every rank keeps its partition: where they accumulate, and where their sums go."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from ds_topo.partition.exchange import Exchange, exchange_of
from ds_topo.partition.layout import PartitionLayout, Region
from ds_topo.process_groups.creation import ProcessGroup

_LENT = 3
"""So many regions are under way at a time where gradients are not kept."""


class Reducing(Protocol):
    """The reduction of a region under way."""

    def is_done(self) -> bool:
        """Whether a wait would return at once."""

    def wait(self) -> None:
        """Until its sum is collected. Idempotent."""


class PartitionedGradients:
    """The gradients of one flat tensor's parameters.

    Memory of whole gradients is lent region by region: until the region's sum is collected, unless it is ``memory``.

    Args:
        parameters: of the flat tensor, in the layout's numbering.
        layout: where they and this rank's slices are.
        group: of the ranks that share it.
        dtype: what gradients accumulate in.
        keeps: whether gradients of all micro-batches accumulate whole, and are exchanged after the last one (ZeRO 1).
            If not, every micro-batch's are exchanged, and only this rank's partition accumulates (ZeRO 2).
        whole: indices of regions that every rank needs whole, as those of tied layers.
        memory: of all gradients, where there is some that lasts from step to step.
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
        self.rank = dist.get_rank(group)
        """Whose partition this is."""
        self.dtype, self._device = dtype, parameters[0].device if parameters else torch.device("cpu")
        self._memory = memory
        self._partition = self._empty(0)
        """What is collected of this rank's partition, where there is no lasting memory."""
        self._collected: set[int] = set()
        """Indices of regions that are in it."""
        self._whole: dict[int, torch.Tensor] = {}
        """By index of region: sums that every rank needs whole."""
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
    def lasts(self) -> bool:
        """Whether the memory of whole gradients lasts from step to step."""
        return self._memory is not None

    @property
    def partition(self) -> torch.Tensor:
        """This rank's partition, ``[partition_numel]``, at the front of lasting memory; after :meth:`take`."""
        assert self._memory is not None
        return self._memory[: self.layout.partition_numel]

    def take(self) -> torch.Tensor:
        """This rank's partition, ``[partition_numel]``: in lasting memory it is valid until the next backward."""
        if self._memory is not None:
            return self._compact(self._memory)
        for index, flat in self._whole.items():
            self._into_partition(self.layout.regions[index], flat)
        for region in self.layout.regions:
            if region.index not in self._collected:
                self._place_in_partition(region).zero_()
        taken = self._partition
        self.discard()
        return taken

    def _compact(self, memory: torch.Tensor) -> torch.Tensor:
        """Move slices next to each other, to the front.

        Region by region: a slice moves to or before the place where its region starts, so nothing that is still needed
        is overwritten.
        """
        for region in self.layout.regions:
            end, position = region.address + region.slice_numel, region.start + self.rank * region.slice_numel
            if position != region.address:
                own = memory[position : position + region.slice_numel]
                memory[region.address : end].copy_(own.clone() if position < end else own)
        return self.partition

    def place(self, region: Region) -> torch.Tensor:
        """Memory for a region's gradients, padding included: lasting, or lent until their sum is collected."""
        if self._memory is not None:
            return self._memory[region.start : region.start + region.numel]
        while not self.keeps and len(self._lent) >= _LENT:
            self._lent[0].wait()
            self._lent.popleft()
        return self._empty(region.numel)

    def place_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Where the sum of a parameter that every rank needs whole is, ``[numel]``; until :meth:`take`."""
        region, offset = self.regions[parameter].region, self.offsets[parameter]
        if self._memory is not None:
            return self._memory[offset : offset + parameter.numel()]
        return self._whole[region.index][offset - region.start :][: parameter.numel()]

    def note(self, reduction: Reducing) -> None:
        """A region is under way; its memory can be lent again when that has been waited for."""
        if self._memory is None:
            while self._lent and self._lent[0].is_done():
                self._lent.popleft().wait()
            self._lent.append(reduction)

    def collect(self, region: Region, flat: torch.Tensor) -> None:
        """Take what this rank needs of a region's sum, where that does not stay in lasting memory."""
        if self._memory is not None:
            return
        if region.index in self.whole:
            self._whole[region.index] = flat
        else:
            self._into_partition(region, flat)

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a sum that came late, of a whole parameter, to what has been collected."""
        region, offset = self.regions[parameter].region, self.offsets[parameter]
        if self._memory is not None or region.index in self.whole:
            self.place_of(parameter).add_(gradient.reshape(-1))
            return
        start = region.start + self.rank * region.slice_numel
        first, last = max(start, offset), min(start + region.slice_numel, offset + gradient.numel())
        if first < last:
            own = self._place_in_partition(region)[first - start : last - start]
            own.add_(gradient.reshape(-1)[first - offset : last - offset])

    @property
    def holds_sums(self) -> bool:
        """Whether something is collected that was not taken yet."""
        return bool(self._collected)

    def discard(self) -> None:
        """Forget what has been collected; lasting memory is overwritten by the next gradients."""
        self._lent.clear()
        self._partition = self._empty(0)
        self._collected.clear()
        self._whole.clear()

    def _into_partition(self, region: Region, flat: torch.Tensor) -> None:
        place, own_slice = self._place_in_partition(region), flat.view(region.size, -1)[self.rank]
        if region.index in self._collected:
            place.add_(own_slice)
        else:
            place.copy_(own_slice)
            self._collected.add(region.index)

    def _place_in_partition(self, region: Region) -> torch.Tensor:
        if not len(self._partition):
            self._partition = self._empty(self.layout.partition_numel)
        return self._partition[region.address : region.address + region.slice_numel]

    def _empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self.dtype, device=self._device)


@dataclass(frozen=True, eq=False)
class RegionOfGradients:
    """One region and the gradients that it is part of."""

    gradients: PartitionedGradients
    region: Region

    @property
    def is_whole(self) -> bool:
        """Whether every rank needs all of it."""
        return self.region.index in self.gradients.whole
