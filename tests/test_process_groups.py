"""Process groups between real processes: agreement before anything exists, on-demand groups, life cycle, timeouts."""

import os
import re
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_topo import PipelineParallelGrid, ProcessTopology
from ds_topo.errors import DisagreementError, TopologyError
from tests.ranks import run_ranks


def number_of_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def sum_of_ranks(group: dist.ProcessGroup) -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=group)
    return int(total)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


# -- the groups talk -----------------------------------------------------------------------------------------------


def _reduce_over_every_axis(spec: str, asked: list[tuple[str, ...]]) -> list[tuple[int, int]]:
    grid = PipelineParallelGrid(spec)
    return [(sum_of_ranks(grid.get_group(axes)), sum(grid.get_ranks(axes))) for axes in asked]


def test_groups_reduce_over_their_ranks() -> None:
    asked = [("data",), ("pipe",), ("model",), ("pipe", "model"), ("data", "pipe"), ("data", "model"), ("data",)]
    for results in run_ranks(8, _reduce_over_every_axis, "model=2,data=2,pipe=2", asked):
        assert all(result == expected for result, expected in results)


def _ask_only_at_the_ends() -> tuple[bool, int]:
    with PipelineParallelGrid("pipe=4") as grid:
        if grid.is_rank_in_embedding_group():
            group = grid.get_embedding_group()
            return group is grid.get_embedding_group(), sum_of_ranks(group)
        return True, 3


def test_a_group_on_demand_is_collective_over_its_own_ranks_only() -> None:
    assert run_ranks(4, _ask_only_at_the_ends) == [(True, 3)] * 4


def _ask_alone() -> str:
    grid = PipelineParallelGrid("pipe=2,data=2,model=2", timeout=timedelta(seconds=1.5))
    if dist.get_rank() != 5:
        dist.barrier()
        return ""
    try:
        grid.get_group(("pipe", "data"))
    except DisagreementError as error:
        return str(error)
    finally:
        dist.barrier()
    return "no error"


def test_a_group_that_its_peers_do_not_ask_for_names_them() -> None:
    assert re.search(r"ranks that did not come: \[1, 3, 7\]", run_ranks(8, _ask_alone)[5])


# -- agree first ---------------------------------------------------------------------------------------------------


def _build(specs: list[Any], timeout: float) -> str:
    """The error that this rank raised; nothing may exist by then."""
    spec, before = specs[dist.get_rank()], number_of_groups()
    if spec is None:
        time.sleep(timeout + 1)
        return "did not come"
    try:
        PipelineParallelGrid(spec, timeout=timedelta(seconds=timeout))
    except (DisagreementError, TopologyError) as error:
        assert number_of_groups() == before, "nothing was created"
        return f"{type(error).__name__}: {error}"
    return "built"


def test_ranks_with_another_order_are_named_on_all() -> None:
    specs = ["pipe=2,data=2", "data=2,pipe=2", "pipe=2,data=2", "data=2,pipe=2"]
    errors = run_ranks(4, _build, specs, 20.0)
    assert len(set(errors)) == 1, "the same on all ranks"
    assert errors[0].startswith("DisagreementError: the ranks do not agree on the process groups to create")
    assert re.search(r"ranks \[0, 2\] on \S+ -> plan: grid pipe=2,data=2", errors[0])
    assert re.search(r"ranks \[1, 3\] on \S+ -> plan: grid data=2,pipe=2", errors[0])


def test_a_folded_topology_is_not_taken_for_its_spec() -> None:
    folded = ProcessTopology.from_spec("data=2,pipe=2,seq=2").fold({"pipe": ["pipe"], "data": ["data", "seq"]})
    errors = run_ranks(8, _build, [folded, *[ProcessTopology(folded.axes, folded.dims)] * 7], 20.0)
    assert all("do not agree" in error for error in errors)


def test_equal_placements_under_other_names_agree() -> None:
    joined = ProcessTopology.from_spec("pipe=2,data=2,seq=2").fold({"pipe": ["pipe"], "data": ["data", "seq"]})
    assert run_ranks(8, _build, [joined, *["pipe=2,data=4"] * 7], 20.0) == ["built"] * 8


