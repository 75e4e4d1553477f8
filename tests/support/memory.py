"""Memory that a process holds while something runs."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_M_MMAP_THRESHOLD = -3
"""Of glibc's ``mallopt``."""


def peak(run: Callable[[], object]) -> int:
    """Bytes of resident memory at their peak while ``run()`` runs; on Linux.

    From then on this process gives each freed tensor's memory back at once; two runs before get rid of what it had
    kept. torch's profiler would not see what other threads free.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    run()
    run()
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    run()
    return _of_status("VmHWM")


def _of_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
