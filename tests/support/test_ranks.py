"""Fresh ranks return results in rank order, and every rank is reported when one fails, hangs or dies."""

from __future__ import annotations

import os
import time
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.thorough  # for those who change ds_topo


def _sum_of_ranks(offset: int) -> float:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return value.item()


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def _sleep_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def _compare_with_rank() -> None:
    total = {"first": 1, "sum": sum(range(3))}
    print("compared by", dist.get_rank())
    assert total == {"first": 1, "sum": dist.get_rank()}


def _raise_what_cannot_travel() -> None:
    class LocalError(Exception):
        pass

    raise LocalError(f"from rank {dist.get_rank()}")


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(4, _sum_of_ranks, 1) == [10.0] * 4
    assert run_ranks(3, dist.get_rank) == [0, 1, 2]


def test_a_failure_shows_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1: error.*rank one is unhappy.*in _fail_on_rank_one"):
        run_ranks(2, _fail_on_rank_one, timeout=5)


def test_a_failed_assert_shows_its_values_and_the_output_of_every_rank() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, _compare_with_rank)
    for rank in (0, 1):
        account = str(caught.value).split(f"--- rank {rank}: ")[1].split("--- rank")[0]
        assert account.startswith(
            f"error: AssertionError: assert {{'first': 1, 'sum': 3}} == {{'first': 1, 'sum': {rank}}}"
        )
        assert f"{{'sum': 3}} != {{'sum': {rank}}}" in account, "pytest's own comparison"
        assert "assert total == " in account, "the line"
        assert account.rstrip().endswith(f"compared by {rank}")


def test_a_hang_shows_where_it_hangs() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1: missed the deadline.*in _sleep_on_rank_one"):
        run_ranks(2, _sleep_on_rank_one, deadline=4)


def test_a_dead_rank_shows_its_exit_code() -> None:
    with pytest.raises(RankFailure, match=r"rank 1: died\n?.*exit code"):
        run_ranks(2, _die_on_rank_one)


def test_expected_failures_are_returned() -> None:
    errors = run_ranks(2, _raise_what_cannot_travel, expect_failure=True)
    assert [f"from rank {rank}" in str(error) for rank, error in enumerate(errors)] == [True, True]
    with pytest.raises(RankFailure, match=r"(?s)rank 0: ok.*rank 1: error: ValueError: rank one is unhappy"):
        run_ranks(2, _fail_on_rank_one_alone, expect_failure=True)


def _fail_on_rank_one_alone() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")


def _communicate_in_shared_memory() -> tuple[str, list[Path]]:
    deepspeed.init_distributed(verbose=False)
    deepspeed.comm.inference_all_reduce(torch.ones(4))
    dist.barrier()
    pattern = f"deepspeed_*_{os.environ['MASTER_PORT']}_*"
    return pattern, list(Path("/dev/shm").glob(pattern))


def test_no_shared_memory_stays() -> None:
    (pattern, during), *_ = run_ranks(2, _communicate_in_shared_memory)
    assert len(during) == 2
    assert list(Path("/dev/shm").glob(pattern)) == []
