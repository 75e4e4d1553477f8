"""Let parameters arrive from the ranks that own them while the program goes on, until something reads their values.

Note [Readers]. Values of parameters in flight are overwritten at any time, so nobody may read them before they have
arrived. No reader has to be known in advance, because the parameters themselves wait:

- While a parameter is in flight, its class is :class:`InFlightParameter`. torch calls ``__torch_function__`` of that
  class for every function and method that gets the parameter, wherever a program keeps it: in a module, a list, a
  closure or a nested argument. Only questions about shape, type, gradient and the like are answered at once.
- C++ extensions read memory without asking. Before a module runs, it therefore waits for the parameters that it holds.
- Scripted modules never ask, and compiled ones would run eagerly: with them nothing may be in flight
  (:func:`unaware_of_arrivals`).
- A tensor that shares memory with parameters, such as ``parameter.data`` of an earlier step, does not wait.
  :class:`SharedMemory` notices that such tensors exist; then nothing may be in flight.

On an accelerator a wait orders the reader's stream only. A parameter therefore stays in flight, for readers on other
streams, until its values are in memory.
"""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import _disabled_torch_function_impl, _storage_Use_Count
from torch.nn.modules.module import register_module_forward_pre_hook

from ds_topo.backends import stream_key
from ds_topo.torch_names import COLLECTIVES_ASK
from ds_topo.zero.exchange import Pending

_HELD_BY = "_ds_topo_arrival"
"""The attribute of a parameter in flight that holds its arrival."""


class Arrival:
    """The arrival of one region of parameters.

    Args:
        pending: the exchange that receives the region.
        device: the device of its tensors.
        parameters: the parameters in the region whose readers wait. Those of a class of the program's own do not, so
            regions with them may not be in flight (:func:`unaware_of_arrivals`).
    """

    def __init__(self, pending: Pending, device: torch.device, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._pending, self._device = pending, device
        self._parameters: list[nn.Parameter] = []
        self._ordered: set[int] = set()
        """The streams that have waited."""
        self.done_ns = self.waited_ns = 0
        """The time of arrival, and how long the first reader has waited for it."""
        if not pending.is_done():
            self._parameters += parameters
            for parameter in self._parameters:
                _take_off(parameter, self)

    def wait(self) -> None:
        """Wait for the region: the calling thread, or on an accelerator its current stream.

        If the exchange fails, the region stays in flight, so that later readers get the error, too.
        """
        stream = stream_key(self._device)
        if stream not in self._ordered:
            started = time.perf_counter_ns()
            done_ns = self._pending.wait()
            if not self._ordered:
                self.done_ns, self.waited_ns = done_ns, time.perf_counter_ns() - started
            self._ordered.add(stream)
        if self._parameters and self._pending.is_done():
            self.land()

    def land(self) -> None:
        """Give the parameters their own class back, so that readers do not wait any more. Idempotent."""
        parameters, self._parameters = self._parameters, []
        for parameter in parameters:
            _land(parameter)

    @property
    def is_over(self) -> bool:
        """True if no parameter is in flight any more."""
        return not self._parameters


def _take_off(parameter: nn.Parameter, arrival: Arrival) -> None:
    """Let all readers of a parameter wait for an arrival."""
    vars(parameter)[_HELD_BY] = arrival
    parameter.__class__ = InFlightParameter


def _land(parameter: nn.Parameter) -> None:
    """Give a parameter its own class back."""
    vars(parameter).pop(_HELD_BY, None)
    parameter.__class__ = nn.Parameter


def _wait_for(parameter: nn.Parameter) -> None:
    arrival: Arrival | None = vars(parameter).get(_HELD_BY)
    if arrival is not None:
        arrival.wait()


_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "grad_fn", "is_sparse")
_METHODS = (
    *("size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex", "__len__"),
    *("register_hook", "register_post_accumulate_grad_hook"),
)
_DESCRIBING = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")]
    + [getattr(torch.Tensor, name) for name in _METHODS]
)
"""Functions that do not read values."""


