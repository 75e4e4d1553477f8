"""Slices of a tensor-parallel parameter, cut and put together.

Source: Megatron-LM, ``_initialize_affine_weight_cpu`` (``partition_dim`` and ``partition_stride``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_topo.checkpoint_files.structure import SavedSplit


def cut(full: torch.Tensor, split: SavedSplit | None, place: int, slices: int) -> torch.Tensor:
    """The part of a slice; all of it where slices do not split it.

    >>> cut(torch.arange(8), SavedSplit(0, stride=2), 1, 2)
    tensor([2, 3, 6, 7])
    """
    if split is None or slices == 1:
        return full
    pieces = full.chunk(split.stride * slices, split.dim)[place::slices]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, split.dim)


def joined(parts: Sequence[torch.Tensor], split: SavedSplit | None) -> torch.Tensor:
    """All of it again, from the parts of all slices.

    >>> parts = [cut(torch.arange(8), SavedSplit(0, stride=2), place, 2) for place in range(2)]
    >>> joined(parts, SavedSplit(0, stride=2))
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if split is None or len(parts) == 1:
        return parts[0]
    pieces = [part.chunk(split.stride, split.dim) for part in parts]
    return torch.cat([of_slice[number] for number in range(split.stride) for of_slice in pieces], split.dim)
