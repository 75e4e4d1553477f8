"""A key of the store is deleted when all ranks that may read it have come to a later agreement, and not before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from ds_topo import PipelineParallelGrid
from ds_topo.errors import DisagreementError
from ds_topo.health.first_cause import ENVIRONMENT
from ds_topo.launch.council import Round, leave, take_due
from tests.support.world import Worlds


def test_a_key_is_due_once_when_all_its_readers_have_come() -> None:
    store, other = dist.HashStore(), dist.HashStore()
    leave(store, 0, [0, 1], ["a", "b"])
    leave(store, 0, [0, 2], ["c"])
    leave(store, 1, [0, 1], ["of rank 1"])
    leave(other, 0, [0], ["of another job"])
    assert take_due(store, 0, [0]) == []
    assert take_due(store, 0, range(2)) == ["a", "b"]
    assert take_due(store, 0, range(2)) == []
    assert take_due(store, 0, range(3)) == ["c"]
    assert take_due(store, 1, range(3)) == ["of rank 1"]


def _verdicts(store: dist.Store, number: int, came: Sequence[int], outcomes: Sequence[str], seconds: float) -> set[str]:
    """Run the ranks that come to a round of three in threads; return the different verdicts."""

    def take_part(rank: int) -> str:
        limit = timedelta(seconds=seconds)
        round_ = Round(store, f"ds_topo/x/{number}", rank, range(3), "a test", limit, DisagreementError)
        return round_.verdict(outcomes[rank], [outcomes[rank]])

    with ThreadPoolExecutor(len(came)) as threads:
        return set(threads.map(take_part, came))


def test_the_next_round_deletes_the_keys_of_a_disagreement() -> None:
    store, differ = dist.HashStore(), ["plan: a", "plan: b", "plan: c"]
    counted = []
    for number in (1, 2, 3):
        (verdict,) = _verdicts(store, number, range(3), differ, 20.0)
        assert "only rank 0" in verdict, "their lines were read"
        counted.append(store.num_keys())
    assert counted[0] > 3, "which ranks may not have read"
    assert counted == counted[:1] * 3
    assert _verdicts(store, 4, range(3), ["plan: a"] * 3, 20.0) == {""}
    assert store.num_keys() == 1, "the verdict"


def test_keys_stay_until_an_absent_rank_has_come() -> None:
    store, alike = dist.HashStore(), ["plan: a"] * 3
    (verdict,) = _verdicts(store, 1, (0, 1), alike, 1.0)
    assert "ranks [2] did not come" in verdict
    left = store.num_keys()
    _verdicts(store, 2, (0, 1), alike, 1.0)
    assert store.num_keys() == 2 * left, "rank 2 has left no round yet"
    assert _verdicts(store, 1, (2,), alike, 1.0) == {verdict}, "the same as on the others"
    _verdicts(store, 2, (2,), alike, 1.0)
    assert _verdicts(store, 3, range(3), alike, 20.0) == {""}
    assert store.num_keys() == 1


def _addresses() -> list[int]:
    """Count keys of the store with a grid, without it, and after agreements of some and of all of its ranks."""
    store = dist.distributed_c10d._get_default_store()
    os.environ[ENVIRONMENT] = "off"  # its keys do not depend on the number of grids

    def keys() -> int:
        dist.barrier()
        counted = int(store.num_keys())
        dist.barrier()
        return counted

    before, counted = keys(), []
    with PipelineParallelGrid("data=2,model=2"):
        counted.append(keys())
    counted.append(keys())
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    of_torch = keys() - counted[-1]
    with PipelineParallelGrid("model=2", pair):
        dist.barrier()  # gloo fails where a member goes while another one still connects
    counted.append(keys() - of_torch)
    PipelineParallelGrid("data=4").destroy()
    counted.append(keys() - of_torch)
    return [count - before for count in counted]


def test_an_address_stays_until_all_members_of_its_group_have_come_to_an_agreement(world: Worlds) -> None:
    """There are a verdict, two addresses per rank and a counter per pair; pairs delete theirs and leave new ones."""
    assert world(4).run(_addresses) == [[1 + 8 + 4, 13, 1 + 4 + 2 + 2 + 4 + 2, 1]] * 4
