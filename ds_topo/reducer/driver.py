"""Who decides about the steps of a reducer: the user's training loop, or an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ds_topo.reducer.options import ReductionArguments
from ds_topo.reducer.report import BucketTiming


class StepDriver(Protocol):
    """What a reducer asks of whoever drives it."""

    def options(self) -> ReductionArguments:
        """Its own settings of the reduction; the user's take precedence."""
        ...

    def is_last_backward(self) -> bool:
        """Whether gradients that arrive now are of the step's last micro-batch."""
        ...

    def prefers_to_defer(self, communication_ns: Sequence[int]) -> bool:
        """Whether the next step's reductions had better wait for the end of its backward.

        They do if all ranks of the group prefer it: ranks must not differ in this, since their backward may have
        collectives of the same group.

        Args:
            communication_ns: of the last steps, how long at least one bucket was in flight, nanoseconds.
        """
        ...

    def steps_taken(self) -> int:
        """How many steps of the optimizer are over; on all ranks the same, unless one has left one out."""
        ...

    def wait_for_parameters(self) -> None:
        """Until all that other ranks have updated are there."""
        ...

    def gathers(self) -> list[BucketTiming]:
        """How the parameters arrived that this step's forward pass used."""
        ...

    def on_detach(self) -> None:
        """The reducer is detached: put back what was bound for it."""
        ...


class TrainingLoop:
    """The user's own loop: ``no_sync()`` tells which backward is not the last one."""

    def options(self) -> ReductionArguments:
        """None."""
        return {}

    def is_last_backward(self) -> bool:
        """Any outside ``no_sync()``."""
        return True

    def prefers_to_defer(self, communication_ns: Sequence[int]) -> bool:
        """Never: nothing is known of the loop."""
        return False

    def steps_taken(self) -> int:
        """Unknown."""
        return 0

    def wait_for_parameters(self) -> None:
        """They are: every rank updates all."""

    def gathers(self) -> list[BucketTiming]:
        """None."""
        return []

    def on_detach(self) -> None:
        """Nothing is bound."""
