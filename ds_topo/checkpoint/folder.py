"""Find, check, replace and remove the checkpoints of a folder.

A checkpoint is a folder that exists completely or not at all, even after a kill or a power failure: it is written
under a hidden name and then renamed. No function here needs torch. The first section changes files and folders
durably, the second checks that a checkpoint is complete, the third chooses one, and the last adds and removes one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.manifest import Manifest, SavedFile, SavedLayout
from ds_topo.errors import CheckpointError, CheckpointVersionError, DamagedCheckpointError, abridged

LATEST = "latest"
"""The file that names the checkpoint to load, as DeepSpeed calls it."""
DRAFT = ".saving"
"""The suffix of a name while its file or folder is being written."""
DOOMED = ".removing"
"""The suffix of a folder's name while it is being removed."""
_FORMER = ".former"
"""The suffix of a checkpoint's name while another one of the same tag replaces it without an exchange of names."""
_LONGEST = 200
"""The most bytes of a tag: file systems allow 255, and drafts have longer names."""
_CHUNK = 1 << 18
"""Bytes to read at a time."""
_AT_CWD, _EXCHANGE = -100, 2
"""Linux's ``AT_FDCWD`` and ``RENAME_EXCHANGE``."""
_STATES = re.compile(
    r"(?P<bf16>bf16_)?(?:zero_pp_rank_(?P<replica>\d+)_)?mp_rank_(?P<model>\d+)_(?P<kind>model|optim)_states\.pt"
)
"""DeepSpeed's names for the files of a model rank, or of a replica of one."""


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
    draft = path.with_name(f".{path.name}{DRAFT}")
    draft.write_text(text)
    flush(draft)
    draft.replace(path)
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


# -- is a checkpoint complete? -----------------------------------------------------------------------------------------
# Problems are sentences; an empty list means that none was found.


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, as 64 hexadecimal digits.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "file").write_bytes(b"text"), digest_of(Path(folder, "file"))[:8]
    (4, '982d9e3e')
    """
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the bytes of every file in a folder and its subfolders, by relative path with ``/``."""
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def wrong_sizes(folder: Path, manifest: Manifest) -> list[str]:
    """Find files of a checkpoint that are missing or have another size than the manifest records."""
    found = sizes_in(folder)
    return [
        f"{file.path} is missing"
        if file.path not in found
        else f"{file.path} has {found[file.path]:,} bytes instead of {file.bytes:,}"
        for file in manifest.files
        if found.get(file.path) != file.bytes
    ]


def wrong_digests(folder: Path, files: Iterable[SavedFile]) -> list[str]:
    """Find files that cannot be read, or whose SHA-256 differs from the manifest's."""
    problems = []
    for file in files:
        try:
            digest = digest_of(folder / file.path)
        except OSError as error:
            problems.append(f"{file.path}: {error.strerror or error}")
            continue
        if digest != file.sha256:
            problems.append(f"{file.path} was changed after it was written (its SHA-256 differs)")
    return problems


def wrong_without_manifest(folder: Path, expected: SavedLayout | None = None) -> list[str]:
    """Find missing, empty and truncated files in a checkpoint that DeepSpeed alone saved.

    Names, sizes and the ends of archives are checked. A file is missing if another file's name, or ``expected``,
    implies it. Changed bytes are not found.

    Args:
        folder: the checkpoint's folder.
        expected: the layout of the job that will load it, if its degrees must be the same.
    """
    sizes = sizes_in(folder)
    names = [name for name in sizes if name.endswith(".pt")]
    if not any(name.endswith("model_states.pt") and _STATES.fullmatch(name) for name in names):
        return ["there is no *_model_states.pt of a model rank"]
    problems = [f"{name} is missing" for name in _missing_names(names, expected)]
    problems += [f"{name} is empty" for name in names if not sizes[name]]
    problems += [f"{name} is truncated or damaged" for name in names if sizes[name] and _is_truncated(folder / name)]
    return problems


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
        prefixes = [f"zero_pp_rank_{replica}_" for replica in range(replicas)] or [""]
        wanted = (
            f"{found[0]['bf16'] or ''}{prefix}mp_rank_{model:02d}_{kind}_states.pt"
            for model in range(model_ranks)
            for prefix in prefixes
        )
        yield from (name for name in wanted if name not in names)


