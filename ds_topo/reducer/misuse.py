"""What people do to a reducer, its module or its gradients that cannot be reduced, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ds_topo.reducer.copy_in import is_replaced
from ds_topo.reducer.parameter_state import COPIED_IN, ParameterState
from ds_topo.reducer.parameters import listed
from ds_topo.reducer.step import ReducerState

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
        "step, and run the backward of earlier micro-batches inside no_sync(); if reentrant checkpointing or several "
        "backward calls reach it more often in every step, pass static_graph=True"
    )


def missing_gradients(names: Sequence[str], whose: str) -> RuntimeError:
    """The error for parameters that took no part in a step."""
    return RuntimeError(
        f"parameters {listed(names)} got no gradient on {whose} in this step: use them, freeze them before "
        "construction, or pass find_unused_parameters=True"
    )


class Changes:
    """Notices what has happened to a module since construction that cannot be reduced."""

    def __init__(self, module: nn.Module, states: Sequence[ParameterState]) -> None:
        self._module, self._states = module, states
        self._parts = list(module.modules())
        self._size = self._count()
        self._known = {id(parameter) for parameter in module.parameters()}
        self._frozen = [
            (name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad
        ]

    def problem(self) -> str | None:
        """What has changed in parameters, or in gradients that are in their buckets; None if nothing has."""
        if self._count() != self._size:
            named = self._module.named_parameters()
            added = [name for name, parameter in named if id(parameter) not in self._known]
            if added:
                return _changed(added, "added")
        frozen = [state.name for state in self._states if not state.arrived and not state.parameter.requires_grad]
        if frozen:
            return _changed(frozen, "frozen")
        unfrozen = [name for name, parameter in self._frozen if parameter.requires_grad]
        if unfrozen:
            return _changed(unfrozen, "unfrozen")
        copied_in = (state for state in self._states if state.contribution is COPIED_IN)
        replaced = [state.name for state in copied_in if is_replaced(state)]
        if replaced:
            return (
                f"gradients of {listed(replaced)} were replaced between backward and finish(): change them in place, "
                "or after finish()"
            )
        return None

    def _count(self) -> int:
        """How many parameters and parts the module's parts have; cheaper than listing them."""
        return sum(len(part._parameters) + len(part._modules) for part in self._parts)


def _changed(names: Sequence[str], how: str) -> str:
    return f"parameters {listed(names)} were {how} after construction: detach() and build a new GradientReducer"
