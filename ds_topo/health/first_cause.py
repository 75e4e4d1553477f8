"""Let all ranks know that one of them has failed, also without the watch, and end calls that wait for it.

Calls in which ranks wait for each other are *guarded*: the construction of engines and pipelines, their steps and
evaluations, and saving and loading. If an exception leaves such a call, the rank posts it to the job's store as the
*first cause*, unless another rank was first. On each rank one thread waits for a post, on a connection of its own: the
store's server answers when there is one, so nothing is polled and a step costs nothing.

A failure alone ends nothing. The rank may handle its error and go on, and all ranks may have raised the same one. The
wait of another rank is ended if three things are true: a rank that takes part in the same guarded call has posted; that
rank has not begun another guarded call since; and this rank's main thread has waited in one place of the call for
``GRACE`` seconds after the post. :class:`~ds_topo.health.blocked_calls.BlockedCall` ends it, and the guard turns
whatever the call raises, or returns, into a :class:`~ds_topo.errors.FailedRankError` that names the first cause.

The first rank that ends its program or destroys its grids leaves a note in the store, for ranks that then cannot reach
it, most likely because they take more steps, or wait at the store in a call that it never began.

A timeout or a lost connection is no cause. A rank that raises one waits a moment for the cause. If none comes it asks:
the threads of all ranks report where theirs is, by one ``append`` each, and that of the rank that asked posts a
comparison (:func:`~ds_topo.health.blocked_calls.compared`), which all ranks raise.

While the watch is on, it alone reports. The thread does not help if the process that serves the store stops: the watch
does. If that process is rank 0 and has ended, its end is the cause.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from ds_topo.base.torch_names import Store, append, communicates, default_store, served_at
from ds_topo.errors import (
    DisagreementError,
    EndOfSamplesError,
    FailedRankError,
    GroupCreationError,
    abridged,
    first_line,
    tell,
)
from ds_topo.health.connections import chain_of, is_of_transport, ports_towards
from ds_topo.launch.council import FAILED, apart, linger
from ds_topo.launch.launchers import COORDINATE, named

if TYPE_CHECKING:
    from ds_topo.health.activity import Activity
    from ds_topo.health.blocked_calls import BlockedCall
    from ds_topo.health.watch import Watch

ENVIRONMENT = "DS_TOPO_FIRST_CAUSE"
_TICK = 0.5
"""The seconds between two looks at the main thread after a failure."""
_RANKS_PER_TICK = 4096
"""Larger jobs look less often, to spare the store."""
_STORE_LIMIT = timedelta(seconds=5)
"""The longest time for requests to the store by the main thread."""
_CAUSE_LIMIT = 2.0
"""The seconds for which a rank that could not reach another one waits for the first cause."""
_INQUIRY_LIMIT = timedelta(seconds=3)
"""The seconds that the ranks have to report where they are."""
_LINGER = timedelta(seconds=1.5)
"""The seconds for which a process that serves the store and ends waits for the others to read why."""
_FOREVER = timedelta(days=7)
_LISTENERS = "ds_topo/first_cause/listeners"
"""The key that counts the ranks whose thread runs."""
_LEFT = "ds_topo/first_cause/left"
"""The key of the first rank that has ended its program, or destroyed its grids."""
_SHOWN = 2000
"""The most characters of an error that other ranks show."""
_SERVER_ENDED = (
    "rank 0, which served the job's store at {}:{}, has ended without reporting an error: it was killed, or crashed. "
    "Its own output may say more, and the system's log of its host (out of memory? killed?)"
)


class FirstCause(NamedTuple):
    """The failure that other ranks name."""

    rank: int
    who: str
    """The rank, its coordinate and its host."""
    call: str
    error: str
    has_left: bool = True
    """False while the rank still takes part in the call, for example in the decision about a checkpoint."""
    is_inferred: bool = False
    """True if no rank has reported an error of its own; ``error`` then says what was found."""

    def __str__(self) -> str:
        return self.error if self.is_inferred else f"{self.who} failed in {self.call}: {self.error}"


class Departure(NamedTuple):
    """The note of a rank that has ended its program, or destroyed its grids."""

    rank: int
    who: str
    after: str
    """The exception that was being handled, as at the end of a ``with``; empty if none was."""
    calls: int
    """The number of guarded calls that the rank had begun."""
    is_end: bool
    """True if the process has ended."""

    def __str__(self) -> str:
        if self.after:
            return f"{self.who} has ended its program, or destroyed its grid, after {self.after}"
        return (
            f"{self.who} has ended its program, or destroyed its grid, without reporting an error. Let all ranks "
            "take the same steps: decide when to stop by a number that is equal on all of them, such as "
            "grid.mean_over_replicas(loss), and call train_batch(), eval_batch() and the like on every rank"
        )

    def leave_in(self, store: Store, world_size: int) -> None:
        """Leave the note in the store and wake the threads of all ranks, unless another rank has left before."""
        note, found = json.dumps(self), store.compare_set(_LEFT, "", json.dumps(self)).decode()
        before = Departure(*json.loads(found))
        if before.rank == self.rank:
            if found != note:  # it has destroyed its grids before
                store.compare_set(_LEFT, found, json.dumps(before._replace(is_end=self.is_end)))
            _wake_all(store, world_size)

    def as_cause(self) -> FirstCause:
        """Return it as the cause of other ranks' errors."""
        return FirstCause(self.rank, self.who, "", str(self), is_inferred=True)


