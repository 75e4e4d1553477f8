"""Sums and means over replicas, for logs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_topo import ProcessGrid
from ds_topo.errors import DisagreementError
from tests.support.fake_world import fake_world
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", "strict")


def _numbers(spec: str) -> tuple[float, float, float]:
    rank = dist.get_rank()
    with ProcessGrid(spec) as grid:
        tokens = grid.sum_over_replicas(16_777_217 if rank == 0 else rank)  # more than single precision can count
        return grid.mean_over_replicas(torch.tensor(float(rank))), grid.mean_over_replicas(rank, 1 + rank), tokens


def test_numbers_are_summed_over_replicas_alone(world: Worlds) -> None:
    first, second = (1.0, 6 / 4, 16_777_219.0), (2.0, 14 / 6, 4.0)  # of ranks 0 and 2, and of 1 and 3
    assert world(4).run(_numbers, "data=2,model=2") == [first, second, first, second]


def test_parts_of_sequences_are_replicas(world: Worlds) -> None:
    assert world(4).run(_numbers, "pipe=1,seq=2,data=2") == [(1.5, 20 / 10, 16_777_223.0)] * 4


def _sum_on_one_rank() -> str:
    with ProcessGrid("data=2") as grid:
        call = (lambda: grid.mean_over_replicas(1.0)) if dist.get_rank() == 0 else (lambda: ProcessGrid("data=2"))
        with pytest.raises(DisagreementError) as raised:
            call()
    return str(raised.value)


def test_a_sum_on_one_rank_is_named_while_others_do_something_else(world: Worlds) -> None:
    assert all("a sum or mean over replicas" in text for text in world(2).run(_sum_on_one_rank))


@pytest.mark.parametrize("value", [torch.ones(2), [1.0], "one", None], ids=repr)
def test_what_is_not_one_number_is_refused(value: Any) -> None:
    with fake_world(0, 2), ProcessGrid("data=2") as grid:
        for call in (grid.mean_over_replicas, grid.sum_over_replicas, partial(grid.mean_over_replicas, 1.0)):
            with pytest.raises(TypeError, match=r"is not one number: give that of this rank, such as loss.mean"):
                call(value)
