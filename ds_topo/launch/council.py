"""Decide together through the job's store: all ranks post, one decides, all read.

:class:`Council` is this protocol. Ranks use it to join a job (:mod:`~ds_topo.launch.joining`), to save and load
checkpoints (:mod:`ds_topo.checkpoint.meeting`), to check a cluster (:mod:`ds_topo.health.session`), and to compare
plans that differ (:func:`agree`). Collectives cannot do this: no group exists yet, or one has
failed, and they would pad every rank's value to the longest one.

**Patience.** The rank that decides waits for posts during the fraction ``GATHERING`` of the timeout. The others wait
the whole timeout for the answer, so they read which ranks did not come instead of giving up themselves. Where ranks
work before they post, one may come ``spread`` later than another. Then the rank that decides waits ``spread`` longer,
and the others twice as much, because it may itself come last. torch's own timeout does not expire when the store's
server process is stopped or its host is cut off: :func:`within` abandons a request after ``UNANSWERED_AFTER`` of the
time that it may take.

**Costs.** A rank sends three requests, for any number of ranks. The one that decides sends one that waits for all
posts, one for each ``_AT_ONCE`` of them and one with the answer. Keys are deleted by :func:`leave`.

**Agreements.** ``torch.distributed.new_group`` hangs when ranks pass different lists. In :func:`agree` every rank first
appends one line to a key of the store: its rank, its host and its plan. The last rank to come, or the first whose
patience ends, reads all lines and writes a verdict, which the others wait for: four small requests per rank. All ranks
then continue, or raise the same error. :class:`Round` is a council in which no certain rank decides, so whichever rank
does not come is named. If plans differ, the council of the ranks that have them compares their lines.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ds_topo import errors
from ds_topo.base.backends import device_in_use
from ds_topo.base.torch_names import (
    Store,
    address_of_store,
    append,
    clone,
    communicates,
    default_store,
    get_several,
    served_at,
)
from ds_topo.errors import DisagreementError, StoreTimeoutError, listed, tell, unanswered

Result = TypeVar("Result")
GATHERING = 0.9
"""The share of a timeout for which a rank that decides waits for the others, which then still read its answer."""
UNANSWERED_AFTER = 1.2
"""The share of a timeout after which the store's own timeouts, where they work, have expired."""
MOMENT = timedelta(seconds=2)
"""The longest time that rank 0 waits for the others to read an answer."""
_PART = 1 << 22
"""Characters of a value in one key; the store's server refuses 8 MiB."""
_AT_ONCE = 256
"""Values that one request reads."""

_SECONDS_BETWEEN_ATTEMPTS = 60.0
"""The seconds before a store that did not answer a rank that fails or ends is asked again."""

_silent: WeakKeyDictionary[Store, float] = WeakKeyDictionary()
"""The stores that did not answer, and the monotonic time from which each may be asked again."""
_left: WeakKeyDictionary[Store, dict[int, list[tuple[Sequence[int], str]]]] = WeakKeyDictionary()
"""For each store and each rank that wrote to it: pairs of (ranks that may still read a key, the key)."""