@dataclass(eq=False, slots=True)
class GuardedCall:
    """A guarded call of the main thread."""

    name: str
    members: Sequence[int]
    steps: int | None
    number: int
    """How many guarded calls this process has begun, including this one."""
    cause: FirstCause | None = None
    """The failure for which this call was ended."""
    has_posted: bool = False

    def __str__(self) -> str:
        if self.steps is None:
            return self.name
        return f"{self.name} after {self.steps} step{'s' * (self.steps != 1)}"


class FailureListener:
    """The thread that waits for the first cause of a job, on its own connection to the job's store."""

    def __init__(self, store: Store, guard: Guard) -> None:
        place = served_at(store)
        assert place is not None
        self._job_store, self._place, self._guard = store, place, guard
        self._pid, self.rank, self._world_size = os.getpid(), dist.get_rank(), dist.get_world_size()
        self._tick = _TICK * max(1.0, self._world_size / _RANKS_PER_TICK)
        self._is_served_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._serves = self.rank == 0 and self._is_served_by_rank_0
        self._number = 0
        """The number of the next post: those before were withdrawn."""
        self.known: FirstCause | None = None
        """The first cause, until it is withdrawn."""
        self.has_news = threading.Event()
        """Set when a first cause is known, or the connection is lost."""
        self._calls_at_post = -1
        self.where: Activity | None = None
        """The activity when this rank could not reach another one, in the last call that it began."""
        self._answered = -1
        """The number of the post for which this rank was last asked where it is."""
        self._left: Departure | None = None
        """The first rank that has left, once the thread was woken."""
        self._stopping = threading.Event()
        self.reported = -1
        """The id of the error that this rank has posted last."""
        self._own = -1
        """The number of this rank's last post, which the others may not have read yet."""
        self._judged: GuardedCall | None = None
        self.has_failed = False
        """True if an exception ends this process."""
        before = ports_towards(place[1])
        self._connection = apart(store, _STORE_LIMIT, "another connection to the store", lambda other: other)
        self._ports = ports_towards(place[1]) - before
        self._connection.add(_LISTENERS, 1)
        left = departure_in(self._connection)
        if left is not None and left.rank == self.rank:  # it has come back
            self._connection.compare_set(_LEFT, json.dumps(left), "")
        self._thread = threading.Thread(target=self._run, name="ds_topo first cause", daemon=True)
        self._thread.start()

    @cached_property
    def _blocked(self) -> BlockedCall:
        """Return the call in which the main thread waits. The first failure imports its class."""
        from ds_topo.health.blocked_calls import BlockedCall

        return BlockedCall(self._place[1], self._ports, self._tick)

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
                linger(self._is_read, 2 * _LINGER)
        self._stopping.set()
        departure = departure_of(self.rank, self._guard.calls, is_end=is_end)

        def leave(store: Store) -> None:
            if departure is not None and not self.has_failed:
                departure.leave_in(store, self._world_size)
            store.set(_wake(self.rank), "")
            others = store.add(_LISTENERS, -1)
            self._thread.join(_STORE_LIMIT.total_seconds())
            if is_end and self._serves and others > 0:
                linger(lambda: store.add(_LISTENERS, 0) <= 0, _LINGER)

        with suppress(RuntimeError):  # the server of the store has ended, and with it the thread
            apart(self._job_store, 2 * _STORE_LIMIT, "the end of a thread", leave)

    # -- a failure of this rank ----------------------------------------------------------------------------------------

    def post(self, error: BaseException, call: str, members: Sequence[int], *, has_left: bool) -> None:
        """Post this rank's failure, unless another rank was first. No-op if the store does not answer."""
        self.reported, self._calls_at_post = id(error), self._guard.calls
        text = "".join(traceback.format_exception_only(error)).strip()
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
        own = FirstCause(self.rank, here(self.rank), call, shown, has_left)

        def write(store: Store) -> None:
            written, number = json.dumps(own), self._number
            while True:
                first = FirstCause(*json.loads(store.compare_set(self._key(number), "", written)))
                if first != own and (first.rank == own.rank or first.is_inferred):
                    self._withdraw(store, number)
                if not store.check([self._key(number, "withdrawn")]):
                    break
                number += 1
            if first == own:
                self._own = number
                _wake_all(store, self._world_size)
            # if all ranks of the call fail alike, none is alone
            is_alike = (first.call, _kind(first)) == (own.call, _kind(own))
            if is_alike and store.add(self._key(number, "count"), 1) == len(members):
                self._withdraw(store, number)

        with suppress(RuntimeError):  # the store does not answer
            apart(self._job_store, _STORE_LIMIT, "the report of an error", write)

    def _key(self, number: int, what: str = "post") -> str:
        return f"ds_topo/first_cause/{number}/{what}"

    def _withdraw(self, store: Store, number: int) -> None:
        store.set(self._key(number, "withdrawn"), "")

    def explain(self, error: BaseException, members: Sequence[int]) -> FirstCause | None:
        """Return the cause of an error that says only that another rank could not be reached; None if none is known.

        Wait a moment for a rank that reports a cause. If none does, ask all ranks where they are, unless the error is
        one of ours, which names ranks.
        """
        self.where = self._blocked.observer.read_traceback(error.__traceback__)
        self._calls_at_post = self._guard.calls
        self.has_news.wait(_CAUSE_LIMIT)
        if self.known is not None:
            return self.known
        left = self._left
        with suppress(RuntimeError):  # the store does not answer
            left = apart(self._job_store, _STORE_LIMIT, "who has left", departure_in)
        if left is not None and left.rank in members and left.rank != self.rank:
            return left.as_cause()
        if any(isinstance(one, (DisagreementError, GroupCreationError)) for one in chain_of(error)):
            return None
        key, me = self._key(self._number, "asked"), str(self.rank)

        def ask(store: Store) -> None:
            if store.compare_set(key, "", me).decode() == me:
                _wake_all(store, self._world_size)

        with suppress(RuntimeError):
            apart(self._job_store, _STORE_LIMIT, "the question where ranks are", ask)
            self.has_news.wait(2 * _INQUIRY_LIMIT.total_seconds())
        return self.known

    def _is_read(self) -> bool:
        """Return whether all others have read this rank's post, or it was withdrawn."""
        readers = self._job_store.add(self._key(self._own, "read"), 0)
        return readers >= self._world_size - 1 or bool(self._job_store.check([self._key(self._own, "withdrawn")]))

    def place_of(self, trace: TracebackType | None) -> str:
        """Describe where an exception was raised."""
        where = self._blocked.observer.read_traceback(trace)
        return f"{where.phase} at {where.where}" if where.where else where.phase

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                post = self._key(self._number)
                if not self._connection.check([post]):
                    self._hear()
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
            if self.known is None and self._is_served_by_rank_0 and self._left is None:
                self.known = FirstCause(0, "rank 0", "", _SERVER_ENDED.format(*self._place), is_inferred=True)
            known = self.known
            self.has_news.set()
            while known is not None and not self._stopping.wait(self._tick):
                self._consider(known)
        except Exception:  # our own error must not end a training
            traceback.print_exc()

    def _hear(self) -> None:
        """Read who has left and whether a rank asks; then wait to be woken by the next rank that posts, leaves or asks.

        Once a process has ended, also end a wait at the store in a call that it did not begin.
        """
        self._left = left = departure_in(self._connection)
        asked = self._key(self._number, "asked")
        if self._answered < self._number and self._connection.check([asked]):
            self._answered = self._number
            self._answer(is_asking=int(self._connection.get(asked)) == self.rank)
        has_ended = left is not None and left.is_end
        with suppress(dist.DistStoreError):  # after a week, or a tick
            self._connection.wait([_wake(self.rank)], timedelta(seconds=self._tick) if has_ended else _FOREVER)
            self._connection.delete_key(_wake(self.rank))
        call = self._guard.call
        if left is not None and has_ended and call is not None and call.number > left.calls:
            self._consider(left.as_cause(), only_at_store=True)

    def _answer(self, *, is_asking: bool) -> None:
        """Report where this rank is; the rank that asked compares all, and posts what it finds."""
        from ds_topo.health.blocked_calls import compared

        call, doing = self._guard.call, self.where or self._blocked.observer.look()
        doing = replace(doing, seconds=0.0, handled=0.0)  # so that equal places have equal texts
        if call is not None:
            doing = replace(doing, phase=call.name, step=doing.step if call.steps is None else call.steps)
        waits = self.where is not None or doing.wait is not None
        answers, count = self._key(self._number, "answers"), self._key(self._number, "answered")
        line = json.dumps([self.rank, waits, f"{doing.phase} {doing.step}", str(doing)])
        append(self._connection, answers, f"{line}\n")
        self._connection.add(count, 1)
        if is_asking:
            linger(lambda: self._connection.add(count, 0) >= self._world_size, _INQUIRY_LIMIT)
            lines = map(json.loads, self._connection.get(answers).decode().splitlines())
            found = FirstCause(self.rank, here(self.rank), "", compared(lines, self._world_size), is_inferred=True)
            self._connection.compare_set(self._key(self._number), "", json.dumps(found))
            _wake_all(self._connection, self._world_size)

    def _await_end_of(self, cause: FirstCause) -> None:
        """Consider what to do about a failure again and again, until it is withdrawn."""
        withdrawn = self._key(self._number, "withdrawn")
        while not self._stopping.wait(self._tick) and not self._connection.check([withdrawn]):
            if cause.rank == self.rank and self._guard.calls > self._calls_at_post:  # the program goes on
                self._withdraw(self._connection, self._number)
            else:
                self._consider(cause)

    def _consider(self, cause: FirstCause, *, only_at_store: bool = False) -> None:
        """End what the main thread waits in if it cannot come back without the failed rank."""
        call = self._guard.call
        if call is None or cause.rank == self.rank or cause.rank not in call.members:
            self._judged = None
            return
        blocked = self._blocked
        if self._judged is not call:
            self._judged = call
            blocked.begin()
        is_stuck = blocked.is_stuck(was_ended=call.cause is not None)
        if not is_stuck or (blocked.is_at_store and not cause.has_left) or self._guard.call is not call:
            return
        if (cause.is_inferred and blocked.doing.wait is None) or (only_at_store and not blocked.is_at_store):
            return  # it may go on, and raises in its next collective otherwise
        call.cause = cause
        blocked.end(f"{cause}\nHere: {here(self.rank)}" if cause.has_left else None)


