"""Find, check, replace and remove the checkpoints of a folder, and change files and folders durably.

A checkpoint is a folder that exists completely or not at all, even after a kill or a power failure: it is written
under a hidden name and then renamed. No function here needs torch.

A folder of checkpoints may hold anything, and another job may change it at the same time. The functions that read it
do not wait for a pipe, do not follow a link in a circle, and do not stop because one entry cannot be read. Those that
change it leave the former state or the new one.
"""

from __future__ import annotations

import ctypes
import difflib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from io import BufferedReader
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.manifest import Manifest, SavedFile, SavedLayout
from ds_topo.errors import (
    CheckpointError,
    CheckpointSpaceError,
    CheckpointVersionError,
    DamagedCheckpointError,
    abridged,
    printable,
)

LATEST = "latest"
"""The file that names the checkpoint to load, as DeepSpeed calls it."""
_FORMER = ".former"
"""The suffix of a checkpoint's name while another one of the same tag replaces it without an exchange of names."""
_LONGEST = 200
"""The most bytes of a tag: file systems allow 255, and drafts have longer names."""
_MOST_MISSING = 1000
"""The most missing names to find: the number in another file's name may imply any number of them."""
_LARGEST_TEXT, _LARGEST_LATEST = 1 << 31, 1 << 12
"""The most bytes of a manifest or a table, and of ``latest``: reading an endless file would take all memory."""
_LATEST_TIME = 253402300799
"""The end of the year 9999, in seconds since 1970."""
_STATES = re.compile(
    r"(?P<bf16>bf16_)?(?:zero_pp_rank_(?P<replica>\d+)_)?mp_rank_(?P<model>\d+)_(?P<kind>model|optim)_states\.pt"
)
"""DeepSpeed's names for the files of a model rank, or of a replica of one."""
DRAFT = ".saving"
"""The suffix of a name while its file or folder is being written."""
DOOMED = ".removing"
"""The suffix of a folder's name while it is being removed."""
_CHUNK = 1 << 18
"""Bytes to read at a time."""
_IRREGULAR = "not a regular file"
_LOCK = ".lock"
"""The file in a folder that a process holds while it writes there."""
_MARGIN = 1.02
"""The factor by which the disk must have more space than a checkpoint is expected to take."""
_ATTEMPTS = 3
"""Attempts to replace a file in a folder that other jobs change."""
_AT_CWD, _EXCHANGE = -100, 2
"""Linux's ``AT_FDCWD`` and ``RENAME_EXCHANGE``."""


# -- files and folders ------------------------------------------------------------------------------------------------


def check_folder(folder: object, name: str = "folder") -> Path:
    """Return an argument as a path, or raise TypeError or ValueError if it cannot be one."""
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


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read; raise OSError for anything else, since reading a pipe or a device could block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _IRREGULAR, str(path))
    return open(descriptor, "rb")


def text_of(path: Path, limit: int = _LARGEST_TEXT) -> str:
    """Return the text of a regular file of at most ``limit`` bytes, or raise OSError or UnicodeDecodeError."""
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
        for path in (Path(parent, name) for name in names):
            try:
                status = path.stat()
                size = status.st_size if stat.S_ISREG(status.st_mode) else f"is {_IRREGULAR}"
            except OSError as error:
                size = f"cannot be read: {reason_of(error)}"
            found[path.relative_to(folder).as_posix()] = size
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


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the bytes of every regular file in a folder and its subfolders, by relative path with ``/``."""
    return {path: size for path, size in entries_in(folder).items() if isinstance(size, int)}


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
    """Raise CheckpointSpaceError unless the disk of a folder has space for what is going to be written."""
    if (free := free_bytes(folder)) < needed * _MARGIN:
        raise CheckpointSpaceError(
            f"{what} takes about {needed:,} bytes, and the disk of {folder} has {free:,}: make room there, or write to "
            "another disk. Nothing was written"
        )


def failure_to_write(path: Path, error: BaseException) -> CheckpointError:
    """Return an error with the path and the free space of its disk, which torch's errors do not have."""
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    is_gone = isinstance(error, FileNotFoundError) or "does not exist" in reason  # torch's words
    if path.parent.exists() and not is_gone:
        free = f"; {shutil.disk_usage(path.parent).free:,} bytes are free there"
    else:
        free = "; its folder was removed meanwhile: does a second job save into the same folder?"
    code = f" (errno {error.errno})" if isinstance(error, OSError) and error.errno else ""
    failure = CheckpointError(f"{path} could not be written: {type(error).__name__}: {reason}{code}{free}")
    failure.__cause__ = error
    return failure


