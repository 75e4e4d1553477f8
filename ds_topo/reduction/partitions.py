"""Partition a flat tensor over the ranks of a group, and sum gradients of which each rank owns a part.

DeepSpeed's ZeRO places parameters one after the other and cuts the whole once. One part of backward then belongs to one
rank, and links carry its gradients in one direction at a time. In a balanced layout every region is cut evenly, as in
Megatron-LM's distributed optimizer: all ranks send and receive all the time, and the regions that forward needs first
arrive first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Self

from ds_topo.base.torch_names import ReduceOp
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reduction.buckets import GradientBucket
from ds_topo.reduction.exchange import Exchange, PartitionHolders, Pending, exchange_of
from ds_topo.reduction.parameters import ParameterState

if TYPE_CHECKING:
    from ds_topo.reduction.managed import ReplicaSums

ALIGNMENT = 2
"""The number of elements that slices are a multiple of, as DeepSpeed's partitions."""


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter that one rank owns; all numbers are elements."""

    parameter: int
    """The parameter's index in the flat tensor."""
    start: int
    """The offset of the part in the parameter."""
    rank: int
    address: int
    """The offset of the part in the owner's partition."""
    numel: int


@dataclass(frozen=True)
class Region:
    """Adjacent parameters that are exchanged together, padded so that every rank has an equal slice."""

    index: int
    start: int
    """The offset of the region in the flat tensor."""
    members: tuple[int, ...]
    """The parameters, in the order of their addresses."""
    slice_numel: int
    size: int
    """The number of slices."""

    @property
    def numel(self) -> int:
        """The size of the region, padding included."""
        return self.slice_numel * self.size

    @property
    def address(self) -> int:
        """The offset of each rank's slice in its partition."""
        return self.start // self.size


