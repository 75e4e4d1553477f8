"""Make checkpoints without an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.folder import digest_of
from ds_topo.checkpoint.manifest import Manifest, SavedFile, SavedLayout, SavedParameter, SavedSplit

LAYOUT = SavedLayout("pipe=2,data=2", 4, 2, 2, 1, "DeepSpeedZeroOptimizer", "fp32", is_pipeline=True)
FILES = {"mp_rank_00_model_states.pt": b"model 0", "mp_rank_01_model_states.pt": b"model one"}


def slice_of(full: torch.Tensor, split: SavedSplit, place: int, slices: int) -> torch.Tensor:
    """Return a slice of a tensor-parallel parameter."""
    return torch.cat(full.chunk(split.stride * slices, split.dim)[place::slices], split.dim)


def make(folder: Path, tag: str, step: int, time: str = "2026-01-31T12:00:00+00:00") -> Manifest:
    """Write a complete checkpoint into ``folder / tag``."""
    path = folder / tag
    path.mkdir(parents=True)
    listed = []
    for name, content in FILES.items():
        (path / name).write_bytes(content)
        listed.append(SavedFile(name, len(content), digest_of(path / name), 0))
    manifest = Manifest(
        tag,
        step,
        time,
        LAYOUT,
        tuple(listed),
        (SavedParameter("0.weight", (4, 2), "float32", (0,)), SavedParameter("1.weight", (2, 2), "float32", (1,), 0)),
        {"ds_topo": "0.1.0"},
    )
    (path / manifests.NAME).write_text(manifests.to_text(manifest))
    return manifest
