"""Read files of folders that may hold anything, and change files and folders durably.

A folder of checkpoints may hold anything, and another job may change it at the same time. The functions that read it do
not wait for a pipe, do not follow a link in a circle, and do not stop because one entry cannot be read. The functions
that change it leave the former state or the new one, even after a kill or a power failure.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from ds_topo.errors import CheckpointError, CheckpointSpaceError, abridged

DRAFT = ".saving"
"""The suffix of a name while its file or folder is being written."""
DOOMED = ".removing"
"""The suffix of a folder's name while it is being removed."""
_CHUNK = 1 << 18
"""Bytes to read at a time."""
_IRREGULAR = "not a regular file"
_LOCK = ".lock"
"""The file in a folder that a process holds while it writes there."""
MARGIN = 1.02
"""The factor by which the disk must have more space than a checkpoint is expected to take."""
_ATTEMPTS = 3
"""Attempts to replace a file in a folder that other jobs change."""
_AT_CWD, _EXCHANGE = -100, 2
"""Linux's ``AT_FDCWD`` and ``RENAME_EXCHANGE``."""


def check_folder(folder: object, name: str = "folder") -> Path:
    """Return an argument as a path.

    Raises:
        TypeError: it is not a path.
        ValueError: it is empty, a URL, begins with ``~``, or has a character that no path has.
    """
    path = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else folder
    if not isinstance(path, str):
        raise TypeError(f"{name}={abridged(folder)} is not a path: give a str or a pathlib.Path")
    if not path.strip() or "\0" in path:
        raise ValueError(f"{name}={abridged(path)} is not a path: give one, such as 'runs/gpt', or '.' for this folder")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", path):  # pathlib joins the two slashes of a URL
        raise ValueError(f"{name}={abridged(path)} is a URL: give a path of a file system that all hosts share")
    if os.path.expanduser(path) != path:
        raise ValueError(
            f"{name}={abridged(path)} begins with a home folder in the form that only shells replace: give "
            f"{os.path.expanduser(path)!r}, which os.path.expanduser() returns"
        )
    return Path(path)


# -- reading -----------------------------------------------------------------------------------------------------------


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read. Anything else is refused, since reading a pipe or a device could block.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _IRREGULAR, str(path))
    return open(descriptor, "rb")


def text_of(path: Path, limit: int) -> str:
    """Return the text of a regular file.

    Raises:
        OSError: it cannot be read, or is longer than ``limit`` bytes.
        UnicodeDecodeError: it is not text.
    """
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit:,} bytes", str(path))
    return content.decode()


def reason_of(error: OSError) -> str:
    """Return the reason in an error of the system, without the path."""
    return error.strerror or str(error)


def entries_in(folder: Path) -> dict[str, int | str]:
    """Return every entry of a folder and its subfolders by relative path: its bytes, or why it is no readable file."""
    found: dict[str, int | str] = {}

    def failed(error: OSError) -> None:
        found[os.path.relpath(error.filename or folder, folder)] = f"cannot be read: {reason_of(error)}"

    for parent, _, names in os.walk(folder, onerror=failed):
        for name in names:
            path = Path(parent, name)
            found[path.relative_to(folder).as_posix()] = _size_of(path)
    return found


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, as 64 hexadecimal digits.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "file").write_bytes(b"text"), digest_of(Path(folder, "file"))[:8]
    (4, '982d9e3e')
    """
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with open_file(path) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def _size_of(path: Path) -> int | str:
    try:
        status = path.stat()
    except OSError as error:
        return f"cannot be read: {reason_of(error)}"
    return status.st_size if stat.S_ISREG(status.st_mode) else f"is {_IRREGULAR}"


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the bytes of every regular file in a folder and its subfolders, by relative path with ``/``."""
    return {path: size for path, size in entries_in(folder).items() if isinstance(size, int)}


# -- durable changes ---------------------------------------------------------------------------------------------------


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: it has either its former content or all of the new content.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_text(Path(folder, "latest"), "last"), Path(folder, "latest").read_text(), len(os.listdir(folder))
    (None, 'last', 1)
    """
    for attempt in range(_ATTEMPTS):
        draft = path.with_name(f".{path.name}.{uuid4().hex}{DRAFT}")
        try:
            draft.write_text(text)
            flush(draft)
            draft.replace(path)
            break
        except FileNotFoundError:  # another job has tidied the folder up meanwhile
            if attempt == _ATTEMPTS - 1:
                raise
    flush(path.parent)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names of one file system atomically. Return False if the system cannot.

    Source: renameat2(2) with ``RENAME_EXCHANGE``. Linux's file systems have it, except NFS.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    code: int = rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE)
    return code == 0


def discard(path: Path) -> None:
    """Remove a folder if it exists. It is renamed first, so that its own name never shows a part of it."""
    doomed = path if path.name.endswith(DOOMED) else path.with_name(f".{path.name.lstrip('.')}{DOOMED}")
    if path != doomed and path.exists():
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def free_bytes(folder: Path) -> int:
    """Return the free space on the disk of a folder, or of its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(folder: Path, what: str, needed: int) -> None:
    """Check that the disk of a folder has space for what is going to be written.

    Raises:
        CheckpointSpaceError: it has too little.
    """
    if (free := free_bytes(folder)) < needed * MARGIN:
        raise CheckpointSpaceError(
            f"{what} takes about {needed:,} bytes, and the disk of {folder} has {free:,}: make room there, or write to "
            "another disk. Nothing was written"
        )


def failure_to_write(path: Path, error: BaseException) -> CheckpointError:
    """Return an error with the path and the free space of its disk, which torch's errors do not have."""
    reason = (getattr(error, "strerror", None) if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
    is_gone = isinstance(error, FileNotFoundError) or "does not exist" in reason  # torch's words
    if path.parent.exists() and not is_gone:
        free = f"; {shutil.disk_usage(path.parent).free:,} bytes are free there"
    else:
        free = "; its folder was removed meanwhile: does a second job save into the same folder?"
    code = f" (errno {error.errno})" if isinstance(error, OSError) and error.errno else ""
    failure = CheckpointError(f"{path} could not be written: {type(error).__name__}: {reason}{code}{free}")
    failure.__cause__ = error
    return failure


# -- several jobs ------------------------------------------------------------------------------------------------------


def hold(folder: Path) -> BinaryIO:
    """Mark a folder as in use by this process until the returned file is closed or the process ends, however it ends.

    File systems without locks do not show the mark to others.

    Raises:
        BlockingIOError: another process holds it.
    """
    file = (folder / _LOCK).open("wb")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise BlockingIOError(errno.EAGAIN, "another process is using it", str(folder)) from None
    return file


def is_held(folder: Path) -> bool:
    """Return True if another process holds a folder."""
    try:
        if (folder / _LOCK).is_file():
            hold(folder).close()
    except OSError as error:
        return isinstance(error, (BlockingIOError, PermissionError))  # or another user's
    return False