class Ending:
    """Reports an exception that ends this process, or notes its end: its ``sys.excepthook``, and a call at its exit."""

    def __init__(self, guard: Guard, store: Store, *, stays: bool) -> None:
        self._guard, self._pid, self._before = guard, os.getpid(), sys.excepthook
        self.stays = stays
        """True if it stays until the end of the job's ``torch.distributed``."""
        sys.excepthook = self
        atexit.register(self._at_exit)
        self._end_of_job = weakref.finalize(store, self.remove)
        self._end_of_job.atexit = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the error, and report it."""
        self._before(kind, error, trace)
        if os.getpid() == self._pid:
            self._guard.report_end(error)

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self._guard.leave()

    def remove(self) -> None:
        """Put the former hook back, unless another one was set since, which may call this one. Idempotent."""
        if sys.excepthook is self:
            sys.excepthook = self._before
        atexit.unregister(self._at_exit)
        self._end_of_job.detach()
        if self._guard.ending is self:
            self._guard.ending = None


class Guard:
    """The guarded call of this process's main thread, and the thread that listens while it has grids or calls."""

    def __init__(self) -> None:
        self.call: GuardedCall | None = None
        self.calls = 0
        """The number of guarded calls that the main thread has begun, since it last had neither grids nor calls."""
        self.ending: Ending | None = None
        self._listener: FailureListener | None = None
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
        self._listen()
        if self._listener is not None:
            self._listener.where = None
        self.calls += 1
        world = dist.group.WORLD  # None without a job
        everyone = range(1 if world is None else world.size())
        self.call = GuardedCall(name, everyone if members is None else members, steps, self.calls)
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
                self.stop()

    def narrow(self, name: str, members: Sequence[int]) -> None:
        """Set the ranks that take part in the call of this name, once they are known."""
        if self.call is not None and self.call.name == name:
            self.call.members = members
            self._listen()  # the call may have joined the job

    def report(self, error: BaseException) -> None:
        """Report an error to the other ranks before it leaves the guarded call, which may only be when they come."""
        call, listener = self.call, self._listener
        if call is not None and listener is not None and not call.has_posted and not is_of_transport(error):
            call.has_posted = True
            listener.post(error, str(call), call.members, has_left=False)

    def hold(self) -> Callable[[], None]:
        """Keep the thread, once there is one, until the function that is returned is called; call it once."""
        self._holders += 1

        def release() -> None:
            self._holders -= 1
            if not self._holders and self.call is None:
                self.stop()

        return release

    def join(self) -> None:
        """Report how this process ends from now until the end of the job, also before it has a grid."""
        if _can_listen() and self.ending is None:
            self.ending = Ending(self, default_store(), stays=True)

    def report_end(self, error: BaseException) -> None:
        """Post an exception that ends this process, if no guarded call has; explain it if it names no cause."""
        self._listen()
        listener = self._listener
        if listener is None:
            return
        listener.has_failed = True
        chain, ranks = chain_of(error), range(dist.get_world_size())
        if any(isinstance(one, FailedRankError) or id(one) == listener.reported for one in chain):
            return
        if any(map(tells_of_another, chain)):
            return
        if not is_of_transport(error):
            listener.post(error, listener.place_of(error.__traceback__), ranks, has_left=True)
        elif cause := listener.explain(error, ranks):
            tell(f"ds_topo: the cause is probably that {cause}")

    def leave(self) -> None:
        """Note that this process ends."""
        if self._listener is not None:
            self._listener.stop(is_end=True)
        elif _can_listen():
            departure = departure_of(dist.get_rank(), self.calls, is_end=True)
            if departure is not None:
                leave = partial(departure.leave_in, world_size=dist.get_world_size())
                with suppress(RuntimeError):  # the store does not answer
                    apart(default_store(), _STORE_LIMIT, "the end of a rank", leave)

    def _listen(self) -> None:
        """Start the thread, unless it runs already or cannot be of use."""
        if self._listener is not None:
            if self._listener.is_of_this_job:
                return
            self._listener.stop()
            self._listener = None
        if not _can_listen():
            return
        store = default_store()
        with suppress(RuntimeError):  # the store does not answer: the call itself will say so
            self._listener = FailureListener(store, self)
            if self.ending is None:
                self.ending = Ending(self, store, stays=False)

    def stop(self) -> None:
        """Stop the thread, which no grid and no call needs any more, or in place of which the watch reports."""
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
        self.calls = 0
        if self.ending is not None and not self.ending.stays:
            self.ending.remove()

    def _raise_first_cause(self, call: GuardedCall, error: BaseException | None) -> None:
        """Post the error of a call, or raise the first cause in its place."""
        cause, listener = call.cause, self._listener
        if listener is None:
            return
        if isinstance(error, (FailedRankError, EndOfSamplesError, GeneratorExit)):  # all ranks raise these
            return
        if error is not None and tells_of_another(error):
            return
        if error is not None and cause is None:
            if is_of_transport(error):
                cause = listener.explain(error, call.members)
            elif not call.has_posted:
                listener.post(error, str(call), call.members, has_left=True)
                call.has_posted = True
        if cause is None or cause.rank not in call.members or (cause.rank == listener.rank and not cause.is_inferred):
            return
        if error is not None and _kind(cause) in str(error):  # as the error of a checkpoint, which all ranks raise
            return
        if cause.is_inferred:
            raise FailedRankError(f"this rank cannot finish {call}, because {cause}") from error
        raise FailedRankError(
            f"{cause.who} failed in {cause.call}, so this rank cannot finish {call}. The other rank's error was:\n"
            f"{cause.error}\nThe output of that rank has its traceback."
        ) from error


