"""Write files in place, from beginning to end, in one process or several, and resume after a kill.

A file is first written without the bytes of its tensors. Then spans of parameters are written to their places in the
order of the file, so that its digest is computed from bytes that were just handled. A journal records the progress of
each file.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import struct
import threading
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch.serialization import set_default_mmap_options, skip_data

from ds_topo.checkpoint.deepspeed_reader import WEIGHT, Source
from ds_topo.checkpoint.disk import flush
from ds_topo.checkpoint.manifest import SavedFile
from ds_topo.checkpoint.safe_reading import allowed_types
from ds_topo.checkpoint.saved_model import Parameter
from ds_topo.checkpoint.shards import Span
from ds_topo.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class Region:
    """A tensor of a file that is filled with spans of parameters; it is zero elsewhere."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str
    """Key of the weights or states that fill it."""
    place: int
    """Number of the slice, or of the part of the experts."""
    spans: Sequence[Span]
    slices: int
    """Number of slices, or of parts, in the new layout."""

    @classmethod
    def of_weight(cls, parameter: Parameter, place: int, slices: int) -> Region:
        """Return the region of one of ``slices`` slices of a weight, or of parts of its experts."""
        span = Span(parameter.name, 0, 0, parameter.numel_of_slice(slices))
        return cls(parameter.shape_of_slice(slices), parameter.dtype, WEIGHT, place, [span], slices)


NewFile: TypeAlias = "tuple[str, Any]"
"""A file to write: its path in the checkpoint's folder, and the object to pass to ``torch.save``, with regions in the
place of tensors."""


def mapped(content: Any, new: Callable[[Any], Any]) -> Any:
    """Return a content with a new value in the place of each region and tensor.

    They have the same order in the file that was written from it.
    """
    if isinstance(content, Region) or torch.is_tensor(content):
        return new(content)
    if isinstance(content, Namespace):
        return Namespace(**mapped(vars(content), new))
    if isinstance(content, dict):
        found = copy(content)  # of the same class
        found.update((key, mapped(value, new)) for key, value in content.items())
        return found
    if type(content) in (list, tuple):
        return type(content)(mapped(value, new) for value in content)
    return content


def leaves(content: Any) -> list[Any]:
    """Return every region and tensor of a content."""
    found: list[Any] = []
    mapped(content, found.append)
    return found


_NOTED = 1 << 26
"""Bytes between two journal entries of a file. Bytes after the last entry are written again after a kill."""
_CHUNK = 1 << 18
"""Bytes that are written and then digested, while they are in the CPU's caches."""
_THREADS = 2
"""Number of threads that write, and of threads that flush: one waits for the disk while the other computes. No two
write to the same file, because they would wait for its lock."""
_HEADER_BYTES, _LENGTHS_AT = 30, 26
"""Size of the fixed part of the header before a record of a ZIP archive, and where it has the lengths of the rest.
Source: APPNOTE.TXT, 4.3.7 (PKWARE)."""


def make_room(files: Iterable[NewFile], folder: Path) -> None:
    """Write every file that does not exist yet, without the bytes of its tensors.

    Raises:
        CheckpointError: the ``client_state`` that the program saved holds a sparse tensor.
    """
    for name, wanted in files:
        path = folder / name
        if path.exists():
            continue
        draft = path.with_name(f"{path.name}.part")
        rooms = dict[Region, torch.Tensor]()
        content = mapped(wanted, partial(_tensor_of, rooms))  # before skip_data, which would also skip what this reads
        with skip_data() if rooms else nullcontext():
            torch.save(content, draft)
        with draft.open("r+b") as written:  # fail now if the disk is full
            os.posix_fallocate(written.fileno(), 0, draft.stat().st_size)
        draft.rename(path)


def _tensor_of(rooms: dict[Region, torch.Tensor], leaf: Any) -> torch.Tensor:
    """Return a tensor to write: a region that occurs twice gets one, and others become contiguous."""
    if isinstance(leaf, Region):
        return rooms.setdefault(leaf, torch.empty(leaf.shape, dtype=leaf.dtype))  # never touched: takes no memory
    tensor: torch.Tensor = leaf.detach()
    if tensor.layout != torch.strided:
        raise CheckpointError(
            f"the client_state holds a tensor {list(tensor.shape)} of layout {tensor.layout}: conversion writes "
            "strided tensors only. Save it dense"
        )
    return tensor.contiguous()


def bytes_of_regions(files: Iterable[NewFile]) -> int:
    """Return the bytes that parameters and their states fill in files."""
    regions = (leaf for _, content in files for leaf in leaves(content) if isinstance(leaf, Region))
    return sum(math.prod(region.shape) * region.dtype.itemsize for region in regions)


