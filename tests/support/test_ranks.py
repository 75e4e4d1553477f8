"""The harness itself: results in rank order, and every rank's account when one fails or hangs."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailure, run_ranks


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


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(4, _sum_of_ranks, 1) == [10.0] * 4


def test_a_failure_shows_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1: error.*rank one is unhappy.*in _fail_on_rank_one"):
        run_ranks(2, _fail_on_rank_one, timeout=5)


def test_a_hang_shows_where_it_hangs() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1: missed the deadline.*in _sleep_on_rank_one"):
        run_ranks(2, _sleep_on_rank_one, deadline=4)


def test_a_dead_rank_shows_its_exit_code() -> None:
    with pytest.raises(RankFailure, match=r"rank 1: died\n?.*exit code"):
        run_ranks(2, _die_on_rank_one)
