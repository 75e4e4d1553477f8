"""A stand-in for NCCL on CPUs. It enforces NCCL's rules, which gloo does not, so that tests see what a GPU would do.

``register()`` makes it known to torch as the backend ``strict``. The tensors travel over Unix sockets (``rank_mesh``).

- All ranks call the collectives of a communicator in one order, from one thread. Otherwise all ranks raise, and the
  error shows the calls and stacks of all ranks. Later calls of that communicator raise, too.
- A result appears when the caller waits for it. Until then outputs hold NaN, or 0xA5 in every byte of an integer.
- Inputs are read late. A write to an input or output before ``wait()`` raises.
- Sends and receives of a pair of ranks match in order; those of one batch match as a set.
- Tags, sparse and non-contiguous tensors, and types that NCCL lacks are refused.

It is stricter than NCCL in one point: a collective may not use the output of an earlier one that was not waited for,
although NCCL would run the two of one communicator in order.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, ReduceOp

from tests.support.rank_mesh import Mesh, connect

NAME = "strict"
REDUCIBLE = {
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""NCCL has no 16-bit integers."""
TYPES = REDUCIBLE | {torch.float8_e4m3fn, torch.float8_e5m2}
STACK_DEPTH = 30
_LIBC = ctypes.CDLL(None)  # ctypes releases the interpreter's lock while a function of this library runs

Stack: TypeAlias = list[tuple[str, int, str]]


class StrictError(dist.DistBackendError):
    """Raised for a program that would hang, fail or compute garbage on NCCL."""


class _Settings:
    """How works behave; see :func:`spinning_waits`."""

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


def register() -> None:
    """Make the backend known to torch. Idempotent."""
    if NAME not in Backend.backend_list:
        Backend.register_backend(NAME, StrictProcessGroup, extended_api=True, devices=["cpu"])


# -- tensors as bytes --------------------------------------------------------------------------------------------------


