"""Process groups between real processes: groups that talk, on demand too, life cycle and timeouts."""

from __future__ import annotations

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_topo import DisagreementError, PipelineParallelGrid
from ds_topo.process_groups import torch_names
from tests.support.process_groups import number_of_groups, sum_of_ranks
from tests.support.ranks import run_ranks
from tests.support.world import Worlds


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


# -- the groups talk -----------------------------------------------------------------------------------------------


def _reduce_over_axes(axes: tuple[str, ...]) -> None:
    with PipelineParallelGrid("model=2,data=2,pipe=2") as grid:
        for _ in range(2):
            assert sum_of_ranks(grid.get_group(axes)) == sum(grid.get_ranks(axes))


@pytest.mark.parametrize(
    "axes",
    [("data",), ("pipe",), ("model",), ("pipe", "model"), ("data", "pipe"), ("data", "model")],
    ids="-".join,
)
def test_groups_reduce_over_their_ranks(world: Worlds, axes: tuple[str, ...]) -> None:
    world(8).run(_reduce_over_axes, axes)


def _reduce_over_all_axes() -> None:
    asked = [("data",), ("pipe",), ("model",), ("pipe", "model"), ("data", "pipe"), ("data", "model"), ("data",)]
    with PipelineParallelGrid("model=2,data=2,pipe=2") as grid:
        assert [sum_of_ranks(grid.get_group(axes)) for axes in asked] == [sum(grid.get_ranks(axes)) for axes in asked]


def test_one_grid_has_groups_of_all_axes(world: Worlds) -> None:
    world(8).run(_reduce_over_all_axes)


def _ask_only_at_the_ends() -> None:
    with PipelineParallelGrid("pipe=4") as grid:
        if grid.is_rank_in_embedding_group():
            group = grid.get_embedding_group()
            assert group is grid.get_embedding_group()
            assert sum_of_ranks(group) == 3


def test_a_group_on_demand_is_collective_over_its_own_ranks_only(world: Worlds) -> None:
    world(4).run(_ask_only_at_the_ends)


# -- groups that others made ---------------------------------------------------------------------------------------


def _build_after_unequal_groups() -> list[int]:
    """torch names a members-only group after the number of groups of the process: unequal here, and no hang."""
    ties = []
    if dist.get_rank() in (0, 3):
        ties = [dist.new_group([0, 3], use_local_synchronization=True) for _ in range(2)]
    with PipelineParallelGrid("pipe=2,data=2") as grid, PipelineParallelGrid("data=2,pipe=2") as other:
        groups = (grid.get_group("pipe"), grid.get_group("data"), other.get_group("pipe"), other.get_group("data"))
        return [len(ties), *map(sum_of_ranks, groups)]


def test_unequal_numbers_of_groups_do_not_hang(world: Worlds) -> None:
    results = world(4).run(_build_after_unequal_groups, timeout=20)
    for rank, (ties, *totals) in enumerate(results):
        assert ties == [2, 0, 0, 2][rank]
        along_rows, along_columns = ([1, 5][rank // 2], [2, 4][rank % 2])
        assert totals == [along_columns, along_rows, along_rows, along_columns]


# -- life cycle ----------------------------------------------------------------------------------------------------


def _build_and_destroy(cycles: int) -> list[tuple[int, int]]:
    seen = []
    for cycle in range(cycles):
        with PipelineParallelGrid("pipe=2,data=2") as grid:
            assert sum_of_ranks(grid.get_data_parallel_group()) == sum(grid.dp_group)
            assert number_of_groups() > 1
            dist.barrier()
        if cycle in (1, cycles - 1):
            dist.barrier()
            seen.append((number_of_groups(), len(os.listdir("/proc/self/fd"))))
    return seen


def test_a_hundred_cycles_leave_nothing_behind(world: Worlds) -> None:
    for early, late in world(4).run(_build_and_destroy, 100):
        assert early == late
        assert early[0] == 1, "the world's own group stays"


def _use_after_destroy() -> None:
    grid = PipelineParallelGrid("pipe=2")
    grid.destroy()
    grid.destroy()
    with pytest.raises(RuntimeError, match=r"^these process groups were destroyed; build a new grid$"):
        grid.get_pipe_parallel_group()
    assert sum_of_ranks(dist.group.WORLD) == 1


def test_use_after_destroy_raises(world: Worlds) -> None:
    world(2).run(_use_after_destroy)


def _use_before_initialization() -> None:
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"call deepspeed\.init_distributed\(\)"):
        PipelineParallelGrid("pipe=2")


def test_use_before_initialization_raises() -> None:
    run_ranks(1, _use_before_initialization)


# -- one timeout ---------------------------------------------------------------------------------------------------


def _timeouts(timeout: timedelta | None, expected: timedelta) -> None:
    with PipelineParallelGrid("pipe=2,data=2", timeout=timeout) as grid:
        assert {timeout_of(grid.get_group(axis)) for axis in ("pipe", "data", "model")} == {expected}


@pytest.mark.parametrize("own", [None, 9.0], ids=["inherited", "own"])
def test_the_jobs_timeout_reaches_every_group(world: Worlds, own: float | None) -> None:
    timeout = None if own is None else timedelta(seconds=own)
    world(4).run(_timeouts, timeout, timedelta(seconds=own or 37.0), timeout=37.0)


def _create_while_bound_to_a_device() -> None:
    """As DeepSpeed binds a job on GPUs: torch would split the world's communicator, which all ranks must call."""
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cpu", 0)
    try:
        with (
            mock.patch.object(dist.distributed_c10d, "_get_split_source", side_effect=AssertionError("a split")),
            PipelineParallelGrid("pipe=4") as grid,
        ):
            if grid.is_rank_in_embedding_group():
                assert sum_of_ranks(grid.get_embedding_group()) == 3
            assert world.bound_device_id == torch.device("cpu", 0)
    finally:
        world.bound_device_id = None


def test_members_alone_create_a_group_where_the_job_is_bound_to_a_device(world: Worlds) -> None:
    world(4).run(_create_while_bound_to_a_device)


def _only_what_is_asked_for() -> None:
    with (
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
        PipelineParallelGrid("data=4") as grid,
    ):
        assert not new_group.called, "the world's own group is the only one of several ranks"
        assert dist.get_process_group_ranks(grid.get_model_parallel_group()) == [dist.get_rank()]
        assert new_group.call_count == 1


def test_groups_of_one_rank_are_made_when_they_are_asked_for(world: Worlds) -> None:
    world(4).run(_only_what_is_asked_for)


def _timeouts_that_differ(given: bool) -> None:
    own = timedelta(seconds=30, milliseconds=dist.get_rank())
    if given:
        with pytest.raises(DisagreementError, match=r"ranks \[1\] on .* timeout 0:00:30.001000"):
            PipelineParallelGrid("data=2", timeout=own)
    else:
        with mock.patch.object(torch_names, "job_timeout", return_value=own), PipelineParallelGrid("data=2"):
            pass


def test_timeouts_that_were_given_must_agree_and_the_jobs_own_need_not(world: Worlds) -> None:
    """Programs that join with what is left of their time have one that differs by milliseconds."""
    world(2).run(_timeouts_that_differ, False)
    world(2).run(_timeouts_that_differ, True)
