"""Steps of a check end on every rank: with an answer, with the ranks that failed or are missing, or in time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ds_topo.cli import main
from ds_topo.errors import LaunchError, StoreTimeoutError
from ds_topo.health import session
from ds_topo.health.faults import Fault
from ds_topo.health.session import Options, StepFailure
from ds_topo.launch.launchers import Launch
from tests.support.served_store import errors_of, served_store


def _check(store: dist.Store, rank: int, size: int, seconds: float) -> session._Check:
    launch = Launch("environment", rank, size, rank, "127.0.0.1", 29500)
    check = session._Check(launch, Options("data=-1", "gloo", timedelta(seconds=seconds)), lambda *_: None, store)
    check.hosts, check.host, check.place = [[each] for each in range(size)], rank, 0
    return check


def _outcomes(*works: Any, judge: Any = None, size: int = 0, seconds: float = 10.0) -> list[Any]:
    """Run a step on as many ranks in threads; return the answer or the error of each."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        check = _check(store, rank, size or len(works), seconds)
        try:
            return check.step("a step", works[rank], judge or (lambda found: ([], sorted(found.items()))))
        except (LaunchError, StepFailure) as error:
            return error

    with ThreadPoolExecutor(len(works)) as ranks:
        return list(ranks.map(run, range(len(works))))


def test_every_rank_has_the_answer_of_rank_0() -> None:
    first, second = _outcomes(lambda: 1, lambda: 2)
    assert (first, second) == ([(0, 1), (1, 2)], [[0, 1], [1, 2]]), "the second one was JSON"


def test_ranks_that_fail_or_do_not_come_are_faults_of_rank_0_and_end_the_others() -> None:
    first, second = _outcomes(lambda: 1, lambda: 1 / 0, size=3, seconds=0.3)
    assert [(fault.kind, fault.ranks) for fault in first.faults] == [("missing", (2,)), ("failure", (1,))]
    assert "ranks 1 on ? failed: ZeroDivisionError: division by zero" in str(first)
    assert isinstance(second, StepFailure)
    assert str(second) == "rank 0 ended the check in step 'a step'"


def test_faults_that_the_judge_returns_end_all_ranks() -> None:
    fault = Fault("host", "it is wrong", (), (1,))
    first, second = _outcomes(lambda: 1, lambda: 2, judge=lambda _: ([fault], None))
    assert first.faults == [fault]
    assert (str(first), str(second)) == ("it is wrong", "rank 0 ended the check in step 'a step'")


def test_an_error_of_rank_0_is_raised_on_every_rank() -> None:
    first, second = _outcomes(lambda: 1, lambda: 2, judge=lambda _: {}["a key"])
    assert isinstance(first, LaunchError)
    assert str(first) == str(second) == "ds-topo check on rank 0: rank 0: KeyError: 'a key'"


def test_clocks_of_one_machine_agree() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        offsets = list(ranks.map(lambda rank: _check(store, rank, 2, 10).clock_offset(), range(2)))
    assert offsets[0] == 0.0
    assert 0.0 <= offsets[1] < 0.5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", ["a step", "clocks"])
def test_store_that_has_stopped_is_named_in_time_on_every_rank(step: str) -> None:
    with served_store() as store:
        checks = [_check(store.client(1), rank, 2, 0.5) for rank in range(2)]
        store.stop()
        calls = {
            "a step": lambda check: check.step("a step", lambda: 1, lambda _: ([], None)),
            "clocks": session._Check.clock_offset,
        }
        for error in errors_of(*(partial(calls[step], check) for check in checks), seconds=10):
            assert isinstance(error, StoreTimeoutError), error
            assert f"the store of the job at 127.0.0.1:{store.port} did not answer within" in str(error)
            assert "look there, and start the job again" in str(error)


@pytest.mark.parametrize(("local_rank", "said"), [(0, "ds-topo check: it stopped\n"), (1, "")])
def test_command_names_a_stopped_store_on_each_host(
    local_rank: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0, which reports what all ranks know, may be what stopped."""
    launch = Launch("environment", 4 + local_rank, 8, local_rank, "127.0.0.1", 29500)
    with (
        mock.patch("ds_topo.launch.joining.prepare", return_value=launch),
        mock.patch.object(session, "run_check", side_effect=StoreTimeoutError("it stopped")),
    ):
        assert main(["check", "data=8", "--backend", "gloo"]) == 1
    assert capsys.readouterr().err == said
