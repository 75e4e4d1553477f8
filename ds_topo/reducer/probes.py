"""What is measured once, when a reducer is built; every rank of the group comes to the same answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.planning import MIB
from ds_topo.reducer.two_level import TwoLevelReduction

_ROUNDS = 3
_SMALL_BUCKET_BYTES = 4 * MIB
_LARGE_BUCKET_BYTES = 25 * MIB
_SLOW_LINK_SECONDS = 0.01
"""A link is slow if a small bucket takes longer on it."""


def suitable_bucket_bytes(group: ProcessGroup, device: torch.device) -> int:
    """A bucket's capacity for the speed of the link; collective over ``group``.

    On a slow link (below about 3 Gbit/s) communication takes longest, and small buckets let it start early; on a fast
    one launches disturb backward, and large ones, as torch's DDP has them, are better.
    """
    if dist.get_world_size(group) == 1:
        return _LARGE_BUCKET_BYTES
    bucket = torch.zeros(_SMALL_BUCKET_BYTES // 4, device=device)
    (seconds,) = _best_seconds([lambda: dist.all_reduce(bucket, group=group)], group, device)
    return _SMALL_BUCKET_BYTES if seconds > _SLOW_LINK_SECONDS else _LARGE_BUCKET_BYTES


def is_two_level_faster(two_level: TwoLevelReduction, group: ProcessGroup, probe: torch.Tensor) -> bool:
    """Reduce ``probe`` both ways, alternating; collective over ``group``."""

    def reduce_in_two_levels() -> None:
        done = two_level.submit(probe)
        two_level.flush()
        done.result()

    probe.zero_()
    ways = [lambda: dist.all_reduce(probe, group=group), reduce_in_two_levels]
    flat, levels = _best_seconds(ways, group, probe.device)
    return levels < flat


def _best_seconds(ways: Sequence[Callable[[], object]], group: ProcessGroup, device: torch.device) -> list[float]:
    """The slowest rank's best time of each way, after one round to warm up."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(_ROUNDS):
        for way, taken in zip(ways, times, strict=True):
            dist.barrier(group=group)
            started = time.perf_counter()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - started)
    best = torch.tensor([min(taken[1:]) for taken in times], device=device)
    dist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)
    seconds: list[float] = best.tolist()
    return seconds
