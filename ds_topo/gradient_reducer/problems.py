"""What users do to a reducer, its module or its gradients that cannot be reduced, in words."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

from torch import nn

from .buckets import GradientSlot
from .contributions import is_replaced
from .slots import listed


class ReducerState(enum.Enum):
    """What a reducer is doing."""

    IDLE = enum.auto()
    """No gradient of this step has arrived."""
    ACCUMULATING = enum.auto()
    """Inside ``no_sync()``: gradients stay on this rank."""
    REDUCING = enum.auto()
    """Gradients of the step's last backward arrive, and full buckets are under way."""
    FINISHING = enum.auto()
    """Inside ``finish()``."""
    DETACHED = enum.auto()
    """After ``detach()``."""


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


def surplus_gradient(slot: GradientSlot) -> RuntimeError:
    """The error for a gradient that arrives after its slot's last one."""
    if slot.expected > 1:
        return RuntimeError(
            f"parameter {slot.name!r} got more than the {slot.expected} gradients of the first step: build the reducer "
            "with static_graph=False, and let every micro-batch reach a parameter once"
        )
    return RuntimeError(
        f"parameter {slot.name!r} got a second gradient before finish(): call finish() after the last backward of a "
        "step, and run the backward of earlier micro-batches inside no_sync(); if reentrant checkpointing or several "
        "backward calls reach it more often in every step, pass static_graph=True"
    )


def missing_gradients(names: Sequence[str], whose: str) -> RuntimeError:
    """The error for parameters that took no part in a step."""
    return RuntimeError(
        f"parameters {listed(names)} got no gradient on {whose} in this step: use them, freeze them before "
        "construction, or pass find_unused_parameters=True"
    )


def find_problem(
    module: nn.Module,
    slots: Sequence[GradientSlot],
    known: Collection[int],
    frozen: Sequence[tuple[str, nn.Parameter]],
) -> str | None:
    """What has happened to module or gradients since construction that cannot be reduced, or None.

    Args:
        module: whose parameters may have changed.
        slots: the parameters that are reduced.
        known: identities of all parameters at construction.
        frozen: names and parameters that were frozen at construction.
    """
    added = [name for name, parameter in module.named_parameters() if id(parameter) not in known]
    if added:
        return f"parameters {listed(added)} were added after construction: detach() and build a new GradientReducer"
    now_frozen = [slot.name for slot in slots if not slot.arrived and not slot.parameter.requires_grad]
    if now_frozen:
        return (
            f"parameters {listed(now_frozen)} were frozen after construction: detach() and build a new GradientReducer"
        )
    thawed = [name for name, parameter in frozen if parameter.requires_grad]
    if thawed:
        return f"parameters {listed(thawed)} were unfrozen after construction: build a new GradientReducer"
    replaced = [slot.name for slot in slots if slot.is_ready and is_replaced(slot)]
    if replaced:
        return (
            f"gradients of {listed(replaced)} were replaced between backward and finish(): change them in place, "
            "or after finish()"
        )
    return None
