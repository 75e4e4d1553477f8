"""Execute calls in order, late, in a thread of their communicator, and check what NCCL requires of them."""

from __future__ import annotations

import ctypes
import itertools
import pickle
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from socket import socket
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.nccl_tensors import check, overlap, poison, read, write
from tests.support.rank_mesh import Mesh

STACK_DEPTH = 30
_LIBC = ctypes.CDLL(None)  # ctypes releases the interpreter's lock while a function of this library runs
_FILES = ("/strict_calls.py", "/strict_backend.py")
"""Files whose frames say nothing about a call."""

Stack: TypeAlias = list[tuple[str, int, str]]


class StrictError(dist.DistBackendError):
    """Raised for a program that would hang, fail or compute garbage on NCCL."""


class _Settings:
    """The behaviour of works; see :func:`spinning_waits`."""

    delay = 0.005
    """Seconds that a call may wait in its queue until someone waits for it."""
    spins = False


@contextmanager
def spinning_waits() -> Iterator[None]:
    """Let waits for calls of this block spin in C, as a wait for a GPU does.

    The processor is in use, other threads can run, and no Python line or signal handler of this thread is reached until
    the call has completed.
    """
    _Settings.spins = True
    try:
        yield
    finally:
        _Settings.spins = False


# -- calls and what they say about themselves --------------------------------------------------------------------------


def stack_here() -> Stack:
    """Return the caller's frames outside this file, the innermost one first. Cheap: no line of source is read."""
    frames: Stack = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < STACK_DEPTH:
        if not frame.f_code.co_filename.endswith(_FILES):
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def _shown(stack: Stack) -> str:
    return "".join(traceback.format_list([traceback.FrameSummary(*frame) for frame in reversed(stack)])).rstrip()


@dataclass
class _Frame:
    """The values that a rank sends to another one in a call."""

    number: int
    """The number of the call in its communicator; of a send or receive, in its pair."""
    kind: str
    terms: Any
    """What must be equal on all ranks."""
    gives: Any
    """What the sender of this frame gives to its reader; the reader must take the same."""
    takes: Any
    stack: Stack
    chunks: list[bytes] = field(default_factory=list)
    fault: str | None = None

    def text(self) -> str:
        given = "" if self.gives is None else f", gives {self.gives} and takes {self.takes}"
        return f"call {self.number}, {self.kind}{self.terms}{given}, from\n{_shown(self.stack)}"


@dataclass
class Plan:
    """The data of a call: what goes to each rank, and what to make of the parts that come back."""

    kind: str
    terms: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    part: Callable[[list[bytes], int], list[bytes]]
    """Maps the bytes of the inputs and a rank to what that rank gets."""
    merge: Callable[[dict[int, list[bytes]]], list[bytes]]
    """Maps the parts of all ranks, including this one, to the bytes of the outputs."""
    is_reduced: bool = False
    gives: Callable[[int], Any] = lambda peer: None
    takes: Callable[[int], Any] = lambda peer: None
    numbers: dict[int, int] | None = None
    """The number of this call in each pair of ranks; None for a collective."""


class _Future(torch.futures.Future):  # type: ignore[type-arg]
    """The future of a work. As on NCCL it is done at once, and callbacks run at once, in the thread that adds them.

    A callback finds the result by ``value()`` or ``wait()`` of the future that it gets.
    """

    def __init__(self, work: StrictWork) -> None:
        super().__init__()
        self._work = work

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()

    def value(self) -> Any:
        return self.wait()

    def then(self, callback: Any) -> torch.futures.Future[Any]:
        answer: torch.futures.Future[Any] = torch.futures.Future()
        try:
            answer.set_result(callback(self))
        except Exception as error:
            answer.set_exception(error)
        return answer

    def add_done_callback(self, callback: Any) -> None:
        callback(self)


