"""Run cases of the matrix on virtual hosts, and check the output of their ranks."""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tests.cluster import Cluster
from tests.cluster.rank_jobs import ENVIRONMENT, MASTER_PORT, rank_environment
from tests.faults import rank_server
from tests.faults.job import HAPPENED

ENGINES = (
    "plain0", "plain1", "plain2", "plain3", "pipe0", "pipe1",
    "plain0-reducer", "plain1-reducer", "plain2-reducer", "pipe0-reducer", "pipe1-reducer",
    "moe", "reducer", "reducer-two-level",
)  # fmt: skip
FAULTS = (
    "kill",
    "stop",
    "gone",
    "cut",
    "exception",
    "handler",
    "skip-step",
    "skip-collective",
    "flap",
    "exit",
    "leave",
)
PHASES = ("start", "grid", "construction", "between", "forward", "backward", "step", "save", "evaluation")
RANKS_PER_HOST, HOSTS = 2, 2
ALLOWED_SECONDS = 5.0
"""Seconds that a rank has to end after the watch's limit."""
UNWATCHED_SECONDS = 15.0
"""Seconds that a rank has to end without the watch."""
START_SECONDS, POLL_SECONDS = 120.0, 0.05


@dataclass(frozen=True)
class Case:
    """A fault in one phase of one engine."""

    engine: str
    fault: str
    phase: str
    victim: int = 3
    limit: float = 4.0
    """The limit of the watch; 0 for none."""
    timeout: float = 90.0
    """The timeout of the job."""

    @property
    def broken(self) -> set[int]:
        """The ranks whose output is not checked."""
        if self.fault == "gone":
            return {rank for rank in range(4) if rank // RANKS_PER_HOST == self.victim // RANKS_PER_HOST}
        return {self.victim}

    @property
    def allowed_seconds(self) -> float:
        """The seconds within which all ranks must have ended."""
        return self.limit + ALLOWED_SECONDS if self.limit else UNWATCHED_SECONDS

    def __str__(self) -> str:
        watched = "" if self.limit else " without the watch"
        return f"{self.engine} {self.fault} {self.phase} rank {self.victim}{watched}"


@dataclass
class Outcome:
    """The result of a case."""

    case: Case
    codes: dict[int, int | None] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    """Seconds from the fault to the end of each rank."""
    outputs: dict[int, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """Processes and shared memory that remain."""
    has_happened: bool = False

    def problems(self, timed: bool = True) -> list[str]:
        """Return the problems of the outcome, as sentences."""
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
            if timed and rank in self.seconds and self.seconds[rank] > case.allowed_seconds:
                found.append(f"rank {rank}: ended after {self.seconds[rank]:.1f} s")
            if case.fault == "skip-collective" and self.codes[rank] == -signal.SIGABRT:
                continue  # gloo aborts if a message has another size than it expects
            found += [f"rank {rank}: {problem}" for problem in self._problems_of_message(rank, output)]
        return found + [f"left: {line}" for line in self.left]

    def _problems_of_message(self, rank: int, output: str) -> list[str]:
        case = self.case
        if case.fault == "exception" and case.phase == "save" and not case.engine.startswith("reducer"):
            where = rf"ranks \[{case.victim}\] on host{case.victim // RANKS_PER_HOST}"
            if re.search(rf"{where} -> \S+ could not be written: ValueError", output):
                return []  # a rank that writes nothing fails after the save
        if not case.limit:
            who = rf"rank {case.victim}( \(.*\))? on host{case.victim // RANKS_PER_HOST} (failed in|has ended)"
            ended = "rank 0, which served" if case.victim == 0 else rf"Ranks \[{case.victim}\] do not answer"
            return [] if re.search(rf"{who}|{ended}", output) else ["does not name the rank"]
        if "ds_topo watch: a fault" not in output:
            return ["no message of the watch"]
        text = output[output.index("ds_topo watch: a fault") :]
        found = []
        coordinate = r"\([a-z]+=\d.*\) " if case.phase != "start" else ""
        here = re.search(rf"Here: rank {rank} {coordinate}.*on host{rank // RANKS_PER_HOST}, .*", text)
        if not here:
            found.append("does not say where it was itself")
        elif case.phase != "start" and "waiting in" not in here[0]:
            found.append("does not say what it waited for")
        is_cut = case.fault == "cut" and rank // RANKS_PER_HOST == case.victim // RANKS_PER_HOST
        if case.fault == "skip-collective" or is_cut:
            return found  # no single rank is at fault; each side of the cut sees the other as silent
        of_host = {each for each in self.outputs if each // RANKS_PER_HOST == case.victim // RANKS_PER_HOST}
        named = "|".join(map(str, sorted(of_host if case.fault == "cut" else case.broken)))
        if "wait for each other" in text and case.fault == "skip-step":
            return found if f"  rank {case.victim}: " in text else [*found, "does not say what the rank does"]
        if not re.search(rf"rank ({named})\b[^\n]*on host{case.victim // RANKS_PER_HOST}", text):
            found.append("does not name the rank and its host")
        if not re.search(r"It was (last seen )?(before the first step|after \d+ steps?)", text):
            found.append("does not say which step")
        return found


class Rig:
    """Virtual hosts that run one case after the other, while a ``with`` statement runs."""

    def __init__(self) -> None:
        self._cluster = Cluster(HOSTS)
        self._servers: list[Popen[str]] = []
        self._cases = 0

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        try:
            for host in self._cluster.hosts:
                command = [sys.executable, "-m", "tests.faults.rank_server"]
                self._servers.append(host.start(command, env=ENVIRONMENT, stdin=PIPE, stdout=PIPE, text=True))
            for server in self._servers:
                assert server.stdout is not None
                while (line := server.stdout.readline()) != f"{rank_server.READY}\n":
                    assert line, "a rank server has ended"
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.kill()
            server.communicate()
        self._cluster.__exit__(kind, error, trace)

    def run(self, case: Case) -> Outcome:
        """Run a case, and restore the hosts."""
        outcome = Outcome(case)
        with tempfile.TemporaryDirectory() as folder:
            logs = {rank: Path(folder, f"rank{rank}") for rank in range(HOSTS * RANKS_PER_HOST)}
            try:
                self._start(case, logs)
                happened = self._await_fault(case, logs)
                outcome.has_happened = happened is not None
                self._await_ends(case, logs, outcome, happened or time.monotonic())
                outcome.left = _left(self._cluster, case)
            finally:
                self._clean_up()
            outcome.outputs = {rank: log.read_text(errors="replace") for rank, log in logs.items()}
        return outcome

    def _start(self, case: Case, logs: dict[int, Path]) -> None:
        self._cases += 1
        arguments = [case.engine, case.fault, case.phase, str(case.victim), str(case.limit), str(case.timeout)]
        for rank, log in logs.items():
            log.touch()
            variables = rank_environment(rank, len(logs), RANKS_PER_HOST, self._cluster.hosts[0].address)
            variables["MASTER_PORT"] = str(MASTER_PORT + self._cases)  # the old port may still be in use
            start = {"arguments": arguments, "variables": variables, "log": str(log)}
            self._ask(rank // RANKS_PER_HOST, {"start": start})

    def _ask(self, host: int, request: dict[str, Any]) -> None:
        server = self._servers[host]
        assert server.stdin is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()

    def _await_fault(self, case: Case, logs: dict[int, Path]) -> float | None:
        """Wait for the fault; return its time, or None if it did not happen."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and any(_exit_code(log) is None for log in logs.values()):
            if HAPPENED in logs[case.victim].read_text(errors="replace"):
                host = case.victim // RANKS_PER_HOST
                if case.fault in ("cut", "gone"):
                    self._cluster.unplug(host)
                if case.fault == "gone":
                    self._ask(host, {"kill": True})
                return time.monotonic()
            time.sleep(POLL_SECONDS)
        return None

    def _await_ends(self, case: Case, logs: dict[int, Path], outcome: Outcome, happened: float) -> None:
        """Wait for the end of all ranks except victims that do not end."""
        end = happened + case.allowed_seconds + 30
        waiting = set(logs)
        stays = case.broken if case.fault in ("stop", "handler", "gone") else set()
        while waiting - stays and time.monotonic() < end:
            for rank in sorted(waiting):
                if _exit_code(logs[rank]) is not None:
                    outcome.seconds[rank] = time.monotonic() - happened
                    waiting.remove(rank)
            time.sleep(POLL_SECONDS)
        outcome.codes = {rank: _exit_code(log) for rank, log in logs.items()}

    def _clean_up(self) -> None:
        for index in range(HOSTS):
            self._cluster.plug_in(index)
            self._ask(index, {"kill": True})


def _exit_code(log: Path) -> int | None:
    path = rank_server.exit_code_of(log)
    return int(path.read_text()) if path.exists() else None


def _left(cluster: Cluster, case: Case) -> list[str]:
    """Find processes and shared memory that remain on hosts where every rank has ended."""
    time.sleep(0.5)
    found = []
    for index, host in enumerate(cluster.hosts):
        if case.fault in ("stop", "handler") and case.victim // RANKS_PER_HOST == index:
            continue  # the victim is still running
        root = Path(f"/proc/{host.pid}/root")
        commands = [_command(entry) for entry in Path(root, "proc").iterdir() if entry.name.isdigit()]
        # torch 2.8's processes that compile outlive a rank that is killed
        ours = [command for command in commands if "python" in command and "compile_worker" not in command]
        found += [f"{host.name}: {command}" for command in sorted(ours)[1:]]  # one process is the server
        found += [f"{host.name}: /dev/shm/{file.name}" for file in Path(root, "dev/shm").iterdir()]
    return found


def _command(process: Path) -> str:
    try:
        return Path(process, "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""  # the process has just ended