@dataclass
class Council:
    """The ranks that decide together, as one of them takes part.

    The first of the ``members``, which are ascending, decides. Errors are of the class ``error``.
    """

    store: Store
    token: str
    rank: int
    members: Sequence[int]
    subject: str
    timeout: timedelta
    error: type[RuntimeError]
    _readers: int = field(default=0, init=False)
    """The number of ranks that read the last answer."""

    def decide(
        self,
        name: str,
        content: Any,
        judge: Callable[[dict[int, Any]], Any],
        *,
        posting: Sequence[int] | None = None,
        spread: timedelta = timedelta(),
    ) -> Any:
        """Return on every member what ``judge`` returned on the first one for the contents of all, or raise its error.

        Contents and answers are JSON values. Dataclasses in them are read as dicts.

        Args:
            name: the decision, different from all others of this council.
            content: what this rank posts.
            judge: called with the content of each rank that came in time, by rank.
            posting: the ranks that post, the first of which decides; by default all members. If none, the first member
                decides alone.
            spread: the time by which one rank may come later than another.

        Raises:
            StoreTimeoutError: the store does not answer.
            RuntimeError: ``judge`` raised an error, or the rank that decides does not answer. The error is of the class
                ``self.error``, or of the subclass that ``judge`` raised.
        """
        posts = self.members if posting is None else posting
        decider = (posts or self.members)[0]
        gathering, reading = spread + self.timeout * GATHERING, 2 * spread + self.timeout

        def post() -> None:
            if self.rank in posts:
                self._write(f"{name}/{self.rank}", content)

        def gather() -> dict[int, Any]:
            post()
            names = [f"{name}/{rank}" for rank in posts]
            found = ranks_that_came(self.store, [self._key(one) for one in names], gathering) if names else []
            values = self._read([names[index] for index in found])
            return {posts[index]: value for index, value in zip(found, values, strict=True)}

        def read() -> Any:
            post()
            self.store.wait([self._key(f"{name} decided")], reading)
            return self._read([f"{name} decided"])[0]

        cause: Exception | None = None
        outcome: dict[str, Any]
        if self.rank != decider:
            outcome = self.request(reading, read, f"rank {decider} did not report its result, ")
        else:
            posted = self.request(gathering, gather)
            try:
                outcome = {"value": judge(posted)}
            except Exception as error:  # of any class: the other ranks must receive it
                said = "" if isinstance(error, self.error) else f"{self.subject}: rank {decider}: "
                outcome = {"error": type(error).__name__, "text": f"{said}{one_line(error, self.error)}"}
                cause = None if isinstance(error, self.error) else error  # of our own, the text is enough
            outcome["readers"] = len(self.members) - 1 - (len(posts) - len(posted))
            self.request(self.timeout, lambda: self._write(f"{name} decided", outcome))
        self._readers = outcome["readers"]
        if "error" not in outcome:
            return outcome["value"]
        self.end()
        raise class_of(outcome["error"], self.error)(outcome["text"]) from cause

    def end(self) -> None:
        """Let rank 0, which may serve the store and end right afterwards, wait a moment until the others come here.

        Call it after the last decision. One that raises an error has called it.
        """
        if not self._readers:
            return
        key = f"{self.token}/read"

        def count() -> None:
            if self.rank == 0:
                leave(self.store, 0, self.members, [key, f"{key}/all"])
                self.store.wait([f"{key}/all"], min(MOMENT, self.timeout / 4))
            elif self.store.add(key, 1) == self._readers:
                self.store.set(f"{key}/all", "")

        with suppress(RuntimeError):  # this rank knows the outcome
            self.request(self.timeout, count)

    def request(self, limit: timedelta, call: Callable[[], Result], what: str = "") -> Result:
        """Return the result of requests that expire after ``limit``, or raise ``self.error`` if they fail."""
        try:
            return within(limit * UNANSWERED_AFTER, self.subject, call, address_of_store(self.store))
        except StoreTimeoutError:
            raise
        except RuntimeError as error:
            raise self.error(f"{self.subject}: {what}{unanswered(error, limit)}") from None

    def _key(self, name: str, part: int = 0) -> str:
        return f"{self.token}/{name}/{part}"

    def _write(self, name: str, value: Any) -> None:
        """Store a value in parts until the next agreement. The first part, with their number before it, comes last."""
        text = json.dumps(value, default=vars)
        parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
        keys = [self._key(name, number) for number in range(len(parts))]
        for key, part in zip(keys[1:], parts[1:], strict=True):
            self.store.set(key, part)
        self.store.set(keys[0], f"{len(parts)} {parts[0]}")
        leave(self.store, self.rank, self.members, keys)

    def _read(self, names: Sequence[str]) -> list[Any]:
        found = []
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            for name, first in zip(some, get_several(self.store, [self._key(one) for one in some]), strict=True):
                count, _, text = first.partition(b" ")
                more = [self._key(name, number) for number in range(1, int(count))]
                found.append(json.loads(b"".join((text, *(get_several(self.store, more) if more else ())))))
        return found


def leave(store: Store, rank: int, readers: Sequence[int], keys: Iterable[str]) -> None:
    """Delete these keys once all ``readers`` have come to a later agreement, and so have finished their earlier reads.

    torch deletes nothing from the job's store. NCCL's own communicator ids stay.
    """
    _left.setdefault(store, {}).setdefault(rank, []).extend((readers, key) for key in keys)


def take_due(store: Store, rank: int, came: Sequence[int]) -> list[str]:
    """Return and forget this rank's keys that no rank needs, now that the ranks ``came`` are at an agreement."""
    left = _left.get(store, {}).get(rank)
    if not left:
        return []
    here = set(came)
    due = [key for readers, key in left if here.issuperset(readers)]
    left[:] = [(readers, key) for readers, key in left if not here.issuperset(readers)]
    return due


