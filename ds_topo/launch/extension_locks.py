"""Locks of extension builds whose builder is dead: without this a job that finds one waits for it without limit.

torch compiles an extension under a file named ``lock`` (``torch.utils.file_baton.FileBaton``), and whoever finds that
file waits until it is gone. A process that is killed while it compiles leaves it for ever, and every later start of
DeepSpeed's CPU communication or fused optimizers hangs there, without a word.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

LOCK = "lock"
OLD_SECONDS = 600.0
"""No build of DeepSpeed's takes as long."""


def remove_abandoned_locks(folders: Iterable[str | Path] | None = None) -> list[Path]:
    """Remove every lock that no process holds; warn of each, and of old ones of which that cannot be known.

    A builder keeps its lock open while it builds, and Linux grants a write lease on a file that nobody else has open,
    in whatever container; so on a file system of this host the answer is exact. On a network file system it is unknown:
    a lock is left there, with a warning if it is older than any build takes.

    Args:
        folders: build folders, each of one extension; those in torch's extensions folder unless given.

    Returns:
        The files that were removed.

    >>> remove_abandoned_locks([])
    []
    """
    removed = []
    for folder in _build_folders() if folders is None else map(Path, folders):
        lock = folder / LOCK
        held = _is_held(lock)
        if held is False:
            removed.append(lock)
            warnings.warn(
                f"removed {lock}: a process that was killed while it compiled an extension left it, and every later "
                "start would wait for it without limit",
                stacklevel=2,
            )
        elif held is None and (age := _age(lock)) > OLD_SECONDS:
            warnings.warn(
                f"{lock} is {age / 60:.0f} minutes old, and on its file system nobody can tell whether a process holds "
                "it. If this start hangs, no job is compiling: remove the file",
                stacklevel=2,
            )
    return removed


def _build_folders() -> list[Path]:
    """Those with a lock, as ``torch.utils.cpp_extension`` names them; of every Python and accelerator."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is not None:
        return [lock.parent for lock in Path(root).glob(f"*/{LOCK}")]
    from torch.utils.cpp_extension import get_default_build_root

    return [lock.parent for lock in Path(get_default_build_root()).glob(f"*/*/{LOCK}")]


def _age(lock: Path) -> float:
    try:
        return time.time() - lock.stat().st_mtime
    except OSError:
        return 0.0


def _is_held(lock: Path) -> bool | None:
    """Whether a process has the file open, or that it is gone; if none has, it is removed. None where nobody knows."""
    if sys.platform != "linux":
        return None
    import fcntl

    try:
        folder = os.open(lock.parent, os.O_RDONLY)
    except OSError:
        return None
    try:
        # One process at a time: a second one that has the file open to ask would look like its builder.
        fcntl.flock(folder, fcntl.LOCK_EX)
        file = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
        try:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default; SIGIO would end this process
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            lock.unlink()
            return False
        finally:
            os.close(file)
    except FileNotFoundError:
        return True
    except OSError as error:
        return True if error.errno in (errno.EAGAIN, errno.EACCES) else None
    finally:
        os.close(folder)
