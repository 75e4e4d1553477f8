"""The checkpoints of a folder: which there are, which is whole, which is meant, and what a killed save has left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from ds_topo.checkpoint_files import manifest as manifests
from ds_topo.checkpoint_files.durable import DOOMED, DRAFT, discard, exchange, flush
from ds_topo.checkpoint_files.manifest import Manifest
from ds_topo.checkpoint_files.wholeness import (
    Places,
    sizes_in,
    told,
    wrong_digests,
    wrong_sizes,
    wrong_without_manifest,
)
from ds_topo.errors import CheckpointError, CheckpointVersionError, DamagedCheckpointError, abridged

LATEST = "latest"
"""The file that names the checkpoint to load, as DeepSpeed calls it."""
_LONGEST = 200
"""Bytes of a tag: file systems allow 255, and drafts have longer names."""
_FORMER = ".former"
"""How the folder of a tag is called while one of the same tag takes its place, where the two cannot change places."""


@dataclass(frozen=True)
class Checkpoint:
    """What is known of one checkpoint without reading its tensors."""

    tag: str
    path: Path
    manifest: Manifest | None
    """None where DeepSpeed alone saved it, or where it cannot be read."""
    problems: tuple[str, ...]
    """Why it is not whole; empty if it is, as far as was looked."""
    needs: str = ""
    """The later release that it takes to judge it."""
    modified: float = field(default=0.0, compare=False)
    """Seconds since 1970, of the folder."""

    @property
    def is_whole(self) -> bool:
        """As far as was looked."""
        return not self.problems and not self.needs

    @property
    def bytes(self) -> int:
        """Of all its files, as they are."""
        return sum(sizes_in(self.path).values())

    @property
    def age(self) -> tuple[int, str]:
        """What the newest one is greatest in: step, then time."""
        if self.manifest is not None:
            return self.manifest.step, self.manifest.time
        when = datetime.fromtimestamp(self.modified, timezone.utc).isoformat(timespec="seconds")
        digits = "".join(character if character.isdigit() else " " for character in self.tag).split()
        return int(digits[-1]) if digits else -1, when


def check_tag(tag: object) -> str:
    """The tag as the name of a folder.

    >>> check_tag(7), check_tag("global_step7")
    ('7', 'global_step7')

    Raises:
        ValueError: empty, with a separator of paths, or hidden.
    """
    text = str(tag)
    if not _is_name(text) or text == LATEST:
        raise ValueError(
            f"tag={abridged(tag)}: a tag is the name of a folder: give one without separators of paths, spaces around "
            f"it or a dot in front, such as 'global_step100', and not {LATEST!r}, which is the file that names one"
        )
    return text


def _is_name(text: str) -> bool:
    is_hidden, is_path = text.startswith("."), any(mark in text for mark in (os.sep, "/", "\0"))
    return bool(text) and text == text.strip() and not is_hidden and not is_path and len(os.fsencode(text)) <= _LONGEST


def require_free(folder: Path, tag: str) -> None:
    """Only another checkpoint may lose its place to a new one.

    Raises:
        CheckpointError: what has the tag's name is none.
    """
    path = folder / tag
    may_go = path.is_dir() and (_holds_states(path) or not any(path.iterdir()))
    if not may_go and os.path.lexists(path):
        raise CheckpointError(
            f"{path} is there and is no checkpoint, so it is not replaced by one: give another tag or folder. Nothing "
            "was written"
        )


def named_latest(folder: Path) -> str | None:
    """The tag in ``latest``; None without that file, or if nothing in it can be a tag."""
    try:
        text = (folder / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return None
    return text if text and all(map(_is_name, text.split("/"))) else None  # DeepSpeed takes paths as tags, too


def why_passed_over(folder: Path, chosen: Checkpoint, damaged: Sequence[Checkpoint]) -> str:
    """What to say where the newest whole checkpoint takes the place of the one that is meant; empty if it is that one.

    Args:
        folder: of all checkpoints.
        chosen: the newest whole one.
        damaged: those that come before it.
    """
    latest = named_latest(folder)
    if chosen.tag == latest:
        return ""
    problems = [f"{one.tag!r} is damaged: {told(one.problems)}" for one in damaged if one.path.is_dir()]
    if latest is None:
        has_file = os.path.lexists(folder / LATEST)
        problems.insert(0, f"'{LATEST}' names no checkpoint" if has_file else f"there is no file '{LATEST}'")
    elif not (folder / latest).is_dir():
        problems.insert(0, f"'{LATEST}' names {latest!r}, which is not there")
    step = "" if chosen.manifest is None else f", of step {chosen.manifest.step:,}"
    return f"checkpoints in {folder}: {'. '.join(problems)}. Going on from the newest whole one, {chosen.tag!r}{step}"


def tags_in(folder: Path) -> list[str]:
    """Tags of all checkpoints, whole or not: folders with a manifest or with model states."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".") and is_checkpoint(path))


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one checkpoint, whole or not."""
    return path.is_dir() and _holds_states(path)


def _holds_states(path: Path) -> bool:
    return (path / manifests.NAME).exists() or any(name.name.endswith("_states.pt") for name in path.iterdir())


def manifest_of(path: Path) -> Manifest | None:
    """The manifest of one checkpoint; None of one that DeepSpeed alone saved. Looks at no other file.

    Raises:
        DamagedCheckpointError, CheckpointVersionError, OSError: it cannot be read.
    """
    try:
        return manifests.from_text((path / manifests.NAME).read_text(), manifests.NAME)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{manifests.NAME}: {error}") from None


def look_at(folder: Path, tag: str, *, digests: bool = False, expected: Places | None = None) -> Checkpoint:
    """What is known of a checkpoint: by the sizes of its files, or with ``digests`` by all of their content.

    Args:
        folder: of all checkpoints.
        tag: of this one.
        digests: read every file, in this process.
        expected: the places of the engine that is to load it, for one without a manifest.
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
    if manifest is None:
        return Checkpoint(tag, path, None, tuple(wrong_without_manifest(path, expected)), modified=modified)
    problems = wrong_sizes(path, manifest)
    if digests and not problems:
        problems = wrong_digests(path, manifest.files)
    return Checkpoint(tag, path, manifest, tuple(problems), modified=modified)


