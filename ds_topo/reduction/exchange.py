"""Reduce-scatter and all-gather slices in the background, for ZeRO stages 1 and 2; also all-reduce in two levels.

On gloo the ranks exchange slices point to point, in place and without a copy: gloo's own reduce_scatter is an
all_reduce and a copy, and its all_gather sends in one direction at a time. Other backends use torch's collectives,
which the caller's own thread starts.

With an axis ``shard``, several ranks hold copies of one partition (:class:`PartitionHolders`). A slice is then reduced
inside ``shard`` and summed over its copies, in one exchange; a gather stays inside ``shard``.
"""

from __future__ import annotations

import hashlib
import os
import queue
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ds_topo.base.backends import SideStream, order_after, traits_of
from ds_topo.base.torch_names import ReduceOp, gloo_threads
from ds_topo.process_groups.creation import ProcessGroup, ProcessGroups, gathered
from ds_topo.topology.rank_tables import RankGroup, has_two_levels, two_level_ranks

_MESSAGE_BYTES = 1 << 20
"""Slices are sent in pieces of at most this size; larger messages do not keep both directions of a link busy."""
_PIECES_UNDER_WAY = 4
"""The number of pieces of every slice that are posted at a time."""
_RECEIVED_BYTES = 1 << 24
"""The limit on bytes being received at a time: groups of many ranks use smaller messages."""
_SECONDS_TO_END = 10
_FIRST_TAG = 1 << 30
"""The first message tag; the program's own messages use lower tags."""
_TAGS = 1 << 26
"""The number of tags of one exchange."""
_LANES = 8


class Pending(Protocol):
    """An exchange in flight."""

    def is_done(self) -> bool:
        """Return True if the result is in memory, for every thread and every stream of the device."""
        ...

    def wait(self) -> int:
        """Wait for the end: the calling thread, or on an accelerator its current stream. May be called again.

        Return the ``time.perf_counter_ns()`` of the end, or of this wait's return.
        """
        ...


@dataclass(frozen=True)
class Started:
    """An exchange that torch, or a side stream of the device, has started."""

    is_done: Callable[[], bool] = lambda: True
    order: Callable[[], object] = lambda: None
    """Wait for the end; on an accelerator, order the current stream after it."""

    def wait(self) -> int:
        self.order()
        return time.perf_counter_ns()


class Exchange:
    """Exchanges of slices over one process group; this base class serves groups of one rank, which holds every slice.

    All ranks start the same exchanges in the same order. Tensors are contiguous, ``[slices * numel]``: slice ``i``,
    ``[numel]``, belongs to rank ``i``.
    """

    slices = 1
    """The number of slices of a tensor."""

    def reduce_scatter(
        self, flat: torch.Tensor, op: ReduceOp = dist.ReduceOp.SUM, *, over_copies: bool = True
    ) -> Pending:
        """Reduce this rank's slice over all ranks, in place. The contents of the other slices become undefined.

        Args:
            flat: the slices of all ranks; with copies, ``numel`` is a multiple of their number.
            op: the operation; with copies, a sum.
            over_copies: also sum the slice over the ranks that hold copies of it; no-op without such ranks.
        """
        return Started()

    def gather(self, flat: torch.Tensor) -> Pending:
        """Receive the slices of all other ranks, in place."""
        return Started()

    def all_reduce(self, flat: torch.Tensor) -> Pending:
        """Sum all slices over all ranks, in place, inside hosts first and then across them."""
        return Started()

    def gather_now(self, flat: torch.Tensor) -> None:
        """Gather and block until the slices have arrived; starts no background thread."""
        self.gather(flat).wait()

    def rest(self) -> None:
        """Stop background work and destroy groups of its own. Idempotent.

        A later exchange starts the background work again; one with groups of its own has ended.
        """


@dataclass(frozen=True)
class PartitionHolders:
    """The groups of a rank whose partition other ranks hold, too."""

    group: ProcessGroup
    """The ranks that hold this rank's partition."""
    whole: ProcessGroup
    """All ranks that hold the parameters: those that share the partitions, times the copies of each."""

    @property
    def number(self) -> int:
        return dist.get_world_size(self.group)


