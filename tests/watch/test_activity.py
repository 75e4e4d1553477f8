"""Another thread infers the activity of a rank's main thread."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_topo
from ds_topo import GradientReducer, PipelineParallelGrid
from ds_topo.watch.activity import _PHASES, _WAITS, Activity, Observer, _known_wait
from ds_topo.zero.exchange import exchange_of
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


def test_a_waiting_rank_reports_call_group_and_duration(world: Worlds) -> None:
    seen = world(4).run(_waits)
    last = seen[2][-1]
    assert last.wait is not None
    assert (last.wait.call, last.wait.group, last.wait.ranks) == ("all_reduce", "model", (2, 3))
    assert last.wait.name
    assert SECONDS / 2 < last.seconds <= SECONDS + 1
    assert last.quiet == last.seconds, "no byte has moved"
    assert last.where.startswith("watch/test_activity.py")
    assert seen[3][-1].wait is None, "it sleeps"
    assert Activity.from_json(json.loads(json.dumps(asdict(last)))) == last


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
        assert raised.where.startswith("watch/test_activity.py")


def test_observing_wraps_no_function() -> None:
    before = sys.excepthook, dist.all_reduce, nn.Module.__call__
    Observer().look()
    assert (sys.excepthook, dist.all_reduce, nn.Module.__call__) == before


def _waits_for_slices() -> tuple[int, ...]:
    exchange: Any = exchange_of(dist.group.WORLD, torch.device("cpu"))
    frames: list[Any] = [SimpleNamespace(f_locals={"self": one}) for one in (exchange, exchange._worker)]
    waits = {_known_wait("slices", frame) for frame in frames}
    exchange.rest()
    assert len(waits) == 1
    return waits.pop().ranks


def test_a_wait_for_slices_names_its_group(world: Worlds) -> None:
    assert world(2).run(_waits_for_slices) == [(0, 1)] * 2


@pytest.mark.parametrize(("file", "function"), [key for key in (*_PHASES, *_WAITS) if key[0].startswith("ds_topo/")])
def test_known_functions_of_ds_topo_exist(file: str, function: str) -> None:
    source = (Path(ds_topo.__file__).parents[1] / file).read_text()
    assert not function or f"def {function}(" in source
