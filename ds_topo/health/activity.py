"""Infer what a rank is doing from the stack of its main thread, and for how long it has made no progress after a fault.

No call is wrapped, so training pays nothing for it.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from ds_topo.base.torch_names import describe, is_known, unfinished_calls
from ds_topo.errors import first_line, listed

OTHERWISE, SAVES, COMPILES, DEBUGS = "running", "save", "compilation", "the debugger"
_DEEPSPEED, _PIPELINE = "deepspeed/runtime/engine.py", "deepspeed/runtime/pipe/engine.py"
_PHASES = {
    (_DEEPSPEED, "forward"): "forward",
    (_DEEPSPEED, "backward"): "backward",
    (_DEEPSPEED, "step"): "step",
    (_DEEPSPEED, "save_checkpoint"): SAVES,
    (_DEEPSPEED, "load_checkpoint"): "load",
    (_PIPELINE, "train_batch"): "train_batch",
    (_PIPELINE, "eval_batch"): "evaluation",
    (_PIPELINE, "_exec_backward_pass"): "backward",
    (_PIPELINE, "_exec_optimizer_step"): "step",
    ("torch/_tensor.py", "backward"): "backward",
    ("torch/autograd/__init__.py", "backward"): "backward",
    ("torch/nn/modules/module.py", "_call_impl"): "forward",
    ("torch/serialization.py", "save"): SAVES,
    ("ds_topo/checkpoint/saving.py", "save"): SAVES,
    ("ds_topo/checkpoint/saving.py", "finish"): SAVES,
    ("ds_topo/checkpoint/loading.py", "load"): "load",
    ("torch/distributed/distributed_c10d.py", "init_process_group"): "start",
    ("torch/distributed/distributed_c10d.py", "new_group"): "start",
    ("deepspeed/__init__.py", "initialize"): "start",
    ("ds_topo/engine/start.py", "initialize"): "start",
    ("ds_topo/reduction/reducer.py", "finish"): "finish",
    ("torch/_dynamo/convert_frame.py", "_compile"): COMPILES,
    ("torch/_inductor/compile_fx.py", "_compile_fx_inner"): COMPILES,
    ("torch/utils/cpp_extension.py", "_jit_compile"): COMPILES,
    ("triton/compiler/compiler.py", "compile"): COMPILES,
    ("/pdb.py", "interaction"): DEBUGS,
    ("/pydevd.py", "do_wait_suspend"): DEBUGS,
    ("debugpy/server/api.py", "wait_for_client"): DEBUGS,
}
"""Phases by the end of a file's name and a function of it. If phases are nested, one of
``_INSIDE`` counts first, then one of ``_AROUND``, and otherwise the innermost one."""
_AROUND = ("evaluation", SAVES, "load", "start")
_INSIDE = (COMPILES, DEBUGS)
_COUNTS = (_DEEPSPEED, _PIPELINE, "ds_topo/reduction/reducer.py", "ds_topo/engine/grid.py")
"""Files whose functions have an object that counts steps."""
_STEPS = ("global_steps", "step_count")
"""Attributes of engines and reducers that count completed steps."""
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BETWEEN = (
    *("torch/distributed/c10d_logger.py", "/threading.py", "/concurrent/futures/_base.py"),
    *("deepspeed/utils/nvtx.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/utils/_contextlib.py"),
)
"""Files whose functions a waiting function may call."""
_OPERATORS = "torch/_ops.py"
_COMMUNICATE = re.compile(
    r"(^|/)(torch/distributed/\w+\.py|torch/distributed/elastic/utils/store\.py|deepspeed/comm/.*)$"
)
"""Files in which every call in C++ is for other ranks."""
_OF_THREADS = (("/threading.py", "join"), ("/concurrent/futures/_base.py", "result"))
"""Functions that wait for the end of another thread, and so for the ranks for which that thread waits."""
_OWN_THREADS = "ds_topo"
"""The start of the names of our own threads, which wait only for the job's store."""
_ANY = ""
_WAITS = {
    ("ds_topo/reduction/reductions.py", _ANY): "the reduction of gradients",
    ("ds_topo/reduction/arrivals.py", "wait"): "parameters from their owners",
    ("ds_topo/reduction/exchange.py", _ANY): "slices from other ranks",
    ("ds_topo/launch/council.py", "within"): "the store of the job",
    ("torch/distributed/rendezvous.py", "rendezvous"): "the other ranks of the job",
}
"""Functions that wait for other ranks, besides torch's collectives."""
STORE_WAITS = tuple(what for (file, _), what in _WAITS.items() if "/reduction/" not in file)
"""The waits among them that use the job's store."""
_GROUPS = (("route", "group"), ("_route", "group"), ("_worker", "living_group"), ("living_group",))
"""Attribute paths by which objects with such functions hold their process group."""
_IDLE_SECONDS = 0.01
"""The processor time that a waiting thread may use."""
MAX_RANKS = 64
"""The members of larger groups are not recorded."""


