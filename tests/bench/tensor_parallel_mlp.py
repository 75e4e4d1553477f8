"""Time a tensor-parallel MLP, forward and backward: our collectives and torch's ``parallelize_module``.

    OMP_NUM_THREADS=1 python -m tests.bench.tensor_parallel_mlp

Both sides run alternately in the same two processes; the output has medians, quartiles, and the bytes that each sends.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ds_topo import PipelineParallelGrid
from ds_topo.layers import ParallelLinear
from tests.support.counted_collectives import forward_and_backward
from tests.support.ranks import run_ranks

WIDTH, ROUNDS = 256, 60
SHAPES = {"small, [4, 16, 256]": (4, 16), "large, [8, 128, 256]": (8, 128)}


class OurMLP(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.expand = ParallelLinear(WIDTH, 4 * WIDTH, dim=-1, group=group)
        self.contract = ParallelLinear(4 * WIDTH, WIDTH, dim=0, group=group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.contract(F.gelu(self.expand(hidden)))
        return result


def _measure() -> list[str]:
    grid = PipelineParallelGrid("model=2")
    ours = OurMLP(grid.get_group("model"))
    torchs = parallelize_module(
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
        grid.device_mesh(),
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )
    lines = []
    for name, shape in SHAPES.items():
        inputs = torch.randn(*shape, WIDTH, requires_grad=True)
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        for _ in range(ROUNDS):
            for side, module in (("ours", ours), ("torch", torchs)):
                dist.barrier()
                started = time.perf_counter()
                module(inputs).sum().backward()
                times[side].append(1e3 * (time.perf_counter() - started))
        medians = {side: statistics.median(values[5:]) for side, values in times.items()}
        for side, values in times.items():
            low, _, high = statistics.quantiles(values[5:], n=4)
            lines.append(f"{name:22} {side:6} {medians[side]:7.2f} ms  (quartiles {low:.2f} to {high:.2f})")
        lines.append(f"{name:22} ratio  {medians['torch'] / medians['ours']:7.2f}  (torch's time over ours)")
    for side, module in (("ours", ours), ("torch", torchs)):
        forward, backward = forward_and_backward(module, torch.randn(4, 16, WIDTH, requires_grad=True))
        for direction, counted in (("forward", forward), ("backward", backward)):
            lines.append(f"{side:6} {direction:8} {dict(counted.calls)} {dict(counted.sent_bytes)} bytes")
    return lines


if __name__ == "__main__":
    print("\n".join(run_ranks(2, _measure)[0]))
