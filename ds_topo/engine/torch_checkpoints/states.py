"""Optimizer states before the first step: as the optimizer would begin them, without a step.

Torch's own way for that is a step of no gradients at a learning rate of zero, which counts, and turns a weight of -0.0
into 0.0. Here an optimizer of the same class takes it, with one parameter of a single element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ds_topo.engine.torch_checkpoints.memory import Trained
from ds_topo.errors import CheckpointError, abridged

_OF_THE_PROGRAM = {"params", "param_names", "name", "moe", "foreach", "fused", "capturable", "differentiable"}
"""Of a group, what says how it is computed, and by which names, and not what."""


def begin_states(inner: torch.optim.Optimizer, found: Iterable[Trained]) -> None:
    """Give every tensor that the optimizer steps on its states, where it has none yet.

    Raises:
        CheckpointError: an optimizer of its class cannot be made from its groups alone.
    """
    for one in {id(one.master): one for one in found if one.parameter.requires_grad}.values():
        if not inner.state.get(one.master):
            fresh = _fresh(inner, inner.param_groups[one.group], one.master)
            inner.state[one.master] = {key: _like(value, one.master) for key, value in fresh.items()}


def _fresh(inner: torch.optim.Optimizer, group: Mapping[str, Any], master: torch.Tensor) -> dict[str, Any]:
    """The states of a single element before the first step."""
    element = nn.Parameter(torch.zeros(1, dtype=master.dtype, device=master.device))
    options = {key: value for key, value in group.items() if key != "params"}
    try:
        twin = type(inner)([{**options, "params": [element]}])  # type: ignore[call-arg]
        element.grad = torch.zeros_like(element)
        twin.step()
    except Exception as error:
        raise CheckpointError(
            f"{type(inner).__name__} has no states yet, and how it begins them is not known ({abridged(error)}): "
            "take a step before"
        ) from error
    return {key: value for key, value in twin.state[element].items() if value is not None}


def _like(value: Any, master: torch.Tensor) -> Any:
    """What was found for a single element, for all of them, and at the first step."""
    if torch.is_tensor(value) and value.shape == (1,):
        return torch.full_like(master, float(value), dtype=value.dtype, requires_grad=False)
    return torch.zeros_like(value) if torch.is_tensor(value) else type(value)()


def is_by_element(value: Any, master: torch.Tensor) -> bool:
    """Whether a state has a value for every element; else it is a number for all of them, such as the step.

    Raises:
        CheckpointError: neither.
    """
    if torch.is_tensor(value) and value.shape == master.shape and master.dim():
        return True
    if (torch.is_tensor(value) and value.numel() == 1) or isinstance(value, (int, float)):
        return False
    shape = f" {list(value.shape)}" if torch.is_tensor(value) else ""
    raise CheckpointError(
        f"an optimizer state is {type(value).__name__}{shape}, which is no value for each element and no number: what "
        "another layout would have there is not known"
    )


def hyperparameters(inner: torch.optim.Optimizer, number: int) -> dict[str, Any]:
    """Of a group, with the options that torch's own Adam has where it is another one: FSDP2 programs ask for all."""
    group = inner.param_groups[number]
    own = {key: value for key, value in group.items() if key not in ("params", "param_names") and _is_plain(value)}
    is_adam = {"betas", "eps"} <= own.keys() and not type(inner).__module__.startswith("torch.")
    return {**torch.optim.AdamW([torch.zeros(1)]).defaults, **own} if is_adam else own


def restore_hyperparameters(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Take over what a group has, too, but for how it is computed."""
    for key in group.keys() & saved.keys() - _OF_THE_PROGRAM:
        if torch.is_tensor(group[key]):
            group[key].fill_(float(saved[key]))
        else:
            group[key] = float(saved[key]) if torch.is_tensor(saved[key]) else saved[key]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if torch.is_tensor(value):
        return bool(value.numel() == 1)
    return value is None or isinstance(value, (bool, int, float, str))
