"""Time training steps of a GPT of 10.7 M parameters on two hosts at ZeRO stages 1 and 2, optimizer included.

    OMP_NUM_THREADS=1 python -m tests.bench.zero_overlap [--rate 1gbit] [--rounds 8] [--sides ours]

Compares our reducer with DeepSpeed's own reduction, torch's DDP and FSDP2. A side's turn is several steps. The first is
not counted, because parameters that still arrive when a step returns are part of the next one. Turns alternate in the
same two processes; the output has medians and quartiles of the slower rank. DeepSpeed runs with its faster setting on
this link: stage 1 with its defaults, stage 2 with ``overlap_comm``.

A limit is max(forward, gather) + max(backward, reduce-scatter) + optimizer, each measured alone. One limit uses torch's
``all_to_all_single`` for both exchanges, two in flight at its best size; the other uses our exchanges, which are
faster. Bytes are those that the first rank's host sends in a step.
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
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ds_topo import PipelineParallelGrid, initialize
from ds_topo.reduction.exchange import exchange_of
from tests.bench.sides import Times, medians, ratios, table, turns
from tests.cluster import Cluster
from tests.support.ranks import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import GPTConfig
from parallel_layers import Parallel

from tests.support.gpt_training import PlainGPT, batch

MODEL = GPTConfig(context=128, width=384, heads=6, depth=6)
STEPS = 5
"""The steps of a turn; the first one is not counted."""
TORCHS, OURS = "by all_to_all_single", "by ours"
"""The names of the limits, by the exchanges that they use."""
Step = Callable[[], object]


def engine_step(engine: Any, data: tuple[torch.Tensor, torch.Tensor]) -> tuple[Step, Step]:
    """Return a step of a plain engine, and the end of its turn."""

    def step() -> None:
        engine.backward(engine(*data))
        engine.step()

    def end_turn() -> None:
        """Wait for parameters in flight and stop background work, which would disturb the other sides."""
        reducer = getattr(engine, "gradient_reducer", None)
        if reducer is not None:
            reducer.wait()
            for partition in reducer.options.partitions:
                partition.exchange.rest()

    return step, end_turn


def torch_step(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> tuple[Step, Step]:
    """Return a training step in torch, and the end of its turn."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(*data).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: None


