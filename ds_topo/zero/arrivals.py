"""Let parameters arrive from the ranks that own them while the program goes on, until something reads their values.

Note [Readers]. Values of parameters in flight are overwritten at any time, so nobody may read them before they have
arrived. No reader has to be known in advance, because the parameters themselves wait:

- While a parameter is in flight, its class is :class:`InFlightParameter`. torch calls ``__torch_function__`` of that
  class for every function and method that gets the parameter, wherever a program keeps it: in a module, a list, a
  closure or a nested argument. Only questions about shape, type, gradient and the like are answered at once.
- C++ extensions, and torch's own compiled code, read memory without asking. Before a module runs, it waits for the
  parameters that it holds. Scripted and compiled modules are refused (:func:`unaware_of_arrivals`).
- A tensor that shares memory with parameters, such as ``parameter.data`` of an earlier step, does not wait.
  :class:`SharedMemory` notices that such tensors exist; then nothing may be in flight.

On an accelerator a wait orders the reader's stream only. A parameter therefore stays in flight, for readers on other
streams, until its values are in memory.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ds_topo.backends import stream_key
from ds_topo.torch_names import storage_users
from ds_topo.zero.exchange import Pending

_HELD_BY = "_ds_topo_arrival"
"""The attribute of a tensor in flight that holds its arrival."""


class Arrival:
    """The arrival of one region of parameters.

    Args:
        pending: the exchange that receives the region.
        device: the device of its tensors.
        tensors: the parameters in the region, and other tensors that share their memory, whose readers wait.
    """

    def __init__(self, pending: Pending, device: torch.device, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._pending, self._device = pending, device
        self._tensors: list[torch.Tensor] = []
        self._ordered: set[int] = set()
        """The streams that have waited."""
        self.done_ns = self.waited_ns = 0
        """The time of arrival, and how long the first reader has waited for it."""
        if not pending.is_done():
            self._tensors += [tensor for tensor in tensors if type(tensor) in _IN_FLIGHT]
            for tensor in self._tensors:
                _take_off(tensor, self)

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
        if self._tensors and self._pending.is_done():
            self.land()

    def land(self) -> None:
        """Give the tensors their own classes back, so that readers do not wait any more. Idempotent."""
        tensors, self._tensors = self._tensors, []
        for tensor in tensors:
            _land(tensor)

    @property
    def is_over(self) -> bool:
        """True if no tensor is in flight any more."""
        return not self._tensors


def _take_off(tensor: torch.Tensor, arrival: Arrival) -> None:
    """Let all readers of a tensor wait for an arrival."""
    vars(tensor)[_HELD_BY] = arrival
    tensor.__class__ = _IN_FLIGHT[type(tensor)]


def _land(tensor: torch.Tensor) -> None:
    """Give a tensor its own class back."""
    vars(tensor).pop(_HELD_BY, None)
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor


def _wait_for(tensor: torch.Tensor) -> None:
    arrival: Arrival | None = vars(tensor).get(_HELD_BY)
    if arrival is None:
        _land(tensor)  # a copy that kept the class
    else:
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


class _InFlight:
    """A tensor whose readers wait for its arrival."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _DESCRIBING:
            for tensor in _tensors_in((args, kwargs)):
                _wait_for(tensor)
        return torch._C._disabled_torch_function_impl(function, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _landed(self):  # type: ignore[arg-type]
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _landed(self) as tensor:  # type: ignore[arg-type]
            return tensor.__reduce_ex__(protocol)


class InFlightParameter(_InFlight, nn.Parameter):
    """A parameter in flight."""


class InFlightTensor(_InFlight, torch.Tensor):
    """A tensor in flight that is not a parameter, such as DeepSpeed's views of parameters."""


_IN_FLIGHT: dict[type[torch.Tensor], type[torch.Tensor]] = {
    nn.Parameter: InFlightParameter,
    torch.Tensor: InFlightTensor,
}


@contextmanager
def _landed(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Wait for a tensor, and give it its own class while a copy is made that must not be in flight."""
    _wait_for(tensor)
    arrival: Arrival | None = vars(tensor).get(_HELD_BY)
    _land(tensor)
    try:
        yield tensor
    finally:
        if arrival is not None and not arrival.is_over:
            _take_off(tensor, arrival)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in flight among the arguments of a function."""
    if isinstance(value, _InFlight):
        yield value  # type: ignore[misc]
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))


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

    def _before_forward(self, module: nn.Module, _: object) -> None:
        for parameter in module._parameters.values():
            if isinstance(parameter, _InFlight):
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
        self._known = [storage_users(flat) for flat in self._flats]

    def has_new_users(self) -> bool:
        """Return True if more tensors share the memory than at construction."""
        return any(storage_users(flat) > known for flat, known in zip(self._flats, self._known, strict=True))


def unaware_of_arrivals(module: nn.Module) -> str | None:
    """Name a part of a module whose code reads parameters without torch's Python functions; None if there is none."""
    for name, part in module.named_modules():
        if isinstance(part, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            return f"the scripted module {name or type(part).__name__!r}"
        if part._compiled_call_impl is not None or isinstance(part, torch._dynamo.OptimizedModule):
            return f"the compiled module {name or type(part).__name__!r}"
    return None
