"""Ranks agree on the groups to create before any exists: those that differ, fail or do not come are named on all."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ds_topo import PipelineParallelGrid, ProcessTopology
from ds_topo.errors import DisagreementError, TopologyError
from ds_topo.process_groups.agreement import MAX_MESSAGE, Round, agree
from ds_topo.process_groups.torch_names import append
from tests.support.fake_world import fake_world
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


# -- rounds of threads over one store ------------------------------------------------------------------------------


def _round(store: dist.Store, rank: int, members: Sequence[int], seconds: float, number: int = 1) -> Round:
    return Round(store, f"ds_topo/x/{number}", rank, members, timedelta(seconds=seconds), "a test")


def _verdicts(
    outcomes: Mapping[int, str],
    members: Sequence[int] | None = None,
    *,
    seconds: float = 20.0,
    store: dist.Store | None = None,
    number: int = 1,
    lines: Mapping[int, Sequence[str]] | None = None,
    later: Mapping[int, float] | None = None,
    ranks_of_host: int = 4,
    host_name: str = "h",
) -> list[str]:
    """What the ranks that come hear, each in a thread of its own, on hosts ``h0``, ``h1``, ..."""
    shared, came = store or dist.HashStore(), list(members or outcomes)
    heard: dict[int, Future[str]] = {rank: Future() for rank in outcomes}

    def host() -> str:
        return f"{host_name}{int(threading.current_thread().name) // ranks_of_host}"

    def take_part(rank: int) -> None:
        time.sleep((later or {}).get(rank, 0.0))
        own: Callable[[], Sequence[str]] | None = (lambda: lines[rank]) if lines else None
        try:
            heard[rank].set_result(_round(shared, rank, came, seconds, number).verdict(outcomes[rank], own))
        except BaseException as error:
            heard[rank].set_exception(error)

    with mock.patch.object(socket, "gethostname", side_effect=host):
        threads = [threading.Thread(target=take_part, args=(rank,), name=str(rank), daemon=True) for rank in outcomes]
        for thread in threads:
            thread.start()
        return [future.result(timeout=2 * seconds) for future in heard.values()]


def _verdict(outcomes: Mapping[int, str], members: Sequence[int] | None = None, **options: Any) -> str:
    """The one that all hear."""
    (verdict,) = set(_verdicts(outcomes, members, **options))
    return verdict


def _message(*problems: str) -> str:
    return "\n  ".join(["the ranks do not agree on a test:", *problems])


def test_rounds_that_agree_end_at_once_and_leave_one_key() -> None:
    store, started = dist.HashStore(), time.monotonic()
    for number in range(1, 5):
        assert _verdicts(dict.fromkeys((0, 2, 5), "plan: a"), store=store, number=number) == [""] * 3
        assert store.num_keys() == 1, "the last word, which some may not have read"
    assert time.monotonic() - started < 10


def _places(verdict: str, plan: str) -> list[str]:
    """Where a plan was brought, host by host; hosts are told in the order in which they came."""
    (where,) = re.findall(rf"\n  (ranks .*) -> plan: {plan}$", verdict, re.MULTILINE)
    return sorted(where.split("; "))


def test_a_disagreement_is_told_at_once_with_ranks_and_hosts() -> None:
    started = time.monotonic()
    verdict = _verdict({0: "plan: a", 1: "plan: b", 2: "plan: b", 4: "plan: b", 5: "plan: a"})
    assert _places(verdict, "a") == ["ranks [0] on h0", "ranks [5] on h1"]
    assert _places(verdict, "b") == ["ranks [1, 2] on h0", "ranks [4] on h1"]
    assert verdict.startswith("the ranks do not agree on a test:\n  ranks ")
    assert len(verdict.splitlines()) == 3
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("failed", [(0,), (0, 1), (0, 1, 2)], ids=len)
def test_failures_are_told_even_where_all_fail_alike(failed: tuple[int, ...]) -> None:
    verdict = _verdict({rank: "failed: x" if rank in failed else "plan: a" for rank in range(3)}, lines={0: [], 1: []})
    assert f"ranks {list(failed)} on h0 -> failed: x" in verdict
    assert "only rank" not in verdict, "one plan is not compared"


def test_what_is_missing_is_told_before_the_timeout_and_with_the_time_that_it_was_waited_for() -> None:
    started = time.monotonic()
    verdicts = set(_verdicts({0: "plan: a", 2: "plan: a"}, range(4), seconds=2.0))
    waited = time.monotonic() - started
    (verdict,) = verdicts
    told = re.search(r"ranks \[1, 3\] did not come within 0:00:0([\d.]+)\n  ranks \[0, 2\] on h0 -> plan: a$", verdict)
    assert told is not None, verdict
    assert 1.0 < float(told[1]) < 2.0
    assert float(told[1]) - 0.01 < waited < 2.0 + 3.0


def test_ranks_that_come_after_others_have_stopped_counting_still_agree() -> None:
    came_late = {2: 1.4}
    assert _verdict(dict.fromkeys(range(3), "plan: a"), seconds=2.0, later=came_late) == ""
    verdict = _verdict({0: "plan: a", 1: "plan: a", 2: "plan: b"}, seconds=2.0, later=came_late)
    assert verdict == _message("ranks [0, 1] on h0 -> plan: a", "ranks [2] on h0 -> plan: b")


def test_a_rank_that_died_over_the_verdict_does_not_keep_it_from_the_others() -> None:
    store = dist.HashStore()
    store.add("ds_topo/x/1/named/patience", 1)
    assert "ranks [1] did not come" in _verdict({0: "plan: a"}, range(2), seconds=1.0, store=store)


def test_a_rank_without_the_store_says_so() -> None:
    store = mock.Mock(**{"add.side_effect": RuntimeError("it is gone")})
    told = "the ranks do not agree on a test: no verdict within 0:00:20, or no connection to the store: it is gone"
    assert _round(store, 0, range(2), 20.0).verdict("plan: a", None) == told
    store = mock.Mock(**{"add.side_effect": [1, RuntimeError("it is gone")], "compare_set.return_value": b"names"})
    assert _round(store, 0, range(2), 20.0).verdict("plan: a", None) == told


@pytest.mark.parametrize("size", [2, 1000, (1 << 24) - 1])
def test_the_sum_of_what_all_bring_fits_the_stores_numbers(size: int) -> None:
    brought = set()
    for plan in range(200):
        store = mock.Mock(**{"add.side_effect": RuntimeError("enough")})
        _round(store, 0, range(size), 20.0).verdict(f"plan: {plan}", None)
        brought.add(store.add.call_args.args[1])
    assert max(brought) * size < 1 << 63
    assert min(brought) > 0
    assert len(brought) > 190 or size > 1000, "the more ranks, the fewer bits are left"


# -- what is told of many ranks and plans --------------------------------------------------------------------------


def test_many_ranks_are_counted_and_eight_of_them_named() -> None:
    eight = _verdict({rank: f"plan: {rank // 8}" for rank in range(9)}, ranks_of_host=4)
    assert _places(eight, "0") == ["ranks [0, 1, 2, 3] on h0", "ranks [4, 5, 6, 7] on h1"]
    for ranks, of_host, sizes, more in (
        (12, 4, [4, 4], "and 4 more, on 3 hosts"),
        (10, 5, [5, 3], "and 2 more, on 2 hosts"),
        (14, 7, [7, 1], "and 6 more, on 2 hosts"),
        (9, 16, [8], "and 1 more, on 1 host"),
    ):
        verdict = _verdict({rank: f"plan: {rank // ranks}" for rank in range(ranks + 1)}, ranks_of_host=of_host)
        places = _places(verdict, "0")
        named = [[int(rank) for rank in re.findall(r"\d+", place[: place.index("]")])] for place in places]
        assert sorted(map(len, named), reverse=True) == sizes
        assert all(ranks_of_one == sorted(ranks_of_one) for ranks_of_one in named)
        assert sum(place.endswith(more) for place in places) == 1


@pytest.mark.parametrize(("absent", "told"), [(32, ""), (33, " and 1 more"), (40, " and 8 more")])
def test_many_absent_ranks_are_counted_and_the_first_of_them_named(absent: int, told: str) -> None:
    verdict = _verdict({0: "plan: a"}, range(1 + absent), seconds=0.5)
    assert f"ranks {list(range(1, 33))}{told} did not come" in verdict


def test_of_many_plans_the_most_frequent_are_told_in_the_order_of_their_first_ranks() -> None:
    plans = ["a", "b", "c", "d", "d", "e", "e", "f", "g", "g"]
    verdict = _verdict({rank: f"plan: {plan}" for rank, plan in enumerate(plans)}, ranks_of_host=100)
    shown = re.findall(r"-> plan: (\w)", verdict)
    assert shown == ["a", "b", "d", "e", "g"], "a and b are as frequent as c and f, and come first"
    assert verdict.endswith("\n  and 2 further plans")
    assert "further" not in _verdict({rank: f"plan: {rank}" for rank in range(5)})


def test_a_message_of_many_long_plans_is_short() -> None:
    lines = {rank: [f"{rank} {index} {'x' * 90}" for index in range(50)] for rank in range(12)}
    verdict = _verdict({rank: f"plan: {rank} {'long ' * 5000}" for rank in lines}, lines=lines)
    assert len(verdict) <= MAX_MESSAGE
    assert verdict.count("long ") > 5 * 50, "something of each"
    assert verdict.count(" ...") == 5 + 2, "where each plan and each comparison ends"
    assert verdict.count("only rank 0: ") == 2


def test_a_plan_of_five_hundred_letters_is_told_whole_and_a_longer_one_to_its_first() -> None:
    whole, longer = f"plan: {'a' * 494}", f"plan: {'b' * 495}"
    verdict = _verdict({0: whole, 1: longer})
    assert verdict == _message(f"ranks [0] on h0 -> {whole}", f"ranks [1] on h0 -> {longer[:496]} ...")


def test_a_message_of_long_names_of_hosts_is_short_too() -> None:
    plans = {rank: f"plan: {rank // 8} {'long ' * 500}" for rank in range(40)}
    lines = {rank: [plan] for rank, plan in plans.items()}
    verdict = _verdict(plans, lines=lines, ranks_of_host=1, host_name="host-" * 20)
    assert 2000 < len(verdict) <= MAX_MESSAGE
    assert verdict.count("only rank 0: ") == 2, "there is room for what differs"
    assert "host-" * 13 not in verdict, "the first 64 letters of a host's name"


def test_lines_of_three_plans_are_compared_and_failures_are_none() -> None:
    lines = {0: ["same", "first"], 1: ["same", "second"], 2: ["first", "same"], 3: ["fourth"], 4: ["failed"]}
    outcomes = {0: "plan: a", 1: "plan: b", 2: "plan: c", 3: "plan: d", 4: "failed: x"}
    assert _verdict(outcomes, lines=lines).split("\n  ")[6:] == [
        "only rank 0: ['first']; only rank 1: ['second']",
        "rank 2: the same in another order",
    ]
    assert _verdict({rank: outcomes[rank] for rank in (1, 3)}, lines=lines).split("\n  ")[3:] == [
        "only rank 1: ['same', 'second']; only rank 3: ['fourth']"
    ]


def test_a_rank_that_died_before_it_showed_its_lines_leaves_the_message_as_it_is() -> None:
    store = dist.HashStore()
    append(store, "ds_topo/x/1/named/came", "0 abc h0\n")
    store.add("ds_topo/x/1/named/number", 1)
    store.add("ds_topo/x/1/sum", 1)
    verdict = _verdict({1: "plan: mine"}, range(2), seconds=1.0, store=store, lines={1: ["mine"]})
    assert verdict == _message("ranks [0] on h0 -> something of digest abc", "ranks [1] on h0 -> plan: mine")


# -- one round after the other -------------------------------------------------------------------------------------


def test_every_round_of_every_set_of_ranks_has_a_token_of_its_own() -> None:
    sets: list[Sequence[int]] = [range(4), range(3), range(1, 4), range(0, 4, 3), [0, 1, 3], [0, 2, 3], [0, 13], [0, 1]]
    with fake_world(0, 14):
        tokens = [agree("plan", members, timedelta(seconds=1)) for members in sets * 3]
        again = [agree("plan", members, timedelta(seconds=1)) for members in ([0, 1, 2, 3], range(4), [1, 2, 3])]
    assert len({*tokens, *again}) == len(tokens) + len(again)
    first, third, *runs = (token.rsplit("/", 1) for token in (tokens[0], tokens[2], *again))
    assert [where for where, _ in runs] == [first[0], first[0], third[0]], "the same set, however it is written"
    assert [int(number) for _, number in runs] == [int(first[1]) + 3, int(first[1]) + 4, int(third[1]) + 3]


def test_a_failure_is_raised_where_there_is_nobody_to_tell() -> None:
    with fake_world(0, 4):
        with pytest.raises(KeyError, match="mine"):
            agree("plan", range(4), timedelta(seconds=1), failure=KeyError("mine"))
        assert agree("plan", range(4), timedelta(seconds=1))