def exchange_of(group: ProcessGroup, device: torch.device, copies: PartitionHolders | None = None) -> Exchange:
    """Return the fastest exchange for tensors on a device; the first call is collective.

    The ranks of ``group`` share the partitions, and those of ``copies`` hold copies of them, if there are any.
    """
    everyone = group if copies is None else copies.whole
    if dist.get_world_size(everyone) == 1:
        return Exchange()
    if not traits_of(everyone, device).tagged_messages:
        return CollectiveExchange(group, None if copies is None else copies.group, device)
    place = ExchangeMember(
        socket.gethostname(), dist.get_rank(group), 0 if copies is None else dist.get_rank(copies.group)
    )
    key = () if copies is None else tuple(dist.get_process_group_ranks(copies.group))
    return _peer_exchange(everyone, key, lambda: gathered(place, everyone))


def two_level_exchange(group: ProcessGroup, hosts: Mapping[int, str], device: torch.device) -> Exchange:
    """Return an exchange for all-reduces in two levels, which a group over several hosts can use; collective over it.

    Inside a host each rank reduces its slice. The ranks with the same slice sum it across hosts. Inside the host the
    slices are then gathered. With ``n`` ranks on each of ``h`` hosts, a ring over all ranks sends nearly ``2 B``
    through every host's link; two levels send ``2 B (h - 1) / h`` in total, which is half of it for two hosts.

    ``hosts`` has the host of each global rank, in the order of the group.
    """
    if traits_of(group, device).tagged_messages:
        names = tuple(hosts.values())
        return _peer_exchange(group, names, lambda: [ExchangeMember(host, rank) for rank, host in enumerate(names)])
    inner, outer = two_level_ranks(list(hosts), hosts, dist.get_rank())
    groups = [RankGroup(("inside host",), tuple(inner)), RankGroup(("across hosts",), tuple(outer))]
    table = hashlib.sha256(repr(sorted(hosts.items())).encode()).hexdigest()[:16]
    created = ProcessGroups(f"two levels over hosts of digest {table}", groups, sorted(hosts))
    inside, across = (created.get(group.axes) for group in groups)
    assert inside is not None
    return CollectiveExchange(inside, across, device, created)


def _peer_exchange(
    group: ProcessGroup, key: tuple[object, ...], places: Callable[[], Sequence[ExchangeMember]]
) -> PeerExchange:
    known = _by_group.setdefault(group, {})
    if key not in known:
        known[key] = PeerExchange(group, places(), lane=len(known))
    return known[key]


