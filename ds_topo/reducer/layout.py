"""The layout of a reducer's buckets, and how a better one is learned in the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.buckets import GradientBucket
from ds_topo.reducer.parameter_state import ParameterState
from ds_topo.reducer.parameters import broadcast
from ds_topo.reducer.planning import BucketSizes, ParameterPlan
from ds_topo.reducer.routes import Route


class BucketLayout:
    """Which parameters share which bucket.

    At first in the reverse order of the module's parameters, from the second step on in the order in which the first
    rank's gradients became ready.

    Args:
        states: the parameters.
        routes: the route of each.
        sizes: capacities of the buckets.
    """

    def __init__(self, states: Sequence[ParameterState], routes: Sequence[Route], sizes: BucketSizes) -> None:
        self._states, self._routes = states, routes
        self._planner = ParameterPlan(states, routes, sizes)
        self.buckets: list[GradientBucket] = []
        """In the order of reduction."""
        self.arrivals: list[int] | None = []
        """Parameters as their gradients became ready in the first step; None from then on."""
        self._plan = self._planner.buckets(range(len(states) - 1, -1, -1))
        self._next_plan: list[tuple[int, ...]] | None = None
        self._lay_out()

    def learn(self, group: ProcessGroup) -> None:
        """After the first step: plan the buckets of all others; collective over ``group``."""
        if self.arrivals is None or not self._states:
            return
        last_arrivals = list(dict.fromkeys(reversed(self.arrivals)))[::-1]
        arrived = set(last_arrivals)
        order = last_arrivals + [state.index for state in reversed(self._states) if state.index not in arrived]
        for state in self._states:
            state.expected = state.expected or max(1, state.arrived)
        agreed = torch.tensor(order, device=self._states[0].parameter.device)
        broadcast([agreed], group)
        self.arrivals = None
        plan = self._planner.buckets(agreed.tolist())
        if plan != self._plan:
            self._next_plan = plan

    def renew(self) -> None:
        """Before the first gradient of a step or of its accumulation: lay out what was learned."""
        if self._next_plan is not None:
            self._plan, self._next_plan = self._next_plan, None
            self._lay_out()

    def _lay_out(self) -> None:
        """Build the buckets of the plan; gradients that are still needed move along."""
        for bucket in self.buckets:
            bucket.release()
        self.buckets = []
        for index, members in enumerate(self._plan):
            two_level = self._routes[members[0]].two_level
            multiple_of = 1 if two_level is None else two_level.inner_size
            bucket = GradientBucket(index, [self._states[member] for member in members], multiple_of)
            bucket.install()
            self.buckets.append(bucket)
