"""Time training steps of a GPT in two pipeline stages, replicated over two hosts, with and without our reducer.

    OMP_NUM_THREADS=1 python -m tests.bench.pipeline_overlap [--rate 1gbit] [--rounds 10] [--samples 4]

Compares our reducer in DeepSpeed's pipeline engine with that engine's own reduction, at ZeRO stages 0 and 1. The GPT
has 10.7 M parameters. ``data=2,pipe=2`` on 2 hosts x 2 ranks places replicas on different hosts, and the stages of a
replica on one. All engines run alternately in the same four processes; the output has medians and quartiles of the
slowest rank.

The limit, for ZeRO 0, is a step without reduction plus the part of the all_reduce that backward cannot hide. Only the
last micro-batch's backward of both stages can hide it, because no gradient is complete earlier. Both stages share the
link.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from ds_topo import PipelineModule, PipelineParallelGrid, initialize
from tests.bench.sides import Times, medians, ratios, table, turns
from tests.cluster import Cluster

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import GPTConfig, gpt_layers, next_byte_loss
from parallel_layers import Parallel

from tests.support.gpt_training import batch

MODEL = GPTConfig(context=128, width=384, heads=6, depth=6)
MICRO_BATCHES = 4


def engine_of(grid: PipelineParallelGrid, samples: int, zero: int, **more: Any) -> Any:
    """Return an engine with its own model."""
    parallel = Parallel(grid.get_group("model"))
    module = PipelineModule(gpt_layers(MODEL, parallel), grid=grid, loss_fn=next_byte_loss(parallel))
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        **more,
    }
    engine, *_ = initialize(model=module, config=config)
    return engine


def end_of_turn(engine: Any) -> None:
    """Wait for parameters in flight."""
    if engine.gradient_reducer is not None:
        engine.gradient_reducer.wait()


def measure(rounds: int, samples: int) -> tuple[Times, float, str]:
    """Return times, milliseconds of this stage's last backward, and the reports of our reducers."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid("data=2,pipe=2")
    data = [batch(0, range(first * samples, (first + 1) * samples), MODEL) for first in range(MICRO_BATCHES)]
    silent = engine_of(grid, samples, zero=0)
    silent.pipeline_enable_backward_allreduce = False
    engines = {"no reduction": silent}
    for zero in (0, 1):
        engines[f"deepspeed, ZeRO {zero}"] = engine_of(grid, samples, zero)
        engines[f"ours, ZeRO {zero}"] = engine_of(grid, samples, zero, gradient_reducer=True)
    engines["ours, ZeRO 1, parameters"] = engine_of(grid, samples, 1, gradient_reducer={"overlap_parameters": True})
    flat = torch.zeros(sum(parameter.numel() for parameter in silent.module.parameters()))
    sides: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        name: (partial(engine.train_batch, itertools.cycle(data)), partial(end_of_turn, engine))
        for name, engine in engines.items()
    }
    sides["all_reduce"] = lambda: dist.all_reduce(flat, group=grid.get_data_parallel_group()), lambda: None
    times, _ = turns(sides, rounds, warmup=2, steps=3)
    reducers = {name: engine.gradient_reducer for name, engine in engines.items() if engine.gradient_reducer}
    backward = reducers["ours, ZeRO 0"].driver.backward_ns / 1e6
    reports = [f"{name}, stage {grid.stage_id}\n{reducer.report()}" for name, reducer in reducers.items()]
    return times, backward, "\n\n".join(reports)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--samples", type=int, default=4, help="of 128 bytes, per rank and micro-batch")
    arguments = parser.parse_args()
    with Cluster(hosts=2, rate=arguments.rate) as cluster:
        results = cluster.run_ranks(measure, arguments.rounds, arguments.samples, ranks_per_host=2, timeout=600)
    times = results[0][0]
    batches = f"{MICRO_BATCHES} micro-batches of {arguments.samples} samples"
    print(f"link {arguments.rate}, {batches}, {arguments.rounds} rounds")
    print(table(times))
    print(ratios(times, [(f"deepspeed, ZeRO {zero}", f"ours, ZeRO {zero}") for zero in (0, 1)]))
    print(ratios(times, [(side, "ours, ZeRO 1, parameters") for side in ("deepspeed, ZeRO 1", "ours, ZeRO 0")]))
    middle = medians(times)
    windows = [backward for _, backward, _ in results[:2]]
    limit = middle["no reduction"] + max(0.0, middle["all_reduce"] - sum(windows))
    print(f"last backward of the stages {windows[0]:.0f} and {windows[1]:.0f} ms; limit {limit:.1f} ms")
    print(ratios({**times, "limit": [limit / 1e3]}, [("deepspeed, ZeRO 0", "limit"), ("ours, ZeRO 0", "limit")]))
    for _, _, report in results[:2]:
        print(f"\n{report}")


if __name__ == "__main__":
    main()
