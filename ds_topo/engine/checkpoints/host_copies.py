"""Copies in host memory of what is about to be written, so that training can go on while it is."""

from __future__ import annotations

import copy
import math
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

_LARGE = 1 << 20
"""Bytes from which on memory is used again: fresh memory costs more than to copy into it, page by page."""


class HostMemory:
    """Memory of the copies of one save, which the next one takes over.

    Args:
        former: of the save before; what it had and this one does not need is let go.
    """

    def __init__(self, former: HostMemory | None = None) -> None:
        self._former = {} if former is None else former._free
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a copy: what is in it is not defined."""
        known = self._former.get((tensor.dtype, tensor.numel()))
        flat = known.pop() if known else torch.empty(tensor.numel(), dtype=tensor.dtype)
        return flat.view(tensor.shape)

    def give_back(self, copies: list[torch.Tensor]) -> None:
        """What has been written, for the next save."""
        for one in copies:
            self._free.setdefault((one.dtype, one.numel()), []).append(one.view(-1))


class Copies:
    """Of the content of one file.

    >>> weight = torch.zeros(2)
    >>> kept = Copies(HostMemory()).of({"weight": weight, "again": [weight], "step": 3})
    >>> _ = weight.add_(1)
    >>> kept["weight"], kept["again"][0] is kept["weight"], kept["step"]
    (tensor([0., 0.]), True, 3)
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._memo: dict[int, Any] = {}
        self._large: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        """The same with tensors of its own in host memory; one for each tensor, however often it occurs."""
        if id(value) not in self._memo:
            self._memo[id(value)] = self._one(value)
        return self._memo[id(value)]

    def give_back(self) -> None:
        """They are written."""
        self._memo.clear()
        self._memory.give_back(self._large)
        self._large = []

    def _one(self, value: Any) -> Any:
        if torch.is_tensor(value):
            return self._tensor(value.detach())
        if isinstance(value, MutableMapping):
            result = copy.copy(value)  # a state_dict has more than its entries
            for key, item in value.items():  # by update() a Counter would add them
                result[key] = self.of(item)
            return result
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        return copy.deepcopy(value)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.layout != torch.strided or math.prod(value.shape) * value.itemsize < _LARGE:
            return value.to("cpu", copy=True)
        self._large.append(copied := self._memory.like(value))
        return copied.copy_(value)


def memory_of(engine: Any) -> HostMemory:
    """For the next save of an engine, with what its last one had."""
    _memories[engine] = memory = HostMemory(_memories.get(engine))
    return memory


_memories: WeakKeyDictionary[Any, HostMemory] = WeakKeyDictionary()
