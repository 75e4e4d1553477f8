"""Checkpoints that are there as a whole or not at all, know their layout, and load in any order of axes, or converted.

:func:`save` and :func:`load` take any engine; engines on a grid call them from their own ``save_checkpoint`` and
``load_checkpoint``. What is in a folder, without an engine, says :mod:`ds_topo.checkpoint_files`, and on the command
line ``ds-topo checkpoint FOLDER``. :func:`convert` and ``load(..., convert=True)`` write and load checkpoints for other
degrees and stages of ZeRO, :func:`to_single_file` one plain file of weights; on the command line ``ds-topo convert``.

:class:`TorchState` and :func:`load_torch` are the way to and from other programs: the same state through
``torch.distributed.checkpoint``, in its own format.
"""

from __future__ import annotations

from ds_topo.checkpoint_files.folder import Checkpoint, checkpoints_in, look_at
from ds_topo.checkpoint_files.manifest import Manifest
from ds_topo.conversion.converting import convert
from ds_topo.conversion.loading import load
from ds_topo.conversion.single_file import to_single_file
from ds_topo.engine.checkpoints.saving import BackgroundSave, save, save_in_background
from ds_topo.engine.torch_checkpoints.loading import load_torch
from ds_topo.engine.torch_checkpoints.state import TorchState

__all__ = [
    "BackgroundSave",
    "Checkpoint",
    "Manifest",
    "TorchState",
    "checkpoints_in",
    "convert",
    "load",
    "load_torch",
    "look_at",
    "save",
    "save_in_background",
    "to_single_file",
]
