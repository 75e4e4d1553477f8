"""Sums to owners, and gathers from them, while other work goes on.

On gloo the ranks send each other slices point to point, in place and without a copy: its reduce_scatter is an
all_reduce and a copy, and its all_gather sends in one direction at a time. Elsewhere torch's collectives do it.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ds_topo.partition.rounds import Peer, rounds_of
from ds_topo.partition.yielding import threads_of_gloo
from ds_topo.process_groups.creation import ProcessGroup

_MESSAGE_BYTES = 1 << 20
"""Slices travel in pieces of this size; larger ones do not keep both directions of a link busy."""
_PIECES_UNDER_WAY = 4
"""How many pieces of every slice are posted at a time."""
_RECEIVED_BYTES = 1 << 24
"""At most so much is received at a time: among many ranks messages are smaller."""
_SECONDS_TO_END = 10
_FIRST_TAG = 1 << 30
"""Tags of the program's own messages are lower."""
_TAGS = 1 << 29


class Awaited(Protocol):
    """What will have been sent, or have arrived."""

    def wait(self) -> int:
        """Wait for its end; when that was, ``time.perf_counter_ns()``, or when the wait returned."""
        ...


class Pending(Awaited, Protocol):
    """An exchange under way."""

    def is_done(self) -> bool:
        """Whether a wait would return at once."""
        ...


class Exchange(Protocol):
    """Both exchanges over one process group of ``n`` ranks; all ranks start the same ones in the same order.

    Tensors are contiguous, ``[n * numel]``: slice ``i``, ``[numel]``, is that of rank ``i``.
    """

    def reduce_scatter(self, flat: torch.Tensor) -> Pending:
        """Sum in place, over ranks, this rank's slice; what is left in the other slices is undefined."""
        ...

    def gather(self, flat: torch.Tensor) -> Pending:
        """Receive in place the slices of all other ranks."""
        ...

    def gather_now(self, flat: torch.Tensor) -> None:
        """The same, and wait."""
        ...

    def rest(self) -> None:
        """Let nothing work in the background until the next exchange begins. Idempotent."""
        ...


def exchange_of(group: ProcessGroup, device: torch.device) -> Exchange:
    """The fastest exchange for tensors of a device; the first time collective over ``group``."""
    if dist.get_world_size(group) == 1:
        return Alone()
    if device.type != "cpu" or dist.get_backend(group) != "gloo":
        return CollectiveExchange(group)
    if group not in _by_group:
        _by_group[group] = PeerExchange(group, hosts_in_order(group))
    return _by_group[group]


@dataclass(frozen=True)
class _Done:
    """Nothing to wait for."""

    def is_done(self) -> bool:
        """It has ended already."""
        return True

    def wait(self) -> int:
        """It has ended already."""
        return time.perf_counter_ns()


class Alone:
    """A group of one rank."""

    def reduce_scatter(self, flat: torch.Tensor) -> Pending:
        """The sum is there."""
        return _Done()

    def gather(self, flat: torch.Tensor) -> Pending:
        """So are all slices."""
        return _Done()

    def gather_now(self, flat: torch.Tensor) -> None:
        """So are all slices."""

    def rest(self) -> None:
        """Nothing does."""


# -- torch's collectives ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Collective:
    """A collective of torch under way."""

    work: dist.Work

    def is_done(self) -> bool:
        """See :class:`Pending`."""
        return bool(self.work.is_completed())

    def wait(self) -> int:
        """On a GPU the current stream waits, not the caller."""
        self.work.wait()
        return time.perf_counter_ns()


