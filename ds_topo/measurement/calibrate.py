"""Measure what the planner needs to know of the machine at hand: products, attention, memory, update, links.

torch is imported inside the functions. Under a launcher every rank takes part: all compute at the same time, so that
ranks which share processors measure their share, and the links between hosts are measured too.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from ds_topo.measurement.block import LARGE, block_step, rate, with_blocks_measured
from ds_topo.planner.cluster import Link
from ds_topo.planner.machine import Machine, Speeds
from ds_topo.process_groups.grid import ProcessGrid
from ds_topo.topology.rank_tables import RankGroup

if TYPE_CHECKING:
    import torch

ROUNDS, MESSAGE_ROUNDS = 15, 5
MESSAGE_BYTES = 8 << 20
SMALL_PRODUCT, LARGE_PRODUCT = (512, 512, 64), (512, 512, 1024)
ATTENTION_SHAPE = (4, 4, 256, 64)
SMALL_ATTENTION = 32, 16
"""Positions, and features of a head."""
VECTOR = 1 << 21
UPDATED_PARAMETERS = 1 << 21


def calibrate() -> Machine:
    """Measure; collective over the process group where there is one, which every rank then knows the result of."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if not dist.is_initialized():
        slots = torch.cuda.device_count() if device.type == "cuda" else 1
        cores = float(os.cpu_count() or 1)
        return Machine(1, slots, measure_speeds(device, slots if device.type == "cuda" else cores))
    hosts = _hosts()
    slots = len(next(iter(hosts.values())))
    step = block_step(LARGE, device)
    rate(step, device, 1.0)  # the first second of a process is a slow one: memory that nothing has touched
    together = fmean(_of_all(rate(step, device, 2.0)))
    alone = _best_alone(lambda: rate(step, device, 0.5))
    ranks = dist.get_world_size()
    processors = min(float(ranks), ranks * together / alone, _processors(device))
    # speeds of a rank that has a processor for itself: one after the other where they would share
    measure: Callable[[], Speeds] = lambda: measure_speeds(device, processors)  # noqa: E731
    speeds = _from_first(measure()) if processors > 0.9 * ranks else _alone_on_first(measure)
    inside, across = _links(device, hosts)
    return Machine(len(hosts), slots, speeds, inside, across, _start_seconds(device, inside, across))


def measure_speeds(device: torch.device, processors: float) -> Speeds:
    """What this process's device does."""
    import torch
    import torch.distributed as dist

    formats = {"fp32": torch.float32}
    if device.type == "cuda":
        formats |= {"bf16": torch.bfloat16, "fp16": torch.float16}
    flops: dict[str, float] = {}
    depth = 0
    for name, dtype in formats.items():
        small, large = (_product_rate(device, shape, dtype) for shape in (SMALL_PRODUCT, LARGE_PRODUCT))
        shallow, deep = SMALL_PRODUCT[2], LARGE_PRODUCT[2]
        depth = round(_half_at(small, large, shallow, deep))
        flops[name] = large * (deep + depth) / deep
    bandwidth = _memory_bandwidth(device)
    update = _update_seconds(device) * bandwidth / UPDATED_PARAMETERS
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _host_memory()
    backend = dist.get_backend() if dist.is_initialized() else "gloo"
    attention, half = _attention(device, formats.get("bf16", torch.float32))
    kernels = Speeds(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "nccl" if device.type == "cuda" and backend != "gloo" else "gloo",
        flops,
        depth,
        attention,
        bandwidth,
        0.0,
        update,
        memory,
        processors,
        half,
    )
    return with_blocks_measured(kernels, device)


# -- one device ----------------------------------------------------------------------------------------------------