def _is_truncated(path: Path) -> bool:
    """Check for the directory at the end of torch's archive. Files in torch's older format have none."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
    try:
        with zipfile.ZipFile(path) as archive:
            archive.infolist()
    except (zipfile.BadZipFile, OSError):
        return True
    return False


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
        """The step, then the time: the newest checkpoint has the greatest."""
        if self.manifest is not None:
            return self.manifest.step, self.manifest.time
        when = datetime.fromtimestamp(self.modified, timezone.utc).isoformat(timespec="seconds")
        digits = re.findall(r"\d+", self.tag)
        return int(digits[-1]) if digits else -1, when


def check_tag(tag: object) -> str:
    """Return a tag as the name of a folder.

    >>> check_tag(7), check_tag("global_step7")
    ('7', 'global_step7')

    Raises:
        ValueError: it is empty, too long, hidden, or a path.
    """
    text = str(tag)
    if not _is_name(text) or text == LATEST:
        raise ValueError(
            f"tag={abridged(tag)} cannot name a checkpoint: a tag is the name of a folder. Give one without separators "
            "of paths, without spaces around it and without a dot in front, such as 'global_step100', and not "
            f"{LATEST!r}, which is the file that names one"
        )
    return text


def _is_name(text: str) -> bool:
    is_hidden, is_path = text.startswith("."), any(mark in text for mark in (os.sep, "/", "\0"))
    return bool(text) and text == text.strip() and not is_hidden and not is_path and len(os.fsencode(text)) <= _LONGEST


def named_latest(folder: Path) -> str | None:
    """Return the tag in ``latest``; None if the file is missing or holds no tag."""
    try:
        text = (folder / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return None
    return text if text and all(map(_is_name, text.split("/"))) else None  # DeepSpeed also allows paths as tags


def is_checkpoint(path: Path) -> bool:
    """Return True if a folder has a manifest or model states, complete or not."""
    return path.is_dir() and (
        (path / manifests.NAME).exists() or any(file.name.endswith("_states.pt") for file in path.iterdir())
    )


def tags_in(folder: Path) -> list[str]:
    """List the tags of all checkpoints in a folder, complete or not."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".") and is_checkpoint(path))


def manifest_of(path: Path) -> Manifest | None:
    """Read the manifest of one checkpoint; None if DeepSpeed alone saved it. No other file is read.

    Raises:
        DamagedCheckpointError, CheckpointVersionError, OSError: it cannot be read.
    """
    try:
        return manifests.from_text((path / manifests.NAME).read_text(), manifests.NAME)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{manifests.NAME}: {error}") from None


def look_at(folder: Path, tag: str, *, digests: bool = False, expected: SavedLayout | None = None) -> Checkpoint:
    """Check one checkpoint by the sizes of its files, or with ``digests`` by all of their content.

    Args:
        folder: the folder of all checkpoints.
        tag: the checkpoint to check.
        digests: read every file, in this process.
        expected: the layout of the job that will load it, to check one without a manifest.
    """
    path = folder / tag
    if not path.is_dir():
        return Checkpoint(tag, path, None, (f"there is no folder {tag!r}",))
    modified = path.stat().st_mtime
    try:
        manifest = manifest_of(path)
    except CheckpointVersionError as error:
        return Checkpoint(tag, path, None, (), needs=str(error), modified=modified)
    except (DamagedCheckpointError, OSError) as error:
        return Checkpoint(tag, path, None, (str(error),), modified=modified)
    problems = wrong_without_manifest(path, expected) if manifest is None else wrong_sizes(path, manifest)
    if manifest is not None and digests and not problems:
        problems = wrong_digests(path, manifest.files)
    return Checkpoint(tag, path, manifest, tuple(problems), modified=modified)


