"""A check, step by step, as every rank runs it; rank 0 judges."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed's, where mypy sees them

from ds_topo.check import results, timing
from ds_topo.check.faults import (
    Anomaly,
    Fault,
    RankReport,
    disagreements,
    slow_hosts,
    slow_ranks,
    wrong_clocks,
    wrong_ranks,
)
from ds_topo.check.links import Hosts, PairTimes, best, time_across_hosts, time_inside_hosts
from ds_topo.check.meeting import Meeting, StepFailures
from ds_topo.check.reports import as_json, clock_offset, from_json, report_of
from ds_topo.check.summary import AxisSummary, LinkSummary, Summary, axis_summary, link_summary
from ds_topo.check.tournament import rounds
from ds_topo.errors import TopologyError
from ds_topo.launch.joining import create_world, open_store, take_device, wait_for_all
from ds_topo.launch.launchers import Launch
from ds_topo.placement.placement import group_axes
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.grid import ProcessGrid
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import check_meanings
from ds_topo.topology.rank_tables import RankGroup

FATAL = ("topology", "host", "missing", "failure")
"""After these nothing further can be measured."""
SHARED_LINK = 0.5
"""Ranks that share their host's link divide it unevenly: they are slow only below this share of ``slow``."""


@dataclass(frozen=True)
class Options:
    """What is checked, and how strictly.

    Args:
        spec: of the topology.
        backend: of torch.
        timeout: of one step.
        seconds: for the tests of pairs of hosts; rounds that do not fit are left out, and that is said.
        slow: the share of the median below which a link is slow.
        clock_tolerance: seconds.
        expected: bytes per second that each host's link must carry, if it is known.
        expected_hosts: the name of the host of every rank, if it is known.
        most_bytes: the largest transfer.
    """

    spec: str
    backend: str
    timeout: timedelta
    seconds: float = 120.0
    slow: float = 0.5
    clock_tolerance: float = 1.0
    expected: float | None = None
    expected_hosts: Sequence[str] | None = None
    most_bytes: int = 2**25


class Progress(Protocol):
    """Shows how far the check is."""

    def begin(self, step: str) -> None:
        """A step begins."""

    def advance(self, done: int, of: int) -> None:
        """So much of it is done."""


@dataclass
class _Check:
    """The state of a check on one rank, filled step by step."""

    launch: Launch
    options: Options
    progress: Progress
    meeting: Meeting
    faults: list[Fault] = field(default_factory=list)
    reports: dict[int, RankReport] = field(default_factory=dict)
    """Of all ranks, on rank 0."""


def run_check(launch: Launch, options: Options, progress: Progress) -> Summary | None:
    """Check the cluster; collective over all ranks of the job.

    Returns:
        On rank 0 what was found, faults included; None on the others.

    Raises:
        LaunchError: the store cannot be reached.
        DisagreementError: ranks did not come.
        StepFailure: on other ranks than 0, where the check ended early.
    """
    progress.begin("waiting for all ranks")
    if "nccl" in options.backend:
        take_device(launch)
    store = open_store(launch, options.timeout)
    wait_for_all(store, launch, options.timeout)
    meeting = Meeting(PrefixStore("check", store), launch.rank, launch.world_size, options.timeout)
    check = _Check(launch, options, progress, meeting)
    summary = Summary(options.spec, options.backend, launch.world_size)
    with ExitStack() as stack:
        try:
            hosts = _agree(check, summary)
            _clocks(check, summary, hosts)
            progress.begin("groups")
            topology = ProcessTopology.from_spec(options.spec, launch.world_size)
            summary.topology = topology.spec
            grid = _groups(check, topology, store)
            stack.callback(dist.destroy_process_group)
            stack.callback(grid.destroy)
            device = timing.Device(_device(options.backend, launch), options.most_bytes)
            _results(check, grid, device)
            summary.axes = _axes(check, grid, device)
            team = _team(grid, hosts, launch.rank)
            _inside(check, summary, hosts, device)
            _across(check, summary, hosts, device, team)
        except StepFailures as failure:
            check.faults += [fault for fault in failure.faults if fault not in check.faults]
    if launch.rank:
        return None
    summary.faults = check.faults
    return summary