def hold(folder: Path) -> BinaryIO:
    """Mark a folder as in use by this process until the returned file is closed or the process ends, however it ends.

    File systems without locks do not show the mark to others. BlockingIOError is raised if another process holds it.
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


# -- is a checkpoint complete? -----------------------------------------------------------------------------------------
# Problems are sentences; an empty list means that none was found.


def wrong_sizes(folder: Path, manifest: Manifest) -> list[str]:
    """Find files of a checkpoint that are missing, unreadable, or of another size than the manifest records."""
    found = entries_in(folder)
    problems = [str(found["."])] if "." in found else []  # the folder itself
    for file in manifest.files:
        size = found.get(file.path, "is missing")
        if isinstance(size, str):
            problems.append(f"{file.path} {size}")
        elif size != file.bytes:
            problems.append(f"{file.path} has {size:,} bytes instead of {file.bytes:,}")
    return problems


def wrong_digests(folder: Path, files: Iterable[SavedFile]) -> list[str]:
    """Find files that cannot be read, or whose SHA-256 differs from the manifest's."""
    problems = []
    for file in files:
        try:
            digest = digest_of(folder / file.path)
        except OSError as error:
            problems.append(f"{file.path}: {reason_of(error)}")
            continue
        if digest != file.sha256:
            problems.append(f"{file.path} was changed after it was written (its SHA-256 differs)")
    return problems


def wrong_in_stock_checkpoint(folder: Path, expected: SavedLayout | None = None) -> list[str]:
    """Find missing, empty and truncated files in a checkpoint that DeepSpeed alone saved.

    Names, sizes and the checksums of archives are checked. A file is missing if another file's name implies it, or
    ``expected``, the layout that saved it. Changed bytes are not found.
    """
    found = entries_in(folder)
    names = [name for name in found if name.endswith(".pt")]
    if not any(name.endswith("model_states.pt") and _STATES.fullmatch(name) for name in names):
        return [str(found.get(".", "there is no *_model_states.pt of a model rank"))]
    problems = [f"{name} is missing" for name in _missing_names(names, expected)]
    problems += [f"{name} {found[name]}" for name in names if isinstance(found[name], str)]
    problems += [f"{name} is empty" for name in names if found[name] == 0]
    filled = [name for name in names if found[name] and not isinstance(found[name], str)]
    return problems + unreadable(folder, filled)


def _missing_names(names: Sequence[str], expected: SavedLayout | None) -> Iterator[str]:
    """Find missing names: every combination of a replica and a model rank must be there."""
    for kind in ("model", "optim"):
        found = [match for name in names if (match := _STATES.fullmatch(name)) and match["kind"] == kind]
        if not found:
            continue
        model_ranks = max(int(match["model"]) for match in found) + 1
        replicas = max((int(match["replica"]) for match in found if match["replica"]), default=-1) + 1
        if expected is not None:
            model_ranks = max(model_ranks, expected.model_ranks)
            replicas = max(replicas, expected.replicas if replicas else 0)
        wanted = (
            f"{found[0]['bf16'] or ''}{prefix}mp_rank_{model:02d}_{kind}_states.pt"
            for model in range(model_ranks)
            for prefix in (map("zero_pp_rank_{}_".format, range(replicas)) if replicas else [""])
        )
        known = set(names)
        yield from islice((name for name in wanted if name not in known), _MOST_MISSING)


def unreadable(folder: Path, names: Iterable[str]) -> list[str]:
    """Find torch's files whose directory, or description of their tensors, is truncated or changed.

    Everything but the bytes of tensors is compared with its checksum in the archive. Files in torch's older format have
    none.
    """
    return [f"{name} {problem}" for name in names if (problem := _problem_of_archive(folder / name))]


def _problem_of_archive(path: Path) -> str:
    try:
        with open_file(path) as file:
            if file.read(4) != b"PK\x03\x04":
                return ""
            with zipfile.ZipFile(file) as archive:
                for record in archive.infolist():
                    if "/data/" not in record.filename:
                        archive.read(record)
    except OSError as error:
        return f"cannot be read: {reason_of(error)}"
    except Exception as error:  # of any class: zipfile raises whatever a changed byte leads to
        return f"is damaged, or was changed after it was written ({str(error) or type(error).__name__})"
    return ""


