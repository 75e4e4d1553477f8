"""Queries of process groups for which torch has no public function."""

from __future__ import annotations

import torch
import torch.distributed as dist


def number_of_groups() -> int:
    """Return the number of process groups of this process, including the world."""
    return len(dist.distributed_c10d._world.pg_map)


def sum_of_ranks(group: dist.ProcessGroup) -> int:
    """Sum the global ranks of a group by an all-reduce."""
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=group)
    return int(total)
