"""One step's gradients of a GPT of 10.7 M parameters on two hosts: our reducer, torch's DDP and DeepSpeed's stage 0.

    OMP_NUM_THREADS=1 python -m tests.bench.gradient_overlap [--rate 1gbit] [--rounds 12] [--trace trace.json]

Forward, backward and reduction, without the optimizer. All sides run alternately in the same two processes; medians and
quartiles of the slower rank. ``limit`` is forward + max(backward, all_reduce), each measured alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo import GradientReducer, PipelineParallelGrid
from tests.cluster import Cluster
from tests.ranks import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import GPTConfig
from parallel_layers import Parallel

from tests.gpt_training import PlainGPT, batch

MODEL = GPTConfig(context=128, width=384, heads=6, depth=6)
SAMPLES = int(__import__("os").environ.get("SAMPLES", 4))


def engine_of(module: nn.Module, grid: PipelineParallelGrid, **more: Any) -> Any:
    """DeepSpeed's engine at stage 0."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        **more,
    }
    engine, *_ = deepspeed.initialize(model=module, config=config, mpu=grid)
    return engine


def timed(step: Callable[[], None]) -> float:
    """Seconds of the slower rank."""
    dist.barrier()
    started = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def measure(rounds: int) -> tuple[dict[str, list[float]], str, dict[str, Any]]:
    """Seconds of every round by side, our report, and its trace."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid(f"data={dist.get_world_size()}")
    parallel = Parallel(grid.get_group("model"))
    data = batch(0, range(dist.get_rank() * SAMPLES, (dist.get_rank() + 1) * SAMPLES), MODEL)
    alone, ours, ddp, ds = (PlainGPT(parallel, MODEL) for _ in range(4))
    reducer = GradientReducer(ours, grid=grid, **eval(__import__("os").environ.get("OPTS", "{}")))
    wrapped = DistributedDataParallel(ddp, gradient_as_bucket_view=True)
    engine = engine_of(ds, grid)
    flat = torch.zeros(sum(parameter.numel() for parameter in alone.parameters()))
    losses: list[torch.Tensor] = []

    def our_step() -> None:
        ours(*data).backward()
        reducer.finish()

    sides: dict[str, Callable[[], None]] = {
        "forward": lambda: losses.append(alone(*data)),
        "backward": lambda: losses.pop().backward(),
        "all_reduce": lambda: dist.all_reduce(flat),
        "ours": our_step,
        "ddp": lambda: wrapped(*data).backward(),
        "deepspeed": lambda: engine.backward(engine(*data)),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds + 2):
        for module in (alone, ours, ddp, ds):
            module.zero_grad()
        for side, step in sides.items():
            times[side].append(timed(step))
    report = reducer.report()
    return {side: values[2:] for side, values in times.items()}, report.table(), report.chrome_trace()


def table(times: dict[str, list[float]]) -> str:
    """Medians, quartiles and ratios."""
    lines = []
    medians = {side: 1e3 * statistics.median(values) for side, values in times.items()}
    for side, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        lines.append(f"{side:12} {medians[side]:8.1f} ms  (quartiles {1e3 * low:.1f} to {1e3 * high:.1f})")
    limit = medians["forward"] + max(medians["backward"], medians["all_reduce"])
    lines.append(f"{'limit':12} {limit:8.1f} ms")
    ours = medians["ours"]
    lines.append(f"deepspeed / ours {medians['deepspeed'] / ours:.2f}, ddp / ours {medians['ddp'] / ours:.2f}")
    lines.append(f"ours / limit {ours / limit:.2f}, ddp / limit {medians['ddp'] / limit:.2f}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of each host's link; 'none': two ranks on one host")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--trace", help="write the first rank's timeline here, for https://ui.perfetto.dev")
    arguments = parser.parse_args()
    if arguments.rate == "none":
        times, report, trace = run_ranks(2, measure, arguments.rounds, deadline=600)[0]
    else:
        with Cluster(hosts=2, rate=arguments.rate) as cluster:
            times, report, trace = cluster.run_ranks(measure, arguments.rounds, timeout=600)[0]
    print(f"link: {arguments.rate}, {arguments.rounds} rounds\n{table(times)}\n\n{report}")
    if arguments.trace:
        import json

        Path(arguments.trace).write_text(json.dumps(trace))


if __name__ == "__main__":
    main()
