"""What a reducer costs beside communication: microseconds per parameter, on one rank, where there is none.

    OMP_NUM_THREADS=1 python -m tests.bench.reducer_overhead [--device cuda] [--rounds 40]

Backward of a chain of 500 small layers, gradients set to None before each step: plain autograd, torch's DDP (bucket
views) and ours, alternately in one process; medians.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo import GradientReducer
from tests.bench.sides import Times, alternate, medians, table
from tests.support.ranks import run_ranks

LAYERS, WIDTH = 500, 8


def measure(rounds: int, device: str) -> Times:
    """Times of a backward pass."""
    warnings.simplefilter("ignore")
    plain, ddp, ours = models = [
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device) for _ in range(3)
    ]
    wrapped = DistributedDataParallel(ddp, gradient_as_bucket_view=True)
    reducer = GradientReducer(ours)
    inputs = torch.ones(1, WIDTH, device=device)
    losses: dict[str, torch.Tensor] = {}

    def prepare() -> None:
        for model in models:
            model.zero_grad()
        losses.update(plain=plain(inputs).sum(), ddp=wrapped(inputs).sum(), ours=ours(inputs).sum())
        if device == "cuda":
            torch.cuda.synchronize()

    def step(side: str) -> None:
        losses.pop(side).backward()
        if side == "ours":
            reducer.finish()
        if device == "cuda":
            torch.cuda.synchronize()

    sides = {side: partial(step, side) for side in ("plain", "ddp", "ours")}
    return alternate(sides, rounds, prepare, warmup=5)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        times = measure(arguments.rounds, "cuda")
        dist.destroy_process_group()
    else:
        times = run_ranks(1, measure, arguments.rounds, "cpu")[0]
    print(table(times))
    middle = medians(times)
    for side in ("ddp", "ours"):
        print(f"{side}: {1e3 * (middle[side] - middle['plain']) / (2 * LAYERS):.2f} microseconds per parameter")


if __name__ == "__main__":
    main()
