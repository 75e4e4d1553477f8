"""Let all ranks know that one of them has failed, also without the watch, and end calls that wait for it.

Calls in which ranks wait for each other are *guarded*: the construction of engines and pipelines, their steps and
evaluations, and saving and loading. If an exception leaves such a call, the rank posts it to the job's store as the
*first cause*, unless another rank was first. On each rank one thread waits for a post, on a connection of its own: the
store's server answers when there is one, so nothing is polled and a step costs nothing.

A failure alone ends nothing. The rank may handle its error and go on, and all ranks may have raised the same one. The
wait of another rank is ended if three things are true: a rank that takes part in the same guarded call has posted; that
rank has not begun another guarded call since; and this rank's main thread has waited in one place of the call for
``GRACE`` seconds after the post. Gloo's connections are then shut down (those
to the store, if it waits for the store), and communicators that can abort are aborted. The guard turns whatever the
call raises, or returns, into a :class:`~ds_topo.errors.FailedRankError` that names the first cause. A main thread that
cannot be made to raise is ended, with a dump of all stacks.

A rank that ends its program or destroys its grids without an error leaves a note in the store, for ranks that then
cannot reach it: most likely they take more steps than it did.

While the watch is on, it alone reports. The thread makes calls of the store, so it does not help if the process that
serves the store stops: the watch does.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist

from ds_topo.base.torch_names import Store, abort_nccl, clone, communicates, default_store, served_at, set_several
from ds_topo.errors import EndOfSamplesError, FailedRankError, tell
from ds_topo.health.activity import GRACE, STILL, STORE_WAITS, Observer, Progress
from ds_topo.health.heartbeat import named
from ds_topo.health.watch import (
    bytes_moved,
    chain_of,
    end_process,
    is_of_transport,
    job_watch,
    ports_towards,
    shut_down,
)
from ds_topo.launch.council import linger, within
from ds_topo.launch.launchers import COORDINATE

ENVIRONMENT = "DS_TOPO_FIRST_CAUSE"
_TICK = 0.5
"""The seconds between two looks at the main thread after a failure."""
_RAISE_LIMIT = 4.0
"""The seconds within which the main thread must raise once its connections are shut down."""
_RANKS_PER_TICK = 4096
"""Larger jobs look less often, to spare the store."""
_STORE_LIMIT = timedelta(seconds=5)
"""The longest time for requests to the store by the main thread."""
_SECONDS_BETWEEN_ATTEMPTS = 60.0
"""The time before a store that did not answer is asked again, so that calls are not slow meanwhile."""
_CAUSE_LIMIT = 2.0
"""The seconds for which a rank that could not reach another one waits for the first cause."""
_LINGER = timedelta(seconds=1.5)
"""The seconds for which a failed process that serves the store waits for the others to read why."""
_FOREVER = timedelta(days=7)
_LISTENERS = "ds_topo/first_cause/listeners"
"""The key that counts the ranks whose thread runs."""
_LEFT = "ds_topo/first_cause/left"
"""The key of the first rank that has ended its program, or destroyed its grids, without an error."""
_SHOWN = 2000
"""The most characters of an error that other ranks show."""


class FirstCause(NamedTuple):
    """The failure that other ranks name."""

    rank: int
    who: str
    """The rank, its coordinate and its host."""
    call: str
    error: str
    has_left: bool = True
    """False while the rank still takes part in the call, for example in the decision about a checkpoint."""

    def __str__(self) -> str:
        return f"{self.who} failed in {self.call}: {self.error}"


@dataclass(eq=False, slots=True)
class GuardedCall:
    """A guarded call of the main thread."""

    name: str
    members: Sequence[int]
    steps: int | None
    cause: FirstCause | None = None
    """The failure for which this call was ended."""
    has_posted: bool = False

    def __str__(self) -> str:
        if self.steps is None:
            return self.name
        return f"{self.name} after {self.steps} step{'s' * (self.steps != 1)}"


class FailureListener:
    """The thread that waits for the first cause of a job, on its own connection to the job's store."""

    def __init__(self, store: Store, current: Callable[[], GuardedCall | None]) -> None:
        place = served_at(store)
        assert place is not None
        self._job_store, self._place, self._current = store, place, current
        self._pid, self.rank, self._world_size = os.getpid(), dist.get_rank(), dist.get_world_size()
        self._tick = _TICK * max(1.0, self._world_size / _RANKS_PER_TICK)
        self._serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._number = 0
        """The number of the next post: those before were withdrawn."""
        self.known: FirstCause | None = None
        """The first cause, until it is withdrawn."""
        self.has_news = threading.Event()
        """Set when a first cause is known, or the connection is lost."""
        self.calls = 0
        """The number of guarded calls that the main thread has begun."""
        self._calls_at_post = -1
        self._stopping = threading.Event()
        self._reported = -1
        """The id of the error that this rank has posted last."""
        self._own = -1
        """The number of this rank's last post, which the others may not have read yet."""
        self._judged: GuardedCall | None = None
        self._ended_at = self._seconds_since_end = 0.0
        self._who = named(self.rank, socket.gethostname(), os.environ.get(COORDINATE, ""))
        self._has_failed = False
        """True if an exception ends this process."""
        before = ports_towards(place[1])
        self._connection = within(_STORE_LIMIT, "another connection to the store", lambda: clone(store))
        self._ports = ports_towards(place[1]) - before
        self._connection.add(_LISTENERS, 1)
        self._connection.compare_set(_LEFT, self._departure, "")
        bytes_elsewhere = partial(bytes_moved, {place[1], *self._ports})
        self._observer, self._progress = Observer(bytes_elsewhere), Progress(bytes_elsewhere)
        self._thread = threading.Thread(target=self._run, name="ds_topo first cause", daemon=True)
        self._thread.start()
        self._hook_before, self._hook = sys.excepthook, self._on_exception
        sys.excepthook = self._hook
        atexit.register(self.stop, is_end=True)

    @property
    def is_of_this_job(self) -> bool:
        """Return whether the thread listens to the present ``torch.distributed`` world, in this process."""
        try:
            return os.getpid() == self._pid and default_store() is self._job_store and not self._stopping.is_set()
        except ValueError:  # torch.distributed was destroyed
            return False

    def stop(self, is_end: bool = False) -> None:
        """End the thread. Idempotent. At the end of a process that serves the store, wait a moment for the others."""
        if self._stopping.is_set() or os.getpid() != self._pid:
            return
        if self._own >= 0 and self._serves:
            with suppress(RuntimeError):
                linger(self._is_read, _LINGER)
        self._stopping.set()

        def leave() -> None:
            store = clone(self._job_store)  # an abandoned call may occupy the other connections
            if not self._has_failed:
                store.compare_set(_LEFT, "", self._departure)
            store.set(self._key(self._number, f"wake/{self.rank}"), "")
            others = store.add(_LISTENERS, -1)
            self._thread.join(_STORE_LIMIT.total_seconds())
            if is_end and self._serves and others > 0:
                linger(lambda: store.add(_LISTENERS, 0) <= 0, _LINGER)

        with suppress(RuntimeError):  # the server of the store has ended, and with it the thread
            if is_end:  # Python starts no thread then
                leave()
            else:
                within(2 * _STORE_LIMIT, "the end of a thread", leave)
        if sys.excepthook == self._hook:
            sys.excepthook = self._hook_before
        atexit.unregister(self.stop)

    # -- a failure of this rank ----------------------------------------------------------------------------------------

    def post(self, error: BaseException, call: str, members: Sequence[int], *, has_left: bool) -> FirstCause | None:
        """Post this rank's failure; return the first cause, which may be of another rank, or None without an answer."""
        self._reported, self._calls_at_post = id(error), self.calls
        text = "".join(traceback.format_exception_only(error)).strip()
        own = FirstCause(self.rank, self._who, call, text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ...", has_left)
        if self.known is None and self.has_news.is_set():  # the store is gone
            return None

        def write() -> FirstCause:
            store, written, number = clone(self._job_store), json.dumps(own), self._number
            while True:
                first = FirstCause(*json.loads(store.compare_set(self._key(number), "", written)))
                is_former = first.rank == own.rank and first != own
                if is_former:
                    self._withdraw(store, number)
                if not is_former and not store.check([self._key(number, "withdrawn")]):
                    break
                number += 1
            if first == own:
                self._own = number
                set_several(store, [self._key(number, f"wake/{rank}") for rank in range(self._world_size)])
            # if all ranks of the call fail alike, none is alone
            is_alike = (first.call, _kind(first)) == (own.call, _kind(own))
            if is_alike and store.add(self._key(number, "count"), 1) == len(members):
                self._withdraw(store, number)
            return first

        with suppress(RuntimeError):  # the store does not answer
            return within(_STORE_LIMIT, "the report of an error", write)
        return None

    def _key(self, number: int, what: str = "post") -> str:
        return f"ds_topo/first_cause/{number}/{what}"

    def _withdraw(self, store: Store, number: int) -> None:
        store.set(self._key(number, "withdrawn"), "")

    @property
    def _departure(self) -> str:
        return json.dumps([self.rank, self._who])

    def departed(self, members: Sequence[int]) -> str:
        """Return a description of a member that has left without an error, and a remedy; empty if none is known."""
        with suppress(RuntimeError):  # the store does not answer
            found = within(_STORE_LIMIT, "who has left", lambda: clone(self._job_store).compare_set(_LEFT, "", ""))
            rank, who = json.loads(found or '[-1, ""]')
            if rank in members and rank != self.rank:
                return (
                    f"{who} has ended its program, or destroyed its grid, without an error. Let all ranks take the "
                    "same steps: decide when to stop by a number that is equal on all of them, such as "
                    "grid.mean_over_replicas(loss), and call train_batch(), eval_batch() and the like on every rank"
                )
        return ""

    def _is_read(self) -> bool:
        """Return whether all others have read this rank's post, or it was withdrawn."""
        number, withdrawn = self._own, [self._key(self._own, "withdrawn")]
        return self._job_store.add(self._key(number, "read"), 0) >= self._world_size - 1 or bool(
            self._job_store.check(withdrawn)
        )

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Post an exception that ends this process, if it has not left a guarded call."""
        self._hook_before(kind, error, trace)
        self._has_failed = True
        chain = chain_of(error)
        is_named = any(isinstance(one, FailedRankError) for one in chain)
        if is_of_transport(error) and not is_named and not watch_is_on():
            cause = self.known if self.has_news.wait(_CAUSE_LIMIT) else None
            if said := self.departed(range(self._world_size)) if cause is None else str(cause):
                tell(f"ds_topo: the cause is probably that {said}")
        is_known = is_named or any(id(one) == self._reported for one in chain)
        if not is_known and self.is_of_this_job and not watch_is_on() and not is_of_transport(error):
            where = self._observer.read_traceback(trace)
            place = f"{where.phase} at {where.where}" if where.where else where.phase
            self.post(error, place, range(self._world_size), has_left=True)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                post = self._key(self._number)
                if not self._connection.check([post]):
                    self._sleep()
                    continue
                self.known = cause = FirstCause(*json.loads(self._connection.get(post)))
                if cause.rank != self.rank:
                    self._connection.add(self._key(self._number, "read"), 1)
                self.has_news.set()
                self._await_end_of(cause)
                self.known = None
                self.has_news.clear()
                self._number += 1
        except RuntimeError:  # the server of the store has ended
            known, last = self.known, time.monotonic()
            self.has_news.set()
            while known is not None and not self._stopping.wait(self._tick):
                now = time.monotonic()
                self._consider(known, min(now - last, 2 * self._tick))
                last = now
        except Exception:  # our own error must not end a training
            traceback.print_exc()

    def _sleep(self) -> None:
        """Wait for the next post, or for :meth:`stop`: who posts, or stops, sets the key of this rank."""
        wake = self._key(self._number, f"wake/{self.rank}")
        with suppress(dist.DistStoreError):  # after a week
            self._connection.wait([wake], _FOREVER)
            self._connection.delete_key(wake)

    def _await_end_of(self, cause: FirstCause) -> None:
        """Consider what to do about a failure again and again, until it is withdrawn."""
        withdrawn = self._key(self._number, "withdrawn")
        last = time.monotonic()
        while not self._stopping.wait(self._tick) and not self._connection.check([withdrawn]):
            if cause.rank == self.rank and self.calls > self._calls_at_post:  # the program goes on
                self._withdraw(self._connection, self._number)
            else:
                now = time.monotonic()
                self._consider(cause, min(now - last, 2 * self._tick))  # a process that was stopped counts nothing
                last = now

    def _consider(self, cause: FirstCause, passed: float) -> None:
        """End what the main thread waits in if it cannot come back without the failed rank."""
        call = self._current()
        if call is None or cause.rank == self.rank or cause.rank not in call.members or watch_is_on():
            self._judged = None
            return
        if self._judged is not call:
            self._judged, self._ended_at = call, 0.0
            self._progress.seconds = 0.0
        doing = self._observer.look()
        self._progress.look(doing, passed)
        is_at_store = doing.wait is not None and doing.wait.call in STORE_WAITS
        seconds = doing.seconds if doing.wait is not None else self._progress.seconds
        patience = GRACE if call.cause is None else STILL  # once ended, the call raises anyhow
        is_stuck = seconds >= patience if doing.wait is not None else self._progress.is_stuck(doing)
        if not is_stuck or (is_at_store and not cause.has_left) or self._current() is not call:
            return
        call.cause = cause
        now = time.monotonic()
        if self._ended_at <= now - seconds:  # not in this wait
            self._ended_at, self._seconds_since_end = now, 0.0
            if not is_at_store:  # abort_nccl() may block
                threading.Thread(target=abort_nccl, name="ds_topo abort", daemon=True).start()
        else:
            self._seconds_since_end += passed
        if cause.has_left and self._seconds_since_end > _RAISE_LIMIT:
            why = "It waits for that rank and cannot be made to raise, so it is ended."
            tell(f"{cause}\nHere: {self._who}, {doing}. {why}")
            end_process()
        shut_down(self._place[1] if is_at_store else 0, self._ports)


class Guard:
    """The guarded call of this process's main thread, and the thread that listens while it has grids or calls."""

    def __init__(self) -> None:
        self.call: GuardedCall | None = None
        self._listener: FailureListener | None = None
        self._next_attempt_at = 0.0
        """The time before which a store that did not answer is not asked again; 0 without grids and calls."""
        self._holders = 0

    @contextmanager
    def over(self, name: str, members: Sequence[int] | None = None) -> Iterator[None]:
        """Guard a call, in which all ranks take part by default; inside of another one, it belongs to that one.

        Raises:
            FailedRankError: another rank has failed, so that this call could not come back, or could not reach it.
        """
        call = self.begin(name, members, None)
        try:
            yield
        except BaseException as error:
            self.end(call, error)
            raise
        self.end(call, None)

    def begin(self, name: str, members: Sequence[int] | None, steps: int | None) -> GuardedCall | None:
        """Begin a call as in :meth:`over`, after so many ``steps``; return what :meth:`end` needs."""
        if self.call is not None or threading.current_thread() is not threading.main_thread():
            return None
        world = dist.group.WORLD  # None without a job
        size = 1 if world is None else world.size()
        if size > 1 or self._listener is not None:
            self._listen()
        if self._listener is not None:
            self._listener.calls += 1
        self.call = GuardedCall(name, range(size) if members is None else members, steps)
        return self.call

    def end(self, call: GuardedCall | None, error: BaseException | None) -> None:
        """End a call, in which an error may have been raised; None is a call inside of another one."""
        if call is None:
            return
        try:
            if error is not None or call.cause is not None:
                self._raise_first_cause(call, error)
        finally:
            self.call = None
            if not self._holders:
                self._stop()

    def narrow(self, name: str, members: Sequence[int]) -> None:
        """Set the ranks that take part in the call of this name, once they are known."""
        if self.call is not None and self.call.name == name:
            self.call.members = members
            self._listen()  # the call may have joined the job

    def report(self, error: BaseException) -> None:
        """Report an error to the other ranks before it leaves the guarded call, which may only be when they come."""
        call, listener = self.call, self._heard()
        if call is not None and listener is not None and not call.has_posted and not is_of_transport(error):
            call.has_posted = True
            listener.post(error, str(call), call.members, has_left=False)

    def hold(self) -> Callable[[], None]:
        """Keep the thread, once there is one, until the function that is returned is called."""
        self._holders += 1
        pending = [self]

        def release() -> None:
            if pending:
                pending.pop()._holders -= 1
                if not self._holders and self.call is None:
                    self._stop()

        return release

    def _heard(self) -> FailureListener | None:
        return None if watch_is_on() else self._listener

    def _listen(self) -> None:
        """Start the thread, unless it runs already or cannot be of use."""
        if self._listener is not None:
            if self._listener.is_of_this_job:
                return
            self._listener.stop()
            self._listener = None
        if not _can_listen() or os.environ.get(ENVIRONMENT, "").lower() in ("off", "0", "no", "false"):
            return
        if time.monotonic() < self._next_attempt_at:
            return
        try:
            self._listener = FailureListener(default_store(), lambda: self.call)
        except RuntimeError:  # the store does not answer: the call itself will say so
            self._next_attempt_at = time.monotonic() + _SECONDS_BETWEEN_ATTEMPTS

    def _stop(self) -> None:
        """Stop the thread, which no grid and no call needs any more."""
        self._next_attempt_at = 0.0
        if self._listener is not None:
            self._listener.stop()
            self._listener = None

    def _raise_first_cause(self, call: GuardedCall, error: BaseException | None) -> None:
        """Post the error of a call, or raise the first cause in its place."""
        cause, listener = call.cause, self._heard()
        if listener is None:  # the watch reports
            return
        if isinstance(error, (FailedRankError, EndOfSamplesError, GeneratorExit)):  # all ranks raise these
            return
        is_consequence = error is not None and is_of_transport(error)
        if cause is None and is_consequence:
            listener.has_news.wait(_CAUSE_LIMIT)
            cause = listener.known
            if cause is None and (said := listener.departed(call.members)):
                raise FailedRankError(f"this rank cannot finish {call}, because {said}") from error
        if error is not None and cause is None and not call.has_posted:
            posted = listener.post(error, str(call), call.members, has_left=True)
            cause = posted if is_consequence else None
            call.has_posted = True
        if cause is None or cause.rank == listener.rank or cause.rank not in call.members:
            return
        if error is not None and _kind(cause) in str(error):  # as the error of a checkpoint, which all ranks raise
            return
        raise FailedRankError(
            f"{cause.who} failed in {cause.call}, so this rank cannot finish {call}. The other rank's error was:\n"
            f"{cause.error}\nThe output of that rank has its traceback."
        ) from error


def watch_is_on() -> bool:
    """Return whether the job's watch reports instead."""
    return job_watch.watch is not None and job_watch.watch.is_of_this_job


def _can_listen() -> bool:
    world = dist.group.WORLD  # None without a job
    return (
        sys.platform == "linux"
        and world is not None
        and world.size() > 1
        and communicates()
        and served_at(default_store()) is not None
        and not watch_is_on()
    )


def _kind(cause: FirstCause) -> str:
    """Return the class of an error and its first line."""
    return cause.error.partition("\n")[0]


guard = Guard()
"""The one guard of this process."""
