"""Files written in place, parameter by parameter, by one process or several, and taken up again after a kill.

A file is first written without its tensors' bytes, for which there is room in it; then it is mapped into memory, and
parameters are copied to where they belong. A parameter that is done is noted in a journal.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.serialization import safe_globals, set_default_mmap_options, skip_data

from ds_topo.conversion.content import FileContent, Piece, Region, has_regions, side_by_side, with_tensors
from ds_topo.conversion.reading import Source
from ds_topo.engine.checkpoints.safe_reading import ALLOWED

_JOURNAL = "done-{}.txt"
_UNFINISHED = ".part"
_THREADS = 2
"""That copy, and that finish: one waits for the disk while the other computes."""
Finished = TypeVar("Finished")


def make_room(files: Iterable[FileContent], folder: Path) -> None:
    """Write every file without its tensors' bytes, but for those that are there already."""
    for file in files:
        path = folder / file.path
        if path.exists():
            continue
        draft = path.with_name(f"{path.name}{_UNFINISHED}")
        rooms: dict[Region, torch.Tensor] = {}  # a region that is there twice takes room once
        content = file.make()
        if not has_regions(content):
            torch.save(content, draft)
            draft.rename(path)
            continue
        content = with_tensors(content, partial(_room, rooms))  # below, what is read would have no bytes, too
        with skip_data():
            torch.save(content, draft)
        with draft.open("r+b") as written:  # else a full disk would end the process while it copies
            os.posix_fallocate(written.fileno(), 0, draft.stat().st_size)
        draft.rename(path)


def _room(rooms: dict[Region, torch.Tensor], region: Region) -> torch.Tensor:
    if region not in rooms:
        rooms[region] = torch.empty(region.shape, dtype=region.dtype)  # never touched: takes no memory
    return rooms[region]


class Filling:
    """What is to be copied where, in all files of a folder, or in a share of them.

    Args:
        source: what is read.
        slices: of the target.
        files: with room for their tensors.
        folder: where these are.
    """

    def __init__(self, source: Source, slices: int, files: Sequence[FileContent], folder: Path) -> None:
        self._source, self._slices = source, slices
        self._pieces: dict[str, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._files_of: dict[str, set[Path]] = defaultdict(set)
        self._left: Counter[Path] = Counter()
        """How many parameters a file waits for."""
        self._lock = threading.Lock()
        self.paths = [folder / file.path for file in files]
        for file, path in zip(files, self.paths, strict=True):
            if has_regions(content := file.make()):
                self._add(path, content, _mapped(path))
        for found in self._files_of.values():
            self._left.update(found)

    def _add(self, path: Path, content: Any, written: Any) -> None:
        for one, tensor in side_by_side(content, written):
            if not isinstance(one, Region):
                self._values.append((one, tensor))
                continue
            flat = tensor.view(-1)
            for piece in one.pieces:
                self._pieces[piece.name].append((piece, flat[piece.offset : piece.offset + piece.stop - piece.start]))
                self._files_of[piece.name].add(path)

    @property
    def names(self) -> list[str]:
        """Parameters that are to be copied."""
        return list(self._pieces)

    def copy_values(self) -> None:
        """Everything that is no part of a parameter: steps of optimizers, buffers."""
        while self._values:
            value, tensor = self._values.pop()
            tensor.copy_(value.detach())

    def copy(self, name: str) -> None:
        """One parameter, with all its states, once: files that have all of it are not mapped while they are flushed."""
        whole: dict[Any, torch.Tensor] = {}
        for piece, place in sorted(self._pieces.pop(name), key=lambda one: one[0].key):
            if (piece.key, piece.place) not in whole:
                whole.clear()  # what was put together for the places before
            elements = piece.place, self._slices, piece.start, piece.stop
            place.copy_(self._source.elements(name, piece.key, *elements, whole))

    def completed_by(self, name: str) -> list[Path]:
        """Files that wait for nothing more, now that a parameter is done."""
        self._pieces.pop(name, None)
        with self._lock:
            self._left.subtract(self._files_of[name])
            return [path for path in self._files_of[name] if not self._left[path]]


def _mapped(path: Path) -> Any:
    """A file's content, whose tensors are the file's own bytes."""
    with safe_globals(list(ALLOWED)), set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


class Journal:
    """Which parameters are done in one process's share of files."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._path = folder / _JOURNAL.format(worker)
        self._lock = threading.Lock()

    def done(self) -> set[str]:
        """Up to now."""
        if not self._path.exists():
            return set()
        return set(self._path.read_text().split("\n")[:-1])  # the last line may be cut off

    def note(self, name: str) -> None:
        """One more."""
        with self._lock, self._path.open("a") as file:
            file.write(f"{name}\n")


def filled(
    filling: Filling, journal: Journal, finish: Callable[[Path], Finished], progress: Callable[[str, int, int], None]
) -> list[Finished]:
    """Copy all parameters, but for those that are done, and what is no part of one; finish each file when it has all.

    Args:
        filling: what is to be copied where.
        journal: of what is done.
        finish: is called on threads, while others copy.
        progress: is told how many parameters, and then files.

    Returns:
        What ``finish`` returned.
    """
    done = journal.done()

    def copy(name: str) -> list[Path]:
        if name not in done:
            filling.copy(name)
            journal.note(name)
        return filling.completed_by(name)

    filling.copy_values()
    names = filling.names
    waiting = set(filling.paths)
    with (
        ThreadPoolExecutor(_THREADS, "ds_topo convert") as copying,
        ThreadPoolExecutor(_THREADS, "ds_topo finish") as pool,
    ):
        files = []
        for number, complete in enumerate(copying.map(copy, names), 1):
            files += [pool.submit(finish, path) for path in complete]
            waiting.difference_update(complete)
            progress("parameters", number, len(names))
        files += [pool.submit(finish, path) for path in waiting]  # those without parameters
        results = []
        for number, file in enumerate(files, 1):
            results.append(file.result())
            progress("files", number, len(files))
    return results
