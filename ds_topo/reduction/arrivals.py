"""Let parameters arrive from the ranks that own them while the program goes on, until something reads their values.

Note [Readers]. Values of parameters in flight are overwritten at any time, so nobody may read them before they have
arrived. No reader has to be known in advance:

- While a parameter is in flight, its data is a stand-in. Whoever reads the parameter without waiting, such as a
  scripted function, gets an error. In builds of torch without CUDA the stand-in is one NaN, expanded to the parameter's
  shape: readers get NaN, and those who write or ask for a pointer get an error.
- Its class is then :class:`InFlightParameter`. torch calls ``__torch_function__`` of that class for every function and
  method that gets the parameter, wherever a program keeps it: in a module, a list, a closure or a nested argument. So
  nearly all readers wait and get the right value. Only questions about shape, type, gradient and the like are answered
  at once.
- C++ extensions read memory without asking. Before a module runs, it therefore waits for the parameters that it holds.
- Scripted modules read parameters without ``__torch_function__``, and compiled ones would run eagerly. With either,
  no parameter may be in flight (:func:`unaware_of_arrivals`).
- A tensor that shares memory with parameters, such as ``parameter.data`` of an earlier step, does not wait.
  :func:`users_of` tells whether such tensors exist; then nothing may be in flight.
- A forked process has no thread that receives. The fork waits; if that fails, readers in the child get an error.

After its arrival the parameter has its own memory again, at the same address. On an accelerator a wait orders the
reader's stream only. The parameter's class therefore stays, for readers on other streams, until its values are in
memory. If an exchange fails, the stand-in stays, so no code reads a partly updated
parameter.
"""

from __future__ import annotations

import copy
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import _C, nn
from torch._C import (
    DisableTorchFunctionSubclass,
    _set_throw_on_mutable_data_ptr,
    _storage_Use_Count,
)
from torch.nn.modules.module import register_module_forward_pre_hook

from ds_topo.base.backends import stream_key, synchronize
from ds_topo.base.torch_names import COLLECTIVES_ASK
from ds_topo.reduction.exchange import Pending

_HELD_BY = "_ds_topo_arrival"
"""The attribute of a parameter in flight that holds its arrival."""


class Seat(NamedTuple):
    """A parameter that can be in flight."""

    parameter: nn.Parameter
    values: torch.Tensor
    """Its place in the flat tensor."""
    stand_in: torch.Tensor
    """What it shows while it is in flight."""


def seats_of(parameters: Iterable[nn.Parameter]) -> list[Seat]:
    """Return the seats of parameters, which must be at their places now."""
    stand_ins: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}
    seats = []
    for parameter in parameters:
        key = parameter.shape, parameter.dtype, parameter.device
        if key not in stand_ins:
            stand_ins[key] = _stand_in(parameter)
        seats.append(Seat(parameter, parameter.detach(), stand_ins[key]))
    return seats


def _stand_in(parameter: nn.Parameter) -> torch.Tensor:
    """Return a tensor without memory of its own, or of one element."""
    if _forbid_access is not None:
        stand_in = parameter.detach()
        _forbid_access(stand_in, _FORBIDDEN)  # it has the parameter's shape and strides, and no memory any more
        return stand_in
    nan = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    _set_throw_on_mutable_data_ptr(nan)  # a pointer would lead to one element, and a write would be lost
    return nan.expand(parameter.shape)


_forbid_access: Callable[[torch.Tensor, str], None] | None = getattr(_C, "_set_storage_access_error_msg", None)
"""Let every access to a tensor's values raise an error. Builds of torch without CUDA do not have it."""
_FORBIDDEN = (
    "the values of a parameter were read while they were arriving from other ranks (overlap_parameters), in a way that "
    "cannot wait for them, or their arrival has failed: call wait() of the GradientReducer before, or read "
    "parameter.detach(), which waits"
)


def hide(seats: Iterable[Seat]) -> None:
    """Let parameters show their stand-ins, until they have arrived."""
    for parameter, _, stand_in in seats:
        parameter.data = stand_in


def show(seats: Iterable[Seat]) -> None:
    """Let parameters show their own memory."""
    with DisableTorchFunctionSubclass():
        for parameter, values, _ in seats:
            parameter.data = values


