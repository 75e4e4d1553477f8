"""Run any rank of a job of any size in one process, with torch's ``fake`` backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Initialize this process as ``rank`` of ``world_size``: groups exist, but nothing is communicated.

    At the end, grids that a test has left are destroyed: their patches of DeepSpeed would stay.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        checks = sys.modules.get("ds_topo.engine.checks")
        for grid in [*checks.grids] if checks is not None else []:
            grid.destroy()
        dist.destroy_process_group()
