"""Run a check, step by step, on every rank of a job.

In every step each rank posts a report to the job's store, before any group exists and after one has failed. Rank 0
judges all reports and posts one answer (:mod:`ds_topo.launch.council`). No rank continues alone, and a rank that fails,
hangs or dies is named instead of waited for.
"""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # a class of torch.distributed, which mypy finds only here

from ds_topo.base.backends import accelerator, device_served_by
from ds_topo.errors import LaunchError, TopologyError, fold_numbers
from ds_topo.health import faults, probes
from ds_topo.health.faults import Anomaly, Fault, RankReport, Summary
from ds_topo.health.probes import Device, PairTime, largest, ranks_in_blocks
from ds_topo.launch.council import Council
from ds_topo.launch.joining import create_world, open_store, take_device, wait_for_all
from ds_topo.launch.launchers import Launch
from ds_topo.launch.placement import group_axes
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.process_grid import ProcessGrid
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import check_meanings
from ds_topo.topology.rank_tables import RankGroup

FATAL = ("topology", "host", "missing", "failure")
"""The kinds of faults after which nothing further can be measured."""
T = TypeVar("T")
CLOCK_ROUNDS = 3
ROUNDS_BETWEEN_VOTES = 8
"""All ranks vote on whether the time is over."""
SHARED_LINK = 0.5
"""Ranks share their host's link unevenly, so a rank is slow only below this share of ``slow``."""


