"""Process groups of real processes: collectives, groups on demand, life cycle and timeouts."""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_topo import PipelineParallelGrid
from ds_topo.base import torch_names
from ds_topo.base.torch_names import default_store
from ds_topo.errors import DisagreementError
from ds_topo.process_groups import creation
from ds_topo.process_groups.creation import ProcessGroups
from ds_topo.topology.rank_tables import RankGroup
from tests.support.fake_world import fake_world
from tests.support.process_groups import number_of_groups, sum_of_ranks
from tests.support.ranks import run_ranks
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


# -- collectives -------------------------------------------------------------------------------------------------


def _reduce_over_all_axes() -> None:
    asked = [("data",), ("pipe",), ("model",), ("pipe", "model"), ("data", "pipe"), ("data", "model"), ("data",)]
    with PipelineParallelGrid("model=2,data=2,pipe=2") as grid:
        assert [sum_of_ranks(grid.get_group(axes)) for axes in asked] == [sum(grid.get_ranks(axes)) for axes in asked]
        dist.barrier()


def test_one_grid_reduces_over_all_sets_of_axes(world: Worlds) -> None:
    world(8).run(_reduce_over_all_axes)


def _ask_only_at_the_ends() -> None:
    with PipelineParallelGrid("pipe=4") as grid:
        if grid.is_rank_in_embedding_group():
            group = grid.get_embedding_group()
            assert group is grid.get_embedding_group()
            assert sum_of_ranks(group) == 3


def test_a_group_on_demand_needs_its_own_ranks_only(world: Worlds) -> None:
    world(4).run(_ask_only_at_the_ends)


# -- groups created elsewhere --------------------------------------------------------------------------------------


def _build_after_unequal_groups() -> list[int]:
    """torch names a members-only group after the number of groups of the process, which is unequal here."""
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


def test_a_hundred_cycles_leak_no_groups_or_file_descriptors(world: Worlds) -> None:
    for early, late in world(4).run(_build_and_destroy, 100):
        assert early == late
        assert early[0] == 1, "the world's own group stays"


def _destroy_before_a_peer_has_connected() -> None:
    store = default_store()
    if dist.get_rank() == 0:
        grid = PipelineParallelGrid("data=2,model=2")
        store.set("destroying", "")
        grid.destroy()
        store.set("destroyed", "")
        return
    new_group = dist.new_group

    def connect_slowly(ranks: list[int], **options: Any) -> dist.ProcessGroup:
        group = new_group(ranks, **options)
        if dist.get_rank() == 1 and 0 in ranks:  # as if this rank still waited for one of the connections
            store.wait(["destroying"], timedelta(seconds=30))
            with pytest.raises(dist.DistStoreError):
                store.wait(["destroyed"], timedelta(seconds=0.3))
        return group

    with mock.patch.object(dist, "new_group", connect_slowly):
        grid = PipelineParallelGrid("data=2,model=2")
    store.wait(["destroyed"], timedelta(seconds=30))
    grid.destroy()


@pytest.mark.backends("gloo")  # others do not connect by addresses in the store
def test_destroy_waits_for_members_that_are_still_connecting(world: Worlds) -> None:
    world(4).run(_destroy_before_a_peer_has_connected)


def _destroy_although_a_peer_does_not_connect() -> None:
    with mock.patch.object(creation, "_LONGEST_WAIT", timedelta(seconds=0.2)):
        grid = PipelineParallelGrid("data=2,model=2")
        groups = grid._core.groups
        groups._connecting |= dict.fromkeys(groups._created, "a key that no rank counts up")
        grid.destroy()
        assert not grid.is_alive
        assert number_of_groups() == 1
        dist.barrier()


def test_destroy_waits_for_a_moment_only(world: Worlds) -> None:
    world(4).run(_destroy_although_a_peer_does_not_connect, deadline=30.0)


def _group_of_this_rank() -> bool:
    with PipelineParallelGrid("data=4,model=1") as grid:
        group = grid.get_group("model")
        assert dist.get_process_group_ranks(group) == [dist.get_rank()]
        assert sum_of_ranks(group) == dist.get_rank()
        key = torch_names.key_of_address(group)
        return key is not None and default_store().check([key])


