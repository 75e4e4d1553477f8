"""Start ranks on the hosts of a cluster, as torchrun would, and collect their results."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.ranks import GRACE_SECONDS, RankFailure

if TYPE_CHECKING:
    from tests.cluster.virtual_hosts import Host

MASTER_PORT = 29500
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0"}
OUTPUT_TAIL = 6000
"""The number of characters of a rank's output that an error shows."""


def call_on_ranks(
    hosts: Sequence[Host],
    function: Callable[..., Any],
    args: Sequence[Any],
    ranks_per_host: int,
    env: Mapping[str, str],
    timeout: float,
) -> list[Any]:
    """Call an importable function on every rank of a process group; return each rank's result."""
    with tempfile.TemporaryDirectory(prefix="rank-calls-") as folder:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((_module_name(function), function.__qualname__, list(args))))
        command = [sys.executable, "-m", "tests.cluster.rank_main", str(call), str(time.monotonic() + timeout)]
        # A rank that hangs prints its stack at the deadline and exits; the grace period leaves time for that.
        environment = {**env, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command_on_ranks(hosts, command, ranks_per_host, environment, timeout + GRACE_SECONDS)
        world = range(len(hosts) * ranks_per_host)
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in world]


def command_on_ranks(
    hosts: Sequence[Host], command: Sequence[str], ranks_per_host: int, env: Mapping[str, str], timeout: float
) -> list[str]:
    """Run one command per rank; return each rank's output, standard error included."""
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host={ranks_per_host}: give at least one rank per host")
    if not hosts:
        raise RuntimeError("the cluster is not running: use it in a with statement")
    world_size = len(hosts) * ranks_per_host
    with tempfile.TemporaryDirectory(prefix="rank-outputs-") as folder:
        processes: list[subprocess.Popen[Any]] = []
        try:
            for rank in range(world_size):
                host = hosts[rank // ranks_per_host]
                variables = rank_environment(rank, world_size, ranks_per_host, hosts[0].address)
                with Path(folder, f"output{rank}").open("wb") as output:
                    processes.append(
                        host.start(
                            command,
                            env={**ENVIRONMENT, **variables, **env},
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            codes = _wait_for_all(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        outputs = [Path(folder, f"output{rank}").read_text(errors="replace") for rank in range(world_size)]
    if any(code != 0 for code in codes):
        accounts = "\n".join(
            f"--- rank {rank} on {hosts[rank // ranks_per_host].name}: "
            f"{'killed, still running' if code is None else f'exit code {code}'}\n{output[-OUTPUT_TAIL:]}"
            for rank, (code, output) in enumerate(zip(codes, outputs, strict=True))
        )
        raise RankFailure(f"{' '.join(command)} on {world_size} ranks, every rank's account:\n{accounts}")
    return outputs


def rank_environment(rank: int, world_size: int, ranks_per_host: int, master_address: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and LOCAL_SIZE, which DeepSpeed's launcher sets."""
    local_size = str(ranks_per_host)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": local_size,
        "LOCAL_SIZE": local_size,
        "GROUP_RANK": str(rank // ranks_per_host),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(MASTER_PORT),
    }


def _wait_for_all(processes: Sequence[subprocess.Popen[Any]], timeout: float) -> list[int | None]:
    """Return exit codes, None for a running rank. After the first failure, wait only for the grace period."""
    end = time.monotonic() + timeout
    running = {os.pidfd_open(process.pid): process for process in processes}
    try:
        while running and time.monotonic() < end:
            for descriptor in wait(list(running), max(0.0, end - time.monotonic())):
                assert isinstance(descriptor, int)
                process = running.pop(descriptor)
                os.close(descriptor)
                if process.wait() != 0:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
    finally:
        for descriptor in running:
            os.close(descriptor)
    return [process.poll() for process in processes]


def _module_name(function: Callable[..., Any]) -> str:
    """Return the name of the function's module, also if the module runs as ``python -m name``."""
    if "<" in function.__qualname__:
        raise ValueError(f"function={function.__qualname__}: ranks import it by name; define it at module level")
    if function.__module__ != "__main__":
        return function.__module__
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        raise ValueError(f"function={function.__qualname__}: ranks import its module; run that with python -m")
    return spec.name
