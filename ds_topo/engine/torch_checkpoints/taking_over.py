"""What remains to be done when weights and optimizer states were loaded in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.engine.checkpoints.meeting import Meeting
from ds_topo.engine.torch_checkpoints.description import Described
from ds_topo.engine.torch_checkpoints.memory import inner_optimizer, update_weights
from ds_topo.engine.torch_checkpoints.progress import restore_progress
from ds_topo.engine.torch_checkpoints.states import restore_hyperparameters
from ds_topo.errors import CheckpointModelError
from ds_topo.torch_checkpoint.keys import PARAMS

Numbers = dict[tuple[torch.Tensor, str], float]
"""Of each tensor that the optimizer steps on, those of its states that are one number."""


def agreed_numbers(meeting: Meeting, found: Described, saved: Mapping[tuple[str, str], Any]) -> Numbers:
    """What the optimizer's numbers, such as steps, will be. Collective.

    Args:
        meeting: of all ranks.
        found: the engine.
        saved: numbers of a checkpoint, by parameter and key; those that it has not stay as they are.

    Raises:
        CheckpointModelError: parameters that have one number here have different ones there; the same on every rank.
    """
    problem, numbers = "", Numbers()
    try:
        numbers = _numbers_of(found, saved)
    except CheckpointModelError as error:
        problem = str(error)
    meeting.post("numbers", problem)
    meeting.all_or_none("numbers are known", None)

    def judge() -> None:
        if known := next(filter(None, meeting.posted("numbers")), ""):
            raise CheckpointModelError(known)

    meeting.decided("verdict on numbers", judge)
    return numbers


def _numbers_of(found: Described, saved: Mapping[tuple[str, str], Any]) -> Numbers:
    result: Numbers = {}
    names: dict[tuple[torch.Tensor, str], str] = {}
    for (name, key), master in found.numbers.items():
        value = saved.get((name, key))
        if value is None:
            continue
        first = names.setdefault((master, key), name)
        known = result.setdefault((master, key), float(value))
        if known != float(value):
            raise CheckpointModelError(
                f"{key!r} is {known:g} of {first!r} and {float(value):g} of {name!r}: this engine has one for both"
            )
    return result


def take_over(
    engine: DeepSpeedEngine,
    found: Described,
    numbers: Numbers,
    groups: Sequence[Mapping[str, Any]],
    progress: Any,
) -> None:
    """After weights and states were loaded in place: everything else, and the module's weights. Collective.

    Args:
        engine: that has them.
        found: the same.
        numbers: of its optimizer.
        groups: hyperparameters of the checkpoint, with names of parameters.
        progress: of an engine; None for other programs.
    """
    inner = inner_optimizer(engine)
    for (master, key), value in numbers.items():
        assert inner is not None
        state = inner.state[master]
        if torch.is_tensor(state[key]):
            state[key].fill_(value)
        else:
            state[key] = type(state[key])(value)
    for number, group in enumerate(found.groups):
        names = set(group[PARAMS])
        saved = next((one for one in groups if not names.isdisjoint(one.get(PARAMS, ()))), None)
        if saved is not None and inner is not None:
            restore_hyperparameters(inner.param_groups[number], saved)
    if progress is not None:
        restore_progress(engine, progress)
    update_weights(engine, found.trained)
