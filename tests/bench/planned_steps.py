"""Compare the planner's seconds and bytes with real training steps on one GPU.

    python -m tests.bench.planned_steps [--steps 10] [--machine machine.json]

Trains GPTs of several sizes in bf16 with DeepSpeed's engine on a grid of one rank, and prints seconds per step and peak
memory beside two predictions: by the speeds that ``ds-topo plan --calibrate`` measures (or that ``--machine`` has), and
by the table's numbers for this GPU, if it has them.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_topo import PipelineParallelGrid, initialize
from ds_topo.errors import TopologyError
from ds_topo.plan.calibrate import calibrate
from ds_topo.plan.hardware import Accelerator, accelerator_of, cluster_of, read_machine
from ds_topo.plan.job import BF16, DEEPSPEED, Job, JobLayout
from ds_topo.plan.model import transformer
from ds_topo.plan.search import Plan, evaluate
from ds_topo.topology.process_topology import ProcessTopology
from tests.support.ports import free_port

VOCABULARY = 50304


@dataclass(frozen=True)
class Size:
    """A GPT, the sequences of a micro-batch, their length, and the micro-batches of a step."""

    layers: int
    hidden: int
    heads: int
    sequences: int
    positions: int
    passes: int = 1
    zero: int = 1


SIZES = (
    Size(12, 768, 12, 16, 1024),
    Size(24, 1024, 16, 8, 1024),
    Size(24, 1024, 16, 8, 1024, passes=4, zero=0),
    Size(24, 2048, 16, 4, 2048, zero=2),
    Size(8, 4096, 32, 4, 2048),
    Size(4, 8192, 64, 1, 4096),
    Size(12, 256, 4, 8, 256),
    Size(8, 4096, 32, 1, 8192, zero=3),
)
"""The last one is at ZeRO 3: DeepSpeed keeps the memory of such an engine until the process ends."""


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        done: torch.Tensor = hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))
        return done


class GPT(nn.Module):
    """A GPT with learned positions and the embedding tied to the output; forward returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.hidden)
        self.positions = nn.Parameter(torch.zeros(size.positions, size.hidden))
        self.blocks = nn.Sequential(*(Block(size.hidden, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.blocks(self.embedding(tokens) + self.positions))
        logits = F.linear(hidden, self.embedding.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def predict(size: Size, accelerator: Accelerator) -> Plan:
    """Return the planner's prediction."""
    model = transformer(
        layers=size.layers, hidden=size.hidden, heads=size.heads, vocabulary=VOCABULARY, sequence=size.positions
    )
    batch = size.sequences * size.passes
    job = Job(model, cluster_of(accelerator, 1, 1), batch, size.positions, BF16, DEEPSPEED)
    return evaluate(job, JobLayout(ProcessTopology(["data"], [1]), size.sequences, size.zero))


def measure(size: Size, grid: PipelineParallelGrid | None, steps: int, **ours: Any) -> tuple[float, float]:
    """Return the median seconds of a step, and the peak bytes; without a grid, those of DeepSpeed alone."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = GPT(size).bfloat16()
    config = {
        "train_micro_batch_size_per_gpu": size.sequences,
        "gradient_accumulation_steps": size.passes,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": size.zero},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
        "steps_per_print": 10**9,
        **ours,
    }
    start = initialize if ours else deepspeed.initialize
    engine, *_ = start(model=model, config=config, mpu=grid)
    tokens = torch.randint(VOCABULARY, (size.sequences, size.positions), device="cuda")
    seconds = []
    for _ in range(steps + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(size.passes):
            engine.backward(engine(tokens))
            engine.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    engine.destroy()
    return median(seconds[3:]), float(torch.cuda.max_memory_allocated())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--machine", help="a file of ds-topo plan --calibrate; default: measure now")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no NVIDIA GPU here: run it on a machine that has one")
    warnings.simplefilter("ignore")
    speeds = read_machine(arguments.machine).speeds if arguments.machine else calibrate()
    print(speeds)
    assert speeds is not None
    known = {"measured": speeds.accelerator()}
    name = torch.cuda.get_device_name().split()[1]
    with suppress(TopologyError):  # it is not in the table
        known[f"table's {name}"] = accelerator_of(name)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
    store = dist.TCPStore("127.0.0.1", free_port(), 1, is_master=True)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=1") as grid:
        for size in SIZES:
            seconds, peak = measure(size, grid, arguments.steps)
            print(f"{size}: {1e3 * seconds:.1f} ms, peak {peak / 1e9:.2f} GB")
            others = {}
            if size.zero < 3:
                others["DeepSpeed alone"] = measure(size, None, arguments.steps)
                others["with the reducer"] = measure(size, grid, arguments.steps, gradient_reducer={})
            for name, (other, used) in others.items():
                print(f"  {name}: {1e3 * other:.1f} ms ({other / seconds:.2f}x), peak {used / 1e9:.2f} GB")
            for name, accelerator in known.items():
                plan = predict(size, accelerator)
                print(
                    f"  by {name}: {1e3 * plan.seconds:.1f} ms ({plan.seconds / seconds - 1:+.1%}), "
                    f"{plan.memory.total / 1e9:.2f} GB ({plan.memory.total / peak - 1:+.1%})",
                    flush=True,
                )
                print("   ", {key: round(1e3 * value, 2) for key, value in plan.time.parts().items() if value})
                print("   ", {key: round(value / 1e9, 2) for key, value in plan.memory.parts().items() if value})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
