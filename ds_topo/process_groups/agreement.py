"""Agree first: every rank shows the others what it is about to do, through the store, before anything exists.

``torch.distributed.new_group`` with lists that differ between ranks hangs. Here every rank adds its digest of what it
brings to one number of the store, and the last one to come sees from the sum whether all are equal: three small
requests a rank. Only if they are not, or if not all have come when the first rank's patience ends, every rank appends a
line to a key: its number, its host and its digest. The last one reads them all and writes the verdict, which the others
wait for; where ranks do not come, the first one whose patience ends writes it. All go on together, or raise the same
error that names the ranks and hosts that differ; no rank is needed for the others to hear of it.

What a round leaves in the store is deleted in a later one, by the ranks that wrote it (``store_keys``): what stays is
the last word of each set of members.

What is written about a disagreement has at most ``MAX_MESSAGE`` characters, however many ranks there are.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from ds_topo.errors import DisagreementError, StoreTimeoutError, listed
from ds_topo.process_groups.deadline import UNANSWERED_AFTER, within
from ds_topo.process_groups.store_keys import leave, take_due
from ds_topo.process_groups.torch_names import Store, append, default_store

MAX_MESSAGE = 4000
_COUNT_FOR = 0.6
"""The share of the timeout after which ranks no longer wait for all to be counted, and say who they are."""
_PATIENCE = 0.8
"""The share of what is then left after which a rank writes the verdict itself; in the rest the others read it."""
_MOMENT = 2.0
"""Seconds."""
_COUNT_BITS = 24
_SHOWN_RANKS, _SHOWN_OUTCOMES, _SHOWN_TEXT = 8, 5, 500
_FAILED, _FAILED_MARK = "failed: ", "!"
_AGREED, _NAMES = "agreed", "names"
_COMPARED = 3
"""How many different plans are compared line by line."""

_rounds: Counter[str] = Counter()
"""How often each set of members has agreed; equal on all members, since they agree together."""


def agree(
    description: str,
    members: Sequence[int],
    timeout: timedelta,
    *,
    failure: Exception | None = None,
    subject: str = "the process groups to create",
    lines: Callable[[], Sequence[str]] | None = None,
) -> str:
    """Check that all ``members`` (global ranks) bring the same ``description``; return a token unique to this round.

    A rank that has already failed passes its ``failure``: the other ranks raise at once instead of waiting for it, and
    the rank itself re-raises it.

    Args:
        description: what must be equal, or a digest of it.
        members: ascending; the same on all of them.
        timeout: of the whole round.
        failure: why this rank cannot take part.
        subject: what a disagreement is about, for its message.
        lines: what the description is a digest of: one representative of each plan is asked for them where plans
            differ, and the message names the lines.

    Raises:
        DisagreementError: descriptions differ, a rank failed, or ranks did not come within ``timeout``. The message
            names ranks and hosts and is the same on every rank.
    """
    key = _key_of(members)
    _rounds[key] += 1
    token = f"ds_topo/{key}/{_rounds[key]}"
    if dist.get_backend() == "fake" or len(members) == 1:
        if failure is not None:
            raise failure
        return token
    outcome = f"{_FAILED}{type(failure).__name__}: {failure}" if failure is not None else f"plan: {description}"
    round_ = Round(default_store(), token, dist.get_rank(), members, timeout, subject)
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


def _key_of(members: Sequence[int]) -> str:
    """A name of a set of ranks; runs, which the largest sets are, cost nothing."""
    first, last = members[0], members[-1]
    is_run = isinstance(members, range) and members.step == 1
    text = f"{first}-{last}" if is_run or last - first + 1 == len(members) else ",".join(map(str, members))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12]


@dataclass(frozen=True)
class _Verdict:
    """What one rank hears in the end."""

    text: str
    """What is wrong; nothing if all agree."""
    all_came: bool
    """Whether all members have certainly left the rounds before."""


@dataclass(frozen=True)
class Round:
    """One agreement of some ranks, as one of them takes part in it."""

    store: Store
    token: str
    """Where in the store, the same on all members."""
    rank: int
    members: Sequence[int]
    timeout: timedelta
    subject: str
    waited: timedelta = timedelta()
    """Before it, for all to be counted."""
    own: list[str] = field(default_factory=list)
    """Keys that this rank has written or takes care of, to be deleted when all members have left this round."""

    def verdict(self, outcome: str, lines: Callable[[], Sequence[str]] | None) -> str:
        """What is wrong with what the members bring, the same text on all of them; nothing if they agree."""
        verdict = self._heard(outcome, lines)
        if verdict.all_came:
            with suppress(RuntimeError):  # without a store the next request says so
                for key in take_due(self.store, self.rank, self.members):
                    self.store.delete_key(key)
        leave(self.store, self.rank, self.members, self.own)
        return verdict.text

    def _heard(self, outcome: str, lines: Callable[[], Sequence[str]] | None) -> _Verdict:
        counting = self.timeout * _COUNT_FOR
        named = replace(self, token=f"{self.token}/named", timeout=self.timeout - counting, waited=counting)
        try:
            if self._all_bring(outcome, counting):
                return _Verdict("", all_came=True)
        except RuntimeError as error:
            return named._no_connection(error)
        return named._by_name(outcome, lines)

    def _all_bring(self, outcome: str, patience: timedelta) -> bool:
        """Whether all have come within that time, and bring the same."""
        digest = int.from_bytes(hashlib.sha1(outcome.encode(), usedforsecurity=False).digest()[:8], "big")
        own = digest % (1 << (62 - _COUNT_BITS - len(self.members).bit_length()))  # so that the sum fits 63 bits
        total, number = divmod(self.store.add(f"{self.token}/sum", (own << _COUNT_BITS) + 1), 1 << _COUNT_BITS)
        word = f"{self.token}/word"
        if number == len(self.members):
            agreed = total == own * number and not _is_failure(outcome)
            written = self.store.compare_set(word, "", _AGREED if agreed else _NAMES).decode()
            self.own.append(word)
            if written == _AGREED:
                self.store.delete_key(f"{self.token}/sum")
            else:
                self.own.append(f"{self.token}/sum")
            return bool(written == _AGREED)
        with suppress(RuntimeError):
            self.store.wait([word], patience)
        return bool(self.store.compare_set(word, "", _NAMES).decode() == _AGREED)  # reads it, or writes it

    def _no_connection(self, error: RuntimeError) -> _Verdict:
        """Of a rank that cannot hear of the verdict."""
        waited = self.waited + self.timeout
        text = f"{self._disagreement()} no verdict within {waited}, or no connection to the store: {error}"
        return _Verdict(text, all_came=False)

    def _by_name(self, outcome: str, lines: Callable[[], Sequence[str]] | None) -> _Verdict:
        """The verdict of ranks that say who they are."""
        try:
            is_last = self._report(outcome)
            if is_last:
                self._decide()
            decided = json.loads(self._decided())
            difference = self._compared(decided["compare"], lines) if lines and decided["compare"] else ""
            self._let_others_read()
        except RuntimeError as error:
            return self._no_connection(error)
        return _Verdict(str(decided["text"]) + difference, decided["all_came"])

    def _report(self, outcome: str) -> bool:
        """Show the others what this rank brings; whether all have done so now."""
        digest = hashlib.sha1(outcome.encode(), usedforsecurity=False).hexdigest()[:12]
        digest = f"{_FAILED_MARK}{digest}" if _is_failure(outcome) else digest
        if self.store.add(f"{self.token}/bring/{digest}", 1) == 1:
            self.store.set(f"{self.token}/text/{digest}", _shortened(outcome, _SHOWN_TEXT))
            self.own.extend(f"{self.token}/{what}/{digest}" for what in ("bring", "text"))
        append(self.store, f"{self.token}/came", f"{self.rank} {digest} {socket.gethostname()}\n")
        number = int(self.store.add(f"{self.token}/number", 1))
        if number == len(self.members):
            names = ("came", "number", "patience", "verdict", "difference", "read")
            self.own.extend(f"{self.token}/{name}" for name in names)
        return number == len(self.members)

    def _decided(self) -> str:
        """The verdict once there is one; of the ranks that wait in vain, the first writes it."""
        try:
            self.store.wait([f"{self.token}/verdict"], self.timeout * _PATIENCE)
        except RuntimeError:
            if self.store.add(f"{self.token}/patience", 1) == 1:
                self._decide()
            try:
                self.store.wait([f"{self.token}/verdict"], self.timeout * (1 - _PATIENCE))
            except RuntimeError:  # it died over it
                self._decide()
        return str(self.store.get(f"{self.token}/verdict").decode())

    def _decide(self) -> None:
        """Write the verdict, unless another rank has done so."""
        hosts_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        came: set[int] = set()
        for line in self.store.get(f"{self.token}/came").decode().splitlines():
            rank, digest, host = line.split(" ", 2)
            came.add(int(rank))
            hosts_of[digest][host].append(int(rank))
        missing = [rank for rank in self.members if rank not in came]
        agreed = not missing and len(hosts_of) == 1 and not any(map(_has_failed, hosts_of))
        verdict = {"text": "", "compare": [], "all_came": True} if agreed else self._problems(hosts_of, missing)
        self.store.compare_set(f"{self.token}/verdict", "", json.dumps(verdict))

    def _outcome(self, digest: str) -> str:
        """The text of what was brought; the rank that was to write it may have died before it did."""
        key = f"{self.token}/text/{digest}"
        return self.store.get(key).decode() if self.store.check([key]) else f"something of digest {digest}"

    def _problems(self, hosts_of: dict[str, dict[str, list[int]]], missing: list[int]) -> dict[str, object]:
        """The message for reports that differ, and the ranks whose plans are to be compared."""
        size = {digest: sum(map(len, hosts.values())) for digest, hosts in hosts_of.items()}
        first = {digest: min(map(min, hosts.values())) for digest, hosts in hosts_of.items()}
        ordered = sorted(hosts_of, key=lambda digest: (-size[digest], first[digest]))
        problems = (
            [f"ranks {_some(missing)} did not come within {self.waited + self.timeout * _PATIENCE}"] if missing else []
        )
        shown = sorted(ordered[:_SHOWN_OUTCOMES], key=first.__getitem__)
        problems += [f"{_where(hosts_of[digest])} -> {self._outcome(digest)}" for digest in shown]
        if len(ordered) > len(shown):
            problems.append(f"and {len(ordered) - len(shown)} further plans")
        planned = [first[digest] for digest in ordered if not _has_failed(digest)]
        compare = planned[:_COMPARED] if len(planned) > 1 else []
        text = "\n  ".join([self._disagreement(), *problems])
        return {"text": _shortened(text, MAX_MESSAGE - 1000), "compare": compare, "all_came": not missing}

    def _let_others_read(self) -> None:
        """The first rank, which may serve the store and end, waits a moment until all that came know the verdict."""
        read = self.store.add(f"{self.token}/read", 1)
        until = time.monotonic() + min(_MOMENT, self.timeout.total_seconds() / 4)
        while self.rank == 0 and read < self.store.add(f"{self.token}/number", 0) and time.monotonic() < until:
            time.sleep(_MOMENT / 100)
            read = self.store.add(f"{self.token}/read", 0)

    def _disagreement(self) -> str:
        return f"the ranks do not agree on {self.subject}:"

    def _compared(self, ranks: Sequence[int], lines: Callable[[], Sequence[str]]) -> str:
        """In which lines the plans of these ranks differ: they show theirs, the first one compares."""
        rank, end = self.rank, f"{self.token}/difference"
        with suppress(RuntimeError):  # of a rank that died: the verdict stands without it
            if rank in ranks:
                self.store.set(f"{self.token}/lines/{rank}", "\n".join(lines()))
                self.own.append(f"{self.token}/lines/{rank}")
            if rank == ranks[0]:
                self.store.wait([f"{self.token}/lines/{other}" for other in ranks], self.timeout)
                others = [self.store.get(f"{self.token}/lines/{other}").decode() for other in ranks]
                self.store.set(end, _difference(ranks, [text.split("\n") for text in others]))
            self.store.wait([end], self.timeout)
            return str(self.store.get(end).decode())
        return ""


def _is_failure(outcome: str) -> bool:
    return outcome.startswith(_FAILED)


def _has_failed(digest: str) -> bool:
    return digest.startswith(_FAILED_MARK)


def _where(hosts: dict[str, list[int]]) -> str:
    """``ranks [0, 1] on a; ranks [2] on b``, the first few."""
    parts, left = [], _SHOWN_RANKS
    for host, ranks in sorted(hosts.items(), key=lambda item: min(item[1])):
        if left > 0:
            parts.append(f"ranks {sorted(ranks)[:left]} on {host:.64}")
            left -= len(ranks)
    total = sum(map(len, hosts.values()))
    more = (
        f" and {total - _SHOWN_RANKS} more, on {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}"
        if total > _SHOWN_RANKS
        else ""
    )
    return "; ".join(parts) + more


def _some(ranks: Sequence[int]) -> str:
    more = len(ranks) - 4 * _SHOWN_RANKS
    return f"{list(ranks)}" if more <= 0 else f"{list(ranks[: 4 * _SHOWN_RANKS])} and {more} more"


def _difference(ranks: Sequence[int], plans: Sequence[Sequence[str]]) -> str:
    """What distinguishes plans from the first one.

    >>> _difference([0, 3], [["a", "b"], ["a", "c"]])
    "\\n  only rank 0: ['b']; only rank 3: ['c']"
    """
    first = set(plans[0])
    problems = []
    for rank, plan in zip(ranks[1:], plans[1:], strict=True):
        here = set(plan)
        only_first, only_here = [line for line in plans[0] if line not in here], [x for x in plan if x not in first]
        text = f"only rank {ranks[0]}: {listed(only_first)}; only rank {rank}: {listed(only_here)}"
        problems.append(text if only_first or only_here else f"rank {rank}: the same in another order")
    return "".join(f"\n  {_shortened(problem, 1000 // _COMPARED)}" for problem in problems)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 4]} ..."
