"""Time one step's gradients of a GPT of 10.7 M parameters on two hosts: our reducer, DDP and DeepSpeed's stage 0.

    OMP_NUM_THREADS=1 python -m tests.bench.gradient_overlap [--rate 1gbit] [--rounds 12]

A step is forward, backward and reduction, without the optimizer. All sides run alternately in the same two processes;
the output has medians and quartiles of the slower rank. The limit is forward + max(backward, all_reduce), each measured
alone.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ds_topo import GradientReducer, PipelineParallelGrid
from tests.bench.sides import Times, alternate, ratios, table
from tests.cluster import Cluster
from tests.support.ranks import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import GPTConfig
from parallel_layers import Parallel

from tests.support.gpt_training import PlainGPT, batch

MODEL = GPTConfig(context=128, width=384, heads=6, depth=6)


def measure(rounds: int, samples: int) -> tuple[Times, str]:
    """Return times, and our report."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid(f"data={dist.get_world_size()}")
    parallel = Parallel(grid.get_group("model"))
    data = batch(0, range(dist.get_rank() * samples, (dist.get_rank() + 1) * samples), MODEL)
    alone, ours, ddp, deepspeeds = models = [PlainGPT(parallel, MODEL) for _ in range(4)]
    reducer = GradientReducer(ours, grid=grid)
    wrapped = DistributedDataParallel(ddp, gradient_as_bucket_view=True)
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    engine, *_ = deepspeed.initialize(model=deepspeeds, config=config, mpu=grid)
    flat = torch.zeros(sum(parameter.numel() for parameter in alone.parameters()))
    losses: list[torch.Tensor] = []

    def our_step() -> None:
        ours(*data).backward()
        reducer.finish()

    sides = {
        "forward": lambda: alone(*data),
        "backward": lambda: losses.pop().backward(),
        "all_reduce": lambda: dist.all_reduce(flat),
        "ours": our_step,
        "ddp": lambda: wrapped(*data).backward(),
        "deepspeed": lambda: engine.backward(engine(*data)),
    }

    def clear() -> None:
        for model in models:
            model.zero_grad()
        losses[:] = [alone(*data)]  # for the side that times backward alone; it may be the first

    times = alternate(sides, rounds, clear, warmup=2)
    return times, reducer.report().table()


def with_limit(times: Times) -> Times:
    """Return the times with the limit as one more side."""
    limit = [
        forward + max(backward, all_reduce)
        for forward, backward, all_reduce in zip(times["forward"], times["backward"], times["all_reduce"], strict=True)
    ]
    return {**times, "limit": limit}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of each host's link; 'none': two ranks on one host")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--samples", type=int, default=4, help="of 128 bytes, per rank")
    arguments = parser.parse_args()
    work = (measure, arguments.rounds, arguments.samples)
    if arguments.rate == "none":
        times, report = run_ranks(2, *work, deadline=600)[0]
    else:
        with Cluster(hosts=2, rate=arguments.rate) as cluster:
            times, report = cluster.run_ranks(*work, timeout=600)[0]
    times = with_limit(times)
    print(f"link {arguments.rate}, {arguments.samples} samples per rank, {arguments.rounds} rounds")
    print(table(times))
    print(ratios(times, [("deepspeed", "ours"), ("ddp", "ours"), ("ours", "limit"), ("ddp", "limit")]))
    print(f"\n{report}")


if __name__ == "__main__":
    main()
