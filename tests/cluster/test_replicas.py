"""Replicas that torchft keeps together lose and get each other, and end equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.support.exhaustive import mark_exhaustive

pytest.importorskip("torchft", reason='torchft is not installed: pip install "ds_topo[torchft]"')

from tests.cluster.replicas import ReplicaJob

StartCluster = Callable[..., Cluster]
TIMEOUT = 4.0


def _begun(job: ReplicaJob, *hosts: int) -> None:
    """Start replicas, and wait until all have done some steps."""
    job.start(*hosts)
    for index in hosts:
        job.until_done(index, 5)


def _killed(job: ReplicaJob) -> None:
    _begun(job, *job.replicas)
    job.kill_host(1)
    _again(job, 1)


def _again(job: ReplicaJob, *lost: int) -> None:
    """Start replicas that were killed again, some steps of the first later."""
    job.until_more(0)
    for index in lost:
        job.add_host(index, "comes back")
    for index in lost:
        job.until_joined(index, 0)


def _first_killed(job: ReplicaJob) -> None:
    """Kill the replica that has healed another."""
    _begun(job, 1)
    job.start(0)
    job.until_joined(0, 1)
    job.kill_host(1)
    _again(job, 1)


def _stopped(job: ReplicaJob) -> None:
    _begun(job, *job.replicas)
    job.stop_host(1)
    job.until_more(0)
    job.resume_host(1)
    job.until_joined(1, 0)


def _cut_off(job: ReplicaJob) -> None:
    _begun(job, *job.replicas)
    job.cut_cable(1)
    job.until_more(0)
    job.cluster.plug_in(1)
    job.until_joined(1, 0)


def _slow(job: ReplicaJob) -> None:
    _begun(job, *job.replicas)
    job.cluster.set_rate_of(1, "200kbit")
    job.until_more(0, 5)
    job.cluster.set_rate_of(1, None)
    job.until_joined(1, 0)


def _two_at_once(job: ReplicaJob) -> None:
    _begun(job, *job.replicas)
    job.kill_host(1)
    job.kill_host(2)
    _again(job, 1, 2)


def _in_phase(phase: str, job: ReplicaJob) -> None:
    _begun(job, *job.replicas)
    job.kill_in(phase, 1)
    job.until_more(0)
    job.until_joined(1, 0)


def _in_save(job: ReplicaJob) -> None:
    """Kill a rank of the replica that writes, whichever it is."""
    _begun(job, *job.replicas)
    [lost] = job.kill_in_one_of("save", *job.replicas)
    others = {*job.replicas} - {lost}
    job.until_more(min(others))
    job.until_joined(lost, min(others))


def _in_state(job: ReplicaJob) -> None:
    """Kill the only replica that can heal another, while that is healed."""
    _begun(job, 1)
    job.start(0)
    job.kill_in("state", 1)
    job.until_more(0)
    job.until_joined(1, 0)


def _in_healing(job: ReplicaJob) -> None:
    _begun(job, *{*job.replicas} - {1})
    job.start(1)
    job.kill_in("healing", 1)
    job.until_more(0)
    job.until_joined(1, 0)


@dataclass(frozen=True)
class Case:
    happens: Callable[[ReplicaJob], None]
    options: str
    hosts: int = 3

    def __str__(self) -> str:
        name = getattr(self.happens, "__name__", "") or f"in_{self.happens.args[0]}"  # type: ignore[attr-defined]
        return f"{name.strip('_')}-{self.options.replace('--', '').replace(' ', '_')}"


SAVING = "--spec shard=2 --zero 1 --save-every 5"
CASES = [
    Case(_killed, "--spec shard=2 --zero 1", hosts=2),
    Case(_killed, "--spec data=2 --zero 0"),
    Case(_killed, "--spec shard=2 --zero 2 --accumulate 2"),
    Case(_killed, "--spec shard=2 --zero 3"),
    Case(_killed, "--spec pipe=2 --zero 1 --accumulate 2"),
    Case(_first_killed, "--spec data=2 --zero 2", hosts=2),
    Case(_stopped, "--spec shard=2 --zero 1"),
    Case(_stopped, "--spec shard=2 --zero 3 --accumulate 2"),
    Case(_cut_off, "--spec shard=2 --zero 1"),
    Case(_slow, "--spec shard=2 --zero 1"),
    Case(_two_at_once, "--spec shard=2 --zero 1"),
    *(
        Case(partial(_in_phase, phase), SAVING)
        for phase in ("forward", "backward", "sum", "commit", "committed", "step")
    ),
    Case(_in_save, SAVING),
    Case(_in_state, SAVING, hosts=2),
    Case(_in_healing, SAVING),
]


@pytest.mark.thorough
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
