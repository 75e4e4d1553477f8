"""Kill random ranks of a job under ``torchrun --max-restarts``; compare its losses with an uninterrupted job's.

    python -m tests.restarts --kills 20

Each kill sends SIGKILL to a random rank while the job starts, between two saves, or during a save.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ds_topo.checkpoint.folder import DRAFT

ROOT = Path(__file__).parents[1]
SHAPE = ("--batch-size", "8", "--context", "16", "--width", "16", "--heads", "2", "--depth", "2")
PHASES = ("start", "steps", "save")
_START_SECONDS, _STEPS_SECONDS, _SAVE_SECONDS = 8.0, 0.5, 0.03
"""The longest delays of a kill: after all ranks started, after a checkpoint, and after a checkpoint's folder exists."""


@dataclass(frozen=True)
class Kill:
    """A kill and the checkpoints at that moment.

    Args:
        rank: The rank that got SIGKILL.
        wanted: One of ``PHASES``.
        known: The step of the newest complete checkpoint at the kill; 0 without one.
        unfinished: The step of the checkpoint that was being written, if any.
        second: The time of the kill, since the start of the job.
    """

    rank: int
    wanted: str
    known: int
    unfinished: int | None
    second: float

    def __str__(self) -> str:
        unfinished = "" if self.unfinished is None else f", step {self.unfinished} half written"
        return f"{self.second:6.1f} s: rank {self.rank} ({self.wanted}): step {self.known} known{unfinished}"


def train_and_kill(
    out: Path, ranks: int, phases: Sequence[str], options: Sequence[str], seed: int = 0, deadline: float = 3000.0
) -> list[Kill]:
    """Train under torchrun, and kill a rank in each of the phases, one after the other.

    Raises:
        AssertionError: The job failed, did not end in time, or ended before all kills.
    """
    command = [
        *(str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(ranks)),
        *("--max-restarts", str(len(phases)), str(ROOT / "examples" / "train_gpt.py")),
        *("--resume", "auto", "--out", str(out), *options),
    ]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    log = out.with_suffix(".log")
    with log.open("w") as output:
        job = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=output, stderr=output)
    watch = _Watch(job, out, time.monotonic() + deadline)
    try:
        draw = random.Random(seed)
        kills = [watch.kill(attempt, phase, draw) for attempt, phase in enumerate(phases)]
        watch.until(lambda: job.poll() is not None)
        assert job.returncode == 0, "the job failed"
    except AssertionError as error:
        raise AssertionError(f"{error}:\n{log.read_text(errors='replace')[-6000:]}") from None
    finally:
        job.terminate()  # torchrun ends its ranks
        job.wait()
    return kills


class _Watch:
    """Watch a job from outside, and kill its ranks."""

    def __init__(self, job: subprocess.Popen[bytes], out: Path, end: float) -> None:
        self._job, self._out, self._end = job, out, end
        self._started = time.time()

    def kill(self, attempt: int, phase: str, draw: random.Random) -> Kill:
        """Kill a rank of this attempt; the first attempt is 0."""
        ranks = self._until_alive(lambda: self._ranks(attempt))
        since, known = time.time(), self._known()
        if phase == "start":
            wait = draw.uniform(0, _START_SECONDS)
        elif phase == "steps":
            self._until_alive(lambda: self._known() > known)
            wait = draw.uniform(0, _STEPS_SECONDS)
        else:
            self._until_alive(lambda: self._known() > known)
            self._until_alive(lambda: self._unfinished(since) is not None)
            wait = draw.uniform(0, _SAVE_SECONDS)
        time.sleep(wait)
        rank = draw.choice(sorted(ranks))
        assert ranks[rank].is_running(), f"attempt {attempt} ended before its kill"
        ranks[rank].suspend()  # no process changes its files after this
        kill = Kill(rank, phase, self._known(), self._unfinished(since), time.time() - self._started)
        ranks[rank].kill()
        return kill

    def until(self, what: Callable[[], Any]) -> Any:
        """Wait until the result of a function is true; return the result."""
        while not (found := what()):
            assert time.monotonic() < self._end, "the job made no progress in time"
            time.sleep(0.002)
        return found

    def _until_alive(self, what: Callable[[], Any]) -> Any:
        def found() -> Any:
            assert self._job.poll() is None, "the job ended before all kills"
            return what()

        return self.until(found)

    def _ranks(self, attempt: int) -> dict[int, psutil.Process]:
        """Return the processes of an attempt by rank; empty until all have started."""
        ranks: dict[int, psutil.Process] = {}
        size = None
        for process in psutil.Process(self._job.pid).children():
            try:
                variables = process.environ()
            except psutil.Error:  # the process has just ended
                continue
            if variables.get("TORCHELASTIC_RESTART_COUNT") == str(attempt):
                ranks[int(variables["RANK"])] = process
                size = int(variables["WORLD_SIZE"])
        return ranks if len(ranks) == size else {}

    def _known(self) -> int:
        latest = self._out / "latest"
        return _step(latest.read_text()) if latest.exists() else 0

    def _unfinished(self, since: float) -> int | None:
        """Return the step of a checkpoint that is being written."""
        for folder in self._out.glob(f".global_step*{DRAFT}"):
            try:
                written = [path.stat().st_mtime for path in (folder, *folder.rglob("*"))]
            except FileNotFoundError:  # the checkpoint has just been renamed
                continue
            if max(written) > since:
                return _step(folder.name.removeprefix(".").removesuffix(DRAFT))
        return None


def _step(tag: str) -> int:
    return int(tag.removeprefix("global_step"))


def curve(out: Path) -> tuple[list[tuple[int, float]], float]:
    """Return the loss of each step and the validation loss, the part of a record that does not depend on the clock."""
    record = json.loads((out / "history.json").read_text())
    return [(row["step"], row["loss"]) for row in record["history"]], record["validation_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, help="to draw from")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--topology", default="pipe=2,data=-1")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    phases = [draw.choice(arguments.phases) for _ in range(arguments.kills)]
    steps = 12 * (arguments.kills + 1)
    options = [*SHAPE, "--topology", arguments.topology, "--steps", str(steps), "--save-every", "3"]
    with tempfile.TemporaryDirectory() as folder:
        through, killed = Path(folder, "through"), Path(folder, "killed")
        started = time.monotonic()
        train_and_kill(through, arguments.ranks, [], options)
        between = time.monotonic()
        kills = train_and_kill(killed, arguments.ranks, phases, options, arguments.seed)
        ended = time.monotonic()
        print(*kills, sep="\n")
        counts = Counter(kill.wanted for kill in kills)
        print(
            f"{len(kills)} kills ({', '.join(f'{counts[phase]} in {phase}' for phase in PHASES)}), "
            f"{sum(kill.unfinished is not None for kill in kills)} left a checkpoint half written; {steps} steps on "
            f"{arguments.ranks} ranks in {ended - between:.0f} s, without kills {between - started:.0f} s"
        )
        same = curve(through) == curve(killed)
    print("the curve of losses is the same, bit for bit" if same else "the curves of losses DIFFER")
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
