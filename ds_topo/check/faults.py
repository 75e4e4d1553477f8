"""What is wrong, from what the ranks report: pure functions of values, standard library only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from statistics import median
from typing import Any

from ds_topo.placement.summary import fold_numbers

EXPECTED_SHARE = 0.8
"""Less of an expected bandwidth than this is a fault."""


@dataclass(frozen=True)
class Fault:
    """Something that must be mended before a job starts.

    Args:
        kind: ``topology``, ``version``, ``host``, ``clock``, ``result``, ``link``, ``failure`` or ``missing``.
        message: for a person; names hosts and ranks.
        hosts: their names.
        ranks: global ranks, ascending.
    """

    kind: str
    message: str
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


@dataclass(frozen=True)
class RankReport:
    """What a rank says of itself before any group exists.

    Args:
        rank: global.
        host: the name of its host.
        machine: the kernel's identity, to tell two machines of one name apart.
        local_rank: on its host.
        local_world_size: the ranks on its host as its launcher says, or None.
        topology: the canonical spec that it was started with, or why there is none.
        versions: of everything that must be the same.
    """

    rank: int
    host: str
    machine: str
    local_rank: int
    local_world_size: int | None
    topology: str
    versions: Mapping[str, str]


def where(reports: Iterable[RankReport]) -> str:
    """Hosts with their ranks.

    >>> where([RankReport(rank, "a", "", rank, 2, "", {}) for rank in (2, 3)])
    'a (ranks 2-3)'
    """
    by_host: dict[str, list[int]] = defaultdict(list)
    for report in reports:
        by_host[report.host].append(report.rank)
    named = [f"{host} (rank{'s' if len(ranks) > 1 else ''} {fold_numbers(ranks)})" for host, ranks in by_host.items()]
    return ", ".join(named[:8]) + (f" and {len(named) - 8} more hosts" if len(named) > 8 else "")


def disagreements(reports: Sequence[RankReport]) -> list[Fault]:
    """Topologies, versions and hosts that do not agree. What most ranks have is right; rank 0 decides a tie."""
    faults = [_disagreement("topology", "topology", reports, {report.rank: report.topology for report in reports})]
    for name in dict.fromkeys(name for report in reports for name in report.versions):
        values = {report.rank: report.versions.get(name, "not installed") for report in reports}
        faults.append(_disagreement("version", name, reports, values))
    return [fault for fault in faults if fault is not None] + _mixed_up_hosts(reports)


def _disagreement(kind: str, name: str, reports: Sequence[RankReport], values: Mapping[int, str]) -> Fault | None:
    counts = Counter(values.values())
    if len(counts) == 1:
        return None
    most = max(counts.values())
    first = values[reports[0].rank]
    common = first if counts[first] == most else counts.most_common(1)[0][0]
    others: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        if values[report.rank] != common:
            others[values[report.rank]].append(report)
    listed = "; ".join(f"{value} on {where(having)}" for value, having in list(others.items())[:8])
    odd = [report for having in others.values() for report in having]
    return Fault(
        kind,
        f"{name} is {common} on most ranks, but {listed}",
        tuple(dict.fromkeys(report.host for report in odd)),
        tuple(sorted(report.rank for report in odd)),
    )


def _mixed_up_hosts(reports: Sequence[RankReport]) -> list[Fault]:
    """Machines of one name, local ranks that are given twice, hosts with other numbers of ranks than they say."""
    faults: list[Fault] = []
    by_host: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        by_host[report.host].append(report)
    for host, there in by_host.items():
        machines = {report.machine for report in there}
        local_ranks = Counter(report.local_rank for report in there)
        said = {report.local_world_size for report in there} - {None}
        ranks = tuple(report.rank for report in there)
        twice = [local_rank for local_rank, count in local_ranks.items() if count > 1]
        if len(machines) > 1:
            text = f"{len(machines)} machines call themselves {host}: {where(there)}; give each a name of its own"
            faults.append(Fault("host", text, (host,), ranks))
        elif twice:
            same = [report for report in there if report.local_rank == twice[0]]
            text = f"local rank {twice[0]}, and with it a device, is given more than once: {where(same)}"
            faults.append(Fault("host", text, (host,), tuple(report.rank for report in same)))
        elif said and said != {len(there)}:
            numbers = " or ".join(map(str, sorted(number for number in said if number is not None)))
            text = f"{host} has {len(there)} ranks, but its launcher says {numbers}: {where(there)}"
            faults.append(Fault("host", text, (host,), ranks))
    return faults


def wrong_clocks(offsets: Mapping[str, float], tolerance: float) -> list[Fault]:
    """Hosts whose clock is off by more seconds than ``tolerance`` from what most have.

    >>> [fault.message for fault in wrong_clocks({"a": 0.0, "b": 0.001, "c": 300.0}, 1.0)]
    ["c's clock is 300.0 s ahead of the others'"]
    """
    usual = median(offsets.values())
    if len(offsets) == 2:  # nobody knows which is right; rank 0's host counts as such
        usual = next(iter(offsets.values()))
    off = {host: offset - usual for host, offset in offsets.items() if abs(offset - usual) > tolerance}
    return [
        Fault("clock", f"{host}'s clock is {abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} the others'", (host,))
        for host, by in off.items()
    ]


# -- wrong results -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anomaly:
    """A wrong result that a rank saw.

    Args:
        seen_by: the rank.
        operation: which collective, over which axis.
        suspects: who may have caused it: the sender and the receiver, or all members of the group.
    """

    seen_by: int
    operation: str
    suspects: tuple[int, ...]


def wrong_ranks(anomalies: Sequence[Anomaly], host_of: Mapping[int, str]) -> list[Fault]:
    """The fewest ranks that explain all wrong results: whoever is suspected most, until none is left to explain.

    A wrong sum, in which nobody's part can be told, accuses the ranks that saw it if the others of the group saw a
    right one, else the whole group.

    >>> seen = [Anomaly(0, "all_gather over data", (0, 1)), Anomaly(2, "broadcast over pipe", (1, 2))]
    >>> [fault.ranks for fault in wrong_ranks(seen, {0: "a", 1: "a", 2: "b"})]
    [(1,)]
    """
    left = _narrowed(anomalies)
    faults: list[Fault] = []
    while left:
        weight: dict[int, Fraction] = defaultdict(Fraction)
        for anomaly in left:
            for suspect in anomaly.suspects:
                weight[suspect] += Fraction(1, len(anomaly.suspects))
        most = max(weight.values())
        candidates = sorted(rank for rank, sum_of_shares in weight.items() if sum_of_shares == most)
        explained = [anomaly for anomaly in left if candidates[0] in anomaly.suspects]
        # whoever explains the same cannot be told apart from it
        guilty = [rank for rank in candidates if all(rank in anomaly.suspects for anomaly in explained)]
        left = [anomaly for anomaly in left if anomaly not in explained]
        operations = ", ".join(sorted({anomaly.operation for anomaly in explained})[:6])
        named = " or ".join(f"rank {rank} on {host_of[rank]}" for rank in guilty[:8])
        more = f" or {len(guilty) - 8} more" if len(guilty) > 8 else ""
        hosts = tuple(dict.fromkeys(host_of[rank] for rank in guilty))
        faults.append(Fault("result", f"{named}{more} gives wrong results: {operations}", hosts, tuple(guilty)))
    return faults


def _narrowed(anomalies: Sequence[Anomaly]) -> list[Anomaly]:
    """Of a group's wrong sum that few members saw, each of these few is the suspect."""
    saw: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
    for anomaly in anomalies:
        saw[anomaly.operation, anomaly.suspects].add(anomaly.seen_by)
    narrowed = []
    for anomaly in anomalies:
        seen_by = saw[anomaly.operation, anomaly.suspects]
        alone = len(anomaly.suspects) > 2 and 2 * len(seen_by) <= len(anomaly.suspects)
        narrowed.append(Anomaly(anomaly.seen_by, anomaly.operation, (anomaly.seen_by,)) if alone else anomaly)
    return narrowed


