"""Run a function on several real processes, with a deadline and every rank's own account on failure.

A fork server imports torch and DeepSpeed once (``fork_server``); each rank is a fork of it, which waits for functions
to call (``rank_main``). ``run_ranks`` starts fresh ranks for one function; ``world`` keeps them for the next one.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ds_topo.launch.extension_locks import remove_abandoned_locks
from tests.support.rank_main import RANK_ENVIRONMENT, Call, Report, Tidy, serve

GRACE_SECONDS = 5.0
"""How long the other ranks may still report after the first one failed."""
OUTPUT_TAIL = 6000
"""Characters of a rank's output that an error shows."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.fork_server"])


class RankFailure(AssertionError):
    """At least one rank failed, died or missed the deadline; the message holds every rank's own account."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = 120.0,
    timeout: float = 60.0,
    expect_failure: bool = False,
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` fresh processes joined by ``torch.distributed``; return the results.

    ``function`` must be importable (module level). ``timeout`` seconds is the process group's own limit, ``deadline``
    the limit for the whole call. With ``expect_failure`` every rank must raise, and the exceptions are returned.
    """
    __tracebackhide__ = True
    with Ranks(world_size) as ranks:
        return ranks.call(function, args, deadline=deadline, timeout=timeout, expect_failure=expect_failure)


class Ranks:
    """The processes ``0 .. size - 1``, from the first call until :meth:`end`, or the end of a ``with`` statement."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._calls = itertools.count()
        self._store: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        deadline: float,
        timeout: float,
        expect_failure: bool = False,
    ) -> list[Any]:
        """Call ``function(*args)`` on all ranks; see :func:`run_ranks`."""
        __tracebackhide__ = True
        if not self._is_alive():
            self.end()
            self._start()
        end = time.monotonic() + deadline
        try:
            self._send(Call(next(self._calls), pickle.dumps((function, args)), timeout))
            reports = self._collect(end, expect_failure)
        finally:
            self._remove_shared_memory()
        self._check(f"{function.__name__} on {self.size} ranks", reports, "error" if expect_failure else "ok")
        return [report.value() for report in reports]

    def tidy(self, function: Callable[..., Any], deadline: float) -> None:
        """Let every rank put back what this function, the last one, changed; end ranks that are worn out.

        Raises:
            RankFailure: a function left something behind that nobody can put back.
        """
        __tracebackhide__ = True
        self._send(Tidy())
        reports = self._collect(time.monotonic() + deadline, expect_failure=False)
        self._check(f"{function.__name__} returned on {self.size} ranks", reports, "ok")
        if any(report.value() for report in reports):
            self.end()

    def end(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._remove_shared_memory()
        self._processes, self._pipes, self._store, self._folder = [], [], None, None

    def _is_alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def _start(self) -> None:
        os.environ.update(RANK_ENVIRONMENT)  # the fork server hands its environment down
        _compile_cpu_extension()
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, self.size, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=serve, args=(rank, self.size, self._store.port, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _send(self, order: Call | Tidy) -> None:
        message = pickle.dumps(order)
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a rank that died: its report will say so
                pipe.send_bytes(message)

    def _collect(self, end: float, expect_failure: bool) -> list[Report]:
        """Every rank's report; after a failure the others have only the grace left."""
        reports: dict[int, Report] = {}
        while len(reports) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in reports}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                report = self._report_of(waiting[pipe])
                reports[waiting[pipe]] = report
                if report.kind != "ok" and not expect_failure:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        stacks = self._stacks_of([rank for rank in range(self.size) if rank not in reports])
        late = {rank: Report("missed the deadline", account=f"\n{stack}") for rank, stack in stacks.items()}
        return [{**reports, **late}[rank] for rank in range(self.size)]

    def _report_of(self, rank: int) -> Report:
        try:
            report: Report = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(GRACE_SECONDS)
            return Report("died", account=f": exit code {self._processes[rank].exitcode}")
        return report

    def _stacks_of(self, late: list[int]) -> dict[int, str]:
        """Where these ranks are, which ``serve`` shows when it gets the signal."""
        for rank in late:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.3 if late else 0.0)
        return {rank: self._read(f"stack{rank}") or "no stack" for rank in late}

    def _check(self, what: str, reports: list[Report], wanted: str) -> None:
        """Raise unless every rank's report is of the wanted kind."""
        __tracebackhide__ = True
        if all(report.kind == wanted for report in reports):
            return
        accounts: dict[str, list[int]] = defaultdict(list)
        for rank, report in enumerate(reports):
            account = f"{report.kind}{report.account}"
            lines_of_rank = self._read(f"output{rank}").splitlines(keepends=True)
            output = "".join(
                line for line in lines_of_rank if not line.startswith("[Gloo]")
            )  # some releases count peers
            if report.kind != wanted and output:
                account += f"\n- output:\n{output[-OUTPUT_TAIL:]}"
            accounts[account].append(rank)
        lines = [f"--- rank {', '.join(map(str, ranks))}: {account}" for account, ranks in accounts.items()]
        raise RankFailure("\n".join([f"{what}, every rank's account:", *lines]))

    def _read(self, name: str) -> str:
        assert self._folder is not None
        file = Path(self._folder.name, name)
        return file.read_text(errors="replace") if file.exists() else ""  # a rank that has not started yet

    def _remove_shared_memory(self) -> None:
        """66 MiB a rank, which DeepSpeed's CPU communication never gives back; ranks that have it open keep it."""
        for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self._store.port}_*"):
            leftover.unlink(missing_ok=True)


@cache
def _compile_cpu_extension() -> None:
    """Build DeepSpeed's CPU communication extension once, before several ranks would wait for each other's lock."""
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        remove_abandoned_locks()  # else this would wait without limit for a build that was killed
        ShareMemCommBuilder().load()