@dataclass(frozen=True)
class Wait:
    """A call that other ranks must join."""

    call: str
    """The name of the call, such as ``all_reduce``."""
    group: str = ""
    """A description of the group."""
    name: str = ""
    """The group's name, the same on all members; empty where it is unknown."""
    ranks: tuple[int, ...] = ()
    """The group's members; empty where they are unknown or many."""

    def __str__(self) -> str:
        return f"{self.call} of {self.group}" if self.group else self.call


@dataclass(frozen=True)
class Activity:
    """The activity of a rank at one time."""

    step: int | None = None
    """The number of completed steps, once it is known."""
    phase: str = OTHERWISE
    where: str = ""
    """The innermost line of the user's program."""
    wait: Wait | None = None
    seconds: float = 0.0
    """The time since the wait began."""
    quiet: float = 0.0
    """The time since a byte was last sent or received during the wait."""
    still: float = 0.0
    """The time at one instruction without using the processor, as in any blocking call."""
    handling: str = ""
    """The exception whose handler is running."""
    handled: float = 0.0
    """The time since that exception was raised."""

    def __str__(self) -> str:
        """Describe it as the end of a sentence.

        >>> print(Activity(5, "backward", "train.py:8 in main", Wait("all_reduce", "data"), seconds=3.2))
        after 5 steps, in backward, at train.py:8 in main, waiting in all_reduce of data for 3 s
        """

        def lasting(seconds: float) -> str:
            return f" for {seconds:.0f} s" if seconds >= 1 else ""

        words = ["before the first step" if self.step is None else f"after {self.step} step{'s' * (self.step != 1)}"]
        words += [f"in {self.phase}"] if self.phase != OTHERWISE else []
        words += [f"at {self.where}"] if self.where else []
        words += [f"waiting in {self.wait}{lasting(self.seconds)}"] if self.wait else []
        words += [f"handling {self.handling}{lasting(self.handled)}"] if self.handling else []
        return ", ".join(words)