class InFlightParameter(nn.Parameter):
    """A parameter whose readers wait for its arrival."""

    @classmethod
    @torch._disable_dynamo  # compiled code runs the function eagerly
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _DESCRIBING:
            for parameter in _in_flight_among((args, kwargs)):
                _wait_for(parameter)
        return _disabled_torch_function_impl(function, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _landed(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _landed(self):
            return self.__reduce_ex__(protocol)


@contextmanager
def _landed(parameter: nn.Parameter) -> Iterator[None]:
    """Wait for a parameter, and give it its own class while a copy is made that must not be in flight."""
    _wait_for(parameter)
    arrival: Arrival | None = vars(parameter).get(_HELD_BY)
    _land(parameter)
    try:
        yield
    finally:
        if arrival is not None and not arrival.is_over:
            _take_off(parameter, arrival)


def _in_flight_among(value: Any) -> Iterator[InFlightParameter]:
    """Yield the parameters in flight among the arguments of a function."""
    if isinstance(value, InFlightParameter):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _in_flight_among(each)
    elif isinstance(value, dict):
        yield from _in_flight_among(tuple(value.values()))


class Arrivals:
    """The regions in flight."""

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []
        self._end_hook: Callable[[], None] | None = None

    def expect(self, arrivals: Iterable[Arrival]) -> None:
        """Let modules wait for these regions before they run; earlier regions must have arrived."""
        self._arrivals = list(arrivals)
        if self._arrivals and self._end_hook is None:
            self._end_hook = register_module_forward_pre_hook(self._before_forward).remove

    def wait(self) -> None:
        """Wait until all regions have arrived."""
        for arrival in self._arrivals:
            arrival.wait()
        self._forget()

    def end(self) -> None:
        """Wait, and let nobody wait afterwards, also if an exchange has failed."""
        try:
            self.wait()
        finally:
            for arrival in self._arrivals:
                arrival.land()
            self._forget()

    @torch._disable_dynamo
    def _before_forward(self, module: nn.Module, _: object) -> None:
        for parameter in module._parameters.values():
            if isinstance(parameter, InFlightParameter):
                _wait_for(parameter)
        if all(arrival.is_over for arrival in self._arrivals):
            self._forget()

    def _forget(self) -> None:
        """Stop watching modules; on an accelerator, keep what readers on other streams still have to wait for."""
        self._arrivals = [arrival for arrival in self._arrivals if not arrival.is_over]
        if not self._arrivals and self._end_hook is not None:
            self._end_hook()
            self._end_hook = None


class SharedMemory:
    """Notices tensors that came to share the memory of parameters, such as ``parameter.data`` that a program keeps.

    Args:
        flats: the flat tensors whose views the parameters are.
    """

    def __init__(self, flats: Iterable[torch.Tensor]) -> None:
        self._flats = list(flats)
        self._known = self._users()

    def has_new_users(self) -> bool:
        """Return True if more tensors share the memory than at construction."""
        return any(map(operator.gt, self._users(), self._known))

    def _users(self) -> list[int]:
        return [_storage_Use_Count(flat.untyped_storage()._cdata) for flat in self._flats]


def unaware_of_arrivals(module: nn.Module) -> str | None:
    """Name what would read a module's parameters without a wait; None if nothing would."""
    if not COLLECTIVES_ASK:
        return f"a collective of torch {torch.__version__}"
    for name, part in module.named_modules():
        called = repr(name or type(part).__name__)
        if isinstance(part, torch.jit.ScriptModule):
            return f"the scripted module {called}"
        if part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule":
            return f"the compiled module {called}"
        for parameter in part._parameters.values():
            if parameter is not None and type(parameter) is not nn.Parameter:
                return f"the module {called}, whose parameters are of class {type(parameter).__name__},"
    return None
