"""What the ranks of a group tell each other at the end of a step: used parameters, failures, preferences, the step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_topo.reducer.parameter_state import ParameterState
from ds_topo.reducer.routes import Route

_LATE = 1 << 16
"""What a rank adds to a parameter's count of ranks where a gradient came late; so there are at most 32,767 ranks."""


_STEPS = 256
"""Numbers of steps are told modulo this, so that their squares fit; ranks that are exactly so far apart are missed."""


@dataclass(frozen=True)
class Counts:
    """Over the ranks of one route's group."""

    route: Route
    unused_anywhere: list[ParameterState]
    """Parameters that not every rank has a gradient for."""
    unused_everywhere: list[ParameterState]
    """Parameters that no rank has a gradient for."""
    late_anywhere: list[ParameterState]
    """Parameters that got a gradient after they were copied in, on some ranks."""
    late_everywhere: list[ParameterState]
    """The same, on all ranks."""
    failed: int
    """Ranks that failed in ``finish()``."""
    prefer_to_defer: int
    """Ranks that would rather hold the next step's reductions back until its backward is over."""
    steps_differ: bool
    """Whether ranks are at different steps."""


class UsedParameters:
    """The sum of what each rank notes, in flight; DDP's map of globally used parameters.

    Args:
        members: the parameters of a route.
        used: for each of them, whether this rank has a gradient.
        late: indices of parameters whose gradient came late here.
        failed: whether this rank failed in ``finish()``.
        prefers_to_defer: whether it would rather hold the next step's reductions back.
        step: how many steps of the optimizer are over here.
    """

    def __init__(
        self,
        members: Sequence[ParameterState],
        used: Sequence[bool],
        late: Collection[int],
        route: Route,
        *,
        failed: bool,
        prefers_to_defer: bool,
        step: int = 0,
    ) -> None:
        route.wait_for_hook()
        self._members, self._route = members, route
        number = step % _STEPS
        notes: list[int] = [*used, failed, prefers_to_defer, number, number * number]
        if late:
            for place, state in enumerate(members):
                notes[place] += _LATE * (state.index in late)
        self._counts = torch.tensor(notes, dtype=torch.int32, device=members[0].parameter.device)
        self._work = dist.all_reduce(self._counts, group=route.group, async_op=True)
        self._event: torch.cuda.Event | None = None

    def settle(self) -> None:
        """Let the sum arrive; on a GPU without waiting for it."""
        self._work.wait()
        if self._counts.is_cuda:
            self._counts = self._counts.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def counts(self) -> Counts:
        """The sum, read."""
        if self._event is not None:
            self._event.synchronize()
        *counts, failed, prefer_to_defer, steps, squares = self._counts.tolist()
        size = self._route.size
        ranks = [(state, count % _LATE, count // _LATE) for state, count in zip(self._members, counts, strict=True)]
        return Counts(
            self._route,
            [state for state, used, _ in ranks if used < size],
            [state for state, used, _ in ranks if not used],
            [state for state, _, late in ranks if late],
            [state for state, _, late in ranks if late == size],
            failed,
            prefer_to_defer,
            steps * steps != size * squares,  # whether they have a variance
        )
