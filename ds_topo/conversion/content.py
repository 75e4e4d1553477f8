"""What a file is to hold, before its tensors are there: containers, values, and regions that parameters will fill."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ds_topo.errors import CheckpointError


class Piece(NamedTuple):
    """Elements ``start:stop`` of a slice of a parameter's weight or state, at ``offset`` of a region."""

    name: str
    key: str
    place: int
    """Which slice."""
    offset: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Region:
    """A tensor that pieces of parameters fill; zero elsewhere."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @classmethod
    def of_slice(cls, name: str, key: str, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> Region:
        """All of one slice of a parameter."""
        return cls(shape, dtype, (Piece(name, key, place, 0, 0, math.prod(shape)),))


@dataclass(frozen=True)
class FileContent:
    """A file that is to be written."""

    path: str
    """In the checkpoint's folder."""
    make: Callable[[], Any]
    """What ``torch.save`` is to write, with regions in place of tensors."""


def with_tensors(content: Any, make: Callable[[Region], torch.Tensor]) -> Any:
    """The same with a tensor in place of every region; other tensors are plain memory of their own.

    Raises:
        CheckpointError: there is a sparse tensor, which the program has saved in its ``client_state``.
    """
    if isinstance(content, Region):
        return make(content)
    if torch.is_tensor(content):
        if content.layout != torch.strided:
            raise CheckpointError(
                f"the client_state holds a tensor {list(content.shape)} of layout {content.layout}, which conversion "
                "does not write: save it dense"
            )
        return content.detach().contiguous()
    if isinstance(content, Namespace):
        return Namespace(**with_tensors(vars(content), make))
    if isinstance(content, OrderedDict):
        return OrderedDict((key, with_tensors(value, make)) for key, value in content.items())
    if type(content) is dict:
        return {key: with_tensors(value, make) for key, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(with_tensors(value, make) for value in content)
    return content


def side_by_side(content: Any, written: Any) -> Iterator[tuple[Region | torch.Tensor, torch.Tensor]]:
    """Every region or tensor of a content, with the tensor of the file that is to hold it."""
    if isinstance(content, Region) or torch.is_tensor(content):
        yield content, written
    elif isinstance(content, Namespace):
        yield from side_by_side(vars(content), vars(written))
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from side_by_side(value, written[key])
    elif type(content) in (list, tuple):
        for one, other in zip(content, written, strict=False):
            yield from side_by_side(one, other)


def has_regions(content: Any) -> bool:
    """Whether parameters are to fill something of it."""
    if isinstance(content, dict):
        return any(map(has_regions, content.values()))
    if type(content) in (list, tuple):
        return any(map(has_regions, content))
    return isinstance(content, Region)
