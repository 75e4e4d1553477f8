"""Files written in place, from beginning to end, by one process or several, and taken up again after a kill.

A file is first written without its tensors' bytes, for which there is room in it; then pieces of parameters are written
to where they belong, in the order of the file, so that its digest is computed from what has just been read. How far a
file is stands in a journal.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from torch.serialization import safe_globals, set_default_mmap_options, skip_data

from ds_topo.checkpoint_files.durable import flush
from ds_topo.conversion.content import FileContent, Piece, Region, has_regions, side_by_side, with_tensors
from ds_topo.conversion.reading import Source
from ds_topo.engine.checkpoints.safe_reading import ALLOWED

_JOURNAL = "done-{}.txt"
_UNFINISHED = ".part"
_NOTED = 1 << 26
"""A file's progress is noted after so many bytes; what was written since is written again after a kill."""
_CHUNK = 1 << 18
"""Bytes that are written, and digested while caches have them."""
_THREADS = 2
"""That write, and that flush: one waits for the disk while the other computes. No two write to the same file, whose
lock they would wait for."""
_HEADER_BYTES, _LENGTHS_AT = 30, 26
"""Of the header before a file's bytes in a ZIP archive, without its name and extra field; where it has their lengths.
Source: APPNOTE.TXT, 4.3.7 (PKWARE)."""


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
        with draft.open("r+b") as written:  # else a full disk would be found late
            os.posix_fallocate(written.fileno(), 0, draft.stat().st_size)
        draft.rename(path)


def _room(rooms: dict[Region, torch.Tensor], region: Region) -> torch.Tensor:
    if region not in rooms:
        rooms[region] = torch.empty(region.shape, dtype=region.dtype)  # never touched: takes no memory
    return rooms[region]


class Digest(Protocol):
    """One of ``hashlib``'s."""

    def update(self, data: memoryview, /) -> None:
        """Of more bytes."""


class _Part(NamedTuple):
    offset: int
    """Bytes from the file's beginning."""
    dtype: torch.dtype
    piece: Piece


class Filling:
    """What is to be written where in a file.

    What is no part of a parameter, steps of optimizers and buffers, is written at once.

    Args:
        source: what is read.
        slices: of the target.
        file: with room for its tensors.
        folder: where it is.
    """

    def __init__(self, source: Source, slices: int, file: FileContent, folder: Path) -> None:
        self._source, self._slices = source, slices
        self.path = folder / file.path
        self.bytes = self.path.stat().st_size
        parts: dict[int, _Part] = {}  # a region that is there twice is written once
        if has_regions(content := file.make()):
            pairs = list(side_by_side(content, _mapped(self.path)))
            start = _address_of_start(self.path, [tensor for _, tensor in pairs])
            for one, tensor in pairs:
                if not isinstance(one, Region):
                    tensor.detach().copy_(one.detach())
                    continue
                for piece in (piece for piece in one.pieces if piece.start < piece.stop):
                    offset = tensor.data_ptr() - start + piece.offset * tensor.itemsize
                    parts[offset] = _Part(offset, tensor.dtype, piece)
        self._parts = [parts[offset] for offset in sorted(parts)]

    def fill(self, digest: Digest | None, start: int, done: Callable[[int], None]) -> None:
        """Write all pieces.

        Args:
            digest: of the whole file; None for none.
            start: what is before was written already.
            done: is told up to which byte it is, after every piece.
        """
        with self.path.open("r+b", buffering=0) as file:
            position = 0
            for part in self._parts:
                if part.offset >= start:
                    _digest(digest, file, position, part.offset)
                    position = _write(digest, file, part.offset, self._elements(part))
                    done(position)
            _digest(digest, file, position, self.bytes)
            done(self.bytes)

    def _elements(self, part: _Part) -> torch.Tensor:
        piece = part.piece
        found = self._source.elements(piece.name, piece.key, piece.place, self._slices, piece.start, piece.stop)
        return found.to(part.dtype)


def _write(digest: Digest | None, file: BinaryIO, offset: int, elements: torch.Tensor) -> int:
    """Elements, flat; return where they end. A copy to the mapped file takes twice as long: it faults in every page."""
    left = elements.detach().contiguous().view(torch.uint8).numpy().data
    while left:
        count = os.pwrite(file.fileno(), left[:_CHUNK], offset)
        if digest is not None:
            digest.update(left[:count])
        left, offset = left[count:], offset + count
    return offset


