"""Traits of a backend belong to its class, whatever name torch or a plugin gives it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_topo import GradientReducer, PipelineParallelGrid, ProcessGrid
from ds_topo.base import backends
from ds_topo.base.backends import TRAITS, BackendTraits, _key_of, check_backend, device_served_by, traits_of
from ds_topo.base.torch_names import calls_of
from tests.support.world import Worlds

CPU, GPU = torch.device("cpu"), torch.device("cuda")
later = pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="this torch has no such backend")


@pytest.fixture
def gloo() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class _Foreign:
    """A backend of a plugin."""


def _empty(name: str) -> Any:
    """Return an object of one of torch's classes without calling its constructor, which needs a GPU."""
    kind = getattr(c10d, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("name", "kind", "key"),
    [
        ("nccl", "ProcessGroupNCCL", "nccl"),
        ("nccl-legacy", "ProcessGroupNCCL", "nccl"),
        ("nccl", "ProcessGroupNCCL2", "nccl2"),
        ("nccl2", "ProcessGroupNCCL2", "nccl2"),
        ("nccl-lazy", "ProcessGroupNCCLLazy", "nccl-lazy"),
        ("gloo", "ProcessGroupGloo", "gloo"),
    ],
)
def test_traits_follow_the_class(name: str, kind: str, key: str) -> None:
    assert _key_of(_empty(kind), name) == key
    assert TRAITS[key].aborts is TRAITS[key].averages is TRAITS[key].premultiplies is ("nccl" in name)
    assert TRAITS[key].binds_device is (key in ("nccl2", "nccl-lazy"))


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-legacy", "gloo"])
def test_another_class_under_a_name_of_torchs_has_no_certain_trait(name: str) -> None:
    assert _key_of(_Foreign(), name) == ""
    assert _key_of(_Foreign(), "ucc") == "ucc"


def test_wrapped_backend_has_the_traits_of_the_wrapped_one(gloo: dist.ProcessGroup) -> None:
    assert traits_of(gloo, CPU) == TRAITS["gloo"]
    with mock.patch.dict(os.environ, TORCH_DISTRIBUTED_DEBUG="DETAIL"):
        dist.set_debug_level_from_env()
        group = dist.new_group([0])
    dist.set_debug_level_from_env()
    assert traits_of(group, CPU) == TRAITS["gloo"]
    assert traits_of(group, torch.device("meta")) == BackendTraits()


def test_backend_that_does_not_count_calls_has_none() -> None:
    group = mock.Mock()
    group._get_sequence_number_for_group.side_effect = RuntimeError("Backend nccl-lazy does not yet support this")
    assert calls_of(group) == 0


@later
@pytest.mark.parametrize("name", ["nccl2", "nccl-lazy", "cpu:gloo,cuda:nccl2", "cuda:nccl-legacy"])
def test_backend_of_an_entry_point_is_known_before_its_first_use(name: str) -> None:
    check_backend(name)
    with mock.patch.object(backends, "accelerator", return_value=GPU):
        assert device_served_by(name, 3) == torch.device("cuda", 3)


@pytest.mark.skipif(hasattr(dist, "ProcessGroupNCCL2"), reason="this torch has the backend")
def test_backend_that_torch_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch knows no backend 'nccl2', did you mean 'nccl'\?"):
        check_backend("nccl2")


def test_devices_of_names_of_all_releases() -> None:
    served = ("gloo", "nccl", "cpu:gloo,cuda:nccl", "cuda:gloo", "cpu:gloo")
    with mock.patch.object(backends, "accelerator", return_value=GPU):
        devices = [device_served_by(name, 1) for name in served]
    assert devices == [CPU, torch.device("cuda", 1), torch.device("cuda", 1), torch.device("cuda", 1), CPU]
    assert device_served_by("nccl", 1) == CPU, "no accelerator"


def _devices_of_groups(binds: bool) -> set[torch.device | None]:
    """Create groups of members alone in a job bound to a device; return the devices that torch got."""
    world, new_group, given = dist.group.WORLD, dist.new_group, set()

    def record(ranks: list[int], device_id: torch.device | None = None, **more: Any) -> dist.ProcessGroup:
        given.add(device_id)
        return new_group(ranks, **more)  # torch 2.13 refuses a CPU

    world.bound_device_id = torch.device("cpu", 0)
    try:
        with (
            mock.patch.dict(TRAITS, gloo=replace(TRAITS["gloo"], binds_device=binds)),
            mock.patch.object(dist, "new_group", record),
            PipelineParallelGrid("data=2,model=2"),
        ):
            return given
    finally:
        world.bound_device_id = None


@pytest.mark.parametrize(("binds", "device"), [(True, torch.device("cpu", 0)), (False, None)])
def test_groups_are_created_on_the_jobs_device(world: Worlds, binds: bool, device: torch.device | None) -> None:
    """torch 2.15 would guess the device of an NCCL group from LOCAL_RANK, and connect on it at once."""
    assert world(4).run(_devices_of_groups, binds) == [{device}] * 4


class GroupOfProgram(dist.ProcessGroup):
    """A group that a program has written in Python."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "of_program"

    def allreduce(self, *arguments: Any) -> Any:
        return self._gloo.allreduce(*arguments)

    def allgather(self, *arguments: Any) -> Any:
        return self._gloo.allgather(*arguments)

    def broadcast(self, *arguments: Any) -> Any:
        return self._gloo.broadcast(*arguments)

    def barrier(self, opts: Any) -> Any:
        return self._gloo.barrier(opts)


def _train_on_group_of_program(folder: Path) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    if "of_program" not in dist.Backend.backend_list:
        dist.Backend.register_backend("of_program", GroupOfProgram, devices=["cpu"])
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("of_program", store=store, rank=rank, world_size=size)
    layer = torch.nn.Linear(2, 1, bias=False)
    warnings.filterwarnings("ignore", "the timeout of a of_program job is unknown")
    with ProcessGrid("data=2") as grid:
        reducer = GradientReducer(layer, grid=grid)
        layer(torch.full((1, 2), float(rank))).sum().backward()
        reducer.finish()
        reducer.detach()
    assert layer.weight.grad is not None
    return layer.weight.grad.flatten().tolist()


def test_a_group_of_a_python_class_serves_a_job(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(_train_on_group_of_program, tmp_path) == [[0.5, 0.5]] * 2