def _best(device: torch.device, work: Callable[[], object], calls: int = 1, rounds: int = ROUNDS) -> float:
    """Seconds of the fastest of a few rounds, per call."""
    times = []
    for _ in range(rounds + 1):
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        _synchronize(device)
        times.append((time.perf_counter() - started) / calls)
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _product_seconds(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    import torch

    rows, columns, depth = shape
    left = torch.randn(rows, depth, device=device).to(dtype)
    right = torch.randn(columns, depth, device=device).to(dtype)
    return _best(device, lambda: torch.nn.functional.linear(left, right), calls=4)


def _product_rate(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    if device.type == "cuda":  # a GPU needs more to fill it
        shape = (16 * shape[0], 16 * shape[1], 4 * shape[2])
    rows, columns, depth = shape
    return 2.0 * rows * columns * depth / _product_seconds(device, shape, dtype)


def _half_at(small: float, large: float, less: int, more: int) -> float:
    """Where a rate is half of what it tends to, if it is ``rate x / (x + half)``: from its values at two places.

    >>> _half_at(10.0, 15.0, 32, 96), _half_at(10.0, 10.0, 32, 96), _half_at(1.0, 15.0, 32, 96)  # at most the second
    (32.0, 0.0, 96.0)
    """
    rise = large / small
    curve = 1 / less - rise / more
    return min(float(more), max(0.0, rise - 1) / curve) if curve > 0 else float(more)


def _attention(device: torch.device, dtype: torch.dtype) -> tuple[tuple[float, float], tuple[float, float]]:
    """FLOP/s of attention in forward and in backward, of long sequences and wide heads, and where they are half."""
    if device.type == "cuda":  # its table has where
        return _attention_flops(device, dtype, ATTENTION_SHAPE), (0.0, 0.0)
    batch, heads, length, width = ATTENTION_SHAPE
    short, narrow = SMALL_ATTENTION
    ahead, back = _attention_flops(device, dtype, ATTENTION_SHAPE)
    of_short, _ = _attention_flops(device, dtype, (batch * length // short, heads, short, width))
    of_narrow, _ = _attention_flops(device, dtype, (batch, heads, length, narrow))
    half = _half_at(of_short, ahead, short, length), _half_at(of_narrow, ahead, narrow, width)
    whole = (length + half[0]) / length * (width + half[1]) / width
    return (ahead * whole, back * whole), half


def _attention_flops(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> tuple[float, float]:
    import torch

    batch, heads, length, width = shape
    query = torch.randn(shape, device=device).to(dtype).requires_grad_()

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    gradient = torch.ones_like(forward())
    ahead = _best(device, forward)
    both = _best(device, lambda: torch.autograd.grad(forward(), query, gradient))
    flops = 2.0 * batch * heads * length * length * width
    return flops / ahead, 2.5 * flops / max(both - ahead, ahead)


def _memory_bandwidth(device: torch.device) -> float:
    """Bytes per second of what a block does beside products: a norm, an activation, a sum."""
    import torch

    vector = torch.ones(VECTOR // 256, 256, device=device)
    weight = torch.ones(256, device=device)

    def pointwise() -> None:
        torch.nn.functional.layer_norm(vector, (256,), weight, weight)
        torch.nn.functional.gelu(vector)
        torch.add(vector, vector)

    return (8 + 8 + 12) * VECTOR / _best(device, pointwise)


def _update_seconds(device: torch.device) -> float:
    """Of torch's AdamW for ``UPDATED_PARAMETERS``, with the norm of the gradients."""
    import torch

    parameters = [torch.nn.Parameter(torch.ones(UPDATED_PARAMETERS // 8, device=device)) for _ in range(8)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return _best(device, update)


def _host_memory() -> float:
    """Bytes of this machine's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


# -- all ranks -----------------------------------------------------------------------------------------------------


def _hosts() -> dict[str, list[int]]:
    """The ranks on every host; collective."""
    import torch.distributed as dist

    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return hosts


def _processors(device: torch.device) -> float:
    """Of all computers at hand, for ranks on CPUs; each counts once, whatever its ranks take it for; collective."""
    import torch.distributed as dist

    if device.type != "cpu":
        return float("inf")
    boot = Path("/proc/sys/kernel/random/boot_id")
    computer = boot.read_text() if boot.exists() else socket.gethostname()
    found: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
    dist.all_gather_object(found, (computer, os.cpu_count() or 1))
    return float(sum(dict(found).values()))


def _of_all(value: float) -> list[float]:
    """What each rank measured; collective."""
    import torch.distributed as dist

    everyone: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _best_alone(measure: Callable[[], float]) -> float:
    """The largest of what the first ranks measure one by one, while all others wait; collective."""
    import torch.distributed as dist

    times = []
    for rank in range(min(2, dist.get_world_size())):
        dist.barrier()
        value = [measure() if dist.get_rank() == rank else 0.0]
        dist.broadcast_object_list(value, src=rank)
        times.append(value[0])
    return max(times)


def _alone_on_first(measure: Callable[[], Speeds]) -> Speeds:
    """What rank 0 measures while all others wait; collective."""
    import torch.distributed as dist

    dist.barrier()
    return _from_first(measure() if dist.get_rank() == 0 else None)


def _from_first(speeds: Speeds | None) -> Speeds:
    import torch.distributed as dist

    value: list[Any] = [speeds]
    dist.broadcast_object_list(value, src=0)
    result: Speeds = value[0]
    return result


def _links(device: torch.device, hosts: dict[str, list[int]]) -> tuple[Link | None, Link | None]:
    """Of a rank to a peer on its host, and of a host to another with all ranks at work; collective."""
    import torch.distributed as dist

    rank, teams = dist.get_rank(), list(hosts.values())
    slots = len(teams[0])
    place = {member: (index, team.index(member)) for index, team in enumerate(teams) for member in team}
    mine, local = place[rank]
    inside = across = None
    with ProcessGrid("data=-1") as grid:
        if slots > 1:
            peer = local ^ 1
            inside = _link(device, grid, teams[mine][peer] if peer < len(teams[mine]) else None, 1)
        if len(teams) > 1:
            team = teams[mine ^ 1] if mine ^ 1 < len(teams) else []
            across = _link(device, grid, team[local] if local < len(team) else None, slots)
    return inside, across


def _link(device: torch.device, grid: ProcessGrid, peer: int | None, together: int) -> Link:
    """Latency of messages of the first pair alone; bandwidth of sums of all pairs at the same time, as most bytes of a
    step are those of all_reduces. ``together`` pairs share a link."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    pair = None
    if peer is not None:
        ends = (min(rank, peer), max(rank, peer))
        pair = grid.create_group(RankGroup((f"ranks {ends[0]} and {ends[1]}",), ends))
    large, small = torch.ones(MESSAGE_BYTES // 4, device=device), torch.ones(1, device=device)

    def there_and_back() -> None:
        assert peer is not None
        if rank < peer:
            dist.send(small, peer)
            dist.recv(small, peer)
        else:
            dist.recv(small, peer)
            dist.send(small, peer)

    dist.barrier()
    is_first = peer is not None and min(rank, peer) == 0
    latency = _best(device, there_and_back, 20, MESSAGE_ROUNDS) / 2 if is_first else 0.0
    latency = max(_of_all(latency))
    dist.barrier()
    # the mean, not the best: a round in which other pairs pause has the link alone
    seconds = 0.0 if pair is None else 1 / rate(lambda: dist.all_reduce(large, group=pair), device, 0.0, MESSAGE_ROUNDS)
    seconds = median(number for number in _of_all(seconds) if number)
    return Link(together * MESSAGE_BYTES / max(seconds - 2 * latency, 1e-9), latency)


def _start_seconds(device: torch.device, inside: Link | None, across: Link | None) -> float:
    """What a small all_reduce over all ranks takes beside its hops; collective."""
    import torch
    import torch.distributed as dist

    value = torch.ones(1, device=device)
    dist.barrier()
    seconds = median(_of_all(_best(device, lambda: dist.all_reduce(value), 20, MESSAGE_ROUNDS)))
    ranks = dist.get_world_size()
    hops = (across.latency if across else 0.0) * 2 + (inside.latency if inside else 0.0) * max(0, ranks - 2)
    return max(seconds - hops, 0.0)
