"""Report the measurements of a reducer: bytes and times of every bucket, as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from ds_topo.reduction.buckets import StepTiming, union


@dataclass(frozen=True)
class GradientReport:
    """The last steps of a :class:`~ds_topo.GradientReducer` on one rank.

    >>> from ds_topo.reduction.buckets import BucketTiming
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
        """The share of communication hidden by backward, 0 to 1; the median over steps, 1.0 without communication."""
        shares = [1 - step.exposed_ns / step.communication_ns for step in self.steps if step.communication_ns]
        return median(shares) if shares else 1.0

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per bucket: medians over the steps with the latest set of buckets, times in milliseconds."""
        if not self.steps:
            return []
        alike = [step for step in self.steps if _layout(step) == _layout(self.steps[-1])]
        rows = []
        for place, bucket in enumerate(self.steps[-1].buckets):
            timings = [step.buckets[place] for step in alike]
            rows.append(
                {
                    "bucket": bucket.index,
                    "nbytes": bucket.nbytes,
                    "parameters": bucket.parameters,
                    "launched_ms": _milliseconds(step.buckets[place].launched_ns - step.started_ns for step in alike),
                    "under_way_ms": _milliseconds(timing.done_ns - timing.launched_ns for timing in timings),
                    "waited_ms": _milliseconds(timing.waited_ns for timing in timings),
                    "label": bucket.label,
                }
            )
        return rows

    def table(self) -> str:
        """Return the rows and a summary as text."""
        rows = self.rows()
        lines = ["bucket    MiB  params  launched ms  under way ms  waited ms  reduced over"]
        lines += [
            f"{row['bucket']:6d} {row['nbytes'] / 2**20:6.2f}  {row['parameters']:6d}  {row['launched_ms']:11.2f}  "
            f"{row['under_way_ms']:12.2f}  {row['waited_ms']:9.2f}  {row['label']}"
            for row in rows
        ]
        communication = _milliseconds(step.communication_ns for step in self.steps) if self.steps else 0.0
        size = sum(row["nbytes"] for row in rows) / 2**20
        lines.append(
            f"{len(rows)} buckets, {size:.2f} MiB a step; {self.hidden_fraction:.0%} of {communication:.2f} ms of "
            f"communication hidden (medians of {len(self.steps)} steps)"
        )
        gathers = [step.gathers for step in self.steps if step.gathers]
        if gathers:
            size = sum(timing.nbytes for timing in gathers[-1]) / 2**20
            under_way = _milliseconds(sum(end - start for start, end in union(regions)) for regions in gathers)
            waited = _milliseconds(sum(timing.waited_ns for timing in regions) for regions in gathers)
            lines.append(
                f"{len(gathers[-1])} regions of parameters, {size:.2f} MiB a step; under way for {under_way:.2f} ms, "
                f"waited for {waited:.2f} ms"
            )
        return "\n".join(lines)

    __str__ = table


def _layout(step: StepTiming) -> list[tuple[int, int]]:
    return [(bucket.nbytes, bucket.parameters) for bucket in step.buckets]


def _milliseconds(nanoseconds: Iterable[int]) -> float:
    return median(nanoseconds) / 1e6