def checkpoints_in(folder: Path, *, digests: bool = False, expected: Places | None = None) -> list[Checkpoint]:
    """All checkpoints of a folder, newest first, as :func:`look_at` sees them."""
    found = [look_at(folder, tag, digests=digests, expected=expected) for tag in tags_in(folder)]
    return sorted(found, key=lambda checkpoint: checkpoint.age, reverse=True)


def candidates(folder: Path, expected: Places | None = None) -> Iterator[Checkpoint]:
    """What may be loaded: what ``latest`` names, then all others, newest first; damaged ones too."""
    latest = named_latest(folder)
    if latest is not None:
        yield look_at(folder, latest, expected=expected)
    others = checkpoints_in(folder, expected=expected)
    yield from (checkpoint for checkpoint in others if checkpoint.tag != latest)


# -- one process changes the folder ------------------------------------------------------------------------------------


def draft_of(folder: Path, tag: str) -> Path:
    """Where a checkpoint is written before it has its name."""
    return folder / f".{tag}{DRAFT}"


def tidy(folder: Path) -> None:
    """Finish or take back what killed saves have left: drafts, what was being removed, what was being replaced."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if not path.name.startswith("."):
            continue
        if path.name.endswith(_FORMER) and path.is_dir():
            _take_back(path)
        elif path.name.endswith((DRAFT, DOOMED)):
            if path.is_dir():
                discard(path)
            else:
                path.unlink(missing_ok=True)


def take_back_replaced(folder: Path) -> None:
    """Give a checkpoint its name back that was being replaced when the job was killed; nothing else is changed."""
    with suppress(OSError):  # a folder that cannot be written: then nobody was saving there
        for path in list(folder.iterdir()) if folder.is_dir() else []:
            if path.name.startswith(".") and path.name.endswith(_FORMER) and path.is_dir():
                _take_back(path)


def _take_back(former: Path) -> None:
    path = former.with_name(former.name.removeprefix(".").removesuffix(_FORMER))
    if path.exists():
        discard(former)
    else:
        former.rename(path)
        flush(former.parent)


def put_in_place(written: Path, folder: Path, tag: str, change_places: Callable[[Path, Path], bool] = exchange) -> None:
    """Give a whole checkpoint its name: at every moment either it or the one of the same tag before has that name.

    Where the file system cannot exchange two names, there is a moment in which the former one has another name, which
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
    """Remove whole checkpoints but for the ``keep`` newest, and damaged ones that are older than all of those.

    ``newest``, which has just been saved, counts as the newest. What ``latest`` names stays. Those without a manifest
    are left alone: DeepSpeed, or a person, put them there.
    """
    latest = named_latest(folder)
    found = [checkpoint for checkpoint in checkpoints_in(folder) if checkpoint.manifest is not None]
    found.sort(key=lambda checkpoint: checkpoint.tag != newest)
    whole = [checkpoint for checkpoint in found if checkpoint.is_whole]
    kept = whole[:keep]
    if not kept:
        return []
    oldest = min(checkpoint.age for checkpoint in kept[-1:])
    removed = []
    for checkpoint in found:
        is_old = checkpoint.is_whole or checkpoint.age < oldest
        if checkpoint not in kept and is_old and checkpoint.tag != latest:
            discard(checkpoint.path)
            removed.append(checkpoint.tag)
    if removed:
        flush(folder)
    return removed