def measure(rounds: int, samples: int, wanted: str) -> tuple[Times, str]:
    """Return times, and bytes and reports as text."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid(f"data={dist.get_world_size()}")
    parallel = Parallel(grid.get_group("model"))
    data = batch(0, range(dist.get_rank() * samples, (dist.get_rank() + 1) * samples), MODEL)

    def engine(stage: int, *, ours: dict[str, Any] | None = None, **zero: Any) -> tuple[Any, tuple[Step, Step]]:
        config = {
            "train_micro_batch_size_per_gpu": samples,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage, **zero},
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            **({} if ours is None else {"gradient_reducer": ours}),
        }
        built, *_ = initialize(model=PlainGPT(parallel, MODEL), config=config, mpu=grid)
        return built, engine_step(built, data)

    def replicated() -> torch.nn.Module:
        return DistributedDataParallel(PlainGPT(parallel, MODEL), gradient_as_bucket_view=True)

    def sharded() -> torch.nn.Module:
        model = PlainGPT(parallel, MODEL)
        for part in model.blocks:
            fully_shard(part, mesh=grid.device_mesh()["data"], reshard_after_forward=False)
        fully_shard(model, mesh=grid.device_mesh()["data"], reshard_after_forward=False)
        return model

    builders: dict[str, Callable[[], tuple[Any, tuple[Step, Step]]]] = {
        "ours, stage 0": lambda: engine(0, ours={}),
        "ours, stage 1": lambda: engine(1, ours={}),
        "ours, stage 1, parameters": lambda: engine(1, ours={"overlap_parameters": True}),
        "ours, stage 2, parameters": lambda: engine(2, ours={"overlap_parameters": True}),
        "deepspeed, stage 0": lambda: engine(0),
        "deepspeed, stage 1": lambda: engine(1),
        "deepspeed, stage 2": lambda: engine(2, overlap_comm=True),
        "ddp": lambda: (None, torch_step(replicated(), data)),
        "fsdp2": lambda: (None, torch_step(sharded(), data)),
    }
    built = {name: build() for name, build in builders.items() if wanted in name}
    sides = {name: both for name, (_, both) in built.items()} | parts(parallel, data)
    times, sent = turns(sides, rounds, warmup=2, steps=STEPS)
    weights = [f"{name:28} {sent[name]:8.2f} MB sent" for name in sides]
    reducers = {name: getattr(owner, "gradient_reducer", None) for name, (owner, _) in built.items()}
    reports = {name: reducer.report() for name, reducer in reducers.items() if reducer is not None}
    texts = ["\n".join(weights), *(f"{name}\n{report}" for name, report in reports.items())]
    return times, "\n\n".join(texts)


def parts(parallel: Parallel, data: Any) -> dict[str, tuple[Step, Step]]:
    """Return the operations that the limits are made of."""
    model = PlainGPT(parallel, MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses: list[torch.Tensor] = []
    model(*data).backward()
    numel = sum(parameter.numel() for parameter in model.parameters())
    world = dist.group.WORLD
    assert world is not None
    size = dist.get_world_size()
    flat = torch.zeros(numel // (2 * size) * 2 * size)
    exchange = exchange_of(world, flat.device)

    def backward() -> None:
        losses.append(model(*data))
        losses.pop().backward()

    return {
        "forward": (lambda: model(*data), lambda: None),
        "forward and backward": (backward, lambda: None),
        "optimizer": (optimizer.step, lambda: None),
        f"gather {TORCHS}": (lambda: exchange_by_torch(flat, 2 << 20), lambda: None),
        f"gather {OURS}": (lambda: exchange.gather(flat).wait(), exchange.rest),
        f"reduce-scatter {TORCHS}": (lambda: exchange_by_torch(flat, 4 << 20), lambda: None),
        f"reduce-scatter {OURS}": (lambda: exchange.reduce_scatter(flat).wait(), exchange.rest),
    }


def exchange_by_torch(flat: torch.Tensor, nbytes: int) -> None:
    """Exchange a tensor by ``all_to_all_single``, ``nbytes`` in each and two at a time; nothing is summed."""
    under_way: list[dist.Work] = []
    for piece in flat.split(nbytes // flat.itemsize):
        if len(under_way) == 2:
            under_way.pop(0).wait()
        work = dist.all_to_all_single(torch.empty_like(piece), piece, async_op=True)
        assert work is not None
        under_way.append(work)
    for work in under_way:
        work.wait()


def limit(times: Times, exchanges: str) -> float:
    """Return the limit in milliseconds."""
    middle = medians(times)
    backward = middle["forward and backward"] - middle["forward"]
    gather, reduce_scatter = middle[f"gather {exchanges}"], middle[f"reduce-scatter {exchanges}"]
    return max(middle["forward"], gather) + max(backward, reduce_scatter) + middle["optimizer"] / 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="rate of each host's link; 'none' runs all ranks on one host")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks with --rate none")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="samples of 128 bytes, per rank")
    parser.add_argument("--sides", default="", help="run only the sides with this text in their names")
    arguments = parser.parse_args()
    work = (measure, arguments.rounds, arguments.samples, arguments.sides)
    if arguments.rate == "none":
        times, report = run_ranks(arguments.ranks, *work, deadline=900)[0]
    else:
        with Cluster(hosts=2, rate=arguments.rate) as cluster:
            times, report = cluster.run_ranks(*work, timeout=900)[0]
    print(f"link {arguments.rate}, {arguments.samples} samples per rank, {arguments.rounds} turns of {STEPS - 1} steps")
    print(table(times))
    limits = {f"limit {exchanges}": limit(times, exchanges) for exchanges in (TORCHS, OURS)}
    for name, milliseconds in limits.items():
        print(f"{name:{max(map(len, times))}} {milliseconds:8.1f} ms")
    best = {**times, **{name: [milliseconds / 1e3] for name, milliseconds in limits.items()}}
    pairs = [
        (other, ours)
        for ours in times
        for other in best
        if ours.startswith("ours") and not other.startswith(("ours", "forward", "optimizer", "gather", "reduce"))
    ]
    for pair in pairs:
        print(ratios(best, [pair]))
    print(f"\n{report}")


if __name__ == "__main__":
    main()
