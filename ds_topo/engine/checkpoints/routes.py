"""``save_checkpoint`` and ``load_checkpoint`` of engines on a grid: whole or not at all, with DeepSpeed's arguments.

Their arguments and results keep DeepSpeed's meaning; where there is nothing to load, ``load_checkpoint`` without a tag
warns and returns nothing, as ever.
"""

from __future__ import annotations

import warnings
from functools import wraps
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.engine.checkpoints.loading import load
from ds_topo.engine.checkpoints.safe_reading import only_allowed_types
from ds_topo.engine.checkpoints.saving import at_work, save, why_not_ours
from ds_topo.engine.mpu import MpuGrid
from ds_topo.errors import MissingCheckpointError


def _is_ours(engine: DeepSpeedEngine, folder: object) -> bool:
    return isinstance(engine.mpu, MpuGrid) and engine not in at_work and bool(folder)


def saved_as_a_whole(save_checkpoint: Any) -> Any:
    """In place of ``DeepSpeedEngine.save_checkpoint``."""

    @wraps(save_checkpoint)
    def save_whole_checkpoint(
        engine: DeepSpeedEngine,
        save_dir: Any,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        client_state = {} if client_state is None else client_state
        reason = why_not_ours(engine) if _is_ours(engine, save_dir) else ""
        if reason:
            warnings.warn(
                f"{reason}: a job that is killed while it saves may leave a damaged checkpoint that 'latest' names",
                RuntimeWarning,
                stacklevel=3,
            )
        if reason or not _is_ours(engine, save_dir):
            return save_checkpoint(engine, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        save(
            engine,
            save_dir,
            tag,
            client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
            keep_random_states=False,
        )
        return True

    return save_whole_checkpoint


def loaded_whole(load_checkpoint: Any) -> Any:
    """In place of ``DeepSpeedEngine.load_checkpoint``."""

    @wraps(load_checkpoint)
    def load_whole_checkpoint(
        engine: DeepSpeedEngine,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        options = {
            "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states,
            "load_lr_scheduler_states": load_lr_scheduler_states,
            "load_module_only": load_module_only,
            "custom_load_fn": custom_load_fn,
        }
        if not _is_ours(engine, load_dir) or engine.use_node_local_storage():
            return load_checkpoint(engine, load_dir, tag, **options)
        if engine.load_universal_checkpoint():
            with only_allowed_types():
                return load_checkpoint(engine, load_dir, tag, **options)
        try:
            path, state = load(engine, load_dir, tag, restore_random_states=False, **options)
        except MissingCheckpointError:
            if tag is not None:
                raise
            return load_checkpoint(engine, load_dir, None, **options)
        return _as_deepspeed_says(engine, Path(path)), state

    return load_whole_checkpoint


def _as_deepspeed_says(engine: DeepSpeedEngine, folder: Path) -> str:
    """The file that DeepSpeed's own call returns: the states of this rank's part of the model."""
    name: str = engine._get_ckpt_name(str(folder.parent), folder.name)
    return name
