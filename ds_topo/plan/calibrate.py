"""Measure a GPU at hand for the planner: products, attention, memory, update. ``ds-topo check`` measures links."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from ds_topo.base.backends import current_device, synchronize
from ds_topo.plan.hardware import Speeds, cluster_of
from ds_topo.plan.job import BF16, DEEPSPEED, Job, JobLayout
from ds_topo.plan.model import transformer
from ds_topo.plan.stages import Costs
from ds_topo.topology.process_topology import ProcessTopology

ROUNDS, BLOCK_ROUNDS = 15, 5
SMALL_PRODUCT, LARGE_PRODUCT = (8192, 8192, 256), (8192, 8192, 4096)
"""Rows, columns and depth of the measured products."""
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION_SHAPE = (2, 32, 4096, 128)
"""Sequences, heads, positions, and features of a head."""
VECTORS = (16384, 4096)
"""Vectors and their length: more bytes than a GPU's caches hold."""
UPDATED_PARAMETERS = 1 << 26
TINY, LARGE = (1, 8, 64, 2), (4, 2048, 4096, 32)
"""Sequences, positions, hidden width and heads of the measured transformer blocks, in bf16."""


def calibrate() -> Speeds:
    """Measure the current GPU. The others are taken for equal ones."""
    device = current_device()
    name, memory = name_and_memory(device)
    flops: dict[str, float] = {}
    depth = 0
    for number_format, dtype in FORMATS.items():
        small, large = (_product_rate(device, shape, dtype) for shape in (SMALL_PRODUCT, LARGE_PRODUCT))
        shallow, deep = SMALL_PRODUCT[2], LARGE_PRODUCT[2]
        depth = round(_half_at(small, large, shallow, deep))
        flops[number_format] = large * (deep + depth) / deep
    bandwidth = _memory_bandwidth(device)
    kernels = Speeds(
        name=name,
        product_flops=flops,
        depth=depth,
        attention_flops=_attention_flops(device),
        memory_bandwidth=bandwidth,
        launch_seconds=0.0,
        update_bytes=_update_seconds(device) * bandwidth / UPDATED_PARAMETERS,
        memory_bytes=memory,
    )
    return _with_blocks_measured(kernels, device)


def name_and_memory(device: torch.device) -> tuple[str, float]:
    """Return the name of a GPU, and the bytes of its memory."""
    gpus = torch.get_device_module(device)
    return str(gpus.get_device_name(device)), float(gpus.get_device_properties(device).total_memory)


def _with_blocks_measured(speeds: Speeds, device: torch.device) -> Speeds:
    """Return the speeds with ``launch_seconds`` and ``block_share``, measured with transformer blocks.

    Kernels that are measured one by one, each with the caches for itself, are faster than in a program. So the planned
    seconds of a block are compared with that block in torch, forward and backward. A tiny block measures the
    processor's time to launch a kernel. A large block measures the share of the kernels' speeds that remains.
    """
    launches = _planned_seconds(replace(speeds, launch_seconds=1.0), TINY)
    # the median, not the best: programs reach it step after step
    tiny, large = (
        median([_step_seconds(_block_step(shape, device), device) for _ in range(BLOCK_ROUNDS)])
        for shape in (TINY, LARGE)
    )
    share = _planned_seconds(speeds, LARGE) / large
    return replace(speeds, launch_seconds=tiny / launches, block_share=min(1.0, share))


def _planned_seconds(speeds: Speeds, shape: tuple[int, int, int, int]) -> float:
    """Return the planner's prediction for a block, forward and backward."""
    sequences, positions, hidden, heads = shape
    model = transformer(layers=1, hidden=hidden, heads=heads, vocabulary=256, sequence=positions)
    costs = Costs(Job(model, cluster_of(speeds.accelerator(), 1, 1), sequences, positions, BF16, DEEPSPEED))
    layout = JobLayout(ProcessTopology(["data"], [1]), sequences)
    [(_, block, _), *_] = costs.pieces(costs.stage_kinds(layout)[0], layout)
    return block.forward.seconds + block.backward.seconds


def _block_step(shape: tuple[int, int, int, int], device: torch.device) -> Callable[[], None]:
    sequences, positions, hidden, heads = shape
    half = FORMATS["bf16"]
    norms = [torch.nn.LayerNorm(hidden, device=device, dtype=half) for _ in range(2)]
    widths = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    qkv, out, up, down = (torch.nn.Linear(*width, device=device, dtype=half) for width in widths)
    inputs = torch.randn(sequences, positions, hidden, device=device, dtype=half, requires_grad=True)

    def step() -> None:
        query, key, value = qkv(norms[0](inputs)).unflatten(-1, (heads, -1)).transpose(1, 2).chunk(3, -1)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        middle = inputs + out(mixed.transpose(1, 2).flatten(2))
        (middle + down(torch.nn.functional.gelu(up(norms[1](middle))))).sum().backward()

    return step


def _step_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Return the mean seconds of a step, over at least a tenth of a second. The first step is not counted."""
    step()
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < 0.1:
        step()
        done += 1
        synchronize(device)
    return (time.perf_counter() - started) / done


def _best(device: torch.device, work: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds per call of the fastest of a few rounds. The first round is not counted."""
    times = []
    for _ in range(ROUNDS + 1):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        times.append((time.perf_counter() - started) / calls)
    return min(times[1:])


def _product_rate(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    rows, columns, depth = shape
    left = torch.randn(rows, depth, device=device).to(dtype)
    right = torch.randn(columns, depth, device=device).to(dtype)
    seconds = _best(device, lambda: torch.nn.functional.linear(left, right), calls=4)
    return 2.0 * rows * columns * depth / seconds


def _half_at(small: float, large: float, less: int, more: int) -> float:
    """Return where the rate ``rate x / (x + half)`` is half of its limit, from its values at two places.

    >>> _half_at(10.0, 15.0, 32, 96), _half_at(10.0, 10.0, 32, 96), _half_at(1.0, 15.0, 32, 96)  # at most the second
    (32.0, 0.0, 96.0)
    """
    rise = large / small
    curve = 1 / less - rise / more
    return min(float(more), max(0.0, rise - 1) / curve) if curve > 0 else float(more)


def _attention_flops(device: torch.device) -> tuple[float, float]:
    """Return the FLOP/s of attention in forward and in backward."""
    batch, heads, length, width = ATTENTION_SHAPE
    query = torch.randn(ATTENTION_SHAPE, device=device).to(FORMATS["bf16"]).requires_grad_()

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    gradient = torch.ones_like(forward())
    ahead = _best(device, forward)
    both = _best(device, lambda: torch.autograd.grad(forward(), query, gradient))
    flops = 2.0 * batch * heads * length * length * width
    return flops / ahead, 2.5 * flops / max(both - ahead, ahead)


def _memory_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a block's operations beside products: a norm, an activation, a sum."""
    vectors, others = (torch.ones(VECTORS, device=device, dtype=FORMATS["bf16"]) for _ in range(2))
    weight = others[0]

    def pointwise() -> None:
        torch.nn.functional.layer_norm(vectors, weight.shape, weight, weight)
        torch.nn.functional.gelu(vectors)
        torch.add(vectors, others)

    return (4 + 4 + 6) * vectors.numel() / _best(device, pointwise)


def _update_seconds(device: torch.device) -> float:
    """Return the seconds of a fused AdamW for ``UPDATED_PARAMETERS``, with the norm of the gradients."""
    parameters = [torch.nn.Parameter(torch.ones(UPDATED_PARAMETERS // 8, device=device)) for _ in range(8)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return _best(device, update)