class Observer:
    """Observes the main thread from other threads."""

    def __init__(self, count: Callable[[], int | None] = lambda: None) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._thread = threading.main_thread().ident or 0
        self._counter: weakref.ref[Any] | None = None
        """The engine or reducer that counts steps."""
        self._since: dict[str, tuple[object, float]] = {}
        """The value of each kind that was seen last, and the time at which it was new."""
        self._used = 0.0
        """The processor time of the main thread when it was last found to use the processor."""

    def look(self) -> Activity:
        """Return the current activity."""
        with self._lock:
            top = sys._current_frames().get(self._thread)
            return self._look_at(top) if top is not None else Activity()

    def _look_at(self, top: FrameType) -> Activity:
        activity, waiting_frame = self._read([frame for frame, _ in traceback.walk_stack(top)])
        used = time.clock_gettime(time.pthread_getcpuclockid(self._thread))
        if used - self._used > _IDLE_SECONDS:
            self._used = used
        still = self._lasting("instruction", (top, top.f_lasti, self._used), time.monotonic())
        if still >= STILL and activity.wait is None:
            activity = replace(activity, wait=self._unseen_wait(top))
        wait = moved = None
        if activity.wait is not None:
            wait, bytes_moved = (waiting_frame or top, activity.wait), self._count()
            moved = wait, object() if bytes_moved is None else bytes_moved
        handled = sys._current_exceptions().get(self._thread)
        error = handled[1] if isinstance(handled, tuple) else handled  # before Python 3.12 as sys.exc_info()
        now = time.monotonic()
        return replace(
            activity,
            seconds=self._lasting("wait", wait, now),
            quiet=self._lasting("bytes", moved, now),
            still=still,
            handling="" if error is None else first_line(error),
            handled=self._lasting("exception", error, now),
        )

    def _unseen_wait(self, top: FrameType) -> Wait | None:
        """Return the wait of a thread that is in one call, whose frames do not tell it.

        It waits for another thread, which waits for other ranks; or it is in a call of torch, DeepSpeed or ds_topo, and
        a collective of gloo has not ended, as when torch's DDP waits inside of the backward pass.
        """
        if any(_is_at(frame, _OF_THREADS) for frame, _ in traceback.walk_stack(top)) or _is_at(top, (_RUN_BACKWARD,)):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for thread, frame in sys._current_frames().items():
                if thread != self._thread and not names.get(thread, "").startswith(_OWN_THREADS):
                    of_thread, _ = _wait_of([each for each, _ in traceback.walk_stack(frame)])
                    if of_thread is not None:
                        return of_thread
        pending = unfinished_calls() if _OF_LIBRARIES.match(str(top.f_globals.get("__name__"))) else []
        if not pending:
            return None
        call, group = pending[0]  # of several groups, it may wait for any
        return wait_over(call, group if len({each for _, each in pending}) == 1 else None)

    def _lasting(self, kind: str, value: object, now: float) -> float:
        """Return the seconds for which a value has been the same; 0 for None."""
        before, since = self._since.get(kind, (None, now))
        if value is None or value != before:
            since = now
            self._since[kind] = value, now
        return now - since

    def read_traceback(self, trace: TracebackType | None) -> Activity:
        """Return the activity when an exception was raised."""
        activity, _ = self._read([frame for frame, _ in traceback.walk_tb(trace)][::-1])
        lines = [entry for entry in traceback.extract_tb(trace) if _is_own(entry.filename)]
        if lines:
            activity = replace(activity, where=_place(lines[-1].filename, lines[-1].lineno, lines[-1].name))
        return activity

    def _read(self, frames: Sequence[FrameType]) -> tuple[Activity, FrameType | None]:
        """Return the activity, without durations, and the frame that waits; ``frames`` start with the innermost."""
        phase, where = "", ""
        wait, waiting_frame = _wait_of(frames)
        for frame in frames:
            code = frame.f_code
            role, name = _role_of(code.co_filename, code.co_name)
            if role in ("phase", "counts"):
                owner = frame.f_locals.get("self", frame.f_locals.get("engine"))
                if any(isinstance(getattr(owner, steps, None), int) for steps in _STEPS):
                    self._counter = weakref.ref(owner)
                if role == "phase":
                    if name == "forward" and getattr(getattr(owner, "module", None), "training", True) is False:
                        name = "evaluation"
                    if phase not in _INSIDE and (not phase or name in (*_AROUND, *_INSIDE)):
                        phase = name
            if not where and role == "own":
                where = _place(code.co_filename, frame.f_lineno, code.co_name)
        counter = self._counter() if self._counter is not None else None
        step = next((getattr(counter, steps) for steps in _STEPS if hasattr(counter, steps)), None)
        return Activity(step, phase or OTHERWISE, where, wait), waiting_frame


def _wait_of(frames: Iterable[FrameType]) -> tuple[Wait | None, FrameType | None]:
    """Return the wait for other ranks that a stack is in, and its frame; ``frames`` start with the innermost."""
    wait, waiting_frame = None, None
    for frame in frames:
        role, name = _role_of(frame.f_code.co_filename, frame.f_code.co_name)
        if role == "phase" and frame.f_code.co_filename.endswith(_COLLECTIVES):  # new_group is a phase, too
            role = "collective"
        if role == "collective" or (role == "communicates" and wait is None):
            wait, waiting_frame = _collective(frame), frame
        elif role == "wait":
            wait, waiting_frame = _known_wait(name, frame), frame
        elif role == "operator" and (operator := communicating_operator(frame.f_locals.get("self"))):
            wait, waiting_frame = Wait(operator), frame
        if role not in ("collective", "between", "communicates") and not (role == "operator" and wait is not None):
            break
    return wait, waiting_frame


