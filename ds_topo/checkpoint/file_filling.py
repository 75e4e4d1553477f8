"""Write files in place, from beginning to end, and resume after a kill.

A file is first written without the bytes of its tensors. Then spans of parameters are written to their places in the
order of the file. A journal records the progress of each file.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.serialization import set_default_mmap_options, skip_data

from ds_topo.checkpoint.deepspeed_reader import WEIGHT, Source
from ds_topo.checkpoint.manifest import SavedFile
from ds_topo.checkpoint.safe_reading import allowed_types
from ds_topo.checkpoint.saved_model import Parameter
from ds_topo.checkpoint.saving import finished
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
_THREADS = 2
"""Number of threads that flush and digest files, while the next ones are written."""
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

    def fill(self, start: int = 0) -> Iterator[int]:
        """Write all spans; yield the offset that has been reached after each of them, and at the end.

        A copy to the mapped file would take twice as long: it faults in every page.

        Args:
            start: offset up to which the file has been written already.
        """
        with self.path.open("r+b") as file:
            for offset in sorted(one for one in self._spans if one >= start):
                region, (name, _, first, last) = self._spans[offset]
                elements = self._source.elements(name, region.key, region.place, region.slices, first, last)
                file.seek(offset)
                file.write(elements.to(region.dtype).detach().contiguous().view(torch.uint8).numpy().data)
                file.flush()
                yield file.tell()
        yield self.bytes


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
    total, before = sum(one.bytes for one in fillings), 0
    flushed: list[Future[SavedFile]] = []
    found: list[SavedFile] = []
    flushing = ThreadPoolExecutor(_THREADS, "ds_topo flush")
    try:
        for one in fillings:
            name = one.path.name
            for offset in one.fill(noted.setdefault(name, 0)):
                if offset - noted[name] >= _NOTED:
                    with journal.open("a") as file:
                        file.write(f"{name}\t{offset}\n")
                    noted[name] = offset
                progress("megabytes", (before + offset) // 10**6, total // 10**6)
            before += one.bytes
            flushed.append(flushing.submit(finished, one.path, one.path.parent, 0))
        for future in flushed:
            found.append(future.result())
            progress("files", len(found), len(flushed))
    finally:
        flushing.shutdown(cancel_futures=True)
    return found
