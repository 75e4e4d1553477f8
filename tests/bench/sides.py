"""Run several sides alternately in one process set, and print medians, quartiles and ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

Times = dict[str, list[float]]
"""The seconds of every round, by side."""


def alternate(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    before: Callable[[], object],
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Return the slowest rank's seconds in every round after the warm-up; ``before`` is called before each round.

    Every round begins with the next side, so that none always follows the same other one.
    """
    times: Times = {side: [] for side in sides}
    for number in range(warmup + rounds):
        before()
        first = number % len(sides)
        for side, step in [*sides.items()][first:] + [*sides.items()][:first]:
            dist.barrier()
            started = clock()
            step()
            taken = torch.tensor(clock() - started)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times[side].append(float(taken))
    return {side: values[warmup:] for side, values in times.items()}


def turns(
    sides: Mapping[str, tuple[Callable[[], object], Callable[[], object]]], rounds: int, warmup: int, steps: int
) -> tuple[Times, dict[str, float]]:
    """Time steps that leave work to the next step: a side's turn is several of them, without counting the first.

    Args:
        sides: for each side, its step and the end of its turn.
        rounds: the number of turns of each side, after the warm-up.
        warmup: the number of warm-up turns.
        steps: the number of steps in a turn.

    Returns:
        The slowest rank's seconds per step, and the MB that this rank's host sends per step.
    """
    times: Times = {side: [] for side in sides}
    sent: dict[str, float] = {}
    for _ in range(warmup + rounds):
        for side, (step, end) in sides.items():
            dist.barrier()
            before = bytes_sent()
            step()
            started = time.perf_counter()
            for _ in range(steps - 1):
                step()
            taken = torch.tensor((time.perf_counter() - started) / (steps - 1))
            end()
            sent[side] = (bytes_sent() - before) / steps / 1e6
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times[side].append(float(taken))
    return {side: values[warmup:] for side, values in times.items()}, sent


def bytes_sent() -> int:
    """Return the bytes sent by this host's interfaces, without the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): int(numbers.split()[8]) for name, _, numbers in (line.partition(":") for line in lines)}
    return sum(count for name, count in counts.items() if name != "lo")


def medians(times: Times) -> dict[str, float]:
    """Return the medians in milliseconds, by side."""
    return {side: 1e3 * statistics.median(values) for side, values in times.items()}


def table(times: Times) -> str:
    """Return a line of text for every side."""
    lines = []
    width = max(28, *map(len, times))
    for side, values in times.items():
        low, middle, high = (1e3 * quartile for quartile in statistics.quantiles(values, n=4))
        lines.append(f"{side:{width}} {middle:8.1f} ms  (quartiles {low:.1f} to {high:.1f})")
    return "\n".join(lines)


def ratios(times: Times, pairs: Sequence[tuple[str, str]]) -> str:
    """Return the first side's time divided by the second's, for every pair."""
    middle = medians(times)
    return ", ".join(f"{first} / {second} {middle[first] / middle[second]:.2f}" for first, second in pairs)
