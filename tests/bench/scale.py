"""Measure how costs grow with the job: agreements of many ranks, grids of a million, reducers of 100,000 parameters.

    OMP_NUM_THREADS=1 python -m tests.bench.scale agreement [--ranks 256 1024 4096 16384] [--cases ...]
    OMP_NUM_THREADS=1 python -m tests.bench.scale grid [--ranks 1024 16384 1048576]
    OMP_NUM_THREADS=1 python -m tests.bench.scale reducer [--parameters 1000 100000]

``agreement``: every rank is a real client of one store, with its own connection and thread. A few processes, as root in
their own network namespace, run all of them. The output has the time until the last rank knows the verdict (and the
timeout, if ranks are missing), the processor time of the store's process, the bytes over the loopback, and the longest
message. ``grid``: construction and the slowest queries of one rank, with torch's fake backend. ``reducer``:
construction on two ranks, the first ``finish()`` and later ones.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import os
import resource
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.fake_world import fake_world
from tests.support.ranks import run_ranks

PATIENCE = 0.8
"""The share of the timeout after which ranks stop waiting for a missing rank."""
CASES = ("all agree", "one differs", "all differ", "one list differs", "one does not come", "the first does not come")
SPECS = {1024: "pipe=4,data=32,model=8", 16384: "pipe=16,data=128,model=8", 1048576: "pipe=32,data=4096,model=8"}
LISTED = 20_000
"""The number of lines in the list that ranks compare, as for the parameters of a large model."""
PARAMETER = 4
OWN_NETWORK = "DS_TOPO_BENCH_OWN_NETWORK"


# -- agreements --------------------------------------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Serve the store; send its port, then its processor time at each request."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv():
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(usage.ru_utime + usage.ru_stime)


def take_part(port: int, ranks: Sequence[int], world_size: int, case: str, seconds: float, pipe: Connection) -> None:
    """Run some of the ranks, each in a thread."""
    from torch.distributed import TCPStore

    from ds_topo.errors import DisagreementError
    from ds_topo.launch.council import Round

    threading.stack_size(256 << 10)
    clients = {rank: TCPStore("127.0.0.1", port, is_master=False) for rank in ranks}
    verdicts: list[str] = []
    ends: list[float] = []

    def agree(rank: int) -> None:
        differs = case == "all differ" or (case.startswith("one ") and "differs" in case and rank == world_size // 2)

        def lines() -> list[str]:
            wrong = {7: f"layers.7.weight [{rank}]"} if differs else {}
            return [wrong.get(line, f"layers.{line}.weight [4096, 4096] torch.bfloat16") for line in range(LISTED)]

        limit = timedelta(seconds=seconds)
        round_ = Round(clients[rank], "ds_topo/all/1", rank, range(world_size), "a benchmark", limit, DisagreementError)
        shown = lines() if case == "one list differs" else None
        verdicts.append(round_.verdict(f"plan: {rank if differs else 'the same'}", shown))
        ends.append(time.monotonic())

    absent = {"one does not come": world_size // 2, "the first does not come": 0}.get(case)
    threads = [threading.Thread(target=agree, args=(rank,)) for rank in ranks if rank != absent]
    pipe.send("ready")
    pipe.recv()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((max(ends, default=0.0), max(map(len, verdicts), default=0), len(set(verdicts))))


def agreement(world_size: int, case: str, processes: int, seconds: float) -> str:
    """Return one row of the table."""
    context = multiprocessing.get_context("forkserver")
    to_server, of_server = context.Pipe()
    server = context.Process(target=serve, args=(of_server,), daemon=True)
    server.start()
    port = to_server.recv()
    pipes = []
    for first in range(processes):
        ours, theirs = context.Pipe()
        ranks = range(first, world_size, processes)
        context.Process(target=take_part, args=(port, ranks, world_size, case, seconds, theirs), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    to_server.send(True)
    busy, sent, start = to_server.recv(), _loopback_bytes(), time.monotonic()
    for pipe in pipes:
        pipe.send("go")
    results = [pipe.recv() for pipe in pipes]
    to_server.send(True)
    busy, sent = to_server.recv() - busy, _loopback_bytes() - sent
    to_server.send(False)
    wall = max(end for end, _, _ in results) - start
    late = f" (timeout {wall - seconds:+.1f})" if "not come" in case else ""
    longest, different = max(length for _, length, _ in results), sum(number for _, _, number in results) // processes
    return f"{world_size:>6}  {case:<24} {wall:7.2f}{late:<18} {busy:8.2f} {sent / 1e6:9.1f} {longest:9} {different:9}"


def _loopback_bytes() -> int:
    [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def _enter_own_network() -> None:
    """Enter a network namespace: torch queries name servers for every connection, and they may answer late or never."""
    if os.environ.get(OWN_NETWORK) == "1":
        return
    os.environ[OWN_NETWORK] = "1"
    script = 'ip link set lo up && exec "$@"'
    command = [sys.executable, "-m", "tests.bench.scale", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", "--net", "--", "sh", "-c", script, "sh", *command])


def agreements(arguments: argparse.Namespace) -> None:
    """Print the table of agreements."""
    _enter_own_network()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * max(arguments.ranks) + 512)), hard))
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    multiprocessing.set_forkserver_preload(["ds_topo.launch.council"])
    print(" ranks  case                     wall, s                   server, s   MB sent   longest  different")
    for world_size in arguments.ranks:
        for case in arguments.cases or CASES:
            print(agreement(world_size, case, arguments.processes, arguments.timeout), flush=True)


# -- grids -------------------------------------------------------------------------------------------------------------


def queries(grid: Any) -> Iterator[tuple[str, Any]]:
    """Yield every query of a grid that takes at most one argument, with that argument."""
    axis_or_index = {"axis": "data", "axes": ("data",), "axis_name": "data"}
    for name in dir(grid):
        method = getattr(grid, name, None)
        if not name.startswith(("get_", "is_", "stage_", "device_mesh")) or not callable(method):
            continue
        needed = [
            parameter.name
            for parameter in inspect.signature(method).parameters.values()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        if len(needed) <= 1:
            given = [axis_or_index.get(parameter, 0) for parameter in needed]
            yield name, lambda method=method, given=given: method(*given)


def grid(world_size: int) -> None:
    """Print the time and memory of one grid."""
    from ds_topo import PipelineParallelGrid

    with fake_world(world_size // 3, world_size):
        started = time.perf_counter()
        made = PipelineParallelGrid(SPECS[world_size])
        built = time.perf_counter() - started
        times: list[tuple[float, str]] = []
        lists: list[tuple[float, str]] = []
        for name, ask in queries(made):
            try:
                answer = ask()
            except RuntimeError:  # raised on a stage without embeddings
                continue
            started, asked = time.perf_counter(), 0
            while time.perf_counter() - started < 0.01:
                ask()
                asked += 1
            row = ((time.perf_counter() - started) / asked * 1e6, name)
            (lists if isinstance(answer, list) else times).append(row)
        text = ", ".join(f"{name} {micro:.0f}" for micro, name in sorted(times, reverse=True)[:4])
        longest = max(lists)
        print(f"{world_size:>8} {built * 1e3:8.1f} {len(times):8}  {text}; {longest[1]} {longest[0]:.0f}", flush=True)
        made.destroy()


# -- reducers ----------------------------------------------------------------------------------------------------------


def reducer(parameters: int) -> list[float]:
    """Return seconds of the construction, of the first ``finish()``, of later ones, and of their backward passes."""
    from ds_topo import GradientReducer

    warnings.simplefilter("ignore")
    module = nn.ParameterList([nn.Parameter(torch.ones(PARAMETER)) for _ in range(parameters)])
    dist.barrier()
    started = time.perf_counter()
    made = GradientReducer(module)
    times = [time.perf_counter() - started]
    ends, backwards = [], []
    for _ in range(5):
        loss = torch.stack([parameter.sum() for parameter in module]).sum()
        dist.barrier()
        started = time.perf_counter()
        loss.backward()
        backwards.append(time.perf_counter() - started)
        started = time.perf_counter()
        made.finish()
        ends.append(time.perf_counter() - started)
        module.zero_grad()
    return [*times, ends[0], statistics.median(ends[2:]), statistics.median(backwards[2:])]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("agreement")
    part.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    part.add_argument("--cases", nargs="+", choices=CASES, help="all of them by default")
    part.add_argument("--processes", type=int, default=8, help="that share the ranks")
    part.add_argument("--timeout", type=float, default=20.0, help="seconds, of an agreement")
    part = parts.add_parser("grid")
    part.add_argument("--ranks", type=int, nargs="+", default=list(SPECS), choices=list(SPECS))
    part = parts.add_parser("reducer")
    part.add_argument("--parameters", type=int, nargs="+", default=[1_000, 100_000])
    arguments = parser.parse_args()
    if arguments.part == "agreement":
        agreements(arguments)
    elif arguments.part == "grid":
        print("   ranks built, ms  queries  slowest, microseconds; and the slowest that returns a list")
        for world_size in arguments.ranks:
            grid(world_size)
    else:
        print("parameters construction, s  first finish, s  later, s  backward, s")
        for parameters in arguments.parameters:
            built, first, later, backward = run_ranks(2, reducer, parameters, deadline=300)[0]
            print(f"{parameters:>10} {built:15.3f} {first:16.3f} {later:9.4f} {backward:11.4f}", flush=True)


if __name__ == "__main__":
    main()
