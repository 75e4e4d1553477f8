"""Exchange heartbeats between ranks, report faults through the store, and agree on one verdict.

Ranks form a ring. Each one writes its own beat, and reads the beat of the next rank that has not ended, the beat of
rank 0, and two keys that all ranks share. This takes two requests, for any number of ranks. Ranks read more only after
a fault. It is no council (:mod:`ds_topo.launch.council`): nobody waits for a beat, and any rank may write the verdict.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from pydantic import TypeAdapter

from ds_topo.base.torch_names import Store, append, get_several
from ds_topo.errors import listed, tell
from ds_topo.health.activity import MAX_RANKS, Activity, Wait
from ds_topo.health.witness import Address, State, ask_all
from ds_topo.launch.council import linger
from ds_topo.launch.launchers import COORDINATE, named

RUNS, HAS_ENDED, HAS_FAILED = "runs", "ended", "failed"
FAILED, GONE, STOPPED, UNREACHABLE, HANDLES, ENDED, BLOCKED, TRANSPORT = range(8)
"""Causes of faults, the most telling one first: findings of the first kind explain all others."""
CONCLUSIVE = BLOCKED
"""A finding of this kind or an earlier one ends the job."""
_ABSENT = (GONE, STOPPED, UNREACHABLE, HANDLES)
_KINDS = {State.GONE: GONE, State.STOPPED: STOPPED, State.UNREACHABLE: UNREACHABLE}
_REMEDIES = {
    FAILED: "Its own output has the traceback.",
    GONE: "Its own output may say more, and the system's log of that host (out of memory? killed?).",
    STOPPED: "SIGCONT lets it continue. A user, a scheduler or a debugger may have stopped it.",
    UNREACHABLE: "Its host is down or cut off: look at its network and its system's log.",
    HANDLES: "A handler of an exception must not keep a rank alive while others wait for it: let the rank end.",
    ENDED: "It took fewer steps, or called fewer collectives, than the others: sys.exit(), return or a break?",
    BLOCKED: "Ranks of one group have called other collectives, or in another order: compare the lines above.",
    TRANSPORT: "All ranks are alive: compare the calls in which they waited, and look at the network between them.",
}
WITNESS_SECONDS = 2.0
"""The timeout of a question to a witness, which may have to wait for a processor."""
ASK_AT = 0.75
"""The share of the limit after which a rank's witness is asked, so that all know the answer within about the limit."""
_ABOUT = 0.9 * ASK_AT
"""The share of the limit after which another rank's wait counts as long: ranks do not start to wait simultaneously."""
_HASTE = 4
"""The factor by which beats are more frequent during an alarm."""
_REPORTS = 16
"""The most findings of each kind that are kept: in a large job all ranks may report the same."""
_WINDOW = 64
"""The number of ranks after a silent one that are checked, too: its whole host may be gone."""
_CLOSURE = 256
"""The most ranks that are checked for waiting on each other."""
_SHOWN = 6
"""The most ranks that a message describes in full."""
_KEPT = 64
"""The number of step comparisons that stay in the store, since ranks come to them at different beats."""


class RankFault(NamedTuple):
    """A fault of one rank, as a rank found it."""

    kind: int
    rank: int
    text: str


def headline(world_size: int) -> str:
    """Return the first line of the message about a fault."""
    return f"ds_topo watch: a fault in a job of {world_size} ranks."


def message(findings: Iterable[RankFault], world_size: int) -> str:
    """Describe the cause: the findings of the most telling kind, each rank once, and the first few in full."""
    by_rank: dict[int, RankFault] = {}
    for finding in sorted(findings, key=lambda finding: finding[:2]):
        by_rank.setdefault(finding.rank, finding)
    first = min(finding.kind for finding in by_rank.values())
    of_kind = [finding for finding in by_rank.values() if finding.kind == first]
    shown = 1 if first == BLOCKED else _SHOWN
    lines = [headline(world_size), *(finding.text for finding in of_kind[:shown])]
    if len(of_kind) > shown and first != BLOCKED:
        lines.append(f"The same: ranks {listed([finding.rank for finding in of_kind[shown:]], 32)}.")
    return "\n".join([*lines, _REMEDIES[first]])


def blocked(waits: Sequence[tuple[int, str]]) -> str:
    """Describe ranks that wait for each other, as a predicate of one of them."""
    lines = [f"  rank {rank}: {doing}" for rank, doing in waits[:_SHOWN]]
    lines += [f"  and {len(waits) - _SHOWN} more"] if len(waits) > _SHOWN else []
    return "\n".join(["and others wait for each other, and no byte moves:", *lines])


