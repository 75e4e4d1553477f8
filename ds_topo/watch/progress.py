"""Tell for how long the main thread has made no progress, after a fault: a rank that is stuck must be ended.

Samples of the stack cannot tell one long call from a loop of short ones. Python itself is asked instead to make a call
in the main thread as soon as that thread has finished its current instruction (``Py_AddPendingCall``). Nothing is asked
before a fault.

============================================================  =========================================================
what the main thread does                                     seconds without progress after which it is stuck
============================================================  =========================================================
waits for other ranks                                         ``GRACE``, whatever lines it runs meanwhile
waits for something else in an engine's function              ``GRACE``
uses the processor in one call, as ``torch.cuda`` waits       ``BUSY_GRACE``
saves, or waits outside of an engine's functions              ``PATIENCE``
compiles, or is in a debugger                                 never
============================================================  =========================================================

Progress is a line of Python. While a GPU's backward pass runs in autograd's threads, it is also a line of one of these.
While a checkpoint is saved, it is also a MiB written or sent, and a thread that waits for the disk, as ``fsync`` does.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ds_topo.watch.activity import COMPILES, DEBUGS, OTHERWISE, SAVES, Activity

GRACE = 4.0
BUSY_GRACE = 10.0
PATIENCE = 60.0
STILL = 1.0
"""The seconds at one instruction without using the processor after which a call counts as waiting."""
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
    """Measures for how long the main thread has been stuck.

    Args:
        count: returns the bytes that this process has sent and received, or None.
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
        if doing.wait is not None:
            return self.seconds > GRACE
        if doing.phase in (COMPILES, DEBUGS) or _is_traced():
            return False
        is_still = doing.still >= STILL
        if doing.phase == SAVES or (doing.phase == OTHERWISE and is_still):
            return self.seconds > PATIENCE
        return self.seconds > (GRACE if is_still else BUSY_GRACE)

    def _progress_of(self, doing: Activity) -> object:
        """Return a value that changes with progress that is not the main thread's."""
        if doing.phase == SAVES:
            return (_bytes_written() + (self._count() or 0)) // _MIB
        frames = sys._current_frames()
        main = frames[threading.main_thread().ident or 0].f_code
        if not main.co_filename.endswith(_RUN_BACKWARD[0]) or main.co_name != _RUN_BACKWARD[1]:
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
