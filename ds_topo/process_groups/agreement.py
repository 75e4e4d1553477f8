"""Agree first: every rank shows the others what it is about to create, through the store, before anything exists.

``torch.distributed.new_group`` with lists that differ between ranks hangs. Here the ranks post a description each, the
first member compares them, and all read its verdict: they go on together, or raise the same error that names the ranks
and hosts that differ. The cost is two keys per rank in the store, which are deleted again but for the last verdict, and
one round trip.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ds_topo.errors import DisagreementError
from ds_topo.process_groups.torch_names import Store, default_store

_LEADER_SHARE = 0.8
"""The first member stops waiting before the others do, so that they still read its verdict in time."""

_rounds: Counter[str] = Counter()
"""How often each set of members has agreed; equal on all members, since they agree together."""
_verdicts: dict[str, str] = {}
"""Keys that the first member of a set deletes when all have come to its next round, and so have read them."""


def agree(description: str, members: Sequence[int], timeout: timedelta, *, failure: Exception | None = None) -> str:
    """Check that all ``members`` (global ranks) bring the same ``description``; return a token unique to this round.

    A rank that has already failed passes its ``failure``: the other ranks raise at once instead of waiting for it, and
    the rank itself re-raises it.

    Raises:
        DisagreementError: descriptions differ, a rank failed, or ranks did not come within ``timeout``. The message
            names ranks and hosts and is the same on every rank.
    """
    members_key = hashlib.sha1(",".join(map(str, members)).encode(), usedforsecurity=False).hexdigest()[:12]
    _rounds[members_key] += 1
    token = f"ds_topo/{members_key}/{_rounds[members_key]}"
    if dist.get_backend() == "fake" or len(members) == 1:
        if failure is not None:
            raise failure
        return token
    store, rank = default_store(), dist.get_rank()
    report = {"host": socket.gethostname(), "plan": description, "error": failure and str(failure)}
    store.set(f"{token}/{rank}", json.dumps(report))
    if rank == members[0]:
        store.set(f"{token}/verdict", _verdict(store, token, members, timeout))
    try:
        store.wait([f"{token}/verdict"], timeout)
        verdict = store.get(f"{token}/verdict").decode()
    except RuntimeError as error:
        missing = _missing(store, token, members)
        verdict = f"rank {members[0]} did not compare the plans within {timeout}; ranks that did not come: {missing}"
        # Members that are only late must not go on without this rank.
        store.set(f"{token}/{rank}", json.dumps(report | {"error": report["error"] or verdict}))
        raise failure or DisagreementError(verdict) from error
    if failure is not None:
        raise failure
    if verdict:
        raise DisagreementError(verdict)
    _delete_what_was_read(store, token, members_key, rank, rank == members[0])
    return token


def _delete_what_was_read(store: Store, token: str, members_key: str, rank: int, is_first: bool) -> None:
    """After a round in which all came: this rank's report, and the verdict of the round before."""
    store.delete_key(f"{token}/{rank}")
    if is_first:
        if members_key in _verdicts:
            store.delete_key(_verdicts[members_key])
        _verdicts[members_key] = f"{token}/verdict"


def _verdict(store: Store, token: str, members: Sequence[int], timeout: timedelta) -> str:
    """What is wrong with the reports of all members, or nothing."""
    try:
        store.wait([f"{token}/{rank}" for rank in members], timeout * _LEADER_SHARE)
        missing: list[int] = []
    except RuntimeError:
        missing = _missing(store, token, members)
    hosts_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in members:
        if rank not in missing:
            report = json.loads(store.get(f"{token}/{rank}"))
            outcome = f"failed: {report['error']}" if report["error"] else f"plan: {report['plan']}"
            hosts_of[outcome][report["host"]].append(rank)
    problems = []
    if missing:
        problems.append(f"ranks {missing} did not come within {timeout * _LEADER_SHARE}")
    if len(hosts_of) > 1 or any(outcome.startswith("failed") for outcome in hosts_of):
        for outcome, hosts in hosts_of.items():
            where = "; ".join(f"ranks {ranks} on {host}" for host, ranks in hosts.items())
            problems.append(f"{where} -> {outcome}")
    if not problems:
        return ""
    return "the ranks do not agree on the process groups to create:\n  " + "\n  ".join(problems)


def _missing(store: Store, token: str, members: Sequence[int]) -> list[int]:
    return [rank for rank in members if not store.check([f"{token}/{rank}"])]
