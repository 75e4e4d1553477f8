"""What optimizers and ``zero_grad()`` must know while reducers are at work."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ds_topo.ledger import Change, Make, ledger
from ds_topo.partition.arrivals import peeking
from ds_topo.reducer.torch_names import ZERO_GRAD_OF_MODULES, ZERO_GRAD_OF_OPTIMIZERS


class Watched(Protocol):
    """What reducers are told."""

    def before_zero_grad(self, parameters: Iterable[torch.Tensor]) -> None:
        """Gradients of these parameters are about to be discarded."""

    def before_optimizer_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer is about to use gradients of these parameters."""


class OptimizerWatch:
    """The one owner of what tells reducers about optimizers; in force while there are reducers."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._bindings = ExitStack()
        self._count = 0

    def enter(self, reducer: Watched) -> Callable[[], None]:
        """Tell this reducer, until the returned function is called or the reducer is gone."""
        if self._count == 0:
            for change, make in _CHANGES:
                self._bindings.callback(ledger.bind(change, make))
            self._bindings.callback(register_optimizer_step_pre_hook(_before_step).remove)
        self._count += 1
        self._watched.add(reducer)
        leave = weakref.finalize(reducer, self._leave)
        leave.atexit = False
        return leave

    def __iter__(self) -> Iterator[Watched]:
        return iter(list(self._watched))

    def _leave(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._bindings.close()


watch = OptimizerWatch()


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for reducer in watch:
        reducer.before_optimizer_step(_parameters_of(optimizer))


def _telling_reducers(parameters_of: Callable[[Any], Iterable[torch.Tensor]]) -> Make:
    def make(zero_grad: Any) -> Any:
        @wraps(zero_grad)
        def zero(owner: Any, *args: Any, **options: Any) -> None:
            with peeking():
                for reducer in watch:
                    reducer.before_zero_grad(parameters_of(owner))
                zero_grad(owner, *args, **options)

        return zero

    return make


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


_CHANGES: tuple[tuple[Change, Make], ...] = (
    (ZERO_GRAD_OF_MODULES, _telling_reducers(nn.Module.parameters)),
    (ZERO_GRAD_OF_OPTIMIZERS, _telling_reducers(_parameters_of)),
)
