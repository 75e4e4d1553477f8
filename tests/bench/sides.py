"""Run several sides alternately in one process set, and print medians, quartiles and ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

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


def medians(times: Times) -> dict[str, float]:
    """Milliseconds by side."""
    return {side: 1e3 * statistics.median(values) for side, values in times.items()}


def table(times: Times) -> str:
    """A line for every side."""
    lines = []
    for side, values in times.items():
        low, middle, high = (1e3 * quartile for quartile in statistics.quantiles(values, n=4))
        lines.append(f"{side:28} {middle:8.1f} ms  (quartiles {low:.1f} to {high:.1f})")
    return "\n".join(lines)


def ratios(times: Times, pairs: Sequence[tuple[str, str]]) -> str:
    """The first side's time over the second's, for every pair."""
    middle = medians(times)
    return ", ".join(f"{first} / {second} {middle[first] / middle[second]:.2f}" for first, second in pairs)
