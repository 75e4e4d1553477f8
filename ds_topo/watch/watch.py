"""The watch of a job, as one rank keeps it: it begins, judges where the store cannot, and ends what is held up.

Three parties. The :class:`~ds_topo.watch.heartbeat.Heartbeat` thread talks to the store, and may hang in it when the
store's server stops. The judging thread here makes no call that can hang. The witness, a small process, answers for
this one while it holds the interpreter.

A verdict is written by one rank and adopted by all. Then connections of gloo are shut down, which ends a collective
that is blocked: the main thread raises the transport's error, and the verdict is printed after it. A main thread that
is still blocked some seconds later is ended with a dump of all stacks. One that computes, saves or evaluates is let go
on: it will raise in its next collective.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ds_topo.launch.identity import COORDINATE
from ds_topo.process_groups.agreement import agree
from ds_topo.process_groups.creation import require_initialized
from ds_topo.process_groups.deadline import within
from ds_topo.process_groups.torch_names import (
    abort_nccl,
    clone,
    default_store,
    job_timeout,
    served_at,
)
from ds_topo.watch.activity import OTHERWISE, Activity, Observer, first_line
from ds_topo.watch.findings import FAILED, TRANSPORT, Finding, Who, headline
from ds_topo.watch.flight_record import save_flight_record
from ds_topo.watch.heartbeat import ASK_AT, HAS_FAILED, WITNESS_SECONDS, Heartbeat, Ring, Verdict
from ds_topo.watch.steps import StepCounts
from ds_topo.watch.transport import bytes_moved, ports_towards, shut_down
from ds_topo.watch.witness import State, Witness, address_towards, ask

DEFAULT_LIMIT = 30.0
ENVIRONMENT = "DS_TOPO_WATCH"
EXIT_CODE = 70
"""Of a rank that had to be ended: ``EX_SOFTWARE``."""
GRACE = 4.0
"""Seconds for a blocked main thread to raise after its connections were shut down."""
_SECONDS_TO_START = 5.0
"""At least; more where the limit is larger."""
_TICK = 0.2
_STILL = 1.0
"""Seconds at one instruction, inside an engine, after which a call is one that waits, whatever it is."""
_UNTOUCHED = ("save", OTHERWISE)
"""Phases in which a process is not ended unless it is known to wait for other ranks; its connections are."""
_RANKS_PER_SECOND = 2000
"""Of which the store hears: in larger jobs beats are rarer."""
_OF_TRANSPORT = re.compile(
    r"gloo|NCCL|[Cc]onnection (closed|reset|refused|was)|no connection|Failed to recv|Timed out|wait timeout|"
    r"Broken pipe|[Ss]ocket|TCPStore|their own errors say why|did not answer within"
)
_HookOfExceptions = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def watch_limit(given: float | None) -> float | None:
    """Seconds: what the environment says (``DS_TOPO_WATCH=60``, or ``off``), else what is given; None for no watch.

    >>> watch_limit(20.0), watch_limit(None)
    (20.0, None)

    Raises:
        ValueError: not a positive number.
    """
    text = os.environ.get(ENVIRONMENT, "")
    if text.lower() in ("off", "0", "no", "false"):
        return None
    try:
        limit = float(text) if text else given
    except ValueError:
        raise ValueError(f"{ENVIRONMENT}={text!r}: give seconds above 0, or off") from None
    if limit is not None and not 0 < limit < float("inf"):
        raise ValueError(f"{ENVIRONMENT if text else 'watch'}={text or limit}: give seconds above 0")
    return limit


class Watch:
    """Names a rank that dies, stops, fails or does not come, on every other one, and ends those that wait for it.

    Collective over the job. It lasts until :meth:`stop`, or the end of the process. Programs get it by
    ``ds_topo.init_distributed(watch=30)``.

    What is slow is let be: a long computation, save, compilation, evaluation or collective, a debugger, a call that
    holds the interpreter for minutes.

    Args:
        limit: seconds without a sign of a rank after which its host and process are asked for. It may be much shorter
            than the timeout of collectives.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        ValueError: a limit that is not positive.
        DisagreementError: ranks came with other limits, or did not come.

    >>> import torch.distributed as dist
    >>> store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> with Watch(limit=30) as watch:
    ...     print(watch.verdict)
    None
    >>> dist.destroy_process_group()
    """

    def __init__(self, limit: float = DEFAULT_LIMIT) -> None:
        require_initialized("Watch")
        if not 0 < limit < float("inf"):
            raise ValueError(f"limit={limit}: give seconds above 0")
        self.limit = limit
        self._rank, self._pid, self._host = dist.get_rank(), os.getpid(), socket.gethostname()
        world_size = dist.get_world_size()
        interval = min(1.0, limit / 6) * max(1.0, world_size / _RANKS_PER_SECOND)
        self._job_store = default_store()
        """Kept, since with it the store's server would end."""
        place = served_at(self._job_store)
        if place is None:
            raise RuntimeError("Watch: the store of this job is no TCPStore, so ranks cannot hear of each other")
        self._server_place = place
        self._is_served_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._observer = Observer()
        self._looking = threading.Lock()
        self._steps = StepCounts()
        self._local: Verdict | None = None
        self._is_told = self._has_spoken = self._is_ending = False
        self._stopped = threading.Event()
        self._serves = self._is_served_by_rank_0 and self._rank == 0
        self._witness = Witness()
        self._ports = {place[1], self._witness.port}
        """Of connections that are not the transport's: the store's server, the witness, the beats."""
        try:
            token = agree(f"watch, limit {limit}", range(world_size), job_timeout(), subject="the watch")
            self._ring = Ring(f"{token}/watch", self._rank, world_size, limit, interval)
            self._begin()
        except BaseException:
            self._witness.end()
            raise
        self._heart.start()
        self._judge = threading.Thread(target=self._run, name="ds_topo watch: judge", daemon=True)
        self._judge.start()
        self._hook_before = sys.excepthook
        self._hook = self._on_exception
        sys.excepthook = self._hook
        atexit.register(self._at_exit)

    def _begin(self) -> None:
        """Let the others find this rank, and find them; bounded, since all have come a moment ago."""
        bound = timedelta(seconds=max(self.limit, _SECONDS_TO_START))
        subject = "the start of the watch"
        others = ports_towards(self._server_place[1])
        store = within(bound, subject, lambda: clone(self._job_store))
        self._ports |= ports_towards(self._server_place[1]) - others
        self._heart = Heartbeat(store, self._ring, self._look, serves=self._serves)
        address = address_towards(*self._server_place), self._witness.port
        try:
            self._first_witness = within(bound, subject, lambda: self._heart.prepare(self._host, address))
            agree("all are ready", range(self._ring.world_size), bound, subject=subject)
        except Exception as error:
            if self._heart.first_rank is not None and _is_of_transport(error):
                self._heart.lost, self._last_doing = error, self._observer.read_traceback(error.__traceback__)
                self._judge_store(f"could not be asked at {subject}")
                self._tell()
            raise

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._note_exception(error, trace)
        self.stop()

    @property
    def verdict(self) -> str | None:
        """What is wrong, the same text on all ranks; None while nothing is."""
        found = self._heart.verdict or self._local
        return found.text if found else None

    @property
    def is_of_this_job(self) -> bool:
        """Whether it goes on, and ``torch.distributed`` is still what it began with."""
        return not self._stopped.is_set() and dist.is_initialized() and default_store() is self._job_store

    def note_steps(self, owner: object, group: dist.ProcessGroup, taken: int) -> None:
        """See :func:`compare_steps`."""
        self._heart.note(self._steps.next(owner, group, taken))

    def stop(self) -> None:
        """End it on this rank: others then know that it has ended. Idempotent."""
        if self._stopped.is_set() or os.getpid() != self._pid:
            return
        self._is_ending = True
        self._heart.stop(0.0 if self._local is not None else 2 * self._ring.interval + 2)
        if self._serves and self.verdict is not None and self._heart.lost is not None:
            time.sleep(1.5 * self._ring.interval + 0.5)  # until the others have read the verdict
        self._stopped.set()
        self._judge.join(2)
        self._witness.end()
        if sys.excepthook == self._hook:
            sys.excepthook = self._hook_before
        atexit.unregister(self._at_exit)

    # -- what this rank does

    def _look(self) -> Activity:
        with self._looking:
            return self._observer.look(lambda: bytes_moved(self._ports))

    @property
    def _who(self) -> Who:
        return Who(self._rank, self._host, os.environ.get(COORDINATE, ""))

    # -- the judging thread

    def _run(self) -> None:
        unanswered, asked_since, before = 0.0, None, time.monotonic()
        while not self._stopped.wait(_TICK):
            now = time.monotonic()
            awake, before = min(now - before, 5 * _TICK), now  # a process that was stopped itself blames nobody
            since = self._heart.asked_since
            unanswered = unanswered + awake if since is not None and since == asked_since else 0.0
            asked_since = since
            if self.verdict is None and unanswered >= ASK_AT * self.limit:
                self._judge_store(f"has not answered for {unanswered:.0f} s")
                unanswered = 0.0
            elif self.verdict is None and self._heart.lost is not None and self._is_blocked():
                self._judge_store(f"has closed its connections ({first_line(self._heart.lost)})")
            if self.verdict is not None:
                self._end_what_is_blocked()
                return

    def _is_blocked(self) -> bool:
        """Whether the main thread waits for other ranks, as far as can be seen."""
        doing = self._look()
        return doing.wait is not None or (doing.still >= _STILL and doing.phase not in _UNTOUCHED)

    def _judge_store(self, what: str) -> None:
        """Without the store every rank judges for itself: who serves it?"""
        host, port = self._server_place
        lines = [f"the store of the job at {host}:{port} {what}."]
        if self._is_served_by_rank_0:
            state, last = ask(self._first_witness, WITNESS_SECONDS), self._heart.first_rank
            if state is State.ALIVE and self._heart.lost is None:
                return
            first = Who(0, self._heart.first_host, last.coordinate if last else "")
            lines.append(f"{first}, which serves it, {state.value}.")
            lines += [f"  It was, when last heard of, {last.doing}."] if last else []
        else:
            lines.append("The launcher on that host serves it: it has ended or stopped, or its host is cut off.")
        self._local = Verdict("\n".join([headline(self._ring.world_size), *lines]), self._rank)

    def _end_what_is_blocked(self) -> None:
        verdict = self._heart.verdict or self._local
        assert verdict is not None
        if verdict.speaker == self._rank:
            self._speak()
        blocked = 0.0
        while not self._stopped.wait(_TICK):
            doing = self._look()
            if self._is_ending or (doing.wait is None and doing.still < _STILL):
                blocked = 0.0
                continue
            shut_down(self._ports)
            if not blocked:
                abort_nccl()
            blocked += _TICK if doing.wait is not None or doing.phase not in _UNTOUCHED else 0.0
            if blocked > GRACE:
                self._tell()
                faulthandler.dump_traceback(all_threads=True)
                self._witness.end()
                os._exit(EXIT_CODE)

    # -- what is said

    def _speak(self) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            _write(self.verdict or "")

    def _tell(self) -> None:
        """The verdict, and what this rank was doing; once."""
        if not self._is_told:
            self._is_told = True
            self._speak()
            record = save_flight_record(self._rank)
            collectives = f" Its last collectives, for torchfrtrace: {record}" if record else ""
            _write(f"Here: {self._who}, {self._last_doing or self._look()}.{collectives}")

    _last_doing: Activity | None = None

    # -- the end of the program

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._hook_before(kind, error, trace)
        if os.getpid() == self._pid:
            self._note_exception(error, trace)
            self._limit_the_end()

    def _note_exception(self, error: BaseException, trace: TracebackType | None) -> None:
        """Tell the others, and learn the cause if this is only a consequence of it."""
        if self._last_doing is not None or self._stopped.is_set():
            return
        with self._looking:
            self._last_doing = doing = self._observer.read_traceback(trace)
        is_consequence = self.verdict is not None or _is_of_transport(error)
        self._heart.state = HAS_FAILED
        if self.verdict is None:
            kind = TRANSPORT if is_consequence else FAILED
            what = f"{'could not reach others' if is_consequence else 'has failed'}: {first_line(error)}"
            suspects = doing.wait.ranks if doing.wait and is_consequence else ()
            self._heart.report(Finding(kind, self._who, what, f"was {doing}", self._who, str(doing)), suspects)
        if not isinstance(error, KeyboardInterrupt):
            self._await_verdict(self.limit + 3 if is_consequence else 3 * self._ring.interval + 1)
        if self.verdict is not None and is_consequence:
            self._tell()

    def _await_verdict(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.verdict is None and time.monotonic() < until and (self._heart.lost is None or self._local is None):
            if self._heart.lost is not None:
                self._judge_store(f"has closed its connections ({first_line(self._heart.lost)})")
            time.sleep(_TICK / 4)

    def _at_exit(self) -> None:
        """After the last traceback: Python keeps an exception that nobody has caught."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and os.getpid() == self._pid:
            self._note_exception(error, error.__traceback__)
            self._limit_the_end()
        self.stop()

    def _limit_the_end(self) -> None:
        """After a fault, what torch and others do at the end of a process may wait for ranks that do not come."""
        if self.verdict is not None:
            faulthandler.dump_traceback_later(GRACE, exit=True)


def compare_steps(owner: object, group: dist.ProcessGroup, taken: int) -> None:
    """Let the watch, if there is one, compare how far the ranks of a group are.

    Of programs whose ranks call the same collectives, a rank that leaves out a step has called more by its next one.
    What differs is told on standard error, once; nothing waits for it, and nothing is ended.

    Args:
        owner: what takes the steps; ranks compare their first ones of a group with each other, then their second ones.
        group: over which it has collectives.
        taken: steps.
    """
    if _current is not None and _current.is_of_this_job:
        _current.note_steps(owner, group, taken)


def start_watch(limit: float) -> Watch:
    """The watch of the job; the one that there is, if it is of this job."""
    global _current
    if _current is None or not _current.is_of_this_job:
        if _current is not None:
            _current.stop()
        _current = Watch(limit)
    return _current


_current: Watch | None = None


def _is_of_transport(error: BaseException) -> bool:
    """Whether an exception says no more than that another rank was not there."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    return any(isinstance(each, (RuntimeError, OSError)) and _OF_TRANSPORT.search(str(each)) for each in chain)


def _write(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
