"""Files and folders that are there as a whole or not at all, after a power failure too."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

DRAFT = ".saving"
"""How a name ends while what it names is being written."""
DOOMED = ".removing"
"""How it ends while it is being removed."""
_AT_CWD, _EXCHANGE = -100, 2
"""Of Linux: ``AT_FDCWD`` and ``RENAME_EXCHANGE``."""


def flush(path: Path) -> None:
    """Let a file, or a folder's entries, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file that has either its former content or all of the new one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_text(Path(folder, "latest"), "last"), Path(folder, "latest").read_text(), len(os.listdir(folder))
    (None, 'last', 1)
    """
    draft = path.with_name(f".{path.name}{DRAFT}")
    draft.write_text(text)
    flush(draft)
    draft.replace(path)
    flush(path.parent)


def exchange(one: Path, other: Path) -> bool:
    """Let two paths of one file system change places, at once; False where the system cannot.

    Source: renameat2(2) with ``RENAME_EXCHANGE``, which the file systems of Linux have, but for NFS.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    code: int = rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE)
    return code == 0


def discard(path: Path) -> None:
    """Remove a folder and what is in it, if it is there: under its own name it is there as a whole or not at all."""
    doomed = path if path.name.endswith(DOOMED) else path.with_name(f".{path.name.lstrip('.')}{DOOMED}")
    if path != doomed and path.exists():
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
