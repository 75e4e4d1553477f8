"""Compare the planner with virtual hosts: seconds and bytes between hosts for every order of several sets of degrees.

    OMP_NUM_THREADS=1 python -m tests.bench.planner_orders [--slots 2] [--rate 200mbit] [--model gradients] [--rounds 8]

Every layout of the plan trains the example's GPT in DeepSpeed's pipeline engine, with the config that the plan writes.
All engines run in the same processes and take turns of several steps; the output has medians of the slowest rank. The
machine is calibrated first, by the same ranks over the same links. ``noise`` is the spread of a layout's rounds: the
third quartile divided by the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_topo import PipelineModule, PipelineParallelGrid, initialize
from ds_topo.cli.plan_report import deepspeed_config
from ds_topo.measurement.calibrate import calibrate
from ds_topo.planner.explain import host_traffic
from ds_topo.planner.hardware import Machine, accelerator_of, cluster_of
from ds_topo.planner.job import DEEPSPEED_PIPELINE, FP32, Job, Recompute
from ds_topo.planner.model import transformer
from ds_topo.planner.search import Plan, Wanted, orders_of, search
from ds_topo.planner.stages import Costs
from tests.bench.sides import turns
from tests.cluster import Cluster

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import VOCABULARY, GPTConfig, gpt_layers, next_byte_loss
from parallel_layers import Parallel

HOSTS, WARMUP = 2, 1
STEPS = 3
"""The steps of a layout's turn. The first is not timed, because other layouts have used the caches and memory."""

Config = tuple[dict[str, Any], bool]
"""A DeepSpeed config, and True if activations are split along the sequence."""


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    model: GPTConfig
    batch: int


CASES = {
    "gradients": Case(GPTConfig(context=32, width=256, heads=4, depth=4), 16),
    "activations": Case(GPTConfig(context=256, width=64, heads=4, depth=4), 64),
}
DEGREES = {
    2: ("pipe=2,data=2", "pipe=2,model=2", "data=2,model=2"),
    4: ("pipe=2,data=4", "pipe=4,data=2", "pipe=2,data=2,model=2"),
}


def job_of(case: Case, slots: int, machine: Machine) -> Job:
    """Return the job that the planner gets."""
    shape = case.model
    model = transformer(
        layers=shape.depth, hidden=shape.width, heads=shape.heads, vocabulary=VOCABULARY, sequence=shape.context
    )
    cluster = machine.applied_to(cluster_of(accelerator_of("A100"), HOSTS, slots))
    return Job(model, cluster, case.batch, shape.context, FP32, DEEPSPEED_PIPELINE)


def plans_of(job: Job, slots: int) -> list[Plan]:
    """Return every order of the best plan of every set of degrees."""
    plans: list[Plan] = []
    for spec in DEGREES[slots]:
        degrees = {"pipe": 1, "data": 1, "model": 1} | {
            axis: int(degree) for axis, _, degree in (part.partition("=") for part in spec.split(","))
        }
        wanted = Wanted(degrees=tuple(degrees.items()), recompute=(Recompute.NONE,))
        plans += orders_of(job, search(job, wanted, count=1).best)
    return plans


def calibrated() -> Machine:
    """Calibrate the machine; call on every rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return calibrate()


def measure(name: str, configs: list[Config], rounds: int) -> tuple[list[list[float]], list[float]]:
    """Return, for every config, the seconds of each round and the bytes that this rank's host sends in a step."""
    import deepspeed

    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    sides = {str(index): (_step(CASES[name], *config), lambda: None) for index, config in enumerate(configs)}
    times, sent = turns(sides, rounds, WARMUP, STEPS)
    return list(times.values()), [1e6 * megabytes for megabytes in sent.values()]


def _step(case: Case, config: dict[str, Any], sequence_parallel: bool) -> Callable[[], None]:
    from deepspeed.runtime.pipe import p2p

    grid = PipelineParallelGrid(config["topology"], timeout=timedelta(minutes=5))
    parallel = Parallel(grid.get_group("model"), sequence_parallel)
    if sequence_parallel:  # as the example does
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    module = PipelineModule(
        gpt_layers(case.model, parallel), grid=grid, loss_fn=next_byte_loss(parallel), partition_method="parameters"
    )
    engine, *_ = initialize(model=module, config=config, model_parameters=list(module.parameters()))
    shape = (config["train_micro_batch_size_per_gpu"], case.model.context)
    own = torch.Generator().manual_seed(grid.get_sample_rank())
    samples = [torch.randint(0, VOCABULARY, shape, generator=own) for _ in range(config["gradient_accumulation_steps"])]

    def step() -> None:
        p2p._grid = engine.grid  # DeepSpeed knows one grid for all engines of a process
        engine.train_batch(iter([(sample, sample) for sample in samples]))

    return step


def main() -> None:
    """Calibrate, plan, measure and print; the last line is JSON for other programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=2, choices=list(DEGREES))
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--model", default="gradients", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    case, slots = CASES[arguments.model], arguments.slots
    with Cluster(HOSTS, arguments.rate) as cluster:
        machine = cluster.run_ranks(calibrated, ranks_per_host=slots, timeout=300)[0]
        print(json.dumps(machine.as_json()))
        job = job_of(case, slots, machine)
        plans = plans_of(job, slots)
        configs = [(deepspeed_config(job, plan), plan.layout.sequence_parallel) for plan in plans]
        results = cluster.run_ranks(
            measure, arguments.model, configs, arguments.rounds, ranks_per_host=slots, timeout=540
        )
    times = results[0][0]
    sent = [max(results[host * slots][1][index] for host in range(HOSTS)) for index in range(len(plans))]
    costs = Costs(job)
    titles = ("median", "fastest", "noise", "predicted", "error", "MB sent", "planned", "error")
    print(f"{'layout':58} {' '.join(f'{title:>9}' for title in titles)}")
    rows = []
    for plan, seconds, leaving in zip(plans, times, sent, strict=True):
        low, middle, high = statistics.quantiles(seconds, n=4)
        counted = max(sum(sent.values()) for sent in host_traffic(costs, plan.layout))
        rows.append((middle, min(seconds), plan.seconds))
        wrong = f"{counted / leaving - 1:+.1%}" if leaving > 1e5 else "-"
        print(
            f"{plan.layout!s:58} {middle:9.3f} {min(seconds):9.3f} {high / low:9.2f} {plan.seconds:9.3f} "
            f"{plan.seconds / middle - 1:+9.1%} {leaving / 1e6:9.2f} {counted / 1e6:9.2f} {wrong:>9}"
        )
    chosen = min(rows, key=lambda row: row[-1])
    ratio = max(row[-1] for row in rows) / chosen[-1]
    for column, name in enumerate(("medians", "fastest rounds")):
        best, worst = min(row[column] for row in rows), max(row[column] for row in rows)
        print(
            f"{slots} slots, {arguments.rate}, {arguments.model}, {name}: the planner's choice takes "
            f"{chosen[column] / best:.3f} of the best; worst over best {worst / best:.2f} measured, {ratio:.2f} "
            f"predicted ({ratio / (worst / best) - 1:+.0%})"
        )


if __name__ == "__main__":
    main()
