"""What the ranks of a group tell each other at the end of a step: used parameters, failures, preferences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_topo.reducer.parameter_state import ParameterState
from ds_topo.reducer.routes import Route


@dataclass(frozen=True)
class Counts:
    """Over the ranks of one route's group."""

    route: Route
    unused_anywhere: list[ParameterState]
    """Parameters that not every rank has a gradient for."""
    unused_everywhere: list[ParameterState]
    """Parameters that no rank has a gradient for."""
    failed: int
    """Ranks that failed in ``finish()``."""
    prefer_to_defer: int
    """Ranks that would rather hold the next step's reductions back until its backward is over."""


class UsedParameters:
    """The sum of what each rank notes, in flight; DDP's map of globally used parameters."""

    def __init__(
        self,
        members: Sequence[ParameterState],
        used: Sequence[bool],
        route: Route,
        failed: bool,
        prefers_to_defer: bool,
    ) -> None:
        route.wait_for_hook()
        self._members, self._route = members, route
        notes = [*used, failed, prefers_to_defer]
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
        *used, failed, prefer_to_defer = self._counts.tolist()
        size = self._route.size
        return Counts(
            self._route,
            [state for state, ranks in zip(self._members, used, strict=True) if ranks < size],
            [state for state, ranks in zip(self._members, used, strict=True) if not ranks],
            failed,
            prefer_to_defer,
        )
