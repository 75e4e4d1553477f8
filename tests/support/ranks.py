"""Run a function on several real processes, with a deadline, and report every rank on failure.

A fork server imports torch and DeepSpeed once (``fork_server``). Each rank is a fork of it that waits for functions to
call (``rank_main``). ``run_ranks`` starts fresh ranks for one function; ``world`` keeps them for the next one.
"""

from __future__ import annotations

import fcntl
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import re
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

from ds_topo.launch.build_locks import remove_abandoned_locks
from tests.support.rank_main import RANK_ENVIRONMENT, Call, Report, Tidy, serve

GRACE_SECONDS = 5.0
"""Time that the other ranks have to report after the first failure."""
OUTPUT_TAIL = 6000
"""The number of characters of a rank's output that an error shows."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.fork_server"])


class RankFailure(AssertionError):
    """Raised when a rank failed, died or missed the deadline; the message reports every rank."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = 120.0,
    timeout: float = 60.0,
    expect_failure: bool = False,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` fresh processes joined by ``torch.distributed``; return the results.

    ``function`` must be importable (module level). ``timeout`` is that of the process group, and ``deadline`` that of
    the whole call, in seconds. With ``expect_failure`` every rank must raise, and the exceptions are returned.
    ``backend`` is ``gloo``, or ``strict`` for the stand-in for NCCL (``strict_backend``).
    """
    __tracebackhide__ = True
    with Ranks(world_size) as ranks:
        return ranks.call(
            function, args, deadline=deadline, timeout=timeout, expect_failure=expect_failure, backend=backend
        )


_PEER_LEFT = re.compile(r"(?s)^(?!.*GroupCreationError).*connectFullMesh failed with .*Connection closed by peer")


class Ranks:
    """The processes of ranks ``0 .. size - 1``, from the first call until :meth:`end` or the end of ``with``."""

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
        backend: str = "gloo",
    ) -> list[Any]:
        """Call ``function(*args)`` on all ranks; see :func:`run_ranks`.

        gloo fails on a rank that still connects to a peer which has already destroyed the world's group, as functions
        of a few milliseconds do. Such a call is repeated once, on fresh ranks. A grid waits for its members itself.
        """
        __tracebackhide__ = True
        for is_repeated in (False, True):
            if is_repeated or not self._is_alive():
                self.end()
                self._start()
            end = time.monotonic() + deadline
            try:
                test = os.environ.get("PYTEST_CURRENT_TEST", "")
                self._send(Call(next(self._calls), pickle.dumps((function, args)), timeout, backend, test))
                reports = self._collect(end, expect_failure)
            finally:
                self._remove_shared_memory()
            if expect_failure or not any(_PEER_LEFT.search(report.account) for report in reports if report):
                break
        self._check(f"{function.__name__} on {self.size} ranks", reports, "error" if expect_failure else "ok")
        return [report.value() for report in reports]

    def tidy(self, function: Callable[..., Any], deadline: float) -> None:
        """Let every rank restore what the last function changed; end the processes if they are worn out.

        Raises:
            RankFailure: The function left something behind that cannot be restored.
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
        os.environ.update(RANK_ENVIRONMENT)  # ranks inherit the environment of the fork server
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
            with suppress(BrokenPipeError):  # the rank died, and will be reported so
                pipe.send_bytes(message)

    def _collect(self, end: float, expect_failure: bool) -> list[Report]:
        """Wait for every rank's report; after the first failure only for the grace period."""
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
        """Ask these ranks for their stacks, which ``serve`` writes when it gets the signal."""
        for rank in late:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.3 if late else 0.0)
        return {rank: self._read(f"stack{rank}") or "no stack" for rank in late}

    def _check(self, what: str, reports: list[Report], wanted: str) -> None:
        """Raise RankFailure unless every rank's report is of the wanted kind."""
        __tracebackhide__ = True
        if all(report.kind == wanted for report in reports):
            return
        accounts: dict[str, list[int]] = defaultdict(list)
        for rank, report in enumerate(reports):
            account = f"{report.kind}{report.account}"
            lines_of_rank = self._read(f"output{rank}").splitlines(keepends=True)
            # some releases of gloo count peers, differently on each rank
            output = "".join(line for line in lines_of_rank if not line.startswith("[Gloo]"))
            if report.kind != wanted and output:
                account += f"\n- output:\n{output[-OUTPUT_TAIL:]}"
            accounts[account].append(rank)
        lines = [f"--- rank {', '.join(map(str, ranks))}: {account}" for account, ranks in accounts.items()]
        raise RankFailure("\n".join([f"{what}, every rank's report:", *lines]))

    def _read(self, name: str) -> str:
        assert self._folder is not None
        file = Path(self._folder.name, name)
        return file.read_text(errors="replace") if file.exists() else ""  # the rank has not started yet

    def _remove_shared_memory(self) -> None:
        """Remove the 66 MiB per rank that DeepSpeed's CPU communication never frees; ranks that use it keep it."""
        for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self._store.port}_*"):
            leftover.unlink(missing_ok=True)


@cache
def _compile_cpu_extension() -> None:
    """Build DeepSpeed's CPU communication extension before the ranks would wait for each other's builds.

    The workers of pytest-xdist build one after the other; the kernel frees the lock of a worker that was killed.
    """
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        with Path(tempfile.gettempdir(), f"ds-topo-extension-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove_abandoned_locks()  # else this would wait without limit for a build that was killed
            ShareMemCommBuilder().load()
