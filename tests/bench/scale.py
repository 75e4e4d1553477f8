"""Agreement of many ranks: every one a real client of one store, in good and in bad cases.

    python -m tests.bench.scale --ranks 256 1024 4096

Clients share a few processes, each with a connection and a thread of its own. Printed are the time until the last rank
knows the verdict (beyond the timeout, where ranks do not come), the processor time of the process that serves the
store, what went over the loopback, and the longest message.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed import TCPStore

from ds_topo.process_groups.agreement import Round

PATIENCE = 0.8
"""The share of the timeout after which a missing rank is no longer waited for."""
CASES = ("all agree", "one rank differs", "all differ", "a rank does not come", "the first rank does not come")


def serve(pipe: Connection) -> None:
    """Be the process with the store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv():
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(usage.ru_utime + usage.ru_stime)


def take_part(port: int, ranks: Sequence[int], world_size: int, case: str, seconds: float, pipe: Connection) -> None:
    """Be some of the ranks."""
    threading.stack_size(256 << 10)
    clients = {rank: TCPStore("127.0.0.1", port, is_master=False) for rank in ranks}
    verdicts: list[str] = []
    ends: list[float] = []

    def agree(rank: int) -> None:
        plan = {"one rank differs": str(rank == world_size // 2), "all differ": str(rank)}.get(case, "the same")
        round_ = Round(
            clients[rank], "ds_topo/all/1", rank, range(world_size), timedelta(seconds=seconds), "a benchmark"
        )
        verdicts.append(round_.verdict(f"plan: {plan}", None))
        ends.append(time.monotonic())

    absent = {"a rank does not come": world_size // 2, "the first rank does not come": 0}.get(case)
    threads = [threading.Thread(target=agree, args=(rank,)) for rank in ranks if rank != absent]
    pipe.send("ready")
    pipe.recv()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((max(ends, default=0.0), max(map(len, verdicts), default=0), len(set(verdicts))))


def measure(world_size: int, case: str, processes: int, seconds: float) -> str:
    """One row of the table."""
    context = multiprocessing.get_context("fork")
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
    late = f" (timeout + {wall - PATIENCE * seconds:.2f})" if "not come" in case else ""
    longest, different = max(length for _, length, _ in results), max(number for _, _, number in results)
    return f"{world_size:>6}  {case:<29} {wall:7.2f}{late:<18} {busy:8.2f} {sent / 1e6:9.1f} {longest:9} {different:9}"


def _loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096], help="numbers of ranks")
    parser.add_argument("--processes", type=int, default=8, help="that share the ranks")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds, of an agreement")
    arguments = parser.parse_args()
    wanted = max(arguments.ranks) + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * wanted)), hard))
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    print(" ranks  case                          wall, s                   server, s  MB sent   longest  different")
    for world_size in arguments.ranks:
        for case in CASES:
            print(measure(world_size, case, arguments.processes, arguments.timeout), flush=True)


if __name__ == "__main__":
    main()
