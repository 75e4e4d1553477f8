"""How far an engine is: its steps, learning-rate scheduler and loss scale, as one plain value."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_OF_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
SCHEDULER = "lr_scheduler"


def progress_of(engine: DeepSpeedEngine) -> tuple[tuple[str, Any], ...]:
    """Names and values: a tuple, which torch's checkpoints keep in one piece."""
    found: dict[str, Any] = {name: int(getattr(engine, name)) for name in _COUNTS}
    scaler = _loss_scaler(engine)
    found.update((name, getattr(scaler, name)) for name in _OF_LOSS_SCALE if hasattr(scaler, name))
    if hasattr(engine.lr_scheduler, "state_dict"):
        found[SCHEDULER] = engine.lr_scheduler.state_dict()
    return tuple(found.items())


def restore_progress(engine: DeepSpeedEngine, saved: tuple[tuple[str, Any], ...]) -> None:
    """Let an engine be as far."""
    values, scaler = dict(saved), _loss_scaler(engine)
    for name in _COUNTS:
        if name in values:
            setattr(engine, name, values[name])
    micro_batches = int(engine.gradient_accumulation_steps())
    if engine.micro_steps % micro_batches:  # a step had another number of them
        engine.micro_steps = engine.global_steps * micro_batches
    for name in _OF_LOSS_SCALE:
        if name in values and hasattr(scaler, name):
            setattr(scaler, name, values[name])
    if SCHEDULER in values and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(values[SCHEDULER])


def _loss_scaler(engine: DeepSpeedEngine) -> Any:
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
