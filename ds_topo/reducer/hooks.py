"""Hooks of reducers: on gradients, after everyone else's, and on optimizers and ``zero_grad()``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ds_topo.ledger import Make, Patch, ledger
from ds_topo.torch_names import ZERO_GRAD_OF_MODULES, ZERO_GRAD_OF_OPTIMIZERS

if TYPE_CHECKING:
    from typing_extensions import Self

OnGradient: TypeAlias = Callable[[object, object], None]


class GradientHooks:
    """Hooks on the autograd nodes that accumulate gradients; they run after all hooks on the parameters, as DDP's do.

    Note [Lifetime]. A node is kept alive by its users, not by its parameter: without this object the hooks are gone.
    The garbage collector does not see what a node's hook refers to, so that must not lead to the reducer or its module:
    ``on_gradient`` holds the reducer weakly. The module holds the reducer (:func:`keep_alive`) in a way that the
    collector sees, so both are freed together.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._handles: list[RemovableHandle] = []

    def add(self, parameter: nn.Parameter, on_gradient: OnGradient) -> None:
        """Call ``on_gradient`` whenever a gradient of the parameter has been accumulated."""
        node = self._nodes[id(parameter)] = get_gradient_edge(parameter).node
        self._handles.append(node.register_hook(on_gradient))

    def are_lost(self, parameter: nn.Parameter) -> bool:
        """Return True if torch has given the parameter another node, because its type or device changed."""
        return parameter.requires_grad and get_gradient_edge(parameter).node is not self._nodes[id(parameter)]

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


_ATTRIBUTE = "_ds_topo_reducer"


class _Kept:
    """A module's reference to its reducer, which is neither copied nor pickled."""

    def __init__(self, reducer: object = None) -> None:
        self.reducer = reducer

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return type(self), ()


def keep_alive(module: nn.Module, reducer: object) -> None:
    """Keep a reducer alive as long as its module."""
    vars(module)[_ATTRIBUTE] = _Kept(reducer)


def let_go(module: nn.Module) -> None:
    """Undo :func:`keep_alive`."""
    vars(module).pop(_ATTRIBUTE, None)


class OptimizerWatch:
    """Calls reducers before optimizer steps and ``zero_grad()``; its patches are in force while reducers exist.

    Reducers define ``before_optimizer_step(parameters)`` and ``before_zero_grad(parameters)``.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._bindings = ExitStack()
        self._count = 0

    def enter(self, reducer: Any) -> Callable[[], None]:
        """Call this reducer until the returned function is called or the reducer is freed."""
        if self._count == 0:
            for change, make in _CHANGES:
                self._bindings.callback(ledger.bind(change, make))
            self._bindings.callback(register_optimizer_step_pre_hook(_before_step).remove)
        self._count += 1
        self._watched.add(reducer)
        leave = weakref.finalize(reducer, self._leave)
        leave.atexit = False
        return leave

    def __iter__(self) -> Iterator[Any]:
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
            for reducer in watch:
                reducer.before_zero_grad(parameters_of(owner))
            zero_grad(owner, *args, **options)

        return zero

    return make


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


_CHANGES: tuple[tuple[Patch, Make], ...] = (
    (ZERO_GRAD_OF_MODULES, _telling_reducers(nn.Module.parameters)),
    (ZERO_GRAD_OF_OPTIMIZERS, _telling_reducers(_parameters_of)),
)
