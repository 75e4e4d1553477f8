"""Hooks that see a gradient after everyone else, and the life of a reducer beside its module's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from typing_extensions import Self

OnGradient: TypeAlias = Callable[[object, object], None]

_ATTRIBUTE = "_ds_topo_reducer"


class GradientHooks:
    """Hooks on the nodes that accumulate gradients, which run after all hooks on the parameters themselves, as DDP's.

    Note [Lifetime]. A node is kept by whoever made it its own, not by its parameter: without this object the hooks are
    gone. What a node's hook refers to is out of sight of the garbage collector, so it must not lead to the reducer or
    its module: ``on_gradient`` holds the reducer weakly. The module holds the reducer (:func:`keep_alive`), in a way
    that the collector sees; so both go together.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._handles: list[RemovableHandle] = []

    def add(self, parameters: Sequence[nn.Parameter], on_gradient: Sequence[OnGradient]) -> None:
        """Call ``on_gradient[i]`` whenever a gradient of ``parameters[i]`` has been accumulated."""
        for parameter, node, call in zip(parameters, _accumulating_nodes(parameters), on_gradient, strict=True):
            self._nodes[id(parameter)] = node
            self._handles.append(node.register_hook(call))

    def are_lost(self, parameter: nn.Parameter) -> bool:
        """Whether torch has given the parameter another node: its data has another type or device now."""
        return parameter.requires_grad and get_gradient_edge(parameter).node is not self._nodes[id(parameter)]

    def remove(self) -> None:
        """Call nothing any more. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


class _AllOf(torch.autograd.Function):
    """An operation on any number of tensors, for the graph's sake."""

    @staticmethod
    def forward(ctx: object, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0].new_empty(0)


def _accumulating_nodes(parameters: Sequence[nn.Parameter]) -> list[Node]:
    """The nodes that accumulate their gradients, of all at once: a tenth of ``get_gradient_edge``'s time for each."""
    if not parameters:
        return []
    with torch.enable_grad():
        result: torch.Tensor = _AllOf.apply(*parameters)  # type: ignore[no-untyped-call]
    assert result.grad_fn is not None
    return [node for node, _ in result.grad_fn.next_functions if node is not None]


Function = TypeVar("Function", bound=Callable[..., object])


def without_collections(function: Function) -> Function:
    """What makes so many lasting objects at once that the garbage collector would look through them all, in vain."""

    @wraps(function)
    def uninterrupted(*args: Any, **options: Any) -> object:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **options)
        finally:
            if was_on:
                gc.enable()

    return cast("Function", uninterrupted)


class _Kept:
    """What a module has of its reducer: not copied, not pickled."""

    def __init__(self, reducer: object = None) -> None:
        self.reducer = reducer

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return type(self), ()


def keep_alive(module: nn.Module, reducer: object) -> None:
    """Let a reducer live as long as its module."""
    vars(module)[_ATTRIBUTE] = _Kept(reducer)


def let_go(module: nn.Module) -> None:
    """Take that back."""
    vars(module).pop(_ATTRIBUTE, None)


def detached(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient without the graph that ``backward(create_graph=True)`` gives it."""
    return gradient.detach() if gradient.requires_grad else gradient
