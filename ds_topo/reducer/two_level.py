"""Reduce in two levels if a group spans hosts with several ranks each.

Inside a host each rank reduces its share of the bucket. The ranks with the same share all-reduce it across hosts.
Inside the host the shares are then gathered. With n ranks on each of h hosts, a ring over all ranks sends nearly 2 B
through every host's link; two levels send 2 B (h - 1) / h in total, which is half of it for two hosts.

On gloo, ranks exchange slices as at ZeRO stages 1 and 2, there and back (:mod:`ds_topo.zero.exchange`).
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ds_topo.backends import SideStream, synchronize, traits_of
from ds_topo.process_groups.creation import ProcessGroup, ProcessGroups
from ds_topo.reducer.options import MIB
from ds_topo.topology.rank_tables import RankGroup, two_level_ranks
from ds_topo.zero.exchange import Pending, Queued, exchange_between, hosts_in_order


class TwoLevelReduction(ABC):
    """Sums contiguous tensors over a group in two levels; all ranks submit the same tensors in the same order."""

    multiple: int
    """The number of elements of a tensor must be a multiple of this."""

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a longer copy if it cannot be split evenly."""
        missing = -len(tensor) % self.multiple
        return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor

    @abstractmethod
    def submit(self, tensor: torch.Tensor) -> Pending:
        """Start summing ``tensor`` in place."""

    @abstractmethod
    def destroy(self) -> None:
        """Stop background work and destroy groups. Nothing may be in flight. Idempotent."""


class _ByMessages(TwoLevelReduction):
    """The reduction by point-to-point messages of slices."""

    def __init__(self, group: ProcessGroup, hosts: Mapping[int, str]) -> None:
        self.multiple = len(hosts)
        self._exchange = exchange_between(group, tuple(hosts.values()))

    def submit(self, tensor: torch.Tensor) -> Pending:
        return self._exchange.all_reduce(tensor)

    def destroy(self) -> None:
        self._exchange.rest()


class _ByCollectives(TwoLevelReduction):
    """The reduction by three collectives, which are queued on a side stream."""

    def __init__(self, hosts: Mapping[int, str], device: torch.device) -> None:
        inner, outer = two_level_ranks(list(hosts), hosts, dist.get_rank())
        groups = [RankGroup(("inside host",), tuple(inner)), RankGroup(("across hosts",), tuple(outer))]
        table = hashlib.sha256(repr(sorted(hosts.items())).encode()).hexdigest()[:16]
        self._groups = ProcessGroups(f"two levels over hosts of digest {table}", groups, sorted(hosts))
        inside, across = (self._groups.get(group.axes) for group in groups)
        assert inside is not None
        assert across is not None
        self._inner, self._outer = inside, across
        self.multiple = len(inner)
        self._stream, self._device = SideStream(device), device

    def submit(self, tensor: torch.Tensor) -> Pending:
        with self._stream.after_current(tensor):
            share = torch.empty(tensor.numel() // self.multiple, dtype=tensor.dtype, device=tensor.device)
            dist.reduce_scatter_tensor(share, tensor, group=self._inner)
            dist.all_reduce(share, group=self._outer)
            dist.all_gather_into_tensor(tensor, share, group=self._inner)
        return Queued(self._stream.mark(), self._device)

    def destroy(self) -> None:
        self._groups.destroy()


def two_level_reduction(group: ProcessGroup, hosts: Mapping[int, str], device: torch.device) -> TwoLevelReduction:
    """Return the reduction for the backend of a group; collective over it.

    Args:
        group: the ranks.
        hosts: their hosts by global rank, in the order of the group, which have two levels
            (:func:`~ds_topo.topology.rank_tables.has_two_levels`).
        device: the device of the tensors.
    """
    return _ByMessages(group, hosts) if traits_of(group, device).tagged_messages else _ByCollectives(hosts, device)


def hosts_of(group: ProcessGroup) -> dict[int, str]:
    """Return host names by global rank, in the order of the group; collective."""
    return dict(zip(dist.get_process_group_ranks(group), hosts_in_order(group), strict=True))


_ROUNDS = 3
_SMALL_BUCKET_BYTES = 4 * MIB
_LARGE_BUCKET_BYTES = 25 * MIB
_SLOW_LINK_SECONDS = 0.01
"""A link on which a small bucket takes longer than this is slow."""


def suitable_bucket_bytes(group: ProcessGroup, device: torch.device) -> int:
    """Measure the link and return a suitable capacity of buckets; collective over ``group``.

    On a slow link (below about 3 Gbit/s) communication dominates, and small buckets let it start early. On a fast link
    launches disturb backward, and large buckets, as in torch's DDP, are better.
    """
    if dist.get_world_size(group) == 1:
        return _LARGE_BUCKET_BYTES
    bucket = torch.zeros(_SMALL_BUCKET_BYTES // 4, device=device)
    (seconds,) = _best_seconds([lambda: dist.all_reduce(bucket, group=group)], group, device)
    return _SMALL_BUCKET_BYTES if seconds > _SLOW_LINK_SECONDS else _LARGE_BUCKET_BYTES


def is_two_level_faster(two_level: TwoLevelReduction, group: ProcessGroup, probe: torch.Tensor) -> bool:
    """Reduce ``probe`` in two levels and flat, alternating, and compare; collective over ``group``."""

    probe.zero_()
    ways = [lambda: dist.all_reduce(probe, group=group), lambda: two_level.submit(probe).wait()]
    flat, levels = _best_seconds(ways, group, probe.device)
    return levels < flat


def _best_seconds(ways: Sequence[Callable[[], object]], group: ProcessGroup, device: torch.device) -> list[float]:
    """Return the slowest rank's best time of each way, after one warm-up round."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(_ROUNDS):
        for way, taken in zip(ways, times, strict=True):
            dist.barrier(group=group)
            started = time.perf_counter()
            way()
            synchronize(device)
            taken.append(time.perf_counter() - started)
    best = torch.tensor([min(taken[1:]) for taken in times], device=device)
    dist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)
    seconds: list[float] = best.tolist()
    return seconds