class CollectiveExchange:
    """By torch's collectives, which on NCCL are in place and know the machine's links."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank, self._size = group, dist.get_rank(group), dist.get_world_size(group)

    def reduce_scatter(self, flat: torch.Tensor) -> Pending:
        """See :class:`Exchange`."""
        return _Collective(dist.reduce_scatter_tensor(self._own(flat), flat, group=self._group, async_op=True))

    def gather(self, flat: torch.Tensor) -> Pending:
        """See :class:`Exchange`."""
        own = self._own(flat) if flat.is_cuda else self._own(flat).clone()
        return _Collective(dist.all_gather_into_tensor(flat, own, group=self._group, async_op=True))

    def gather_now(self, flat: torch.Tensor) -> None:
        """See :class:`Exchange`."""
        self.gather(flat).wait()

    def rest(self) -> None:
        """Nothing does."""

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self._size, -1)[self._rank]


# -- point to point ---------------------------------------------------------------------------------------------------

_by_group: WeakKeyDictionary[ProcessGroup, PeerExchange] = WeakKeyDictionary()
"""One for each group, whose ranks count its messages alike; it goes with the group."""
_Messages: TypeAlias = Generator[list[dist.Work], None, None]
"""What one piece sends and receives, round by round: it goes on when these have arrived."""


class PeerExchange:
    """Point to point, by a thread of its own while something is under way. It does not keep the group alive.

    Args:
        group: of gloo.
        hosts: of its ranks; between several hosts with several ranks each slices travel in two rounds.
    """

    def __init__(self, group: ProcessGroup, hosts: list[str]) -> None:
        self._peers = _Peers(group, rounds_of(dist.get_rank(group), hosts))
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._worker = _Worker(self._jobs, self._peers)
        self._end_thread: Callable[[], object] | None = None
        """Set while there is a thread."""

    def reduce_scatter(self, flat: torch.Tensor) -> Pending:
        """See :class:`Exchange`."""
        return self._submit(flat, sums=True)

    def gather(self, flat: torch.Tensor) -> Pending:
        """See :class:`Exchange`."""
        return self._submit(flat, sums=False)

    def gather_now(self, flat: torch.Tensor) -> None:
        """See :class:`Exchange`."""
        if self._end_thread is None:
            job = _Job(flat.detach(), sums=False, peers=self._peers)
            self._worker.do(job)
            job.wait()
        else:
            self.gather(flat).wait()

    def rest(self) -> None:
        """See :class:`Exchange`."""
        if self._end_thread is not None:
            self._end_thread()
            self._end_thread = None

    def _submit(self, flat: torch.Tensor, *, sums: bool) -> Pending:
        job = _Job(flat.detach(), sums, self._peers)
        if self._end_thread is None:
            thread = threading.Thread(target=self._worker.run, name="ds_topo exchange of slices", daemon=True)
            thread.start()
            threads_of_gloo.begin()
            self._end_thread = weakref.finalize(self, _end, thread, partial(self._jobs.put, None))
        self._jobs.put(job)
        return job


class _Job:
    """One tensor to exchange."""

    def __init__(self, flat: torch.Tensor, sums: bool, peers: _Peers) -> None:
        self.flat, self.sums, self.peers = flat, sums, peers
        self.pieces_left = 0
        self.done: Future[int] = Future()

    def is_done(self) -> bool:
        """See :class:`Pending`."""
        return self.done.done()

    def wait(self) -> int:
        """See :class:`Pending`."""
        return self.done.result()


class _Peers:
    """Sends and receives pieces of slices."""

    def __init__(self, group: ProcessGroup, rounds: list[list[Peer]]) -> None:
        self._group, self._rounds, self._size = weakref.ref(group), rounds, dist.get_world_size(group)
        self._spare: list[torch.Tensor] = []
        """Memory to receive in, while it is not in use; bytes."""
        under_way = _PIECES_UNDER_WAY * max(1, self._size - 1)
        self._message_bytes = min(_MESSAGE_BYTES, _RECEIVED_BYTES // under_way)
        self._pieces = 0
        """So many have been exchanged: all ranks count alike, and so agree on tags."""

    def pieces(self, job: _Job) -> Generator[_Messages, None, None]:
        """The pieces of a tensor, in order."""
        slices = job.flat.view(self._size, -1)
        numel = max(1, self._message_bytes // slices.itemsize)
        for start in range(0, slices.shape[1], numel):
            piece = slices[:, start : start + numel]
            self._pieces += 1
            yield self._sum(piece, self._pieces) if job.sums else self._gather(piece, self._pieces)

    def _sum(self, piece: torch.Tensor, number: int) -> _Messages:
        for peers in self._rounds:
            received = [(index, self._borrow(piece[index]), peer.rank) for peer in peers for index in peer.mine]
            works = [
                self._receive(_like(piece[index], buffer), rank, number, index) for index, buffer, rank in received
            ]
            works += [self._send(piece[index], peer.rank, number, index) for peer in peers for index in peer.theirs]
            yield works
            for index, buffer, _ in sorted(received, key=lambda entry: entry[2]):
                piece[index].add_(_like(piece[index], buffer))
                self._spare.append(buffer)

    def _gather(self, piece: torch.Tensor, number: int) -> _Messages:
        for peers in reversed(self._rounds):
            works = [self._receive(piece[index], peer.rank, number, index) for peer in peers for index in peer.theirs]
            works += [self._send(piece[index], peer.rank, number, index) for peer in peers for index in peer.mine]
            yield works

    def _borrow(self, like: torch.Tensor) -> torch.Tensor:
        """Memory to receive in; it comes back, so that only what is under way at a time needs some."""
        spare = self._spare.pop() if self._spare else None
        if spare is None or len(spare) < like.nbytes:
            return torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
        return spare

    def _send(self, tensor: torch.Tensor, rank: int, number: int, index: int) -> dist.Work:
        return _existing(dist.isend(tensor, group=self.living_group, group_dst=rank, tag=self._tag(number, index)))

    def _receive(self, tensor: torch.Tensor, rank: int, number: int, index: int) -> dist.Work:
        return _existing(dist.irecv(tensor, group=self.living_group, group_src=rank, tag=self._tag(number, index)))

    @property
    def living_group(self) -> ProcessGroup:
        """Of these ranks."""
        group = self._group()
        if group is None:  # torch would take that for the whole world
            raise RuntimeError(
                "the process group was destroyed while parameters or gradients were on their way over it: call wait() "
                "of the GradientReducer, or destroy the engine, before the grid or the process group"
            )
        return group

    def _tag(self, number: int, index: int) -> int:
        return _FIRST_TAG + (number * self._size + index) % _TAGS


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The front of some memory as a tensor of this type and shape."""
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _Worker:
    """What the thread does; it does not keep the exchange alive.

    A few pieces are under way at a time. They take turns, so that while one crosses hosts another one travels inside
    them; each of their rounds is posted in the pieces' order on every rank, so nobody waits in a circle.
    """

    def __init__(self, jobs: queue.SimpleQueue[_Job | None], peers: _Peers) -> None:
        self._jobs, self._peers = jobs, peers
        self._under_way: deque[_Piece] = deque()
        self._failure: BaseException | None = None
        """The first error: ranks may have it at different pieces, so every later job fails with it, too."""

    def run(self) -> None:
        """Until there is no other job."""
        while True:
            job = self._jobs.get() if not self._under_way else self._next_job()
            if job is None:
                self._finish()
                return
            self._begin(job)
            del job  # which would keep its tensor until there is another one

    def do(self, job: _Job) -> None:
        """One job, in the calling thread."""
        self._begin(job)
        self._finish()

    def _begin(self, job: _Job) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            self._post(job)
        except BaseException as error:  # handed to whoever waits for a tensor
            self._fail(error, job)

    def _finish(self) -> None:
        while self._under_way:
            self._advance_or_fail()

    def _next_job(self) -> _Job | None:
        """Work until a job comes, or nothing is under way."""
        while self._under_way and self._jobs.empty():
            self._advance_or_fail()
        return self._jobs.get()

    def _advance_or_fail(self) -> None:
        try:
            self._advance()
        except BaseException as error:  # handed to whoever waits for a tensor
            self._fail(error)

    def _post(self, job: _Job) -> None:
        pieces = list(self._peers.pieces(job))
        if not pieces:
            job.done.set_result(time.perf_counter_ns())
        job.pieces_left = len(pieces)
        for messages in pieces:
            while len(self._under_way) >= _PIECES_UNDER_WAY:
                self._advance()
            self._under_way.append(_Piece(job, messages, next(messages)))

    def _advance(self) -> None:
        piece = self._under_way.popleft()
        try:
            for work in piece.works:
                work.wait()
            works = next(piece.messages, None)
        except BaseException:
            self._under_way.append(piece)
            raise
        if works is not None:
            self._under_way.append(_Piece(piece.job, piece.messages, works))
            return
        piece.job.pieces_left -= 1
        if not piece.job.pieces_left:
            piece.job.done.set_result(time.perf_counter_ns())

    def _fail(self, error: BaseException, *jobs: _Job) -> None:
        self._failure = error
        waiting = dict.fromkeys([*(piece.job for piece in self._under_way), *jobs])
        self._under_way.clear()
        for job in waiting:
            job.done.set_exception(error)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A piece under way: what it waits for, and how it goes on."""

    job: _Job
    messages: _Messages
    works: list[dist.Work]


def end_thread(thread: threading.Thread, tell: Callable[[], None]) -> None:
    """Tell a thread to end, and wait for that: the interpreter must not go while it is inside torch."""
    tell()
    if thread is not threading.current_thread():
        thread.join(_SECONDS_TO_END)


def _end(thread: threading.Thread, tell: Callable[[], None]) -> None:
    end_thread(thread, tell)
    threads_of_gloo.end()


def hosts_in_order(group: ProcessGroup) -> list[str]:
    """The host of every rank of a group, in the order of its ranks; collective."""
    hosts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return hosts


def _existing(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