def _read(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def _write(tensor: Tensor, data: bytes) -> None:
    """Write to memory past torch, which neither counts a version nor records an operation, as NCCL."""
    assert len(data) == tensor.nbytes, (len(data), tensor.shape, tensor.dtype)
    ctypes.memmove(tensor.data_ptr(), data, len(data))


def _poison(tensor: Tensor) -> None:
    if tensor.nbytes:
        ctypes.memset(tensor.data_ptr(), 0xFF if tensor.dtype.is_floating_point else 0xA5, tensor.nbytes)


def _overlap(one: Tensor, other: Tensor) -> bool:
    start, begin = one.data_ptr(), other.data_ptr()
    return start < begin + other.nbytes and begin < start + one.nbytes


def _check(tensor: Tensor, is_reduced: bool) -> None:
    """Raise as ProcessGroupNCCL does for tensors that it cannot send."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"NCCL sends dense tensors only, and this one is {tensor.layout}: send its parts")
    if tensor.dtype not in (REDUCIBLE if is_reduced else TYPES):
        raise TypeError(f"NCCL does not support {tensor.dtype}: convert the tensor, or view it as another type")
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if not tensor.is_contiguous() and not tensor.is_contiguous(
        memory_format=formats.get(tensor.dim(), torch.contiguous_format)
    ):
        raise ValueError(f"NCCL needs contiguous tensors, and this one has strides {tensor.stride()}: copy it")


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


class _Reduction:
    """A ``ReduceOp`` for tensors of one type, with NCCL's arithmetic: it scales inputs and then adds them."""

    def __init__(self, op: Any, dtype: torch.dtype, size: int) -> None:
        self.kind, factor = ReduceOp(op).__getstate__() if not isinstance(op, ReduceOp) else op.__getstate__()
        self.name, self._dtype, self._size = str(self.kind).rpartition(".")[2], dtype, size
        if self.name not in ("SUM", "AVG", "PREMUL_SUM", "MIN", "MAX", "PRODUCT"):
            raise ValueError(f"Cannot use ReduceOp.{self.name} with NCCL")
        if dtype is torch.bool and self.name == "AVG":
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        if self.name == "PREMUL_SUM" and not dtype.is_floating_point:
            raise TypeError("PreMulSum Data type must be half, float, bfloat16 or double")
        is_average = self.name == "AVG" and dtype.is_floating_point
        self._factor = 1.0 / size if is_average else None if factor is None else float(factor)

    def scaled(self, data: bytes) -> bytes:
        """Scale what this rank contributes."""
        if self._factor is None or not data:
            return data
        return _read(torch.frombuffer(bytearray(data), dtype=self._dtype).mul_(self._factor))

    def merged(self, parts: Sequence[bytes]) -> bytes:
        """Reduce the contributions of all ranks in the order of ranks; half precision accumulates in 32 bits."""
        if not parts[0]:
            return b""
        dtype = torch.uint8 if self._dtype is torch.bool else self._dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        total, *others = (torch.frombuffer(bytearray(part), dtype=dtype).to(wide) for part in parts)
        for other in others:
            if self.name == "MIN" or (self.name == "PRODUCT" and self._dtype is torch.bool):
                total = torch.minimum(total, other)
            elif self.name == "MAX" or self._dtype is torch.bool:
                total = torch.maximum(total, other)
            elif self.name == "PRODUCT":
                total.mul_(other)
            else:
                total.add_(other)
        if self.name == "AVG" and not dtype.is_floating_point:
            total = torch.div(total, self._size, rounding_mode="trunc").to(dtype)
        return _read(total.to(dtype))


# -- calls and what they say about themselves --------------------------------------------------------------------------


def _stack() -> Stack:
    """Return the caller's frames outside this file, the innermost one first. Cheap: no line of source is read."""
    frames: Stack = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < STACK_DEPTH:
        if frame.f_code.co_filename != __file__:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def _shown(stack: Stack) -> str:
    return "".join(traceback.format_list([traceback.FrameSummary(*frame) for frame in reversed(stack)])).rstrip()


@dataclass
class _Frame:
    """What a rank sends to another one in a call."""

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
class _Plan:
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

    def __init__(self, communicator: _Communicator, stack: Stack) -> None:
        super().__init__()
        self.communicator, self.stack = communicator, stack
        self.plan: _Plan | None = None
        self.lane: _Lane | None = None
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

    def launch(self, plan: _Plan) -> None:
        """Take the inputs, and poison the outputs."""
        self.plan, self._outputs = plan, plan.outputs
        self.contents = [_read(tensor) for tensor in plan.inputs]
        for tensor in plan.outputs:
            _poison(tensor)
        self._images = [(tensor, _read(tensor)) for tensor in (*plan.inputs, *plan.outputs)]

    def in_flight(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs and outputs that are in flight."""
        plan = self.plan
        return ([], []) if plan is None or self._is_delivered else (plan.inputs, plan.outputs)

    def touched(self) -> str | None:
        """Describe a write to a tensor in flight; None if there was none."""
        for tensor, image in self._images:
            if len(image) != tensor.nbytes or _read(tensor) != image:
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
                _write(tensor, data)
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

        C++ callers, such as DDP, use none of the methods in Python. For them the result appears when the call has completed.
        """
        with self._lock:
            is_late = self._future is None and self._done.is_set()
            self._future = future = self._future or _Future(self)
        if is_late:
            self._set(future)
        if "get_future" not in sys._getframe(1).f_code.co_names:  # the caller is a function in C++
            self.deliver_when_done()
        return future


class _Several(dist.Work):
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


class _Lane:
    """A queue of calls that one thread executes in order: as a stream of a GPU."""

    def __init__(self, communicator: _Communicator, mesh: Mesh, name: str) -> None:
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


class _Communicator:
    """The state of a group that its works and threads share."""

    def __init__(self, name: str, rank: int, size: int, timeout: timedelta, connections: list[dict[int, Any]]) -> None:
        self.name, self.rank, self.size, self.seconds = name, rank, size, timeout.total_seconds()
        self.fault: str | None = None
        self.is_destroyed = False
        self.number = 0
        """The number of collectives that were called."""
        self.main = _Lane(self, Mesh(connections[0]), f"group {name}")
        """Collectives and batches."""
        self.main.start()  # not at the first call: tests count the threads of a job that has groups
        self.direct = {
            peer: _Lane(self, Mesh({peer: connection}), f"group {name} to {peer}")
            for peer, connection in connections[1].items()
        }
        """Sends and receives outside batches; NCCL makes a communicator for each pair of ranks."""
        self.pairs = dict.fromkeys(range(size), 0)
        """The number of calls with each rank."""
        self.works: weakref.WeakSet[StrictWork] = weakref.WeakSet()
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

    def launch(self, work: StrictWork, plan: _Plan, lane: _Lane) -> StrictWork:
        """Queue a call whose tensors are not in flight."""
        for tensor in (*plan.inputs, *plan.outputs):
            _check(tensor, plan.is_reduced)
        self._check_overlaps(plan, work.stack)
        if plan.numbers is None:
            self.number += 1
            work.number = self.number
        work.launch(plan)
        self.works.add(work)
        _in_flight.add(work)
        lane.put(work)
        return work

    def _check_overlaps(self, plan: _Plan, stack: Stack) -> None:
        for other in list(_in_flight):
            inputs, outputs = other.in_flight()
            clashes = [(tensor, busy) for tensor in (*plan.inputs, *plan.outputs) for busy in outputs]
            clashes += [(tensor, busy) for tensor in plan.outputs for busy in inputs]
            if any(_overlap(*clash) for clash in clashes):
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
            lane.end(0.0 if had_failed else seconds)
        failed = [lane.failed for lane in lanes if lane.failed is not None]
        if failed and not had_failed and seconds > 0.0:
            raise StrictError(f"{self} was destroyed before a call had completed:\n{failed[0].error}")


_in_flight: weakref.WeakSet[StrictWork] = weakref.WeakSet()


@dataclass
class _Batch:
    """Sends and receives that are matched as a set."""

    work: StrictWork
    key: object
    """The frame of ``batch_isend_irecv``; None between ``_start_coalescing`` and ``_end_coalescing``."""
    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor]] = field(default_factory=list)

    def plan(self, kind: str, numbers: dict[int, int]) -> _Plan:
        def shown(tensors: list[tuple[int, Tensor]], peer: int) -> list[tuple[int, str]]:
            return [(tensor.numel(), str(tensor.dtype)) for rank, tensor in tensors if rank == peer]

        sends, receives = self.sends, self.receives
        takers = [rank for rank, _ in sends]
        givers = [rank for rank, _ in receives]

        def merge(parts: dict[int, list[bytes]]) -> list[bytes]:
            left = {rank: iter(chunks) for rank, chunks in parts.items()}
            return [next(left[rank]) for rank in givers]

        return _Plan(
            *(kind, "", [tensor for _, tensor in sends], [tensor for _, tensor in receives]),
            part=lambda contents, peer: [data for data, rank in zip(contents, takers, strict=True) if rank == peer],
            merge=merge,
            gives={peer: shown(sends, peer) for peer in numbers}.__getitem__,
            takes={peer: shown(receives, peer) for peer in numbers}.__getitem__,
            numbers=numbers,
        )


