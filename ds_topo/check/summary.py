"""What a check found, as one value: for a person, and as JSON for the planner. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ds_topo.check.faults import Fault

MOST_PAIRS = 4096
"""Pairs that are listed one by one in JSON."""


@dataclass(frozen=True)
class LinkSummary:
    """Links of one kind.

    Args:
        bandwidth: bytes per second and direction, the median of all pairs.
        latency: seconds, the median.
        slowest: from, to and bytes per second of the slowest pairs, slowest first.
        pairs: from, to, bytes per second and seconds of all of them; empty where they are too many.
    """

    bandwidth: float
    latency: float
    slowest: tuple[tuple[str, str, float], ...]
    pairs: tuple[tuple[str, str, float, float], ...]


@dataclass(frozen=True)
class AxisSummary:
    """The groups over one axis, all working at the same time.

    Args:
        groups: how many.
        ranks: in each.
        hosts: of each: the fewest and the most.
        bandwidth: bytes per second of an all_reduce's busiest link, the median of the groups.
        latency: seconds of a small all_reduce, the median.
        slowest: the ranks of the slowest group.
        slowest_bandwidth: of that group.
    """

    groups: int
    ranks: int
    hosts: tuple[int, int]
    bandwidth: float
    latency: float
    slowest: tuple[int, ...]
    slowest_bandwidth: float


@dataclass
class Summary:
    """Everything that was found; steps that were not reached are missing."""

    topology: str
    backend: str
    world_size: int
    hosts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks on every host."""
    versions: dict[str, str] = field(default_factory=dict)
    """Rank 0's."""
    clocks: dict[str, float] = field(default_factory=dict)
    """Seconds by which each host's clock is ahead of the first one's."""
    axes: dict[str, AxisSummary] = field(default_factory=dict)
    inside: LinkSummary | None = None
    """From a rank to another one on its host."""
    across: LinkSummary | None = None
    """From a host to another one, all of their ranks together."""
    rounds: tuple[int, int] = (0, 0)
    """Rounds of pairs of hosts that were played, and that there are."""
    faults: list[Fault] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For programs; bandwidths in bytes per second and direction, latencies in seconds."""
        content = asdict(self)
        content["hosts"] = [{"name": host, "ranks": list(ranks)} for host, ranks in self.hosts.items()]
        content["rounds"] = {"played": self.rounds[0], "all": self.rounds[1]}
        return content


def axis_summary(
    groups: Sequence[Sequence[int]], speeds: Mapping[int, Sequence[float]], host_of: Mapping[int, str]
) -> AxisSummary:
    """Of what each rank measured, ``[latency, bandwidth]``.

    >>> axis_summary([[0, 1], [2, 3]], {0: [1e-3, 8.0], 1: [2e-3, 8.0], 2: [1e-3, 4.0], 3: [1e-3, 5.0]}, "aabb")
    AxisSummary(groups=2, ranks=2, hosts=(1, 1), bandwidth=6.0, latency=0.0015, slowest=(2, 3), slowest_bandwidth=4.0)
    """
    bandwidths = [min(speeds[rank][1] for rank in ranks) for ranks in groups]
    latencies = [max(speeds[rank][0] for rank in ranks) for ranks in groups]
    hosts = [len({host_of[rank] for rank in ranks}) for ranks in groups]
    slowest = min(range(len(groups)), key=bandwidths.__getitem__)
    return AxisSummary(
        len(groups),
        len(groups[0]),
        (min(hosts), max(hosts)),
        median(bandwidths),
        median(latencies),
        tuple(groups[slowest]),
        bandwidths[slowest],
    )


def link_summary(latencies: Mapping[tuple[str, str], float], rates: Mapping[tuple[str, str], float]) -> LinkSummary:
    """Of pairs, ``(from, to)``."""
    ordered = sorted((rate, pair) for pair, rate in rates.items())
    pairs = tuple((*pair, rate, latencies[pair]) for pair, rate in rates.items()) if len(rates) <= MOST_PAIRS else ()
    return LinkSummary(
        median(rates.values()),
        median(latencies.values()),
        tuple((*pair, rate) for rate, pair in ordered[:8]),
        pairs,
    )