@dataclass(frozen=True)
class Beat:
    """The state that a rank publishes."""

    number: int
    state: str
    host: str
    coordinate: str
    doing: Activity

    def to_text(self) -> str:
        """Return the beat as JSON, for ``read_beat``."""
        return json.dumps(asdict(self))

    def named(self, rank: int) -> str:
        """Describe the rank whose beat this is."""
        return named(rank, self.host, self.coordinate)


read_beat = TypeAdapter(Beat).validate_json


class Verdict(NamedTuple):
    """The one message of all ranks about a fault."""

    text: str
    speaker: int
    """The rank that writes it at once, for all; -1 where each rank has its own traceback."""
    absent: int = 0
    """The number of ranks that will not report that they have ended."""


@dataclass(frozen=True)
class Ring:
    """The properties of a watch that all ranks share, and this rank."""

    token: str
    """The prefix of keys in the store."""
    rank: int
    host: str
    world_size: int
    limit: float
    """The seconds of silence after which a rank is checked."""
    interval: float
    """The seconds between beats."""

    @property
    def here(self) -> str:
        """This rank, described."""
        return named(self.rank, self.host, os.environ.get(COORDINATE, ""))

    def key(self, name: str, which: object = "") -> str:
        """Return a key of the store."""
        return f"{self.token}/{name}/{which}"

    def after(self, rank: int, steps: int = 1) -> int:
        """Return the rank that follows in the ring."""
        return (rank + steps) % self.world_size