class Arrival:
    """The arrival of one region of parameters, by the exchange ``pending``.

    ``seats`` are the parameters in the region, which are hidden. Parameters of a class of the program's own cannot
    wait, so regions with them may not be in flight (:func:`unaware_of_arrivals`).
    """

    def __init__(self, pending: Pending, device: torch.device, seats: Sequence[Seat] = ()) -> None:
        self._pending, self._device, self._process = pending, device, os.getpid()
        self._seats = seats
        """Those in flight."""
        self._lock = threading.RLock()  # garbage collection inside a call may read another parameter
        self._ordered: set[int] = set()
        """The streams that have waited."""
        self.done_ns = self.waited_ns = 0
        """The time of arrival, and how long the first reader has waited for it."""
        for parameter, _, _ in seats:
            vars(parameter)[_HELD_BY] = self
            parameter.__class__ = InFlightParameter
        if pending.is_done():
            self.wait()

    def wait(self) -> None:
        """Wait for the region: the calling thread, or on an accelerator its current stream.

        If the exchange fails, the region stays in flight, so that later readers get the error, too.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked while parameters of the model were in flight (overlap_parameters), so they "
                "cannot arrive here: call wait() of the GradientReducer before processes are started"
            )
        stream = stream_key(self._device)
        if stream not in self._ordered:
            started = time.perf_counter_ns()
            done_ns = self._pending.wait()
            with self._lock:
                if not self._ordered:
                    self.done_ns, self.waited_ns = done_ns, time.perf_counter_ns() - started
                    show(self._seats)
                self._ordered.add(stream)
        if self._seats and self._pending.is_done():
            self.land()

    def land(self) -> None:
        """Give the parameters their own class back, so that readers do not wait any more. Idempotent.

        Parameters for which nothing has waited, or whose exchange has failed, keep their stand-ins.
        """
        with self._lock:
            for parameter, _, _ in self._seats:
                vars(parameter).pop(_HELD_BY, None)
                parameter.__class__ = nn.Parameter
            self._seats = ()

    @property
    def is_over(self) -> bool:
        """True if no parameter is in flight any more."""
        return not self._seats


def _wait_for(parameter: nn.Parameter) -> None:
    arrival: Arrival | None = vars(parameter).get(_HELD_BY)
    if arrival is not None:
        arrival.wait()


def _land_now(parameter: nn.Parameter) -> None:
    """Wait for a parameter until it has its own class, which copies of it get."""
    arrival: Arrival | None = vars(parameter).get(_HELD_BY)
    if arrival is not None:
        arrival.wait()
        synchronize(parameter.device)  # so that the values are in memory for every stream
        arrival.land()


_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "grad_fn", "is_sparse")
_METHODS = (
    *("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "__len__"),
    *("register_hook", "register_post_accumulate_grad_hook"),
)
_DESCRIBING = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")]
    + [getattr(torch.Tensor, name) for name in _METHODS]
)
"""Functions that read neither values nor strides, which those of a stand-in are not."""


_FRAMES = 5
"""The number of frames to search: ``__torch_function__``, those of its decorator, and its caller."""


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
        if function is torch.Tensor.detach and _is_for_new_parameter():
            _land_now(args[0])
            return args[0].detach().as_subclass(nn.Parameter)  # nn.Parameter() expects the class of args[0]
        with DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _land_now(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _land_now(self)
        return self.__reduce_ex__(protocol)


def _is_for_new_parameter() -> bool:
    """Tell whether ``__torch_function__`` was called by ``nn.Parameter(...)``."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code is nn.Parameter.__new__.__code__:
            return frame.f_locals["cls"] is nn.Parameter
    return False


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
        """The regions that :meth:`expect` was given last, until all have arrived."""
        self._end_hook: Callable[[], None] | None = None
        """Removes the hook on all modules; None while there is none."""
        _under_way.add(self)

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


_under_way: weakref.WeakSet[Arrivals] = weakref.WeakSet()


def _wait_before_fork() -> None:
    """Wait for all regions, so that a forked process, such as a worker of a data loader, has the right values."""
    for arrivals in list(_under_way):
        with suppress(Exception):  # readers get the error
            arrivals.wait()


os.register_at_fork(before=_wait_before_fork)


def users_of(flats: Iterable[torch.Tensor]) -> list[int]:
    """Return how many tensors share the memory of each flat tensor, such as ``parameter.data`` that a program keeps."""
    return [_storage_Use_Count(flat.untyped_storage()._cdata) for flat in flats]


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