def test_group_of_one_rank_does_not_need_the_store(world: Worlds) -> None:
    assert not any(world(4).run(_group_of_this_rank))


def _use_before_initialization() -> None:
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"call ds_topo\.init_distributed\(\)"):
        PipelineParallelGrid("pipe=2")


def test_use_before_initialization_raises() -> None:
    run_ranks(1, _use_before_initialization)


# -- groups of one rank, with a fake backend -----------------------------------------------------------------------


def _groups(*groups: RankGroup) -> ProcessGroups:
    return ProcessGroups("a test", groups, range(4), timedelta(seconds=9))


DATA, MODEL = RankGroup(("data",), (0, 2)), RankGroup(("model",), (0, 1))
SAME_AS_DATA, ALL = RankGroup(("replicas",), (0, 2)), RankGroup(("pipe", "model"), (0, 1, 2, 3))


def test_equal_rank_sets_share_a_group_and_all_ranks_use_the_worlds() -> None:
    with fake_world(0, 4):
        before = number_of_groups()
        groups = _groups(DATA, SAME_AS_DATA, ALL)
        data = groups.get(("data",))
        assert data is not None
        assert dist.get_process_group_ranks(data) == [0, 2]
        assert groups.get(("replicas",)) is data
        assert groups.get(("pipe", "model")) is dist.group.WORLD
        assert groups.get(("model",)) is None
        assert number_of_groups() == before + 1
        model = groups.extend(MODEL)
        assert groups.extend_all("more", [MODEL, DATA], range(4)) == [model, data]
        assert groups.extend(RankGroup(("slices",), MODEL.ranks)) is groups.get(("model",)) is model
        assert number_of_groups() == before + 2
        with pytest.raises(ValueError, match=r"^group 'data' has ranks \[0, 2\], not \[0, 1\]: use another name$"):
            groups.extend(RankGroup(("data",), (0, 1)))


def test_members_alone_create_a_group_with_the_given_timeout() -> None:
    with fake_world(2, 4), mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        _groups(DATA, ALL)
    ((ranks,), options), *others = [(call.args, call.kwargs) for call in new_group.call_args_list]
    assert not others
    assert ranks == [0, 2]
    assert options["use_local_synchronization"]
    assert options["timeout"] == timedelta(seconds=9)


def test_groups_are_named_after_their_ranks_and_described_by_their_axes() -> None:
    """Names are equal on all ranks, and different for different sets of ranks."""
    with fake_world(0, 4):
        first, second = _groups(DATA, MODEL), _groups(DATA, MODEL)
        made = [groups.get(group.axes) for groups in (first, second) for group in (DATA, MODEL)]
        names = [group.group_name for group in made if group is not None]
        assert len(set(names)) == 4
        assert names[0].rsplit("/", 1)[1] == names[2].rsplit("/", 1)[1], "the ranks"
        assert [group.group_desc for group in made if group is not None] == ["ds_topo:data", "ds_topo:model"] * 2