def _is_at(frame: FrameType, places: Iterable[tuple[str, str]]) -> bool:
    """Return whether a frame is in one of these functions, given by the end of the file's name and their name."""
    code = frame.f_code
    return any(name == code.co_name and code.co_filename.endswith(ending) for ending, name in places)


@cache
def _role_of(file: str, function: str) -> tuple[str, str]:
    """Return the role of a function on the stack, and the phase or the wait that it is."""
    for table, role in ((_WAITS, "wait"), (_PHASES, "phase")):
        for (ending, name), meaning in table.items():
            if name in (function, _ANY) and file.endswith(ending):
                return role, meaning
    if file.endswith(_COLLECTIVES) and not function.startswith("_"):
        return "collective", function
    if file.endswith(_BETWEEN):
        return "between", function
    if file.endswith(_OPERATORS):
        return "operator", function
    if _COMMUNICATE.search(file):
        return "communicates", function
    if file.endswith(_COUNTS):
        return "counts", function
    return ("own" if _is_own(file) else "library"), function


_PACKAGE = f"{Path(__file__).parents[1]}/"
"""The folder of this package. A checkout, and so the examples in it, may be in a folder of the same name."""


def _is_own(file: str) -> bool:
    """Return whether a file belongs to the user's program, not to a library or ds_topo."""
    return not file.startswith(("<", _PACKAGE)) and not any(
        part in file for part in ("site-packages/", "/lib/python", "dist-packages/")
    )


def _place(file: str, line: int | None, function: str) -> str:
    short = "/".join(file.split("/")[-2:])
    return f"{short}:{line} in {function}"


def _collective(frame: FrameType) -> Wait:
    """Return the collective of torch's that a frame is in, and its group."""
    call, values = frame.f_code.co_name.lstrip("_"), frame.f_locals
    if call == "new_group" and values.get("ranks"):
        ranks = tuple(map(int, values["ranks"]))
        return Wait(call, f"ranks {listed(ranks)}", f"{call} {ranks}", ranks) if len(ranks) <= MAX_RANKS else Wait(call)
    group = values.get("group") or values.get("pg") or values.get("process_group") or dist.group.WORLD
    peers = (values.get(name) for name in ("src", "dst", "group_src", "group_dst"))
    peer = next((peer for peer in peers if peer is not None), None)
    if call in ("send", "recv", "isend", "irecv") and isinstance(peer, int):
        call = f"{call} {'to' if 'send' in call else 'from'} {peer}"
    return wait_over(call, group)


def _known_wait(call: str, frame: FrameType) -> Wait:
    """Return one of our own waits with its group, if the object has one."""
    for path in _GROUPS:
        with suppress(AttributeError, RuntimeError):  # the object has no such attribute, or its group was destroyed
            return wait_over(call, reduce(getattr, path, frame.f_locals.get("self")))
    return Wait(call)


def wait_over(call: str, group: object) -> Wait:
    """Return a call over a group, which is described if torch still has it."""
    if not isinstance(group, dist.ProcessGroup) or not is_known(group):
        return Wait(call)
    ranks = dist.get_process_group_ranks(group)
    label, name = describe(group)
    label = "all ranks" if group == dist.group.WORLD else label or f"ranks {listed(ranks)}"
    return Wait(call, label, name, tuple(ranks) if len(ranks) <= MAX_RANKS else ())


_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""The namespaces of torch's operators that communicate."""


def communicating_operator(value: object) -> str:
    """Return the name of an operator of torch that communicates; empty for anything else."""
    space, _, name = str(getattr(value, "_qualified_op_name", "") or getattr(value, "_name", "")).partition("::")
    return name.partition(".")[0] if space in _NAMESPACES else ""


# -- progress ----------------------------------------------------------------------------------------------------------


GRACE = 4.0
BUSY_GRACE = 10.0
PATIENCE = 60.0
STILL = 1.0
"""The seconds at one instruction without using the processor after which a call counts as waiting."""
_OF_LIBRARIES = re.compile(
    r"(torch|deepspeed)\.(?!utils\.data|serialization|ops\.aio|runtime\.swap_tensor|nvme)|ds_topo\.(engine|reduction)\."
)
"""Modules whose calls may wait for a collective; those that read or write files do not."""
_RUN_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")
"""The function that waits for autograd's threads."""
_MIB = 1 << 20
_OF_DISK = "D"
"""Linux's state of a thread that waits for a device."""


