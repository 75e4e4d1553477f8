"""Agreements leave at most one key in the store, and a missing job timeout is warned of."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ds_topo import PipelineParallelGrid, groups
from ds_topo.base import torch_names
from tests.support.ranks import run_ranks


def _keys_of_cycles(cycles: int) -> list[int]:
    """Return the number of our keys in the store after each cycle."""
    store = dist.distributed_c10d._get_default_store()
    counted: list[int] = []
    written: set[str] = set()

    def remembering(write: Any) -> Any:
        def remember(self: dist.Store, key: str, *values: Any) -> Any:
            written.add(key)
            return write(self, key, *values)

        return remember

    with ExitStack() as patches:
        for name in ("set", "append", "add", "compare_set"):
            write = getattr(type(store), name)
            patches.enter_context(mock.patch.object(type(store), name, remembering(write)))
        for _ in range(cycles):
            with PipelineParallelGrid("data=2,model=2") as grid:
                groups.create_expert_groups(grid, 2)
                dist.barrier()
            counted.append(sum(store.check([key]) for key in written if key.startswith("ds_topo/")))
            dist.barrier()
    assert len(written) >= 4 * cycles, "two of the grid and two of its experts"
    return counted


def test_the_number_of_keys_does_not_grow_with_the_number_of_grids() -> None:
    for counted in run_ranks(4, _keys_of_cycles, 5):
        assert max(counted) <= 1 + 4, "the verdict, and a counter for each group of the last grid"


def _without_a_timeout() -> None:
    untold = mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=object())
    with (
        untold,
        pytest.warns(RuntimeWarning, match="the timeout of a gloo job is unknown.*pass timeout= to the grid"),
    ):
        assert torch_names.job_timeout() == dist.default_pg_timeout
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch_names.job_timeout() == timedelta(seconds=60)


def test_a_torch_release_without_a_readable_timeout_is_warned_of() -> None:
    run_ranks(1, _without_a_timeout)
