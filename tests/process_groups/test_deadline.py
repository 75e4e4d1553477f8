"""Ranks that build a grid raise in time if the process that serves the store has stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from ds_topo import PipelineParallelGrid
from ds_topo.errors import DisagreementError, GroupCreationError, StoreTimeoutError
from ds_topo.launch import council
from ds_topo.launch.council import within
from ds_topo.process_groups import creation
from tests.support import ranks
from tests.support.ranks import RankFailure, run_ranks
from tests.support.served_store import serve_a_store

pytestmark = pytest.mark.thorough  # for those who change ds_topo

LIMIT = 2.0


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _pids() -> list[int]:
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    return pids


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _errors(kind: type[Exception], first_rank: int) -> str:
    """Return the error of a grid that is built while rank 0 is stopped, and then resume rank 0."""
    try:
        with pytest.raises(kind) as caught:
            PipelineParallelGrid("pipe=2,data=2", timeout=timedelta(seconds=LIMIT))
        time.sleep(LIMIT)  # until the others have raised, too
    finally:
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(first_rank, signal.SIGCONT)
    return str(caught.value)


def _stopped_before_it_agrees() -> str:
    serve_a_store()
    pids = _pids()
    if dist.get_rank() == 0:
        _stop()
        time.sleep(1)  # the others' last requests
        return ""
    while _state_of(pids[0]) != "T":
        time.sleep(0.01)
    return _errors(StoreTimeoutError, pids[0])


def test_a_stopped_store_server_is_named_during_agreement() -> None:
    for rank, error in enumerate(run_ranks(4, _stopped_before_it_agrees)):
        if rank:
            assert "agreement on the process groups to create: the store of the job at " in error
            assert "did not answer within 0:00:02.4" in error


def _ends_at_once(folder: str) -> None:
    serve_a_store()
    rank = dist.get_rank()
    council.MOMENT = timedelta(seconds=30)  # other tests may delay the readers
    with pytest.raises(DisagreementError) as caught:
        PipelineParallelGrid("pipe=2,data=2" if rank else "data=4", timeout=timedelta(seconds=120))
    Path(folder, str(rank)).write_text(str(caught.value))
    if rank == 0:
        os._exit(0)


def test_all_ranks_read_the_verdict_before_the_store_server_exits(tmp_path: Path) -> None:
    # of the first rank, which returns nothing; another may be about to connect to its store, and then waits 10 seconds
    with pytest.raises(RankFailure) as caught, mock.patch.object(ranks, "GRACE_SECONDS", 30.0):
        ranks.run_ranks(4, _ends_at_once, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"], str(caught.value)
    assert len({(tmp_path / str(rank)).read_text() for rank in range(4)}) == 1
    assert "data=4" in (tmp_path / "3").read_text()


def _stop_instead(*_: object, **__: object) -> None:
    _stop()
    raise ArithmeticError("on purpose")


def _stopped_before_it_creates() -> str:
    pids = _pids()
    if dist.get_rank() == 0:
        with mock.patch.object(creation.dist, "new_group", _stop_instead), pytest.raises(ArithmeticError):
            PipelineParallelGrid("pipe=2,data=2", timeout=timedelta(seconds=LIMIT))
        return ""
    return _errors(GroupCreationError, pids[0])


def test_a_rank_that_stops_after_agreement_fails_group_creation() -> None:
    for error in run_ranks(4, _stopped_before_it_creates)[1:]:
        assert error.startswith("process group ")
        assert "all of them agreed to create it" in error


def test_within_returns_results_and_raises_errors_of_the_call() -> None:
    assert within(timedelta(seconds=5), "a name", lambda: threading.current_thread().name) == "ds_topo a name"
    with pytest.raises(TimeoutError, match="its own") as caught:
        within(timedelta(seconds=5), "an error", lambda: (_ for _ in ()).throw(TimeoutError("its own")))
    assert not isinstance(caught.value, StoreTimeoutError)