def _digest(digest: Digest | None, file: BinaryIO, start: int, stop: int) -> None:
    """What a file has already."""
    while digest is not None and start < stop:
        found = os.pread(file.fileno(), min(_CHUNK, stop - start), start)
        if not found:
            raise OSError(f"{file.name} ends at byte {start}: it was cut off meanwhile")
        digest.update(memoryview(found))
        start += len(found)


def _mapped(path: Path) -> Any:
    """A file's content, whose tensors are the file's own bytes."""
    with safe_globals(list(ALLOWED)), set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _address_of_start(path: Path, tensors: Iterable[torch.Tensor]) -> int:
    """Of the memory that a whole file is mapped to, of which all tensors in it are parts."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    addresses = {storage.data_ptr() for storage in storages if storage.nbytes()}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        records = [one.header_offset for one in archive.infolist() if "/data/" in one.filename and one.file_size]
        if len(records) != len(addresses):
            raise RuntimeError(
                f"{path} has the bytes of {len(records)} tensors, and {len(addresses)} are to be filled: another torch "
                "may have written it. Remove its folder, and convert again"
            )
        if not records:
            return 0
        file.seek(min(records) + _LENGTHS_AT)
        name, extra = struct.unpack("<HH", file.read(4))
    return min(addresses) - (min(records) + _HEADER_BYTES + int(name) + int(extra))


class Journal:
    """How far the files of one process's share are."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._path = folder / _JOURNAL.format(worker)
        self._lock = threading.Lock()

    def done(self) -> dict[str, int]:
        """Up to which byte every file was written."""
        if not self._path.exists():
            return {}
        lines = self._path.read_text().split("\n")[:-1]  # the last line may be cut off
        return {name: int(offset) for name, _, offset in (line.rpartition("\t") for line in lines)}

    def note(self, name: str, offset: int) -> None:
        """A file was written up to a byte."""
        with self._lock, self._path.open("a") as file:
            file.write(f"{name}\t{offset}\n")


def filled(fillings: Sequence[Filling], journal: Journal, progress: Callable[[str, int, int], None]) -> list[str]:
    """Fill all files, but for what is there, and flush them.

    Args:
        fillings: of all files.
        journal: of what is there.
        progress: is told how many megabytes, and then files.

    Returns:
        The SHA-256 of every file.
    """
    total = _Total(sum(one.bytes for one in fillings), progress)
    there = journal.done()

    def fill(one: Filling) -> tuple[str, Future[None]]:
        noted = position = there.get(one.path.name, 0)
        total.add(position)

        def done(offset: int) -> None:
            nonlocal noted, position
            if offset - noted >= _NOTED:
                journal.note(one.path.name, offset)
                noted = offset
            total.add(offset - position)
            position = offset

        digest = hashlib.sha256()
        one.fill(digest, noted, done)
        return digest.hexdigest(), flushing.submit(flush, one.path)

    with (
        ThreadPoolExecutor(_THREADS, "ds_topo flush") as flushing,
        ThreadPoolExecutor(_THREADS, "ds_topo convert") as writing,
        total,
    ):
        largest_first = sorted(fillings, key=lambda one: -one.bytes)
        found = dict(zip(largest_first, writing.map(fill, largest_first), strict=True))
        for number, (_, flushed) in enumerate(found.values(), 1):
            flushed.result()
            progress("files", number, len(found))
    return [found[one][0] for one in fillings]


class _Total:
    """What all threads have done; those that are left over stop when one has failed, or the process is interrupted."""

    def __init__(self, of: int, progress: Callable[[str, int, int], None]) -> None:
        self._of, self._progress = of, progress
        self._done = 0
        self._is_over = False
        self._lock = threading.Lock()

    def __enter__(self) -> _Total:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True

    def add(self, count: int) -> None:
        """So many bytes more."""
        with self._lock:
            if self._is_over:
                raise InterruptedError("the conversion was broken off")
            self._done += count
            self._progress("megabytes", self._done // 10**6, self._of // 10**6)