def told(problems: Sequence[str]) -> str:
    """Join the first problems into one sentence.

    >>> told(["a is missing", "b is empty"])
    'a is missing; b is empty'
    """
    shown = 4
    more = f"; and {len(problems) - shown} further" if len(problems) > shown else ""
    return "; ".join(problems[:shown]) + more


# -- which checkpoints are there? --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, described without reading its tensors."""

    tag: str
    path: Path
    manifest: Manifest | None
    """None if DeepSpeed alone saved it, or if the manifest cannot be read."""
    problems: tuple[str, ...]
    """The problems that the check found; empty if it found none."""
    needs: str = ""
    """A message that names the later release needed to read it; empty if this one can."""
    modified: float = field(default=0.0, compare=False)
    """The time at which its folder changed, in seconds since 1970."""

    @property
    def is_whole(self) -> bool:
        """True if the check that was asked for found no problem."""
        return not self.problems and not self.needs

    @property
    def bytes(self) -> int:
        """The bytes of all its files, as they are on the disk."""
        return sum(sizes_in(self.path).values())

    @property
    def age(self) -> tuple[int, str]:
        """The step, then the time; the newest checkpoint has the greatest. A clock that jumps back changes no step."""
        if self.manifest is not None:
            return self.manifest.step, self.manifest.time
        digits = re.findall(r"[0-9]+", self.tag)
        seconds = min(max(self.modified, 0), _LATEST_TIME)  # some file systems can store times in other millennia
        when = datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
        return int(digits[-1]) if digits else -1, when


def check_tag(tag: object) -> str:
    """Return a tag as the name of a folder, or raise TypeError or ValueError if it cannot be one.

    >>> check_tag(7), check_tag("global_step7")
    ('7', 'global_step7')
    """
    text = text_of_tag(tag)
    if not _is_name(text) or text == LATEST:
        raise ValueError(
            f"tag={abridged(tag)} cannot name a checkpoint: a tag is the name of a folder. Give one without separators "
            "of paths, without spaces around it, without a dot in front and without control characters, such as "
            f"'global_step100', and not {LATEST!r}, which is the file that names one"
        )
    return text


def text_of_tag(tag: object) -> str:
    """Return a tag, which may be a number, as text, or raise TypeError, or ValueError if it is empty."""
    if isinstance(tag, bool) or not isinstance(tag, (str, Real, os.PathLike)):
        raise TypeError(f"tag={abridged(tag)} is neither a text nor a number: give the name of a checkpoint")
    if not str(tag).strip():
        raise ValueError(f"tag={abridged(tag)} is empty: give the name of a checkpoint, such as 'global_step100'")
    return str(tag)


def _is_name(text: str) -> bool:
    is_hidden, is_path = text.startswith("."), any(mark in text for mark in (os.sep, "/"))
    is_plain = bool(text) and text.isprintable() and text == text.strip()
    return is_plain and not is_hidden and not is_path and len(os.fsencode(text)) <= _LONGEST


def _latest_in(folder: Path) -> tuple[str | None, str]:
    """Return the tag in ``latest``, or None and the reason why there is none."""
    try:
        content = text_of(folder / LATEST, _LARGEST_LATEST)
    except UnicodeDecodeError:
        content = "no text"
    except OSError as error:
        if not os.path.lexists(folder / LATEST):
            return None, f"there is no file '{LATEST}'"
        content = reason_of(error)
    else:
        if (tag := content.strip()) and all(map(_is_name, tag.split("/"))):  # DeepSpeed also allows paths as tags
            return tag, ""
        content = abridged(content)
    return None, f"'{LATEST}' names no checkpoint ({content})"


def named_latest(folder: Path) -> str | None:
    """Return the tag in ``latest``; None if the file is missing, cannot be read or holds no tag."""
    return _latest_in(folder)[0]


def problem_of_latest(folder: Path) -> str:
    """Return why ``latest`` names no checkpoint that exists; empty if it names one."""
    latest, problem = _latest_in(folder)
    if latest is None or os.path.lexists(folder / latest):
        return problem
    return f"'{LATEST}' names {latest!r}, which does not exist"


def is_checkpoint(path: Path) -> bool:
    """Return True if a folder has a manifest or model states, complete or not; raise OSError if it cannot be read."""
    return path.is_dir() and any(name == manifests.NAME or name.endswith("_states.pt") for name in os.listdir(path))