# -- slow links --------------------------------------------------------------------------------------------------------


def slow_hosts(
    rates: Mapping[tuple[str, str], float], slow: float, expected: float | None = None, order: Sequence[str] = ()
) -> list[Fault]:
    """Hosts and pairs of hosts whose link is slow.

    A host is judged by the best of its pairs, since every pair with a slow host is slow; then a pair by what both of
    its hosts reach with others.

    Args:
        rates: bytes per second from one host to another; not all pairs need be there.
        slow: the share of the median below which a link is slow.
        expected: bytes per second that every host must reach, if it is known.
        order: of the hosts in the result; that of ``rates`` unless given.

    >>> rates = {(a, b): 10.0 if "c" in (a, b) else 100.0 for a in "abc" for b in "abc" if a != b}
    >>> [fault.message for fault in slow_hosts(rates, slow=0.5)]
    ["c's link carries at most 10 B/s, 0.10 of the median of all hosts (100 B/s)"]
    """
    sends, receives = _best(rates, 0, order), _best(rates, 1, order)
    if len(sends) == 2:
        return _slow_pair(rates, slow) + _below_expected(sends, receives, expected)
    usual = {"sends": median(sends.values()), "receives": median(receives.values())}
    faults: list[Fault] = []
    bad: dict[str, list[str]] = defaultdict(list)
    for verb, best in (("sends", sends), ("receives", receives)):
        for host, rate in best.items():
            if rate < slow * usual[verb]:
                bad[host].append(verb)
    for host, verbs in bad.items():
        rate = min((sends if verb == "sends" else receives)[host] for verb in verbs)
        norm = max(usual[verb] for verb in verbs)
        does = "link carries" if len(verbs) == 2 else f"link {verbs[0]}"
        faults.append(
            Fault(
                "link",
                f"{host}'s {does} at most {speed(rate)}, {rate / norm:.2f} of the median of all hosts ({speed(norm)})",
                (host,),
            )
        )
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


