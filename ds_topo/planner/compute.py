"""Seconds of products, attention and memory-bound kernels on one accelerator."""

from __future__ import annotations

from ds_topo.planner.accelerators import Accelerator
from ds_topo.planner.work import Core, Pass, Product

TILE = (128, 256)
"""Rows and columns of the result that one multiprocessor works on at a time."""


def product_seconds(product: Product, accelerator: Accelerator) -> float:
    """A matrix product: the longer of computing and of moving its operands.

    Computing reaches ``e x w / (w + 1/2) x k / (k + k0)`` of the peak: ``e`` for the largest products; ``w`` tiles per
    multiprocessor, of which on average half a round is lost at the end (Narayanan et al., section 4.3 of the later
    study of tile and wave quantization by Anthony et al., arXiv:2401.14489); and ``k0`` terms for a tile's start and
    end.
    """
    efficiency = accelerator.efficiency
    share = efficiency.products[product.format]
    if efficiency.processors:
        tiles = max(1.0, product.m / TILE[0]) * max(1.0, product.n / TILE[1]) * max(1.0, product.count)
        waves = tiles / efficiency.processors
        share *= waves / (waves + 0.5)
    share *= product.k / (product.k + efficiency.product_depth)
    computing = product.flops / (accelerator.peak(product.format) * share)
    operand = 1.0 if product.format == "fp8" else 4.0 if product.format == "fp32" else 2.0
    moved = operand * product.k * (product.m + product.n) + product.result_bytes * product.m * product.n
    moving = moved * product.count / (accelerator.memory_bandwidth * efficiency.memory)
    return max(computing, moving)


def core_seconds(core: Core, accelerator: Accelerator) -> float:
    """Attention's core in one kernel; a head's width and the length decide how much of the peak it reaches."""
    efficiency = accelerator.efficiency
    share = efficiency.attention_backward if core.backward else efficiency.attention_forward
    share *= core.length / (core.length + efficiency.attention_length)
    share *= core.width / (core.width + efficiency.attention_width)
    if efficiency.processors:
        share *= min(1.0, (core.width / 128) ** 0.5)
    return core.flops / (accelerator.peak(core.format) * share)


def pass_seconds(work: Pass, accelerator: Accelerator) -> float:
    """A pass without its messages."""
    efficiency = accelerator.efficiency
    products = sum(product_seconds(product, accelerator) for product in work.products)
    cores = sum(core_seconds(core, accelerator) for core in work.cores)
    moving = work.memory_bytes / (accelerator.memory_bandwidth * efficiency.memory)
    kernels = (work.kernels + len(work.products)) * efficiency.kernel_seconds
    return products + cores + moving + kernels
