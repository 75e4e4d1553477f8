"""Start, kill and stop the replicas of one job on this host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchft.coordination import LighthouseServer

from tests.support.ports import free_port


class ReplicaJob:
    """Replicas of ``ranks`` ranks each, and their lighthouse.

    Args:
        out: a folder for records and the output of ranks.
        options: of :mod:`tests.replicas.rank`.
        ranks: the number of ranks of each replica.
    """

    def __init__(self, out: Path, options: Sequence[str], ranks: int = 2) -> None:
        self.out, self._options, self._ranks = out, options, ranks
        out.mkdir(parents=True, exist_ok=True)
        self._lighthouse = LighthouseServer("[::]:0", 1, join_timeout_ms=500, heartbeat_timeout_ms=2000)
        self.processes: dict[int, list[subprocess.Popen[bytes]]] = {}
        self._starts = 0

    def start(self, *replicas: int) -> None:
        """Start the ranks of replicas."""
        for replica in replicas:
            port = free_port()
            self._starts += 1
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "REPLICA": str(replica)}
            common |= {"WORLD_SIZE": str(self._ranks), "LOCAL_WORLD_SIZE": str(self._ranks)}
            common |= {"TORCHFT_LIGHTHOUSE": self._lighthouse.address()}
            command = [sys.executable, "-m", "tests.replicas.rank", "--out", str(self.out), *self._options]
            with (self.out / f"replica{replica}-start{self._starts}.log").open("wb") as log:
                self.processes[replica] = [
                    subprocess.Popen(
                        command,
                        env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                    for rank in range(self._ranks)
                ]

    def signal(self, replica: int, number: int) -> None:
        """Send a signal to all ranks of a replica."""
        for process in self.processes[replica]:
            process.send_signal(number)

    def kill(self, replica: int) -> None:
        """Kill a replica, and wait for the end of its processes."""
        self.signal(replica, signal.SIGKILL)
        for process in self.processes.pop(replica):
            process.wait()

    def rows(self, replica: int, rank: int = 0) -> list[dict[str, Any]]:
        """Return what a rank has recorded of its committed steps."""
        file = self.out / f"replica{replica}-rank{rank}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def until_step(self, replica: int, step: int, seconds: float = 90) -> None:
        """Wait until a replica has committed a step."""
        deadline = time.monotonic() + seconds
        while not any(row["step"] >= step for row in self.rows(replica)):
            for each in self.processes.get(replica, []):
                assert each.poll() in (None, 0), f"replica {replica} ended with {each.returncode}: see {self.out}"
            assert time.monotonic() < deadline, f"replica {replica} did not reach step {step}: see {self.out}"
            time.sleep(0.05)

    def finish(self, seconds: float = 120) -> None:
        """Wait for the end of all replicas; the first error ends the others."""
        deadline = time.monotonic() + seconds
        try:
            for replica, processes in self.processes.items():
                for process in processes:
                    code = process.wait(max(0.1, deadline - time.monotonic()))
                    assert code == 0, f"replica {replica} ended with {code}: see {self.out}"
        finally:
            self.close()

    def close(self) -> None:
        """End what still runs."""
        for processes in self.processes.values():
            for process in processes:
                process.kill()
                process.wait()
        self._lighthouse.shutdown()