# -- what torch calls --------------------------------------------------------------------------------------------------


class StrictProcessGroup(dist.ProcessGroup):
    """A process group of the backend ``strict``.

    torch's C++ code (DDP, functional collectives) finds the methods by their names; the second names at the end of the
    class are those of older releases.
    """

    def __init__(self, creation: Any, _: Any = None) -> None:
        rank, size, timeout = creation.group_rank, creation.group_size, creation.timeout
        super().__init__(rank, size)  # the constructor with a store is not for subclasses
        self._store, self._name, self._description = creation.store, str(creation.group_id), "undefined"
        connections = connect(creation.store, rank, size, timeout, 2)
        self._communicator = _Communicator(str(creation.group_id), rank, size, timeout, connections)
        ranks = list(creation.global_ranks_in_group)
        self._options = SimpleNamespace(_timeout=timeout, backend=NAME, global_ranks_in_group=ranks)
        self._batch: _Batch | None = None
        self._coalesced: list[StrictWork] | None = None

    def __del__(self) -> None:
        if hasattr(self, "_communicator"):
            self._communicator.destroy(0.0)

    # what a group says about itself; torch would ask a C++ backend for its name and description

    def getGroupName(self) -> str:
        """Return the name that torch has given."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the description."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the description."""
        self._description = description

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> StrictProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self

    @property
    def options(self) -> SimpleNamespace:
        """Return the options, as those of a backend."""
        return self._options

    def get_group_store(self) -> dist.Store:
        """Return the store with which the group was created."""
        return self._store

    supports_coalescing = True
    supports_splitting = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls."""
        self._options._timeout, self._communicator.seconds = timeout, timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """No-op: all ranks count from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return self._communicator.number

    def shutdown(self) -> None:
        """Execute what was called, and end the threads."""
        self._communicator.destroy(self._communicator.seconds)

    def abort(self) -> None:
        """End the threads at once; calls in flight fail."""
        self._communicator.destroy(0.0)

    # collectives

    def _launch(self, plan: _Plan) -> StrictWork:
        communicator, stack = self._communicator, _stack()
        communicator.enter(plan.kind, stack)
        work = communicator.launch(StrictWork(communicator, stack), plan, communicator.main)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _reductions(self, op: Any, tensors: Sequence[Tensor]) -> list[_Reduction]:
        return [_Reduction(op, tensor.dtype, self._communicator.size) for tensor in tensors]

    def broadcast(self, tensors: list[Tensor], opts: Any) -> StrictWork:
        tensors, root, own = _real(tensors), opts.rootRank, self._communicator.rank
        is_root = own == root
        return self._launch(
            _Plan(
                *("broadcast", _terms(tensors, root=root), tensors if is_root else [], [] if is_root else tensors),
                part=lambda contents, peer: contents,
                merge=lambda parts: [] if is_root else parts[root],
            )
        )

    def allreduce(self, tensors: list[Tensor], opts: Any = None, kind: str = "all_reduce") -> StrictWork:
        opts = opts if opts is not None else dist.AllreduceOptions()
        tensors = _real_if_sum(tensors, opts.reduceOp)
        reductions = self._reductions(opts.reduceOp, tensors)
        return self._launch(
            _Plan(
                *(kind, _terms(tensors, op=reductions[0].name), tensors, tensors),
                part=lambda contents, _: [how.scaled(data) for how, data in zip(reductions, contents, strict=True)],
                merge=lambda parts: _merged(reductions, parts),
                is_reduced=True,
            )
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> StrictWork:
        return self.allreduce(tensors, opts, "all_reduce_coalesced")

    def reduce(self, tensors: list[Tensor], opts: Any) -> StrictWork:
        tensors, root, own = _real_if_sum(tensors, opts.reduceOp), opts.rootRank, self._communicator.rank
        reductions = self._reductions(opts.reduceOp, tensors)
        return self._launch(
            _Plan(
                *("reduce", _terms(tensors, op=reductions[0].name, root=root), tensors),
                outputs=tensors if own == root else [],
                part=lambda contents, peer: (
                    [how.scaled(data) for how, data in zip(reductions, contents, strict=True)] if peer == root else []
                ),
                merge=lambda parts: _merged(reductions, parts) if own == root else [],
                is_reduced=True,
            )
        )

    def allgather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> StrictWork:
        (outputs,), (tensor,) = output_lists, inputs
        self._check_sizes(outputs, tensor)
        return self._launch(
            _Plan(
                *("all_gather", _terms(outputs), inputs, outputs),
                part=lambda contents, peer: contents,
                merge=lambda parts: [parts[rank][0] for rank in sorted(parts)],
            )
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> StrictWork:
        return self.all_gather_single_coalesced([output], [tensor], opts, "all_gather_into_tensor")

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, kind: str = "all_gather_coalesced"
    ) -> StrictWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_ratio(output, tensor)
        return self._launch(
            _Plan(
                *(kind, _terms(inputs), inputs, outputs),
                part=lambda contents, peer: contents,
                merge=lambda parts: [b"".join(of_ranks) for of_ranks in _by_tensor(parts)],
            )
        )

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> StrictWork:
        raise RuntimeError("NCCL does not support allgather_coalesced: use _coalescing_manager")

    def gather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> StrictWork:
        root, own, (tensor,) = opts.rootRank, self._communicator.rank, inputs
        outputs = output_lists[0] if own == root else []
        if own == root:
            self._check_sizes(outputs, tensor, is_even=True)
        return self._launch(
            _Plan(
                *("gather", _terms(inputs, root=root), inputs, outputs),
                part=lambda contents, peer: contents if peer == root else [],
                merge=lambda parts: [parts[rank][0] for rank in sorted(parts)] if own == root else [],
            )
        )

    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> StrictWork:
        root, own = opts.rootRank, self._communicator.rank
        inputs = input_lists[0] if own == root else []
        if own == root:
            self._check_sizes(inputs, outputs[0], is_even=True)
        return self._launch(
            _Plan(
                *("scatter", _terms(outputs, root=root), inputs, outputs),
                part=lambda contents, peer: [contents[peer]] if contents else [],
                merge=lambda parts: parts[root],
            )
        )

    def reduce_scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> StrictWork:
        (inputs,), (output,) = input_lists, outputs
        self._check_sizes(inputs, output)
        (how,) = self._reductions(opts.reduceOp, outputs)
        return self._launch(
            _Plan(
                *("reduce_scatter", _terms(inputs, op=how.name), inputs, outputs),
                part=lambda contents, peer: [how.scaled(contents[peer])],
                merge=lambda parts: _merged([how], parts),
                is_reduced=True,
            )
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> StrictWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts, "reduce_scatter_tensor")

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any, kind: str = "reduce_scatter_coalesced"
    ) -> StrictWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_ratio(tensor, output)
        reductions = self._reductions(opts.reduceOp, outputs)
        lengths = [output.nbytes for output in outputs]

        def part(contents: list[bytes], peer: int) -> list[bytes]:
            return [
                how.scaled(data[peer * length : (peer + 1) * length])
                for how, data, length in zip(reductions, contents, lengths, strict=True)
            ]

        terms = _terms(outputs, op=reductions[0].name)
        merge = lambda parts: _merged(reductions, parts)  # noqa: E731
        return self._launch(_Plan(kind, terms, inputs, outputs, part, merge, is_reduced=True))

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> StrictWork:
        sent, received = self._bounds(tensor, input_splits), self._bounds(output, output_splits)
        own = self._communicator.rank

        def part(contents: list[bytes], peer: int) -> list[bytes]:
            first, last = sent[peer]
            return [contents[0][first * tensor.itemsize : last * tensor.itemsize]]

        sizes_sent, sizes_received = ([last - first for first, last in bounds] for bounds in (sent, received))
        if sizes_sent[own] != sizes_received[own]:
            raise ValueError(f"all_to_all_single: this rank sends {sizes_sent} elements and receives {sizes_received}")
        return self._launch(
            _Plan(
                *("all_to_all_single", (str(tensor.dtype),), [tensor], [output], part),
                merge=lambda parts: [b"".join(parts[rank][0] for rank in sorted(parts))],
                gives=sizes_sent.__getitem__,
                takes=sizes_received.__getitem__,
            )
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> StrictWork:
        sizes_sent, sizes_received = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        return self._launch(
            _Plan(
                *("all_to_all", (str(inputs[0].dtype),), inputs, outputs),
                part=lambda contents, peer: [contents[peer]],
                merge=lambda parts: [parts[rank][0] for rank in sorted(parts)],
                gives=sizes_sent.__getitem__,
                takes=sizes_received.__getitem__,
            )
        )

    def barrier(self, opts: Any = None) -> StrictWork:
        work = self._launch(_Plan("barrier", "", [], [], lambda contents, peer: [], lambda parts: []))
        work.wait(getattr(opts, "timeout", None))  # NCCL blocks the caller, too
        return work

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("NCCL does not support monitored_barrier")

    # point to point

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> StrictWork:
        return self._exchange("send", tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StrictWork:
        return self._exchange("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> StrictWork:
        raise RuntimeError("NCCL does not receive from any source: name the rank")

    def _exchange(self, kind: str, tensors: list[Tensor], peer: int, tag: int) -> StrictWork:
        if tag != 0:
            raise ValueError(f"NCCL has no tags, and {kind} got tag={tag}: rely on the order of calls")
        communicator, stack = self._communicator, _stack()
        communicator.enter(kind, stack)
        (tensor,) = tensors
        _check(tensor, is_reduced=False)
        key, count = _batch_call()
        batch = self._batch
        if self._coalesced is not None:  # between _start_coalescing and _end_coalescing
            batch, count = batch or _Batch(StrictWork(communicator, stack), None), 0
        elif batch is None or batch.key is not key:
            batch = _Batch(StrictWork(communicator, stack), key)
        (batch.sends if kind == "send" else batch.receives).append((peer, tensor))
        self._batch = batch
        if self._coalesced is None and len(batch.sends) + len(batch.receives) == count:
            self._launch_batch(kind if key is None else "batch")
        return batch.work

    def _launch_batch(self, kind: str) -> StrictWork:
        communicator, batch = self._communicator, self._batch
        assert batch is not None
        self._batch = None
        numbers = {}
        for peer in sorted({rank for rank, _ in (*batch.sends, *batch.receives)}):
            communicator.pairs[peer] += 1
            numbers[peer] = communicator.pairs[peer]
        (peer, *_) = numbers
        lane = communicator.main if kind == "batch" else communicator.direct[peer]
        name = kind if kind == "batch" else "point to point"
        return communicator.launch(batch.work, batch.plan(name, numbers), lane)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        if self._batch is not None:
            works.append(self._launch_batch("batch"))
        return works[0] if len(works) == 1 else _Several(works)

    # checks of sizes

    def _check_sizes(self, tensors: Sequence[Tensor], own: Tensor, is_even: bool = False) -> None:
        """Check a list with one tensor for each rank, of which this rank's has the size of ``own``."""
        size, rank = self._communicator.size, self._communicator.rank
        if len(tensors) != size or tensors[rank].numel() != own.numel() or len({t.dtype for t in (own, *tensors)}) > 1:
            raise ValueError(f"{[tuple(t.shape) for t in tensors]} do not fit {size} ranks and {tuple(own.shape)}")
        if is_even and len({tensor.numel() for tensor in tensors}) > 1:
            raise ValueError(f"tensors of different sizes, {[tuple(tensor.shape) for tensor in tensors]}")

    def _check_ratio(self, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self._communicator.size or whole.dtype != part.dtype:
            raise ValueError(f"{whole.shape} of {whole.dtype} is not one {part.shape} of {part.dtype} for each rank")

    def _bounds(self, tensor: Tensor, splits: list[int]) -> list[tuple[int, int]]:
        """Return the first and last element for each rank; an empty list of splits means equal ones."""
        size, rows = self._communicator.size, tensor.shape[0]
        if not splits and rows % size:
            raise RuntimeError(f"Tensor's dim 0 does not divide equally across group size: {rows} among {size}")
        splits = list(splits) or [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise RuntimeError(f"Split sizes {splits} do not match the group of {size} and dim 0 of {rows}")
        ends = [end * (tensor.numel() // rows if rows else 0) for end in itertools.accumulate(splits, initial=0)]
        return list(itertools.pairwise(ends))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _terms(tensors: Sequence[Tensor], **more: Any) -> tuple[Any, ...]:
    """Return what must be equal on all ranks, for which NCCL counts elements and does not know shapes."""
    return tuple((tensor.numel(), str(tensor.dtype)) for tensor in tensors), *sorted(more.items())


def _real_if_sum(tensors: Sequence[Tensor], op: Any) -> list[Tensor]:
    is_sum = str((op if isinstance(op, ReduceOp) else ReduceOp(op)).__getstate__()[0]).endswith(("SUM", "AVG"))
    return _real(tensors) if is_sum else list(tensors)


def _by_tensor(parts: dict[int, list[bytes]]) -> list[tuple[bytes, ...]]:
    return list(zip(*(parts[rank] for rank in sorted(parts)), strict=True))


def _merged(reductions: Sequence[_Reduction], parts: dict[int, list[bytes]]) -> list[bytes]:
    return [how.merged(of_ranks) for how, of_ranks in zip(reductions, _by_tensor(parts), strict=True)]


def _batch_call() -> tuple[object, int]:
    """Return the frame of the surrounding ``batch_isend_irecv`` and the number of its operations; (None, 1) outside.

    torch begins and ends a batch only for groups whose type is exactly ``ProcessGroup``.
    """
    frame: FrameType | None = sys._getframe(3)
    for _ in range(4):
        if frame is None:
            break
        if frame.f_code is dist.batch_isend_irecv.__code__:
            return frame, len(frame.f_locals["p2p_op_list"])
        frame = frame.f_back
    return None, 1
