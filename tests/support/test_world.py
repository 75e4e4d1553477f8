"""Kept ranks start each function in the same state, and report what cannot be restored."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as deepspeed_groups
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from ds_topo import PipelineParallelGrid, distributed
from ds_topo.errors import DisagreementError
from tests.support.ranks import RankFailure
from tests.support.world import World, Worlds

pytestmark = pytest.mark.thorough  # for those who change ds_topo


@pytest.fixture(scope="module")
def own_world() -> Iterator[World]:
    """Two ranks that other tests do not use."""
    with World(2) as own:
        yield own


def _pid_and_draws() -> tuple[int, list[float]]:
    return os.getpid(), [random.random(), np.random.random(), torch.rand(()).item()]


def _pids(world: World) -> list[int]:
    return [pid for pid, _ in world.run(_pid_and_draws)]


def test_functions_run_on_the_same_processes_with_the_same_random_numbers(own_world: World) -> None:
    first, second = own_world.run(_pid_and_draws), own_world.run(_pid_and_draws)
    assert first == second
    assert len({pid for pid, _ in first} | {os.getpid()}) == 3
    assert first[0][1] == first[1][1], "the same on all ranks"


# -- what is put back ------------------------------------------------------------------------------------------------


def _change_everything() -> None:
    os.environ["RANK"], os.environ["ADDED"] = "7", "1"
    os.chdir("/")
    sys.argv[:] = ["another"]
    warnings.simplefilter("error")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    functional.linear = functional.bilinear
    deepspeed.init_distributed(verbose=False)
    deepspeed_groups.mesh_device = "a mesh"
    deepspeed_groups._EXPERT_PARALLEL_GROUP["ep_size_2"] = dist.new_group([0, 1])
    deepspeed_groups._clone_world_group()
    assert deepspeed.comm.is_initialized()


def _look() -> tuple[object, ...]:
    total = torch.ones(())
    dist.all_reduce(total)
    return (
        (os.environ["RANK"], os.environ.get("ADDED")),
        os.getcwd(),
        list(sys.argv),
        list(warnings.filters),
        torch.ones(()).dtype,
        torch.is_grad_enabled(),
        functional.linear.__name__,
        deepspeed.comm.is_initialized(),
        (deepspeed_groups.mesh_device, dict(deepspeed_groups._EXPERT_PARALLEL_GROUP), deepspeed_groups._WORLD_GROUP),
        len(dist.distributed_c10d._world.pg_map),
        total.item(),
    )


def test_a_function_finds_what_the_first_one_found(own_world: World) -> None:
    before, pids = own_world.run(_look), _pids(own_world)
    own_world.run(_change_everything)
    assert own_world.run(_look) == before
    assert _pids(own_world) == pids


def _destroy_process_group() -> None:
    dist.destroy_process_group()


def _groups_of(spec: str) -> list[list[int]]:
    with PipelineParallelGrid(spec) as grid:
        gathered: list[list[int]] = [[]] * dist.get_world_size(grid.get_group("data"))
        dist.all_gather_object(gathered, [dist.get_rank()], group=grid.get_group("data"))
        return gathered


def test_process_groups_of_one_function_are_not_those_of_the_next(own_world: World) -> None:
    assert own_world.run(_groups_of, "data=2") == [[[0], [1]]] * 2
    own_world.run(_destroy_process_group)
    assert own_world.run(_groups_of, "pipe=2") == [[[0]], [[1]]]


def _reduce_over_mesh(grids_before: int) -> None:
    for _ in range(grids_before):  # so that the groups of the last grid have other names
        PipelineParallelGrid("data=2,model=2").destroy()
    with PipelineParallelGrid("data=2,model=2") as grid:
        partial = distribute_tensor(torch.arange(4.0), grid.device_mesh()["model"], [Shard(0)]).sum()
        assert partial.relu().full_tensor().item() == 6.0


def test_meshes_of_one_function_are_not_those_of_the_next(world: Worlds) -> None:
    world(4).run(_reduce_over_mesh, 1)
    world(4).run(_reduce_over_mesh, 0)


def _agree_alone() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(DisagreementError, match=r"ranks \[1\] did not come"):
            PipelineParallelGrid("data=2", timeout=timedelta(seconds=0.5))
    dist.barrier()


def test_ranks_may_agree_unequally_often(own_world: World) -> None:
    own_world.run(_agree_alone)
    assert own_world.run(_groups_of, "data=2") == [[[0], [1]]] * 2


# -- what is reported ------------------------------------------------------------------------------------------------


def _leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), name="sleeper", daemon=True).start()


def _leave_a_grid() -> None:
    PipelineParallelGrid("data=2")


def _leave_a_replaced_method() -> None:
    DeepSpeedEngine.train = lambda engine: engine


def _leave_a_registration() -> None:
    distributed.init_process_group()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_leave_a_thread, "thread sleeper still runs"),
        (_leave_a_grid, r"ds_topo\.\S+ is now "),
        (_leave_a_replaced_method, r"deepspeed\.runtime\.engine\.DeepSpeedEngine\.train is still replaced"),
        (_leave_a_registration, r"ds_topo\.distributed\._model_parallel\.\w+ is now "),
    ],
    ids=["thread", "grid", "method", "registration"],
)
def test_leftovers_of_a_function_fail_it_and_end_the_processes(
    own_world: World, function: Callable[[], None], message: str
) -> None:
    pids = _pids(own_world)
    ranks = r"rank 0(, 1)?"  # rank 0 has a report of its own if it warns of a new release
    with pytest.raises(
        RankFailure, match=rf"(?s){function.__name__} returned.*{ranks}: left something behind.*{message}"
    ):
        own_world.run(function)
    assert not set(pids) & set(_pids(own_world))


def _fail_on_rank_one() -> None:
    assert dist.get_rank() != 1


def _hang_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


@pytest.mark.parametrize("function", [_fail_on_rank_one, _hang_on_rank_one, _die_on_rank_one])
def test_a_failure_of_any_kind_costs_the_processes_and_no_other_function(
    own_world: World, function: Callable[[], None]
) -> None:
    pids = _pids(own_world)
    with pytest.raises(RankFailure, match=f"{function.__name__} on 2 ranks"):
        own_world.run(function, deadline=2)
    assert not set(pids) & set(_pids(own_world))
    assert own_world.run(dist.get_rank) == [0, 1]


def test_expected_failures_are_returned_and_cost_the_processes(own_world: World) -> None:
    pids = _pids(own_world)
    errors = own_world.run(_raise_rank, expect_failure=True)
    assert [str(error) for error in errors] == ["0", "1"]
    assert not set(pids) & set(_pids(own_world))


def _raise_rank() -> None:
    raise ValueError(dist.get_rank())


def test_a_rank_that_died_between_two_functions_is_replaced(own_world: World) -> None:
    pid = _pids(own_world)[0]
    os.kill(pid, 9)
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:  # until the fork server has noticed
        time.sleep(0.05)
    assert own_world.run(dist.get_rank) == [0, 1]