def _can_listen() -> bool:
    world = dist.group.WORLD  # None without a job
    return (
        sys.platform == "linux"
        and world is not None
        and world.size() > 1
        and communicates()
        and served_at(default_store()) is not None
        and job_watch.watch is None
        and os.environ.get(ENVIRONMENT, "").lower() not in ("off", "0", "no", "false")
    )


def tells_of_another(error: BaseException) -> bool:
    """Tell whether an error of an agreement says that another rank has failed, which reports its own error itself."""
    return isinstance(error, DisagreementError) and f"-> {FAILED}" in str(error)


def _kind(cause: FirstCause) -> str:
    """Return the class of an error and its first line."""
    return cause.error.partition("\n")[0]


def here(rank: int) -> str:
    """Describe this rank."""
    return named(rank, socket.gethostname(), os.environ.get(COORDINATE, ""))


def departure_of(rank: int, calls: int, *, is_end: bool) -> Departure | None:
    """Return the note that this rank leaves after so many guarded calls; None if it leaves because of another rank."""
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return Departure(rank, here(rank), "", calls, is_end)
    if is_of_transport(error) or any(isinstance(one, FailedRankError) for one in chain_of(error)):
        return None
    return Departure(rank, here(rank), first_line(error), calls, is_end)


def departure_in(store: Store) -> Departure | None:
    """Return the note of the first rank that has left."""
    found = store.compare_set(_LEFT, "", "")
    return Departure(*json.loads(found)) if found else None


