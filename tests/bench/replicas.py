"""Time steps of replicas that torchft keeps together against one job, and against torchft's own DDP.

    OMP_NUM_THREADS=1 python -m tests.bench.replicas [--rate 1gbit] [--rounds 10]

Four ranks train a GPT of 10.7 M parameters by AdamW: at ZeRO 1 as one job of ``data=2,shard=2`` and as two replicas of
``shard=2``; without ZeRO as four replicas of one rank, by an engine and by torchft's ``DistributedDataParallel`` and
``Optimizer``. Turns alternate in the same processes. With a rate, each replica of two ranks is on a host of its own.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer

from ds_topo import PipelineParallelGrid, initialize
from ds_topo.process_groups.creation import gathered
from tests.bench.sides import Times, ratios, table, turns
from tests.bench.zero_overlap import MODEL, STEPS, Step, engine_step
from tests.cluster import Cluster
from tests.support.ranks import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from parallel_layers import Parallel

from tests.support.gpt_training import PlainGPT, batch

SAMPLES = 4


def lighthouse(replicas: int) -> str:
    """Start a lighthouse on the first rank; return its address on every rank."""
    server = LighthouseServer("[::]:0", replicas, join_timeout_ms=60_000) if dist.get_rank() == 0 else None
    if server is not None:
        _servers.append(server)
    return gathered(server.address() if server is not None else "")[0]


_servers: list[Any] = []


def torchft_side(model: torch.nn.Module, data: Any) -> tuple[Step, Step]:
    """Return a step by torchft's own DDP and optimizer, with each rank a replica."""
    host = socket.gethostname()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timedelta(seconds=60)),
        load_state_dict=lambda _: None,
        state_dict=lambda: {"": 0},
        min_replica_size=4,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=lighthouse(4),
        init_sync=False,
    )
    _servers.append(store)
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step() -> None:
        optimizer.zero_grad()
        wrapped(*data).backward()
        optimizer.step()

    return step, lambda: None


def measure(rounds: int, wanted: str) -> Times:
    """Return the seconds of a step, by side."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    rank, pairs = dist.get_rank(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([one]) for one in range(4)]
    whole = PipelineParallelGrid("data=2,shard=2")
    parallel = Parallel(whole.get_group("model"))
    data = batch(0, range(rank * SAMPLES, (rank + 1) * SAMPLES), MODEL)

    def engine(stage: int, grid: PipelineParallelGrid, **more: Any) -> tuple[Step, Step]:
        config = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "gradient_reducer": True,
            **more,
        }
        built, *_ = initialize(model=PlainGPT(parallel, MODEL), config=config, mpu=grid)
        return engine_step(built, data)

    def managed(stage: int, spec: str, group: Any, replicas: int) -> tuple[Step, Step]:
        section = {"min_replica_size": replicas, "lighthouse_addr": lighthouse(replicas)}
        return engine(stage, PipelineParallelGrid(spec, group), replicas=section)

    builders: dict[str, Callable[[], tuple[Step, Step]]] = {
        "one job, ZeRO 1": lambda: engine(1, whole),
        "2 replicas, ZeRO 1": lambda: managed(1, "shard=2", pairs[rank // 2], 2),
        "4 replicas, ZeRO 0": lambda: managed(0, "data=1", alone[rank], 4),
        "torchft's DDP": lambda: torchft_side(PlainGPT(parallel, MODEL), data),
    }
    times, _ = turns(
        {name: build() for name, build in builders.items() if re.search(wanted, name)}, rounds, warmup=2, steps=STEPS
    )
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="rate of each host's link; 'none' runs all ranks on one host")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sides", default="", help="run only the sides whose names match this regular expression")
    arguments = parser.parse_args()
    if arguments.rate == "none":
        times: Times = run_ranks(4, measure, arguments.rounds, arguments.sides, deadline=900)[0]
    else:
        with Cluster(hosts=2, rate=arguments.rate) as cluster:
            times = cluster.run_ranks(measure, arguments.rounds, arguments.sides, ranks_per_host=2, timeout=900)[0]
    print(f"link {arguments.rate}, {SAMPLES} samples per rank, {arguments.rounds} turns of {STEPS - 1} steps")
    print(table(times))
    pairs = [("2 replicas, ZeRO 1", "one job, ZeRO 1"), ("4 replicas, ZeRO 0", "torchft's DDP")]
    print(ratios(times, [pair for pair in pairs if times.keys() >= {*pair}]))


if __name__ == "__main__":
    main()