@pytest.mark.parametrize(("timeout", "limit"), [(1, 0.25), (3600, creation._LONGEST_WAIT.total_seconds())])
@pytest.mark.parametrize("connected", [1, 2])
def test_destroy_waits_until_members_have_connected_but_not_long(
    timeout: float, limit: float, connected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, limits, looks = dist.HashStore(), list[float](), list[threading.Thread]()
    store.add("counter", connected)

    def wait_for_a_moment(limit: timedelta, what: str, wait: Callable[[], None]) -> None:
        limits.append(limit.total_seconds())
        looks.append(threading.Thread(target=wait, daemon=True))
        looks[0].start()
        looks[0].join(5 if connected == 2 else 0.1)
        assert looks[0].is_alive() == (connected == 1)

    with fake_world(0, 4):
        groups = ProcessGroups("a test", [DATA], range(4), timedelta(seconds=timeout))
        data = groups.get(DATA.axes)
        assert data is not None
        groups._connecting[data] = "counter"
        monkeypatch.setattr(creation, "within", wait_for_a_moment)
        monkeypatch.setattr(torch_names, "default_store", lambda: store)
        groups._await_connections()
        looks[0].join(5)
        assert not looks[0].is_alive(), "nothing looks at the store after the wait"
        assert limits == [limit]


def test_callbacks_run_before_the_groups_are_destroyed() -> None:
    with fake_world(0, 4):
        before, seen = number_of_groups(), list[tuple[str, int]]()
        groups = _groups(DATA, MODEL, ALL)
        for name in ("first", "second"):
            groups.on_destroy(lambda name=name: seen.append((name, number_of_groups())))
        assert groups.is_alive
        groups.destroy()
        groups.destroy()
        assert not groups.is_alive
        assert groups.has_its_world
        assert seen == [("second", before + 2), ("first", before + 2)]
        assert number_of_groups() == before
        for use in (
            lambda: groups.get(("data",)),
            lambda: groups.extend(DATA),
            lambda: groups.extend_all("more", [], range(4)),
        ):
            with pytest.raises(RuntimeError, match=r"^these process groups were destroyed"):
                use()


def test_a_destroyed_group_is_freed() -> None:
    with fake_world(0, 4):
        groups = _groups(DATA)
        kept = weakref.ref(groups.get(("data",)))
        assert kept() is not None
        groups.destroy()
        gc.collect()
        assert kept() is None


def test_groups_are_destroyed_if_a_callback_or_a_creation_fails() -> None:
    with fake_world(0, 4):
        before = number_of_groups()
        with pytest.raises(ValueError, match="use another name"):
            _groups(DATA, RankGroup(("data",), (0, 1)))
        assert number_of_groups() == before
        groups = _groups(DATA)
        groups.on_destroy(mock.Mock(side_effect=KeyError("a callback")))
        with pytest.raises(KeyError, match="a callback"):
            groups.destroy()
        assert number_of_groups() == before
        assert not groups.is_alive


def test_groups_are_unusable_after_their_world_is_destroyed() -> None:
    with fake_world(0, 4):
        groups = _groups(DATA, ALL)
        assert groups.has_its_world
    assert not groups.has_its_world
    with pytest.raises(RuntimeError, match=r"torch\.distributed was destroyed after this grid was built"):
        groups.get(("data",))
    with fake_world(0, 4):
        assert not groups.has_its_world, "another world"
        groups.destroy()
        assert dist.is_initialized()


# -- one timeout ---------------------------------------------------------------------------------------------------


def _timeouts(timeout: timedelta | None, expected: timedelta) -> None:
    with PipelineParallelGrid("pipe=2,data=2", timeout=timeout) as grid:
        assert {timeout_of(grid.get_group(axis)) for axis in ("pipe", "data", "model")} == {expected}


@pytest.mark.parametrize("own", [None, 9.0], ids=["inherited", "own"])
def test_every_group_has_the_jobs_or_the_given_timeout(world: Worlds, own: float | None) -> None:
    timeout = None if own is None else timedelta(seconds=own)
    world(4).run(_timeouts, timeout, timedelta(seconds=own or 37.0), timeout=37.0)


def _create_while_bound_to_a_device() -> None:
    """DeepSpeed binds a job to a GPU. torch would then split the world's communicator, which all ranks must call."""
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


def test_members_alone_create_a_group_in_a_job_bound_to_a_device(world: Worlds) -> None:
    world(4).run(_create_while_bound_to_a_device)


def _create_only_on_request() -> None:
    with (
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
        PipelineParallelGrid("data=4") as grid,
    ):
        assert not new_group.called, "the world's own group is the only one of several ranks"
        assert dist.get_process_group_ranks(grid.get_model_parallel_group()) == [dist.get_rank()]
        assert new_group.call_count == 1


def test_groups_of_one_rank_are_created_on_request(world: Worlds) -> None:
    world(4).run(_create_only_on_request)


def _timeouts_that_differ(given: bool) -> None:
    own = timedelta(seconds=30, milliseconds=dist.get_rank())
    if given:
        with pytest.raises(DisagreementError, match=r"ranks \[1\] on .* timeout 0:00:30.001000"):
            PipelineParallelGrid("data=2", timeout=own)
    else:
        with mock.patch.object(torch_names, "job_timeout", return_value=own), PipelineParallelGrid("data=2"):
            pass


def test_given_timeouts_must_agree_but_job_timeouts_need_not(world: Worlds) -> None:
    """The job's timeout differs by milliseconds where a program joins with what is left of its time."""
    world(2).run(_timeouts_that_differ, False)
    world(2).run(_timeouts_that_differ, True)


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
