"""One plain file of all weights, under the module's own names, for torch or safetensors."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from ds_topo.checkpoint_files.durable import flush
from ds_topo.checkpoint_files.folder import Checkpoint
from ds_topo.conversion.converting import Progress, readable
from ds_topo.conversion.model import model_of, require_splits
from ds_topo.conversion.reading import WEIGHT, Files, Source
from ds_topo.engine.written_files import free_bytes
from ds_topo.errors import CheckpointError, CheckpointSpaceError

TORCH, SAFETENSORS = "torch", "safetensors"


def to_single_file(
    checkpoint: Checkpoint, path: Path, kind: str = TORCH, progress: Progress = lambda step, done, of: None
) -> Path:
    """Write all weights into one file, in the type that the module has them in, slices put together.

    What is tied is there once, under its first name (``tied_modules.<key>.…`` in a pipeline, whose layers go by their
    number); other names of the same parameter, and buffers, are there too.

    Args:
        checkpoint: what is read.
        path: of the file.
        kind: ``"torch"``, for ``torch.load``, or ``"safetensors"``.
        progress: is told how far it is.

    Raises:
        ValueError: another kind.
        ImportError: safetensors is not installed.
        CheckpointError: it cannot be read, or slices cannot be put together, or there is too little room.
    """
    if kind not in (TORCH, SAFETENSORS):
        raise ValueError(f"kind={kind!r}: give {TORCH!r} or {SAFETENSORS!r}")
    if kind == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        raise CheckpointError(
            "--to safetensors needs the package safetensors, which is not installed: pip install safetensors"
        )
    model = model_of(readable(checkpoint))
    require_splits(model, 1)
    source = Source(model, Files(checkpoint.path))
    needed = sum(one.numel_of_slice(1) * getattr(torch, one.dtype).itemsize for one in model.parameters.values())
    if (free := free_bytes(path.parent)) < needed:
        raise CheckpointSpaceError(f"{path} takes {needed:,} bytes, and its disk has {free:,}. Nothing was written")
    weights: dict[str, torch.Tensor] = {}
    for number, name in enumerate(model.parameters, 1):
        weights[name] = source.full(name, WEIGHT)
        progress("parameters", number, len(model.parameters))
    aliases = model.structure.aliases
    weights.update(_buffers(source))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    if kind == TORCH:
        weights.update((alias, weights[name]) for alias, name in aliases.items())
        torch.save(weights, draft)
    else:  # safetensors refuses tensors that share memory
        save_file = importlib.import_module("safetensors.torch").save_file
        save_file({name: weight.contiguous() for name, weight in weights.items()}, draft, metadata={"format": "pt"})
    flush(draft)
    os.replace(draft, path)
    flush(path.parent)
    return path


def _buffers(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """Of the first slice, under the names that the module has them by."""
    for first in range(0, source.layout.model_ranks, source.model.slices):
        states = source.model_states(first)
        names = states.get("buffer_names") or ()
        if not source.layout.is_pipeline:
            yield from ((name, states["module"][name]) for name in names)
    if source.layout.is_pipeline:
        yield from source.buffers_of_layers()
