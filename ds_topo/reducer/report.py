"""What a gradient reducer measured: bytes and times of every bucket, as a table and as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypedDict


@dataclass(slots=True)
class BucketTiming:
    """One reduction of one bucket; times in nanoseconds of ``time.perf_counter_ns``."""

    index: int
    nbytes: int
    parameters: int
    label: str
    """How it was reduced: the process group, and the way."""
    launched_ns: int
    done_ns: int = 0
    """When communication ended (CPU tensors), or when the wait for it returned (elsewhere)."""
    wait_started_ns: int = 0
    wait_ended_ns: int = 0


@dataclass(slots=True)
class StepTiming:
    """One step: gradients arrive from ``started_ns`` on, ``finish()`` runs from ``finish_ns`` to ``ended_ns``."""

    step: int
    started_ns: int
    finish_ns: int = 0
    ended_ns: int = 0
    buckets: list[BucketTiming] = field(default_factory=list)
    gathers: list[BucketTiming] = field(default_factory=list)
    """How parameters came from their owners before this step's gradients (ZeRO 1 and 2)."""

    @property
    def communication_ns(self) -> int:
        """How long at least one bucket was in flight."""
        return sum(end - start for start, end in _union(self.buckets))

    @property
    def exposed_ns(self) -> int:
        """The part of it that ``finish()`` had to wait for."""
        return sum(max(0, end - max(start, self.finish_ns)) for start, end in _union(self.buckets))


class BucketRow(TypedDict):
    """One bucket of a report; times are medians over steps, in milliseconds."""

    bucket: int
    nbytes: int
    parameters: int
    launched_ms: float
    under_way_ms: float
    waited_ms: float
    label: str


@dataclass(frozen=True)
class GradientReport:
    """The last steps of a :class:`~ds_topo.GradientReducer`, on this rank.

    >>> timing = BucketTiming(0, 4 << 20, 12, "data", launched_ns=0, done_ns=8_000_000, wait_started_ns=6_000_000,
    ...                       wait_ended_ns=8_000_000)
    >>> report = GradientReport(0, (StepTiming(0, 0, 6_000_000, 8_000_000, [timing]),))
    >>> print(report)
    bucket    MiB  params  launched ms  under way ms  waited ms  reduced over
         0   4.00      12         0.00          8.00       2.00  data
    1 buckets, 4.00 MiB a step; 75% of 8.00 ms of communication hidden (medians of 1 steps)
    """

    rank: int
    steps: tuple[StepTiming, ...]

    @property
    def hidden_fraction(self) -> float:
        """The share of communication that ran beside backward, 0 to 1; the median over steps, 1.0 without any."""
        shares = [1 - step.exposed_ns / step.communication_ns for step in self.steps if step.communication_ns]
        return median(shares) if shares else 1.0

    def rows(self) -> list[BucketRow]:
        """One row per bucket, medians over the steps with the latest set of buckets; times in milliseconds."""
        if not self.steps:
            return []
        layout = _layout(self.steps[-1])
        alike = [step for step in self.steps if _layout(step) == layout]
        rows: list[BucketRow] = []
        for place, bucket in enumerate(self.steps[-1].buckets):
            timings = [(step.started_ns, step.buckets[place]) for step in alike]
            rows.append(
                {
                    "bucket": bucket.index,
                    "nbytes": bucket.nbytes,
                    "parameters": bucket.parameters,
                    "launched_ms": _milliseconds([timing.launched_ns - start for start, timing in timings]),
                    "under_way_ms": _milliseconds([timing.done_ns - timing.launched_ns for _, timing in timings]),
                    "waited_ms": _milliseconds(
                        [timing.wait_ended_ns - timing.wait_started_ns for _, timing in timings]
                    ),
                    "label": bucket.label,
                }
            )
        return rows

    def table(self) -> str:
        """The rows and a summary as text."""
        lines = ["bucket    MiB  params  launched ms  under way ms  waited ms  reduced over"]
        rows = self.rows()
        lines += [
            f"{row['bucket']:6d} {row['nbytes'] / 2**20:6.2f}  {row['parameters']:6d}  {row['launched_ms']:11.2f}  "
            f"{row['under_way_ms']:12.2f}  {row['waited_ms']:9.2f}  {row['label']}"
            for row in rows
        ]
        communication = _milliseconds([step.communication_ns for step in self.steps]) if self.steps else 0.0
        size = sum(row["nbytes"] for row in rows) / 2**20
        lines.append(
            f"{len(rows)} buckets, {size:.2f} MiB a step; {self.hidden_fraction:.0%} of {communication:.2f} ms of "
            f"communication hidden (medians of {len(self.steps)} steps)"
        )
        return "\n".join(lines + self._gathers())

    def _gathers(self) -> list[str]:
        """A line about parameters from their owners, if there are any."""
        steps = [step.gathers for step in self.steps if step.gathers]
        if not steps:
            return []
        size = sum(timing.nbytes for timing in steps[-1]) / 2**20
        under_way = _milliseconds([sum(end - start for start, end in _union(gathers)) for gathers in steps])
        waits = [sum(each.wait_ended_ns - each.wait_started_ns for each in gathers) for gathers in steps]
        first = f"{len(steps[-1])} regions of parameters, {size:.2f} MiB a step"
        return [f"{first}; under way for {under_way:.2f} ms, waited for {_milliseconds(waits):.2f} ms"]

    def chrome_trace(self) -> dict[str, Any]:
        """The timeline as a Chrome trace, which https://ui.perfetto.dev opens; one process per rank."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}},
            _thread_name(self.rank, 0, "backward and finish()"),
        ]
        tracks: list[int] = []
        for step in self.steps:
            events.append(_span(self.rank, 0, f"step {step.step}: backward", step.started_ns, step.finish_ns))
            events.append(_span(self.rank, 0, f"step {step.step}: finish()", step.finish_ns, step.ended_ns))
            for bucket in step.gathers + step.buckets:
                track = next((track for track, end in enumerate(tracks) if end <= bucket.launched_ns), len(tracks))
                tracks[track : track + 1] = [bucket.done_ns]
                details = {"bytes": bucket.nbytes, "parameters": bucket.parameters, "over": bucket.label}
                name = f"{'region' if bucket in step.gathers else 'bucket'} {bucket.index}"
                events.append(_span(self.rank, track + 1, name, bucket.launched_ns, bucket.done_ns, details))
        events += [_thread_name(self.rank, track + 1, f"communication {track}") for track in range(len(tracks))]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | Path) -> None:
        """Write ``chrome_trace()`` as JSON."""
        Path(path).write_text(json.dumps(self.chrome_trace()), encoding="utf-8")

    def __str__(self) -> str:
        return self.table()


def _union(buckets: Sequence[BucketTiming]) -> list[tuple[int, int]]:
    """The times at which at least one bucket was in flight, as disjoint intervals."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((bucket.launched_ns, bucket.done_ns) for bucket in buckets):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _layout(step: StepTiming) -> list[tuple[int, int]]:
    return [(bucket.nbytes, bucket.parameters) for bucket in step.buckets]


def _milliseconds(nanoseconds: Sequence[int]) -> float:
    return median(nanoseconds) / 1e6


def _thread_name(rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}


def _span(
    rank: int, thread: int, name: str, start_ns: int, end_ns: int, details: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A complete event; Chrome traces count in microseconds."""
    return {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": thread,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": details or {},
    }
