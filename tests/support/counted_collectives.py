"""Count functional collectives and their bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountedCollectives(TorchDispatchMode):
    """A mode in which ``calls`` counts collectives by name, and ``sent_bytes`` adds up the bytes of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(function).partition(".")
        name = name.partition(".")[0]
        if namespace == "_c10d_functional" and not name.startswith("_") and name != "wait_tensor":
            self.calls[name] += 1
            self.sent_bytes[name] += args[0].nbytes
        return function(*args, **(kwargs or {}))


def forward_and_backward(
    module: torch.nn.Module, inputs: torch.Tensor
) -> tuple[CountedCollectives, CountedCollectives]:
    """Return the collectives of a forward pass and those of its backward pass."""
    with CountedCollectives() as forward:
        result = module(inputs)
    with CountedCollectives() as backward:
        result.sum().backward()
    return forward, backward
