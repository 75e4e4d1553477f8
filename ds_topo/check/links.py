"""Tests of all pairs: of ranks inside their hosts, and of hosts with all their ranks together, in rounds."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_topo.check.timing import Device, largest, time_pair
from ds_topo.check.tournament import opponent, order_of_rounds, rounds
from ds_topo.process_groups.creation import ProcessGroup

ROUNDS_BETWEEN_VOTES = 8


@dataclass(frozen=True)
class Hosts:
    """The ranks of every host, as all ranks of a check know them.

    Args:
        ranks: of each host, global, ascending; hosts in the order of their first ranks.

    >>> hosts = Hosts(((0, 1), (2, 3)))
    >>> hosts.place(3), Hosts.from_json(hosts.as_json()) == hosts, hosts.as_json()
    ((1, 1), True, {'each': 2, 'hosts': 2})
    """

    ranks: tuple[tuple[int, ...], ...]

    def place(self, rank: int) -> tuple[int, int]:
        """The number of the host of a rank, and the rank's place on it."""
        return next((host, ranks.index(rank)) for host, ranks in enumerate(self.ranks) if rank in ranks)

    def as_json(self) -> dict[str, Any]:
        """Short where ranks are numbered host by host, since every rank reads it from one store."""
        each = len(self.ranks[0])
        if self == Hosts(_in_blocks(each, len(self.ranks))):
            return {"each": each, "hosts": len(self.ranks)}
        return {"ranks": self.ranks}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Hosts:
        """The inverse of ``as_json``."""
        if "ranks" in content:
            return cls(tuple(tuple(ranks) for ranks in content["ranks"]))
        return cls(_in_blocks(content["each"], content["hosts"]))


def _in_blocks(each: int, hosts: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, first + each)) for first in range(0, each * hosts, each))


@dataclass
class PairTimes:
    """What one rank measured with each of its peers.

    Args:
        peers: ranks, or hosts in tests of hosts, in the order of the tests.
        latency: seconds, one way.
        came: bytes per second.
        went: bytes per second.
    """

    peers: list[int] = field(default_factory=list)
    latency: array[float] = field(default_factory=lambda: array("f"))
    came: array[float] = field(default_factory=lambda: array("f"))
    went: array[float] = field(default_factory=lambda: array("f"))

    def add(self, peer: int, latency: float, came: float, went: float) -> None:
        """One test."""
        self.peers.append(peer)
        for values, value in zip((self.latency, self.came, self.went), (latency, came, went), strict=True):
            values.append(value)

    def as_json(self) -> dict[str, Any]:
        """For the store: numbers in base64, four bytes each."""
        packed = {name: _packed(getattr(self, name)) for name in ("latency", "came", "went")}
        return {"peers": _packed(array("q", self.peers)), **packed}

    @classmethod
    def from_json(cls, content: dict[str, str]) -> PairTimes:
        """The inverse of ``as_json``."""
        times = cls(array("q", base64.b64decode(content["peers"])).tolist())
        for name in ("latency", "came", "went"):
            getattr(times, name).frombytes(base64.b64decode(content[name]))
        return times


def _packed(values: array[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def time_inside_hosts(hosts: Hosts, rank: int, device: Device, progress: Callable[[int, int], None]) -> PairTimes:
    """Every rank with every other one of its host, all hosts at the same time."""
    host, place = hosts.place(rank)
    team = hosts.ranks[host]
    times = PairTimes()
    count = rounds(len(team))
    for number in range(count):
        other = opponent(place, number, len(team))
        speed = None if other is None else time_pair(team[other], device)
        if speed is not None and other is not None:
            times.add(team[other], speed.latency, speed.bandwidth, speed.sent)
        progress(number + 1, count)
    return times


def time_across_hosts(
    hosts: Hosts,
    rank: int,
    device: Device,
    team: ProcessGroup | None,
    world: ProcessGroup,
    seconds: float,
    progress: Callable[[int, int], None],
) -> tuple[PairTimes, PairTimes, int]:
    """Every host with every other one, all of their ranks at once, until all have met or the time is over.

    Args:
        hosts: of the job.
        rank: this one.
        device: buffers.
        team: the group of this host's ranks; None if it has one.
        world: all ranks, which vote whether to go on.
        seconds: after which no further round begins.
        progress: called with the number of rounds done and of all.

    Returns:
        This rank's part with each host, what the whole hosts carried, and the number of rounds that were played.
    """
    host, place = hosts.place(rank)
    mine, whole = PairTimes(), PairTimes()
    order = order_of_rounds(len(hosts.ranks))
    start = time.monotonic()
    for played, number in enumerate(order):
        is_vote = played and played % ROUNDS_BETWEEN_VOTES == 0
        if is_vote and largest(time.monotonic() - start, world, device) > seconds:
            return mine, whole, played
        other = opponent(host, number, len(hosts.ranks))
        if other is not None:
            theirs = hosts.ranks[other]
            speed = time_pair(theirs[place] if place < len(theirs) else None, device, team)
            if speed is not None:
                together = min(len(theirs), len(hosts.ranks[host]))
                mine.add(other, speed.latency, speed.bandwidth, speed.sent)
                whole.add(other, speed.latency, together * speed.bandwidth, together * speed.sent)
        progress(played + 1, len(order))
    return mine, whole, len(order)


def best(rates: Sequence[float]) -> float:
    """The largest, 0 for none."""
    return max(rates, default=0.0)
