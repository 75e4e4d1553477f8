"""Make modules wait for parameters that are still being received from the ranks that own them.

Values are overwritten while their module may already be running. Modules look parameters up in a dictionary, so the
wait is in that dictionary: attributes, iteration over parameters and ``state_dict`` all read it. References that a
program keeps itself, in a list or a closure, bypass it; :func:`used_by_reference` finds those in one forward pass.
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


class Arrival:
    """The arrival of one region of parameters.

    Args:
        wait: waits for the region and returns the time of its arrival, ``time.perf_counter_ns()``.
    """

    def __init__(self, wait: Callable[[], int]) -> None:
        self._wait: Callable[[], int] | None = wait
        self.done_ns = self.waited_ns = 0
        """The time of arrival, and how long readers have waited for it."""

    def wait(self) -> None:
        """Wait for the region. Idempotent."""
        if self._wait is not None:
            started = time.perf_counter_ns()
            self.done_ns = self._wait()
            self._wait = None
            self.waited_ns = time.perf_counter_ns() - started


class Arrivals:
    """The parameters that are being received."""

    def __init__(self) -> None:
        self._awaited: dict[int, Arrival] = {}
        """Arrivals by the identity of the parameter."""
        self.read: set[int] | None = None
        """Identities of the parameters that were looked up, while :func:`used_by_reference` records them."""

    def expect(self, parameters: Iterable[nn.Parameter], arrival: Arrival) -> None:
        """Record that these parameters are about to be overwritten."""
        for parameter in parameters:
            self._awaited[id(parameter)] = arrival

    def wait_for(self, parameter: nn.Parameter | None) -> None:
        """Wait until a parameter, and with it its region, has arrived."""
        if self.read is not None:
            self.read.add(id(parameter))
        while self._awaited:  # a region that is sent on demand is awaited a second time
            arrival = self._awaited.get(id(parameter))
            if arrival is None:
                return
            self._wait_for_arrival(id(parameter), arrival)

    def wait(self) -> None:
        """Wait until all parameters have arrived."""
        while self._awaited:
            self._wait_for_arrival(*next(iter(self._awaited.items())))

    def _wait_for_arrival(self, identity: int, arrival: Arrival) -> None:
        """Wait, then forget the arrival; after an error it stays, so that later readers get the error, too."""
        arrival.wait()
        if self._awaited.get(identity) is arrival:
            del self._awaited[identity]


class AwaitingParameters(dict[str, "nn.Parameter | None"]):
    """A module's dictionary of parameters that waits for each parameter before it returns it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], arrivals: Arrivals) -> None:
        super().__init__(parameters)
        self._arrivals = arrivals

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        self._arrivals.wait_for(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter as ``dict.get`` does, after it has arrived."""
        parameter = super().get(name, default)
        if name in self:
            self._arrivals.wait_for(parameter)
        return parameter

    def items(self) -> Any:
        """Return ``dict.items``, after all parameters have arrived."""
        self._wait()
        return super().items()

    def values(self) -> Any:
        """Return ``dict.values``, after all parameters have arrived."""
        self._wait()
        return super().values()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Copy and pickle as a plain dictionary."""
        return dict, (dict(self.items()),)

    def _wait(self) -> None:
        if not _is_peeking.get():
            for parameter in super().values():
                self._arrivals.wait_for(parameter)


_is_peeking: ContextVar[bool] = ContextVar("_is_peeking", default=False)


@contextmanager
def peeking() -> Iterator[None]:
    """Iterate over parameters without waiting for their values."""
    token = _is_peeking.set(True)
    try:
        yield
    finally:
        _is_peeking.reset(token)


class _UsedParameters(TorchFunctionMode):
    """Record which of the known parameters are passed to torch's functions."""

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
    """Yield a list that is filled at the end: the parameters used without being looked up in their modules."""
    known = {id(parameter): parameter for parameter in parameters}
    result: list[nn.Parameter] = []
    arrivals.read = set()
    try:
        with _UsedParameters(known) as uses:
            yield result
        result += [known[identity] for identity in uses.found - arrivals.read]
    finally:
        arrivals.read = None
