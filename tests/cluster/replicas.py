"""Run replicas that torchft keeps together on virtual hosts, one on each, and break them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.cluster.elastic import VARIABLES, ElasticJob
from tests.cluster.replica_rank import ADAM, CHUNK, SAMPLES, layers, loss_of, samples
from tests.cluster.virtual_hosts import Cluster

PROGRAM = Path(__file__).with_name("replica_rank.py")
LIGHTHOUSE_PORT = 29510


class ReplicaJob(ElasticJob):
    """Replicas of two ranks, each under its own torchrun on its own host; the last host has the lighthouse.

    Args:
        cluster: the hosts.
        out: a folder for records and logs.
        options: options of :mod:`tests.cluster.replica_rank`.
    """

    def __init__(self, cluster: Cluster, out: Path, options: Sequence[str]) -> None:
        super().__init__(cluster, out, options, program=PROGRAM)
        launcher = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
        self._command = [*launcher, "--max-restarts", "100", str(PROGRAM), "--out", str(out), *options]
        last = cluster.hosts[-1]
        self.replicas = range(len(cluster.hosts) - 1)
        self._variables = VARIABLES | {"TORCHFT_LIGHTHOUSE": f"http://{last.name}:{LIGHTHOUSE_PORT}"}
        command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"[::]:{LIGHTHOUSE_PORT}"]
        command += ["--min_replicas", "1", "--join_timeout_ms", "500", "--heartbeat_timeout_ms", "2000"]
        with (out / "lighthouse.log").open("w") as log:
            self._lighthouse = last.start(command, stdout=log, stderr=log)

    def start(self, *hosts: int) -> None:
        """Start the replicas of hosts."""
        for index in hosts:
            with self._log(index).open("a") as log:
                self._torchruns[index] = self.cluster.hosts[index].start(
                    self._command, env=self._variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

    def kill_in(self, phase: str, index: int) -> None:
        """Let a rank of a replica kill itself in a phase of a step, and wait until it has."""
        self.kill_in_one_of(phase, index)

    def kill_in_one_of(self, phase: str, *hosts: int) -> list[int]:
        """Let a rank kill itself in a phase, of the first of these replicas that comes to it; return that."""
        files = {index: self.out / f"die-{phase}-host{index}" for index in hosts}
        for file in files.values():
            file.touch()
        self.until(lambda: not all(file.exists() for file in files.values()))
        found = [index for index, file in files.items() if not file.exists()]
        for file in files.values():
            file.unlink(missing_ok=True)
        self._note(f"host{found[0]} killed in {phase}")
        return found

    def attempts(self) -> list[dict[str, Any]]:
        """Return nothing: replicas have no attempts of the whole job."""
        return []

    # -- what was

    def rows(self, index: int, rank: int = 0) -> list[dict[str, Any]]:
        """Return what a rank has recorded of its committed steps."""
        file = self.out / f"host{index}-rank{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def until_done(self, index: int, step: int) -> None:
        """Wait until a replica has committed a step."""
        self.until(lambda: any(row["step"] >= step for row in self.rows(index)))

    def until_more(self, index: int, steps: int = 3) -> None:
        """Wait until a replica has committed some more steps."""
        self.until_done(index, max([row["step"] for row in self.rows(index)], default=0) + steps)

    def until_joined(self, index: int, others: int) -> None:
        """Wait until a replica that came has committed a step together with another one."""
        known = len(self.rows(index))

        def steps(of: int, first: int) -> set[int]:
            return {row["step"] for row in self.rows(of)[first:]}

        self.until(lambda: steps(index, known) & steps(others, 0))

    def history(self, hosts: Sequence[int], rank: int = 0) -> dict[int, list[dict[str, Any]]]:
        """Return what replicas have recorded of each step; of steps that a new start has repeated, the last time."""
        rows = sorted((row for index in hosts for row in self.rows(index, rank)), key=lambda row: float(row["time"]))
        found: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            step = row["step"]
            if step in found and any(row["process"] == other["process"] for other in found[step]):
                raise AssertionError(f"a process has recorded step {step} twice: {row}")
            if step in found and found[step][0]["batches"] != row["batches"]:
                found = {number: known for number, known in found.items() if number < step}
            found.setdefault(step, []).append(row)
        return found

    def check_equal(self, hosts: Sequence[int], steps: int) -> None:
        """Check that each rank had the same bits in all replicas after every step that they have committed."""
        for rank in range(2):
            for index in hosts:
                assert max(row["step"] for row in self.rows(index, rank)) == steps, f"host{index} ends earlier"
            for step, rows in self.history(hosts, rank).items():
                assert len({row["digest"] for row in rows}) == 1, f"rank {rank} after step {step}: {rows}"

    def longest_gap(self, hosts: Sequence[int], since: float = 0.0) -> float:
        """Return the longest time between two steps of the job, in seconds."""
        times = sorted(row["time"] for index in hosts for row in self.rows(index) if row["time"] > since - 1.0)
        return max(later - earlier for earlier, later in pairwise(times))

    def replayed(self, hosts: Sequence[int], steps: int) -> list[tuple[float, float, float, float]]:
        """Take the committed steps again in one process, on the same samples.

        Returns:
            For each step the norm, the greatest relative difference of a replica's norm and loss, and the greatest
            absolute difference of a replica's loss.
        """
        data, order, before = samples(), list[int](), 0
        model = nn.Sequential(*layers())
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        by_step = self.history(hosts)
        found = []
        for step in range(1, steps + 1):
            rows = by_step.get(step, [])
            assert rows, f"no replica has recorded step {step}"
            assert len({row["batches"] for row in rows}) == 1, f"step {step}: {rows}"
            after = int(rows[0]["batches"])
            while len(order) < after * CHUNK:
                generator = torch.Generator().manual_seed(7 + len(order) // SAMPLES)
                order += torch.randperm(SAMPLES, generator=generator).tolist()
            batch = data[order[before * CHUNK : after * CHUNK]]
            losses, absolute = [], []
            for row in rows:
                own = batch[row["place"] * CHUNK : (row["place"] + 1) * CHUNK]
                share = own if row["whole"] else own[0::2]
                expected = loss_of(model(share), share).item()
                losses.append(abs(row["loss"] / expected - 1))
                absolute.append(abs(row["loss"] - expected))
            loss_of(model(batch), batch).backward()
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            found.append((norm, max(abs(row["norm"] / norm - 1) for row in rows), max(losses), max(absolute)))
            optimizer.step()
            optimizer.zero_grad()
            before = after
        return found
