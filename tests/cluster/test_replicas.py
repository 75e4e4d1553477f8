"""Replicas that torchft keeps together lose and get each other, and end equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.replica_rank import PHASES
from tests.support.exhaustive import mark_exhaustive

pytest.importorskip("torchft", reason='torchft is not installed: pip install "ds_topo[torchft]"')

from tests.cluster.replicas import ReplicaJob

StartCluster = Callable[..., Cluster]
TIMEOUT = 4.0


def _killed(job: ReplicaJob) -> None:
    job.start(0, 1)
    job.until_done(1, 5)
    job.kill_host(1)
    job.until_more(0)
    job.add_host(1, "comes back")
    job.until_joined(1, 0)


def _first_killed(job: ReplicaJob) -> None:
    job.start(0)
    job.until_done(0, 3)
    job.start(1)
    job.until_joined(1, 0)
    job.kill_host(0)
    job.until_more(1)
    job.add_host(0, "comes back")
    job.until_joined(0, 1)


def _stopped(job: ReplicaJob) -> None:
    job.start(0, 1)
    job.until_done(1, 5)
    job.stop_host(1)
    job.until_more(0)
    job.resume_host(1)
    job.until_joined(1, 0)


def _cut_off(job: ReplicaJob) -> None:
    job.start(0, 1)
    job.until_done(1, 5)
    job.cut_cable(1)
    job.until_more(0)
    job.cluster.plug_in(1)
    job.until_joined(1, 0)


def _slow(job: ReplicaJob) -> None:
    job.start(0, 1)
    job.until_done(1, 5)
    job.cluster.set_rate_of(1, "200kbit")
    job.until_more(0, 5)
    job.cluster.set_rate_of(1, None)
    job.until_joined(1, 0)


def _two_at_once(job: ReplicaJob) -> None:
    job.start(0, 1, 2)
    job.until_done(2, 5)
    job.kill_host(1)
    job.kill_host(2)
    job.until_more(0)
    job.add_host(1, "comes back")
    job.add_host(2, "comes back")
    job.until_joined(1, 0)
    job.until_joined(2, 0)


def _in_phase(phase: str, job: ReplicaJob) -> None:
    if phase == "state":  # the one that heals dies while the other is healed
        job.start(1)
        job.until_done(1, 3)
        (job.out / "die-state-host1").touch()
        job.start(0)
    elif phase == "healing":
        job.start(0)
        job.until_done(0, 3)
        (job.out / "die-healing-host1").touch()
        job.start(1)
    else:
        job.start(0, 1)
        job.until_done(1, 5)
        job.until_done(0, 5)
        if phase == "save":  # only one of them saves
            (job.out / "die-save-host0").touch()
    job.kill_in(phase, 1) if phase != "save" else job.until(
        lambda: not ({path.name for path in job.out.glob("die-save-*")} >= {"die-save-host0", "die-save-host1"})
    )
    job.until_more(0)
    job.until_joined(1, 0)


@dataclass(frozen=True)
class Case:
    happens: Callable[[ReplicaJob], None]
    options: str
    hosts: int = 2

    def __str__(self) -> str:
        name = getattr(self.happens, "__name__", "") or f"in_{self.happens.args[0]}"  # type: ignore[attr-defined]
        return f"{name.strip('_')}-{self.options.replace('--', '').replace(' ', '_')}"


CASES = [
    Case(_killed, "--spec shard=2 --zero 1"),
    Case(_killed, "--spec data=2 --zero 0"),
    Case(_killed, "--spec shard=2 --zero 2 --accumulate 2"),
    Case(_killed, "--spec shard=2 --zero 3"),
    Case(_killed, "--spec pipe=2 --zero 1 --accumulate 2"),
    Case(_first_killed, "--spec data=2 --zero 2"),
    Case(_stopped, "--spec shard=2 --zero 1"),
    Case(_stopped, "--spec shard=2 --zero 3 --accumulate 2"),
    Case(_cut_off, "--spec shard=2 --zero 1"),
    Case(_slow, "--spec shard=2 --zero 1"),
    Case(_two_at_once, "--spec shard=2 --zero 1", hosts=3),
    *(Case(partial(_in_phase, phase), "--spec shard=2 --zero 1 --save-every 5") for phase in PHASES),
]


@pytest.mark.parametrize("case", mark_exhaustive(CASES, default=lambda number, _: number == 0), ids=str)
def test_replicas_end_equal_and_as_one_process_with_the_same_samples(
    case: Case, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(hosts=case.hosts + 1)
    stop = tmp_path / "stop"
    job = ReplicaJob(cluster, tmp_path, [*case.options.split(), "--pace", "0.1", "--timeout", str(TIMEOUT)])
    case.happens(job)
    steps = max(row["step"] for index in range(case.hosts) for row in job.rows(index)) + 10
    stop.with_suffix(".new").write_text(str(steps))
    stop.with_suffix(".new").rename(stop)
    job.wait_for_end(*range(case.hosts), seconds=90)
    job.check_equal(range(case.hosts), steps)
    gap = job.longest_gap(range(case.hosts))
    differences = job.replayed(range(case.hosts), steps)
    norms, losses = (max(row[column] for row in differences) for column in (1, 2))
    print(f"\n{case}: {steps} steps, no step for {gap:.1f} s, norms differ by {norms:.1e}, losses by {losses:.1e}")
    assert max(norms, losses) < 1e-5
