"""Faults in versions, clocks, results and links are found in reports, and name hosts and ranks."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ds_topo.cli.check_command import print_summary, rate
from ds_topo.errors import TopologyError
from ds_topo.health.faults import (
    Anomaly,
    Fault,
    RankReport,
    Summary,
    axis_summary,
    disagreements,
    link_summary,
    slow_hosts,
    slow_ranks,
    wrong_clocks,
    wrong_ranks,
)
from ds_topo.health.probes import opponents, pairs_of
from ds_topo.topology import ProcessTopology


def reports(hosts: int = 3, slots: int = 2) -> list[RankReport]:
    return [
        RankReport(
            rank, f"h{rank // slots}", f"kernel{rank // slots}", rank % slots, slots, "data=6", {"torch": "2.13"}
        )
        for rank in range(hosts * slots)
    ]


# -- tournaments -------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 70))
def test_all_pairs_meet_once_and_every_round_is_a_matching(players: int) -> None:
    met = set()
    for opponents_in_round in zip(*(opponents(player, players) for player in range(players)), strict=True):
        for player, other in enumerate(opponents_in_round):
            if other is not None:
                assert other != player
                assert opponents_in_round[other] == player
                met.add((player, other))
    assert len(met) == players * (players - 1)
    assert len(opponents(0, players)) == players - 1 + players % 2


# -- versions and hosts ------------------------------------------------------------------------------------------------


def test_equal_reports_have_no_fault() -> None:
    assert disagreements(reports()) == []


def test_a_different_version_is_reported_with_its_host_and_ranks() -> None:
    given_reports = reports()
    for rank in (2, 3):
        given_reports[rank] = replace(given_reports[rank], versions={"torch": "2.12"})
    [fault] = disagreements(given_reports)
    assert (fault.kind, fault.hosts, fault.ranks) == ("version", ("h1",), (2, 3))
    assert fault.message == "torch is 2.13 on most ranks, but 2.12 on h1 (ranks 2-3)"


def test_rank_0_decides_a_tie() -> None:
    given_reports = reports(hosts=2)
    for rank in (2, 3):
        given_reports[rank] = replace(given_reports[rank], topology="pipe=2,data=2")
    [fault] = disagreements(given_reports)
    assert (fault.kind, fault.ranks) == ("topology", (2, 3))


def test_a_missing_package_is_reported() -> None:
    given_reports = [replace(report, versions={**report.versions, "deepspeed": "0.19"}) for report in reports()]
    given_reports[5] = replace(given_reports[5], versions={"torch": "2.13"})
    [fault] = disagreements(given_reports)
    assert "deepspeed is 0.19 on most ranks, but not installed on h2 (rank 5)" in fault.message


def test_hosts_with_equal_names_or_wrong_local_ranks_are_reported() -> None:
    twins = [replace(report, host="localhost") for report in reports()]
    [fault] = disagreements(twins)
    assert "3 machines have the name localhost" in fault.message
    doubled = [replace(report, local_rank=0) if report.rank == 3 else report for report in reports()]
    [fault] = disagreements(doubled)
    assert (fault.hosts, fault.ranks) == (("h1",), (2, 3))
    assert "local rank 0" in fault.message
    short = reports()[:-1]
    [fault] = disagreements(short)
    assert "h2 has 1 ranks, but its launcher says 2" in fault.message


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_a_wrong_clock_is_reported() -> None:
    [fault] = wrong_clocks({"a": 0.0, "b": 0.002, "c": -300.2}, tolerance=1.0)
    assert (fault.hosts, fault.message) == (("c",), "c's clock is 300.2 s behind the others'")
    # also that of rank 0's host, which the others are compared with
    [fault] = wrong_clocks({"a": 0.0, "b": 300.0, "c": 300.1}, tolerance=1.0)
    assert fault.hosts == ("a",)
    [fault] = wrong_clocks({"a": 0.0, "b": 300.0}, tolerance=1.0)
    assert fault.hosts == ("b",)
    assert wrong_clocks({"a": 0.0, "b": 0.9}, tolerance=1.0) == []


# -- wrong results -----------------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> tuple[ProcessTopology, int]:
    """Draw a topology of two or more axes with two or more ranks each, and one of its ranks."""
    dims = draw(st.lists(st.integers(2, 4), min_size=2, max_size=3))
    topology = ProcessTopology(["pipe", "data", "model"][: len(dims)], dims)
    return topology, draw(st.integers(0, topology.world_size() - 1))


@settings(deadline=None)
@given(worlds(), st.sampled_from(["sends", "receives", "adds", "adds for all"]))
def test_the_rank_that_causes_wrong_results_is_found(world: tuple[ProcessTopology, int], does: str) -> None:
    topology, wrong = world
    anomalies = []
    for axis in topology.axes:
        ranks = tuple(topology.get_axis_ranks(axis, wrong))
        operation = f"a collective over {axis}"
        others = [rank for rank in ranks if rank != wrong]
        if does == "sends":
            anomalies += [Anomaly(rank, operation, tuple(sorted((rank, wrong)))) for rank in others]
        elif does == "receives":
            anomalies += [Anomaly(wrong, operation, tuple(sorted((rank, wrong)))) for rank in others]
        elif does == "adds":
            anomalies.append(Anomaly(wrong, operation, ranks))
        else:
            anomalies += [Anomaly(rank, operation, ranks) for rank in ranks]
    host_of = {rank: f"h{rank // 2}" for rank in range(topology.world_size())}
    [fault] = wrong_ranks(anomalies, host_of)
    assert (fault.ranks, fault.hosts) == ((wrong,), (f"h{wrong // 2}",))
    assert f"rank {wrong} on h{wrong // 2} gives wrong results" in fault.message


def test_both_ranks_of_a_pair_are_suspected() -> None:
    [fault] = wrong_ranks([Anomaly(0, "all_gather over data", (0, 1))], {0: "a", 1: "b"})
    assert fault.ranks == (0, 1)
    assert "rank 0 on a or rank 1 on b" in fault.message
    assert wrong_ranks([], {}) == []


@settings(deadline=None)
@given(st.integers(3, 12), st.data())
def test_pairs_identify_the_faulty_member_of_a_group(size: int, data: st.DataObject) -> None:
    ranks = tuple(range(0, 2 * size, 2))
    wrong = data.draw(st.sampled_from(ranks))
    of_group = [Anomaly(rank, "all_reduce over data", ranks) for rank in ranks]
    host_of = dict.fromkeys(ranks, "a")
    assert [fault.ranks for fault in wrong_ranks(of_group, host_of)] == [ranks]
    of_pairs = [Anomaly(rank, "all_reduce over pairs", pair) for rank in ranks for pair in pairs_of(ranks, rank)]
    seen = [anomaly for anomaly in of_pairs if wrong in anomaly.suspects]
    assert [fault.ranks for fault in wrong_ranks([*of_group, *seen], host_of)] == [(wrong,)]


def test_two_wrong_ranks_are_two_faults() -> None:
    anomalies = [Anomaly(seen, "all_gather", tuple(sorted((seen, wrong)))) for wrong in (1, 6) for seen in (0, 3, 5)]
    faults = wrong_ranks(anomalies, dict.fromkeys(range(8), "a"))
    assert sorted(fault.ranks for fault in faults) == [(1,), (6,)]


# -- links -------------------------------------------------------------------------------------------------------------


def rates_of(hosts: int, slow: dict[tuple[str, str], float] | None = None) -> dict[tuple[str, str], float]:
    names = [f"h{index}" for index in range(hosts)]
    return dict.fromkeys(permutations(names, 2), 100000000.0) | (slow or {})


@settings(deadline=None)
@given(st.integers(3, 9), st.data())
def test_a_host_with_a_slow_link_is_reported(hosts: int, data: st.DataObject) -> None:
    bad = f"h{data.draw(st.integers(0, hosts - 1))}"
    ends = data.draw(st.sampled_from([(0,), (1,), (0, 1)]))
    rates = {
        pair: 10e6 if any(pair[end] == bad for end in ends) else data.draw(st.floats(80e6, 120e6))
        for pair in rates_of(hosts)
    }
    [fault] = slow_hosts(rates, slow=0.5)
    assert (fault.kind, fault.hosts) == ("link", (bad,))
    verb = {(0,): "link sends", (1,): "link receives", (0, 1): "link carries"}[ends]
    assert fault.message.startswith(f"{bad}'s {verb} at most 10 MB/s, 0.")


def test_a_slow_pair_of_fast_hosts_is_reported() -> None:
    [fault] = slow_hosts(rates_of(4, {("h1", "h3"): 10e6}), slow=0.5)
    assert fault.hosts == ("h1", "h3")
    assert fault.message == "h1 -> h3 carries 10 MB/s, 0.10 of what both reach with others"


def test_many_slow_pairs_are_counted() -> None:
    slow = {(f"h{a}", f"h{b}"): 10e6 for a in range(6) for b in range(6, 12)}
    faults = slow_hosts(rates_of(12, slow), slow=0.5)
    assert len(faults) == 17
    assert faults[-1].message == "20 more pairs of hosts are slow"


def test_equal_links_have_no_fault() -> None:
    for hosts in (2, 3, 8):
        assert slow_hosts(rates_of(hosts), slow=0.5) == []


def test_the_directions_of_two_hosts_are_compared_with_each_other_and_the_expectation() -> None:
    [fault] = slow_hosts(rates_of(2, {("h0", "h1"): 10e6}), slow=0.5)
    assert fault.message == "h0 -> h1 carries 10 MB/s, 0.10 of the other way (100 MB/s)"
    both = rates_of(2, {("h0", "h1"): 10e6, ("h1", "h0"): 10e6})
    assert slow_hosts(both, slow=0.5) == []
    faults = slow_hosts(both, slow=0.5, expected=100e6)
    assert [fault.hosts for fault in faults] == [("h1",), ("h0",)]
    assert faults[1].message == "h0's link carries 10 MB/s, 0.10 of the expected 100 MB/s"


def test_a_slow_rank_is_reported_unless_its_host_is() -> None:
    host_of = {rank: f"h{rank // 2}" for rank in range(6)}
    rates = {rank: 10.0 if rank == 3 else 100.0 for rank in range(6)}
    [fault] = slow_ranks("receives", rates, 0.25, host_of)
    assert (fault.hosts, fault.ranks) == (("h1",), (3,))
    assert slow_ranks("receives", rates, 0.25, host_of, ignored_hosts=["h1"]) == []


def _printed(summary: Summary) -> str:
    out = StringIO()
    print_summary(Console(file=out, width=80, color_system=None), summary, 0.5)
    return out.getvalue()


def _measured(slowest: float, link: float = 100e6) -> Summary:
    summary = Summary("data=2", "gloo", 4, {"a": (0, 1), "b": (2, 3)})
    seconds = {0: 1.0, 1: 1.0, 2: 1 / slowest, 3: 1.0}
    times = {rank: (1e-3, took, 2**20) for rank, took in seconds.items()}
    summary.axes["data"] = axis_summary([[0, 1], [2, 3]], times, "aabb")
    rates = {("a:0", "a:1"): 100e6, ("a:1", "a:0"): 100e6, ("b:2", "b:3"): link}
    summary.inside = link_summary({pair: (1e-4, rate) for pair, rate in rates.items()})
    return summary


def test_a_slow_group_is_not_passed_over_in_silence() -> None:
    assert _printed(_measured(0.9)).endswith("\nNo faults.\n")
    printed = _printed(_measured(0.25))
    assert "\nNo faults. 1 warning:\n  slow: data group of ranks 2-3 on b, 0.40 of the median" in printed
    assert "Run the check again" in printed
    printed = _printed(_measured(0.25, link=43e6))
    assert "2 warnings" in printed
    assert "slow: b:2 -> b:3 inside hosts, 0.43 of the median" in printed


def test_tables_name_sizes_and_shares_of_the_median() -> None:
    lines = [line.split() for line in _printed(_measured(0.25)).splitlines()]
    header = ["group", "ranks", "hosts", "latency", "size", "bandwidth", "slowest", "group", "of", "median"]
    row = lines[lines.index(header) + 1]
    assert row == ["data", "2", "1", "1.0", "ms", "1", "MiB", "655", "kB/s", "[2,", "3]", "0.40"]


def test_a_fault_of_its_host_explains_a_slow_group() -> None:
    summary = _measured(0.25, link=43e6)
    summary.faults.append(Fault("link", "b's link is slow", ("b",)))
    assert _printed(summary).endswith("\n1 fault:\n  link: b's link is slow\n")
    summary.faults[0] = Fault("clock", "a's clock is wrong", ("a",))
    assert "  slow: data group of ranks 2-3 on b" in _printed(summary)


# -- serialisation and parsing ----------------------------------------------------------------------------------------


def test_summaries_have_the_planners_units() -> None:
    summary = Summary("data=2", "gloo", 2, {"a": (0,), "b": (1,)})
    summary.across = link_summary({("a", "b"): (1e-4, 1e6), ("b", "a"): (1e-4, 3e6)})
    content = summary.as_json()
    assert content["across"]["bandwidth"] == 2e6
    assert content["across"]["latency"] == 1e-4
    assert content["across"]["slowest"][0] == ("a", "b", 1e6)
    assert content["hosts"] == [{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}]
    assert content["inside"] is None


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("1gbit", 125e6), ("200mbit", 25e6), ("25GB/s", 25e9), ("1.5 Gb/s", 187.5e6), ("800 kbps", 1e5), ("7B", 7.0)],
)
def test_rates_are_parsed(text: str, bytes_per_second: float) -> None:
    assert rate(text) == pytest.approx(bytes_per_second)


@pytest.mark.parametrize("text", ["", "fast", "10", "gbit", "-1gbit", "1 xbit", "1e9bit"])
def test_malformed_rates_are_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="expected a number with a unit"):
        rate(text)
