"""Ranks agree on the groups to create before any exists: those that differ, fail or do not come are named on all."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ds_topo import PipelineParallelGrid, ProcessTopology
from ds_topo.errors import DisagreementError, TopologyError
from ds_topo.process_groups.agreement import Round
from ds_topo.process_groups.torch_names import append
from tests.support.process_groups import number_of_groups
from tests.support.world import Worlds


def _build(specs: list[Any], timeout: float) -> str:
    """The error that this rank raised; nothing may exist by then."""
    spec, before = specs[dist.get_rank()], number_of_groups()
    if spec is None:
        time.sleep(timeout + 1)
        return "did not come"
    try:
        PipelineParallelGrid(spec, timeout=timedelta(seconds=timeout)).destroy()
    except (DisagreementError, TopologyError) as error:
        assert number_of_groups() == before, "nothing was created"
        return f"{type(error).__name__}: {error}"
    return "built"


def test_ranks_with_another_order_are_named_on_all(world: Worlds) -> None:
    specs = ["pipe=2,data=2", "data=2,pipe=2", "pipe=2,data=2", "data=2,pipe=2"]
    errors = world(4).run(_build, specs, 20.0)
    assert len(set(errors)) == 1, "the same on all ranks"
    assert errors[0].startswith("DisagreementError: the ranks do not agree on the process groups to create")
    assert re.search(r"ranks \[0, 2\] on \S+ -> plan: grid pipe=2,data=2", errors[0])
    assert re.search(r"ranks \[1, 3\] on \S+ -> plan: grid data=2,pipe=2", errors[0])


def test_a_folded_topology_is_not_taken_for_its_spec(world: Worlds) -> None:
    folded = ProcessTopology.from_spec("data=2,pipe=2,seq=2").fold({"pipe": ["pipe"], "data": ["data", "seq"]})
    errors = world(8).run(_build, [folded, *[ProcessTopology(folded.axes, folded.dims)] * 7], 20.0)
    assert all("do not agree" in error for error in errors)


def test_equal_placements_under_other_names_agree(world: Worlds) -> None:
    joined = ProcessTopology.from_spec("pipe=2,data=2,seq=2").fold({"pipe": ["pipe"], "data": ["data", "seq"]})
    assert world(8).run(_build, [joined, *["pipe=2,data=4"] * 7], 20.0) == ["built"] * 8


def test_a_rank_with_a_wrong_product_is_named_on_the_others(world: Worlds) -> None:
    errors = world(4).run(_build, ["pipe=2,data=2", "pipe=2,data=2", "pipe=2,data=3", "pipe=2,data=2"], 20.0)
    assert errors[2].startswith("WorldSizeError: ")
    for rank in (0, 1, 3):
        assert re.search(r"ranks \[2\] on \S+ -> failed: .* is for 6 ranks", errors[rank])


def test_a_wrong_product_everywhere_raises_everywhere(world: Worlds) -> None:
    errors = world(4).run(_build, ["pipe=2,data=3"] * 4, 20.0)
    assert len(set(errors)) == 1
    assert errors[0].startswith("WorldSizeError: ")


@pytest.mark.parametrize("absent", [0, 3], ids="rank{}".format)
def test_a_rank_that_never_comes_is_named(world: Worlds, absent: int) -> None:
    specs = ["data=4" if rank != absent else None for rank in range(4)]
    for rank, error in enumerate(world(4).run(_build, specs, 2.0)):
        assert error == "did not come" if rank == absent else re.search(rf"\[{absent}\]", error)


def _come_in_turn() -> str:
    rank, timeout = dist.get_rank(), 3.0
    time.sleep([1.0, 0.0, 4.0][rank])
    return _build(["pipe=3"] * 3, timeout)


def test_a_rank_that_gave_up_is_not_waited_for(world: Worlds) -> None:
    """Rank 1 has left by the time that ranks 0 and 2 have both come: they must not start to create groups with it."""
    for rank, error in enumerate(world(3).run(_come_in_turn)):
        assert "ranks [2] did not come within" in error, rank


def _ask_alone() -> None:
    with PipelineParallelGrid("pipe=2,data=2,model=2", timeout=timedelta(seconds=1.5)) as grid:
        if dist.get_rank() == 5:
            with pytest.raises(DisagreementError, match=r"ranks \[1, 3, 7\] did not come"):
                grid.get_group(("pipe", "data"))
        dist.barrier()


def test_a_group_that_its_peers_do_not_ask_for_names_them(world: Worlds) -> None:
    world(8).run(_ask_alone)


def test_a_rank_that_died_before_it_showed_its_plan_holds_nobody_up() -> None:
    """Its line is there, the text that another rank with the same plan was about to write is not."""
    store = dist.HashStore()
    append(store, "ds_topo/x/1/named/came", "1 abc host1\n")
    taking_part = Round(store, "ds_topo/x/1", 0, range(3), timedelta(seconds=1), "a test")
    verdict = taking_part.verdict("plan: mine", None)
    assert "ranks [2] did not come within" in verdict
    assert "ranks [1] on host1 -> something of digest abc" in verdict