class MainThread:
    """Tells whether the main thread runs Python code."""

    def __init__(self) -> None:
        self._is_asked = False
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._answer)

    def has_passed(self) -> bool:
        """Return whether the main thread has finished an instruction since the last call of this."""
        if self._is_asked:
            return False
        self._is_asked = True  # before the answer, which may come at once
        if ctypes.pythonapi.Py_AddPendingCall(self._callback, None) != 0:  # the list of calls is full
            self._is_asked = False
            return False
        return True

    def _answer(self, _: object) -> int:
        self._is_asked = False
        return 0


main_thread = MainThread()
"""The one object that asks. It belongs to the process, since Python may make the call after a watch has ended."""


class Progress:
    """Measures for how long the main thread has made no progress, after a fault: a rank that is stuck must be ended.

    Samples of the stack cannot tell one long call from a loop of short ones. Python itself is asked instead to make a
    call in the main thread as soon as that thread has finished its current instruction (``Py_AddPendingCall``). Nothing
    is asked before a fault.
    Progress is a line of Python. While a GPU's backward pass runs in autograd's threads, it is also a line of one of
    these. While a checkpoint is saved, it is also a MiB written or sent, and a thread that waits for the disk, as
    ``fsync`` does.
    """

    def __init__(self, count: Callable[[], int | None]) -> None:
        self._count = count
        self._waits = False
        self._mark: object = None
        self.seconds = 0.0
        """The seconds without progress, while this process ran."""

    def look(self, doing: Activity, passed: float) -> None:
        """Note the current activity; ``passed`` seconds have passed since the last call."""
        has_passed, mark = main_thread.has_passed(), self._progress_of(doing)
        waits = doing.wait is not None
        has_moved = not waits and (has_passed or mark != self._mark or (doing.phase == SAVES and _waits_for_disk()))
        self.seconds = 0.0 if has_moved or waits != self._waits else self.seconds + passed
        self._waits, self._mark = waits, mark

    def is_stuck(self, doing: Activity) -> bool:
        """Return whether a rank with this activity has made no progress for too long."""
        if doing.wait is not None:  # whatever lines it runs meanwhile
            return self.seconds > GRACE
        if doing.phase in (COMPILES, DEBUGS) or _is_traced():
            return False
        is_still = doing.still >= STILL
        if doing.phase == SAVES or (doing.phase == OTHERWISE and is_still):
            return self.seconds > PATIENCE
        return self.seconds > (GRACE if is_still else BUSY_GRACE)  # busy, as torch.cuda is while it waits for a GPU

    def _progress_of(self, doing: Activity) -> object:
        """Return a value that changes with progress that is not the main thread's."""
        if doing.phase == SAVES:
            return (_bytes_written() + (self._count() or 0)) // _MIB
        frames = sys._current_frames()
        if not _is_at(frames[threading.main_thread().ident or 0], (_RUN_BACKWARD,)):
            return None
        # autograd's threads, which Python did not start, are dummies
        known = {thread.ident for thread in threading.enumerate() if type(thread).__name__ != "_DummyThread"}
        # each call of a hook has a frame of its own, whose address is not used again while this value holds it
        return {each: (frame, frame.f_lasti) for each, frame in frames.items() if each not in known}


def _bytes_written() -> int:
    """Return the bytes that this process has written to files; 0 where this is unknown."""
    with suppress(OSError):
        found = re.findall(r"^(?:wchar|write_bytes): (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
        return sum(map(int, found))
    return 0


def _waits_for_disk() -> bool:
    """Return whether a thread of this process waits for a device."""
    for task in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError, IndexError):  # the thread has just ended
            if task.read_text().rpartition(")")[2].split()[0] == _OF_DISK:
                return True
    return False


def _is_traced() -> bool:
    """Return whether a debugger such as gdb is attached to this process."""
    with suppress(OSError):
        return "TracerPid:\t0\n" not in Path("/proc/self/status").read_text()
    return False
