"""A slice of a tensor-parallel parameter among so many, from its slices among others.

Source: Megatron-LM, ``_initialize_affine_weight_cpu`` (``partition_dim`` and ``partition_stride``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_topo.checkpoint_files.structure import SavedSplit


def resliced(
    part: Callable[[int], torch.Tensor], split: SavedSplit, before: int, place: int, slices: int
) -> torch.Tensor:
    """Slice ``place`` of ``slices``, from those of ``before`` slices that have something of it.

    >>> halves = [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])]  # each has two pieces
    >>> [resliced(halves.__getitem__, SavedSplit(0, stride=2), 2, place, 4).tolist() for place in range(4)]
    [[0, 4], [1, 5], [2, 6], [3, 7]]

    Args:
        part: gives a slice that there is.
        split: how the parameter is split.
        before: how many slices there are.
        place: of the one that is wanted.
        slices: among how many.
    """
    parts: dict[int, torch.Tensor] = {}

    def known(number: int) -> torch.Tensor:
        if number not in parts:
            parts[number] = part(number)
        return parts[number]

    own = known(place * before // slices).shape[split.dim] // split.stride
    wanted = own * before // slices
    first, last = place * wanted, (place + 1) * wanted
    pieces = []
    for piece in range(split.stride):
        for number in range(first // own, -(-last // own)):
            low, high = max(first, number * own) - number * own, min(last, (number + 1) * own) - number * own
            pieces.append(known(number).narrow(split.dim, piece * own + low, high - low))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, split.dim)
