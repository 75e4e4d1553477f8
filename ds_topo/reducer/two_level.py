"""Reduce in two levels if a group spans hosts with several ranks each.

Inside a host each rank reduces its share of the bucket. The ranks with the same share all-reduce it across hosts.
Inside the host the shares are then gathered. With n ranks on each of h hosts, a ring over all ranks sends nearly 2 B
through every host's link; two levels send 2 B (h - 1) / h in total, which is half of it for two hosts.
"""

from __future__ import annotations

import enum
import hashlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from ds_topo.backends import SideStream, synchronize, traits_of
from ds_topo.process_groups.creation import ProcessGroup, ProcessGroups
from ds_topo.reducer.options import MIB
from ds_topo.topology.rank_tables import RankGroup, two_level_ranks
from ds_topo.zero.exchange import Pending, Queued, end_thread, hosts_in_order


class TwoLevelReduction:
    """Sums contiguous tensors over ``group`` in two levels, in the order in which they are submitted.

    If a wait blocks the caller, as on gloo, a thread runs the three collectives of a tensor; while one tensor crosses
    hosts, it reduces the next one inside the host. On every rank the gather of a tensor follows the scatter of its
    successor, so the ranks of a host always meet in the same collective. If collectives are ordered by streams, as on
    NCCL, the caller queues them on a side stream.

    Creating it is collective over the group.

    Args:
        hosts: the group's global ranks, each with its host (:func:`~ds_topo.topology.rank_tables.has_two_levels`).
        device: the device of the tensors.
        timeout: the timeout of the groups inside and across hosts.
    """

    def __init__(self, hosts: Mapping[int, str], device: torch.device, timeout: timedelta | None = None) -> None:
        inner, outer = two_level_ranks(list(hosts), hosts, dist.get_rank())
        groups = [RankGroup(("inside host",), tuple(inner)), RankGroup(("across hosts",), tuple(outer))]
        table = hashlib.sha256(repr(sorted(hosts.items())).encode()).hexdigest()[:16]
        self._groups = ProcessGroups(f"two levels over hosts of digest {table}", groups, sorted(hosts), timeout)
        inside, across = self._groups.get(("inside host",)), self._groups.get(("across hosts",))
        world = dist.group.WORLD
        assert inside is not None
        assert across is not None
        assert world is not None
        self._inner, self._outer = inside, across
        self.inner_size = len(inner)
        """The number of elements of a tensor must be a multiple of this."""
        self._device = device
        self._stream = SideStream(device) if traits_of(world, device).ordered_by_stream else None
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a longer copy if it cannot be split evenly inside a host."""
        missing = -len(tensor) % self.inner_size
        return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor

    def submit(self, tensor: torch.Tensor) -> Pending:
        """Start summing ``tensor`` in place; all ranks submit the same tensors in the same order.

        The last tensor submitted may stay in flight until :meth:`flush`.
        """
        if self._stream is not None:
            return self._queue_on(self._stream, tensor)
        if self._thread is None:
            worker = _Worker(self._jobs, self._inner, self._outer)
            self._thread = threading.Thread(target=worker.run, name="ds_topo two-level reduction", daemon=True)
            self._thread.start()
            weakref.finalize(self, end_thread, self._thread, partial(self._jobs.put, _Mark.END))
        job = _Sum(tensor)
        self._jobs.put(job)
        return job

    def flush(self) -> None:
        """Let the last tensor end without waiting for a successor; further tensors may be submitted later."""
        if self._thread is not None:
            self._jobs.put(_Mark.FLUSH)

    def destroy(self) -> None:
        """End the thread and destroy the groups. Nothing may be in flight. Idempotent."""
        if self._thread is not None:
            self._jobs.put(_Mark.END)
            self._thread.join()
            self._thread = None
        self._groups.destroy()

    def _queue_on(self, stream: SideStream, tensor: torch.Tensor) -> Pending:
        with stream.after_current(tensor):
            share = torch.empty(tensor.numel() // self.inner_size, dtype=tensor.dtype, device=tensor.device)
            dist.reduce_scatter_tensor(share, tensor, group=self._inner)
            dist.all_reduce(share, group=self._outer)
            dist.all_gather_into_tensor(tensor, share, group=self._inner)
        return Queued(stream.mark(), self._device)


@dataclass(eq=False)
class _Sum:
    """A tensor to sum, and the future of its end."""

    tensor: torch.Tensor
    done: Future[int] = field(default_factory=Future)

    def is_done(self) -> bool:
        return self.done.done()

    def wait(self) -> int:
        return self.done.result()


class _Mark(enum.Enum):
    """A request to the thread other than a sum."""

    FLUSH = enum.auto()
    """No tensor follows for now."""
    END = enum.auto()
    """No tensor follows: end the thread."""


_Job: TypeAlias = "_Sum | _Mark"


@dataclass(eq=False)
class _Crossing:
    """A tensor whose share is being reduced across hosts."""

    tensor: torch.Tensor
    share: torch.Tensor
    work: dist.Work
    done: Future[int]


@dataclass(frozen=True, eq=False)
class _Worker:
    """The work of the thread; it does not keep the reduction alive."""

    jobs: queue.SimpleQueue[_Job]
    inner: ProcessGroup
    outer: ProcessGroup

    def run(self) -> None:
        crossing: _Crossing | None = None
        job: _Job = _Mark.FLUSH
        while job is not _Mark.END:
            job = self.jobs.get()
            following = self._scatter(job) if isinstance(job, _Sum) else None
            if crossing is not None:
                self._gather(crossing)
            crossing = following

    def _scatter(self, job: _Sum) -> _Crossing | None:
        try:
            share = _reduce_scatter(job.tensor, self.inner)
            work = dist.all_reduce(share, group=self.outer, async_op=True)
        except BaseException as error:  # passed to the caller of result()
            job.done.set_exception(error)
            return None
        return _Crossing(job.tensor, share, work, job.done)

    def _gather(self, crossing: _Crossing) -> None:
        try:
            crossing.work.wait()
            dist.all_gather_into_tensor(crossing.tensor, crossing.share, group=self.inner)
            crossing.done.set_result(time.perf_counter_ns())
        except BaseException as error:  # passed to the caller of result()
            crossing.done.set_exception(error)


def _reduce_scatter(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return this rank's share of the sum: ``[numel] -> [numel / size]``.

    gloo's own reduce_scatter is an all_reduce and a copy; this sends 1 / size of that.
    """
    parts = torch.empty_like(tensor)
    dist.all_to_all_single(parts, tensor, group=group)
    return parts.view(dist.get_world_size(group), -1).sum(dim=0)


def hosts_of(group: ProcessGroup) -> dict[int, str]:
    """Return host names by global rank; collective."""
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

    def reduce_in_two_levels() -> None:
        pending = two_level.submit(probe)
        two_level.flush()
        pending.wait()

    probe.zero_()
    ways = [lambda: dist.all_reduce(probe, group=group), reduce_in_two_levels]
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
