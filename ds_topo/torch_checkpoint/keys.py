"""Under which keys of a checkpoint a program has put weights, optimizer states and hyperparameters.

Torch flattens nested dictionaries and joins their keys by dots. What an optimizer has is there in one of two forms:

=============================================  ========================================================================
``optim.state.layer.weight.exp_avg``           states, in both
``optim.param_groups.0.lr``, ``...0.params``   by group, with the names of its parameters: ``get_state_dict()``
``optim.param_groups.layer.weight.lr``         by parameter: with ``flatten_optimizer_state_dict=True``; torchtitan
=============================================  ========================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
"""Names of torch's own."""
MODEL, OPTIM, PROGRESS = "model", "optim", "deepspeed"
"""Ours, of which the first two are those of torch's guides."""
MODELS = ("app.model", "model", "")
"""Where programs put weights: torch's guides, others, torchtitan."""
OPTIMIZERS = ("app.optim", "optim", "app.optimizer", "optimizer")
"""The same of optimizers."""


@dataclass(frozen=True)
class Keys:
    """Where a checkpoint has what.

    >>> keys = Keys.of(["app.model.weight", "app.optim.state.weight.step", "app.optim.param_groups.0.params"])
    >>> keys.weight("weight"), keys.state("weight", "step"), keys.progress, keys.is_by_group
    ('app.model.weight', 'app.optim.state.weight.step', 'app.deepspeed', True)
    """

    model: str
    """What is before the names of weights."""
    optimizer: str
    is_by_group: bool
    """Whether hyperparameters are."""

    @classmethod
    def of(cls, found: Collection[str], model: str | None = None, optimizer: str | None = None) -> Keys:
        """The first of the usual places that there are, or those that are given."""
        models = MODELS if model is None else (model,)
        optimizers = OPTIMIZERS if optimizer is None else (optimizer,)
        first = next((place for place in models if _is_there(place, found)), models[-1])
        second = next((place for place in optimizers if _is_there(f"{_below(place)}{STATE}", found)), optimizers[-1])
        return cls(first, second, f"{_below(second)}{GROUPS}.0.{PARAMS}" in found)

    def weight(self, name: str) -> str:
        """Of a parameter or a buffer."""
        return f"{_below(self.model)}{name}"

    def state(self, name: str, key: str) -> str:
        """Of a parameter's optimizer state, such as ``exp_avg``."""
        return f"{_below(self.optimizer)}{STATE}.{name}.{key}"

    def states_of(self, name: str, found: Collection[str]) -> list[str]:
        """Which states of a parameter there are."""
        before = self.state(name, "")
        return sorted(key.removeprefix(before) for key in found if key.startswith(before))

    @property
    def progress(self) -> str:
        """Of what engines keep beside: beside the weights, where those have a key of their own."""
        parent, _, _ = self.model.rpartition(".")
        return f"{_below(parent)}{PROGRESS}"

    def hyperparameters(self, found: Collection[str], names: Collection[str]) -> Iterator[str]:
        """All keys of those that these parameters have."""
        before = f"{_below(self.optimizer)}{GROUPS}."
        wanted = tuple(f"{before}{name}." for name in names)
        for key in found:
            if key.startswith(before) and (self.is_by_group or key.startswith(wanted)):
                yield key

    def groups(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Hyperparameters, with the names of the parameters that have them, from the values of all those keys."""
        before = f"{_below(self.optimizer)}{GROUPS}."
        groups: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            if key.startswith(before):
                group, _, name = key.removeprefix(before).rpartition(".")
                groups.setdefault(group, {} if self.is_by_group else {PARAMS: [group]})[name] = value
        return list(groups.values())


def _below(place: str) -> str:
    return f"{place}." if place else ""


def _is_there(place: str, found: Collection[str]) -> bool:
    return not place or any(key.startswith(f"{place}.") for key in found)


def in_groups(groups: Collection[Mapping[str, Any]], by_parameter: bool) -> Any:
    """Hyperparameters as a state dict has them, under ``param_groups`` or flattened.

    >>> in_groups([{"lr": 0.1, "params": ["weight", "bias"]}], by_parameter=True)
    {'param_groups.weight.lr': 0.1, 'param_groups.bias.lr': 0.1}
    """
    if not by_parameter:
        return {GROUPS: [dict(group) for group in groups]}
    return {
        f"{GROUPS}.{name}.{key}": value
        for group in groups
        for name in group[PARAMS]
        for key, value in group.items()
        if key != PARAMS
    }
