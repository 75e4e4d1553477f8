"""What this rank says of itself: host, machine, topology, versions, clock."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ds_topo.check.faults import RankReport
from ds_topo.check.meeting import Meeting
from ds_topo.launch.launchers import Launch

CLOCK_ROUNDS = 3


def report_of(launch: Launch, topology: str) -> RankReport:
    """The report of this rank."""
    return RankReport(
        launch.rank,
        socket.gethostname(),
        _machine(),
        launch.local_rank,
        launch.local_world_size,
        topology,
        versions(),
    )


def versions() -> dict[str, str]:
    """Everything that must be the same on all hosts, as text; what is not installed is left out.

    >>> {"Python", "deepspeed"} <= versions().keys()
    True
    """
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    for package in ("ds_topo", "deepspeed"):
        with suppress(importlib.metadata.PackageNotFoundError):  # imported from a folder
            found[package] = importlib.metadata.version(package)
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = Path("/proc/driver/nvidia/version")
        if driver.exists():
            found["NVIDIA driver"] = driver.read_text().splitlines()[0].split("  ")[1]
    return found


def _machine() -> str:
    """The identity of the running kernel, the same in all containers of one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def as_json(report: RankReport) -> dict[str, Any]:
    """For the store."""
    return asdict(report)


def from_json(content: dict[str, Any]) -> RankReport:
    """From the store."""
    return RankReport(**content)


def clock_offset(meeting: Meeting, is_first_on_host: bool, hosts: int) -> float | None:
    """Seconds by which this host's clock is ahead of rank 0's, up to what a message through the store takes.

    Rank 0 shows its clock when all hosts wait for it; the message that was fastest of a few counts. Ranks that are not
    the first on their host take no part.
    """
    if not is_first_on_host:
        return None
    offsets = []
    for number in range(CLOCK_ROUNDS):
        meeting.count_in(f"clocks/ready{number}")
        if meeting.rank == 0:
            meeting.wait_for_count(f"clocks/ready{number}", hosts)
            time.sleep(0.05)  # from having counted itself to waiting, for the last of them
            meeting.store.set(f"clocks/now{number}", repr(time.time()))
            offsets.append(0.0)
        else:
            meeting.store.wait([f"clocks/now{number}"], meeting.timeout)
            offsets.append(time.time() - float(meeting.store.get(f"clocks/now{number}")))
    return min(offsets)  # a message adds to what the clock is ahead