# -- before any group exists -------------------------------------------------------------------------------------------


def _agree(check: _Check, summary: Summary) -> Hosts:
    """Topology, versions, hosts: the ranks of every host."""
    launch, options = check.launch, check.options
    check.progress.begin("versions and topology")

    def describe() -> dict[str, Any]:
        try:
            topology = ProcessTopology.from_spec(options.spec, launch.world_size)
            check_meanings(topology.axes, topology.extra_axes)
            described = topology.spec
        except TopologyError as error:
            described = f"unusable: {error}"
        return as_json(report_of(launch, described))

    def judge(answers: dict[int, Any]) -> tuple[list[Fault], dict[str, Any]]:
        reports = [from_json(answer) for _, answer in sorted(answers.items())]
        check.reports = {report.rank: report for report in reports}
        check.meeting.hosts = {report.rank: report.host for report in reports}
        by_host: dict[str, list[int]] = defaultdict(list)
        for report in reports:
            by_host[report.host].append(report.rank)
        hosts = Hosts(tuple(tuple(ranks) for ranks in by_host.values()))
        summary.hosts = {host: tuple(ranks) for host, ranks in by_host.items()}
        summary.versions = dict(reports[0].versions)
        found = disagreements(reports) + _unexpected_hosts(reports, options.expected_hosts)
        unusable = [report for report in reports if report.topology.startswith("unusable")]
        if unusable and not any(fault.kind == "topology" for fault in found):
            found.append(Fault("topology", f"the topology is {unusable[0].topology}"))
        check.faults += found
        return [fault for fault in found if fault.kind in FATAL], hosts.as_json()

    return Hosts.from_json(check.meeting.step("describe", describe, judge))


def _unexpected_hosts(reports: Sequence[RankReport], expected: Sequence[str] | None) -> list[Fault]:
    """Ranks that are not on the host that a hostfile or Slurm says."""
    if expected is None:
        return []
    if len(expected) != len(reports):
        return [Fault("host", f"the hosts given have {len(expected)} slots, but the job has {len(reports)} ranks")]
    odd = [report for report in reports if not _same_host(report.host, expected[report.rank])]
    return [
        Fault(
            "host",
            f"rank {report.rank} is on {report.host}, not on {expected[report.rank]} as the hosts given say",
            (report.host,),
            (report.rank,),
        )
        for report in odd[:16]
    ]


def _same_host(actual: str, expected: str) -> bool:
    """Whether two names mean one host: equal up to the domain, or the name and its address."""
    if actual.split(".")[0].lower() == expected.split(".")[0].lower():
        return True
    try:
        return socket.gethostbyname(actual) == socket.gethostbyname(expected)
    except OSError:
        return False


def _clocks(check: _Check, summary: Summary, hosts: Hosts) -> None:
    place = hosts.place(check.launch.rank)[1]
    check.progress.begin("clocks")

    def judge(answers: dict[int, Any]) -> tuple[list[Fault], None]:
        offsets = {check.reports[rank].host: float(offset) for rank, offset in answers.items() if offset is not None}
        summary.clocks = offsets
        check.faults += wrong_clocks(offsets, check.options.clock_tolerance)
        return [], None

    check.meeting.step("clocks", lambda: clock_offset(check.meeting, place == 0, len(hosts.ranks)), judge)


# -- groups ------------------------------------------------------------------------------------------------------------


def _groups(check: _Check, topology: ProcessTopology, store: Store) -> ProcessGrid:
    """The groups of training itself."""
    grids: list[ProcessGrid] = []

    def create() -> None:
        create_world(store, check.launch, check.options.timeout, check.options.backend)
        grids.append(ProcessGrid(topology, timeout=check.options.timeout))

    check.meeting.step("groups", create, lambda _: ([], None))
    return grids[0]


