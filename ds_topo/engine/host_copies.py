"""Copies in host memory of what is about to be written, so that training can go on while it is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch


def copied(value: Any) -> Any:
    """The same with tensors of its own in host memory; one for each tensor, however often it occurs.

    >>> weight = torch.zeros(2)
    >>> kept = copied({"weight": weight, "again": [weight], "step": 3})
    >>> _ = weight.add_(1)
    >>> kept["weight"], kept["again"][0] is kept["weight"], kept["step"]
    (tensor([0., 0.]), True, 3)
    """
    return _copied(value, {})


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) not in memo:
        memo[id(value)] = _one(value, memo)
    return memo[id(value)]


def _one(value: Any, memo: dict[int, Any]) -> Any:
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping) and hasattr(value, "update"):
        result = copy.copy(value)  # a state_dict has more than its entries
        result.update({key: _copied(item, memo) for key, item in value.items()})
        return result
    if type(value) in (list, tuple):
        return type(value)(_copied(item, memo) for item in value)
    return copy.deepcopy(value)
