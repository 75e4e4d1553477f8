"""Start the watch of a job if the program or the environment asks for one. Otherwise its modules are not imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from ds_topo.errors import abridged

if TYPE_CHECKING:
    from ds_topo.health.watch import Watch

ENVIRONMENT = "DS_TOPO_WATCH"


def watch_limit(given: float | None) -> float | None:
    """Return the limit in seconds, or None for no watch.

    The environment (``DS_TOPO_WATCH=60``, or ``off``) overrides the given limit.

    >>> watch_limit(20.0), watch_limit(None)
    (20.0, None)
    """
    text = os.environ.get(ENVIRONMENT, "")
    if text.lower() in ("off", "0", "no", "false"):
        return None
    try:
        limit = float(text) if text else given
    except ValueError:
        raise ValueError(f"{ENVIRONMENT}={text!r} is not a number: give seconds above 0, or off") from None
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float))):
        raise TypeError(f"watch={abridged(limit)} is not a number: give seconds above 0, or None for no watch")
    if limit is not None and not 0 < limit < float("inf"):
        raise ValueError(f"{ENVIRONMENT if text else 'watch'}={text or limit}: give seconds above 0")
    return limit


class JobWatch:
    """The watch of the job that this process has joined, if one was started: one for all programs and engines in it."""

    def __init__(self) -> None:
        self._started: Watch | None = None
        """The watch that was started last, until it stops."""

    @property
    def watch(self) -> Watch | None:
        """The watch, if it is running in the present ``torch.distributed`` world."""
        return self._started if self._started is not None and self._started.is_of_this_job else None

    def start(self, limit: float) -> Watch:
        """Return the watch of the job, and start it unless it is running."""
        from ds_topo.health.watch import Watch

        if self.watch is None:
            if self._started is not None:
                self._started.stop()
            self._started = Watch(limit)
            self._started.on_stop = self._forget
        assert self._started is not None
        return self._started

    def _forget(self) -> None:
        self._started = None

    def compare_steps(self, group: dist.ProcessGroup, taken: int) -> None:
        """Let the watch, if it is running, compare the steps that the ranks of a group have taken."""
        if (watch := self.watch) is not None:
            watch.compare_steps(group, taken)


job_watch = JobWatch()
