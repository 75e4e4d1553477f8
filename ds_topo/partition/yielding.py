"""While slices are under way beside computation, the threads that carry gloo's messages do not interrupt it.

gloo moves bytes in a thread for each process group. Linux lets it in as soon as a packet has come, some hundred times
in a backward pass, and each time caches hold other data. As batch work (``SCHED_BATCH``, sched(7)) these threads wait
until a core is idle or a time slice ends, a few milliseconds, for which sockets have room, and then move all that has
come. What they carry is the same, and so is their share of a core. Where torch does not name them (2.8 does not),
nothing changes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_NAMES = frozenset({"gloo_tcp_loop"})
"""What gloo calls them."""


class Yielding:
    """Lets this process's threads of gloo yield, for as long as anyone wants that."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection inside may end another one
        self._wanted = 0
        self._changed: set[int] = set()
        """Linux's numbers of the threads that yield since."""

    def begin(self) -> None:
        """Let them yield, also those that came since the last time."""
        with self._lock:
            self._wanted += 1
            self._changed |= {thread for thread in _threads() if _change(thread, "SCHED_OTHER", "SCHED_BATCH")}

    def end(self) -> None:
        """Once for every :meth:`begin`: the last one puts their policy back."""
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                for thread in self._changed.intersection(_threads()):
                    _change(thread, "SCHED_BATCH", "SCHED_OTHER")
                self._changed.clear()


def _threads() -> Iterator[int]:
    """Linux's numbers of them; none elsewhere."""
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has just ended
                if (task / "comm").read_text().strip() in _NAMES:
                    yield int(task.name)


def _change(thread: int, old: str, new: str) -> bool:
    """Give a thread another policy if it still has the old one; whether it has the new one now."""
    with suppress(OSError):  # it has just ended, or a sandbox forbids it: nothing depends on it
        if os.sched_getscheduler(thread) == getattr(os, old):
            os.sched_setscheduler(thread, getattr(os, new), os.sched_param(0))
            return True
    return False


threads_of_gloo = Yielding()