def test_a_rank_with_a_wrong_product_is_named_on_the_others() -> None:
    errors = run_ranks(4, _build, ["pipe=2,data=2", "pipe=2,data=2", "pipe=2,data=3", "pipe=2,data=2"], 20.0)
    assert errors[2].startswith("WorldSizeError: ")
    for rank in (0, 1, 3):
        assert re.search(r"ranks \[2\] on \S+ -> failed: .* is for 6 ranks", errors[rank])


def test_a_wrong_product_everywhere_raises_everywhere() -> None:
    errors = run_ranks(4, _build, ["pipe=2,data=3"] * 4, 20.0)
    assert len(set(errors)) == 1
    assert errors[0].startswith("WorldSizeError: ")


def test_a_rank_that_never_comes_is_named() -> None:
    for absent in (0, 3):
        specs = ["data=4" if rank != absent else None for rank in range(4)]
        for rank, error in enumerate(run_ranks(4, _build, specs, 2.0)):
            assert error == "did not come" if rank == absent else re.search(rf"\[{absent}\]", error)


def _come_in_turn() -> str:
    rank, timeout = dist.get_rank(), 1.5
    time.sleep([1.0, 0.0, 2.0][rank])
    return _build(["pipe=3"] * 3, timeout)


def test_a_rank_that_gave_up_is_not_waited_for() -> None:
    """Rank 1 has left by the time that ranks 0 and 2 have both come: they must not start to create groups with it."""
    for rank, error in enumerate(run_ranks(3, _come_in_turn)):
        assert "ranks that did not come: [2]" in error
        assert rank == 1 or re.search(r"ranks \[1\] on \S+ -> failed: rank 0 did not compare the plans", error)


# -- groups that others made ---------------------------------------------------------------------------------------


def _build_after_unequal_groups() -> list[int]:
    """torch names a members-only group after the number of groups of the process: unequal here, and no hang."""
    ties = []
    if dist.get_rank() in (0, 3):
        ties = [dist.new_group([0, 3], use_local_synchronization=True) for _ in range(2)]
    with PipelineParallelGrid("pipe=2,data=2") as grid, PipelineParallelGrid("data=2,pipe=2") as other:
        groups = (grid.get_group("pipe"), grid.get_group("data"), other.get_group("pipe"), other.get_group("data"))
        return [len(ties), *map(sum_of_ranks, groups)]


def test_unequal_numbers_of_groups_do_not_hang() -> None:
    results = run_ranks(4, _build_after_unequal_groups, timeout=20)
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


def test_a_hundred_cycles_leave_nothing_behind() -> None:
    for early, late in run_ranks(4, _build_and_destroy, 100):
        assert early == late
        assert early[0] == 1, "the world's own group stays"


def _use_after_destroy() -> str:
    grid = PipelineParallelGrid("pipe=2")
    grid.destroy()
    grid.destroy()
    try:
        grid.get_pipe_parallel_group()
    except RuntimeError as error:
        assert sum_of_ranks(dist.group.WORLD) == 1
        return str(error)
    return "no error"


def test_use_after_destroy_raises() -> None:
    assert run_ranks(2, _use_after_destroy) == ["these process groups were destroyed; build a new grid"] * 2


def _use_before_initialization() -> str:
    dist.destroy_process_group()
    try:
        PipelineParallelGrid("pipe=2")
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_use_before_initialization_raises() -> None:
    assert "call deepspeed.init_distributed()" in run_ranks(1, _use_before_initialization)[0]


# -- one timeout ---------------------------------------------------------------------------------------------------


def _timeouts() -> list[list[timedelta]]:
    grids = [PipelineParallelGrid("pipe=2,data=2", timeout=timeout) for timeout in (None, timedelta(seconds=9))]
    return [[timeout_of(grid.get_group(axis)) for axis in ("pipe", "data", "model")] for grid in grids]


def test_the_jobs_timeout_reaches_every_group() -> None:
    for inherited, own in run_ranks(4, _timeouts, timeout=37.0):
        assert set(inherited) == {timedelta(seconds=37)}
        assert set(own) == {timedelta(seconds=9)}