def _device(backend: str, launch: Launch) -> torch.device:
    return torch.device("cuda", launch.local_rank) if "nccl" in backend else torch.device("cpu")


def _kinds(grid: ProcessGrid) -> list[tuple[str, tuple[str, ...]]]:
    """Names and axes of the kinds of groups that have more than one rank, the world's among them."""
    topology = grid.topology()
    kinds = [(" x ".join(axes), axes) for axes in group_axes(topology)]
    return [(name, axes) for name, axes in kinds if len(grid.get_ranks(axes)) > 1]


def _results(check: _Check, grid: ProcessGrid, device: timing.Device) -> None:
    """Arithmetic on every rank, collectives in every group; in pairs where a wrong sum may be due to any of a group."""
    rank = check.launch.rank
    check.progress.begin("results")
    seen: list[Anomaly] = []

    def test() -> list[Any]:
        found = results.check_arithmetic(device.device, rank)
        for name, axes in _kinds(grid):
            found += results.check_group(name, grid.get_ranks(axes), grid.get_group(axes), rank, device.device)
        return [astuple(anomaly) for anomaly in found]

    def judge(answers: dict[int, Any]) -> tuple[list[Fault], list[tuple[int, ...]]]:
        seen.extend(_anomalies(answers))
        faults = wrong_ranks(seen, check.meeting.hosts)
        unclear = [fault.ranks for fault in faults if len(fault.ranks) > 2]
        if not unclear:
            check.faults += faults
        return [], unclear

    unclear = [tuple(suspects) for suspects in check.meeting.step("results", test, judge)]
    if not unclear:
        return

    def test_pairs() -> list[Any]:
        pairs = sorted({pair for suspects in unclear for pair in results.pairs_of(suspects, rank)})
        groups = grid.create_groups(
            "pairs of suspects", [RankGroup((f"pair {one}-{other}",), (one, other)) for one, other in pairs]
        )
        found = []
        for pair, group in zip(pairs, groups, strict=True):
            found += results.check_group("pairs", pair, group, rank, device.device)
        return [astuple(anomaly) for anomaly in found]

    def judge_pairs(answers: dict[int, Any]) -> tuple[list[Fault], None]:
        check.faults += wrong_ranks([*seen, *_anomalies(answers)], check.meeting.hosts)
        return [], None

    check.meeting.step("results in pairs", test_pairs, judge_pairs)


def _anomalies(answers: Mapping[int, Any]) -> list[Anomaly]:
    return [
        Anomaly(seen_by, operation, tuple(suspects))
        for found in answers.values()
        for seen_by, operation, suspects in found
    ]


def _axes(check: _Check, grid: ProcessGrid, device: timing.Device) -> dict[str, AxisSummary]:
    """Latency and bandwidth of every kind of group."""
    summaries: dict[str, AxisSummary] = {}
    kinds = _kinds(grid)
    for number, (name, axes) in enumerate(kinds):
        check.progress.begin(f"speed of {name} groups")
        check.progress.advance(number, len(kinds))

        def measure(axes: tuple[str, ...] = axes) -> list[float]:
            speed = timing.time_all_reduce(grid.get_group(axes), _whole_job(), device)
            return [speed.latency, speed.bandwidth]

        def judge(answers: dict[int, Any], name: str = name, axes: tuple[str, ...] = axes) -> tuple[list[Fault], None]:
            groups = grid.topology().get_axis_comm_lists(axes)
            summaries[name] = axis_summary(groups, answers, check.meeting.hosts)
            return [], None

        check.meeting.step(f"axis {name}", measure, judge)
    return summaries


def _whole_job() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


# -- pairs -------------------------------------------------------------------------------------------------------------


