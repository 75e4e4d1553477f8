"""Time DDP's communication hooks on two hosts: bf16 compression and PowerSGD, under DDP and in a DeepSpeed engine.

    OMP_NUM_THREADS=1 python -m tests.bench.compression [--rates 1gbit 400mbit] [--rounds 5]

Times training steps of a GPT of 10.7 M parameters, optimizer included, at ZeRO stages 0 and 1 with
``GradientReducer.attach`` and ``register_comm_hook``. All sides run alternately in the same two processes; the output
has medians and quartiles of the slower rank. DDP itself runs PowerSGD on GPUs only: on gloo the collectives of its
callbacks mix with those of other buckets, and a rank fails.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ds_topo import GradientReducer, PipelineParallelGrid
from tests.bench.sides import Times, ratios, table, turns
from tests.cluster import Cluster

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import GPTConfig
from parallel_layers import Parallel

from tests.support.gpt_training import PlainGPT, batch

MODEL = GPTConfig(context=128, width=384, heads=6, depth=6)
SAMPLES = 4
HOOKS = {"without", "bf16", "PowerSGD"}


def compress(state: Any, bucket: Any) -> Any:
    """Compress to bf16; DDP accepts the original hook on GPUs only."""
    return bf16_compress_hook(state, bucket)


compress.__annotations__.clear()  # DDP compares annotations with types, not with the names of types


def hook_of(name: str) -> tuple[object, Callable[..., Any]]:
    """Return the state and the hook."""
    if name == "bf16":
        return dist.group.WORLD, compress
    return PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook


def measure(rounds: int) -> Times:
    """Return the seconds of each step."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid(f"data={dist.get_world_size()}")
    parallel = Parallel(grid.get_group("model"))
    data = batch(0, range(dist.get_rank() * SAMPLES, (dist.get_rank() + 1) * SAMPLES), MODEL)
    sides: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for name in sorted(HOOKS, reverse=True):
        if name != "PowerSGD":
            model = DistributedDataParallel(PlainGPT(parallel, MODEL), gradient_as_bucket_view=True)
            if name != "without":
                model.register_comm_hook(*hook_of(name))
            sides[f"ddp, {name}"] = ddp_step(model, data), lambda: None
        for stage in (0, 1):
            config = {
                "train_micro_batch_size_per_gpu": SAMPLES,
                "steps_per_print": 10**9,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            }
            engine, *_ = deepspeed.initialize(model=PlainGPT(parallel, MODEL), config=config, mpu=grid)
            reducer = GradientReducer.attach(engine)
            if name != "without":
                reducer.register_comm_hook(*hook_of(name))
            sides[f"ours, stage {stage}, {name}"] = engine_step(engine, data), lambda: None
    times, _ = turns(sides, rounds, warmup=2, steps=3)
    return times


def ddp_step(model: torch.nn.Module, data: Any) -> Callable[[], object]:
    """Return a training step in torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(*data).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(engine: Any, data: Any) -> Callable[[], object]:
    """Return a training step of a DeepSpeed engine."""

    def step() -> None:
        engine.backward(engine(*data))
        engine.step()

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "400mbit"], help="of each host's link")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for rate in arguments.rates:
        with Cluster(hosts=2, rate=rate) as cluster:
            times = cluster.run_ranks(measure, arguments.rounds, timeout=600)[0]
        print(f"link {rate}, {arguments.rounds} turns of 2 steps")
        print(table(times))
        for name in sorted(HOOKS, reverse=True):
            beside = f"ddp, {'without' if name == 'PowerSGD' else name}"
            print(ratios(times, [(beside, f"ours, stage {stage}, {name}") for stage in (0, 1)]))


if __name__ == "__main__":
    main()
