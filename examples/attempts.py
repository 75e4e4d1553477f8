"""Record what each attempt of a job did, and report what its restarts have cost.

The record is in the folder of checkpoints: a line of JSON when an attempt has loaded, and one for each of its steps.
Rank 0 appends them, so that they are there whichever process or host is lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ATTEMPTS = "attempts.jsonl"


class Attempt:
    """The record of this attempt; rank 0 writes it.

    Args:
        folder: the folder of the job's checkpoints.
        joined: the time at which this attempt had its grid.
        step: the steps of the checkpoint that it has loaded.
        what: what it trains on, such as ``"data=2 on 2 ranks"``.
        continues: whether it belongs to a job that has begun before; otherwise the record begins anew.
        writes: True on rank 0.
    """

    def __init__(
        self, folder: Path, *, joined: float, step: int, what: str, continues: bool = True, writes: bool = True
    ) -> None:
        self._path = folder / ATTEMPTS if writes else None
        if self._path is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if not continues:
            self._path.unlink(missing_ok=True)
        born = psutil.Process().create_time()
        self._write(born=born, joined=joined, loaded=time.time(), step=step, what=what)

    def add_step(self, step: int, loss: float) -> None:
        """Note that a step has ended."""
        self._write(time=time.time(), step=step, loss=loss)

    def end(self) -> None:
        """Note that the job has ended by itself, so that a later one with more steps is no restart."""
        self._write(ended=time.time())

    def _write(self, **entry: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as lines:
                lines.write("\n" + json.dumps(entry))  # a line break first: an earlier writer may have left half a line


def read_attempts(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the entries of each attempt: first that of its start, then those of its steps."""
    attempts: list[list[dict[str, Any]]] = []
    for entry in _entries(folder / ATTEMPTS):
        if "born" in entry:
            attempts.append([])
        if attempts:
            attempts[-1].append(entry)
    return attempts


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # an empty line, or its writer was killed within it
            yield json.loads(line)


def _time_of(entry: dict[str, Any]) -> float:
    """Return the time of an entry, of whichever kind it is."""
    return float(next(entry[name] for name in ("time", "ended", "loaded") if name in entry))


PHASES = ("until new processes", "to join", "to build and load", "in repeated steps")
"""The phases of a restart: its seconds from the last step before it, and those of steps that had been done."""


def cost_of_restarts(attempts: list[list[dict[str, Any]]]) -> tuple[list[list[float]], int]:
    """Return the seconds of each restart by phase, and the number of steps that were repeated.

    A new start after the end of the job is no restart.
    """
    costs: list[list[float]] = []
    repeated = furthest = 0
    for number, (start, *steps) in enumerate(attempts):
        before = attempts[number - 1][-1] if number else {"ended": 0.0}
        cost = [
            start["born"] - _time_of(before),
            start["joined"] - start["born"],
            start["loaded"] - start["joined"],
            0.0,
        ]
        now, furthest = start["loaded"], max(furthest, start["step"])
        for entry in steps:
            if entry.get("step", furthest + 1) <= furthest:
                repeated += 1
                cost[3] += entry["time"] - now
            now, furthest = entry.get("time", now), max(furthest, entry.get("step", 0))
        if "ended" not in before:
            costs.append(cost)
    return costs, repeated


def describe_restarts(folder: Path) -> str:
    """Say in a sentence what the restarts of a job have cost; empty if there were none."""
    attempts = read_attempts(folder)
    costs, repeated = cost_of_restarts(attempts)
    if not costs:
        return ""
    steps = sum("loss" in entry for entries in attempts for entry in entries)
    whole = _time_of(attempts[-1][-1]) - attempts[0][0]["born"]
    lost = sum(map(sum, costs))
    phases = ", ".join(f"{sum(cost[index] for cost in costs):.0f} s {name}" for index, name in enumerate(PHASES))
    number = "1 restart" if len(costs) == 1 else f"{len(costs)} restarts"
    share = f"{lost:.0f} of {whole:.0f} s lost ({lost / whole:.0%})"
    return f"{number}, {repeated} of {steps} steps repeated, {share}: {phases}"


def draw_attempts(axes: Any, folder: Path) -> None:
    """Draw the loss over time, an attempt after the other; the time that restarts have cost is grey."""
    attempts = read_attempts(folder)
    begin, furthest, lost_from = attempts[0][0]["born"], 0, None
    for _, *entries in attempts:
        steps = [entry for entry in entries if "loss" in entry]
        minutes = [(_time_of(entry) - begin) / 60 for entry in steps]
        axes.plot(minutes, [entry["loss"] for entry in steps], color="tab:blue", linewidth=1)
        for minute, entry in zip(minutes, steps, strict=True):
            if entry["step"] > furthest:
                if lost_from is not None:
                    axes.axvspan(lost_from, minute, color="0.85", linewidth=0)
                furthest, lost_from = entry["step"], None
        if lost_from is None and minutes:
            lost_from = None if "ended" in entries[-1] else minutes[-1]
    axes.set(xlabel="minutes", ylabel="nats per byte", title=f"{len(cost_of_restarts(attempts)[0])} restarts in grey")
    axes.grid(alpha=0.3)
