"""Find faults in what the ranks report and measure, and summarise them: pure functions, without torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from statistics import median
from typing import Any, NamedTuple

from ds_topo.errors import bytes_text, fold_numbers, ranks_by_host

EXPECTED_SHARE = 0.8
"""A link below this share of its expected bandwidth is a fault."""
MOST_PAIRS = 4096
"""The most pairs that are listed one by one in JSON."""


@dataclass(frozen=True)
class Fault:
    """A problem that must be fixed before a job starts.

    Its kind is ``topology``, ``version``, ``host``, ``clock``, ``result``, ``link``, ``failure`` or ``missing``.
    """

    kind: str
    message: str
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


# -- versions and hosts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankReport:
    """The description of one rank before any group exists."""

    rank: int
    host: str
    machine: str
    """The identity of the running kernel, which tells machines with equal names apart."""
    local_rank: int
    local_world_size: int | None
    topology: str
    """The canonical spec that the rank was started with, or the reason why there is none."""
    versions: Mapping[str, str]


def by_host(reports: Iterable[RankReport]) -> dict[str, list[RankReport]]:
    """Return the reports of each host."""
    found: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        found[report.host].append(report)
    return found


def where(reports: Iterable[RankReport]) -> str:
    """Return hosts with their ranks."""
    return ranks_by_host((report.host, report.rank) for report in reports)


def disagreements(reports: Sequence[RankReport]) -> list[Fault]:
    """Find topologies and versions that differ between ranks, and hosts whose ranks do not fit together."""
    faults = _minorities("topology", "topology", reports, {report.rank: report.topology for report in reports})
    for name in dict.fromkeys(name for report in reports for name in report.versions):
        values = {report.rank: report.versions.get(name, "not installed") for report in reports}
        faults += _minorities("version", name, reports, values)
    return faults + _mixed_up_hosts(reports)


def _minorities(kind: str, name: str, reports: Sequence[RankReport], values: Mapping[int, str]) -> list[Fault]:
    """Find ranks whose value differs from that of most ranks. Rank 0 decides a tie."""
    counts = Counter(values.values())
    if len(counts) == 1:
        return []
    common = max(counts, key=lambda value: (counts[value], value == values[reports[0].rank]))
    odd = [report for report in reports if values[report.rank] != common]
    others = list(dict.fromkeys(values[report.rank] for report in odd))
    listed = "; ".join(
        f"{other} on {where(each for each in odd if values[each.rank] == other)}" for other in others[:8]
    )
    hosts = tuple(dict.fromkeys(report.host for report in odd))
    message = f"{name} is {common} on most ranks, but {listed}"
    return [Fault(kind, message, hosts, tuple(sorted(report.rank for report in odd)))]


def _mixed_up_hosts(reports: Sequence[RankReport]) -> list[Fault]:
    """Find machines with equal names, local ranks that are given twice, and hosts with unexpected numbers of ranks."""
    faults: list[Fault] = []
    for host, there in by_host(reports).items():
        machines = {report.machine for report in there}
        said = {report.local_world_size for report in there if report.local_world_size is not None}
        twice, times = Counter(report.local_rank for report in there).most_common(1)[0]
        if len(machines) > 1:
            text = f"{len(machines)} machines have the name {host}: {where(there)}; give each a name of its own"
        elif times > 1:
            there = [report for report in there if report.local_rank == twice]
            text = f"local rank {twice}, and with it a device, is given more than once: {where(there)}"
        elif said and said != {len(there)}:
            numbers = " or ".join(map(str, sorted(said)))
            text = f"{host} has {len(there)} ranks, but its launcher says {numbers}: {where(there)}"
        else:
            continue
        faults.append(Fault("host", text, (host,), tuple(report.rank for report in there)))
    return faults


def wrong_clocks(offsets: Mapping[str, float], tolerance: float) -> list[Fault]:
    """Find hosts whose clock differs from the median by more than ``tolerance`` seconds."""
    # of two clocks, that of rank 0's host, which comes first, counts as right
    usual = median(offsets.values()) if len(offsets) != 2 else next(iter(offsets.values()))
    off = {host: offset - usual for host, offset in offsets.items() if abs(offset - usual) > tolerance}
    return [
        Fault("clock", f"{host}'s clock is {abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} the others'", (host,))
        for host, by in off.items()
    ]


# -- wrong results -----------------------------------------------------------------------------------------------------


class Anomaly(NamedTuple):
    """A wrong result that a rank got from a collective over an axis."""

    seen_by: int
    operation: str
    suspects: tuple[int, ...]
    """The ranks that may have caused it: sender and receiver, or all members of the group."""


def wrong_ranks(anomalies: Sequence[Anomaly], host_of: Mapping[int, str]) -> list[Fault]:
    """Find the fewest ranks that explain all wrong results, starting with the rank that is suspected most.

    A wrong sum does not tell whose part was wrong. If most members of the group got a right sum, those that did not are
    the suspects; otherwise the whole group is.

    >>> seen = [Anomaly(0, "all_gather over data", (0, 1)), Anomaly(2, "broadcast over pipe", (1, 2))]
    >>> [fault.ranks for fault in wrong_ranks(seen, {0: "a", 1: "a", 2: "b"})]
    [(1,)]
    """
    times_seen = Counter((anomaly.operation, anomaly.suspects) for anomaly in anomalies)
    left: list[Anomaly] = []
    for anomaly in anomalies:
        members, seen = len(anomaly.suspects), times_seen[anomaly.operation, anomaly.suspects]
        is_of_few = members > 2 and 2 * seen <= members
        left.append(anomaly._replace(suspects=(anomaly.seen_by,)) if is_of_few else anomaly)
    faults: list[Fault] = []
    while left:
        weight: dict[int, Fraction] = defaultdict(Fraction)
        for anomaly in left:
            for suspect in anomaly.suspects:
                weight[suspect] += Fraction(1, len(anomaly.suspects))
        most = max(weight.values())
        candidates = sorted(rank for rank, sum_of_shares in weight.items() if sum_of_shares == most)
        explained = [anomaly for anomaly in left if candidates[0] in anomaly.suspects]
        # ranks that explain the same results cannot be told apart
        guilty = [rank for rank in candidates if all(rank in anomaly.suspects for anomaly in explained)]
        left = [anomaly for anomaly in left if anomaly not in explained]
        operations = ", ".join(sorted({anomaly.operation for anomaly in explained})[:6])
        named = " or ".join(f"rank {rank} on {host_of[rank]}" for rank in guilty[:8])
        more = f" or {len(guilty) - 8} more" if len(guilty) > 8 else ""
        hosts = tuple(dict.fromkeys(host_of[rank] for rank in guilty))
        faults.append(Fault("result", f"{named}{more} gives wrong results: {operations}", hosts, tuple(guilty)))
    return faults


# -- slow links --------------------------------------------------------------------------------------------------------


def slow_hosts(rates: Mapping[tuple[str, str], float], slow: float, expected: float | None = None) -> list[Fault]:
    """Find hosts and pairs of hosts whose link is slow.

    A host is judged by the best of its pairs, since every pair with a slow host is slow. A pair is then judged by what
    both of its hosts reach with other hosts. ``rates`` are bytes per second from one host to another, of some pairs.

    >>> rates = {(a, b): 10.0 if "c" in (a, b) else 100.0 for a in "abc" for b in "abc" if a != b}
    >>> [fault.message for fault in slow_hosts(rates, slow=0.5)]
    ["c's link carries at most 10 B/s, 0.10 of the median of all hosts (100 B/s)"]
    """
    receives: dict[str, float] = defaultdict(float)
    sends: dict[str, float] = defaultdict(float)
    for (a, b), rate in rates.items():
        receives[b] = max(rate, receives[b])
        sends[a] = max(rate, sends[a])
    if len(sends) == 2:
        return _slow_pair(rates, slow) + _below_expected(sends, receives, expected)
    best = {"receives": receives, "sends": sends}
    usual = {verb: median(reached.values()) for verb, reached in best.items()}
    faults: list[Fault] = []
    bad: dict[str, list[str]] = defaultdict(list)
    for verb, reached in best.items():
        for host, rate in reached.items():
            if rate < slow * usual[verb]:
                bad[host].append(verb)
    for host, verbs in bad.items():
        rate = min(best[verb][host] for verb in verbs)
        norm = max(usual[verb] for verb in verbs)
        does = "link carries" if len(verbs) == 2 else f"link {verbs[0]}"
        text = f"{host}'s {does} at most {speed(rate)}, {rate / norm:.2f} of the median of all hosts ({speed(norm)})"
        faults.append(Fault("link", text, (host,)))
    pairs = [
        (rate / min(sends[a], receives[b]), a, b)
        for (a, b), rate in rates.items()
        if "sends" not in bad.get(a, ())
        and "receives" not in bad.get(b, ())
        and rate < slow * min(sends[a], receives[b])
    ]
    for share, a, b in sorted(pairs)[:16]:
        text = f"{a} -> {b} carries {speed(rates[a, b])}, {share:.2f} of what both reach with others"
        faults.append(Fault("link", text, (a, b)))
    if len(pairs) > 16:
        faults.append(Fault("link", f"{len(pairs) - 16} more pairs of hosts are slow"))
    return faults + _below_expected(sends, receives, expected)


def _slow_pair(rates: Mapping[tuple[str, str], float], slow: float) -> list[Fault]:
    """Compare the two directions of two hosts, which have no meaningful median."""
    ordered = sorted(rates.items(), key=lambda item: item[1])
    (low_pair, low), (_, high) = ordered[0], ordered[-1]
    if low >= slow * high:
        return []
    text = f"{low_pair[0]} -> {low_pair[1]} carries {speed(low)}, {low / high:.2f} of the other way ({speed(high)})"
    return [Fault("link", text, low_pair)]


def _below_expected(sends: Mapping[str, float], receives: Mapping[str, float], expected: float | None) -> list[Fault]:
    if expected is None:
        return []
    faults = []
    for host in receives:
        rate = min(receives[host], sends.get(host, receives[host]))
        if rate < EXPECTED_SHARE * expected:
            text = f"{host}'s link carries {speed(rate)}, {rate / expected:.2f} of the expected {speed(expected)}"
            faults.append(Fault("link", text, (host,)))
    return faults


def slow_ranks(
    what: str, rates: Mapping[int, float], slow: float, host_of: Mapping[int, str], ignored_hosts: Iterable[str] = ()
) -> list[Fault]:
    """Find ranks whose best rate is below ``slow`` times the median, except on hosts whose fault is known already."""
    usual = median(rates.values())
    known = set(ignored_hosts)
    odd = sorted((rate, rank) for rank, rate in rates.items() if rate < slow * usual and host_of[rank] not in known)
    compared = f"of the median ({speed(usual)})"
    return [
        Fault(
            "link",
            f"rank {rank} on {host_of[rank]} {what} at most {speed(rate)}, {rate / usual:.2f} {compared}",
            (host_of[rank],),
            (rank,),
        )
        for rate, rank in odd[:16]
    ]


def speed(rate: float) -> str:
    """Return bytes per second with a unit.

    >>> speed(11.9e6), speed(2.5e10), speed(900.0)
    ('11.9 MB/s', '25 GB/s', '900 B/s')
    """
    return f"{bytes_text(rate)}/s"


def seconds(duration: float) -> str:
    """Return seconds with a unit.

    >>> seconds(2.1e-4), seconds(0.0123), seconds(4.0)
    ('210 us', '12.3 ms', '4.0 s')
    """
    if duration < 1e-3:
        return f"{duration * 1e6:.0f} us"
    return f"{duration * 1e3:.1f} ms" if duration < 1 else f"{duration:.1f} s"


# -- summary -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkSummary:
    """The links of one kind: bytes per second and direction, and seconds, the medians of all pairs."""

    bandwidth: float
    latency: float
    slowest: tuple[tuple[str, str, float], ...]
    """From, to and bytes per second of the slowest pairs, slowest first."""
    pairs: tuple[tuple[str, str, float, float], ...]
    """From, to, bytes per second and seconds of all pairs; empty where there are too many."""


@dataclass(frozen=True)
class AxisSummary:
    """The groups over one axis, all working at the same time.

    Args:
        hosts: the fewest and the most hosts of a group.
        bandwidth: bytes per second of an all_reduce's busiest link (``busbw`` of nccl-tests), the median of the groups.
        latency: seconds of a small all_reduce, the median of the groups.
        slowest: the ranks of the slowest group.
        size: the bytes of the all_reduce whose bandwidth it is.
    """

    groups: int
    ranks: int
    hosts: tuple[int, int]
    bandwidth: float
    latency: float
    slowest: tuple[int, ...]
    slowest_bandwidth: float
    size: int


@dataclass
class Summary:
    """All results of a check; steps that were not reached are missing."""

    topology: str
    backend: str
    world_size: int
    hosts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks on every host."""
    versions: dict[str, str] = field(default_factory=dict)
    """The versions of rank 0."""
    clocks: dict[str, float] = field(default_factory=dict)
    """The seconds by which each host's clock is ahead of the first host's."""
    axes: dict[str, AxisSummary] = field(default_factory=dict)
    inside: LinkSummary | None = None
    """The links from a rank to another one on its host."""
    across: LinkSummary | None = None
    """The links from a host to another one, all of their ranks together."""
    rounds: tuple[int, int] = (0, 0)
    """The number of rounds of pairs of hosts that were measured, and that there are."""
    faults: list[Fault] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return all results; bandwidths in bytes per second and direction, latencies in seconds."""
        content = asdict(self)
        content["hosts"] = [{"name": host, "ranks": list(ranks)} for host, ranks in self.hosts.items()]
        content["rounds"] = {"played": self.rounds[0], "all": self.rounds[1]}
        return content


def slow_but_right(summary: Summary, slow: float) -> list[str]:
    """Describe groups and links below ``slow`` times the median that no fault explains, such as those of a busy host.

    All groups of an axis are measured at the same time, and all pairs of a round: a low speed alone is no fault.
    """
    known = {host for fault in summary.faults for host in fault.hosts}
    host_of = {rank: host for host, ranks in summary.hosts.items() for rank in ranks}
    texts = []
    for name, axis in summary.axes.items():
        hosts = list(dict.fromkeys(host_of[rank] for rank in axis.slowest))
        if axis.slowest_bandwidth < slow * axis.bandwidth and known.isdisjoint(hosts):
            share = f"{axis.slowest_bandwidth / axis.bandwidth:.2f} of the median"
            ranks = fold_numbers(axis.slowest)
            texts.append(f"{name} group of ranks {ranks} on {', '.join(hosts[:4])}, {share}")
    for name, link in (("inside hosts", summary.inside), ("between hosts", summary.across)):
        if link is None:
            continue
        for one, other, least in link.slowest[:1]:
            if least < slow * link.bandwidth and known.isdisjoint({one.partition(":")[0], other.partition(":")[0]}):
                texts.append(f"{one} -> {other} {name}, {least / link.bandwidth:.2f} of the median")
    return texts


def axis_summary(
    groups: Sequence[Sequence[int]], times: Mapping[int, tuple[float, float, int]], host_of: Mapping[int, str]
) -> AxisSummary:
    """Summarise what each rank measured in the groups over one axis: ``(latency, seconds, size)``.

    >>> times = {rank: (1e-3, seconds, 8) for rank, seconds in enumerate([1.0, 1.0, 2.0, 1.6])}
    >>> summary = axis_summary([[0, 1], [2, 3]], times, "aabb")
    >>> summary.hosts, summary.bandwidth, summary.slowest, summary.slowest_bandwidth
    ((1, 1), 6.0, (2, 3), 4.0)
    """
    ranks, host_counts = len(groups[0]), [len({host_of[rank] for rank in ranks}) for ranks in groups]
    size = times[groups[0][0]][2]
    bandwidths = [2 * (ranks - 1) / ranks * size / max(times[rank][1] for rank in group) for group in groups]
    slowest = min(range(len(groups)), key=bandwidths.__getitem__)
    return AxisSummary(
        groups=len(groups),
        ranks=ranks,
        hosts=(min(host_counts), max(host_counts)),
        bandwidth=median(bandwidths),
        latency=median(max(times[rank][0] for rank in group) for group in groups),
        slowest=tuple(groups[slowest]),
        slowest_bandwidth=bandwidths[slowest],
        size=size,
    )


def link_summary(links: Mapping[tuple[str, str], tuple[float, float]]) -> LinkSummary:
    """Summarise the latency and the rate of each pair, ``(from, to)``."""
    latencies, rates = zip(*links.values(), strict=True)
    ordered = sorted((rate, pair) for pair, (_, rate) in links.items())
    pairs = tuple((*pair, rate, latency) for pair, (latency, rate) in links.items()) if len(links) <= MOST_PAIRS else ()
    slowest = tuple((*pair, rate) for rate, pair in ordered[:8])
    return LinkSummary(median(rates), median(latencies), slowest, pairs)
