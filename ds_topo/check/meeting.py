"""What the ranks of a check tell each other through the job's store: before any group exists, and after one broke.

In every step each rank posts a report and rank 0 answers all of them, so that no rank goes on alone, and a rank that
fails, hangs or dies is named instead of waited for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed's, where mypy sees it

from ds_topo.check.faults import Fault
from ds_topo.errors import LaunchError
from ds_topo.placement.summary import fold_numbers

T = TypeVar("T")
_PATIENCE = 2.0
"""Rank 0 waits this many times the timeout for reports: the others may be in a collective that times out first."""


class StepFailure(RuntimeError):
    """The check cannot go on; rank 0 knows why."""


@dataclass
class Meeting:
    """The store, as all ranks of a check use it, step by step in one order.

    Args:
        store: of the job.
        rank: this one.
        world_size: all of them.
        timeout: of one step.
    """

    store: Store
    rank: int
    world_size: int
    timeout: timedelta
    hosts: Mapping[int, str] = field(default_factory=dict)
    """The host of every rank, on rank 0, as soon as it is known."""

    def step(
        self,
        name: str,
        work: Callable[[], Any],
        judge: Callable[[dict[int, Any]], tuple[list[Fault], T]],
        budget: timedelta = timedelta(),
    ) -> T:
        """Do ``work`` on every rank; rank 0 judges all reports; return what it answers, the same on all ranks.

        Args:
            name: of the step, different from all others.
            work: what this rank does; its result goes to rank 0 as JSON, and so does its exception.
            judge: called on rank 0 with every rank's result; faults that end the check, and the answer, as JSON.
            budget: how much longer than the timeout the work may take.

        Raises:
            StepFailure: a rank failed or did not answer, or ``judge`` found faults; rank 0's has them all.
            LaunchError: rank 0 does not answer.
        """
        try:
            report: dict[str, Any] = {"result": work()}
        except Exception as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        self._set(f"{name}/{self.rank}", report)
        if self.rank == 0:
            faults, answer = self._judged(name, judge, self.timeout * _PATIENCE + budget)
            self._set(f"{name}/answer", {"ends": bool(faults), "answer": answer})
            if faults:
                raise StepFailures(faults)
            return answer  # type: ignore[return-value]
        reply = self._get(f"{name}/answer", self.timeout * (_PATIENCE + 1) + budget)
        if reply["ends"]:
            raise StepFailure(f"rank 0 ended the check in step {name!r}")
        return reply["answer"]  # type: ignore[no-any-return]

    def _judged(
        self, name: str, judge: Callable[[dict[int, Any]], tuple[list[Fault], T]], patience: timedelta
    ) -> tuple[list[Fault], T | None]:
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        missing: list[int] = []
        try:
            self.store.wait(keys, patience)
        except (dist.DistError, RuntimeError):
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        reports = {rank: json.loads(self.store.get(key)) for rank, key in enumerate(keys) if rank not in set(missing)}
        failed = {rank: report["error"] for rank, report in reports.items() if "error" in report}
        if failed or missing:
            return self._failures(name, failed, missing), None
        return judge({rank: report["result"] for rank, report in reports.items()})

    def _failures(self, name: str, failed: Mapping[int, str], missing: list[int]) -> list[Fault]:
        faults = []
        if missing:
            hosts = tuple(dict.fromkeys(self.hosts.get(rank, "?") for rank in missing))
            text = f"{name}: ranks {fold_numbers(missing)} on {', '.join(hosts[:8])} did not answer: they ended or hang"
            faults.append(Fault("missing", text, hosts, tuple(missing)))
        alike: dict[str, list[int]] = {}
        for rank, error in failed.items():
            alike.setdefault(error.splitlines()[0][:400], []).append(rank)
        for error, ranks in list(alike.items())[:8]:
            hosts = tuple(dict.fromkeys(self.hosts.get(rank, "?") for rank in ranks))
            text = f"{name}: ranks {fold_numbers(ranks)} on {', '.join(hosts[:8])} failed: {error}"
            faults.append(Fault("failure", text, hosts, tuple(ranks)))
        return faults

    # -- the store ---------------------------------------------------------------------------------------------------

    def _set(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def _get(self, key: str, timeout: timedelta) -> Any:
        try:
            self.store.wait([key], timeout)
            return json.loads(self.store.get(key))
        except (dist.DistError, RuntimeError) as error:
            raise LaunchError(f"rank 0 no longer answers ({str(error).splitlines()[0]}): see its own output") from error

    def count_in(self, name: str) -> None:
        """Say that this rank has come to ``name``."""
        self.store.add(name, 1)

    def wait_for_count(self, name: str, count: int) -> None:
        """Wait until ``count`` ranks have come to ``name``.

        Raises:
            TimeoutError: they did not.
        """
        end = time.monotonic() + self.timeout.total_seconds()
        while self.store.add(name, 0) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.store.add(name, 0)} of {count} ranks came to {name}")
            time.sleep(0.005)


class StepFailures(StepFailure):
    """Rank 0's account: the faults that ended the check."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults
