"""A rank that fails alone in a call of an engine is named by all ranks within seconds, without the watch."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, initialize
from ds_topo.base.torch_names import default_store
from ds_topo.errors import DisagreementError, FailedRankError
from ds_topo.health import blocked_calls, first_cause
from ds_topo.health.connections import is_of_transport
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.small_engines import settings, start
from tests.support.world import Worlds, names_threads

LIMIT = 10.0
"""The seconds within which all ranks must raise."""
GRACE = 1.0
"""Instead of the package's own seconds, where the default set waits for them."""
WIDTH = 8
PHASES = ("construction", "step", "evaluation", "save", "load")
KINDS = ("pipe1", "plain1", "plain3")
TEXT = "a sample that cannot be read"


class InjectedError(Exception):
    """The fault."""


# -- one fault of each kind --------------------------------------------------------------------------------------------


def _fail_in(kind: str, name: str) -> tuple[str, str]:
    """Fail on rank 3 in a method of the optimizer or the model in the second step; return the error of this rank."""
    start()
    blocked_calls.GRACE = GRACE
    with PipelineParallelGrid("pipe=2,data=2" if kind.startswith("pipe") else "data=4") as grid:
        build, phases = _builders(kind, grid)
        engine = build()
        phases["step"](engine, "")
        if dist.get_rank() == 3:
            _break(engine, name)
        try:
            phases["step"](engine, "")
        except Exception as error:
            return type(error).__name__, str(error)
    raise AssertionError("no rank has failed")


def _break(engine: Any, name: str) -> None:
    def fail(*_: Any) -> None:
        raise InjectedError(TEXT)

    if name == "step":
        engine.optimizer.step = fail
    elif name == "backward":
        next(engine.module.parameters()).register_hook(fail)
    else:
        engine.module.register_forward_pre_hook(fail)


@pytest.mark.sampled(3)
@names_threads
@pytest.mark.parametrize(
    ("kind", "name", "backend"),
    [("pipe1", "forward", "gloo"), ("plain1", "step", "strict"), ("plain3", "backward", "gloo")],
)
def test_all_ranks_name_the_one_that_fails(world: Worlds, kind: str, name: str, backend: str) -> None:
    *others, (own, own_text) = world(4).run(_fail_in, kind, name, backend=backend)
    assert (own, own_text) == ("InjectedError", TEXT)
    (error, text), *_ = others
    assert error == "FailedRankError"
    assert TEXT in text
    assert len(set(others)) == 1, "all other ranks say the same"
    where = r"rank 3 \((pipe=1 data=1|data=3)\) on \S+ failed in \w+ after 1 step, so this rank cannot finish"
    assert re.match(where, text)


# -- programs that go on -----------------------------------------------------------------------------------------------


def _train_on_after(errors_of: int) -> list[str]:
    """Raise an error before a step on the last ranks, handle it, and train on; return what was raised."""
    start()
    blocked_calls.GRACE = 2.0
    caught = []
    with PipelineParallelGrid("data=4") as grid:
        build, phases = _builders("plain1", grid)
        engine = build()
        for _ in range(3):
            inputs = torch.ones(2, WIDTH + (dist.get_rank() >= 4 - errors_of))
            try:
                engine(inputs)
            except RuntimeError as error:
                caught.append(str(error).partition("(")[0])
            phases["step"](engine, "")
        listener = first_cause.guard._listener
        assert listener is not None
        while listener.known is not None:
            time.sleep(0.05)
        phases["step"](engine, "")
        engine.destroy()
    return caught


@pytest.mark.sampled(2)
@pytest.mark.parametrize("errors_of", [1, 4])
def test_error_that_a_program_handles_ends_nothing(world: Worlds, errors_of: int) -> None:
    found = world(4).run(_train_on_after, errors_of)
    assert list(map(len, found)) == [0] * (4 - errors_of) + [3] * errors_of


def _fail_outside_of_calls() -> str:
    start()
    blocked_calls.GRACE = GRACE
    with PipelineParallelGrid("data=4") as grid:
        build, phases = _builders("plain1", grid)
        engine = build()
        if dist.get_rank() == 3:
            try:
                raise InjectedError(TEXT)
            except InjectedError:
                kind, error, trace = sys.exc_info()
            assert kind is not None
            assert error is not None
            sys.excepthook(kind, error, trace)
            return str(error)
        with pytest.raises(FailedRankError) as raised:
            phases["step"](engine, "")
        return str(raised.value)


@names_threads
def test_exception_that_ends_a_process_is_named(world: Worlds) -> None:
    assert all(TEXT in text for text in world(4).run(_fail_outside_of_calls))