def _wake(rank: int) -> str:
    return f"ds_topo/first_cause/wake/{rank}"


def _wake_all(store: Store, world_size: int) -> None:
    store.multi_set([_wake(rank) for rank in range(world_size)], [b""] * world_size)  # type: ignore[attr-defined]


guard = Guard()
"""The one guard of this process."""


# -- the watch that a job may ask for ---------------------------------------------------------------------------------

_OF_WATCH = "DS_TOPO_WATCH"


def watch_limit(given: float | None) -> float | None:
    """Return the limit in seconds, or None for no watch; ``DS_TOPO_WATCH`` (``60``, ``off``) overrides it."""
    text = os.environ.get(_OF_WATCH, "")
    if text.lower() in ("off", "0", "no", "false"):
        return None
    try:
        limit = float(text) if text else given
    except ValueError:
        raise ValueError(f"{_OF_WATCH}={text!r} is not a number: give seconds above 0, or off") from None
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float))):
        raise TypeError(f"watch={abridged(limit)} is not a number: give seconds above 0, or None for no watch")
    if limit is not None and not 0 < limit < float("inf"):
        raise ValueError(f"{_OF_WATCH if text else 'watch'}={text or limit}: give seconds above 0")
    return limit


class JobWatch:
    """The watch of the job that this process has joined, if one was started: one for all programs and engines in it."""

    def __init__(self) -> None:
        self._started: weakref.WeakSet[Watch] = weakref.WeakSet()
        """The watches that were started here, which their threads keep until they stop."""

    @property
    def watch(self) -> Watch | None:
        """The watch, if it is running in the present ``torch.distributed`` world."""
        return next((each for each in self._started if each.is_of_this_job), None)

    def start(self, limit: float) -> Watch:
        """Return the watch of the job, and start it unless it is running."""
        from ds_topo.health.watch import Watch

        if (watch := self.watch) is None:
            for former in list(self._started):
                former.stop()
            watch = Watch(limit)
            self._started.add(watch)
            guard.stop()
        return watch

    def compare_steps(self, group: dist.ProcessGroup, taken: int) -> None:
        """Let the watch, if it is running, compare the steps that the ranks of a group have taken."""
        if (watch := self.watch) is not None:
            watch.compare_steps(group, taken)


job_watch = JobWatch()
