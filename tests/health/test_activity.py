"""Another thread infers the activity of a rank's main thread."""

from __future__ import annotations

import pickle
import queue
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch._C._distributed_c10d as _C
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import AllReduceCoalescedHandle, MultipleAllGatherHandles
from deepspeed.utils.nvtx import instrument_w_nvtx
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import ds_topo
from ds_topo import GradientReducer, PipelineParallelGrid
from ds_topo.health import activity
from ds_topo.health.activity import _PHASES, _WAITS, Activity, Observer, _known_wait
from ds_topo.health.heartbeat import RUNS, Beat, read_beat
from ds_topo.reduction.exchange import exchange_of
from tests.support.world import Worlds

SECONDS = 2.0


def _seen(observer: Observer, seconds: float) -> list[Activity]:
    """Return a list that a thread fills from now on."""
    found: list[Activity] = []

    def look() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found.append(observer.look())
            time.sleep(0.05)

    threading.Thread(target=look, daemon=True).start()
    return found


def _waits() -> list[Activity]:
    grid = PipelineParallelGrid("data=2,model=2")
    dist.barrier()
    found = _seen(Observer(lambda: 0), SECONDS)
    if dist.get_rank() == 3:
        time.sleep(SECONDS + 0.5)
    dist.all_reduce(torch.ones(1), group=grid.get_group("model"))
    time.sleep(0.1)
    dist.barrier()
    grid.destroy()
    return found


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("/home/me/ds_topo/examples/train_gpt.py", True),
        (activity.__file__, False),
        ("/usr/lib/python3.11/threading.py", False),
        ("/home/me/.venv/lib/python3.11/site-packages/torch/nn/modules/module.py", False),
        ("<string>", False),
    ],
)
def test_files_of_the_program_are_told_from_libraries(file: str, is_own: bool) -> None:
    assert activity._is_own(file) is is_own


def test_a_waiting_rank_reports_call_group_and_duration(world: Worlds) -> None:
    seen = world(4).run(_waits)
    last = seen[2][-1]
    assert last.wait is not None
    assert (last.wait.call, last.wait.group, last.wait.ranks) == ("all_reduce", "model", (2, 3))
    assert last.wait.name
    assert SECONDS / 2 < last.seconds <= SECONDS + 1
    assert last.quiet == last.seconds, "no byte has moved"
    assert last.where.startswith("health/test_activity.py")
    assert seen[3][-1].wait is None, "it sleeps"
    beat = Beat(1, RUNS, "node1", "", last)
    assert read_beat(beat.to_text()) == beat


def _trains() -> tuple[list[Activity], Activity]:
    reducer = GradientReducer(module := nn.Linear(4, 4))
    observer = Observer()
    found: list[Activity] = []

    def look(_: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: found.append(observer.look()))
        thread.start()
        thread.join()

    for _ in range(3):
        loss = module(torch.ones(1, 4))
        loss.register_hook(look)
        loss.sum().backward()
        reducer.finish()
    try:
        raise ValueError("a sample that cannot be read")
    except ValueError as error:
        look(loss)
        return found, observer.read_traceback(error.__traceback__)
    finally:
        reducer.detach()


def test_phases_and_exception_handlers_are_observed(world: Worlds) -> None:
    for seen, raised in world(2).run(_trains):
        assert [activity.phase for activity in seen] == ["backward"] * 3 + ["running"]
        assert seen[-1].handling == "ValueError: a sample that cannot be read"
        assert not seen[0].handling
        assert raised.where.startswith("health/test_activity.py")


def _waits_for_slices() -> tuple[int, ...]:
    exchange: Any = exchange_of(dist.group.WORLD, torch.device("cpu"))
    frames: list[Any] = [SimpleNamespace(f_locals={"self": one}) for one in (exchange, exchange._worker)]
    waits = {_known_wait("slices", frame) for frame in frames}
    exchange.rest()
    assert len(waits) == 1
    return waits.pop().ranks


def test_a_wait_for_slices_names_its_group(world: Worlds) -> None:
    assert world(2).run(_waits_for_slices) == [(0, 1)] * 2


@pytest.mark.parametrize(
    ("file", "function"), [key for key in (*_PHASES, *_WAITS) if key[0].startswith(("ds_topo/", "torch/"))]
)
def test_known_functions_of_ds_topo_and_torch_exist(file: str, function: str) -> None:
    library = ds_topo if file.startswith("ds_topo/") else torch
    source = (Path(library.__file__).parents[1] / file).read_text()
    assert not function or f"def {function}(" in source


