"""Checkpoints that are there as a whole or not at all, know their layout, and load in any order of axes.

:func:`save` and :func:`load` take any engine; engines on a grid call them from their own ``save_checkpoint`` and
``load_checkpoint``. What is in a folder, without an engine, says :mod:`ds_topo.checkpoint_files`, and on the command
line ``ds-topo checkpoint FOLDER``.
"""

from __future__ import annotations

from ds_topo.checkpoint_files.folder import Checkpoint, checkpoints_in, look_at
from ds_topo.checkpoint_files.manifest import Manifest
from ds_topo.engine.checkpoint_loading import load
from ds_topo.engine.checkpoint_saving import BackgroundSave, save, save_in_background

__all__ = [
    "BackgroundSave",
    "Checkpoint",
    "Manifest",
    "checkpoints_in",
    "load",
    "look_at",
    "save",
    "save_in_background",
]
