"""Collectives refuse invalid arguments with the dimension and a remedy; debug mode names ranks that disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_topo import ProcessGrid, collectives
from ds_topo.errors import DisagreementError
from ds_topo.layers import ParallelLinear
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

REFUSED: dict[str, tuple[str, Callable[[torch.Tensor, Any], Any]]] = {
    "indivisible": (
        r"dimension 1 of a tensor \[6, 5\] is 5 long.*1 left over",
        lambda x, group: collectives.scatter(x, group, 1),
    ),
    "absent": ("valid are -2 to 1", lambda x, group: collectives.scatter(x, group, 2)),
    "device": ("on meta", lambda x, group: collectives.copy(x.to("meta"), group)),
    "no_group": ("None", lambda x, group: collectives.reduce(x, None)),  # type: ignore[arg-type]
}


def _refuse(case: str) -> None:
    message, call = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call(torch.zeros(6, 5), dist.group.WORLD)


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_arguments_raise_with_a_remedy(world: Worlds, case: str) -> None:
    world(2).run(_refuse, case)


def _train_after_the_grid() -> None:
    with ProcessGrid("model=2,data=2") as grid:
        layer = ParallelLinear(4, 4, dim=0, group=grid.get_group("model"))
        layer(torch.ones(2, 4)).sum().backward()
    message = r"group along 'model' was destroyed with the grid model=2,data=2: call forward and backward before"
    with pytest.raises(RuntimeError, match=message):
        layer(torch.ones(2, 4))


def test_group_of_a_destroyed_grid_names_the_grid(world: Worlds) -> None:
    world(4).run(_train_after_the_grid)


def _disagree() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    shapes = r"(?s)ranks \[0\] on .* reduce\(tensor \[2\].*ranks \[1\] on .* reduce\(tensor \[3\]"
    with collectives.debug(), pytest.raises(DisagreementError, match=shapes):
        collectives.reduce(torch.zeros(2 + rank), group)
    with collectives.debug():  # where they agree, backward too
        y = torch.zeros(6, 5, requires_grad=True)
        collectives.reduce(collectives.copy(y, group), group).sum().backward()
    with collectives.debug(), pytest.raises(DisagreementError):
        collectives.gather(torch.zeros(2, dtype=torch.float32 if rank else torch.float64), group)


def test_debug_mode_names_ranks_that_disagree(world: Worlds) -> None:
    world(2).run(_disagree)