class CollectiveExchange(Exchange):
    """The exchange by torch's collectives, which on NCCL work in place and know the machine's links.

    The ranks of ``group`` share the partitions, and those of ``copies`` hold this rank's. The groups that were
    ``created`` for the exchange end with it.
    """

    def __init__(
        self,
        group: ProcessGroup,
        copies: ProcessGroup | None,
        device: torch.device,
        created: ProcessGroups | None = None,
    ) -> None:
        self._group, self._rank, self.slices = group, dist.get_rank(group), dist.get_world_size(group)
        self._copies, self._device, self._created = copies, device, created
        self._stream = SideStream(device)
        """The stream of several collectives that follow each other."""

    def reduce_scatter(
        self, flat: torch.Tensor, op: ReduceOp = dist.ReduceOp.SUM, *, over_copies: bool = True
    ) -> Pending:
        flat, own = self._with_own(flat)
        if self._copies is None or not over_copies:
            work = dist.reduce_scatter_tensor(own, flat, op, group=self._group, async_op=True)
            return Started(work.is_completed, work.wait)
        with self._stream.after_current(flat):
            dist.reduce_scatter_tensor(own, flat, op, group=self._group)
            dist.all_reduce(own, group=self._copies)
        return self._queued()

    def gather(self, flat: torch.Tensor) -> Pending:
        flat, own = self._with_own(flat)
        work = self._gather(flat, own, async_op=True)
        return Started(work.is_completed, work.wait)

    def all_reduce(self, flat: torch.Tensor) -> Pending:
        flat, own = self._with_own(flat)
        with self._stream.after_current(flat):
            dist.reduce_scatter_tensor(own, flat, group=self._group)
            dist.all_reduce(own, group=self._copies)
            self._gather(flat, own)
        return self._queued()

    def rest(self) -> None:
        if self._created is not None:
            self._created.destroy()

    def _queued(self) -> Pending:
        end = self._stream.mark()
        return Started(lambda: end is None or end.query(), lambda: order_after(end, self._device))

    def _gather(self, flat: torch.Tensor, own: torch.Tensor, async_op: bool = False) -> Any:
        own = own if traits_of(self._group, flat.device).gathers_in_place else own.clone()
        return dist.all_gather_into_tensor(flat, own, group=self._group, async_op=async_op)

    def _with_own(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor with real elements, and this rank's slice of it."""
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        return flat, flat.view(self.slices, -1, *flat.shape[1:])[self._rank]


@dataclass(frozen=True)
class ExchangeMember:
    """The place of one rank in an exchange."""

    host: str
    partition: int
    copy: int = 0
    """Its index among the ranks that hold this partition."""


@dataclass(frozen=True)
class Peer:
    """The slices that this rank exchanges with one other rank of the group in one round."""

    rank: int
    """The other rank, within the group."""
    theirs: tuple[int, ...]
    """Slices that the other rank is responsible for after this round: a reduce-scatter sends them to it."""
    mine: tuple[int, ...]
    """Slices that this rank is responsible for: a reduce-scatter receives them from the other rank."""


Rounds: TypeAlias = list[list[Peer]]
"""The peers of each round, whose messages can be in flight together."""


def rounds_of(rank: int, hosts: Sequence[str], slices: Mapping[int, tuple[int, ...]] | None = None) -> Rounds:
    """Return the rounds of a reduce-scatter for one rank of a group, whose ranks are on these hosts.

    There are two rounds if the group spans several hosts with equally many ranks, several each; otherwise there is one.
    A reduce-scatter goes through them in order. A gather goes through them backwards, with sending and receiving
    exchanged. With ``n`` ranks on each of ``h`` hosts and ``B`` bytes, a direct exchange sends ``B n (h - 1) / h`` over
    each host's link; two rounds (inside hosts, then across them) send ``B (h - 1) / h``.

    ``slices`` has those of each rank that takes part; by default all ranks take part, with one slice each.

    >>> for peers in rounds_of(0, ["a", "a", "b", "b"]):
    ...     print(peers)
    [Peer(rank=1, theirs=(1, 3), mine=(0, 2))]
    [Peer(rank=2, theirs=(2,), mine=(0,))]
    """
    slices = slices or {each: (each,) for each in range(len(hosts))}
    of_rank = {each: hosts[each] for each in slices}

    def others(ranks: Sequence[int]) -> list[int]:
        """Return the other ranks, starting with the next one, so that not all ranks begin with the same peer."""
        place = ranks.index(rank)
        return [*ranks[place + 1 :], *ranks[:place]]

    if len(slices) == 1:
        return []
    if not has_two_levels(of_rank):
        return [[Peer(other, slices[other], slices[rank]) for other in others(list(slices))]]
    levels = {each: two_level_ranks(list(slices), of_rank, each) for each in slices}
    inside = {each: tuple(part for one in across for part in slices[one]) for each, (_, across) in levels.items()}
    local, counterparts = levels[rank]
    return [
        [Peer(other, inside[other], inside[rank]) for other in others(local)],
        [Peer(other, slices[other], slices[rank]) for other in others(counterparts)],
    ]


def rounds_over_copies(rank: int, places: Sequence[ExchangeMember]) -> tuple[Rounds, Rounds]:
    """Return the rounds of a reduce-scatter for one rank, among the partitions and among the copies of its own.

    A partition is cut into one slice per copy, and slice ``partition * copies + copy`` belongs to one rank. After the
    first rounds a rank is responsible for the slices of its partition, after the last for its own slice. The last
    rounds backwards, with sending and receiving exchanged, give all copies the sums of the whole partition. If each of
    ``h`` hosts holds one copy of ``B`` bytes, it sends ``B (h - 1) / h`` there and as much back.

    >>> places = [ExchangeMember(*place) for place in [("a", 0, 0), ("a", 1, 0), ("b", 0, 1), ("b", 1, 1)]]
    >>> rounds_over_copies(0, places)
    ([[Peer(rank=1, theirs=(2, 3), mine=(0, 1))]], [[Peer(rank=2, theirs=(1,), mine=(0,))]])
    """
    own, hosts = places[rank], [place.host for place in places]
    copies = range(1 + max(place.copy for place in places))
    slices = [tuple(place.partition * len(copies) + copy for copy in copies) for place in places]
    partners = {other: slices[other] for other, place in enumerate(places) if place.copy == own.copy}
    twins = {
        other: (slices[other][place.copy],) for other, place in enumerate(places) if place.partition == own.partition
    }
    return rounds_of(rank, hosts, partners), rounds_of(rank, hosts, twins)


_by_group: WeakKeyDictionary[ProcessGroup, dict[tuple[object, ...], PeerExchange]] = WeakKeyDictionary()
"""The exchanges of each group, by the ranks with copies or the hosts: its ranks number their messages alike."""


class PeerExchange(Exchange):
    """The exchange by point-to-point messages, which a thread carries while any are in flight.

    It does not keep the group alive. The messages of each ``lane`` of a group have other tags.
    """

    def __init__(self, group: ProcessGroup, places: Sequence[ExchangeMember], lane: int = 0) -> None:
        self.slices = dist.get_world_size(group)
        self._inside, self._across = rounds_over_copies(dist.get_rank(group), places)
        self._worker = _Worker(group, lane)
        self._end_thread: Callable[[], object] | None = None
        """Set while the thread exists."""

    def reduce_scatter(
        self, flat: torch.Tensor, op: ReduceOp = dist.ReduceOp.SUM, *, over_copies: bool = True
    ) -> Pending:
        assert op == dist.ReduceOp.SUM, "a backend with tagged messages does not average by itself"
        across = self._across if over_copies else []
        return self._submit(_Job(flat, self._inside + across, across))

    def all_reduce(self, flat: torch.Tensor) -> Pending:
        return self._submit(_Job(flat, self._inside, self._inside))

    def gather(self, flat: torch.Tensor) -> Pending:
        return self._submit(_Job(flat, [], self._inside))

    def gather_now(self, flat: torch.Tensor) -> None:
        if self._end_thread is None:
            job = _Job(flat, [], self._inside)
            self._worker.begin(job)
            self._worker.finish()
            job.wait()
        else:
            self.gather(flat).wait()

    def rest(self) -> None:
        if self._end_thread is not None:
            self._end_thread()
            self._end_thread = None

    def _submit(self, job: _Job) -> Pending:
        if self._end_thread is None:
            thread = threading.Thread(target=self._worker.run, name="ds_topo exchange of slices", daemon=True)
            thread.start()
            _gloo_threads.begin_yielding()
            self._end_thread = weakref.finalize(self, _end, thread, self._worker.jobs)
        self._worker.jobs.put(job)
        return job


def _end(thread: threading.Thread, jobs: queue.SimpleQueue[_Job | None]) -> None:
    """Tell a thread to end and wait for it: the interpreter must not exit while the thread is inside torch."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_SECONDS_TO_END)
    _gloo_threads.end_yielding()


class _Job:
    """One tensor to exchange.

    In the rounds ``sums``, those who are responsible for slices sum them. In the rounds ``back``, which then go
    backwards, they send the sums.
    """

    def __init__(self, flat: torch.Tensor, sums: Rounds, back: Rounds) -> None:
        self.flat, self.sums, self.back = flat.detach(), sums, back[::-1]
        self.pieces_left = 0
        self.done: Future[int] = Future()

    def is_done(self) -> bool:
        return self.done.done() and self.done.exception() is None

    def wait(self) -> int:
        return self.done.result()


_Messages: TypeAlias = Iterator[list[dist.Work]]
"""The messages of one piece, round by round; advance it when those of the last round have arrived."""


class _Worker:
    """Sends and receives slices, in pieces; it does not keep the exchange or the group alive.

    A few pieces are in flight at a time. They take turns, so that one travels inside hosts while another crosses them.
    Every rank posts the rounds in the order of the pieces, so the ranks cannot deadlock. That holds for two rounds, of
    which the last one is posted before a rank waits for another piece. With more, a rank that already knows the next
    piece would wait for its first round, while one that does not would wait for the third round of this piece. So a
    piece with more rounds ends before a rank waits for the next one.
    """

    def __init__(self, group: ProcessGroup, lane: int) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        """The tensors to exchange; None ends the thread."""
        self._group, self._size = weakref.ref(group), dist.get_world_size(group)
        self._first_tag = _FIRST_TAG + lane % _LANES * _TAGS
        self._spare: list[torch.Tensor] = []
        """Receive buffers that are not in use, as bytes."""
        under_way = _PIECES_UNDER_WAY * max(1, self._size - 1)
        self._message_bytes = min(_MESSAGE_BYTES, _RECEIVED_BYTES // under_way)
        self._pieces = 0
        """The number of pieces exchanged so far. It is the same on all ranks, and so are the tags made from it."""
        self._under_way: deque[tuple[_Job, _Messages, list[dist.Work]]] = deque()
        """Each piece in flight: its job, the messages of the remaining rounds, and those of this one."""
        self._failure: BaseException | None = None
        """The first error. Ranks may get it at different pieces, so every later job fails with it, too."""

    def run(self) -> None:
        """Do jobs until None arrives."""
        while True:
            while self._under_way and self.jobs.empty():
                self._advance()
            job = self.jobs.get()
            if job is None:
                self.finish()
                return
            self.begin(job)
            del job  # it would keep its tensor alive until the next job

    def begin(self, job: _Job) -> None:
        """Send the pieces of a job, and wait for earlier ones if too many are in flight."""
        try:
            pieces = list(self._pieces_of(job))
            job.pieces_left = len(pieces)
            for messages in pieces:
                while len(self._under_way) >= _PIECES_UNDER_WAY:
                    self._advance()
                if self._failure is not None:
                    raise self._failure
                self._under_way.append((job, messages, next(messages)))
            if not pieces:
                job.done.set_result(time.perf_counter_ns())
        except BaseException as error:  # passed to the callers of wait()
            self._fail(error, job)

    def finish(self) -> None:
        """Wait for all pieces in flight."""
        while self._under_way:
            self._advance()

    def _advance(self) -> None:
        """Wait for the messages of the oldest piece, and send those of its next round."""
        job, messages, works = self._under_way.popleft()
        try:
            for work in works:
                work.wait()
            following = next(messages, None)
        except BaseException as error:  # passed to the callers of wait()
            self._fail(error, job)
            return
        if following is not None:
            more_rounds = len(job.sums) + len(job.back) > 2
            put_back = self._under_way.appendleft if more_rounds else self._under_way.append
            put_back((job, messages, following))
            return
        job.pieces_left -= 1
        if not job.pieces_left:
            job.done.set_result(time.perf_counter_ns())

    def _fail(self, error: BaseException, job: _Job) -> None:
        self._failure = error
        waiting = {job, *(other for other, _, _ in self._under_way)}
        self._under_way.clear()
        for each in waiting:
            if not each.done.done():
                each.done.set_exception(error)

    def _pieces_of(self, job: _Job) -> Iterator[_Messages]:
        """Yield the pieces of a tensor, in order; none if no other rank shares it."""
        if not job.sums and not job.back:
            return
        slices = job.flat.view(self._size, -1)
        numel = max(1, self._message_bytes // slices.itemsize)
        for start in range(0, slices.shape[1], numel):
            self._pieces += 1
            yield self._messages(job, slices[:, start : start + numel], self._pieces)

    def _messages(self, job: _Job, piece: torch.Tensor, number: int) -> _Messages:
        for peers in job.sums:
            yield from self._sum(piece, number, peers)
        for peers in job.back:
            yield from self._gather(piece, number, peers)

    def _sum(self, piece: torch.Tensor, number: int, peers: Sequence[Peer]) -> _Messages:
        received = [(index, self._receive_buffer(piece[index]), peer.rank) for peer in peers for index in peer.mine]
        works = [self._receive(_like(piece[index], buffer), rank, number, index) for index, buffer, rank in received]
        works += [self._send(piece[index], peer.rank, number, index) for peer in peers for index in peer.theirs]
        yield works
        for index, buffer, _ in sorted(received, key=lambda entry: entry[2]):
            piece[index].add_(_like(piece[index], buffer))
            self._spare.append(buffer)

    def _gather(self, piece: torch.Tensor, number: int, peers: Sequence[Peer]) -> _Messages:
        works = [self._receive(piece[index], peer.rank, number, index) for peer in peers for index in peer.theirs]
        works += [self._send(piece[index], peer.rank, number, index) for peer in peers for index in peer.mine]
        yield works

    def _receive_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer of at least ``like.nbytes`` bytes, a spare one if possible."""
        spare = self._spare.pop() if self._spare else None
        if spare is None or len(spare) < like.nbytes:
            return torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
        return spare

    def _send(self, tensor: torch.Tensor, rank: int, number: int, index: int) -> dist.Work:
        tag = self._tag(number, index)
        return cast("dist.Work", dist.isend(tensor, group=self.living_group, group_dst=rank, tag=tag))

    def _receive(self, tensor: torch.Tensor, rank: int, number: int, index: int) -> dist.Work:
        tag = self._tag(number, index)
        return cast("dist.Work", dist.irecv(tensor, group=self.living_group, group_src=rank, tag=tag))

    @property
    def living_group(self) -> ProcessGroup:
        """The process group, if it still exists."""
        group = self._group()
        if group is None:  # torch reads None as the whole world
            raise RuntimeError(
                "the process group was destroyed while parameters or gradients were in flight over it, so they cannot "
                "arrive: call wait() of the GradientReducer, or destroy the engine, before the grid or the process "
                "group"
            )
        return group

    def _tag(self, number: int, index: int) -> int:
        return self._first_tag + (number * self._size + index) % _TAGS


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return the front of some memory as a tensor of this type and shape."""
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


# -- the threads of gloo -----------------------------------------------------------------------------------------------


class GlooThreads:
    """The gloo threads of this process, which yield to computation while at least one exchange wants it.

    gloo moves bytes in a thread for each process group. Linux runs that thread as soon as a packet has arrived,
    hundreds of times in a backward pass, and each time it evicts the caches of the computation. With the policy
    ``SCHED_BATCH`` (sched(7)) the thread waits until a core is idle or a time slice of a few milliseconds ends, for
    which the sockets have room, and then moves everything that has arrived. The bytes and the share of a core stay the
    same.

    Measured on 2 ranks that share a host of 2 cores, ``python -m tests.bench.zero_overlap --rate none --samples 1``: a
    step at ZeRO 1 takes 158 ms with it and 184 ms without. No effect on a torch release that does not name these
    threads (2.8).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # garbage collection inside one call may end another exchange
        self._wanted = 0
        """The number of exchanges for which threads yield."""
        self._changed: set[int] = set()
        """Linux thread ids of the threads whose policy was changed."""

    def begin_yielding(self) -> None:
        """Let all gloo threads yield, including those that were created since the last call."""
        with self._lock:
            self._wanted += 1
            self._changed |= {thread for thread in gloo_threads() if _change(thread, "SCHED_OTHER", "SCHED_BATCH")}

    def end_yielding(self) -> None:
        """Undo one ``begin_yielding()``; the last call restores the policy of the threads that were changed."""
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                for thread in self._changed.intersection(gloo_threads()):
                    _change(thread, "SCHED_BATCH", "SCHED_OTHER")
                self._changed.clear()


def _change(thread: int, old: str, new: str) -> bool:
    """Give a thread of the policy ``old`` the policy ``new``; return whether it had the old one."""
    with suppress(OSError):  # the thread has just ended, or a sandbox forbids it; only speed depends on it
        if os.sched_getscheduler(thread) == getattr(os, old):
            os.sched_setscheduler(thread, getattr(os, new), os.sched_param(0))
            return True
    return False


_gloo_threads = GlooThreads()