def _team(grid: ProcessGrid, hosts: Hosts, rank: int) -> ProcessGroup | None:
    """The group of this host's ranks; None where there is one alone."""
    ranks = hosts.ranks[hosts.place(rank)[0]]
    groups = grid.create_groups("the ranks of each host", [RankGroup(("host",), ranks)] if len(ranks) > 1 else [])
    return groups[0] if groups else None


def _inside(check: _Check, summary: Summary, hosts: Hosts, device: timing.Device) -> None:
    if max(map(len, hosts.ranks)) == 1:
        return
    rank = check.launch.rank
    check.progress.begin("links inside hosts")

    def judge(answers: dict[int, Any]) -> tuple[list[Fault], None]:
        times = {rank: PairTimes.from_json(answer) for rank, answer in answers.items()}
        summary.inside = _summary_of_ranks(times, check.meeting.hosts)
        rates = {rank: best(pairs.came) for rank, pairs in times.items() if pairs.peers}
        share = check.options.slow * SHARED_LINK
        check.faults += slow_ranks("receives inside its host", rates, share, check.meeting.hosts)
        return [], None

    check.meeting.step(
        "links inside",
        lambda: time_inside_hosts(hosts, rank, device, check.progress.advance).as_json(),
        judge,
        timedelta(seconds=check.options.seconds),
    )


def _across(check: _Check, summary: Summary, hosts: Hosts, device: timing.Device, team: ProcessGroup | None) -> None:
    if len(hosts.ranks) == 1:
        return
    options, rank = check.options, check.launch.rank
    check.progress.begin("links between hosts")

    def measure() -> dict[str, Any]:
        mine, whole, played = time_across_hosts(
            hosts, rank, device, team, _whole_job(), options.seconds, check.progress.advance
        )
        is_first = hosts.place(rank)[1] == 0
        of_host = whole.as_json() if is_first else None
        return {"best": [best(mine.came), best(mine.went)], "host": of_host, "rounds": played}

    def judge(answers: dict[int, Any]) -> tuple[list[Fault], None]:
        names = [check.meeting.hosts[ranks[0]] for ranks in hosts.ranks]
        latencies: dict[tuple[str, str], float] = {}
        rates: dict[tuple[str, str], float] = {}
        for host, ranks in enumerate(hosts.ranks):
            times = PairTimes.from_json(answers[ranks[0]]["host"])
            for peer, latency, came in zip(times.peers, times.latency, times.came, strict=True):
                latencies[names[peer], names[host]] = latency
                rates[names[peer], names[host]] = came
        summary.across = link_summary(latencies, rates)
        summary.rounds = (answers[0]["rounds"], rounds(len(hosts.ranks)))
        found = slow_hosts(rates, options.slow, options.expected, order=names)
        check.faults += found
        known = {host for fault in found for host in fault.hosts}
        check.faults += _slow_ranks_across(answers, options.slow, check.meeting.hosts, known)
        return [], None

    check.meeting.step("links between", measure, judge, timedelta(seconds=options.seconds))


def _slow_ranks_across(
    answers: Mapping[int, Any], slow: float, host_of: Mapping[int, str], known: set[str]
) -> list[Fault]:
    faults: list[Fault] = []
    for what, end in (("receives from other hosts", 0), ("sends to other hosts", 1)):
        rates = {rank: float(answer["best"][end]) for rank, answer in answers.items() if answer["best"][end] > 0}
        if rates:
            faults += slow_ranks(what, rates, slow * SHARED_LINK, host_of, known)
    return faults


def _summary_of_ranks(times: Mapping[int, PairTimes], host_of: Mapping[int, str]) -> LinkSummary:
    def name(rank: int) -> str:
        return f"{host_of[rank]}:{rank}"

    latencies = {
        (name(peer), name(rank)): latency
        for rank, pairs in times.items()
        for peer, latency in zip(pairs.peers, pairs.latency, strict=True)
    }
    rates = {
        (name(peer), name(rank)): rate
        for rank, pairs in times.items()
        for peer, rate in zip(pairs.peers, pairs.came, strict=True)
    }
    return link_summary(latencies, rates)
