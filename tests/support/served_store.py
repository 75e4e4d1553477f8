"""Stores that end with rank 0, as those of most launchers, or whose server process stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def serve_a_store() -> None:
    """Restart the job with a store that rank 0 serves; another process serves the store of the tests."""
    rank, size = dist.get_rank(), dist.get_world_size()
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [served.port if served else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = served or dist.TCPStore("127.0.0.1", port[0], wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


_SERVE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class ServedStore:
    """A store of another process, which can be stopped."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        assert server.stdout is not None
        self._server, self.port = server, int(server.stdout.readline())

    def client(self, seconds: float) -> dist.TCPStore:
        """Connect to the store."""
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=seconds))

    def stop(self) -> None:
        """Stop the process: it answers no more, and its connections stay open."""
        os.kill(self._server.pid, signal.SIGSTOP)
        while not all(map(_is_stopped, Path(f"/proc/{self._server.pid}/task").iterdir())):
            time.sleep(0.001)  # the signal reaches one thread, which stops the others once it runs


def _is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextmanager
def served_store() -> Iterator[ServedStore]:
    """Serve a store in another process."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _SERVE], stdin=pipe, stdout=pipe, text=True) as server:
        try:
            yield ServedStore(server)
        finally:
            server.kill()


def errors_of(*calls: Callable[[], object], seconds: float) -> list[BaseException | None]:
    """Call functions that may block for ever, each in a thread; return their errors, or fail after so many seconds."""
    results: list[Future[object]] = []
    for call in calls:
        results.append(Future())

        def run(call: Callable[[], object] = call, result: Future[object] = results[-1]) -> None:
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
    until = time.monotonic() + seconds
    return [result.exception(max(0.0, until - time.monotonic())) for result in results]
