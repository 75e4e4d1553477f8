"""Remove locks of extension builds whose builder has died.

torch compiles an extension under a file named ``lock`` (``torch.utils.file_baton.FileBaton``), and every process that
finds this file waits until it is gone. A process that is killed while it compiles never removes it. Every later start
of DeepSpeed's CPU communication or fused optimizers then hangs, without a message.
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
"""Longer than any build of DeepSpeed's takes."""


def remove_abandoned_locks(folders: Iterable[str | Path] | None = None) -> list[Path]:
    """Remove every lock that no process holds, and warn of it.

    A builder keeps its lock open while it builds. Linux grants a write lease only on a file that no other process has
    open, in any container, so on a local file system the answer is exact. On a network file system it is unknown: the
    lock stays, with a warning if it is older than any build takes.

    Args:
        folders: build folders, each of one extension; by default those in torch's extensions folder.

    Returns:
        The removed files.

    >>> remove_abandoned_locks([])
    []
    """
    removed = []
    for folder in _build_folders() if folders is None else map(Path, folders):
        lock = folder / LOCK
        held = _remove_unless_held(lock)
        if held is False:
            removed.append(lock)
            warnings.warn(
                f"removed {lock}: a process that was killed while it compiled an extension left it, and every later "
                "start would have waited for it without limit",
                stacklevel=2,
            )
            continue
        try:
            age = time.time() - lock.stat().st_mtime if held is None else 0.0
        except OSError:
            continue
        if age > OLD_SECONDS:
            warnings.warn(
                f"{lock} is {age / 60:.0f} minutes old, and its file system does not tell whether a process holds it. "
                "If this start hangs and no job is compiling, remove the file",
                stacklevel=2,
            )
    return removed


def _build_folders() -> list[Path]:
    """Return the build folders with a lock, as ``torch.utils.cpp_extension`` names them, of every Python and device."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is not None:
        return [lock.parent for lock in Path(root).glob(f"*/{LOCK}")]
    from torch.utils.cpp_extension import get_default_build_root

    return [lock.parent for lock in Path(get_default_build_root()).glob(f"*/*/{LOCK}")]


def _remove_unless_held(lock: Path) -> bool | None:
    """Remove a lock that no process has open.

    Returns:
        True if a process holds the lock or the file is gone, False if it was removed, None if this is unknown.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    try:
        folder = os.open(lock.parent, os.O_RDONLY)
    except OSError:
        return None
    try:
        # One process at a time: a second one that has the file open to check it would look like its builder.
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
