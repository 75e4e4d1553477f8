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


def measure(cases: list[tuple[int, int]], rounds: int) -> list[tuple[Times, dict[str, float]]]:
    """Return for each case the times, and the MB that this rank's host sends per step."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    return [turns(sides_of(*case), rounds, warmup=1, steps=STEPS) for case in cases]


def main(stages: Sequence[int], counts: Sequence[int], rate: str, rounds: int) -> None:
    """Measure and print."""
    print(f"2 hosts x 4 ranks, link {rate}, P = {GRADIENT_BYTES / 1e6:.1f} MB of gradients, {rounds} turns", flush=True)
    cases = [(stage, count) for stage in stages for count in counts]
    with Cluster(hosts=2, rate=rate) as cluster:
        found = cluster.run_ranks(measure, cases, rounds, ranks_per_host=4, timeout=900)[0]
    for (stage, count), (times, sent) in zip(cases, found, strict=True):
        print(f"\nZeRO {stage}, {count} micro-batches; theory: {GRADIENT_BYTES / 1e6:.1f} MB")
        print(table(times))
        print("  ".join(f"{side} {mega:.1f} MB" for side, mega in sent.items()))
        print(ratios(times, [("ours", "deepspeed"), ("ours", "hsdp")]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="400mbit", help="of each host's link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 4])
    arguments = parser.parse_args()
    main(arguments.stages, arguments.micro, arguments.rate, arguments.rounds)