class Heartbeat:
    """The heartbeat of one rank, and the thread that exchanges it.

    Once it has started, only its thread uses its connection to the store. ``serves``: the store ends with this process.
    """

    def __init__(self, store: Store, ring: Ring, look: Callable[[], Activity], *, serves: bool) -> None:
        self._store, self._ring, self._look, self._serves = store, ring, look, serves
        self._number = 0
        # read by other threads
        self.state = RUNS
        self.verdict: Verdict | None = None
        self.lost: Exception | None = None
        """The error after which the store cannot be used."""
        self.asked_since: float | None = None
        """The time of the request to the store that has not been answered yet."""
        self.first_rank = self._own(Activity())
        """The last beat of rank 0, which may serve the store."""
        self.first_witness: Address | None = None
        """The address of rank 0's witness."""
        # used by the thread alone
        self._beat_at = time.monotonic()
        self._neighbor = ring.after(ring.rank)
        self._heard = -1
        self._silence = self._alarmed = 0.0
        """Seconds during which this process ran: while it is stopped itself, it counts nothing."""
        self._blamed = self._asked_in_alarm = -1
        """Neighbors that need not be checked again."""
        self._passed: list[int] = []
        """Neighbors that have ended."""
        self._has_reported = False
        self._inquiries = 0
        self._comparisons: Counter[str] = Counter()
        """The numbers of step comparisons, by the names of groups."""
        self._first_keys: deque[str] = deque()
        """Keys of step comparisons to which this rank was the first to come."""
        self._warned: set[str] = set()
        """Groups for which different steps were reported."""
        # written by other threads
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Calls that the thread makes at its next beat, since it alone uses the store."""
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ds_topo watch: beats", daemon=True)

    # -- called by other threads ---------------------------------------------------------------------------------------

    def prepare(self, address: Address) -> None:
        """Publish the address of this rank's witness, and find rank 0's. All ranks do so before they agree to start."""
        ring = self._ring
        self._publish(address)
        self._store.set(ring.key("beat", ring.rank), self._own(Activity()).to_text())
        if ring.rank == 0:
            for name in ("alarm", "verdict", "found"):
                self._store.set(ring.key(name), "")
        self.first_rank = read_beat(self._store.get(ring.key("beat", 0)))
        self.first_witness = Address(*json.loads(self._store.get(self._ring.key("witness", 0))))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Publish that this rank has ended, and stop; wait at most so many seconds for the thread."""
        if self.state == RUNS:
            self.state = HAS_ENDED
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def report(self, finding: RankFault, suspects: Sequence[int] = ()) -> None:
        """Report a finding to the other ranks at once, and any of the suspects that has ended."""
        self._requests.put(partial(self._tell, finding, suspects))
        self._wake.set()

    def move_witness(self, address: Address) -> None:
        """Publish another witness of this rank, at the next beat."""
        self._requests.put(partial(self._publish, address))

    def compare_steps(self, over: Wait, taken: int, calls: int) -> None:
        """Compare this rank's steps, and its calls over a group, with those of the group's ranks, at a later beat."""
        self._requests.put(partial(self._compare_steps, over, taken, calls))

    # -- beats ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                is_alarmed = self._beat()
                self._wake.wait(self._ring.interval / (_HASTE if is_alarmed else 1))
                self._wake.clear()
            self._beat()
            self._linger()
        except RuntimeError as error:  # torch's error for a connection that has ended
            self.lost = error
        except Exception as error:  # our own error must not end a training
            traceback.print_exc()
            tell(f"ds_topo watch: it continues without rank {self._ring.rank}, whose heartbeat failed: {error}")
        finally:
            self.asked_since = None

    def _beat(self) -> bool:
        """Write this rank's beat and read the others'; return whether there is an alarm."""
        ring, doing = self._ring, self._look()
        self._number += 1
        self.asked_since = now = time.monotonic()
        awake, self._beat_at = min(now - self._beat_at, 2 * ring.interval), now
        self._store.set(ring.key("beat", ring.rank), self._own(doing).to_text())
        while not self._requests.empty():
            self._requests.get()()
        keys = [ring.key("beat", self._neighbor), ring.key("beat", 0), ring.key("alarm"), ring.key("verdict")]
        neighbor, first, alarm, verdict = get_several(self._store, keys)
        self.first_rank = read_beat(first)
        if verdict and self.verdict is None:
            self.verdict = Verdict(*json.loads(verdict))
        if self.verdict is None:
            self._consider_neighbor(read_beat(neighbor), awake, is_alarm=bool(alarm))
            self._consider_own_wait(doing)
            if alarm:
                self._consider_alarm(awake)
        self.asked_since = None
        return bool(alarm)

    def _publish(self, address: Address) -> None:
        self._store.set(self._ring.key("witness", self._ring.rank), json.dumps(address))

    def _compare_steps(self, over: Wait, taken: int, calls: int) -> None:
        """Compare with the first rank that came to the same comparison; warn once per group. This ends no job."""
        self._comparisons[over.name] += 1
        key = self._ring.key("steps", f"{over.name}/{self._comparisons[over.name]}")
        first = self._store.compare_set(key, "", f"{self._ring.rank} {taken} {calls}")
        rank, first_taken, first_calls = map(int, first.split())
        if rank == self._ring.rank:
            self._first_keys.append(key)
            if len(self._first_keys) > _KEPT:
                self._store.delete_key(self._first_keys.popleft())
        elif (first_taken, first_calls) != (taken, calls) and over.name not in self._warned:
            self._warned.add(over.name)
            tell(
                "ds_topo watch: ranks are at different steps:\n"
                f"  {self._ring.here} has called {calls} collectives of {over.group} by its step {taken},\n"
                f"  {self._beats([rank])[rank].named(rank)} has called {first_calls} by its step {first_taken}.\n"
                "The rank with more calls has left out engine.step(), or its program calls other collectives besides.\n"
                "Replicas may differ: ds_topo.check_replicas(engine) compares them."
            )

    def _linger(self) -> None:
        """Keep the process that serves the store until the others have ended, but not for long."""
        ring = self._ring
        awaited = ring.world_size - (self.verdict.absent if self.verdict else 0)
        self._store.add(ring.key("ends"), 1)
        if self._serves:
            moment = timedelta(seconds=1.5 * ring.interval + 0.5)  # all have beaten once more by then
            linger(lambda: self._store.add(ring.key("ends"), 0) >= awaited, moment)

    # -- a silent neighbor ---------------------------------------------------------------------------------------------

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

    def _inquire(self, is_silent: bool) -> Iterator[RankFault]:
        """Ask the neighbor's witness, and if the neighbor is gone, also those behind it: their host may be gone."""

        def is_evidence(state: State) -> bool:  # a process other than one that is gone must have been silent for long
            return state is State.GONE or (is_silent and state is not State.ALIVE)

        ring = self._ring
        window = [ring.after(self._neighbor, steps) for steps in range(min(_WINDOW, ring.world_size - 1))]
        states = self._ask(window if is_silent else window[:1])
        if not is_evidence(states[self._neighbor]):
            return
        states |= self._ask([rank for rank in window if rank not in states])
        for rank, beat in self._beats(window).items():
            if beat.state == RUNS and is_evidence(states[rank]):
                yield self._finding(_KINDS[states[rank]], rank, states[rank].value, beat)

    def _ask(self, ranks: Sequence[int]) -> dict[int, State]:
        texts = get_several(self._store, [self._ring.key("witness", rank) for rank in ranks]) if ranks else []
        addresses = {rank: Address(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}
        self.asked_since = None
        try:
            return ask_all(addresses, WITNESS_SECONDS)
        finally:
            self.asked_since = time.monotonic()

    # -- a long wait of this rank --------------------------------------------------------------------------------------

    def _consider_own_wait(self, doing: Activity) -> None:
        """Check the ranks that this one has waited for, if it is long; one of the waiting ranks does so for all."""
        ring, wait = self._ring, doing.wait
        if wait is None or doing.seconds < ASK_AT * ring.limit:
            self._inquiries = 0
            return
        ranks = self._awaited(wait)
        if not ranks or doing.seconds < ASK_AT * ring.limit + 2 * ring.interval * self._inquiries:
            return
        self._inquiries += 1
        if self._store.add(ring.key("asks", f"{wait.name}/{wait.call}/{self._inquiries}"), 1) == 1:
            for finding in self._held_up(ranks, are_waited_for=bool(wait.name)):
                self._tell(finding)

    def _awaited(self, wait: Wait) -> Sequence[int]:
        """Return the ranks that a wait may be for; none where they are unknown."""
        if not wait.name and self._ring.world_size <= MAX_RANKS:  # an agreement, or a call over an unknown group
            return range(self._ring.world_size)
        return wait.ranks

    def _held_up(self, ranks: Sequence[int], *, are_waited_for: bool) -> list[RankFault]:
        """Find out why ranks do not come; return nothing if one may still come, or another rank may be awaited."""
        asked: dict[int, Beat] = {}
        found: list[RankFault] = []
        ahead, may_come = sorted(ranks), False
        while ahead and len(asked) < _CLOSURE:
            new = self._beats(ahead)
            asked |= new
            for rank, beat in new.items():
                if beat.state == HAS_ENDED:
                    found.append(self._has_ended(rank, beat))
                elif beat.doing.handled >= self._ring.limit:
                    what = f"keeps others waiting while it handles {beat.doing.handling}"
                    found.append(self._finding(HANDLES, rank, what, beat))
                else:
                    may_come |= beat.doing.wait is None or beat.doing.quiet < _ABOUT * self._ring.limit
            further = [self._awaited(beat.doing.wait) for beat in new.values() if beat.doing.wait]
            may_come |= not all(further)
            ahead = sorted({other for awaited in further for other in awaited} - asked.keys())
        if found or may_come:
            return found if are_waited_for or not may_come else []
        waits = blocked([(rank, str(beat.doing)) for rank, beat in sorted(asked.items())])
        return [RankFault(BLOCKED, self._ring.rank, f"{self._ring.here} {waits}")]

    # -- findings and the verdict --------------------------------------------------------------------------------------

    def _consider_alarm(self, awake: float) -> None:
        """Write the verdict when enough is known; ranks that have reported do so first."""
        ring = self._ring
        self._alarmed += awake
        while self._passed:
            rank = self._passed.pop()
            self._tell(self._has_ended(rank, self._beats([rank])[rank], "has ended before the others"))
        if not self._has_reported and self._alarmed < ring.limit + 2:
            return
        findings = [RankFault(*json.loads(line)) for line in self._store.get(ring.key("found")).splitlines()]
        blamed = {finding.rank for finding in findings if finding.kind <= CONCLUSIVE}
        if self._alarmed >= (ring.interval if blamed else ring.limit):
            speaker = next((rank for rank in range(ring.world_size) if rank not in blamed), -1)
            absent = len({finding.rank for finding in findings if finding.kind in _ABSENT})
            text = json.dumps(Verdict(message(findings, ring.world_size), speaker, absent))
            self.verdict = Verdict(*json.loads(self._store.compare_set(ring.key("verdict"), "", text)))

    def _tell(self, finding: RankFault, suspects: Sequence[int] = ()) -> None:
        """Add a finding to the store and raise the alarm."""
        self._has_reported = True
        ring = self._ring
        if self._store.add(ring.key("reports", finding.kind), 1) <= _REPORTS:
            append(self._store, ring.key("found"), f"{json.dumps(finding)}\n")
            self._store.set(ring.key("alarm"), "!")
        for rank, beat in self._beats(suspects).items():
            if beat.state == HAS_ENDED:
                self._tell(self._has_ended(rank, beat))

    def _has_ended(self, rank: int, beat: Beat, what: str = "has ended while others wait for it") -> RankFault:
        return self._finding(ENDED, rank, what, beat)

    def _finding(self, kind: int, rank: int, what: str, beat: Beat) -> RankFault:
        seen = f"It was last seen {beat.doing}.\n  Noticed by {self._ring.here}, {self._look()}."
        return RankFault(kind, rank, f"{beat.named(rank)} {what}.\n  {seen}")

    def _own(self, doing: Activity) -> Beat:
        return Beat(self._number, self.state, self._ring.host, os.environ.get(COORDINATE, ""), doing)

    def _beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        texts = get_several(self._store, [self._ring.key("beat", rank) for rank in ranks]) if ranks else []
        return {rank: read_beat(text) for rank, text in zip(ranks, texts, strict=True)}
