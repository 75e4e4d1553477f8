"""Measure the overhead of a reducer and of a grid's engine: microseconds per parameter, on one rank.

    OMP_NUM_THREADS=1 python -m tests.bench.reducer_overhead [--device cuda] [--layers 500] [--rounds 40]
    OMP_NUM_THREADS=1 python -m tests.bench.reducer_overhead --engines [--bf16] [--device cuda | --ranks 2] [...]

Times backward of a chain of small layers, with gradients set to None before each step, under plain autograd, torch's
DDP (bucket views) and our reducer, alternately in one process; prints medians. With ``--engines``, times whole steps of
DeepSpeed's engine at ZeRO stages 0 to 3 without a grid (stock), on a grid, and on a grid with our reducer, and of the
same loop in torch. One rank waits for no other one, so its times are those of the processor, which other processes
change less. Then it also counts the Python functions that a step calls, which does not depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo import GradientReducer, PipelineParallelGrid, initialize
from tests.bench.sides import Times, alternate, medians, table
from tests.support.deepspeeds_calls import Called, called_by
from tests.support.ranks import run_ranks

WIDTH = 16


def chain(layers: int) -> nn.Module:
    """Build a chain of layers with two parameters each."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def measure(layers: int, rounds: int, device: str) -> Times:
    """Return the times of a backward pass."""
    warnings.simplefilter("ignore")
    plain, ddp, ours = models = [chain(layers).to(device) for _ in range(3)]
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


def measure_engines(layers: int, rounds: int, is_bf16: bool, device: str = "cpu") -> tuple[Times, dict[str, Called]]:
    """Return the times of a whole step, and what it calls."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid("data=-1")
    inputs = torch.ones(1, WIDTH, dtype=torch.bfloat16 if is_bf16 else torch.float32, device=device)
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def torch_step(model: nn.Module) -> Callable[[], object]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            wait()

        return step

    def engine_step(stage: int, mpu: PipelineParallelGrid | None, **ours: Any) -> Callable[[], object]:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": is_bf16},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            **ours,
        }
        start = deepspeed.initialize if mpu is None else initialize
        engine, *_ = start(model=chain(layers), config=config, mpu=mpu)

        def step() -> None:
            engine.backward(engine(inputs).sum())
            engine.step()
            wait()

        return step

    plain, ddp = (chain(layers).to(inputs) for _ in range(2))
    sides = {"plain": torch_step(plain), "ddp": torch_step(DistributedDataParallel(ddp))}
    for stage in (0, 1, 2, 3):
        sides[f"stock, stage {stage}"] = engine_step(stage, None)
        sides[f"grid, stage {stage}"] = engine_step(stage, grid)
        if stage < 3:
            sides[f"reducer, stage {stage}"] = engine_step(stage, grid, gradient_reducer={})
    clock = time.thread_time if dist.get_world_size() == 1 and device == "cpu" else time.perf_counter
    times = alternate(sides, rounds, lambda: None, warmup=3, clock=clock)
    return times, {side: called_by(step) for side, step in sides.items()}


def print_differences(times: Times, called: dict[str, Called]) -> None:
    """Print what a grid and a reducer add to each stage's stock engine."""
    middle = medians(times)
    for side in called:
        kind, _, stage = side.partition(", ")
        stock = f"stock, {stage}"
        if kind in ("grid", "reducer"):
            extra = 1e3 * statistics.median(map(float.__sub__, times[side], times[stock]))
            more = called[side].all - called[stock].all
            print(
                f"{side}: {extra:+.3f} ms ({extra / middle[stock]:+.1%}); calls {called[side].of_ds_topo} functions of "
                f"ds_topo, {more:+} in all to {called[stock].all}"
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--layers", type=int, default=500, help="number of layers, of two parameters each")
    parser.add_argument("--engines", action="store_true", help="time whole steps of DeepSpeed's engine")
    parser.add_argument("--bf16", action="store_true", help="with --engines, train in bf16")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks with --engines")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    if arguments.engines:
        settings = (arguments.layers, arguments.rounds, arguments.bf16)
        if arguments.device == "cuda":
            times, called = measure_engines(*settings, "cuda")
        else:
            times, called = run_ranks(arguments.ranks, measure_engines, *settings, deadline=900)[0]
        print(table(times))
        print_differences(times, called)
        return
    if arguments.device == "cuda":
        times = measure(arguments.layers, arguments.rounds, "cuda")
        dist.destroy_process_group()
    else:
        times = run_ranks(1, measure, arguments.layers, arguments.rounds, "cpu")[0]
    print(table(times))
    middle = medians(times)
    for side in list(middle)[1:]:
        extra = 1e3 * (middle[side] - middle["plain"]) / (2 * arguments.layers)
        print(f"{side}: {extra:.2f} microseconds per parameter")


if __name__ == "__main__":
    main()