def _best(rates: Mapping[tuple[str, str], float], end: int, order: Sequence[str]) -> dict[str, float]:
    """The best rate of every host that was tested."""
    best = dict.fromkeys(order, 0.0)
    for pair, rate in rates.items():
        best[pair[end]] = max(rate, best.get(pair[end], 0.0))
    return {host: rate for host, rate in best.items() if rate}


def _slow_pair(rates: Mapping[tuple[str, str], float], slow: float) -> list[Fault]:
    """Of two hosts nobody is the median: one direction is compared with the other."""
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
    for host in sends:
        rate = min(sends[host], receives.get(host, sends[host]))
        if rate < EXPECTED_SHARE * expected:
            text = f"{host}'s link carries {speed(rate)}, {rate / expected:.2f} of the expected {speed(expected)}"
            faults.append(Fault("link", text, (host,)))
    return faults


def slow_ranks(
    what: str, rates: Mapping[int, float], slow: float, host_of: Mapping[int, str], ignored_hosts: Iterable[str] = ()
) -> list[Fault]:
    """Ranks whose best rate is below ``slow`` times the median; hosts whose fault is known already are left out."""
    usual = median(rates.values())
    known = set(ignored_hosts)
    odd = sorted((rate, rank) for rank, rate in rates.items() if rate < slow * usual and host_of[rank] not in known)
    return [
        Fault(
            "link",
            f"rank {rank} on {host_of[rank]} {what} at most {speed(rate)}, {rate / usual:.2f} of the median "
            f"({speed(usual)})",
            (host_of[rank],),
            (rank,),
        )
        for rate, rank in odd[:16]
    ]


def speed(rate: float) -> str:
    """Bytes per second with a unit.

    >>> speed(11.9e6), speed(2.5e10), speed(900.0)
    ('11.9 MB/s', '25.0 GB/s', '900 B/s')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if rate >= size:
            return f"{rate / size:.1f} {unit}/s"
    return f"{rate:.0f} B/s"


def seconds(duration: float) -> str:
    """Seconds with a unit.

    >>> seconds(2.1e-4), seconds(0.0123), seconds(4.0)
    ('210 us', '12.3 ms', '4.0 s')
    """
    if duration < 1e-3:
        return f"{duration * 1e6:.0f} us"
    return f"{duration * 1e3:.1f} ms" if duration < 1 else f"{duration:.1f} s"
