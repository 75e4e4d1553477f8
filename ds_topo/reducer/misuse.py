"""What people do to a reducer, its module or its gradients that cannot be reduced, in words."""

from __future__ import annotations

import gc
import operator
import socket
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo.errors import DisagreementError, abridged, listed
from ds_topo.partition.arrivals import peeking
from ds_topo.reducer.copy_in import is_replaced
from ds_topo.reducer.hooks import GradientHooks
from ds_topo.reducer.parameter_state import COPIED_IN, ParameterState
from ds_topo.reducer.step import ReducerState

SHOWN = 8
"""So many ranks are named in a message."""


def check_module(module: object) -> None:
    """Refuse what is no module, and modules whose gradients torch reduces already.

    Raises:
        TypeError: not a module.
        ValueError: torch's DDP, or a module in one.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={abridged(module)}: give a torch.nn.Module")
    if isinstance(module, DistributedDataParallel) or _is_in_ddp(module):
        raise ValueError(
            "module is wrapped by torch's DistributedDataParallel, which reduces its gradients already: use one of them"
        )


def _is_in_ddp(module: nn.Module) -> bool:
    """Whether a DDP that exists holds the module; whatever holds it does so in its dictionary of submodules."""
    return any(
        isinstance(owner, DistributedDataParallel)
        or (isinstance(owner, dict) and "require_backward_grad_sync" in owner)
        for holder in gc.get_referrers(module)
        if isinstance(holder, dict) and holder.get("module") is module
        for owner in gc.get_referrers(holder)
    )


_REMEDY = {
    ReducerState.IDLE: "no gradient arrived since the last finish(); call it once per step, after a backward outside "
    "no_sync()",
    ReducerState.ACCUMULATING: "leave no_sync() first; the last micro-batch's backward belongs outside",
    ReducerState.REDUCING: "call finish() after the last backward of a step",
    ReducerState.FINISHING: "finish() is running",
    ReducerState.DETACHED: "it was detached; build a new GradientReducer",
}


def wrong_moment(call: str, state: ReducerState) -> RuntimeError:
    """The error for a call that does not belong into this state."""
    return RuntimeError(f"{call} while {state.name}: {_REMEDY[state]}")


def unexpected_gradient(state: ParameterState) -> RuntimeError:
    """The error for a gradient that arrives after its parameter's last one."""
    if state.expected > 1:
        return RuntimeError(
            f"parameter {state.name!r} got more than the {state.expected} gradients of the first step: build the "
            "reducer with static_graph=False, and let every micro-batch reach a parameter once"
        )
    return RuntimeError(
        f"parameter {state.name!r} got a second gradient before finish(): call finish() after the last backward of a "
        "step, and run the backward of earlier micro-batches inside no_sync(), and that of a loss which only passes "
        "through this module; call reset() to give up a step that an exception ended; if reentrant checkpointing or "
        "several backward calls reach it more often in every step, pass static_graph=True"
    )


def unreduced_gradients(name: str) -> RuntimeError:
    """The error for an optimizer that would use gradients of this rank alone."""
    return RuntimeError(
        f"optimizer.step() on parameter {name!r} and others, whose gradients are not reduced: it would step on this "
        "rank's own gradients before finish(); call finish() first, reset() to give the step up, or step inside "
        "no_sync() where local steps are meant"
    )


def missing_gradients(names: Sequence[str], whose: str) -> RuntimeError:
    """The error for parameters that took no part in a step."""
    return RuntimeError(
        f"parameters {listed(names)} got no gradient on {whose} in this step: use them, freeze them before "
        "construction, or pass find_unused_parameters=True"
    )


def other_steps(steps: int, group: dist.ProcessGroup) -> DisagreementError:
    """Ranks that are at different steps, as all of the group see; collective over it."""
    everyone: list[tuple[int, int, str]] = [(0, 0, "")] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (steps, dist.get_rank(), socket.gethostname()), group=group)
    usual = Counter(number for number, _, _ in everyone).most_common(1)[0][0]
    others = [f"rank {rank} on {host} has taken {number}" for number, rank, host in everyone if number != usual]
    more = f"; and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    return DisagreementError(
        f"ranks that share gradients are at different steps: {'; '.join(others[:SHOWN])}{more}; the others have taken "
        f"{usual}. A rank has left out or repeated step(): its parameters are no longer those of the others"
    )


def unequal_repetition(names: Sequence[str]) -> RuntimeError:
    """The error for parameters that a later step reached more often on some ranks of a GPU group than on others."""
    return RuntimeError(
        f"parameters {listed(names)} got more gradients than in the first step, on some ranks only: let every rank "
        "reach a parameter equally often in a step"
    )


class Changes:
    """Notices what has happened to a module since construction that cannot be reduced.

    Args:
        module: the module.
        states: the parameters that are served.
        hooks: their hooks.
        ignored: identities of the parameters that are left alone.
        may_miss: whether parameters may be without a gradient, and so frozen for a while.
    """

    def __init__(
        self,
        module: nn.Module,
        states: Sequence[ParameterState],
        hooks: GradientHooks,
        ignored: Collection[int],
        may_miss: bool,
    ) -> None:
        self._module, self._states, self._hooks, self._may_miss = module, states, hooks, may_miss
        self._ignored = ignored
        named = list(self._named())
        self._known = {name: id(parameter) for name, parameter in named}
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._note_parts()

    def _note_parts(self) -> None:
        """Every part of the module: its parameters, buffers aside, and its own parts."""
        self._parts = list(self._module.modules())
        self._held = self._held_now()

    def _held_now(self) -> list[nn.Parameter | nn.Module | None]:
        holders = [(part._parameters, part._modules) for part in self._parts]
        return list(chain.from_iterable([holder.values() for pair in holders for holder in pair]))

    def _has_same_parts(self) -> bool:
        """Whether every part still has the same ones; cheaper than listing parameters by name."""
        now = self._held_now()
        return len(now) == len(self._held) and all(map(operator.is_, now, self._held))

    def problem(self) -> str | None:
        """What has changed in parameters, or in gradients that are in their buckets; None if nothing has."""
        with peeking():
            return self._problem()

    def _problem(self) -> str | None:
        if not self._has_same_parts():
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
        absent = [state for state in self._states if not state.arrived]
        lost = [state for state in absent if self._hooks.are_lost(state.parameter)]
        if lost:
            for state in lost:
                state.note_type()  # the step is ended as well as can be
            return _changed([state.name for state in lost], "moved or cast")
        frozen = [state.name for state in absent if not state.parameter.requires_grad]
        if frozen and not self._may_miss:
            return _changed(frozen, "frozen")
        unfrozen = [name for name, parameter in self._frozen if parameter.requires_grad]
        if unfrozen:
            return _changed(unfrozen, "unfrozen")
        replaced = [
            state.name
            for state in self._states
            if state.contribution is COPIED_IN and state.parameter.grad is not state.view and is_replaced(state)
        ]
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


def _changed(names: Sequence[str], how: str) -> str:
    return f"parameters {listed(names)} were {how} after construction: detach() and build a new GradientReducer"
