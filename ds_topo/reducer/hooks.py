"""Hook into a program's gradients, optimizers and ``zero_grad()``, and refuse what a reducer cannot reduce.

A reducer learns by hooks that a gradient has arrived, that an optimizer is about to step, and that gradients are
discarded. Uses of the module, its gradients or its reducer that cannot be reduced raise the errors below.
"""

from __future__ import annotations

import gc
import operator
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ds_topo.errors import DisagreementError, abridged, listed
from ds_topo.ledger import Make, Patch, ledger
from ds_topo.process_groups.creation import gathered
from ds_topo.reducer.buckets import is_replaced
from ds_topo.reducer.parameters import ParameterState
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


# -- uses that cannot be reduced ---------------------------------------------------------------------------------------


_RANKS_SHOWN = 8
_GRADIENT, _VIEW = operator.attrgetter("grad"), operator.attrgetter("view")


def check_module(module: object) -> None:
    """Refuse a value that is not a module, and modules whose gradients torch reduces already.

    Raises:
        TypeError: not a module.
        ValueError: torch's DDP, or a module in one.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={abridged(module)} is not a module: give a torch.nn.Module")
    if isinstance(module, DistributedDataParallel) or is_held_by(
        module, DistributedDataParallel, "require_backward_grad_sync"
    ):
        raise ValueError(
            "module is wrapped by torch's DistributedDataParallel, which reduces its gradients already: use one of them"
        )


def is_held_by(module: nn.Module, kind: type, attribute: str) -> bool:
    """Return True if an existing object holds the module as its attribute or submodule ``module``.

    Args:
        module: the module.
        kind: the class of the object.
        attribute: an attribute that only objects of this class have.
    """
    return any(
        isinstance(owner, kind) or (isinstance(owner, dict) and attribute in owner)
        for holder in gc.get_referrers(module)
        if isinstance(holder, dict) and holder.get("module") is module
        for owner in gc.get_referrers(holder)
    )


def unexpected_gradient(state: ParameterState) -> RuntimeError:
    """Return the error for a gradient that arrives after its parameter's last one."""
    if state.expected > 1:
        return RuntimeError(
            f"parameter {state.name!r} got more than the {state.expected} gradients of the first step: build the "
            "reducer with static_graph=False, and let every micro-batch reach a parameter once"
        )
    return RuntimeError(
        f"parameter {state.name!r} got a second gradient before finish(): call finish() after the last backward of a "
        "step. Run the backward of earlier micro-batches inside no_sync(), and also that of a loss which only passes "
        "through this module. Call reset() to give up a step that an exception ended. If reentrant checkpointing or "
        "several backward calls reach the parameter more often in every step, pass static_graph=True"
    )


def unreduced_gradients(name: str, call: str) -> RuntimeError:
    """Return the error for a call that would use gradients of this rank alone."""
    return RuntimeError(
        f"{call} on parameter {name!r} and others, whose gradients are not reduced: it would use this rank's own "
        "gradients before finish(); call finish() first, reset() to give the step up, or step inside no_sync() if "
        "local steps are intended"
    )


def changed_in_flight(names: Sequence[str]) -> str:
    """Return the description of gradients that were changed while they were being reduced."""
    return (
        f"gradients such as {listed(names)} were changed between backward and finish(), while they were being reduced: "
        "call clip_grad_norm_(), GradScaler.unscale_() and the like after finish()"
    )


def missing_gradients(names: Sequence[str], whose: str) -> RuntimeError:
    """Return the error for parameters without a gradient in a step."""
    return RuntimeError(
        f"parameters {listed(names)} got no gradient on {whose} in this step: use them, freeze them before "
        "construction, or pass find_unused_parameters=True"
    )


def unequal_use(names: Sequence[str], ranks: int, size: int) -> RuntimeError:
    """Return the error for parameters on a GPU that some ranks did not use, or used more often.

    Args:
        names: the parameters that got late gradients on this rank.
        ranks: the number of ranks with such parameters.
        size: the number of ranks that share gradients.
    """
    which = f"such as {listed(names)} on this rank" if names else "which the errors of those ranks name"
    return RuntimeError(
        f"on {ranks} of {size} ranks parameters, {which}, got no gradient, or more gradients than in the first step: "
        "let every rank reach the same parameters equally often in a step"
    )