class _Handles:
    """Waits in ways of DeepSpeed, torch and programs, for the group of all ranks."""

    def __init__(self) -> None:
        self.seconds = timedelta(seconds=60)

    def of_wrapper(self) -> None:
        instrument_w_nvtx(dist.all_reduce(torch.ones(1), async_op=True).wait)()

    def of_coalesced_handle(self) -> None:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        MultipleAllGatherHandles([AllReduceCoalescedHandle(work, [])]).wait()

    def of_partial(self) -> None:
        self._called(partial(dist.all_reduce(torch.ones(1), async_op=True).wait, self.seconds))

    def _called(self, wait: Callable[[], object]) -> None:
        wait()

    def with_timeout(self) -> None:
        self.work = dist.all_reduce(torch.ones(1), async_op=True)
        self.work.wait(timeout=self.seconds)

    def of_a_list(self) -> None:
        works = [dist.all_reduce(torch.ones(1), async_op=True)]
        works[0].wait(self.seconds)

    def of_process_group(self) -> None:
        dist.group.WORLD.monitored_barrier(self.seconds)

    def of_store(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank():
            store.set("a key", "1")
        store.get("a key")

    def of_operator(self) -> None:
        name = dist.group.WORLD.group_name
        torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", name))

    def of_functional(self) -> None:
        functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).add(1)

    def of_deepspeed(self) -> None:
        deepspeed.comm.all_to_all_single(torch.empty(2), torch.ones(2))

    def of_objects(self) -> None:
        dist.all_gather_object([None, None], "rank")

    def of_pairs(self) -> None:
        peer = 1 - dist.get_rank()
        made = [dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, torch.ones(1), peer)]
        for each in dist.batch_isend_irecv(made):
            each.wait()

    def of_new_group(self) -> None:
        dist.destroy_process_group(dist.new_group([0, 1]))

    def of_a_thread(self) -> None:
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
        thread.start()
        thread.join()

    def of_backward_in_cpp(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = DistributedDataParallel(nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        dist.barrier()
        if dist.get_rank():
            time.sleep(HELD)
        loss.backward()


HELD = 0.6
WAYS = [name for name in vars(_Handles) if not name.startswith("_")]


def _waits_in_all_ways() -> dict[str, str]:
    """Return what rank 0 waits for, in each way, while rank 1 comes later."""
    deepspeed.init_distributed(verbose=False)
    found = {}
    before, activity.STILL = activity.STILL, 0.2
    try:
        for way in WAYS:
            dist.barrier()
            seen = _seen(Observer(lambda: 0), HELD - 0.1)
            if dist.get_rank() and way != "of_backward_in_cpp":
                time.sleep(HELD)
            getattr(_Handles(), way)()
            waits = [each.wait for each in seen if each.wait is not None]
            found[way] = str(waits[-1]) if waits else seen[-1].where.partition(" in ")[2]
            dist.barrier()
        if dist.get_rank() == 0:  # other waits, while a collective has not ended
            work = dist.all_reduce(torch.ones(1), async_op=True)
            for wait in (time.sleep, threading.Event().wait, lambda seconds: queue.Queue().get(timeout=seconds)):
                seen = _seen(Observer(lambda: 0), HELD - 0.2)
                with suppress(queue.Empty):
                    wait(HELD)
                assert [each.wait for each in seen if each.wait is not None] == []
            work.wait()
        else:
            time.sleep(4 * HELD)
            dist.all_reduce(torch.ones(1))
    finally:
        activity.STILL = before
    dump = getattr(_C, "_dump_fr_trace", None)
    if dump is None or not pickle.loads(dump()).get("entries"):  # that of torch 2.8 does not know gloo's collectives
        assert not found.pop("of_backward_in_cpp")
    return found


@pytest.mark.thorough
def test_every_way_to_wait_for_other_ranks_is_observed(world: Worlds) -> None:
    found = world(2).run(_waits_in_all_ways)[0]
    of_program = {"with_timeout", "of_a_list", "of_process_group", "of_store", "of_pairs"}
    assert {way for way in of_program if found[way] != way} == set(), "the function that waits is named"
    assert found["of_partial"] == "_called"
    assert {way for way, wait in found.items() if not wait or wait in WAYS} <= of_program, found
    assert found["of_wrapper"] == found["of_coalesced_handle"] == "all_reduce of all ranks"
    assert found["of_new_group"] == "new_group of ranks [0, 1]"