def within(limit: timedelta, what: str, call: Callable[[], Result], address: str | None = None) -> Result:
    """Return the result of ``call()``, or raise its error, but wait no longer than ``limit``.

    The call runs in a thread of its own, on the current thread's device. The thread is abandoned at the limit, and
    :class:`~ds_topo.errors.StoreTimeoutError` names the process that serves the store, by default that of the job.
    """
    result: Future[Result] = Future()
    device = device_in_use()

    def run() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            result.set_result(call())
        except BaseException as error:  # re-raised in the caller's thread
            result.set_exception(error)

    try:
        threading.Thread(target=run, name=f"ds_topo {what}", daemon=True).start()
    except RuntimeError:  # Python ends, and starts no thread any more
        run()
    try:
        return result.result(limit.total_seconds())
    except TimeoutError:
        if result.done():  # it finished at the last moment, or the call itself raised this error
            return result.result()
        raise StoreTimeoutError(
            f"{what}: the store of the job{address_of_store() if address is None else address} did not answer within "
            f"{limit}. The process that serves it (rank 0, or the launcher on its host) has stopped, its host has, or "
            "the link to it is cut: look there, and start the job again"
        ) from None


def apart(store: Store, limit: timedelta, what: str, call: Callable[[Store], Result]) -> Result:
    """Return the result of a call on a connection of its own, for a rank that fails, ends, or begins to listen.

    torch would try to connect to a server that is gone until the job's timeout, so this asks first whether anybody
    listens. Calls of the minute after one without an answer raise at once, so several cost one ``limit``.

    Raises:
        StoreTimeoutError: the store does not answer, or did not a moment ago.
        RuntimeError: the call's own error.
    """
    place = served_at(store)

    def ask() -> Result:
        if place is not None:
            socket.create_connection(place, limit.total_seconds()).close()
        return call(clone(store))

    if time.monotonic() < _silent.get(store, 0.0):
        raise StoreTimeoutError(f"{what}: the store of the job{address_of_store(store)} does not answer")
    try:
        return within(limit, what, ask, address_of_store(store))
    except (StoreTimeoutError, dist.DistNetworkError, OSError) as error:
        _silent[store] = time.monotonic() + _SECONDS_BETWEEN_ATTEMPTS
        raise error if isinstance(error, RuntimeError) else StoreTimeoutError(f"{what}: {error}") from None


def ranks_that_came(store: Store, keys: Sequence[str], patience: timedelta) -> list[int]:
    """Wait until all keys, one of each rank, are set; return the positions of those that were set in time.

    One request checks a range of keys, so a few missing ones of 16,384 are found by some 30 requests each.
    """

    def came(ranks: range) -> list[int]:
        if store.check([keys[rank] for rank in ranks]):
            return list(ranks)
        half = len(ranks) // 2
        return [*came(ranks[:half]), *came(ranks[half:])] if half else []

    with suppress(RuntimeError):
        store.wait(list(keys), patience)
        return list(range(len(keys)))
    return came(range(len(keys)))


def linger(is_over: Callable[[], bool], limit: timedelta) -> None:
    """Wait on the process that serves the store and may exit, until a condition is true, but only a moment."""
    until = time.monotonic() + limit.total_seconds()
    while not is_over() and time.monotonic() < until:
        time.sleep(0.005)


def class_of(name: str, ours: type[RuntimeError]) -> type[RuntimeError]:
    """Return the class of an error that another rank raised: itself, if it is one of ours."""
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, ours) else ours


