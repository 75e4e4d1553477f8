"""A transformer block at work: what it takes beyond its kernels, and how many ranks can work at the same time.

Kernels that are measured one by one, each with the caches for itself, promise more than a program reaches. So what
the planner says of a block is held against that block in torch, forward and backward: a tiny one shows what it takes to
start a kernel with all that torch does around it, a large one what is left of the kernels' speeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from ds_topo.planner.cluster import cluster_of
from ds_topo.planner.costs import Costs
from ds_topo.planner.layout import Job, Layout
from ds_topo.planner.machine import Speeds
from ds_topo.planner.model import transformer
from ds_topo.planner.precision import FP32
from ds_topo.planner.software import DEEPSPEED
from ds_topo.topology.process_topology import ProcessTopology

if TYPE_CHECKING:
    import torch

ROUNDS = 5


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a block and of its input ``[sequences, positions, hidden]``."""

    sequences: int
    positions: int
    hidden: int
    heads: int


TINY, LARGE = BlockShape(1, 8, 32, 2), BlockShape(16, 256, 128, 4)
"""The large one's activations leave the caches, as those of programs do."""


def with_blocks_measured(speeds: Speeds, device: torch.device) -> Speeds:
    """The speeds with ``kernel_seconds`` and ``block_share`` from blocks on this device."""
    without_starts = replace(speeds, kernel_seconds=0.0)
    per_start = planned_seconds(replace(speeds, kernel_seconds=1.0), TINY) - planned_seconds(without_starts, TINY)
    # not the best: what programs reach, step after step
    tiny, large = (
        median([_timed(block_step(shape, device), device) for _ in range(ROUNDS)]) for shape in (TINY, LARGE)
    )
    starts = max(0.0, tiny - planned_seconds(without_starts, TINY)) / per_start
    left = large - starts * per_start
    share = planned_seconds(without_starts, LARGE) / left if left > 0 else 1.0
    return replace(speeds, kernel_seconds=starts, block_share=min(1.0, share))


def planned_seconds(speeds: Speeds, shape: BlockShape) -> float:
    """What the planner says that a block takes, forward and backward."""
    model = transformer(layers=1, hidden=shape.hidden, heads=shape.heads, vocabulary=256, sequence=shape.positions)
    cluster = cluster_of(speeds.accelerator(), 1, 1)
    costs = Costs(Job(model, cluster, shape.sequences, shape.positions, FP32, DEEPSPEED))
    layout = Layout(ProcessTopology(["data"], [1]), shape.sequences)
    [(_, block, _), *_] = costs.pieces(costs.stage_kinds(layout)[0], layout)
    return block.forward + block.backward


def block_step(shape: BlockShape, device: torch.device) -> Callable[[], None]:
    """Forward and backward of such a block in torch."""
    import torch

    hidden = shape.hidden
    norms = [torch.nn.LayerNorm(hidden).to(device) for _ in range(2)]
    widths = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    qkv, out, up, down = (torch.nn.Linear(*width).to(device) for width in widths)
    inputs = torch.randn(shape.sequences, shape.positions, hidden, device=device, requires_grad=True)

    def step() -> None:
        query, key, value = qkv(norms[0](inputs)).unflatten(-1, (shape.heads, -1)).transpose(1, 2).chunk(3, -1)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        middle = inputs + out(mixed.transpose(1, 2).flatten(2))
        (middle + down(torch.nn.functional.gelu(up(norms[1](middle))))).sum().backward()

    return step


def _timed(step: Callable[[], None], device: torch.device) -> float:
    return 1 / rate(step, device, 0.1)


def rate(step: Callable[[], object], device: torch.device, seconds: float, times: int = 1) -> float:
    """Steps per second over at least so long, and so many times."""
    import torch

    step()
    done, started = 0, time.perf_counter()
    while done < times or time.perf_counter() - started < seconds:
        step()
        done += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return done / (time.perf_counter() - started)
