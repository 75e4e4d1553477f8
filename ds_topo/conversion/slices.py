"""A slice of a tensor-parallel parameter among so many, from its slices among others.

Source: Megatron-LM, ``_initialize_affine_weight_cpu`` (``partition_dim`` and ``partition_stride``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from ds_topo.checkpoint_files.structure import SavedSplit


def elements_of_slice(
    read: Callable[[int, int, int], torch.Tensor],
    shape: Sequence[int],
    split: SavedSplit,
    before: int,
    place: int,
    slices: int,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Elements ``start:stop`` of slice ``place`` of ``slices``, flat; what they need of the slices before is read.

    >>> halves = [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])]  # each has two pieces
    >>> read = lambda number, start, stop: halves[number][start:stop]
    >>> [elements_of_slice(read, [4], SavedSplit(0, stride=2), 2, place, 4, 0, 2).tolist() for place in range(4)]
    [[0, 4], [1, 5], [2, 6], [3, 7]]

    Args:
        read: gives elements of a slice that there is, flat: of which, from where, and to where.
        shape: of such a slice.
        split: how the parameter is split.
        before: how many slices there are.
        place: of the one that is wanted.
        slices: among how many.
        start: the first element.
        stop: after the last one.
    """
    inner = math.prod(shape[split.dim + 1 :])
    runs = [
        (number, low * inner, high * inner)
        for number, low, high in _runs(shape[split.dim] // split.stride, split.stride, before, place, slices)
    ]
    if split.dim == 0:
        return torch.cat([read(*run) for run in _cut(runs, start, stop)])
    width = sum(high - low for _, low, high in runs)
    top, bottom = start // width, -(-stop // width)
    row = shape[split.dim] * inner
    rows = {number: read(number, top * row, bottom * row).view(-1, row) for number in {number for number, *_ in runs}}
    together = torch.cat([rows[number][:, low:high] for number, low, high in runs], 1)
    return together.reshape(-1)[start - top * width : stop - top * width]


def _runs(own: int, stride: int, before: int, place: int, slices: int) -> Iterator[tuple[int, int, int]]:
    """Along the dimension that is split: from which slice, from where, to where; of pieces ``own`` long."""
    wanted = own * before // slices
    first, last = place * wanted, (place + 1) * wanted
    for piece in range(stride):
        for number in range(first // own, -(-last // own)):
            low, high = max(first, number * own) - number * own, min(last, (number + 1) * own) - number * own
            yield number, piece * own + low, piece * own + high


def _cut(runs: Sequence[tuple[int, int, int]], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """What is in ``start:stop`` of runs that follow each other."""
    position = 0
    for number, low, high in runs:
        first, last = max(start, position), min(stop, position + high - low)
        if first < last:
            yield number, low + first - position, low + last - position
        position += high - low