def one_line(error: Exception, ours: type[Exception]) -> str:
    """Return the message of an error in one line, and its class before it unless it is ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ours) else f"{type(error).__name__}: {text}"


# -- agreements --------------------------------------------------------------------------------------------------------

MAX_MESSAGE = 4000
NOTICE_AFTER = timedelta(seconds=15)
"""The time after which one of the ranks that wait prints for whom."""
_SHOWN_RANKS, _SHOWN_OUTCOMES, _SHOWN_TEXT = 8, 5, 500
_COMPARED = 3
"""The number of different plans that are compared line by line."""
FAILED = "failed: "
_KEYS = ("came", "number", "notice", "patience", "verdict", "read")
"""The keys of a round, besides those that a council makes."""

_rounds: Counter[str] = Counter()
"""The number of agreements of each set of members; equal on all members, since they agree together."""


def agree(
    description: str,
    members: Sequence[int],
    timeout: timedelta,
    *,
    failure: Exception | None = None,
    subject: str = "the process groups to create",
    lines: Sequence[str] | None = None,
) -> str:
    """Check that all ``members`` (global ranks) pass the same ``description``; return a token unique to this round.

    Args:
        description: the text that must be equal on all ranks, or a digest of it.
        members: the ranks that take part, ascending; the same on all of them.
        timeout: the time limit for the whole round.
        failure: the reason why this rank cannot take part. The others then raise at once; this rank re-raises it.
        subject: the thing to agree on, for the message.
        lines: further text that must be equal, of which ranks compare a digest. The message names lines that differ.

    Raises:
        DisagreementError: descriptions differ, a rank failed, or ranks did not come within ``timeout``. The message
            names ranks and hosts and is the same on every rank, of at most ``MAX_MESSAGE`` characters.
    """
    first, last = members[0], members[-1]
    is_run = last - first + 1 == len(members)  # as the largest sets are: O(1) for them
    text = f"{first}-{last}" if is_run else ",".join(map(str, members))
    key = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12]
    _rounds[key] += 1
    token = f"ds_topo/{key}/{_rounds[key]}"
    if len(members) == 1 or not communicates():
        if failure is not None:
            raise failure
        return token
    if lines is not None:
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        description = f"{description}{len(lines)} lines of digest {digest}"
    outcome = f"{FAILED}{type(failure).__name__}: {failure}" if failure is not None else f"plan: {description}"
    round_ = Round(default_store(), token, dist.get_rank(), members, subject, timeout, DisagreementError)
    try:
        verdict = within(timeout * UNANSWERED_AFTER, f"agreement on {subject}", lambda: round_.verdict(outcome, lines))
    except StoreTimeoutError:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    if verdict:
        raise DisagreementError(verdict)
    return token


class Round(Council):
    """One agreement, as one of its members takes part in it."""

    def verdict(self, outcome: str, lines: Sequence[str] | None) -> str:
        """Return the same text on all members: a description of the disagreement, or "" if all outcomes are equal."""
        try:
            if is_last := self._bring(outcome):
                self._judge()
            decided = json.loads(self._await_verdict())
            if decided["all_came"]:  # and so all members have left earlier rounds
                for key in take_due(self.store, self.rank, self.members):
                    self.store.delete_key(key)
            if is_last:
                leave(self.store, self.rank, self.members, map(self._key, _KEYS))
            text = str(decided["text"])
            if text and lines is not None and (compared := decided["compare"]):
                with suppress(RuntimeError):  # one of them died: the verdict stands without the comparison
                    text += self.decide("difference", lines, _difference, posting=compared)
            if text:
                read = self._key("read")
                self.store.add(read, 1)
                if self.rank == 0:
                    linger(lambda: self.store.add(read, 0) >= decided["came"], min(MOMENT, self.timeout / 4))
        except RuntimeError as error:
            text = f"{self._disagreement} {unanswered(error, self.timeout)}"
        return text

    @property
    def _disagreement(self) -> str:
        return f"the ranks do not agree on {self.subject}:"

    def _bring(self, outcome: str) -> bool:
        """Add this rank's outcome; return whether it is the last member to come."""
        digest = hashlib.sha1(outcome.encode(), usedforsecurity=False).hexdigest()[:12]
        line = json.dumps([self.rank, socket.gethostname(), digest, _shortened(outcome, _SHOWN_TEXT)])
        append(self.store, self._key("came"), f"{line}\n")
        return self.store.add(self._key("number"), 1) == len(self.members)

    def _await_verdict(self) -> str:
        """Wait for the verdict; the first rank that waits long says for whom, and one that waits in vain writes it."""
        verdict, patience = self._key("verdict"), self.timeout * GATHERING
        try:
            if patience > 2 * NOTICE_AFTER:
                patience -= NOTICE_AFTER
                try:
                    self.store.wait([verdict], NOTICE_AFTER)
                except RuntimeError:
                    self._say_who_is_missing(patience)
            self.store.wait([verdict], patience)
        except RuntimeError:
            if self.store.add(self._key("patience"), 1) == 1:
                self._judge()
            try:
                self.store.wait([verdict], self.timeout * (1 - GATHERING))
            except RuntimeError:  # the rank that was to write it has died
                self._judge()
        return str(self.store.get(verdict).decode())

    def _say_who_is_missing(self, left: timedelta) -> None:
        if self.store.add(self._key("notice"), 1) > 1:
            return
        missing = listed(self._missing(self._came()), 4 * _SHOWN_RANKS)
        tell(
            f"ds_topo: rank {self.rank} on {socket.gethostname()} has waited {NOTICE_AFTER.seconds} s for ranks "
            f"{missing} to agree on {self.subject}. Call it on every rank: without them it fails in {left}"
        )

    def _missing(self, reports: Sequence[tuple[int, str, str, str]]) -> list[int]:
        here = {rank for rank, *_ in reports}
        return [rank for rank in self.members if rank not in here]

    def _came(self) -> list[tuple[int, str, str, str]]:
        """Return the rank, host, digest and outcome of each member that has come."""
        # compare_set reads without blocking: where all agree, the last rank may have deleted the lines by now
        came = self.store.compare_set(self._key("came"), "", "").decode().splitlines()
        return [(int(rank), host, digest, text) for rank, host, digest, text in map(json.loads, came)]

    def _judge(self) -> None:
        """Write the verdict on what the members brought, unless another rank has written one."""
        reports = self._came()
        missing = self._missing(reports)
        agreed = not missing and len({digest for _, _, digest, _ in reports}) == 1
        agreed = agreed and not reports[0][3].startswith(FAILED)
        verdict = {"text": "", "all_came": True} if agreed else self._problems(reports, missing)
        written = json.dumps(verdict)
        if self.store.compare_set(self._key("verdict"), "", written).decode() == written and agreed:
            for name in ("came", "number"):  # the others only wait for the verdict
                self.store.delete_key(self._key(name))

    def _problems(self, reports: Sequence[tuple[int, str, str, str]], missing: Sequence[int]) -> dict[str, Any]:
        """Return the verdict on outcomes that differ: the message, and one rank of each plan to be compared."""
        text_of: dict[str, str] = {}
        hosts_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, host, digest, text in reports:
            text_of[digest] = text
            hosts_of[digest][host].append(rank)
        size = {digest: sum(map(len, hosts.values())) for digest, hosts in hosts_of.items()}
        first = {digest: min(map(min, hosts.values())) for digest, hosts in hosts_of.items()}
        ordered = sorted(hosts_of, key=lambda digest: (-size[digest], first[digest]))
        shown = sorted(ordered[:_SHOWN_OUTCOMES], key=first.__getitem__)
        waited = self.timeout * GATHERING
        problems = []
        if missing:
            named = f"ranks {listed(missing, 4 * _SHOWN_RANKS)} did not come within {waited}"
            problems.append(f"{named}: let every rank make this call, or raise the timeout if some are slower")
        problems += [f"{_where(hosts_of[digest])} -> {text_of[digest]}" for digest in shown]
        if len(ordered) > len(shown):
            problems.append(f"and {len(ordered) - len(shown)} further plans")
        planned = [first[digest] for digest in ordered if not text_of[digest].startswith(FAILED)]
        text = _shortened("\n  ".join([self._disagreement, *problems]), MAX_MESSAGE - 1000)
        compared = planned[:_COMPARED] if len(planned) > 1 else []
        return {"text": text, "compare": compared, "came": len(reports), "all_came": not missing}


