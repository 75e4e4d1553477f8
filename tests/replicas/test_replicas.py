"""Replicas that torchft keeps together lose and get each other, and end equal to the last bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.replicas.rank import CHUNK, SAMPLES, layers, loss_of, samples

pytest.importorskip("torchft", reason='torchft is not installed: pip install "ds_topo[torchft]"')

from tests.replicas.job import ReplicaJob
from tests.support.exhaustive import mark_exhaustive

STEPS = 60
TIMEOUT = 4.0


def killed_and_back(job: ReplicaJob) -> None:
    """Kill a replica, and start it again some steps later."""
    job.start(0, 1)
    job.until_step(1, 8)
    job.kill(1)
    job.until_step(0, max(row["step"] for row in job.rows(0)) + 5)
    job.start(1)


def stopped(job: ReplicaJob) -> None:
    """Stop a replica for longer than the timeout, and let it go on."""
    job.start(0, 1)
    job.until_step(1, 8)
    job.signal(1, signal.SIGSTOP)
    job.until_step(0, max(row["step"] for row in job.rows(0)) + 5)
    job.signal(1, signal.SIGCONT)


def first_killed(job: ReplicaJob) -> None:
    """Kill the replica that the others were healed from."""
    job.start(0)
    job.until_step(0, 3)
    job.start(1)
    job.until_step(1, 10)
    job.kill(0)
    job.until_step(1, max(row["step"] for row in job.rows(1)) + 5)
    job.start(0)


def two_of_three(job: ReplicaJob) -> None:
    """Kill two of three replicas at once."""
    job.start(0, 1, 2)
    job.until_step(2, 8)
    job.kill(1)
    job.kill(2)
    job.until_step(0, max(row["step"] for row in job.rows(0)) + 5)
    job.start(1, 2)


def committed(job: ReplicaJob) -> list[dict[int, dict[str, Any]]]:
    """Return the rows of rank 0 of each replica by step, after comparing those of all ranks."""
    found: list[dict[int, dict[str, Any]]] = []
    for file in sorted(job.out.glob("replica*-rank0.jsonl")):
        replica = int(file.name.removeprefix("replica").split("-")[0])
        found.append({row["step"]: row for row in job.rows(replica)})
    return found


def replayed(job: ReplicaJob, clip: float = 0.5) -> None:
    """Take the committed steps again in one process, on the same samples, and compare losses and norms."""
    replicas = committed(job)
    data, order = samples(), list[int]()
    model = nn.Sequential(*layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = 0
    for step in range(1, STEPS + 1):
        rows = [rows[step] for rows in replicas if step in rows]
        assert rows, f"no replica has committed step {step}"
        assert len({(row["batches"], row["norm"]) for row in rows}) == 1, f"step {step} differs: {rows}"
        after = int(rows[0]["batches"])
        while len(order) < after * CHUNK:
            generator = torch.Generator().manual_seed(7 + len(order) // SAMPLES)
            order += torch.randperm(SAMPLES, generator=generator).tolist()
        batch = data[order[before * CHUNK : after * CHUNK]]
        for row in rows:
            own = batch[row["place"] * CHUNK : (row["place"] + 1) * CHUNK][0::2]
            assert row["loss"] == pytest.approx(loss_of(model(own), own).item(), rel=1e-5)
        loss_of(model(batch), batch).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        assert rows[0]["norm"] == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        before = after


def check_equal(job: ReplicaJob) -> None:
    """Each rank has the same bits in all replicas after every step that several of them have committed."""
    last = set()
    for rank in range(2):
        by_step: dict[int, set[str]] = {}
        for replica in job.processes:
            for row in job.rows(replica, rank):
                by_step.setdefault(row["step"], set()).add(row["digest"])
            last.add(max(row["step"] for row in job.rows(replica, rank)))
        differ = {step: digests for step, digests in by_step.items() if len(digests) > 1}
        assert not differ, f"rank {rank}: {differ}"
    assert last == {STEPS}


@dataclass(frozen=True)
class Case:
    happens: Callable[[ReplicaJob], None]
    options: str

    def __str__(self) -> str:
        return f"{self.happens.__name__}-{self.options.replace(' ', '')}"


CASES = [
    Case(killed_and_back, "--spec shard=2 --zero 1"),
    Case(killed_and_back, "--spec data=2 --zero 0"),
    Case(killed_and_back, "--spec shard=2 --zero 2"),
    Case(killed_and_back, "--spec shard=2 --zero 3"),
    Case(killed_and_back, "--spec pipe=2 --zero 1"),
    Case(stopped, "--spec shard=2 --zero 1"),
    Case(stopped, "--spec shard=2 --zero 3"),
    Case(first_killed, "--spec data=2 --zero 2"),
    Case(two_of_three, "--spec shard=2 --zero 1"),
]


@pytest.mark.parametrize("case", mark_exhaustive(CASES, default=lambda number, _: number == 0), ids=str)
def test_replicas_end_equal_and_as_one_process_with_the_same_samples(case: Case, tmp_path: Path) -> None:
    pace = ["--steps", str(STEPS), "--pace", "0.2", "--timeout", str(TIMEOUT)]
    job = ReplicaJob(tmp_path, [*case.options.split(), *pace])
    try:
        case.happens(job)
        job.finish()
    finally:
        job.close()
    check_equal(job)
    replayed(job)