class Filling:
    """The spans to write into one file, by their offsets in it.

    Tensors that are not parts of parameters, such as steps of optimizers and buffers, are written at once.

    Args:
        source: checkpoint to read.
        path: the file, which :func:`make_room` has written.
        content: the object from which it was written.
    """

    def __init__(self, source: Source, path: Path, content: Any) -> None:
        self._source = source
        self.path = path
        self.bytes = self.path.stat().st_size
        self._spans: dict[int, tuple[Region, Span]] = {}
        """Spans by their offset in bytes; a region that occurs twice is written once."""
        with allowed_types(), set_default_mmap_options(mmap.MAP_SHARED):  # its tensors are the file
            written = leaves(torch.load(self.path, map_location="cpu", mmap=True, weights_only=True))
        start = _address_of_start(self.path, written)
        for leaf, tensor in zip(leaves(content), written, strict=True):
            if not isinstance(leaf, Region):
                tensor.detach().copy_(leaf.detach())
                continue
            for span in leaf.spans:
                if span.start < span.stop:
                    self._spans[tensor.data_ptr() - start + span.offset * tensor.itemsize] = leaf, span

    def fill(self, digest: Callable[[memoryview], None] | None, start: int, done: Callable[[int], None]) -> None:
        """Write all spans.

        Args:
            digest: called with all bytes of the file, in order; None if no digest is needed.
            start: offset up to which the file has been written already.
            done: called after every span with the offset that has been reached.
        """
        with self.path.open("r+b", buffering=0) as file:
            position = 0
            for offset in sorted(one for one in self._spans if one >= start):
                _digest(digest, file, position, offset)
                region, (name, _, first, last) = self._spans[offset]
                elements = self._source.elements(name, region.key, region.place, region.slices, first, last)
                position = _write(digest, file, offset, elements.to(region.dtype))
                done(position)
            _digest(digest, file, position, self.bytes)
            done(self.bytes)


def _write(digest: Callable[[memoryview], None] | None, file: BinaryIO, offset: int, elements: torch.Tensor) -> int:
    """Write elements, flat, and return the offset after them.

    A copy to the mapped file would take twice as long: it faults in every page.
    """
    left = elements.detach().contiguous().view(torch.uint8).numpy().data
    while left:
        count = os.pwrite(file.fileno(), left[:_CHUNK], offset)
        if digest is not None:
            digest(left[:count])
        left, offset = left[count:], offset + count
    return offset


def _digest(digest: Callable[[memoryview], None] | None, file: BinaryIO, start: int, stop: int) -> None:
    """Digest bytes that are in the file already."""
    while digest is not None and start < stop:
        found = os.pread(file.fileno(), min(_CHUNK, stop - start), start)
        if not found:
            raise OSError(
                f"{file.name} ends at byte {start} and should have {stop}: another process has cut it off during the "
                "conversion. Convert again"
            )
        digest(memoryview(found))
        start += len(found)


def _address_of_start(path: Path, tensors: Iterable[torch.Tensor]) -> int:
    """Return the address to which the first byte of a file is mapped; all its tensors lie in the same mapping."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    addresses = {storage.data_ptr() for storage in storages if storage.nbytes()}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        records = [one.header_offset for one in archive.infolist() if "/data/" in one.filename and one.file_size]
        if len(records) != len(addresses):
            raise RuntimeError(
                f"{path} has the bytes of {len(records)} tensors, and {len(addresses)} are to be filled: another "
                "release of torch may have written it. Remove its folder, and convert again"
            )
        if not records:
            return 0
        file.seek(min(records) + _LENGTHS_AT)
        name, extra = struct.unpack("<HH", file.read(4))
    return min(addresses) - (min(records) + _HEADER_BYTES + int(name) + int(extra))


def fill_all(fillings: Sequence[Filling], journal: Path, progress: Callable[[str, int, int], None]) -> list[SavedFile]:
    """Fill all files, continuing where the journal ends, and flush them.

    Args:
        fillings: what to write into the files.
        journal: file that records how far each file has been written.
        progress: called with ``"megabytes"`` or ``"files"``, how many are done, and how many there are.
    """
    lines = journal.read_text().split("\n")[:-1] if journal.exists() else []  # the last line may be cut off
    noted = {name: int(offset) for name, _, offset in (line.rpartition("\t") for line in lines)}
    total, written, is_over = sum(one.bytes for one in fillings), 0, False
    lock = threading.Lock()

    def fill(one: Filling) -> tuple[str, Future[None]]:
        name = one.path.name
        start, position = noted.setdefault(name, 0), 0

        def done(offset: int) -> None:
            nonlocal written, position
            with lock:
                if offset - noted[name] >= _NOTED:
                    with journal.open("a") as file:
                        file.write(f"{name}\t{offset}\n")
                    noted[name] = offset
                if is_over:
                    raise InterruptedError("the conversion was interrupted")
                written, position = written + offset - position, offset
                progress("megabytes", written // 10**6, total // 10**6)

        done(start)
        digest = hashlib.sha256()
        one.fill(digest.update, start, done)
        return digest.hexdigest(), flushing.submit(flush, one.path)

    with (
        ThreadPoolExecutor(_THREADS, "ds_topo flush") as flushing,
        ThreadPoolExecutor(_THREADS, "ds_topo convert") as writing,
    ):
        largest_first = sorted(fillings, key=lambda one: -one.bytes)
        try:
            found = dict(zip(largest_first, writing.map(fill, largest_first), strict=True))
            for number, (_, flushed) in enumerate(found.values(), 1):
                flushed.result()
                progress("files", number, len(found))
        finally:  # if one has failed, or the process is interrupted, the others stop
            is_over = True
    return [SavedFile(one.path.name, one.bytes, digest, 0) for one, (digest, _) in found.items()]
