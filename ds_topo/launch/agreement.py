"""Let ranks agree on what they are about to do, through the job's store, before any of them does it.

``torch.distributed.new_group`` hangs when ranks pass different lists. Here every rank first appends one line to a key
of the store: its rank, its host and its plan. The last rank to come reads all lines and writes a verdict, which
the others wait for: four small requests per rank. If some ranks do not come, the first rank whose patience ends writes
the verdict. All ranks then continue, or raise the same error, which names the ranks and hosts that differ.

:class:`Round` is a :class:`~ds_topo.launch.council.Council` in which no certain rank decides: the others learn who did
not come whichever rank that is, and by one request however many that are. If plans differ, the council of the ranks
that have them compares their lines. A verdict has at most ``MAX_MESSAGE`` characters, for any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_topo.base.torch_names import append, communicates, default_store
from ds_topo.errors import DisagreementError, StoreTimeoutError, listed, tell, unanswered
from ds_topo.launch.council import GATHERING, MOMENT, UNANSWERED_AFTER, Council, leave, linger, take_due, within

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

    A rank that has already failed passes its ``failure``. The other ranks then raise at once instead of waiting for it,
    and the rank itself re-raises it.

    Args:
        description: the text that must be equal on all ranks, or a digest of it.
        members: the ranks that take part, ascending; the same on all of them.
        timeout: the time limit for the whole round.
        failure: the reason why this rank cannot take part.
        subject: the thing to agree on, for the message.
        lines: further text that must be equal on all ranks, of which they compare a digest. Where it differs, the
            message names the lines that differ.

    Raises:
        DisagreementError: descriptions differ, a rank failed, or ranks did not come within ``timeout``. The message
            names ranks and hosts and is the same on every rank.
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
        here = {rank for rank, *_ in self._came()}
        missing = [rank for rank in self.members if rank not in here]
        tell(
            f"ds_topo: rank {self.rank} on {socket.gethostname()} has waited {NOTICE_AFTER.seconds} s for ranks "
            f"{listed(missing, 4 * _SHOWN_RANKS)} to agree on {self.subject}. Call it on every rank: without them it "
            f"fails in {left}"
        )

    def _came(self) -> list[tuple[int, str, str, str]]:
        """Return the rank, host, digest and outcome of each member that has come."""
        # compare_set reads without blocking: where all agree, the last rank may have deleted the lines by now
        came = self.store.compare_set(self._key("came"), "", "").decode().splitlines()
        return [(int(rank), host, digest, text) for rank, host, digest, text in map(json.loads, came)]

    def _judge(self) -> None:
        """Write the verdict on what the members brought, unless another rank has written one."""
        reports = self._came()
        here = {rank for rank, *_ in reports}
        missing = [rank for rank in self.members if rank not in here]
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
    """Describe ranks by host, in the order of the first ones, with the first few ranks named.

    >>> _where({"b": [1], "a": [2, 0]})
    'ranks [0, 2] on a; ranks [1] on b'
    """
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
