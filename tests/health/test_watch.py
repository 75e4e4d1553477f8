"""The watch of real ranks names faults, ignores slow ranks, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import io
import re
import sys
import threading
import time
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_topo import PipelineParallelGrid, initialize
from ds_topo.engine.on_grid import STEPS_BETWEEN
from ds_topo.errors import DisagreementError
from ds_topo.health import Watch, job_watch, watch_limit
from ds_topo.health.activity import GRACE
from tests.support.small_engines import settings
from tests.support.world import Worlds, names_threads

LIMIT = 1.0


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def _state() -> tuple[object, list[str], int]:
    threads = [thread.name for thread in threading.enumerate() if "watch" in thread.name]
    return sys.excepthook, threads, len(_children())


def _twice() -> list[str]:
    before = _state()
    for _ in range(2):
        with Watch(limit=30.0) as watch:
            assert watch.verdict is None
            assert _state() != before
            dist.barrier()
        assert _state() == before
        watch.stop()
    first = job_watch.start(30.0)
    assert job_watch.start(30.0) is first
    first.stop()
    second = job_watch.start(30.0)
    assert second is not first
    second.stop()
    ends_process = mock.patch("faulthandler.dump_traceback_later", side_effect=AssertionError)
    with ends_process, mock.patch.object(Watch, "verdict", "a fault"), redirect_stderr(io.StringIO()):
        second._on_exception(ValueError, ValueError("kept by a hook of torch"), None)
    return before[1]


@pytest.mark.thorough
def test_a_stopped_watch_leaves_nothing_behind_and_can_be_started_again(world: Worlds) -> None:
    assert world(2).run(_twice) == [[], []]


def _holds_the_interpreter(loses_its_witness: bool) -> str | None:
    with Watch(limit=LIMIT) as watch:
        dist.barrier()
        if dist.get_rank() == 1:
            if loses_its_witness:
                lost = watch._witness
                lost._process.kill()
                while watch._witness is lost:
                    time.sleep(0.01)
                time.sleep(LIMIT / 2)  # until the new address is published
            ctypes.PyDLL(None).usleep(int(3 * LIMIT * 1e6))
        dist.all_reduce(torch.ones(1))
        time.sleep(LIMIT)
        dist.barrier()
        return watch.verdict


@pytest.mark.thorough
@pytest.mark.parametrize("loses_its_witness", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_rank_that_holds_the_interpreter_is_no_fault(world: Worlds, loses_its_witness: bool) -> None:
    assert world(3).run(_holds_the_interpreter, loses_its_witness) == [None] * 3


def _fails_and_goes_on() -> str:
    watch = Watch(limit=LIMIT)
    with suppress(ValueError, RuntimeError), watch:
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("a sample that cannot be read")
        dist.all_reduce(torch.ones(1))
    time.sleep(GRACE + 1)  # a program that handles the error continues
    return str(watch.verdict)


@pytest.mark.thorough
@names_threads
def test_a_program_that_handles_the_error_continues(world: Worlds) -> None:
    for text in world(3).run(_fails_and_goes_on):
        assert "has failed: ValueError: a sample that cannot be read" in text


def _computes() -> str | None:
    with Watch(limit=LIMIT) as watch:
        if dist.get_rank() == 1:
            time.sleep(3 * LIMIT)
        dist.all_reduce(torch.ones(1))
        return watch.verdict


@pytest.mark.thorough
def test_a_long_computation_is_no_fault(world: Worlds) -> None:
    assert world(3).run(_computes) == [None] * 3


def _disagrees() -> None:
    Watch(limit=10.0 + dist.get_rank())


def test_different_limits_are_refused(world: Worlds) -> None:
    errors = world(2).run(_disagrees, timeout=5, expect_failure=True)
    assert all(isinstance(error, DisagreementError) and "the watch" in str(error) for error in errors)


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan")])
def test_limits_must_be_positive(limit: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        watch_limit(limit)


@pytest.mark.parametrize("limit", [True, False, "yes", "30", [30]])
def test_limits_must_be_numbers(limit: Any) -> None:
    with pytest.raises(TypeError, match="is not a number: give seconds above 0, or None"):
        watch_limit(limit)


@pytest.mark.parametrize(
    ("text", "limit"), [("off", None), ("0", None), ("OFF", None), ("45", 45.0), ("2.5", 2.5), ("", 20.0)]
)
def test_the_environment_overrides_the_limit(text: str, limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_TOPO_WATCH", text)
    assert watch_limit(20.0) == limit


@pytest.mark.parametrize("text", ["soon", "-3", "1e999", "on"])
def test_a_malformed_environment_variable_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_TOPO_WATCH", text)
    with pytest.raises(ValueError, match="above 0"):
        watch_limit(20.0)


def _train(leaves_out_a_step: bool, engines: int = 1) -> str:
    job_watch.start(30.0)
    config = settings(zero_optimization={"stage": 0}, gradient_accumulation_steps=1)
    told = io.StringIO()
    with PipelineParallelGrid("data=2") as grid, redirect_stderr(told):
        trained = [initialize(model=nn.Linear(2, 1), config=config, mpu=grid)[0] for _ in range(engines)]
        for step in range(2 * STEPS_BETWEEN + 1):
            for engine in trained:
                engine.backward(engine(torch.ones(8, 2)).sum())
                if not (leaves_out_a_step and dist.get_rank() == 1 and step == STEPS_BETWEEN // 2):
                    engine.step()
                if engines > 1 and step == STEPS_BETWEEN + 1:
                    engine.global_steps = 0  # as after loading an earlier checkpoint
        dist.barrier()
        time.sleep(2.5)  # until all have beaten
        for engine in trained:
            engine.destroy()
    job_watch.start(30.0).stop()
    return told.getvalue()


def test_a_rank_that_leaves_out_a_step_is_named(world: Worlds) -> None:
    told = world(2).run(_train, True)
    assert max(text.count("ranks are at different steps") for text in told) == 1, "each rank warns once"
    named = r"\n  rank \d \(data=\d\) on \S+ has called \d+ collectives of all ranks by its step 100,"
    assert re.search(named, "".join(told))


@pytest.mark.exhaustive
def test_equal_steps_cause_no_message(world: Worlds) -> None:
    assert "different steps" not in "".join(world(2).run(_train, False))
    assert "different steps" not in "".join(world(2).run(_train, False, 2))
