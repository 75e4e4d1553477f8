"""Parameters on their way from the ranks that own them: whoever reads one waits for its region.

Values are overwritten while their module may already be at work. Modules look parameters up in a dictionary, so that is
where the wait is: attributes, iteration over parameters and ``state_dict`` all go through it. What a program keeps
itself, in a list or a closure, does not; :func:`used_by_reference` finds that out in one forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ds_topo.partition.exchange import Awaited


class Arrivals:
    """Which parameters are on their way."""

    def __init__(self) -> None:
        self._awaited: dict[int, Arrival] = {}
        """By the parameter's identity."""
        self.read: set[int] | None = None
        """Parameters that have been looked up, while someone wants to know."""

    def expect(self, parameters: Iterable[nn.Parameter], arrival: Arrival) -> None:
        """These parameters are about to be overwritten."""
        for parameter in parameters:
            self._awaited[id(parameter)] = arrival

    def wait_for(self, parameter: nn.Parameter | None) -> None:
        """Until a parameter has arrived; others of its region are then there, too."""
        if self.read is not None:
            self.read.add(id(parameter))
        while self._awaited:  # what is sent on demand is awaited a second time
            arrival = self._awaited.get(id(parameter))
            if arrival is None:
                return
            self._wait_for_arrival(id(parameter), arrival)

    def wait(self) -> None:
        """Until all are there."""
        while self._awaited:
            self._wait_for_arrival(*next(iter(self._awaited.items())))

    def _wait_for_arrival(self, identity: int, arrival: Arrival) -> None:
        """Forget it only when it is there: whoever reads after an error gets the error, too."""
        arrival.wait()
        if self._awaited.get(identity) is arrival:
            del self._awaited[identity]


class Arrival:
    """One region on its way; ``waited_ns`` is how long readers have waited for it."""

    def __init__(self, pending: Awaited) -> None:
        self._pending: Awaited | None = pending
        self.done_ns = self.waited_ns = 0

    def wait(self) -> None:
        """Until it is there. Idempotent."""
        if self._pending is not None:
            started = time.perf_counter_ns()
            self.done_ns = self._pending.wait()
            self._pending = None
            self.waited_ns = time.perf_counter_ns() - started


class AwaitingParameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters by name, each of which arrives before it is handed out."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], arrivals: Arrivals) -> None:
        super().__init__(parameters)
        self._arrivals = arrivals

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        self._arrivals.wait_for(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """As a dictionary's."""
        parameter = super().get(name, default)
        if name in self:
            self._arrivals.wait_for(parameter)
        return parameter

    def items(self) -> Any:
        """As a dictionary's."""
        self._wait()
        return super().items()

    def values(self) -> Any:
        """As a dictionary's."""
        self._wait()
        return super().values()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Copies are plain dictionaries."""
        return dict, (dict(self.items()),)

    def _wait(self) -> None:
        if not _is_peeking.get():
            for parameter in super().values():
                self._arrivals.wait_for(parameter)


_is_peeking: ContextVar[bool] = ContextVar("_is_peeking", default=False)


@contextmanager
def peeking() -> Iterator[None]:
    """Look through parameters without waiting for their values."""
    token = _is_peeking.set(True)
    try:
        yield
    finally:
        _is_peeking.reset(token)


class _Uses(TorchFunctionMode):
    """Which parameters torch's functions get."""

    def __init__(self, known: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        self._known, self.found = known, set[int]()

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: Iterable[Any] = (), kwargs: Any = None
    ) -> Any:
        for argument in args:
            for each in argument if isinstance(argument, (list, tuple)) else (argument,):
                if isinstance(each, torch.Tensor) and id(each) in self._known:
                    self.found.add(id(each))
        return function(*args, **(kwargs or {}))


@contextmanager
def used_by_reference(parameters: Iterable[nn.Parameter], arrivals: Arrivals) -> Iterator[list[nn.Parameter]]:
    """In the end, the parameters that were used without being looked up in their modules."""
    known = {id(parameter): parameter for parameter in parameters}
    result: list[nn.Parameter] = []
    arrivals.read = set()
    uses = _Uses(known)
    try:
        with uses:
            yield result
        result += [known[identity] for identity in uses.found - arrivals.read]
    finally:
        arrivals.read = None
