"""Exchange reports of a check through the job's store, before any group exists and after one has failed.

In every step each rank posts a report, and rank 0 posts one answer to all. No rank continues alone, and a rank that
fails, hangs or dies is named instead of waited for.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # the class of torch.distributed, which mypy finds only here

from ds_topo.backends import accelerator
from ds_topo.check.faults import Fault, RankReport
from ds_topo.errors import LaunchError
from ds_topo.launch.launchers import Launch
from ds_topo.launch.placement import fold_numbers

T = TypeVar("T")
CLOCK_ROUNDS = 3
_PATIENCE = 2.0
"""Rank 0 waits this many timeouts for reports: the other ranks may be in a collective that times out first."""


class StepFailure(RuntimeError):
    """The check cannot continue. On rank 0 ``faults`` has the reasons."""

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = faults


@dataclass
class Meeting:
    """The store, as all ranks of a check use it, step by step in one order.

    Args:
        store: the job's store.
        rank: this rank.
        world_size: the number of ranks.
        timeout: the time limit of one step.
    """

    store: Store
    rank: int
    world_size: int
    timeout: timedelta
    hosts: Mapping[int, str] = field(default_factory=dict)
    """The host of every rank, on rank 0, as soon as it is known."""

    def step(
        self,
        name: str,
        work: Callable[[], Any],
        judge: Callable[[dict[int, Any]], tuple[list[Fault], T]],
        budget: timedelta = timedelta(),
    ) -> T:
        """Do ``work`` on every rank, let rank 0 judge all results, and return its answer on all ranks.

        Args:
            name: the name of the step, different from all others.
            work: the work of this rank. Its result or its exception goes to rank 0 as JSON.
            judge: called on rank 0 with every rank's result; returns the faults that end the check, and the answer.
            budget: the time beyond the timeout that the work may take.

        Raises:
            StepFailure: a rank failed or did not answer, or ``judge`` returned faults.
            LaunchError: rank 0 does not answer.
        """
        try:
            report: dict[str, Any] = {"result": work()}
        except Exception as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        self.store.set(f"{name}/{self.rank}", json.dumps(report))
        if self.rank == 0:
            reports = self._reports(name, self.timeout * _PATIENCE + budget)
            faults, answer = self._failures(name, reports), None
            if not faults:
                faults, answer = judge({rank: report["result"] for rank, report in reports.items()})
            self.store.set(f"{name}/answer", json.dumps({"ends": bool(faults), "answer": answer}))
            if faults:
                raise StepFailure("; ".join(fault.message for fault in faults), faults)
            return answer  # type: ignore[return-value]
        try:
            self.store.wait([f"{name}/answer"], self.timeout * (_PATIENCE + 1) + budget)
            reply = json.loads(self.store.get(f"{name}/answer"))
        except (dist.DistError, RuntimeError) as error:
            raise LaunchError(f"rank 0 no longer answers ({str(error).splitlines()[0]}): see its own output") from error
        if reply["ends"]:
            raise StepFailure(f"rank 0 ended the check in step {name!r}")
        return reply["answer"]  # type: ignore[no-any-return]

    def _reports(self, name: str, patience: timedelta) -> dict[int, dict[str, Any]]:
        """Wait for the reports of all ranks; return those that came in time."""
        keys = {rank: f"{name}/{rank}" for rank in range(self.world_size)}
        try:
            self.store.wait(list(keys.values()), patience)
        except (dist.DistError, RuntimeError):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items()}

    def _failures(self, name: str, reports: Mapping[int, Mapping[str, Any]]) -> list[Fault]:
        """Return a fault for ranks that did not report, and one for each of the first few different errors."""
        faults = []
        if missing := [rank for rank in range(self.world_size) if rank not in reports]:
            hosts, where = self._where(missing)
            text = f"{name}: {where} did not answer: they ended or hang"
            faults.append(Fault("missing", text, hosts, tuple(missing)))
        alike: dict[str, list[int]] = defaultdict(list)
        for rank, report in reports.items():
            if "error" in report:
                alike[report["error"].splitlines()[0][:400]].append(rank)
        for error, ranks in list(alike.items())[:8]:
            hosts, where = self._where(ranks)
            faults.append(Fault("failure", f"{name}: {where} failed: {error}", hosts, tuple(ranks)))
        return faults

    def _where(self, ranks: Sequence[int]) -> tuple[tuple[str, ...], str]:
        hosts = tuple(dict.fromkeys(self.hosts.get(rank, "?") for rank in ranks))
        return hosts, f"ranks {fold_numbers(ranks)} on {', '.join(hosts[:8])}"

    def clock_offset(self, hosts: int) -> float:
        """Return the seconds by which this host's clock is ahead of rank 0's; called by one rank of each of ``hosts``.

        Rank 0 posts its time when all hosts wait for it. Its message takes some time, so the smallest of a few offsets
        counts.

        Raises:
            TimeoutError: on rank 0, some hosts did not come.
        """
        offsets = []
        for number in range(CLOCK_ROUNDS):
            ready, now = f"clocks/ready{number}", f"clocks/now{number}"
            came = self.store.add(ready, 1)
            if self.rank:
                self.store.wait([now], self.timeout)
                offsets.append(time.time() - float(self.store.get(now)))
                continue
            end = time.monotonic() + self.timeout.total_seconds()
            while came < hosts:
                if time.monotonic() > end:
                    raise TimeoutError(f"{came} of {hosts} ranks came to {ready}")
                time.sleep(0.005)
                came = self.store.add(ready, 0)
            time.sleep(0.05)  # until the last of them waits
            self.store.set(now, repr(time.time()))
            offsets.append(0.0)
        return min(offsets)


def report_of(launch: Launch, topology: str) -> RankReport:
    """Return the report of this rank."""
    try:
        # the identity of the running kernel, equal in all containers of one machine
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = platform.node()
    host = socket.gethostname()
    return RankReport(
        launch.rank, host, machine, launch.local_rank, launch.local_world_size, topology, versions=versions()
    )


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