def similar_folder(folder: Path) -> Path | None:
    """Return a folder with checkpoints for whose name that of this one may be a mistake; None if there is none.

    Names that differ in numbers alone are of different runs.
    """
    folder = folder.absolute()
    there = next(parent for parent in folder.parents if parent.is_dir())
    name, *inside = folder.relative_to(there).parts
    with suppress(OSError):
        for near in difflib.get_close_matches(name, sorted({*os.listdir(there)} - {name}), cutoff=0.8):
            differ = re.sub(r"\d", "", near) != re.sub(r"\d", "", name)
            if differ and tags_in(found := there.joinpath(near, *inside)):
                return found
    return None


def tags_in(folder: Path) -> list[str]:
    """List the tags of all checkpoints in a folder, complete or not. Folders that cannot be read are among them.

    If the folder itself cannot be read, CheckpointError is raised.
    """
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"the folder {folder} cannot be read: {reason_of(error)}") from None

    def may_be_checkpoint(name: str) -> bool:
        try:
            return is_checkpoint(folder / name)
        except FileNotFoundError:  # another job has removed it meanwhile
            return False
        except OSError:
            return True

    return [name for name in names if not name.startswith(".") and may_be_checkpoint(name)]


def manifest_of(path: Path) -> Manifest | None:
    """Read the manifest of one checkpoint, and no other file; None if DeepSpeed alone saved it.

    Raises DamagedCheckpointError, CheckpointVersionError or OSError if it cannot be read.
    """
    try:
        return manifests.from_text(text_of(path / manifests.NAME), manifests.NAME)
    except FileNotFoundError:
        if os.path.lexists(path / manifests.NAME):
            raise DamagedCheckpointError(f"{manifests.NAME} is a link to a file that does not exist") from None
        return None
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{manifests.NAME}: {error}") from None


def other_kind(path: Path) -> str:
    """Say how to load a checkpoint of another program; empty if it is none that is known."""
    if (path / ".metadata").is_file():
        return f"it is a checkpoint of torch.distributed.checkpoint: load it with load_torch(engine, {str(path)!r})"
    if path.is_file() and is_checkpoint(path.parent):
        root, tag = str(path.parent.parent), path.parent.name
        return f"it is one file of a checkpoint: load the whole checkpoint with load(engine, {root!r}, {tag!r})"
    files = [path] if path.is_file() else list(path.iterdir()) if path.is_dir() else []
    weights = next((file for file in files if file.suffix in (".safetensors", ".bin", ".pt", ".pth")), None)
    if weights is None:
        return ""
    where = weights if path.is_file() or weights.suffix in (".pt", ".pth") else path
    return (
        f"{weights.name} seems to hold weights alone: load them into the module before deepspeed.initialize, by "
        f"from_pretrained() or load_state_dict(), or into the engine, by load(engine, {str(where)!r})"
    )


def look_at(folder: str | os.PathLike[str], tag: str, *, digests: bool = False) -> Checkpoint:
    """Check one checkpoint by the sizes of its files, or with ``digests`` by all of their content.

    Args:
        folder: the folder of all checkpoints.
        tag: the checkpoint to check.
        digests: read every file, in this process.
    """
    folder = check_folder(folder)
    path = folder / (tag := text_of_tag(tag))
    if not tag.isprintable():
        return Checkpoint(tag, path, None, ("its name has characters that cannot be printed: rename the folder",))
    modified, problems = 0.0, list[str]()
    manifest: Manifest | None = None
    try:
        status = path.stat()
        modified = status.st_mtime
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError
        if (manifest := manifest_of(path)) is None:
            problems = wrong_in_stock_checkpoint(path)
        else:
            problems = wrong_sizes(path, manifest)
            if digests and not problems:
                problems = wrong_digests(path, manifest.files)
    except CheckpointVersionError as error:
        return Checkpoint(tag, path, None, (), needs=str(error), modified=modified)
    except (FileNotFoundError, NotADirectoryError):
        problems = [f"there is no folder {tag!r}"]
    except DamagedCheckpointError as error:
        problems = [str(error)]
    except OSError as error:
        where = "" if error.filename in (None, str(path)) else f"{Path(error.filename).name}: "
        problems = [f"{where}{reason_of(error)}"]
    return Checkpoint(tag, path, manifest, tuple(problems), modified=modified)


def checkpoints_in(folder: str | os.PathLike[str], *, digests: bool = False) -> list[Checkpoint]:
    """Check all checkpoints of a folder as :func:`look_at` does; return them newest first."""
    folder = check_folder(folder)
    found = [look_at(folder, tag, digests=digests) for tag in tags_in(folder)]
    return sorted(found, key=lambda checkpoint: checkpoint.age, reverse=True)