def checkpoints_in(folder: Path, *, digests: bool = False, expected: SavedLayout | None = None) -> list[Checkpoint]:
    """Check all checkpoints of a folder as :func:`look_at` does; return them newest first."""
    found = [look_at(folder, tag, digests=digests, expected=expected) for tag in tags_in(folder)]
    return sorted(found, key=lambda checkpoint: checkpoint.age, reverse=True)


def candidates(folder: Path, expected: SavedLayout | None = None) -> Iterator[Checkpoint]:
    """Yield the checkpoint that ``latest`` names, then all others, newest first. Damaged ones are among them."""
    latest = named_latest(folder)
    if latest is not None:
        yield look_at(folder, latest, expected=expected)
    others = checkpoints_in(folder, expected=expected)
    yield from (checkpoint for checkpoint in others if checkpoint.tag != latest)


def why_passed_over(folder: Path, chosen: Checkpoint, damaged: Sequence[Checkpoint]) -> str:
    """Return a warning if the loaded checkpoint is not the one that ``latest`` names; an empty string if it is.

    Args:
        folder: the folder of all checkpoints.
        chosen: the newest complete one.
        damaged: the checkpoints before it in :func:`candidates`.
    """
    latest = named_latest(folder)
    if chosen.tag == latest:
        return ""
    problems = [f"{one.tag!r} is damaged: {told(one.problems)}" for one in damaged if one.path.is_dir()]
    if latest is None:
        has_file = os.path.lexists(folder / LATEST)
        problems.insert(0, f"'{LATEST}' names no checkpoint" if has_file else f"there is no file '{LATEST}'")
    elif not (folder / latest).is_dir():
        problems.insert(0, f"'{LATEST}' names {latest!r}, which does not exist")
    step = "" if chosen.manifest is None else f", of step {chosen.manifest.step:,}"
    problem = ". ".join(problems)
    return f"checkpoints in {folder}: {problem}. Continuing from the newest complete one, {chosen.tag!r}{step}"


# -- one process adds or removes a checkpoint --------------------------------------------------------------------------


def require_free(folder: Path, tag: str) -> None:
    """Check that a new checkpoint would replace nothing but a checkpoint or an empty folder.

    Raises:
        CheckpointError: something else has the tag's name.
    """
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
    """Complete or undo the changes of killed saves: remove drafts and half-removed folders, restore replaced ones."""
    take_back_replaced(folder)
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(".") and path.name.endswith((DRAFT, DOOMED)):
            if path.is_dir():
                discard(path)
            else:
                path.unlink(missing_ok=True)


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


def put_in_place(written: Path, folder: Path, tag: str, change_places: Callable[[Path, Path], bool] = exchange) -> None:
    """Give a complete checkpoint its name. At every moment the name shows it or the former one of that tag.

    If the file system cannot exchange two names, the former one has another name for a moment, which
    :func:`take_back_replaced` knows.
    """
    path = folder / tag
    if not path.exists():
        written.rename(path)
    elif change_places(written, path):
        flush(folder)
        discard(written)
    else:
        former = folder / f".{tag}{_FORMER}"
        path.rename(former)
        written.rename(path)
        flush(folder)
        discard(former)
    flush(folder)


def remove_old(folder: Path, keep: int, newest: str) -> list[str]:
    """Remove complete checkpoints except the ``keep`` newest, and damaged ones older than all of those.

    ``newest`` has just been saved and counts as the newest. The one that ``latest`` names is kept. Those without a
    manifest are kept, too, because DeepSpeed or the user put them there.
    """
    latest = named_latest(folder)
    found = [checkpoint for checkpoint in checkpoints_in(folder) if checkpoint.manifest is not None]
    found.sort(key=lambda checkpoint: checkpoint.tag != newest)
    kept = [checkpoint for checkpoint in found if checkpoint.is_whole][:keep]
    removed = []
    for checkpoint in found if kept else []:
        is_old = checkpoint.is_whole or checkpoint.age < kept[-1].age
        if checkpoint not in kept and is_old and checkpoint.tag != latest:
            discard(checkpoint.path)
            removed.append(checkpoint.tag)
    if removed:
        flush(folder)
    return removed
