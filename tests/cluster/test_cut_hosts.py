"""Ranks raise in time if a host is cut off while they build a grid, add a group or destroy the grid."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ds_topo import PipelineParallelGrid
from ds_topo.process_groups import creation
from ds_topo.topology.rank_tables import RankGroup
from tests.cluster import Cluster

pytestmark = pytest.mark.exhaustive

LIMIT = 6.0
"""The timeout of the grid, in seconds."""


def _wait_until_cut(folder: str) -> None:
    Path(folder, f"ready{dist.get_rank()}").touch()
    while not Path(folder, "cut").exists():
        time.sleep(0.02)


def _cut(moment: str, folder: str) -> None:
    """Write the error of this rank, and the seconds until it came, to a file."""
    start, error = 0.0, "none"

    def cut() -> None:
        nonlocal start
        _wait_until_cut(folder)
        start = time.monotonic()

    new_group, cuts = dist.new_group, iter([cut])

    def create(*args: Any, **options: Any) -> dist.ProcessGroup:
        next(cuts, lambda: None)()
        return new_group(*args, **options)

    grid = None
    try:
        if moment == "agreement":
            cut()
        with mock.patch.object(creation.dist, "new_group", create if moment == "creation" else new_group):
            grid = PipelineParallelGrid("pipe=2,data=2,model=1", timeout=timedelta(seconds=LIMIT))
        if moment == "a new group":
            cut()
            grid.create_group(RankGroup(("ring",), (0, 3) if grid.global_rank in (0, 3) else (1, 2)))
        if moment == "destroy":
            cut()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    if grid is not None:
        grid.destroy()
    Path(folder, f"error{dist.get_rank()}").write_text(f"{time.monotonic() - start:.1f} {error}")


def _run(cluster: Cluster, folder: Path, moment: str) -> list[str]:
    def unplug() -> None:
        while len(list(folder.glob("ready*"))) < 4:
            time.sleep(0.02)
        cluster.unplug(1)
        (folder / "cut").touch()
        while len(list(folder.glob("error*"))) < 4:
            time.sleep(0.1)
        cluster.plug_in(1)

    thread = threading.Thread(target=unplug, daemon=True)
    thread.start()
    cluster.run_ranks(_cut, moment, str(folder), ranks_per_host=2, timeout=300.0)
    thread.join()
    return [(folder / f"error{rank}").read_text() for rank in range(4)]


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("agreement", ["DisagreementError", "StoreTimeoutError"]),
        ("creation", ["GroupCreationError", "StoreTimeoutError"]),
        ("a new group", ["DisagreementError", "StoreTimeoutError"]),
        ("destroy", ["none"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cut_host_is_noticed_in_time(
    moment: str, expected: list[str], start_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    for said in _run(start_cluster(hosts=2), tmp_path, moment):
        seconds, error = said.split(" ", 1)
        assert error.startswith(tuple(expected)), said
        assert float(seconds) < 3 * LIMIT, said
