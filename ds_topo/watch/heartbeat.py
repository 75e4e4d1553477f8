"""The thread that tells the other ranks what this one does, and hears of its neighbor and of faults.

Ranks form a ring. Each one writes its own beat and reads that of the next rank which has not ended, that of the first
rank, and two words that are the same for all: two requests, whatever the number of ranks. Only in a fault is more read.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ds_topo.launch.identity import COORDINATE
from ds_topo.process_groups.torch_names import Store, append, get_several
from ds_topo.watch.activity import MAX_RANKS, Activity, Wait
from ds_topo.watch.findings import (
    BLOCKED,
    CONCLUSIVE,
    ENDED,
    GONE,
    HANDLES,
    STOPPED,
    UNREACHABLE,
    Finding,
    Who,
    blocked,
    message,
    read,
)
from ds_topo.watch.steps import StepComparison, Steps
from ds_topo.watch.witness import State, ask_all

RUNS, HAS_ENDED, HAS_FAILED = "runs", "ended", "failed"
WITNESS_SECONDS = 2.0
"""How long an answer of a witness may take; it may have to wait for a processor."""
_REPORTS = 16
"""So many findings of each kind are kept: in a large job all ranks may have the same one."""
_WINDOW = 64
"""So many ranks behind a silent one are looked at, too: its whole host may be gone."""
_CLOSURE = 256
"""So many ranks that wait for each other are looked at."""
_HASTE = 4
"""So many times faster beats come in an alarm."""
ASK_AT = 0.75
"""Of the limit: so that the answer is known to all within it, or hardly later."""
_ABOUT = 0.9 * ASK_AT
"""Of the limit: ranks do not begin to wait at the same time."""
_ABSENT = (GONE, STOPPED, UNREACHABLE, HANDLES)
_KINDS = {State.GONE: GONE, State.STOPPED: STOPPED, State.UNREACHABLE: UNREACHABLE}


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    number: int
    state: str
    coordinate: str
    doing: Activity

    @classmethod
    def read(cls, text: bytes) -> Beat:
        """Of another rank."""
        fields = json.loads(text)
        return cls(**{**fields, "doing": Activity.from_json(fields["doing"])})

    def to_text(self) -> str:
        """What :meth:`read` takes."""
        return json.dumps({**vars(self), "doing": self.doing.to_json()})


@dataclass(frozen=True)
class Verdict:
    """What all ranks say of a fault."""

    text: str
    speaker: int
    """The rank that writes it at once, for all; -1 where each has its own traceback."""
    absent: int = 0
    """How many ranks will not say that they have ended."""


@dataclass(frozen=True)
class Ring:
    """What all ranks of a watch have in common, and which of them this one is."""

    token: str
    """Where in the store."""
    rank: int
    world_size: int
    limit: float
    """Seconds of silence until a rank is asked for."""
    interval: float
    """Seconds between beats."""

    def key(self, name: str, which: object = "") -> str:
        """Of the store."""
        return f"{self.token}/{name}/{which}"

    def after(self, rank: int, steps: int = 1) -> int:
        """The rank that follows."""
        return (rank + steps) % self.world_size


class Heartbeat:
    """Of one rank.

    Args:
        store: a connection of its own; after the start it is used by this thread alone.
        ring: see there.
        look: what this rank is doing.
        serves: whether the store ends with this process.
    """

    def __init__(self, store: Store, ring: Ring, look: Callable[[], Activity], *, serves: bool) -> None:
        self._store, self._ring, self._look, self._serves = store, ring, look, serves
        self.state = RUNS
        self.verdict: Verdict | None = None
        self.lost: Exception | None = None
        """Why the store can no longer be asked."""
        self.asked_since: float | None = None
        """When the request was made that has not been answered yet."""
        self.first_rank: Beat | None = None
        """What the first rank said last: it may serve the store."""
        self.first_host = ""
        self._number = 0
        self._beat_at = time.monotonic()
        self._neighbor = ring.after(ring.rank)
        self._heard = -1
        self._silence = self._alarmed = 0.0
        """Seconds that this rank was awake for: while its process is stopped, it counts nothing."""
        self._blamed = self._asked_in_alarm = -1
        """Neighbors that need not be asked for again."""
        self._passed: list[int] = []
        """Neighbors that have ended."""
        self._has_reported = False
        self._inquiries = 0
        self._steps: queue.SimpleQueue[Steps] = queue.SimpleQueue()
        self._comparison = StepComparison(ring.rank, lambda which: ring.key("steps", which))
        self._to_report: queue.SimpleQueue[tuple[Finding, Sequence[int]]] = queue.SimpleQueue()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ds_topo watch: beats", daemon=True)

    # -- of all threads

    def prepare(self, host: str, address: tuple[str, int]) -> tuple[str, int]:
        """Before all ranks agree to start: what others find of this one. Where the first rank's witness answers."""
        ring = self._ring
        self._store.set(ring.key("who", ring.rank), json.dumps({"host": host, "address": address}))
        self._store.set(ring.key("beat", ring.rank), self._own(Activity()).to_text())
        if ring.rank == 0:
            for name in ("alarm", "verdict", "found"):
                self._store.set(ring.key(name), "")
        known = json.loads(self._store.get(ring.key("who", 0)))
        self.first_host, (first_host, port) = known["host"], known["address"]
        self.first_rank = Beat.read(self._store.get(ring.key("beat", 0)))
        return first_host, port

    def start(self) -> None:
        """Beat from now on."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Say that this rank has ended, and end; but wait no longer than that for an answer."""
        if self.state == RUNS:
            self.state = HAS_ENDED
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def report(self, finding: Finding, suspects: Sequence[int] = ()) -> None:
        """Tell the other ranks, at once; look whether one of the suspects has ended."""
        self._to_report.put((finding, suspects))
        self._wake.set()

    def note(self, steps: Steps) -> None:
        """Compare what this rank has done with what others of the group have, at some later beat."""
        self._steps.put(steps)

    # -- of its own thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                is_alarmed = self._beat()
                self._wake.wait(self._ring.interval / (_HASTE if is_alarmed else 1))
                self._wake.clear()
            self._beat()
            self._linger()
        except RuntimeError as error:  # torch's, of a connection that has ended
            self.lost = error
        except Exception as error:  # of ours: no reason to end a training
            traceback.print_exc()
            print(f"ds_topo watch: it goes on without rank {self._ring.rank}: {error}", file=sys.stderr, flush=True)
        finally:
            self.asked_since = None

    def _beat(self) -> bool:
        """Tell and hear; whether there is an alarm."""
        ring, doing = self._ring, self._look()
        self._number += 1
        self.asked_since = now = time.monotonic()
        awake, self._beat_at = min(now - self._beat_at, 2 * ring.interval), now
        self._store.set(ring.key("beat", ring.rank), self._own(doing).to_text())
        while not self._to_report.empty():
            self._tell(*self._to_report.get())
        while not self._steps.empty():
            if told := self._comparison.difference(self._store, self._steps.get(), self._known):
                print(told, file=sys.stderr, flush=True)
        keys = [ring.key("beat", self._neighbor), ring.key("beat", 0), ring.key("alarm"), ring.key("verdict")]
        neighbor, first, alarm, verdict = get_several(self._store, keys)
        self.first_rank = Beat.read(first)
        if verdict and self.verdict is None:
            self._adopt(verdict)
        if self.verdict is None:
            self._consider_neighbor(Beat.read(neighbor), awake, is_alarm=bool(alarm))
            self._consider_own_wait(doing)
            if alarm:
                self._consider_alarm(awake)
        self.asked_since = None
        return bool(alarm)

    def _consider_neighbor(self, beat: Beat, awake: float, *, is_alarm: bool) -> None:
        ring, has_moved = self._ring, beat.number != self._heard
        self._heard = beat.number
        self._silence = 0.0 if has_moved else self._silence + awake
        if beat.state != RUNS:
            if self._neighbor != ring.rank:
                self._passed += [self._neighbor] if beat.state == HAS_ENDED else []
                self._neighbor, self._heard, self._silence = ring.after(self._neighbor), -1, 0.0
            return
        is_silent = self._silence >= ASK_AT * ring.limit
        if self._neighbor == self._blamed or not (is_silent or (is_alarm and self._neighbor != self._asked_in_alarm)):
            return
        self._asked_in_alarm = self._neighbor if is_alarm else -1
        for finding in self._inquire(is_silent):
            self._blamed = self._neighbor
            self._tell(finding)

    def _inquire(self, is_silent: bool) -> Iterator[Finding]:
        """Ask for the neighbor, and if that is gone for those behind it, too: their host may be."""
        ring = self._ring
        window = [ring.after(self._neighbor, steps) for steps in range(min(_WINDOW, ring.world_size - 1))]
        states = self._ask(window if is_silent else window[:1])
        if not _is_evidence(states[self._neighbor], is_silent):
            return
        states |= self._ask([rank for rank in window if rank not in states])
        for rank, beat in self._beats(window).items():
            if beat.state == RUNS and _is_evidence(states[rank], is_silent):
                yield self._finding(_KINDS[states[rank]], rank, states[rank].value, beat)

    def _ask(self, ranks: Sequence[int]) -> dict[int, State]:
        known = get_several(self._store, [self._ring.key("who", rank) for rank in ranks]) if ranks else []
        addresses = {rank: tuple(json.loads(text)["address"]) for rank, text in zip(ranks, known, strict=True)}
        self.asked_since = None
        try:
            return ask_all(addresses, WITNESS_SECONDS)
        finally:
            self.asked_since = time.monotonic()

    def _consider_own_wait(self, doing: Activity) -> None:
        """Whoever waits for long looks at those that it waits for; one of them, for all."""
        ring, wait = self._ring, doing.wait
        if wait is None or doing.seconds < ASK_AT * ring.limit:
            self._inquiries = 0
            return
        ranks = self._awaited(wait)
        if not ranks or doing.seconds < ASK_AT * ring.limit + 2 * ring.interval * self._inquiries:
            return
        self._inquiries += 1
        if self._store.add(ring.key("asks", f"{wait.name}/{wait.call}/{self._inquiries}"), 1) == 1:
            for finding in self._held_up(doing, ranks, are_waited_for=bool(wait.name)):
                self._tell(finding)

    def _awaited(self, wait: Wait) -> Sequence[int]:
        """Ranks that may be waited for; none where that is not known."""
        if not wait.name and self._ring.world_size <= MAX_RANKS:  # an agreement, or a call that is not known
            return range(self._ring.world_size)
        return wait.ranks

    def _held_up(self, doing: Activity, ranks: Sequence[int], *, are_waited_for: bool) -> list[Finding]:
        """Why ranks do not come; nothing where one of them may still, or another one may be waited for."""
        asked: dict[int, Beat] = {}
        found: list[Finding] = []
        ahead, may_come = sorted(ranks), False
        while ahead and len(asked) < _CLOSURE:
            new = self._beats(ahead)
            asked |= new
            for rank, beat in new.items():
                if beat.state == HAS_ENDED:
                    found.append(self._finding(ENDED, rank, "has ended while others wait for it", beat))
                elif beat.doing.handled >= self._ring.limit:
                    what = f"keeps others waiting while it handles {beat.doing.handling}"
                    found.append(self._finding(HANDLES, rank, what, beat))
                else:
                    may_come |= beat.doing.wait is None or beat.doing.quiet < _ABOUT * self._ring.limit
            waits = [beat.doing.wait for beat in new.values() if beat.doing.wait]
            may_come |= any(not self._awaited(wait) for wait in waits)
            ahead = sorted({other for wait in waits for other in self._awaited(wait)} - asked.keys())
        if found:
            return found if are_waited_for or not may_come else []
        if may_come:
            return []
        told = blocked([(rank, str(beat.doing)) for rank, beat in sorted(asked.items())])
        return [self._finding(BLOCKED, self._ring.rank, told, self._own(doing))]

    def _consider_alarm(self, awake: float) -> None:
        """Write the verdict when all that matters is known: ranks that have reported do so, else any other one."""
        ring = self._ring
        self._alarmed += awake
        while self._passed:
            rank = self._passed.pop()
            self._tell(self._finding(ENDED, rank, "has ended before the others", self._beats([rank])[rank]))
        if not self._has_reported and self._alarmed < ring.limit + 2:
            return
        findings = read(self._store.get(ring.key("found")).decode())
        is_conclusive = any(finding.kind <= CONCLUSIVE for finding in findings)
        if self._alarmed >= (ring.interval if is_conclusive else ring.limit):
            named = {finding.who.rank for finding in findings if finding.kind <= CONCLUSIVE}
            speaker = next((rank for rank in range(ring.world_size) if rank not in named), -1)
            absent = len({finding.who.rank for finding in findings if finding.kind in _ABSENT})
            text = json.dumps(vars(Verdict(message(findings, ring.world_size), speaker, absent)))
            self._adopt(self._store.compare_set(ring.key("verdict"), "", text))

    def _adopt(self, text: bytes) -> None:
        self.verdict = Verdict(**json.loads(text))
        self._store.add(self._ring.key("read"), 1)

    def _tell(self, finding: Finding, suspects: Sequence[int] = ()) -> None:
        self._has_reported = True
        ring = self._ring
        if self._store.add(ring.key("reports", finding.kind), 1) <= _REPORTS:
            append(self._store, ring.key("found"), finding.to_line())
            self._store.set(ring.key("alarm"), "!")
        for rank, beat in self._beats(suspects).items():
            if beat.state == HAS_ENDED:
                self._tell(self._finding(ENDED, rank, "has ended while others wait for it", beat))

    def _finding(self, kind: int, rank: int, what: str, beat: Beat) -> Finding:
        own = self._own(self._look())
        was = f"was, when last heard of, {beat.doing}"
        seen_by = self._who(self._ring.rank, own)
        return Finding(kind, self._who(rank, beat), what, was, seen_by, str(own.doing))

    def _known(self, rank: int) -> Who:
        return self._who(rank, self._beats([rank])[rank])

    def _who(self, rank: int, beat: Beat) -> Who:
        return Who(rank, json.loads(self._store.get(self._ring.key("who", rank)))["host"], beat.coordinate)

    def _own(self, doing: Activity) -> Beat:
        return Beat(self._number, self.state, os.environ.get(COORDINATE, ""), doing)

    def _beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        texts = get_several(self._store, [self._ring.key("beat", rank) for rank in ranks]) if ranks else []
        return {rank: Beat.read(text) for rank, text in zip(ranks, texts, strict=True)}

    def _linger(self) -> None:
        """The process that serves the store ends after those that it serves, unless they take long."""
        ring = self._ring
        awaited = ring.world_size - (self.verdict.absent if self.verdict else 0)
        ended = self._store.add(ring.key("ends"), 1)
        until = time.monotonic() + 1.5 * ring.interval + 0.5  # all have beaten once more by then
        while self._serves and ended < awaited and time.monotonic() < until:
            time.sleep(ring.interval / 10)
            ended = self._store.add(ring.key("ends"), 0)


def _is_evidence(state: State, is_silent: bool) -> bool:
    """Whether a rank is to blame: a process that is gone is, others only if nothing was heard of them for long."""
    return state is State.GONE or (is_silent and state is not State.ALIVE)
