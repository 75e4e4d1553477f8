"""Run a case of the matrix on virtual hosts, and judge what its ranks have said."""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any

from tests.cluster import Cluster
from tests.cluster.rank_jobs import ENVIRONMENT, rank_environment
from tests.faults.job import FLAP_SECONDS, HAPPENED

ENGINES = (
    "plain0", "plain1", "plain2", "plain3", "pipe0", "pipe1",
    "plain0-reducer", "plain1-reducer", "plain2-reducer", "pipe0-reducer", "pipe1-reducer",
    "moe", "reducer", "reducer-two-level",
)  # fmt: skip
FAULTS = ("kill", "stop", "gone", "cut", "exception", "handler", "skip-step", "skip-collective", "flap")
PHASES = ("start", "forward", "backward", "step", "save", "evaluation")
RANKS_PER_HOST, HOSTS = 2, 2
ALLOWED_SECONDS = 5.0
"""After the watch's limit."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    engine: str
    fault: str
    phase: str
    victim: int = 3
    limit: float = 4.0

    @property
    def broken(self) -> set[int]:
        """Ranks of which nothing is asked."""
        if self.fault == "gone":
            return {rank for rank in range(4) if rank // RANKS_PER_HOST == self.victim // RANKS_PER_HOST}
        return {self.victim}

    def __str__(self) -> str:
        return f"{self.engine} {self.fault} {self.phase} rank {self.victim}"


@dataclass
class Outcome:
    """What came of it."""

    case: Case
    codes: dict[int, int | None] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    """From the fault to the rank's end."""
    outputs: dict[int, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """Processes that remain."""
    has_happened: bool = False

    def problems(self, timed: bool = True) -> list[str]:
        """What is not as it should be."""
        case, found = self.case, []
        if not self.has_happened:
            return ["the fault did not happen"]
        survives = case.fault == "flap"
        for rank, output in self.outputs.items():
            if survives:
                if self.codes[rank] != 0 or "trained" not in output:
                    found.append(f"rank {rank}: exit code {self.codes[rank]} after a flap")
                continue
            if rank in case.broken:
                continue
            if self.codes[rank] in (None, 0):
                found.append(f"rank {rank}: exit code {self.codes[rank]}")
            if timed and rank in self.seconds and self.seconds[rank] > case.limit + ALLOWED_SECONDS:
                found.append(f"rank {rank}: ended after {self.seconds[rank]:.1f} s")
            if case.fault == "skip-collective" and self.codes[rank] == -signal.SIGABRT:
                continue  # by gloo, which has found messages of other sizes than it waits for
            found += [f"rank {rank}: {problem}" for problem in self._problems_of_message(rank, output)]
        return found + [f"left: {line}" for line in self.left]

    def _problems_of_message(self, rank: int, output: str) -> list[str]:
        case = self.case
        if case.fault == "exception" and case.phase == "save" and not case.engine.startswith("reducer"):
            where = rf"ranks \[{case.victim}\] on host{case.victim // RANKS_PER_HOST}"
            told = rf"{where} -> \S+ could not be written: ValueError"
            return [] if re.search(told, output) else ["does not name the rank that could not write, and its host"]
        if "ds_topo watch: a fault" not in output:
            return ["no message of the watch"]
        text = output[output.index("ds_topo watch: a fault") :]
        found = []
        if not re.search(rf"Here: rank {rank} .*on host{rank // RANKS_PER_HOST}", text):
            found.append("does not say where it was itself")
        is_cut = case.fault == "cut" and rank // RANKS_PER_HOST == case.victim // RANKS_PER_HOST
        if case.fault == "skip-collective" or is_cut:
            return found  # nobody is to blame alone; on the side that is cut off, others are silent
        of_host = {each for each in self.outputs if each // RANKS_PER_HOST == case.victim // RANKS_PER_HOST}
        named = "|".join(map(str, sorted(of_host if case.fault == "cut" else case.broken)))
        if "wait for each other" in text and case.fault == "skip-step":
            return found if f"  rank {case.victim}: " in text else [*found, "does not say what the rank does"]
        if not re.search(rf"rank ({named})\b[^\n]*on host{case.victim // RANKS_PER_HOST}", text):
            found.append("does not name the rank and its host")
        if not re.search(r"It was,? (when last heard of, )?(before the first step|after \d+ steps?)", text):
            found.append("does not say which step")
        return found


def run(case: Case) -> Outcome:
    """Run it; in a cluster of its own."""
    outcome = Outcome(case)
    with Cluster(HOSTS) as cluster, tempfile.TemporaryDirectory() as folder:
        processes: dict[int, Popen[Any]] = {}
        logs = {rank: Path(folder, f"rank{rank}") for rank in range(HOSTS * RANKS_PER_HOST)}
        command = [sys.executable, "-m", "tests.faults.job", case.engine, case.fault, case.phase]
        command += [str(case.victim), str(case.limit)]
        for rank, log in logs.items():
            host = cluster.hosts[rank // RANKS_PER_HOST]
            variables = rank_environment(rank, len(logs), RANKS_PER_HOST, cluster.hosts[0].address)
            with log.open("wb") as output:
                processes[rank] = host.start(
                    command, env={**ENVIRONMENT, **variables}, stdin=DEVNULL, stdout=output, stderr=STDOUT
                )
        try:
            happened = _await_fault(case, cluster, processes, logs)
            outcome.has_happened = happened is not None
            _await_ends(case, processes, outcome, happened or time.monotonic())
            outcome.left = _left(cluster, case)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
        outcome.outputs = {rank: log.read_text(errors="replace") for rank, log in logs.items()}
    return outcome


def _await_fault(case: Case, cluster: Cluster, processes: dict[int, Popen[Any]], logs: dict[int, Path]) -> float | None:
    end = time.monotonic() + 120
    while time.monotonic() < end and any(process.poll() is None for process in processes.values()):
        if HAPPENED in logs[case.victim].read_text(errors="replace"):
            if case.fault == "cut":
                cluster.unplug(case.victim // RANKS_PER_HOST)
            elif case.fault == "gone":
                cluster.unplug(case.victim // RANKS_PER_HOST)
                for rank in case.broken:
                    processes[rank].send_signal(signal.SIGKILL)
            return time.monotonic()
        time.sleep(0.05)
    return None


def _await_ends(case: Case, processes: dict[int, Popen[Any]], outcome: Outcome, happened: float) -> None:
    seconds = case.limit + ALLOWED_SECONDS + 30 + (FLAP_SECONDS + 20 if case.fault == "flap" else 0)
    waiting = dict(processes)
    while waiting and time.monotonic() < happened + seconds:
        if case.fault == "flap":  # nsenter stops with its child, and does not go on with it
            processes[case.victim].send_signal(signal.SIGCONT)
        for rank, process in list(waiting.items()):
            if process.poll() is not None:
                outcome.seconds[rank] = time.monotonic() - happened
                del waiting[rank]
            elif rank in case.broken and len(waiting) == len(case.broken) and case.fault != "flap":
                del waiting[rank]
        time.sleep(0.05)
    outcome.codes = {rank: process.poll() for rank, process in processes.items()}


def _left(cluster: Cluster, case: Case) -> list[str]:
    """Processes of ranks that have ended, such as witnesses."""
    if case.fault in ("gone", "stop", "handler"):  # the victim itself is still there
        return []
    time.sleep(0.5)
    found = []
    for host in cluster.hosts:
        listing = host.run(["ps", "-eo", "args"])
        found += [f"{host.name}: {line}" for line in listing.splitlines() if "witness_process" in line]
    return found
