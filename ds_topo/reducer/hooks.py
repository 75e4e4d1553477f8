"""Hooks that see a gradient after everyone else, and the life of a reducer beside its module's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

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
        self._nodes: dict[nn.Parameter, Node] = {}
        self._handles: list[RemovableHandle] = []

    def add(self, parameter: nn.Parameter, on_gradient: OnGradient) -> None:
        """Call ``on_gradient`` whenever a gradient of ``parameter`` has been accumulated."""
        node = get_gradient_edge(parameter).node
        self._nodes[parameter] = node
        self._handles.append(node.register_hook(on_gradient))

    def are_lost(self, parameter: nn.Parameter) -> bool:
        """Whether torch has given the parameter another node: its data has another type or device now."""
        return parameter.requires_grad and get_gradient_edge(parameter).node is not self._nodes[parameter]

    def remove(self) -> None:
        """Call nothing any more. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


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
