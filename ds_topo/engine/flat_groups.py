"""An optimizer's flat tensors of parameters, in DeepSpeed's layout and in ours."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ds_topo.engine.parameter_gathers import PartitionedParameters
from ds_topo.partition.gradients import PartitionedGradients
from ds_topo.partition.layout import Fragment, PartitionLayout
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.planning import BucketSizes, plan_buckets


def balanced_layout(
    parameters: Sequence[nn.Parameter], itemsize: int, size: int, sizes: BucketSizes, whole: Collection[nn.Parameter]
) -> tuple[PartitionLayout, set[int]]:
    """Regions of about a bucket, in the parameters' order, and which of them hold what every rank needs whole.

    Backward makes the last region's gradients first, and forward needs the first region's parameters first: both of
    them are small.
    """
    numels = [parameter.numel() for parameter in parameters]
    kinds = [parameter in whole for parameter in parameters]
    backward = range(len(parameters) - 1, -1, -1)
    buckets = plan_buckets([numel * itemsize for numel in numels], kinds, backward, sizes) if parameters else []
    groups = [members[::-1] for members in reversed(buckets)]
    layout = PartitionLayout.balanced(numels, groups, size)
    return layout, {region.index for region in layout.regions if kinds[region.members[0]]}


@dataclass(eq=False)
class FlatGroup:
    """One of an optimizer's groups of parameters, in both layouts."""

    index: int
    parameters: list[nn.Parameter]
    flat: torch.Tensor
    """DeepSpeed's tensor that all parameters are views of."""
    master: torch.Tensor
    """This rank's partition, which the optimizer steps on; its data have another length in another layout."""
    group: ProcessGroup
    theirs: PartitionLayout
    ours: PartitionLayout
    gradients: PartitionedGradients

    @property
    def rank(self) -> int:
        """Of this process among the ranks that share it."""
        return self.gradients.rank

    @cached_property
    def memory(self) -> torch.Tensor:
        """The flat tensor's memory, as long as our layout needs it."""
        return lengthened(self.flat, self.ours.numel)

    def arrange(self, layout: PartitionLayout) -> None:
        """Move the parameters to their places in a layout."""
        values = [parameter.detach().clone() for parameter in self.parameters]
        self.memory.zero_()
        for parameter, value, offset in zip(self.parameters, values, layout.offsets, strict=True):
            parameter.data = self.memory[offset : offset + value.numel()].view(value.shape)
            parameter.data.copy_(value)

    def slices(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """This rank's slices of the parameters, and where they are in its partition."""
        for region in self.ours.regions:
            start = region.start + self.rank * region.slice_numel
            yield (
                self.memory[start : start + region.slice_numel],
                slice(region.address, region.address + region.slice_numel),
            )

    def fragments_of(self, partition: torch.Tensor) -> list[torch.Tensor]:
        """What a partition holds of each parameter, without padding; in the order of :attr:`owned`."""
        parts = partition.split(self._sizes)
        return [parts[place] for place in self._places]

    @cached_property
    def owned(self) -> list[nn.Parameter]:
        """The parameters that this rank owns a part of."""
        return [self.parameters[part.parameter] for part in self.own]

    @cached_property
    def own(self) -> list[Fragment]:
        """What this rank owns, in the order of its partition."""
        return list(self.ours.fragments(self.rank))

    @cached_property
    def _sizes(self) -> list[int]:
        """Of what a partition consists of: padding, fragment, padding, fragment and so on, most paddings empty."""
        sizes, end = [], 0
        for part in self.own:
            sizes += [part.address - end, part.numel]
            end = part.address + part.numel
        return [*sizes, self.ours.partition_numel - end]

    @property
    def _places(self) -> range:
        return range(1, 2 * len(self.own), 2)


class OwnSlices:
    """In place of DeepSpeed's tensor of this rank's part of the flat parameters, which its optimizers only fill."""

    def __init__(self, group: FlatGroup, parameters: PartitionedParameters) -> None:
        self._group, self._parameters = group, parameters

    @property
    def data(self) -> OwnSlices:
        """As a tensor's."""
        return self

    def numel(self) -> int:
        """Of the partition."""
        return self._group.ours.partition_numel

    def copy_(self, partition: torch.Tensor) -> OwnSlices:
        """Write what the optimizer has made of this rank's partition to its places."""
        self._parameters.wait()  # the former values may still be leaving
        for own, where in self._group.slices():
            own.copy_(partition[where])
        return self


def lengthened(flat: torch.Tensor, numel: int) -> torch.Tensor:
    """The memory of a tensor, ``[numel]``, lengthened where it is: whoever holds views of it keeps them."""
    storage = flat.untyped_storage()
    needed = (flat.storage_offset() + numel) * flat.itemsize
    if storage.nbytes() < needed:
        storage.resize_(int(needed))
    return flat.detach().as_strided((numel,), (1,))