def _where(hosts: Mapping[str, Sequence[int]]) -> str:
    """Describe ranks by host, in the order of the first ones, with the first few ranks named."""
    parts, left = [], _SHOWN_RANKS
    for host, ranks in sorted(hosts.items(), key=lambda item: min(item[1])):
        if left > 0:
            parts.append(f"ranks {sorted(ranks)[:left]} on {host:.64}")
            left -= len(ranks)
    more = sum(map(len, hosts.values())) - _SHOWN_RANKS
    on = f"{len(hosts)} host{'s' * (len(hosts) != 1)}"
    return "; ".join(parts) + (f" and {more} more, on {on}" if more > 0 else "")


def _difference(plans: Mapping[int, Sequence[str]]) -> str:
    """Compare the lines of each rank's plan with those of the first rank.

    >>> _difference({0: ["a", "b"], 3: ["a", "c"]})
    "\\n  only rank 0: ['b']; only rank 3: ['c']"
    """
    (first, reference), *others = plans.items()
    expected = set(reference)
    problems = []
    for rank, plan in others:
        here = set(plan)
        only_first = [line for line in reference if line not in here]
        only_here = [line for line in plan if line not in expected]
        text = f"only rank {first}: {listed(only_first)}; only rank {rank}: {listed(only_here)}"
        problems.append(text if only_first or only_here else f"rank {rank}: the same in another order")
    return "".join(f"\n  {_shortened(problem, 1000 // _COMPARED)}" for problem in problems)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 4]} ..."
