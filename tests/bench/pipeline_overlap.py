"""Training steps of a GPT of 10.7 M parameters in two stages, replicated over two hosts: our reducer in DeepSpeed's
pipeline engine beside that engine's own reduction, at ZeRO stages 0 and 1.

    OMP_NUM_THREADS=1 python -m tests.bench.pipeline_overlap [--rate 1gbit] [--rounds 10]

``data=2,pipe=2`` on 2 hosts x 2 ranks: replicas on different hosts, the stages of a replica on one. All engines run
alternately in the same four processes; medians and quartiles of the slowest rank.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed

from ds_topo import PipelineModule, PipelineParallelGrid, initialize
from tests.bench.sides import Times, alternate, ratios, table
from tests.cluster import Cluster

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import GPTConfig, gpt_layers, next_byte_loss
from parallel_layers import Parallel

from tests.gpt_training import batch

MODEL = GPTConfig(context=128, width=384, heads=6, depth=6)
MICRO_BATCHES = 4


def engine_of(grid: PipelineParallelGrid, samples: int, zero: int, **more: Any) -> Any:
    """An engine with a model of its own."""
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


def measure(rounds: int, samples: int) -> tuple[Times, str]:
    """Times, and the reports of our reducers."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid("data=2,pipe=2")
    data = [batch(0, range(first * samples, (first + 1) * samples), MODEL) for first in range(MICRO_BATCHES)]
    engines = {}
    for zero in (0, 1):
        engines[f"deepspeed, ZeRO {zero}"] = engine_of(grid, samples, zero)
        engines[f"ours, ZeRO {zero}"] = engine_of(grid, samples, zero, gradient_reducer=True)
    sides = {name: partial(engine.train_batch, itertools.cycle(data)) for name, engine in engines.items()}
    times = alternate(sides, rounds, lambda: None, warmup=3)
    reports = [
        f"{name}, stage {engine.stage_id}\n{engine.gradient_reducer.report()}"
        for name, engine in engines.items()
        if engine.gradient_reducer is not None
    ]
    return times, "\n\n".join(reports)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--samples", type=int, default=1, help="of 128 bytes, per rank and micro-batch")
    arguments = parser.parse_args()
    with Cluster(hosts=2, rate=arguments.rate) as cluster:
        results = cluster.run_ranks(measure, arguments.rounds, arguments.samples, ranks_per_host=2, timeout=600)
    times = results[0][0]
    batches = f"{MICRO_BATCHES} micro-batches of {arguments.samples} samples"
    print(f"link {arguments.rate}, {batches}, {arguments.rounds} rounds")
    print(table(times))
    print(ratios(times, [(f"deepspeed, ZeRO {zero}", f"ours, ZeRO {zero}") for zero in (0, 1)]))
    for _, report in results[:2]:
        print(f"\n{report}")


if __name__ == "__main__":
    main()
