"""What remains to be done when weights and optimizer states were loaded in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.engine.checkpoint_meeting import Meeting
from ds_topo.engine.torch_description import Described
from ds_topo.engine.torch_memory import inner_optimizer, update_weights
from ds_topo.engine.torch_progress import restore_progress
from ds_topo.engine.torch_states import restore_hyperparameters
from ds_topo.errors import CheckpointModelError
from ds_topo.torch_checkpoint.keys import PARAMS


def take_over(
    engine: DeepSpeedEngine,
    found: Described,
    numbers: Mapping[tuple[str, str], Any],
    groups: Sequence[Mapping[str, Any]],
    progress: Any,
) -> None:
    """After weights and states were loaded in place: numbers, hyperparameters, progress, and the module's weights.

    Args:
        numbers: of the checkpoint, by parameter and key.
        groups: of the checkpoint, with names of parameters.
        progress: of an engine; None for other programs.

    Raises:
        CheckpointModelError: parameters that have one count of steps here have different ones there.
    """
    inner = inner_optimizer(engine)
    failure: Exception | None = None
    try:
        _take_over_numbers(inner, found, numbers)
    except Exception as error:  # whatever it is: the others hear of it
        failure = error
    Meeting.begin("taking over what was loaded", "").all_or_none("taken over", failure)
    for number, group in enumerate(found.groups):
        names = set(group[PARAMS])
        saved = next((one for one in groups if not names.isdisjoint(one.get(PARAMS, ()))), None)
        if saved is not None and inner is not None:
            restore_hyperparameters(inner.param_groups[number], saved)
    if progress is not None:
        restore_progress(engine, progress)
    update_weights(engine, found.trained)


def _take_over_numbers(inner: Any, found: Described, numbers: Mapping[tuple[str, str], Any]) -> None:
    seen: dict[tuple[int, str], tuple[str, float]] = {}
    for (name, key), (master, _) in found.numbers.items():
        value = numbers.get((name, key))
        if value is None:
            continue
        first, known = seen.setdefault((id(master), key), (name, float(value)))
        if known != float(value):
            raise CheckpointModelError(
                f"{key!r} is {known:g} of {first!r} and {float(value):g} of {name!r}: this engine has one for both"
            )
        state = inner.state[master]
        if torch.is_tensor(state[key]):
            state[key].fill_(float(value))
        else:
            state[key] = type(state[key])(float(value))