def _leave() -> list[str]:
    """Leave on rank 1 while rank 0 is in a call; then build another grid, and ask again who has left."""
    start()
    first_cause._CAUSE_LIMIT = 0.01
    found = []
    with PipelineParallelGrid("data=2") as grid:
        with first_cause.guard.over("step", grid.members):
            dist.barrier()
        if dist.get_rank() == 1:
            grid.destroy()
        dist.barrier()
        if dist.get_rank() == 0:
            with pytest.raises(FailedRankError) as raised, first_cause.guard.over("step", grid.members):
                raise RuntimeError("Connection closed by peer")
            found.append(str(raised.value))
        dist.barrier()
    with PipelineParallelGrid("data=2"):
        with first_cause.guard.over("step"):
            dist.barrier()
        found.append(str(first_cause.departure_in(default_store())))
        dist.barrier()
    return found


def test_rank_that_has_left_without_an_error_is_named_until_it_comes_back(world: Worlds) -> None:
    (said, later), _ = world(2).run(_leave)
    assert re.match(r"this rank cannot finish step, because rank 1 \(data=1\) on \S+ has ended its program", said)
    assert "Let all ranks take the same steps" in said
    assert later == "None"


def _raise_in(name: str, members: Sequence[int], error: Exception) -> None:
    with first_cause.guard.over(name, members):
        raise error


def _lose_each_other(late: str) -> str:
    """Raise an error of the transport on ranks 0 and 1 in a step; on rank 2 in another call, or its own error later."""
    start()
    first_cause._CAUSE_LIMIT = 2.0 if late else 0.01
    rank = dist.get_rank()
    with PipelineParallelGrid("data=3") as grid:
        with first_cause.guard.over("step", grid.members):
            dist.barrier()
        error: Exception
        name, error = "step", RuntimeError("Timed out waiting 600000ms for recv operation to complete")
        if rank == 2:
            name, error = ("step", InjectedError(late)) if late else ("save", error)
        with pytest.raises(type(error) if late and rank == 2 else FailedRankError) as raised:
            _raise_in(name, grid.members, error)
        dist.barrier()
    return str(raised.value)


def test_ranks_in_another_call_are_named_after_a_timeout(world: Worlds) -> None:
    found = world(3).run(_lose_each_other, "")
    for text, call in zip(found, ("step", "step", "save"), strict=True):
        first, second, *places = text.splitlines()
        assert first.startswith(f"this rank cannot finish {call}, because ranks could not reach each other")
        assert second.startswith("Ranks [2] are in another call than most")
        assert [each.partition(":")[0].strip() for each in places] == ["ranks [2]", "ranks [0, 1]"]


def test_error_of_a_program_wins_over_a_timeout(world: Worlds) -> None:
    *others, own = world(3).run(_lose_each_other, TEXT)
    assert own == TEXT
    assert all(re.match(rf"rank 2 \(data=2\) on \S+ failed in step.*\n.*{TEXT}", text) for text in others)


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.0.1]:414"), True),
        (RuntimeError("Timed out waiting 600000ms for recv operation to complete"), True),
        (dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), True),
        (dist.DistStoreError("wait timeout after 2000ms, keys: /a"), True),
        (ConnectionRefusedError(111, "Connection refused"), False),
        (ConnectionResetError("the server of the samples: Connection reset by peer"), False),
        (ValueError("a socket of the wrong kind"), False),
    ],
)
def test_errors_of_the_transport_are_told_from_those_of_the_program(error: Exception, is_consequence: bool) -> None:
    assert is_of_transport(error) == is_consequence


def test_no_thread_without_other_processes() -> None:
    with fake_world(0, 4), PipelineParallelGrid("data=4"), first_cause.guard.over("step"):
        assert first_cause.guard._listener is None


def test_a_store_that_does_not_answer_ends_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_cause, "_can_listen", lambda: True)
    monkeypatch.setattr(first_cause, "default_store", lambda: "store")
    monkeypatch.setattr(first_cause, "FailureListener", mock.Mock(side_effect=RuntimeError("no answer")))
    with fake_world(0, 4), first_cause.Guard().over("a call"):
        pass


# -- faults at random places -------------------------------------------------------------------------------------------


class Place:
    """Counts the calls of DeepSpeed's, torch's and ds_topo's functions in a phase, or raises at one of them."""

    def __init__(self, number: int | None = None) -> None:
        self.number, self.calls, self.where = number, 0, ""

    def __enter__(self) -> Place:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not _may_fail(frame):
            return
        self.calls += 1
        if self.calls == self.number:
            sys.setprofile(None)
            self.where = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
            raise InjectedError(TEXT)


def _may_fail(frame: FrameType) -> bool:
    """Tell whether a function of an engine is called, from where exceptions come: not in a destructor or a getter."""
    code: Any = frame.f_code
    if not any(part in code.co_filename for part in ("/deepspeed/runtime/", "/ds_topo/engine/", "/ds_topo/checkpoint")):
        return False
    return code.co_name not in ("__getattr__", "__del__", "__hash__", "__eq__", "<genexpr>", "__exit__")


