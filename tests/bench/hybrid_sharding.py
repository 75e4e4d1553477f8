"""Time training steps on two slow-linked hosts of four ranks with ``data=2,shard=4``, beside plain ZeRO and HSDP.

    OMP_NUM_THREADS=1 python -m tests.bench.hybrid_sharding [--rate 400mbit] [--rounds 5] [--stages 1 2 3] [--micro 1 4]

For every ZeRO stage and number of micro-batches, turns of all sides alternate in the same eight processes: DeepSpeed's
stage over all ranks, FSDP2's HSDP (``fully_shard`` on a mesh of two dimensions), and ours. The output has medians and
quartiles of the slowest rank, ratios, and the bytes that the first host sends per step.

With ``P`` bytes of gradients and ``h`` hosts, each of which holds a whole copy, a host has to send ``2 P (h - 1) / h``:
``P`` between two hosts, once per step.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from ds_topo import PipelineParallelGrid, initialize
from tests.bench.sides import Times, ratios, table, turns
from tests.cluster import Cluster

WIDTH, LAYERS, SAMPLES = 512, 8, 2
GRADIENT_BYTES = 4 * LAYERS * WIDTH * (WIDTH + 1)
HYBRID = "data=2,shard=4"
STEPS = 3
"""The steps of a turn; the first one is not counted."""
Side = tuple[Callable[[], object], Callable[[], object]]


def layers() -> nn.Sequential:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def engine_side(spec: str, stage: int, micro_batches: int, *, reduced: bool) -> Side:
    """Return a step of an engine, and the end of its turn."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "gradient_reducer": {} if reduced and stage < 3 else False,
    }
    engine, *_ = initialize(model=layers(), config=config, mpu=PipelineParallelGrid(spec))
    data = torch.randn(SAMPLES, WIDTH)

    def step() -> None:
        for _ in range(micro_batches):
            engine.backward(engine(data).square().mean())
            engine.step()

    def end() -> None:
        reducer = getattr(engine, "gradient_reducer", None)
        for partition in reducer.options.partitions if reducer is not None else ():
            partition.exchange.rest()

    return step, end


def hsdp_side(micro_batches: int, *, reshards: bool) -> Side:
    """Return a step of FSDP2's hybrid sharding; ``reshards`` frees parameters after forward, as ZeRO 3 does."""
    mesh = PipelineParallelGrid(HYBRID).device_mesh()
    model = layers()
    for part in model:
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(SAMPLES, WIDTH)

    def step() -> None:
        for micro_batch in range(micro_batches):
            model.set_requires_all_reduce(micro_batch == micro_batches - 1)
            model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: None


def sides_of(stage: int, micro_batches: int) -> dict[str, Side]:
    """Return the sides of one comparison."""
    plain = f"data={dist.get_world_size()}"
    return {
        "deepspeed": engine_side(plain, stage, micro_batches, reduced=False),
        "hsdp": hsdp_side(micro_batches, reshards=stage == 3),
        "ours": engine_side(HYBRID, stage, micro_batches, reduced=True),
    }


def measure(cases: list[tuple[int, int]], rounds: int) -> list[tuple[Times, dict[str, float], dict[str, float]]]:
    """Return for each case the times, the MB that this rank's host sends, and the processor seconds per step."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    found = []
    for case in cases:
        seconds: Times = {}
        sides = {
            side: (_counting(step, seconds.setdefault(side, [])), end) for side, (step, end) in sides_of(*case).items()
        }
        times, sent = turns(sides, rounds, warmup=1, steps=STEPS)
        found.append((times, sent, {side: statistics.median(values) for side, values in seconds.items()}))
    return found


def _counting(step: Callable[[], object], seconds: list[float]) -> Callable[[], None]:
    """Return the same step, which also appends its processor time on this rank, gloo's threads included."""

    def counted() -> None:
        before = time.process_time()
        step()
        seconds.append(time.process_time() - before)

    return counted


def main(stages: Sequence[int], counts: Sequence[int], rate: str, rounds: int) -> None:
    """Measure and print."""
    print(f"2 hosts x 4 ranks, link {rate}, P = {GRADIENT_BYTES / 1e6:.1f} MB of gradients, {rounds} turns", flush=True)
    cases = [(stage, count) for stage in stages for count in counts]
    with Cluster(hosts=2, rate=rate) as cluster:
        by_rank = cluster.run_ranks(measure, cases, rounds, ranks_per_host=4, timeout=900)
    for (stage, count), ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        times, sent, _ = ranks[0]
        print(f"\nZeRO {stage}, {count} micro-batches; theory: {GRADIENT_BYTES / 1e6:.1f} MB")
        print(table(times))
        for side, mega in sent.items():
            busy = sum(seconds[side] for _, _, seconds in ranks) / (os.cpu_count() or 1)
            print(
                f"{side:10} sends {mega:5.1f} MB: {8e9 * mega / bits_per_second(rate):6.1f} ms on the link; "
                f"all ranks use all processors for {1e3 * busy:6.1f} ms"
            )
        print(ratios(times, [("ours", "deepspeed"), ("ours", "hsdp")]), flush=True)


def bits_per_second(rate: str) -> float:
    """Return a rate in tc's notation as a number, such as ``400mbit``."""
    number, unit = re.fullmatch(r"(\d+)([mg])bit", rate).groups()  # type: ignore[union-attr]
    return float(number) * {"m": 1e6, "g": 1e9}[unit]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="400mbit", help="of each host's link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 4])
    arguments = parser.parse_args()
    main(arguments.stages, arguments.micro, arguments.rate, arguments.rounds)
