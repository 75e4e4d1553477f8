"""Watch a job from one rank: judge the others where the store cannot be used, and end calls that are blocked.

There are three parts. The :class:`~ds_topo.health.heartbeat.Heartbeat` thread uses the store, and may hang in it when
the store's server stops. The judging thread here makes no call that can hang. The witness, a small process, answers
for this one while it holds the interpreter.

One rank writes a verdict, and all adopt it. The judging thread then shuts down gloo's connections, which ends a blocked
collective: the main thread raises the transport's error, and the verdict is printed after it. A main thread that makes
no progress (``activity.Progress``) is ended with a dump of all stacks. One that computes, saves or evaluates may
continue: it will raise in its next collective.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import TracebackType

import torch.distributed as dist

from ds_topo.base.torch_names import calls_of, clone, default_store, job_timeout, served_at
from ds_topo.errors import LaunchError, first_line, tell
from ds_topo.health import heartbeat
from ds_topo.health.activity import GRACE, OTHERWISE, SAVES, STILL, Activity, Observer, Progress, wait_over
from ds_topo.health.blocked_calls import end_process
from ds_topo.health.connections import bytes_moved, is_of_transport, ports_towards, shut_down
from ds_topo.health.heartbeat import Heartbeat, RankFault, Ring, Verdict
from ds_topo.health.witness import State, Witness, ask
from ds_topo.launch.council import agree, within
from ds_topo.launch.joining import address_towards
from ds_topo.process_groups.creation import require_initialized

DEFAULT_LIMIT = 30.0
_SECONDS_TO_START = 5.0
"""The shortest time limit of the start."""
_TICK = 0.2
"""The seconds between two looks of the judging thread."""
_SECONDS_BETWEEN_WITNESSES = 10.0
"""The shortest time between two starts of a witness, if something kills it again and again."""
_RANKS_PER_SECOND = 2000
"""The most beats per second that the store receives; beats of larger jobs are less frequent."""


class Watch:
    """Names a rank that dies, stops, fails or does not join, on every other rank, and ends ranks that wait for it.

    Construction is collective over the job. The watch lasts until :meth:`stop`, or the end of the process. Programs
    create it by ``ds_topo.init_distributed(watch=30)``.

    A slow rank is no fault: a long computation, save, compilation, evaluation or collective, a debugger, or a call that
    holds the interpreter for minutes.

    Args:
        limit: the seconds without a beat of a rank after which its host and process are checked. It may be much shorter
            than the timeout of collectives.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        ValueError: the limit is not positive.
        DisagreementError: ranks passed other limits, or did not come.

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
        self._pid = os.getpid()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._job_store = default_store()
        """A reference that keeps the store's server alive."""
        place = served_at(self._job_store)
        if place is None:
            raise RuntimeError("Watch: the store of this job is not a TCPStore, so ranks cannot exchange heartbeats")
        self._server_place = place
        self._is_served_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._serves = self._is_served_by_rank_0 and rank == 0
        self._local: Verdict | None = None
        """The verdict of this rank alone, without the store."""
        self._last_doing: Activity | None = None
        """The activity when the program's last exception was raised."""
        self._is_told = self._has_spoken = False
        self._stopped = threading.Event()
        self._witness = Witness(address_towards(*place) or socket.gethostname())
        self._next_witness_at = 0.0
        """The earliest time for another witness, by the monotonic clock."""
        self._ports = {place[1], self._witness.address.port}
        """Ports of the watch's own connections."""
        self._bytes_moved = partial(bytes_moved, self._ports)
        self._observer, self._progress = Observer(self._bytes_moved), Progress(self._bytes_moved)
        try:
            token = agree(f"watch, limit {limit}", range(world_size), job_timeout(), subject="the watch")
            interval = min(1.0, limit / 6) * max(1.0, world_size / _RANKS_PER_SECOND)
            self._ring = Ring(f"{token}/watch", rank, socket.gethostname(), world_size, limit, interval)
            self._prepare()
        except BaseException:
            self._witness.end()
            raise
        self._heart.start()
        self._judge = threading.Thread(target=self._run, name="ds_topo watch: judge", daemon=True)
        self._judge.start()
        self._hook_before, sys.excepthook = sys.excepthook, self._on_exception
        atexit.register(self._at_exit)

    def _prepare(self) -> None:
        """Publish this rank and find rank 0's witness, within a limit, since all ranks have come a moment ago."""
        bound = timedelta(seconds=max(self.limit, _SECONDS_TO_START))
        subject = "the start of the watch"
        others = ports_towards(self._server_place[1])
        store = within(bound, subject, lambda: clone(self._job_store))
        self._ports |= ports_towards(self._server_place[1]) - others
        self._heart = Heartbeat(store, self._ring, self._observer.look, serves=self._serves)
        try:
            within(bound, subject, lambda: self._heart.prepare(self._witness.address))
            agree("all are ready", range(self._ring.world_size), bound, subject=subject)
        except Exception as error:
            if self._heart.first_witness is not None and is_of_transport(error):
                self._heart.lost, self._last_doing = error, self._observer.read_traceback(error.__traceback__)
                self._judge_store(f"could not be asked at {subject}")
                self._tell()
            raise

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._note_exception(error)
        self.stop()

    @property
    def verdict(self) -> str | None:
        """The description of a fault, the same text on all ranks; None without a fault."""
        found = self._heart.verdict or self._local
        return found.text if found else None

    @property
    def is_of_this_job(self) -> bool:
        """Return whether the watch is running, in the ``torch.distributed`` world in which it was started."""
        try:
            return not self._stopped.is_set() and default_store() is self._job_store
        except ValueError:  # torch.distributed was destroyed
            return False

    def stop(self) -> None:
        """Stop the watch on this rank; other ranks then know that this one has ended. Idempotent."""
        if self._stopped.is_set() or os.getpid() != self._pid:
            return
        self._stopped.set()
        self._heart.stop(0.0 if self._local is not None else 2 * self._ring.interval + 2)
        if self._heart.verdict is not None and self._heart.verdict.speaker == self._ring.rank:
            self._speak()  # it may have come with the last beat, when the judging thread had ended
        if self._serves and self.verdict is not None and self._heart.lost is not None:
            time.sleep(1.5 * self._ring.interval + 0.5)  # until the others have read the verdict
        self._judge.join(2)
        self._witness.end()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook_before
        atexit.unregister(self._at_exit)

    def compare_steps(self, group: dist.ProcessGroup, taken: int) -> None:
        """Compare the steps that the ranks of a group have taken, and print a difference once; nothing waits for it.

        Where ranks call the same collectives in each step, a rank that leaves out a step has called more of them by its
        next one. The nth call for a group is compared with the nth calls on other ranks.
        """
        self._heart.compare_steps(wait_over("step", group), taken, calls_of(group))

    # -- the judging thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        unanswered, asked_since, before = 0.0, None, time.monotonic()
        while not self._stopped.wait(_TICK):
            self._keep_witness()
            now = time.monotonic()
            awake, before = min(now - before, 5 * _TICK), now  # time in which this process was stopped does not count
            since = self._heart.asked_since
            unanswered = unanswered + awake if since is not None and since == asked_since else 0.0
            asked_since = since
            if self.verdict is None and unanswered >= heartbeat.ASK_AT * self.limit:
                self._judge_store(f"has not answered for {unanswered:.0f} s")
                unanswered = 0.0
            elif self.verdict is None and self._heart.lost is not None and self._needs_the_store(awake):
                self._judge_store(f"has closed its connections ({first_line(self._heart.lost)})")
            if self.verdict is not None:
                self._end_what_is_blocked()
                return

    def _keep_witness(self) -> None:
        """Start another witness if this rank's was killed; without one, a rank in a long C call looks dead."""
        if not self._witness.has_ended or time.monotonic() < self._next_witness_at:
            return
        self._next_witness_at = time.monotonic() + _SECONDS_BETWEEN_WITNESSES
        with suppress(LaunchError, OSError):  # it is tried again later
            self._witness = Witness(self._witness.address.host)
            self._ports.add(self._witness.address.port)
            self._heart.move_witness(self._witness.address)

    def _needs_the_store(self, passed: float) -> bool:
        """Return whether this rank waits, maybe for the process that served the store; that one may end before."""
        doing = self._observer.look()
        self._progress.look(doing, passed)
        if doing.wait is not None or (doing.still >= STILL and doing.phase not in (SAVES, OTHERWISE)):
            return True
        has_ended = self._heart.first_rank.state == heartbeat.HAS_ENDED
        waits_long = self._progress.seconds >= heartbeat.ASK_AT * self.limit
        return not has_ended and self._progress.is_stuck(doing) and waits_long

    def _judge_store(self, what: str) -> None:
        """Decide on this rank alone, without the store, whether the process that serves the store is at fault."""
        host, port = self._server_place
        lines = [f"the store of the job at {host}:{port} {what}."]
        if self._is_served_by_rank_0:
            last, witness = self._heart.first_rank, self._heart.first_witness
            assert witness is not None
            state = ask(witness, heartbeat.WITNESS_SECONDS)
            if state is State.ALIVE and self._heart.lost is None:
                return
            lines += [f"{last.named(0)}, which serves it, {state.value}.", f"  It was last seen {last.doing}."]
        else:
            lines.append("The launcher on that host serves it: it has ended or stopped, or its host is cut off.")
        self._local = Verdict("\n".join([heartbeat.headline(self._ring.world_size), *lines]), self._ring.rank)

    def _end_what_is_blocked(self) -> None:
        """Shut down connections while the main thread waits; end the process if it makes no progress."""
        verdict = self._heart.verdict or self._local
        assert verdict is not None
        if verdict.speaker == self._ring.rank:
            self._speak()
        progress = self._progress = Progress(self._bytes_moved)
        while not self._stopped.wait(_TICK):
            doing = self._observer.look()
            progress.look(doing, _TICK)
            if not self.is_of_this_job:
                progress.seconds = 0.0
            elif doing.wait is not None or doing.still >= STILL or progress.seconds >= STILL:
                shut_down(self._server_place[1], self._ports)
            if progress.is_stuck(doing):
                self._tell()
                self._witness.end()
                end_process()

    # -- output --------------------------------------------------------------------------------------------------------

    def _speak(self) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            tell(self.verdict or "")

    def _tell(self) -> None:
        """Print the verdict and the activity of this rank, once."""
        if self._is_told:
            return
        self._is_told = True
        self._speak()
        tell(f"Here: {self._ring.here}, {self._last_doing or self._observer.look()}.")

    # -- the end of the program ----------------------------------------------------------------------------------------

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._hook_before(kind, error, trace)
        self._end_by(error)

    def _note_exception(self, error: BaseException) -> None:
        """Report this rank's exception to the others, or wait for the cause if it is only a consequence."""
        if self._last_doing is not None or self._stopped.is_set():
            return
        self._last_doing = doing = self._observer.read_traceback(error.__traceback__)
        is_consequence = self.verdict is not None or is_of_transport(error)
        self._heart.state = heartbeat.HAS_FAILED
        if self.verdict is None:
            kind = heartbeat.TRANSPORT if is_consequence else heartbeat.FAILED
            what = f"{'could not reach others' if is_consequence else 'has failed'}: {first_line(error)}"
            found = RankFault(kind, self._ring.rank, f"{self._ring.here} {what}.\n  It was {doing}.")
            self._heart.report(found, doing.wait.ranks if doing.wait and is_consequence else ())
        if not isinstance(error, KeyboardInterrupt):
            self._await_verdict(self.limit + 3 if is_consequence else 3 * self._ring.interval + 1)
        if self.verdict is not None and is_consequence:
            self._tell()

    def _await_verdict(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.verdict is None and time.monotonic() < until:
            if self._heart.lost is not None:
                self._judge_store(f"has closed its connections ({first_line(self._heart.lost)})")
            time.sleep(_TICK / 4)

    def _at_exit(self) -> None:
        """Report an exception that was not caught, after its traceback: Python keeps it as ``sys.last_value``."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self._end_by(error)
        self.stop()

    def _end_by(self, error: BaseException) -> None:
        """Report an exception, and end the process in time, since torch may wait for other ranks at its end."""
        if os.getpid() == self._pid:
            self._note_exception(error)
            if self.verdict is not None and not self._stopped.is_set():  # another hook may keep a stopped watch's
                faulthandler.dump_traceback_later(GRACE, exit=True)
