"""Create and destroy grids, expert groups and reducers many times, and check that nothing leaks.

The checks count groups, threads, files, keys of the store and memory. Some cycles fail during construction, and some
end a step with an exception.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_topo import GradientReducer, PipelineParallelGrid, groups
from ds_topo.errors import DisagreementError, ExpertSizeError, TopologyError
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.process_groups import number_of_groups
from tests.support.small_engines import settings
from tests.support.world import Worlds

pytestmark = [pytest.mark.thorough, pytest.mark.backends("gloo", exhaustive=("strict",))]

FAKE_CYCLES = 1000
GLOO_CYCLES = 12
OBJECTS = 10
"""The most objects of one type that any number of cycles may leave; a leak of one object per cycle leaves more."""
KEYS_PER_FAILURE = 3
"""The keys of the store in which a rank that fails reports why, for ranks that read it later."""
WARM_UP = 5
"""The number of cycles after which every cached object exists."""
BYTES_PER_CYCLE = 4096
"""The allowed growth of resident memory per cycle; the allocator takes it from the system in pieces."""
WORLD_BYTES = 4 << 20
"""The allowed growth of resident memory that does not depend on the number of cycles."""


@dataclass(frozen=True)
class Held:
    """The number of objects of this process by kind, and of the keys that all ranks left in the store."""

    groups: int
    names_and_tags: int
    """The number of entries in torch's tables of groups."""
    threads: int
    files: int
    """The number of sockets among the files."""
    shared_memory: int
    keys: int
    """The number of keys in the job's store; 0 without a server."""


def _held() -> Held:
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("ds_topo"):  # the thread has returned its result and is about to end
            thread.join(10)
    world, store = dist.distributed_c10d._world, dist.distributed_c10d._get_default_store()
    tables = [value for name in dir(world) if isinstance(value := getattr(world, name), (dict, list))]
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line}
    return Held(
        groups=number_of_groups(),
        names_and_tags=sum(map(len, tables)),
        threads=_number_of_threads(),
        files=len(os.listdir("/proc/self/fd")),
        shared_memory=len(mapped | set(Path("/dev/shm").glob(f"*_{os.getpid()}_*"))),
        keys=0 if dist.get_backend() == "fake" else store.num_keys(),
    )


def _number_of_threads() -> int:
    """Count all threads, also those of C++. A thread that has ended is still counted for some microseconds."""
    counted = []
    for _ in range(10):
        counted.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counted)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Stop(Exception):
    """Raised in the middle of a step."""


def _stop(_: torch.Tensor) -> None:
    raise _Stop


def _reduce(grid: PipelineParallelGrid, stops: bool) -> None:
    """Run a step of a reducer; end it in backward if ``stops`` is set."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    reducer = GradientReducer(
        module, grid=grid, bucket_bytes=200, first_bucket_bytes=100, find_unused_parameters=True, two_level=False
    )
    try:
        if stops:
            module[0].weight.register_hook(_stop)
        module(torch.ones(2, 4)).sum().backward()
        reducer.finish()
    except _Stop:
        assert stops
    finally:
        reducer.detach()


def _live(spec: str) -> None:
    with PipelineParallelGrid(spec) as grid:
        groups.create_expert_groups(grid, 2)
        _reduce(grid, stops=False)
        dist.barrier()


def _stop_in_a_step(spec: str) -> None:
    with PipelineParallelGrid(spec) as grid:
        _reduce(grid, stops=True)
        dist.barrier()


def _fail(spec: str) -> None:
    """Fail to create a grid and expert groups, on all ranks."""
    one_of_all = dist.get_backend() == "fake" or dist.get_rank() == 1
    with pytest.raises((TopologyError, DisagreementError)):
        PipelineParallelGrid("data=3,model=7" if one_of_all else spec)
    with PipelineParallelGrid(spec) as grid:
        with pytest.raises((ExpertSizeError, DisagreementError)):
            groups.create_expert_groups(grid, 3 if one_of_all else 2)
        with pytest.raises(DisagreementError) if dist.get_backend() != "fake" else _nothing():
            grid.create_groups(f"another plan of rank {dist.get_rank()}", [])
        dist.barrier()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


_LIVES = {"complete": _live, "stopped": _stop_in_a_step, "failed": _fail}
LIVES = pytest.mark.parametrize("life", _LIVES.values(), ids=_LIVES)
SPECS = pytest.mark.parametrize("spec", ["data=2,model=2", pytest.param("pipe=2,data=2", marks=pytest.mark.exhaustive)])


def _after(cycles: int, life: Callable[[str], None], spec: str) -> tuple[Held, list[str], int]:
    """Return the counts, the types of all Python objects, and the resident bytes after so many cycles."""
    for _ in range(cycles):
        life(spec)
    dist.barrier()
    held = _held()
    dist.barrier()
    return held, [type(each).__name__ for each in gc.get_objects()], _resident()


def _differences(cycles: int, life: Callable[[str], None], spec: str) -> list[str]:
    """Return a line for everything that grew from the first cycles to the last."""
    early, objects, resident = _after(WARM_UP, life, spec)
    late, more_objects, more_resident = _after(cycles, life, spec)
    now = asdict(late)
    # a rank that has left wakes the others, of which some may have left, too
    allowed = {"keys": dist.get_world_size() + (KEYS_PER_FAILURE * cycles if life is _fail else 0)}
    grown = [
        f"{name}: {was} -> {now[name]}" for name, was in asdict(early).items() if now[name] > was + allowed.get(name, 0)
    ]
    new = Counter(more_objects) - Counter(objects)  # not before: abc notes which types are no Mapping
    grown += [f"{kind}: {count} new objects" for kind, count in new.items() if count > OBJECTS]
    if more_resident - resident > WORLD_BYTES + cycles * BYTES_PER_CYCLE:
        grown.append(f"bytes: {resident} -> {more_resident}")
    return grown


@pytest.mark.parametrize("life", mark_exhaustive(_LIVES.values(), lambda number, _: number == 2), ids=_LIVES)
def test_a_thousand_cycles_of_one_rank_leak_nothing(life: Callable[[str], None]) -> None:
    gc.freeze()  # otherwise every collection and every search for a module's owner visits all objects of DeepSpeed
    try:
        with fake_world(0, 4):
            assert _differences(FAKE_CYCLES, life, "data=2,model=2") == []
    finally:
        gc.unfreeze()


@LIVES
@SPECS
@pytest.mark.parametrize("cycles", [GLOO_CYCLES, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_cycles_of_real_ranks_leak_nothing(world: Worlds, life: Callable[[str], None], spec: str, cycles: int) -> None:
    assert world(4).run(_differences, cycles, life, spec, deadline=600) == [[]] * 4


def _freed_by_destroy(stage: int) -> None:
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=-1") as grid:
        module = nn.Linear(8, 8)
        config = settings(gradient_accumulation_steps=1, zero_optimization={"stage": stage})
        engine = deepspeed.initialize(model=module, mpu=grid, config=config)[0]
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        held = [weakref.ref(each) for each in (module, module.weight, engine, engine.optimizer)]
        engine.destroy()
        del module, engine
        gc.collect()
        assert [reference() for reference in held] == [None] * len(held)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_destroyed_engine_frees_its_module_and_optimizer(world: Worlds, stage: int) -> None:
    world(2).run(_freed_by_destroy, stage)
