"""Run several sides alternately in one process set, and print medians, quartiles and ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

Times = dict[str, list[float]]
"""Seconds of every round, by side."""


def alternate(
    sides: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object], warmup: int
) -> Times:
    """Seconds of the slowest rank in every round after ``warmup`` ones; ``before`` is called before each round."""
    times: Times = {side: [] for side in sides}
    for _ in range(warmup + rounds):
        before()
        for side, step in sides.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            taken = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times[side].append(float(taken))
    return {side: values[warmup:] for side, values in times.items()}


def turns(
    sides: Mapping[str, tuple[Callable[[], object], Callable[[], object]]], rounds: int, warmup: int, steps: int
) -> tuple[Times, dict[str, float]]:
    """Of steps that hand work on to the next one: a side's turn is several of them, of which the first is not counted.

    Args:
        sides: the step of each, and what ends its turn.
        rounds: turns of each side, after ``warmup`` ones.
        warmup: so many.
        steps: of a turn.

    Returns:
        Seconds a step of the slowest rank, and MB that this rank's host sends in a step.
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
    """By this host's interfaces, loopback aside."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): int(numbers.split()[8]) for name, _, numbers in (line.partition(":") for line in lines)}
    return sum(count for name, count in counts.items() if name != "lo")


def medians(times: Times) -> dict[str, float]:
    """Milliseconds by side."""
    return {side: 1e3 * statistics.median(values) for side, values in times.items()}


def table(times: Times) -> str:
    """A line for every side."""
    lines = []
    width = max(28, *map(len, times))
    for side, values in times.items():
        low, middle, high = (1e3 * quartile for quartile in statistics.quantiles(values, n=4))
        lines.append(f"{side:{width}} {middle:8.1f} ms  (quartiles {low:.1f} to {high:.1f})")
    return "\n".join(lines)


def ratios(times: Times, pairs: Sequence[tuple[str, str]]) -> str:
    """The first side's time over the second's, for every pair."""
    middle = medians(times)
    return ", ".join(f"{first} / {second} {middle[first] / middle[second]:.2f}" for first, second in pairs)
