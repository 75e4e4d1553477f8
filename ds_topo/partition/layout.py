"""Where parameters, regions and slices lie in a flat tensor that a group of ranks has partitioned. Pure.

DeepSpeed's ZeRO lays parameters one after the other and cuts once: what one part of backward makes belongs to one rank,
and links carry it in one direction at a time. In a balanced layout every region is cut evenly, as in Megatron-LM's
distributed optimizer: all ranks send and receive all the time, and what forward needs first arrives first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from typing_extensions import Self

ALIGNMENT = 2
"""Slices are a multiple of so many elements, as DeepSpeed's partitions."""


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter that one rank owns; all numbers are elements."""

    parameter: int
    """Its index among the flat tensor's parameters."""
    start: int
    """Where it starts in the parameter."""
    rank: int
    """Whose it is."""
    address: int
    """Where it starts in the rank's partition."""
    numel: int


@dataclass(frozen=True)
class Region:
    """Neighboring parameters that are exchanged together, padded so that every rank has an equal slice."""

    index: int
    start: int
    """Where it starts in the flat tensor."""
    members: tuple[int, ...]
    """Its parameters, in the order of their addresses."""
    slice_numel: int
    size: int
    """How many slices it has."""

    @property
    def numel(self) -> int:
        """Of the region, padding included."""
        return self.slice_numel * self.size

    @property
    def address(self) -> int:
        """Where each rank's slice starts in its partition."""
        return self.start // self.size


@dataclass(frozen=True)
class PartitionLayout:
    """A flat tensor of some parameters over the ranks of a group."""

    numels: tuple[int, ...]
    """Of the parameters."""
    offsets: tuple[int, ...]
    """Where each of them starts in the flat tensor."""
    regions: tuple[Region, ...]
    """In the order of the flat tensor."""

    @classmethod
    def balanced(cls, numels: Sequence[int], groups: Sequence[Sequence[int]], size: int) -> Self:
        """Every group of parameters makes a region.

        Args:
            numels: of the parameters.
            groups: of their indices, every parameter in one of them, in the order of the flat tensor.
            size: how many ranks share it.

        >>> layout = PartitionLayout.balanced([3, 2, 4], [(0, 1), (2,)], size=2)
        >>> layout.offsets, layout.numel, layout.partition_numel
        ((0, 3, 8), 12, 6)
        >>> for fragment in layout.fragments(1):
        ...     print(fragment)
        Fragment(parameter=1, start=1, rank=1, address=0, numel=1)
        Fragment(parameter=2, start=2, rank=1, address=4, numel=2)
        """
        offsets = [0] * len(numels)
        regions: list[Region] = []
        start = 0
        for members in groups:
            end = start
            for member in members:
                offsets[member] = end
                end += numels[member]
            slice_numel = -(-(end - start) // (ALIGNMENT * size)) * ALIGNMENT
            regions.append(Region(len(regions), start, tuple(members), slice_numel, size))
            start += slice_numel * size
        return cls(tuple(numels), tuple(offsets), tuple(regions))

    @classmethod
    def flat(cls, numels: Sequence[int], offsets: Sequence[int], partition_numel: int, size: int) -> Self:
        """DeepSpeed's: a single region, cut wherever the cuts may fall.

        >>> list(PartitionLayout.flat([3, 5], [0, 3], partition_numel=4, size=2).fragments(1))
        [Fragment(parameter=1, start=1, rank=1, address=0, numel=4)]
        """
        members = tuple(sorted(range(len(numels)), key=offsets.__getitem__))
        return cls(tuple(numels), tuple(offsets), (Region(0, 0, members, partition_numel, size),))

    @property
    def numel(self) -> int:
        """Of the flat tensor, padding included."""
        return sum(region.numel for region in self.regions)

    @property
    def partition_numel(self) -> int:
        """Of each rank's partition, padding included."""
        return sum(region.slice_numel for region in self.regions)

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """What a rank owns, in the order of its partition; without padding."""
        for region in self.regions:
            start = region.start + rank * region.slice_numel
            for member in region.members:
                first = max(self.offsets[member], start)
                last = min(self.offsets[member] + self.numels[member], start + region.slice_numel)
                if first < last:
                    yield Fragment(
                        member, first - self.offsets[member], rank, region.address + first - start, last - first
                    )

    def owners(self, parameter: int, start: int, numel: int) -> Iterator[Fragment]:
        """Who owns a part of a parameter, in the order of its elements.

        >>> for owner in PartitionLayout.flat([3, 5], [0, 3], partition_numel=4, size=2).owners(1, start=0, numel=3):
        ...     print(owner)
        Fragment(parameter=1, start=0, rank=0, address=3, numel=1)
        Fragment(parameter=1, start=1, rank=1, address=0, numel=2)
        """
        region = self._region_of[parameter]
        position, end = start, start + numel
        while position < end:
            in_region = self.offsets[parameter] + position - region.start
            rank, in_slice = divmod(in_region, region.slice_numel)
            length = min(end - position, region.slice_numel - in_slice)
            yield Fragment(parameter, position, rank, region.address + in_slice, length)
            position += length

    @cached_property
    def _region_of(self) -> dict[int, Region]:
        return {member: region for region in self.regions for member in region.members}