def candidates(folder: Path) -> Iterator[Checkpoint]:
    """Yield the checkpoint that ``latest`` names, then all others, newest first. Damaged ones are among them."""
    latest = named_latest(folder)
    if latest is not None:
        yield look_at(folder, latest)
    others = checkpoints_in(folder)
    yield from (checkpoint for checkpoint in others if checkpoint.tag != latest)


def why_passed_over(folder: Path, chosen: Checkpoint, damaged: Sequence[Checkpoint]) -> str:
    """Return a warning if ``chosen``, the loaded checkpoint, is not the one that ``latest`` names; empty if it is.

    ``damaged`` are those before it in :func:`candidates`.
    """
    if chosen.tag == named_latest(folder):
        return ""
    problems = [f"{one.tag!r} is damaged: {told(one.problems)}" for one in damaged if os.path.lexists(one.path)]
    if said := problem_of_latest(folder):
        problems.insert(0, said)
    step = "" if chosen.manifest is None else f", of step {chosen.manifest.step:,}"
    problem = ". ".join(problems)
    return printable(
        f"checkpoints in {folder}: {problem}. Continuing from the newest complete one, {chosen.tag!r}{step}"
    )


# -- one process adds or removes a checkpoint --------------------------------------------------------------------------


def require_free(folder: Path, tag: str) -> None:
    """Raise CheckpointError if a new checkpoint would replace something else than a checkpoint or an empty folder."""
    path = folder / tag
    is_empty_folder = path.is_dir() and not any(path.iterdir())
    if os.path.lexists(path) and not is_empty_folder and not is_checkpoint(path):
        raise CheckpointError(
            f"{path} exists and is not a checkpoint, so no checkpoint replaces it: give another tag or folder. Nothing "
            "was written"
        )


def draft_of(folder: Path, tag: str) -> Path:
    """Return the folder in which a checkpoint is written before it has its name."""
    return folder / f".{tag}{DRAFT}"


def tidy(folder: Path) -> None:
    """Complete or undo the changes of killed saves: remove drafts and half-removed folders, restore replaced ones.

    The drafts of jobs that are saving at this moment stay.
    """
    take_back_replaced(folder)
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(".") and path.name.endswith((DRAFT, DOOMED)):
            if not path.is_dir():
                path.unlink(missing_ok=True)
            elif not is_held(path):
                discard(path)


def take_back_replaced(folder: Path) -> None:
    """Restore the name of a checkpoint that was being replaced when a job was killed; change nothing else."""
    for former in list(folder.iterdir()) if folder.is_dir() else []:
        if not (former.name.startswith(".") and former.name.endswith(_FORMER) and former.is_dir()):
            continue
        path = former.with_name(former.name.removeprefix(".").removesuffix(_FORMER))
        if path.exists():
            discard(former)
        else:
            former.rename(path)
            flush(folder)


def put_in_place(written: Path, folder: Path, tag: str) -> None:
    """Give a complete checkpoint its name. At every moment the name shows it or the former one of that tag.

    The caller flushes the entries of the folder, together with its other changes there. If the file system cannot
    exchange two names, the former one has another name for a moment, which :func:`take_back_replaced` knows.
    """
    path = folder / tag
    if not path.exists():
        written.rename(path)
    elif exchange(written, path):
        flush(folder)
        discard(written)
    else:
        former = folder / f".{tag}{_FORMER}"
        path.rename(former)
        written.rename(path)
        flush(folder)
        discard(former)


def remove_old(folder: Path, keep: int, newest: str) -> list[str]:
    """Remove complete checkpoints except the ``keep`` newest, and damaged ones that are older than all of those.

    ``newest`` has just been saved and counts as the newest. Three kinds stay: the one that ``latest`` names; those
    without a manifest, because DeepSpeed or the user put them there; and all of them as long as fewer than ``keep``
    are complete, because a disk may fail to read one for a moment only.
    """
    latest = named_latest(folder)
    found = [checkpoint for checkpoint in checkpoints_in(folder) if checkpoint.manifest is not None]
    found.sort(key=lambda checkpoint: checkpoint.tag != newest)
    kept = [checkpoint for checkpoint in found if checkpoint.is_whole][:keep]
    removed = []
    for checkpoint in found if len(kept) == keep else []:
        is_old = checkpoint.is_whole or checkpoint.age < kept[-1].age
        if checkpoint not in kept and is_old and checkpoint.tag != latest:
            discard(checkpoint.path)
            removed.append(checkpoint.tag)
    if removed:
        flush(folder)
    return removed
