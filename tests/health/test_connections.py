"""A verdict ends blocked collectives of gloo at once, in every group, and no other connection of the process."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from logging.handlers import SocketHandler

import pytest
import torch
import torch.distributed as dist

from ds_topo import PipelineParallelGrid
from ds_topo.base.torch_names import gloo_threads
from ds_topo.health import Watch
from ds_topo.health.activity import GRACE
from tests.support.world import Worlds, names_threads

WAITING = {0: "world", 1: "grid", 2: "new_group"}
"""The group in which each rank waits for rank 3."""


class Server:
    """A server of logs that keeps what it receives."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._parts: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        with connection:
            while part := connection.recv(1 << 16):
                self._parts.append(part)

    def received(self, texts: set[bytes], seconds: float = 10) -> set[bytes]:
        """Wait for these texts; return those that came."""
        until = time.monotonic() + seconds
        while True:
            everything = b"".join(self._parts)
            found = {text for text in texts if text in everything}
            if found == texts or time.monotonic() > until:
                return found
            time.sleep(0.05)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


class OneConnection(SocketHandler):
    """A handler that does not connect again."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port)
        self.createSocket()
        self.createSocket = lambda: None  # type: ignore[method-assign]


def _log(handler: SocketHandler, text: str) -> None:
    handler.emit(logging.LogRecord("test", logging.INFO, __file__, 1, f"{text} of rank {dist.get_rank()}", (), None))


def _is_blocked(port: int, is_lazy: bool) -> float | None:
    """Return the seconds from the verdict to the error of a collective."""
    if is_lazy:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    before = OneConnection(port)
    watch = Watch(limit=20.0)
    grid = PipelineParallelGrid("data=2,model=2")  # data groups [0, 2] and [1, 3]
    plain = dist.new_group([2, 3])
    after = OneConnection(port)
    groups = {"world": dist.group.WORLD, "grid": grid.get_data_parallel_group(), "new_group": plain}
    dist.barrier()
    rank, ended = dist.get_rank(), None
    dist.all_reduce(torch.ones(1), group=groups["grid"])  # with TORCH_GLOO_LAZY_INIT gloo connects now
    if rank in (2, 3):
        dist.all_reduce(torch.ones(1), group=plain)
    if rank == 3:
        with pytest.raises(ValueError, match="sample"), watch:
            raise ValueError("a sample that cannot be read")
    else:
        found: list[float] = []

        def await_verdict() -> None:
            while watch.verdict is None:
                time.sleep(0.02)
            found.append(time.monotonic())

        waiting = threading.Thread(target=await_verdict)
        waiting.start()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=groups[WAITING[rank]])
        ended = time.monotonic()
        waiting.join()
        time.sleep(1)  # connections are shut down as long as anything waits
        ended -= found[0]
    for name, handler in (("before", before), ("after", after)):
        _log(handler, name)
        handler.close()
    watch.stop()
    grid.destroy()
    return ended


@pytest.mark.sampled(2)
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="connections are found on Linux only")
@names_threads
@pytest.mark.parametrize("is_lazy", [False, True], ids=["connected", "lazy"])
def test_a_verdict_ends_collectives_of_every_group_and_spares_loggers(
    world: Worlds, server: Server, is_lazy: bool
) -> None:
    seconds = world(4).run(_is_blocked, server.port, is_lazy)
    for rank, group in WAITING.items():
        assert 0 <= seconds[rank] < GRACE / 2, f"{group}: {seconds}"
    texts = {f"{name} of rank {rank}".encode() for name in ("before", "after") for rank in range(4)}
    assert server.received(texts) == texts
    assert seconds[3] is None


def _count_threads() -> int:
    dist.barrier()
    return len(list(gloo_threads()))


@names_threads
def test_gloos_threads_are_found_by_name(world: Worlds) -> None:
    assert min(world(2).run(_count_threads)) >= 1