def _builders(
    kind: str, grid: PipelineParallelGrid
) -> tuple[Callable[[], Any], dict[str, Callable[[Any, str], object]]]:
    """Return a function that builds an engine, and the phases after it."""
    samples = ((torch.ones(2, WIDTH), torch.ones(2, WIDTH)) for _ in count())
    config = settings(zero_optimization={"stage": int(kind[-1])}, gradient_accumulation_steps=1)

    def build() -> Any:
        if kind.startswith("pipe"):
            model: nn.Module = PipelineModule(
                [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)], grid=grid, loss_fn=F.mse_loss
            )
            return initialize(model=model, config=config)[0]
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        return initialize(model=model, mpu=grid, config=config)[0]

    def step(engine: Any, _: str) -> None:
        if kind.startswith("pipe"):
            engine.train_batch(samples)
            return
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()

    def evaluate(engine: Any, _: str) -> None:
        if kind.startswith("pipe"):
            engine.eval_batch(samples)
            return
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(2, WIDTH))
        engine.train()

    def save(engine: Any, folder: str) -> None:
        engine.save_checkpoint(folder)

    def load(engine: Any, folder: str) -> None:
        engine.load_checkpoint(folder)

    return build, {"step": step, "evaluation": evaluate, "save": save, "load": load}


def _fail_at(kind: str, phase: str, share: float, victim: int, folder: str) -> tuple[str, str, float, str]:
    """Fail on one rank after a share of the calls of a phase; return the error, its seconds, and the place."""
    start()
    is_victim = dist.get_rank() == victim
    with PipelineParallelGrid("pipe=2,data=2" if kind.startswith("pipe") else "data=4") as grid:
        build, phases = _builders(kind, grid)
        counted, fault, begin = Place(), Place(), 0.0
        try:
            for is_second in (False, True):
                engine: Any = None
                for name in PHASES:
                    if name == phase and is_second:
                        fault.number, begin = 1 + int(share * counted.calls), time.monotonic()
                    place = fault if is_second else counted
                    if is_victim and name == phase:
                        with place:
                            engine = build() if engine is None else phases[name](engine, folder) or engine
                    else:
                        engine = build() if engine is None else phases[name](engine, folder) or engine
            for _ in range(3):  # ranks that had nothing more to exchange with the one that has failed
                phases["step"](engine, folder)
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - begin, fault.where
    return "", "", 0.0, fault.where


def _random_places() -> list[tuple[str, str, float, int]]:
    numbers = random.Random(46)
    return [
        (kind, PHASES[place % len(PHASES)], numbers.random(), numbers.randrange(4))
        for kind in KINDS
        for place in range(30)
    ]


@names_threads
@pytest.mark.parametrize(("kind", "phase", "share", "victim"), mark_exhaustive(_random_places(), lambda *_: False))
def test_fault_at_a_random_place_is_named_by_all_ranks(
    world: Worlds, tmp_path: Path, kind: str, phase: str, share: float, victim: int
) -> None:
    found = world(4).run(_fail_at, kind, phase, share, victim, str(tmp_path))
    where = found[victim][3]
    assert where, "the fault happened"
    for name, text, seconds, _ in found:
        if not name and all(not other for other, *_ in found):
            return  # DeepSpeed has handled the error, and all ranks have gone on
        assert TEXT in text or (name == "EndOfSamplesError" and f"rank {victim} " in text), (name, text, where)
        assert seconds < LIMIT, (name, text, where)


def _posted_by(victim: int) -> str:
    """Fail on one rank before an agreement; return the error that the job's store has as the first cause."""
    start()
    with PipelineParallelGrid("data=2"):
        dist.barrier()
        with pytest.raises(RuntimeError if dist.get_rank() != victim else ValueError):
            PipelineParallelGrid("data=3" if dist.get_rank() == victim else "data=2")
        dist.barrier()
        key = "ds_topo/first_cause/0/post"
        return default_store().get(key).decode() if default_store().check([key]) else ""


def test_an_agreement_that_tells_of_another_rank_is_no_cause(world: Worlds) -> None:
    for _ in range(3):  # whichever rank is first
        for posted in world(2).run(_posted_by, 1):
            assert "rank 1" in posted
            assert "DisagreementError" not in posted


@pytest.mark.parametrize(
    ("error", "is_of_another"),
    [
        (DisagreementError("rank 1 -> failed: ValueError: data=3"), True),
        (DisagreementError("rank 1 -> plan: data=3"), False),
        (ValueError("rank 1 -> failed: ValueError: data=3"), False),
    ],
)
def test_only_an_agreement_tells_of_another_rank_that_failed(error: Exception, is_of_another: bool) -> None:
    assert first_cause.tells_of_another(error) == is_of_another