@dataclass(frozen=True)
class Options:
    """The options of a check.

    Args:
        timeout: the time limit of one step.
        seconds: the time for pairs of hosts; rounds that do not fit are left out and reported as such.
        slow: the share of the median below which a link is slow.
        clock_tolerance: the seconds by which clocks may differ.
        expected: the bytes per second that each host's link must carry, if known.
        expected_hosts: the host name of every rank, if known.
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


def run_check(launch: Launch, options: Options, progress: Callable[[str, int, int], None]) -> Summary | None:
    """Check the cluster; collective over all ranks of the job. Return the results, with faults, on rank 0 alone.

    ``progress`` is called with the name of a step, and with how much of it is done. If the check ends early, all ranks
    but rank 0 raise ``StepFailure``.
    """
    progress("waiting for all ranks", 0, 0)
    take_device(launch, options.backend)
    store = open_store(launch, options.timeout)
    wait_for_all(store, launch, options.timeout)
    check = _Check(launch, options, progress, store)
    with ExitStack() as stack:
        try:
            check.compare_reports()
            check.compare_clocks()
            check.create_groups()
            stack.callback(dist.destroy_process_group)
            stack.callback(check.grid.destroy)
            check.check_results()
            check.measure_axes()
            check.measure_inside_hosts()
            check.measure_across_hosts()
        except StepFailure as failure:
            check.faults += [fault for fault in failure.faults if fault not in check.faults]
            if launch.rank:
                raise
    return None if launch.rank else check.summary


class StepFailure(RuntimeError):
    """The check cannot continue. On rank 0 ``faults`` has the reasons."""

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class _Check:
    """The steps of a check on one rank, in the order in which they are called."""

    grid: ProcessGrid
    hosts: Sequence[Sequence[int]]
    """The global ranks of each host, ascending; hosts in the order of their first ranks."""
    team: ProcessGroup | None
    """The ranks of this host, where there are several."""

    def __init__(
        self, launch: Launch, options: Options, progress: Callable[[str, int, int], None], store: Store
    ) -> None:
        self.rank, self.launch, self.options = launch.rank, launch, options
        self.progress, self.store = progress, store
        members, subject = range(launch.world_size), f"ds-topo check on rank {launch.rank}"
        self.council = Council(store, "check", launch.rank, members, subject, options.timeout, LaunchError)
        self.summary = Summary(options.spec, options.backend, launch.world_size)
        self.faults = self.summary.faults
        self.host_of: dict[int, str] = {}
        """The host of every rank, on rank 0, as soon as it is known."""

    # -- before any group exists ---------------------------------------------------------------------------------------

    def compare_reports(self) -> None:
        """Compare topologies, versions and hosts of all ranks; learn the ranks of every host."""
        launch, options = self.launch, self.options
        self.progress("versions and topology", 0, 0)

        def describe() -> dict[str, Any]:
            try:
                topology = ProcessTopology.from_spec(options.spec, launch.world_size)
                check_meanings(topology.axes, topology.extra_axes)
                described = topology.spec
            except TopologyError as error:
                described = f"unusable: {error}"
            try:
                # the identity of the running kernel, equal in all containers of one machine
                machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            except OSError:
                machine = platform.node()
            ranks = launch.local_rank, launch.local_world_size
            return asdict(RankReport(launch.rank, socket.gethostname(), machine, *ranks, described, versions()))

        def judge(answers: dict[int, Any]) -> tuple[list[Fault], dict[str, Any]]:
            reports = [RankReport(**answer) for _, answer in sorted(answers.items())]
            self.host_of = {report.rank: report.host for report in reports}
            ranks_of = {host: [each.rank for each in there] for host, there in faults.by_host(reports).items()}
            self.summary.hosts = {host: tuple(ranks) for host, ranks in ranks_of.items()}
            self.summary.versions = dict(reports[0].versions)
            found = faults.disagreements(reports) + _unexpected_hosts(reports, options.expected_hosts)
            unusable = [report for report in reports if report.topology.startswith("unusable")]
            if unusable and not any(fault.kind == "topology" for fault in found):
                found.append(Fault("topology", f"the topology is {unusable[0].topology}"))
            self.faults += found
            hosts, blocks = list(ranks_of.values()), (len(reports) // len(ranks_of), len(ranks_of))
            # every rank reads this from one store, so it is short where ranks are numbered host by host
            placed = {"blocks": blocks} if hosts == ranks_in_blocks(*blocks) else {"hosts": hosts}
            return [fault for fault in found if fault.kind in FATAL], placed

        placed = self.step("describe", describe, judge)
        self.hosts = ranks_in_blocks(*placed["blocks"]) if "blocks" in placed else placed["hosts"]
        self.host = next(host for host, ranks in enumerate(self.hosts) if self.rank in ranks)
        self.place = self.hosts[self.host].index(self.rank)

    def compare_clocks(self) -> None:
        """Compare the clocks of all hosts."""
        self.progress("clocks", 0, 0)
        answers = self.gather("clocks", lambda: None if self.place else self.clock_offset())
        if answers:
            offsets = {self.host_of[rank]: offset for rank, offset in answers.items() if offset is not None}
            self.summary.clocks = offsets
            self.faults += faults.wrong_clocks(offsets, self.options.clock_tolerance)

    # -- groups --------------------------------------------------------------------------------------------------------

    def create_groups(self) -> None:
        """Create the groups of training, and one of the ranks of each host."""
        launch, options = self.launch, self.options
        self.progress("groups", 0, 0)
        topology = ProcessTopology.from_spec(options.spec, launch.world_size)
        self.summary.topology = topology.spec

        def create() -> None:
            create_world(self.store, launch, options.timeout, options.backend)
            self.grid = ProcessGrid(topology, timeout=options.timeout)

        self.gather("groups", create)
        served = device_served_by(options.backend, launch.local_rank)
        self.device = Device(served, options.most_bytes)
        assert dist.group.WORLD is not None
        self.world: ProcessGroup = dist.group.WORLD
        kinds = [(" x ".join(axes), axes) for axes in group_axes(topology)]
        self.kinds = [(name, axes) for name, axes in kinds if len(self.grid.get_ranks(axes)) > 1]

    def check_results(self) -> None:
        """Check arithmetic on every rank and collectives in every group.

        Where a wrong sum may be due to any member of a group, its members are tested again in pairs.
        """
        grid, rank, device = self.grid, self.rank, self.device.device
        self.progress("results", 0, 0)
        seen: list[Anomaly] = []

        def test() -> list[Anomaly]:
            found = probes.check_arithmetic(device, rank)
            for name, axes in self.kinds:
                found += probes.check_group(name, grid.get_ranks(axes), grid.get_group(axes), rank, device)
            return found

        def judge(answers: dict[int, Any]) -> tuple[list[Fault], list[tuple[int, ...]]]:
            seen.extend(_anomalies(answers))
            found = faults.wrong_ranks(seen, self.host_of)
            unclear = [fault.ranks for fault in found if len(fault.ranks) > 2]
            if not unclear:
                self.faults += found
            return [], unclear

        unclear = [tuple(suspects) for suspects in self.step("results", test, judge)]
        if not unclear:
            return

        def test_pairs() -> list[Anomaly]:
            pairs = sorted({pair for suspects in unclear for pair in probes.pairs_of(suspects, rank)})
            wanted = [RankGroup((f"pair {one}-{other}",), (one, other)) for one, other in pairs]
            groups = zip(pairs, grid.create_groups("pairs of suspects", wanted), strict=True)
            found = (probes.check_group("pairs", pair, group, rank, device) for pair, group in groups)
            return [anomaly for anomalies in found for anomaly in anomalies]

        answers = self.gather("results in pairs", test_pairs)
        if answers:
            self.faults += faults.wrong_ranks([*seen, *_anomalies(answers)], self.host_of)

    def measure_axes(self) -> None:
        """Measure latency and bandwidth of every kind of group."""
        grid = self.grid
        for number, (name, axes) in enumerate(self.kinds):
            self.progress(f"speed of {name} groups", number, len(self.kinds))
            group, groups = grid.get_group(axes), grid.topology().get_axis_comm_lists(axes)
            measure = partial(probes.time_all_reduce, group, self.world, self.device)
            answers = self.gather(f"axis {name}", measure)
            if answers:
                self.summary.axes[name] = faults.axis_summary(groups, answers, self.host_of)

    # -- pairs ---------------------------------------------------------------------------------------------------------

    def measure_inside_hosts(self) -> None:
        """Measure every pair of ranks of each host, on all hosts at the same time."""
        hosts, options = self.hosts, self.options
        ranks = hosts[self.host]
        wanted = [RankGroup(("host",), tuple(ranks))] if len(ranks) > 1 else []
        self.team = next(iter(self.grid.create_groups("the ranks of each host", wanted)), None)
        if max(map(len, hosts)) == 1:
            return
        progress, others = partial(self.progress, "links inside hosts"), probes.opponents(self.place, len(ranks))
        progress(0, 0)

        def measure() -> list[PairTime]:
            times = []
            for done, other in enumerate(others, start=1):
                if other is not None and (measured := probes.time_pair(ranks[other], self.device)):
                    times.append(measured)
                progress(done, len(others))
            return times

        answers = self.gather("links inside", measure, timedelta(seconds=options.seconds))
        if not answers:
            return
        names = {rank: f"{host}:{rank}" for rank, host in self.host_of.items()}
        times = {rank: [PairTime(*each) for each in answer] for rank, answer in answers.items() if answer}
        self.summary.inside = faults.link_summary(
            {(names[link.peer], names[rank]): (link.latency, link.came) for rank in times for link in times[rank]}
        )
        rates = {rank: max(link.came for link in links) for rank, links in times.items()}
        self.faults += faults.slow_ranks("receives inside its host", rates, options.slow * SHARED_LINK, self.host_of)

    def measure_across_hosts(self) -> None:
        """Measure every pair of hosts, with all of their ranks at once, until all have met or the time is over."""
        hosts, options = self.hosts, self.options
        if len(hosts) == 1:
            return
        progress, others = partial(self.progress, "links between hosts"), probes.opponents(self.host, len(hosts))
        progress(0, 0)

        def measure() -> dict[str, Any]:
            times: list[PairTime] = []
            start, done = time.monotonic(), 0
            for other in others:
                is_vote = done and done % ROUNDS_BETWEEN_VOTES == 0
                if is_vote and largest(time.monotonic() - start, self.world, self.device) > options.seconds:
                    break
                if other is not None:
                    peer = hosts[other][self.place] if self.place < len(hosts[other]) else None
                    if measured := probes.time_pair(peer, self.device, self.team):
                        times.append(measured._replace(peer=other))
                done += 1
                progress(done, len(others))
            best = [max((link.came for link in times), default=0.0), max((link.went for link in times), default=0.0)]
            return {"best": best, "times": [] if self.place else times, "rounds": done}

        answers = self.gather("links between", measure, timedelta(seconds=options.seconds))
        if not answers:
            return
        names = [self.host_of[ranks[0]] for ranks in hosts]
        links: dict[tuple[str, str], tuple[float, float]] = {}
        for host, ranks in enumerate(hosts):
            for link in (PairTime(*each) for each in answers[ranks[0]]["times"]):
                together = min(len(hosts[link.peer]), len(ranks))  # each of so many ranks has an equal share
                links[names[link.peer], names[host]] = link.latency, together * link.came
        self.summary.across = faults.link_summary(links)
        self.summary.rounds = (answers[0]["rounds"], len(others))
        rates = {pair: rate for pair, (_, rate) in links.items()}
        found = faults.slow_hosts(rates, options.slow, options.expected)
        self.faults += found
        known = {host for fault in found for host in fault.hosts}
        for what, end in (("receives from other hosts", 0), ("sends to other hosts", 1)):
            best = {rank: answer["best"][end] for rank, answer in answers.items() if answer["best"][end] > 0}
            if best:
                self.faults += faults.slow_ranks(what, best, options.slow * SHARED_LINK, self.host_of, known)

    # -- steps through the job's store ---------------------------------------------------------------------------------

    def step(
        self,
        name: str,
        work: Callable[[], Any],
        judge: Callable[[dict[int, Any]], tuple[list[Fault], T]],
        budget: timedelta = timedelta(),
    ) -> T:
        """Do ``work`` on every rank, let rank 0 judge all results, and return its answer on all ranks.

        Raise ``StepFailure`` on all ranks if one failed or did not answer, or if ``judge`` returned faults.

        Args:
            work: the work of this rank. Its result or its exception goes to rank 0 as JSON.
            judge: called on rank 0 with every rank's result; returns the faults that end the check, and the answer.
            budget: the time beyond the timeout that the work may take.
        """
        try:
            report: dict[str, Any] = {"result": work()}
        except Exception as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        found: list[Fault] = []

        def judged(reports: dict[int, Any]) -> dict[str, Any]:
            found.extend(self._failures(name, reports))
            if found:
                return {"ends": True}
            faults, answer = judge({rank: report["result"] for rank, report in reports.items()})
            found.extend(faults)
            return {"ends": bool(faults), "answer": answer}

        # a rank that failed posts at once, while others are in a collective that times out first
        reply = self.council.decide(name, report, judged, spread=self.options.timeout + budget)
        if reply["ends"]:
            said = "; ".join(fault.message for fault in found) or f"rank 0 ended the check in step {name!r}"
            raise StepFailure(said, found)
        return reply["answer"]  # type: ignore[no-any-return]

    def gather(self, name: str, work: Callable[[], Any], budget: timedelta = timedelta()) -> dict[int, Any]:
        """Do ``work`` on every rank; return all results on rank 0, none on the others."""
        results: dict[int, Any] = {}
        self.step(name, work, lambda found: ([], results.update(found)), budget)
        return results

    def _failures(self, name: str, reports: Mapping[int, Mapping[str, Any]]) -> list[Fault]:
        """Return a fault for ranks that did not report, and one for each of the first few different errors."""
        alike: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank in range(self.launch.world_size):
            if rank not in reports:
                alike["missing", "did not answer: they ended or hang"].append(rank)
            elif "error" in reports[rank]:
                alike["failure", f"failed: {reports[rank]['error'].splitlines()[0][:400]}"].append(rank)
        found = []
        for (kind, text), ranks in sorted(alike.items(), key=lambda item: item[0][0] != "missing")[:8]:
            hosts = tuple(dict.fromkeys(self.host_of.get(rank, "?") for rank in ranks))
            where = f"ranks {fold_numbers(ranks)} on {', '.join(hosts[:8])}"
            found.append(Fault(kind, f"{name}: {where} {text}", hosts, tuple(ranks)))
        return found

    def clock_offset(self) -> float:
        """Return the seconds by which this host's clock is ahead of rank 0's; called by the first rank of each host.

        Rank 0 answers with its time when all hosts wait for it. The answer takes some time, so the smallest of a few
        offsets counts.
        """
        first_ranks = [ranks[0] for ranks in self.hosts]

        def now(_: object) -> float:
            time.sleep(0.05)  # until the last of them waits
            return time.time()

        offsets = []
        for number in range(CLOCK_ROUNDS):
            there = self.council.decide(f"time {number}", None, now, posting=first_ranks)
            offsets.append(time.time() - there if self.rank else 0.0)
        return min(offsets)


def _unexpected_hosts(reports: Sequence[RankReport], expected: Sequence[str] | None) -> list[Fault]:
    """Find ranks that are not on the host that a hostfile or Slurm gives."""
    if expected is None:
        return []
    if len(expected) != len(reports):
        return [Fault("host", f"the hosts given have {len(expected)} slots, but the job has {len(reports)} ranks")]
    odd = [report for report in reports if not _same_host(report.host, expected[report.rank])]
    text = "rank {0.rank} is on {0.host}, not on {1} as the hosts given say"
    return [
        Fault("host", text.format(report, expected[report.rank]), (report.host,), (report.rank,)) for report in odd[:16]
    ]


def _same_host(actual: str, expected: str) -> bool:
    """Return whether two names mean one host: they are equal up to the domain, or have the same address."""
    if actual.split(".")[0].lower() == expected.split(".")[0].lower():
        return True
    with suppress(OSError):
        return socket.gethostbyname(actual) == socket.gethostbyname(expected)
    return False


def _anomalies(answers: Mapping[int, Any]) -> list[Anomaly]:
    return [Anomaly(by, operation, tuple(ranks)) for found in answers.values() for by, operation, ranks in found]


def versions() -> dict[str, str]:
    """Return the versions of everything that must be equal on all hosts; packages that are missing are left out.

    >>> {"Python", "deepspeed"} <= versions().keys()
    True
    """
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    for package in ("ds_topo", "deepspeed"):
        with suppress(importlib.metadata.PackageNotFoundError):  # imported from a folder
            found[package] = importlib.metadata.version(package)
    if (device := accelerator()) is not None:
        found["device"] = torch.get_device_module(device).get_device_name()
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
    if torch.version.cuda is not None and device is not None:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = Path("/proc/driver/nvidia/version")
        if driver.exists():
            found["NVIDIA driver"] = driver.read_text().splitlines()[0].split("  ")[1]
    return found