class StrictWork(dist.Work):
    """A call in flight. Its result appears in the outputs when someone waits, or is told that it has completed."""

    def __init__(self, communicator: Communicator, stack: Stack) -> None:
        super().__init__()
        self.communicator, self.stack = communicator, stack
        self.plan: Plan | None = None
        self.lane: Lane | None = None
        self.order = 0
        self.number = 0
        self.contents: list[bytes] = []
        """The inputs at the launch."""
        self._images: list[tuple[Tensor, bytes]] = []
        """Each tensor with the bytes that it must keep while the call is in flight."""
        self._results: list[bytes] = []
        self.error: str | None = None
        self._done, self._lock = threading.Event(), threading.RLock()
        self._is_delivered = self._delivers_when_done = False
        self._outputs: list[Tensor] = []
        self._future: _Future | None = None
        self._spin = ctypes.c_int(0) if _Settings.spins else None
        if self._spin is not None:
            _LIBC.pthread_spin_init(ctypes.byref(self._spin), 0)
            _LIBC.pthread_spin_lock(ctypes.byref(self._spin))

    # called by the communicator

    def launch(self, plan: Plan) -> None:
        """Take the inputs, and poison the outputs."""
        self.plan, self._outputs = plan, plan.outputs
        self.contents = [read(tensor) for tensor in plan.inputs]
        for tensor in plan.outputs:
            poison(tensor)
        self._images = [(tensor, read(tensor)) for tensor in (*plan.inputs, *plan.outputs)]

    def in_flight(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs and outputs that are in flight."""
        plan = self.plan
        return ([], []) if plan is None or self._is_delivered or self.error else (plan.inputs, plan.outputs)

    def touched(self) -> str | None:
        """Describe a write to a tensor in flight; None if there was none."""
        for tensor, image in self._images:
            if len(image) != tensor.nbytes or read(tensor) != image:
                return (
                    f"a tensor {tuple(tensor.shape)} of {self.text()}\non rank {self.communicator.rank} was written "
                    "while the call was in flight. NCCL may read it later, or overwrite it: wait for the call first"
                )
        return None

    def text(self) -> str:
        """Describe the call, with its stack."""
        assert self.plan is not None
        return f"{self.plan.kind}{self.plan.terms}, called from\n{_shown(self.stack)}"

    def finish(self, results: list[bytes], error: str | None) -> None:
        """Note the outcome; the worker calls this once."""
        with self._lock:
            self._results, self.error = results, error
            if self._delivers_when_done and error is None:
                self._deliver()
            self._done.set()
            future = self._future
        if future is not None:
            self._set(future)  # after the lock, because callbacks in C++ may do anything
        if self._spin is not None:
            _LIBC.pthread_spin_unlock(ctypes.byref(self._spin))

    def deliver_when_done(self) -> None:
        """Let the worker deliver the result, before the future in C++ is done."""
        with self._lock:
            self._delivers_when_done = True
            if self._done.is_set() and self.error is None:
                self._deliver()
        self._hurry()

    def _hurry(self) -> None:
        if self.lane is not None:
            self.lane.hurry(self.order)

    def _set(self, future: _Future) -> None:
        if self.error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(StrictError(self.error))

    def _deliver(self) -> None:
        with self._lock:
            if self._is_delivered:
                return
            self.error = self.touched()
            if self.error is not None:
                self.communicator.fail(self.error)
                return
            for tensor, data in zip(self._outputs, self._results, strict=True):
                write(tensor, data)
            self._is_delivered = True
            self._images, self._results, self.contents = [], [], []
            if self.plan is not None:
                self.plan.inputs, self.plan.outputs = [], []

    # called by torch and programs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the call, and let its result appear."""
        if self.lane is None:
            raise StrictError("this call belongs to a batch that was not launched: end the batch first")
        self._hurry()
        if self._spin is not None:
            _LIBC.pthread_spin_lock(ctypes.byref(self._spin))
            _LIBC.pthread_spin_unlock(ctypes.byref(self._spin))
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done.wait(seconds if seconds > 0.0 else None):
            raise StrictError(f"Timed out after {seconds:g} s in wait() for {self.text()}")
        if self.error is None:
            self._deliver()
        if self.error is not None:
            raise StrictError(self.error)
        return True

    def synchronize(self) -> None:
        """Wait, as on NCCL."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether the call has completed. If so, its result appears."""
        self._hurry()
        if not self._done.is_set():
            return False
        if self.error is None:
            self._deliver()
        return True

    def is_success(self) -> bool:
        """Tell whether the call has completed without an error."""
        return self._done.is_set() and self.error is None

    def exception(self) -> StrictError | None:
        """Return the error of the call."""
        return None if self.error is None else StrictError(self.error)

    def result(self) -> list[Tensor]:
        """Return the outputs, in which the result may not have appeared yet."""
        return self._outputs

    def source_rank(self) -> int:
        """Refuse, as NCCL, which does not receive from any rank."""
        raise StrictError("NCCL does not receive from any source")

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose ``wait()`` and ``value()`` find the result.

        C++ callers, such as DDP, use none of the methods in Python. For them the result appears when the call has
        completed.
        """
        with self._lock:
            is_late = self._future is None and self._done.is_set()
            self._future = future = self._future or _Future(self)
        if is_late:
            self._set(future)
        if "get_future" not in sys._getframe(1).f_code.co_names:  # the caller is a function in C++
            self.deliver_when_done()
        return future


class SeveralWorks(dist.Work):
    """The works of a block of ``_coalescing_manager``."""

    def __init__(self, works: list[StrictWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Tell whether all have completed."""
        return all(work.is_completed() for work in self._works)


# -- communicators -----------------------------------------------------------------------------------------------------


class Lane:
    """A queue of calls that one thread executes in order: as a stream of a GPU."""

    def __init__(self, communicator: Communicator, mesh: Mesh, name: str) -> None:
        self._communicator, self._mesh = communicator, mesh
        self._queue: deque[StrictWork | None] = deque()
        self._changed = threading.Condition()
        self._orders = itertools.count(1)
        self._wanted = 0
        """The order of the last call for which someone waits."""
        self._has_told = False
        self._thread = threading.Thread(target=self._serve, name=f"strict {name}", daemon=True)
        self.failed: StrictWork | None = None

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread.ident is None:
            self._thread.start()

    def put(self, work: StrictWork | None) -> None:
        """Append a call; None tells the other ranks of a fault."""
        with self._changed:
            if work is not None:
                work.lane, work.order = self, next(self._orders)
            self._queue.append(work)
            self.start()
            self._changed.notify_all()

    def hurry(self, order: int) -> None:
        """Execute the calls up to this one without a delay."""
        with self._changed:
            self._wanted = max(self._wanted, order)
            self._changed.notify_all()

    def end(self, seconds: float) -> None:
        """Execute what is in the queue for at most so long, and end the thread."""
        if self._thread.ident is not None:
            self.hurry(sys.maxsize)
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._mesh.interrupt()
                self._thread.join()
        self._mesh.close()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._wanted == sys.maxsize)
                if not self._queue:
                    return
                work = self._queue.popleft()
                if work is not None:
                    order = work.order
                    self._changed.wait_for(lambda: self._wanted >= order, _Settings.delay)  # noqa: B023
            if work is not None:
                self._execute(work)
            if self._communicator.fault is not None and not self._has_told:
                self._has_told = True
                frame = _Frame(0, "", None, None, None, [], fault=self._communicator.fault)
                self._mesh.tell(pickle.dumps(frame))
            del work  # else the tensors of the last call would live until the next one

    def _execute(self, work: StrictWork) -> None:
        results: list[bytes] = []
        error = self._communicator.fault
        if error is None:
            try:
                results = self._results(work)
            except StrictError as raised:
                error = str(raised)
                self.failed = work
                self._communicator.fail(error)
            except BaseException:  # a defect of this file must not leave a rank that waits
                error = f"the stand-in failed:\n{traceback.format_exc()}"
                self._communicator.fail(error)
        work.finish(results, error)

    def _results(self, work: StrictWork) -> list[bytes]:
        plan, own, seconds = work.plan, self._communicator.rank, work.communicator.seconds
        assert plan is not None
        peers = self._mesh.peers() if plan.numbers is None else sorted(plan.numbers)
        fault = work.touched()
        frames = {
            peer: _Frame(
                work.number if plan.numbers is None else plan.numbers[peer],
                *(plan.kind, plan.terms, plan.gives(peer), plan.takes(peer), work.stack),
                plan.part(work.contents, peer),
                fault,
            )
            for peer in peers
        }
        try:
            raw = self._mesh.exchange({peer: pickle.dumps(frame) for peer, frame in frames.items()}, seconds)
        except TimeoutError as late:
            raise StrictError(
                f"Timed out: rank(s) {late.args[0]} of {self._communicator} did not come within {seconds:g} s to "
                f"{work.text()}"
            ) from None
        except ConnectionError as closed:
            raise StrictError(
                f"Connection closed: rank {closed.args[0][0]} of {self._communicator} ended, or destroyed the group, "
                f"while rank {own} was in {work.text()}"
            ) from None
        found: dict[int, _Frame] = {peer: pickle.loads(data) for peer, data in raw.items()}
        for text in (fault, *(frame.fault for frame in found.values())):
            if text is not None:
                raise StrictError(text)
        self._compare(frames, found)
        parts = {peer: frame.chunks for peer, frame in found.items()}
        return plan.merge({**parts, own: plan.part(work.contents, own)})

    def _compare(self, sent: dict[int, _Frame], found: dict[int, _Frame]) -> None:
        """Raise if the calls of the ranks do not belong together."""
        own = self._communicator.rank

        def differs(peer: int) -> bool:
            mine, theirs = sent[peer], found[peer]
            same = (mine.number, mine.kind, mine.terms) == (theirs.number, theirs.kind, theirs.terms)
            return not same or (mine.gives, mine.takes) != (theirs.takes, theirs.gives)

        if differing := [peer for peer in found if differs(peer)]:
            shown = {**found, own: sent[differing[0]]}
            calls = [f"rank {rank}: {frame.text()}" for rank, frame in sorted(shown.items())]
            raise StrictError(
                "\n".join(
                    [f"The ranks of {self._communicator} call different operations, and would hang on NCCL:", *calls]
                )
            )


