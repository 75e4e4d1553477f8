"""The states of a reducer, and what one step changes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ds_topo.reducer.parameter_state import ParameterState
from ds_topo.reducer.reductions import Reduction
from ds_topo.reducer.report import StepTiming


class ReducerState(enum.Enum):
    """What a reducer is doing; the diagram is in ``reducer.py``."""

    IDLE = enum.auto()
    """No gradient of this step has arrived."""
    ACCUMULATING = enum.auto()
    """Inside ``no_sync()``: gradients stay on this rank."""
    REDUCING = enum.auto()
    """Gradients of the step's last backward arrive, and full buckets are in flight."""
    FINISHING = enum.auto()
    """Inside ``finish()``."""
    DETACHED = enum.auto()
    """After ``detach()``."""


@dataclass(eq=False)
class Step:
    """The step from its last backward to the end of ``finish()``; each step has a new one."""

    timing: StepTiming
    defers: bool = False
    """Whether full buckets wait for the end of backward."""
    next_bucket: int = 0
    """The first bucket that is not in flight."""
    in_flight: list[Reduction] = field(default_factory=list)
    late: dict[int, ParameterState] = field(default_factory=dict)
    """Parameters that got a gradient after they were copied in, by index."""
    discarded: set[int] = field(default_factory=set)
    """Parameters whose gradients ``zero_grad()`` threw away before ``finish()``, by index."""
