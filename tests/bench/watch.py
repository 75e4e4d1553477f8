"""Measure the cost of a watch: a step of four ranks with and without one, and the store's work for many ranks.

    OMP_NUM_THREADS=1 python -m tests.bench.watch [--rounds 20] [--ranks 16384]

Times steps of a reducer over a GPT of 0.8 M parameters. Turns of 4 seconds alternate in the same processes, and medians
of the slowest rank are compared. The output also has the processor time of the watch's threads, which is its cost if
processes do not wait for a core. The store's work is measured with real connections: each of several processes sends
the requests of a share of the ranks in one interval, as fast as it can.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from ds_topo import GradientReducer
from ds_topo.base.torch_names import clone, get_several
from ds_topo.health import Watch
from ds_topo.health.activity import Activity, Wait
from ds_topo.health.heartbeat import RUNS, Beat
from tests.support.ranks import run_ranks

TURN_SECONDS = 4.0
CLIENTS = 4


def steps(rounds: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of steps with and without a watch, and the share of a core that its threads take."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
    reducer = GradientReducer(model)
    inputs = torch.randn(64, 256)
    times: dict[str, list[float]] = {"without": [], "with": []}
    shares: list[float] = []
    for _ in range(rounds):
        for side, taken in times.items():
            watch = Watch(30.0) if side == "with" else None
            started, count = time.perf_counter(), 0
            goes_on = torch.ones(1)
            while goes_on:
                model.zero_grad()
                model(inputs).sum().backward()
                reducer.finish()
                count += 1
                if count % 20 == 0:
                    goes_on.fill_(time.perf_counter() - started < TURN_SECONDS)
                    dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
            passed = torch.tensor(time.perf_counter() - started)
            if watch is not None:
                shares.append(watch_seconds() / float(passed))
                watch.stop()
            dist.all_reduce(passed, op=dist.ReduceOp.MAX)
            taken.append(float(passed) / count)
    return times, statistics.median(shares)


def watch_seconds() -> float:
    """Return the processor time of the watch's threads in this process."""
    threads = [thread.ident for thread in threading.enumerate() if thread.name.startswith("ds_topo watch")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in threads if ident)


def serve(ranks: int, pipe: Connection) -> None:
    """Serve a store; send its processor time for the beats of so many ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()
    before = time.process_time()
    pipe.send(None)
    pipe.recv()
    pipe.send(time.process_time() - before)


def beats(port: int, first: int, count: int, repeat: int) -> None:
    """Send the requests of :class:`ds_topo.health.heartbeat.Heartbeat` in one interval, for some ranks."""
    store = clone(dist.TCPStore("127.0.0.1", port, timeout=timedelta(minutes=5)))
    doing = Activity(1234, "backward", "train.py:120 in train", Wait("all_reduce", "data", "name", tuple(range(8))))
    text = Beat(1, RUNS, "node12", "pipe=3 data=100 model=5", doing).to_text()
    for _ in range(repeat):
        for rank in range(first, first + count):
            store.set(f"beat/{rank}", text)
            get_several(store, [f"beat/{max(first, rank - 1)}", f"beat/{first}", "alarm", "verdict"])


def store_seconds(ranks: int) -> float:
    """Return the processor time of the store for one beat of so many ranks."""
    context = get_context("spawn")
    pipe, other = context.Pipe()
    server = context.Process(target=serve, args=(ranks, other), daemon=True)
    server.start()
    port = pipe.recv()
    first = dist.TCPStore("127.0.0.1", port)
    first.set("alarm", "")
    first.set("verdict", "")
    repeat, share = 3, ranks // CLIENTS
    pipe.send(None)
    pipe.recv()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda client: beats(port, client * share, share, repeat), range(CLIENTS)))
    pipe.send(None)
    seconds = float(pipe.recv())
    server.terminate()
    server.join()
    return seconds / repeat


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=16384)
    arguments = parser.parse_args()
    times, share = run_ranks(4, steps, arguments.rounds, deadline=900)[0]
    without, with_watch = (statistics.median(times[side]) for side in ("without", "with"))
    print(f"step: {1e3 * without:.2f} ms without, {1e3 * with_watch:.2f} ms with a watch, {with_watch / without:.3f}")
    print(f"its threads take {100 * share:.2f}% of a core on each rank")
    for ranks in (arguments.ranks // 16, arguments.ranks // 4, arguments.ranks):
        seconds, interval = store_seconds(ranks), max(1.0, ranks / 2000)
        print(f"{ranks} ranks: {seconds:.2f} s of the store's processor time every {interval:.1f} s")


if __name__ == "__main__":
    main()
