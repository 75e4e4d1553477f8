"""Judge and end what the main thread waits in, once a rank has failed; until then a job does not import this.

:class:`BlockedCall` is what :mod:`~ds_topo.health.first_cause` uses. The watch ends a process by :func:`end_process`.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial
from typing import NoReturn

from ds_topo.base.torch_names import abort_nccl
from ds_topo.errors import listed, tell
from ds_topo.health.activity import GRACE, STILL, STORE_WAITS, Activity, Observer, Progress
from ds_topo.health.connections import bytes_moved, shut_down

EXIT_CODE = 70
"""The exit code of a rank that had to be ended, ``EX_SOFTWARE``."""
_RAISE_LIMIT = 4.0
"""The seconds within which the main thread must raise once its connections are shut down."""
_ABORT_SECONDS = 2.0
"""The seconds that NCCL has to abort before a rank is ended."""
_SHOWN_PLACES, _SHOWN_RANKS = 6, 8


class BlockedCall:
    """A call of the main thread that may wait for a rank that has failed, as another thread judges and ends it.

    Args:
        store_port: the port of the job's store.
        spared: this process's own ports of the connection on which it listens for failures.
        tick: the seconds between two looks. A longer time counts as two of these at most: this process was stopped.
    """

    def __init__(self, store_port: int, spared: Collection[int], tick: float) -> None:
        self._store_port, self._spared, self._tick = store_port, spared, tick
        bytes_elsewhere = partial(bytes_moved, {store_port, *spared})
        self.observer, self._progress = Observer(bytes_elsewhere), Progress(bytes_elsewhere)
        self.doing = Activity()
        """The activity at the last look."""
        self._looked_at = self._passed = self._ended_at = self._seconds_since_end = 0.0

    def begin(self) -> None:
        """Begin to judge another call."""
        self._ended_at = self._progress.seconds = 0.0
        self._looked_at = time.monotonic() - self._tick

    @property
    def is_at_store(self) -> bool:
        """True if it waits for the job's store."""
        return self.doing.wait is not None and self.doing.wait.call in STORE_WAITS

    def is_stuck(self, *, was_ended: bool) -> bool:
        """Look again; return whether the call cannot come back without the failed rank."""
        now = time.monotonic()
        self._passed, self._looked_at = min(now - self._looked_at, 2 * self._tick), now
        self.doing = doing = self.observer.look()
        self._progress.look(doing, self._passed)
        patience = STILL if was_ended else GRACE  # once ended, the call raises anyhow
        return doing.seconds >= patience if doing.wait is not None else self._progress.is_stuck(doing)

    def end(self, last_words: str | None) -> None:
        """End the connections that the call waits on, so that it raises.

        If it does not in time, print ``last_words`` and end the process; with None, it may go on to wait.
        """
        now = time.monotonic()
        seconds = self.doing.seconds if self.doing.wait is not None else self._progress.seconds
        if self._ended_at <= now - seconds:  # not in this wait
            self._ended_at, self._seconds_since_end = now, 0.0
            if not self.is_at_store:  # abort_nccl() may block
                threading.Thread(target=abort_nccl, name="ds_topo abort", daemon=True).start()
        else:
            self._seconds_since_end += self._passed
        if last_words is not None and self._seconds_since_end > _RAISE_LIMIT:
            why = "It waits for that rank and cannot be made to raise, so it is ended."
            tell(f"{last_words}, {self.doing}. {why}")
            end_process()
        shut_down(self._store_port if self.is_at_store else 0, self._spared)


def end_process() -> NoReturn:
    """Print all stacks, and end this process, whatever its main thread does."""
    faulthandler.dump_traceback(all_threads=True)
    # NCCL is aborted here and no earlier: calls that wait for the GPU would return, and go on with wrong results
    faulthandler.dump_traceback_later(_ABORT_SECONDS + 1, exit=True)  # abort_nccl() may hold the interpreter
    abort = threading.Thread(target=abort_nccl, daemon=True)
    abort.start()
    abort.join(_ABORT_SECONDS)
    os._exit(EXIT_CODE)


def compared(answers: Iterable[tuple[int, bool, str, str]], world_size: int) -> str:
    """Name the ranks that keep others waiting: those that do not answer, do not wait, or are in another call than most.

    Each answer is a rank, whether it waits for others, the name of its call, and where it is.

    >>> print(compared([(0, True, "step", "in step"), (1, True, "step", "in step"), (2, True, "save", "in save")], 3))
    ranks could not reach each other, and none has reported an error of its own.
    Ranks [2] are in another call than most: one was left out, or made twice.
      ranks [2]: in save
      ranks [0, 1]: in step
    """
    calls, places, waiting = dict[int, str](), dict[str, list[int]](), set[int]()
    for rank, waits, call, place in sorted(answers):
        calls[rank] = call
        places.setdefault(place, []).append(rank)
        waiting |= {rank} if waits else set()
    most, number = Counter(calls.values()).most_common(1)[0]
    silent = [rank for rank in range(world_size) if rank not in calls]
    at_work = [rank for rank in calls if rank not in waiting]
    others = [rank for rank, call in calls.items() if call != most and rank in waiting]
    said = ["ranks could not reach each other, and none has reported an error of its own."]
    if silent:
        said.append(
            f"Ranks {listed(silent, _SHOWN_RANKS)} do not answer: their processes have ended or were stopped, their "
            "hosts are cut off, or they are in a call that holds the interpreter."
        )
    if at_work and waiting:
        said.append(f"Ranks {listed(at_work, _SHOWN_RANKS)} do not wait for others: look at what they do.")
    if others and 2 * number > len(calls):
        where = f"Ranks {listed(others, _SHOWN_RANKS)} are in another call than most"
        said.append(f"{where}: one was left out, or made twice.")
    elif others:
        said.append("Ranks are in different calls: one was left out, or made twice.")
    elif not silent and not at_work:
        said.append("All ranks are in the same call: compare the places, and look at the network between them.")
    shown = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    said += [f"  ranks {listed(ranks, _SHOWN_RANKS)}: {place}" for place, ranks in shown[:_SHOWN_PLACES]]
    return "\n".join(said + [f"  and {len(shown) - _SHOWN_PLACES} more"] * (len(shown) > _SHOWN_PLACES))