class Communicator:
    """The state of a group that its works and threads share."""

    def __init__(
        self, name: str, rank: int, size: int, timeout: timedelta, connections: list[dict[int, socket]]
    ) -> None:
        self.name, self.rank, self.size, self.seconds = name, rank, size, timeout.total_seconds()
        self.fault: str | None = None
        self.is_destroyed = False
        self.number = 0
        """The number of collectives that were called."""
        self.main = Lane(self, Mesh(connections[0]), f"group {name}")
        """Collectives and batches."""
        self.main.start()  # not at the first call: tests count the threads of a job that has groups
        self.direct = {
            peer: Lane(self, Mesh({peer: connection}), f"group {name} to {peer}")
            for peer, connection in connections[1].items()
        }
        """Sends and receives outside batches; NCCL makes a communicator for each pair of ranks."""
        self.pairs = dict.fromkeys(range(size), 0)
        """The number of calls with each rank."""
        self._owner: tuple[threading.Thread, Stack] | None = None

    def __str__(self) -> str:
        return f"group {self.name!r}"

    def fail(self, fault: str) -> None:
        """Let all later calls raise, and tell the other ranks."""
        if self.fault is None:
            self.fault = fault
            for lane in () if self.is_destroyed else (self.main, *self.direct.values()):
                lane.put(None)

    def enter(self, kind: str, stack: Stack) -> None:
        """Refuse a call of a destroyed or failed communicator, or from a second thread."""
        if self.is_destroyed:
            raise StrictError(f"{kind} on {self}, which was destroyed. Called from\n{_shown(stack)}")
        if self.fault is not None:
            raise StrictError(f"{kind} on {self}, which has failed:\n{self.fault}")
        thread = threading.current_thread()
        if isinstance(thread, threading._DummyThread):  # of autograd
            thread = threading.main_thread()
        if self._owner is not None and self._owner[0] is not thread and self._owner[0].is_alive():
            first, stack_before = self._owner
            self.fail(
                f"rank {self.rank} calls {self} from two threads, so that the order of its calls can differ from that "
                f"of other ranks. Thread {first.name} called from\n{_shown(stack_before)}\nthread {thread.name} calls "
                f"{kind} from\n{_shown(stack)}"
            )
            raise StrictError(self.fault)
        self._owner = thread, stack

    def launch(self, work: StrictWork, plan: Plan, lane: Lane) -> StrictWork:
        """Queue a call whose tensors are not in flight."""
        for tensor in (*plan.inputs, *plan.outputs):
            check(tensor, plan.is_reduced)
        self._check_overlaps(plan, work.stack)
        if plan.numbers is None:
            self.number += 1
            work.number = self.number
        work.launch(plan)
        with _lock:
            _in_flight.add(work)
        lane.put(work)
        return work

    def _check_overlaps(self, plan: Plan, stack: Stack) -> None:
        with _lock:
            others = list(_in_flight)
        for other in others:
            inputs, outputs = other.in_flight()
            clashes = [(tensor, busy) for tensor in (*plan.inputs, *plan.outputs) for busy in outputs]
            clashes += [(tensor, busy) for tensor in plan.outputs for busy in inputs]
            if any(overlap(*clash) for clash in clashes):
                self.fail(
                    f"rank {self.rank} passes memory to {plan.kind} of {self} that {other.communicator} has in flight: "
                    f"{other.text()}\nwas not waited for. The second call is from\n{_shown(stack)}"
                )
                raise StrictError(self.fault)

    def destroy(self, seconds: float) -> None:
        """Execute what was called, and end the threads.

        Raises:
            StrictError: a call found no partner on another rank, and nobody waited for it.
        """
        if self.is_destroyed:
            return
        self.is_destroyed = True
        had_failed = self.fault is not None
        lanes = (self.main, *self.direct.values())
        for lane in lanes:
            lane.end(min(1.0, seconds) if had_failed else seconds)  # a second, to tell the others of the fault
        failed = [lane.failed for lane in lanes if lane.failed is not None]
        if failed and not had_failed and seconds > 0.0:
            raise StrictError(f"{self} was destroyed before a call had completed:\n{failed[0].error}")


_lock = threading.Lock()
_in_flight: weakref.WeakSet[StrictWork] = weakref.WeakSet()