@dataclass(frozen=True)
class PartitionLayout:
    """The layout of a flat tensor of parameters that the ranks of a group share."""

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    """The offset of each parameter in the flat tensor."""
    regions: tuple[Region, ...]
    """In the order of the flat tensor."""

    @classmethod
    def balanced(cls, numels: Sequence[int], groups: Sequence[Sequence[int]], size: int, copies: int = 1) -> Self:
        """Lay out one region for every group of parameters.

        Args:
            numels: the number of elements of each parameter.
            groups: indices of parameters, each in exactly one group, in the order of the flat tensor.
            size: the number of ranks that share the tensor.
            copies: the number of ranks that hold each slice; the slice is cut evenly over them while it is summed.

        >>> layout = PartitionLayout.balanced([3, 2, 4], [(0, 1), (2,)], size=2)
        >>> layout.offsets, layout.numel, layout.partition_numel
        ((0, 3, 8), 12, 6)
        """
        offsets = [0] * len(numels)
        regions: list[Region] = []
        start = 0
        for members in groups:
            end = start
            for member in members:
                offsets[member] = end
                end += numels[member]
            aligned = ALIGNMENT * copies
            slice_numel = -(-(end - start) // (aligned * size)) * aligned
            regions.append(Region(len(regions), start, tuple(members), slice_numel, size))
            start += slice_numel * size
        return cls(tuple(numels), tuple(offsets), tuple(regions))

    @classmethod
    def flat(cls, numels: Sequence[int], offsets: Sequence[int], partition_numel: int, size: int) -> Self:
        """Lay out a single region, as DeepSpeed does; its cuts may fall anywhere in a parameter.

        >>> list(PartitionLayout.flat([3, 5], [0, 3], partition_numel=4, size=2).fragments(1))
        [Fragment(parameter=1, start=1, rank=1, address=0, numel=4)]
        """
        members = tuple(sorted(range(len(numels)), key=offsets.__getitem__))
        return cls(tuple(numels), tuple(offsets), (Region(0, 0, members, partition_numel, size),))

    @property
    def numel(self) -> int:
        """The size of the flat tensor, padding included."""
        return sum(region.numel for region in self.regions)

    @property
    def partition_numel(self) -> int:
        """The size of each rank's partition, padding included."""
        return sum(region.slice_numel for region in self.regions)

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """Yield the parts that a rank owns, in the order of its partition, without padding."""
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
        """Yield the owners of a part of a parameter, in the order of its elements.

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


def moved(
    partition: torch.Tensor, source: PartitionLayout, target: PartitionLayout, group: ProcessGroup
) -> torch.Tensor:
    """Return this rank's partition in another layout of the same parameters; collective over ``group``.

    ``[source.partition_numel] -> [target.partition_numel]``, in new memory, whose padding is zero. Each rank sends the
    others what they own in the new layout.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    leaving, arriving = _places(source, target, rank), _places(target, source, rank)
    parts = [partition[here.address : here.address + here.numel] for here, _ in leaving]
    outgoing = torch.cat(parts) if parts else partition.new_empty(0)
    incoming = partition.new_empty(sum(here.numel for here, _ in arriving))
    dist.all_to_all_single(incoming, outgoing, _counts(arriving, size), _counts(leaving, size), group=group)
    result = partition.new_zeros(target.partition_numel)
    for (here, _), part in zip(arriving, incoming.split([here.numel for here, _ in arriving]), strict=True):
        result[here.address : here.address + here.numel] = part
    return result


def _places(source: PartitionLayout, target: PartitionLayout, rank: int) -> list[tuple[Fragment, Fragment]]:
    """Return the parts that ``rank`` owns in ``source``, each with its place in ``target``.

    Their order, by peer, parameter and offset, is the same at the sender and the receiver.
    """
    places = [
        (Fragment(own.parameter, owner.start, rank, own.address + owner.start - own.start, owner.numel), owner)
        for own in source.fragments(rank)
        for owner in target.owners(own.parameter, own.start, own.numel)
    ]
    return sorted(places, key=lambda place: (place[1].rank, place[0].parameter, place[0].start))


def _counts(pairs: list[tuple[Fragment, Fragment]], size: int) -> list[int]:
    """Return the number of elements exchanged with each peer."""
    counts = [0] * size
    for here, there in pairs:
        counts[there.rank] += here.numel
    return counts


_LENT = 3
"""The number of regions in flight at a time, where every micro-batch is exchanged."""


class PartitionedGradients:
    """The gradients of one flat tensor's parameters, of which each rank owns a partition.

    Args:
        parameters: the parameters of the flat tensor, in the layout's numbering.
        layout: their places and those of this rank's slices.
        group: the ranks that share the flat tensor.
        dtype: the type that gradients accumulate in.
        memory: lasting memory of all whole gradients, in which micro-batches accumulate. Without it, memory is lent to
            each region from a step's first gradient until the sum is collected.
        reduces_always: exchange the gradients of every micro-batch, and accumulate this rank's partition alone, as at
            ZeRO 2. Gradients wait in ``parameter.grad`` until a bucket is full, and memory is lent only then.
        whole: indices of regions that every rank needs whole, such as those of tied layers.
        copies: the ranks that hold copies of the partitions, if there are any; sums include them.
        wider: continues the sums, such as over replicas of this job; None if they end here.
        ends_step: returns True if the gradients that are exchanged now are of the step's last micro-batch.
            If all are exchanged, sums of earlier ones do not include the copies, nor go on, and the last exchange
            makes up for it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: PartitionLayout,
        group: ProcessGroup,
        dtype: torch.dtype,
        *,
        memory: torch.Tensor | None = None,
        reduces_always: bool = False,
        whole: Collection[int] = (),
        copies: PartitionHolders | None = None,
        wider: ReplicaSums | None = None,
        ends_step: Callable[[], bool] = lambda: True,
    ) -> None:
        self.layout, self.group, self.whole = layout, group, frozenset(whole)
        self.copies, self._wider, self._ends_step = copies, wider, ends_step
        self.rank = dist.get_rank(group)
        self.dtype, self._device = dtype, parameters[0].device if parameters else torch.device("cpu")
        self._memory, self.is_lent, self.reduces_always = memory, memory is None, reduces_always
        self.regions = {parameters[member]: region for region in layout.regions for member in region.members}
        """The region of every parameter."""
        self.offsets = dict(zip(parameters, layout.offsets, strict=True))
        """The offset of every parameter's gradient in the flat tensor."""

        # -- the step: written by place(), note(), collect() and add(); cleared by take() and discard()
        self._partition = self._empty(0)
        """The sums collected for this rank's partition, if there is no lasting memory."""
        self._collected: set[int] = set()
        """Indices of the regions in it."""
        self._whole: dict[int, torch.Tensor] = {}
        """Sums that every rank needs whole, by the index of the region."""
        self._lent: deque[Pending] = deque()
        """The regions in flight whose memory is lent."""

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange of slices; the first access is collective over the group."""
        inside = exchange_of(self.group, self._device, self.copies)
        return inside if self._wider is None else self._wider.exchange(self.group, inside)

    def start_sum(self, region: Region, flat: torch.Tensor, op: ReduceOp, unit: float) -> Pending:
        """Start to sum this rank's slice of a region's gradients, over all ranks that hold the parameters.

        If the slice has copies and earlier micro-batches were not summed over these, their sums are added first;
        ``unit`` is what has been collected for 1.0 in ``flat``.
        """
        if (self.copies is None and self._wider is None) or not self.reduces_always:
            return self.exchange.reduce_scatter(flat, op)
        over_copies = self._ends_step()
        if over_copies and region.index in self._collected:
            self._collected.remove(region.index)
            flat.view(region.size, -1)[self.rank].add_(self._place_in_partition(region), alpha=1 / unit)
        return self.exchange.reduce_scatter(flat, op, over_copies=over_copies)

    @property
    def partition(self) -> torch.Tensor:
        """This rank's partition, ``[partition_numel]``, at the front of lasting memory; after :meth:`take`."""
        assert self._memory is not None
        return self._memory[: self.layout.partition_numel]

    def take(self) -> torch.Tensor:
        """Return this rank's partition, ``[partition_numel]``; in lasting memory, valid until the next backward."""
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
        """Move the slices to the front, each to or before the start of its region, so that none is overwritten."""
        for region in self.layout.regions:
            end, position = region.address + region.slice_numel, region.start + self.rank * region.slice_numel
            if position != region.address:
                own = memory[position : position + region.slice_numel]
                memory[region.address : end].copy_(own.clone() if position < end else own)
        return self.partition

    def bucket(self, index: int, members: Sequence[ParameterState]) -> RegionBucket:
        """Return the bucket of a region, whose gradients are reduced together."""
        return RegionBucket(index, members, self)

    def place(self, region: Region) -> torch.Tensor:
        """Return memory for a region's gradients, padding included: lasting, or lent until their sum is collected."""
        if self._memory is not None:
            return self._memory[region.start : region.start + region.numel]
        while self.reduces_always and len(self._lent) >= _LENT:
            self._lent[0].wait()
            self._lent.popleft()
        return self._empty(region.numel)

    def place_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the sum of a parameter that every rank needs whole, ``[numel]``; valid until :meth:`take`."""
        region, offset = self.regions[parameter], self.offsets[parameter]
        if self._memory is not None:
            return self._memory[offset : offset + parameter.numel()]
        return self._whole[region.index][offset - region.start :][: parameter.numel()]

    def note(self, reduction: Pending) -> None:
        """Record a region in flight; its memory can be lent again after the wait for it."""
        if self._memory is None:
            while self._lent and self._lent[0].is_done():
                self._lent.popleft().wait()
            self._lent.append(reduction)

    def collect(self, region: Region, flat: torch.Tensor) -> None:
        """Copy what this rank needs of a region's sum, unless the sum stays in lasting memory."""
        if self._memory is not None:
            return
        if region.index in self.whole:
            self._whole[region.index] = flat
        else:
            self._into_partition(region, flat)

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a late sum of a whole parameter to the sums that have been collected."""
        region, offset = self.regions[parameter], self.offsets[parameter]
        if self.copies is not None and self.reduces_always and not self._ends_step():
            gradient = gradient / self.copies.number  # the last exchange of the step sums it over the copies
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
        """True if sums have been collected that were not taken yet."""
        return bool(self._collected)

    def discard(self) -> None:
        """Discard the collected sums, to which the next ones would be added; lasting memory is overwritten anyway."""
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


class RegionBucket(GradientBucket):
    """The bucket of a region; lent memory is there from :meth:`open` to :meth:`give_back`."""

    def __init__(self, index: int, members: Sequence[ParameterState], gradients: PartitionedGradients) -> None:
        self.gradients, self.region = gradients, gradients.regions[members[0].parameter]
        self.is_scattered = self.region.index not in gradients.whole
        super().__init__(index, sorted(members, key=lambda member: gradients.offsets[member.parameter]))
        numels = [member.parameter.numel() for member in self.members]
        ends = [start + numel for start, numel in zip(self.offsets, numels, strict=True)]
        self._gaps = [slice(end, start) for end, start in zip([0, *ends], self.offsets, strict=False) if end < start]
        """What belongs to no member, such as to frozen parameters."""
        self._gaps.append(slice(ends[-1], None))

    def _offsets(self, numels: Sequence[int]) -> list[int]:
        return [self.gradients.offsets[member.parameter] - self.region.start for member in self.members]

    def _first_memory(self) -> torch.Tensor:
        """Return lasting memory; nothing if memory will be lent."""
        return torch.empty(0) if self.gradients.is_lent else self.gradients.place(self.region)

    def set_views(self) -> None:
        if len(self.flat):
            super().set_views()
        else:
            self.give_back()

    # -- lent memory

    def open(self) -> None:
        """Borrow memory, if it has none."""
        if not len(self.flat):
            self.flat = self.gradients.place(self.region)
            self.set_views()

    def give_back(self) -> None:
        """Return borrowed memory."""
        if self.gradients.is_lent:
            self.flat = self.flat.new_empty(0)
            for member in self.members:
                member.view = self.flat

    # -- gradients arrive

    def accumulate(self, state: ParameterState) -> None:
        if state.parameter.grad is not None:
            self.open()
            super().accumulate(state)

    def copy_in(self, members: Sequence[ParameterState], in_one_pass: bool = False) -> list[ParameterState]:
        self.open()
        return super().copy_in(members, in_one_pass)

    def complete(self) -> list[ParameterState]:
        """Copy in what is missing, unless gradients wait for memory until the launch."""
        return [] if self.gradients.reduces_always else super().complete()

    def add(self, state: ParameterState, gradient: torch.Tensor) -> None:
        self.gradients.add(state.parameter, gradient)

    # -- the reduction

    def prepare(self) -> None:
        """Copy in gradients that had to wait for memory, and clear the gaps."""
        if self.gradients.reduces_always:
            self.copy_in(self.members)
        for gap in self._gaps:
            self.flat[gap].zero_()

    def start_scatter(self, payload: torch.Tensor, reduction: Pending) -> Pending | None:
        if not self.is_scattered:
            return None
        pending = self.gradients.start_sum(self.region, payload, self.route.op, self.route.after)
        self.gradients.note(reduction)
        return pending

    def own_part(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.region.size, -1)[self.gradients.rank] if self.is_scattered else flat

    def take_sum(self, after: float) -> None:
        """Scale this rank's part of the sum, collect it, and return the memory."""
        if after != 1.0:
            self.own_part(self.flat).mul_(after)
        self.gradients.collect(self.region, self.flat)
        self.give_back()