def different_steps(steps: int, group: dist.ProcessGroup) -> DisagreementError:
    """Return the error for ranks at different steps; collective over the group, so that every rank names them."""
    everyone = gathered((steps, dist.get_rank(), socket.gethostname()), group)
    usual = Counter(number for number, _, _ in everyone).most_common(1)[0][0]
    others = [f"rank {rank} on {host} has taken {number}" for number, rank, host in everyone if number != usual]
    more = f"; and {len(others) - _RANKS_SHOWN} more" if len(others) > _RANKS_SHOWN else ""
    return DisagreementError(
        f"ranks that share gradients are at different steps: {'; '.join(others[:_RANKS_SHOWN])}{more}; the others have "
        f"taken {usual}. A rank has skipped or repeated step(), so its parameters are no longer those of the others: "
        "let every rank call step() equally often, and resume from a checkpoint"
    )


class Changes:
    """Detects changes of a module since construction that cannot be reduced.

    Args:
        module: the module.
        states: the served parameters.
        hooks: their hooks.
        ignored: identities of the ignored parameters.
        may_miss: True if parameters may have no gradient, and so may be frozen for a while.
        remedy: what to do about parameters that were unfrozen.
    """

    def __init__(
        self,
        module: nn.Module,
        states: Sequence[ParameterState],
        hooks: GradientHooks,
        ignored: Collection[int],
        may_miss: bool,
        remedy: str,
    ) -> None:
        self._module, self._states, self._hooks, self._may_miss = module, states, hooks, may_miss
        self._remedy = remedy
        self._ignored = ignored
        self._parameters = [state.parameter for state in states]
        self._are_plain = not any(state.is_sparse or state.is_apart for state in states)
        named = list(self._named())
        self._known = {name: id(parameter) for name, parameter in named}
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._note_parts()

    def _note_parts(self) -> None:
        """Record the parameters and submodules of every part of the module."""
        self._holders: list[dict[str, Any]] = []
        for part in self._module.modules():
            self._holders += part._parameters, part._modules
        self._held = [dict(holder) for holder in self._holders]
        self._single = [
            (holder, name, held)
            for holder in self._holders
            for name, held in holder.items()
            if isinstance(held, torch.Tensor) and held.numel() == 1
        ]
        """Parameters of one element, which ``==`` compares by value."""

    def _holds_the_same(self) -> bool:
        """Return True if every part holds the objects that were recorded.

        The first comparison is one call in C, and compares equal objects by identity alone. Torch raises if it
        compares two tensors of several elements.
        """
        try:
            same = self._holders == self._held
        except RuntimeError:
            return False
        return same and all(holder[name] is held for holder, name, held in self._single)

    def problem(self, absent: Sequence[ParameterState]) -> str | None:
        """Return a description of changed parameters, or of replaced gradients; None if there are none.

        Args:
            absent: the parameters without a gradient in the last micro-batch.
        """
        return self._changed_parameters(absent) or self._replaced_gradients()

    def _changed_parameters(self, absent: Sequence[ParameterState]) -> str | None:
        if not self._holds_the_same():
            # Listing parameters by name takes longer than this comparison.
            named = dict(self._named())
            new = [name for name, parameter in named.items() if self._known.get(name) != id(parameter)]
            new = [name for name in new if id(named[name]) not in self._known.values()]
            for names, how in (
                ([name for name in new if name in self._known], "replaced"),
                (new, "added"),
                ([name for name in self._known if name not in named], "removed"),
            ):
                if names:
                    return _changed(names, how)
            self._note_parts()
        lost = [state for state in absent if self._hooks.are_lost(state.parameter)]
        if lost:
            for state in lost:
                state.note_type()  # so that the step can still be ended
            return _changed([state.name for state in lost], "moved or cast")
        frozen = [state.name for state in absent if not state.parameter.requires_grad]
        if frozen and not self._may_miss:
            return _changed(frozen, "frozen")
        unfrozen = [name for name, parameter in self._frozen if parameter.requires_grad]
        return _changed(unfrozen, "unfrozen", self._remedy) if unfrozen else None

    def _replaced_gradients(self) -> str | None:
        gradients, views = map(_GRADIENT, self._parameters), map(_VIEW, self._states)
        if self._are_plain and all(map(operator.is_, gradients, views)):  # one pass in C, for the usual case
            return None
        replaced = [state.name for state in self._states if state.is_copied_in and is_replaced(state)]
        if replaced:
            return (
                f"gradients of {listed(replaced)} were replaced between backward and finish(): change them in place, "
                "or after finish()"
            )
        return None

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if id(parameter) not in self._ignored
        )


REBUILD = "detach() and build a new GradientReducer"


def _changed(names: Sequence[str], how: str, remedy: str = REBUILD) -> str:
    return f"parameters {listed(names)} were {how} after construction: {remedy}"
