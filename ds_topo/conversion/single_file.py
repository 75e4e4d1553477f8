"""One plain file of all weights, under the module's own names, for torch or safetensors."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ds_topo.checkpoint_files.durable import flush
from ds_topo.checkpoint_files.folder import Checkpoint
from ds_topo.conversion.content import FileContent, Region
from ds_topo.conversion.converting import Progress, readable
from ds_topo.conversion.filling import Filling, make_room
from ds_topo.conversion.model import model_of, require_splits
from ds_topo.conversion.reading import WEIGHT, Files, Source
from ds_topo.engine.checkpoints.written_files import free_bytes
from ds_topo.errors import CheckpointError, CheckpointSpaceError

TORCH, SAFETENSORS = "torch", "safetensors"


def to_single_file(
    checkpoint: Checkpoint, path: Path, kind: str = TORCH, progress: Progress = lambda step, done, of: None
) -> Path:
    """Write all weights into one file, in the type that the module has them in, slices put together.

    What is tied is there once, under its first name: ``tied_modules.<key>.`` in a pipeline, whose layers go by their
    number. Buffers are there, and in torch's file other names of the same parameter, too.

    Args:
        checkpoint: what is read.
        path: of the file.
        kind: ``"torch"``, for ``torch.load``, or ``"safetensors"``.
        progress: is told how far it is.

    Raises:
        ValueError: another kind.
        CheckpointError: it cannot be read, slices cannot be put together, there is too little room, or safetensors is
            not installed.
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
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    draft.unlink(missing_ok=True)
    if kind == TORCH:
        _write_in_place(source, draft, progress)
    else:
        _write_safetensors(source, draft, progress)
    flush(draft)
    os.replace(draft, path)
    flush(path.parent)
    return path


def _write_in_place(source: Source, path: Path, progress: Progress) -> None:
    """A parameter after the other."""
    parameters = source.model.parameters

    def content() -> dict[str, Any]:
        found: dict[str, Any] = {
            name: Region.of_slice(name, WEIGHT, 0, one.shape_of_slice(1), getattr(torch, one.dtype))
            for name, one in parameters.items()
        }
        aliases = {alias: found[name] for alias, name in source.model.structure.aliases.items()}
        return {**found, **aliases, **dict(_buffers(source))}

    file = FileContent(path.name, content)
    make_room([file], path.parent)
    filling = Filling(source, 1, file, path.parent)
    megabytes = filling.bytes // 10**6
    filling.fill(None, 0, lambda done: progress("megabytes", done // 10**6, megabytes))


def _write_safetensors(source: Source, path: Path, progress: Progress) -> None:
    """All at once, as its package does; it refuses tensors that share memory, and so other names of the same one."""
    weights: dict[str, torch.Tensor] = {}
    for number, name in enumerate(source.model.parameters, 1):
        weights[name] = source.full(name, WEIGHT).detach().contiguous()
        progress("parameters", number, len(source.model.parameters))
    weights.update((name, buffer.clone()) for name, buffer in _buffers(source))
    importlib.import_module("safetensors.torch").save_file(weights, path, metadata={"format": "pt"})


def _buffers(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """Of the first slice, under the names that the module has them by."""
    for first in range(0, source.layout.model_ranks, source.model.slices):
        states = source.model_states(first)
        names = states.get("buffer_names") or ()
        if not source.layout.is_pipeline:
            yield from ((name, states["module"][name]) for name in names if name in states["module"])
    if source.layout.is_pipeline:
        yield from source.buffers_of_layers()
    yield from source.buffers_of_experts()
