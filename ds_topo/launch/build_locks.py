"""Remove the lock that a killed build of an extension leaves behind.

Before torch 2.14, an extension is compiled under a file named ``lock`` (``torch.utils.file_baton.FileBaton``), and
every process that finds this file waits until it is gone. A process that is killed while it compiles never removes it.
Every later start of DeepSpeed's CPU communication or fused optimizers then hangs, without a message. Newer releases
lock the file itself until the process ends, and never remove it: it blocks nobody.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ds_topo.errors import warn

LOCK = "lock"
OLD_SECONDS = 600.0
"""Longer than any build of DeepSpeed's takes."""
_SECONDS_TO_RELEASE = 1.0
"""The time in which a builder that has closed its lock removes it."""


def remove_abandoned_locks(folders: Iterable[str | Path] | None = None) -> list[Path]:
    """Remove every lock that no process holds, warn of each, and return them.

    A builder keeps its lock open while it builds. Linux grants a write lease only on a file that no other process has
    open, in any container, so on a local file system the answer is exact. On a network file system it is unknown: the
    lock stays, with a warning if it is older than any build takes. By default, torch's extensions folder is searched,
    if the installed torch waits for such files.
    """
    removed: list[Path] = []
    for folder in _build_folders() if folders is None else folders:
        lock = Path(folder, LOCK)
        held = _remove_unless_held(lock)
        if held is False:
            removed.append(lock)
            warn(
                f"removed {lock}: a process that was killed while it compiled an extension left it, or a newer torch, "
                "and every later start would have waited for it without limit"
            )
        elif held is None:
            with suppress(OSError):  # it has been removed
                age = time.time() - lock.stat().st_mtime
                if age > OLD_SECONDS:
                    warn(
                        f"{lock} is {age / 60:.0f} minutes old, and its file system does not tell whether a process "
                        "holds it. If this start hangs and no job is compiling, remove the file"
                    )
    return removed


def _build_folders() -> list[Path]:
    """Return the build folders with a lock, of every Python and device; none if torch does not wait for such files."""
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):
        return []
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    locks = Path(root).glob(f"*/{LOCK}") if root else Path(cpp_extension.get_default_build_root()).glob(f"*/*/{LOCK}")
    return [lock.parent for lock in locks]


def _remove_unless_held(lock: Path) -> bool | None:
    """Remove a lock that no process has open; return whether one holds it or the file is gone, None if unknown."""
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
            time.sleep(_SECONDS_TO_RELEASE)  # a builder that has ended closes its lock before it removes it
            if not os.fstat(file).st_nlink:
                return True
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
