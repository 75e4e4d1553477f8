"""Run a function on several real processes, with a deadline and every rank's traceback on failure.

A fork server imports torch and DeepSpeed once; each rank is a fork of it, so that a test of four ranks starts in
well under a second.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
GRACE_SECONDS = 5.0
"""How long the other ranks may still report after the first one failed."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("torch.distributed", "deepspeed", "deepspeed.pipe", "tests.support.ranks"),
        # what every DeepSpeed engine imports when it is built: a second or two for each rank
        *("torch.utils.cpp_extension", "deepspeed.runtime.zero.muon.original_muon"),
    ]
)


class RankFailure(AssertionError):
    """At least one rank failed, died or missed the deadline; the message holds every rank's own account."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = 120.0,
    timeout: float = 60.0,
    backend: str = "gloo",
    expect_failure: bool = False,
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` processes joined by ``torch.distributed``; return each rank's result.

    ``function`` must be importable (module level). ``timeout`` seconds is the process group's own limit, ``deadline``
    the limit for the whole call. With ``expect_failure`` every rank must raise, and the exceptions are returned.
    """
    os.environ.update(RANK_ENVIRONMENT)
    _compile_cpu_extension()
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main,
                args=(function, args, rank, world_size, store.port, backend, timeout, folder, sender),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        reports = _collect(processes, pipes, time.monotonic() + deadline, Path(folder), expect_failure)
    for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{store.port}_*"):
        leftover.unlink(missing_ok=True)  # 66 MiB a rank, which DeepSpeed's CPU communication never gives back
    wanted = "error" if expect_failure else "ok"
    if any(kind != wanted for kind, _ in reports):
        accounts = "\n".join(f"--- rank {rank}: {kind}\n{value}" for rank, (kind, value) in enumerate(reports))
        raise RankFailure(f"{function.__name__} on {world_size} ranks, every rank's account:\n{accounts}")
    return [value for _, value in reports]


def _rank_main(
    function: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    world_size: int,
    port: int,
    backend: str,
    timeout: float,
    folder: str,
    sender: Connection,
) -> None:
    with open(Path(folder, f"stack{rank}"), "w") as stack, open(Path(folder, f"output{rank}"), "w") as output:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os.environ.update(RANK_ENVIRONMENT)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        try:
            store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timedelta(seconds=timeout))
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
            result = function(*args)
            sender.send_bytes(pickle.dumps(("ok", result)))  # send() would share tensors instead of copying them
        except BaseException as error:
            try:
                sender.send_bytes(pickle.dumps(("error", error)))
            except Exception:  # an exception that cannot be pickled still has a traceback
                sender.send_bytes(pickle.dumps(("error", RuntimeError(repr(error)))))
            traceback.print_exc(file=sys.__stderr__)
        finally:
            sender.close()
            output.flush()
    # Leave without running destructors: a failed peer must not make this rank wait for it.
    os._exit(0)


def _collect(
    processes: list[BaseProcess], pipes: list[Connection], end: float, folder: Path, expect_failure: bool
) -> list[tuple[str, Any]]:
    reports: dict[int, tuple[str, Any]] = {}
    while len(reports) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in reports]
        ready = wait(open_pipes, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                reports[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(GRACE_SECONDS)
                reports[rank] = ("died", f"exit code {processes[rank].exitcode}")
            if reports[rank][0] != "ok" and not expect_failure:
                end = min(end, time.monotonic() + GRACE_SECONDS)
    for rank, process in enumerate(processes):
        if rank not in reports:
            reports[rank] = ("missed the deadline", _stack_of(process, folder / f"stack{rank}"))
        process.join(GRACE_SECONDS if rank in reports and reports[rank][0] == "ok" else 0.1)
        if process.is_alive():
            process.kill()
            process.join()
        if reports[rank][0] != "ok" and not (expect_failure and reports[rank][0] == "error"):
            tail = (folder / f"output{rank}").read_text(errors="replace")[-6000:] if rank < len(processes) else ""
            reports[rank] = (reports[rank][0], f"{reports[rank][1]}\n{tail}")
    return [reports[rank] for rank in range(len(pipes))]


def _stack_of(process: BaseProcess, path: Path) -> str:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
    return path.read_text(errors="replace") or "no stack"


def _compile_cpu_extension() -> None:
    """Build DeepSpeed's CPU communication extension once, before several ranks would wait for each other's lock."""
    if _compile_cpu_extension.__dict__.setdefault("done", importlib.util.find_spec("deepspeed") is None):
        return
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load()
    _compile_cpu_extension.__dict__["done"] = True


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
