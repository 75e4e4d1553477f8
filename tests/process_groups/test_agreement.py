"""Ranks agree on the groups to create before any exists. Every rank names those that differ, fail or do not come."""

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
from ds_topo.base.torch_names import append
from ds_topo.errors import DisagreementError, TopologyError
from ds_topo.launch import council
from ds_topo.launch.council import MAX_MESSAGE, Round, agree
from tests.support.fake_world import fake_world
from tests.support.process_groups import number_of_groups
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


def _build(specs: list[Any], timeout: float) -> str:
    """Return the error that this rank raised. No group may exist by then."""
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


def test_ranks_with_another_axis_order_are_named_on_every_rank(world: Worlds) -> None:
    specs = ["pipe=2,data=2", "data=2,pipe=2", "pipe=2,data=2", "data=2,pipe=2"]
    errors = world(4).run(_build, specs, 20.0)
    assert len(set(errors)) == 1, "the same on all ranks"
    assert errors[0].startswith("DisagreementError: the ranks do not agree on the process groups to create")
    assert re.search(r"ranks \[0, 2\] on \S+ -> plan: grid pipe=2,data=2", errors[0])
    assert re.search(r"ranks \[1, 3\] on \S+ -> plan: grid data=2,pipe=2", errors[0])


def test_a_folded_topology_differs_from_the_same_degrees_unfolded(world: Worlds) -> None:
    folded = ProcessTopology.from_spec("data=2,pipe=2,seq=2").fold({"pipe": ["pipe"], "data": ["data", "seq"]})
    errors = world(8).run(_build, [folded, *[ProcessTopology(folded.axes, folded.dims)] * 7], 20.0)
    assert all("do not agree" in error for error in errors)


def test_topologies_with_equal_groups_agree(world: Worlds) -> None:
    joined = ProcessTopology.from_spec("pipe=2,data=2,seq=2").fold({"pipe": ["pipe"], "data": ["data", "seq"]})
    assert world(8).run(_build, [joined, *["pipe=2,data=4"] * 7], 20.0) == ["built"] * 8


def test_a_rank_with_a_wrong_world_size_is_named_on_the_others(world: Worlds) -> None:
    errors = world(4).run(_build, ["pipe=2,data=2", "pipe=2,data=2", "pipe=2,data=3", "pipe=2,data=2"], 20.0)
    assert errors[2].startswith("WorldSizeError: ")
    for rank in (0, 1, 3):
        assert re.search(r"ranks \[2\] on \S+ -> failed: .* is for 6 ranks", errors[rank])


def test_a_wrong_world_size_on_every_rank_raises_on_every_rank(world: Worlds) -> None:
    errors = world(4).run(_build, ["pipe=2,data=3"] * 4, 20.0)
    assert len(set(errors)) == 1
    assert errors[0].startswith("WorldSizeError: ")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("absent", [0, 3], ids="rank{}".format)
def test_an_absent_rank_is_named(world: Worlds, absent: int) -> None:
    specs = ["data=4" if rank != absent else None for rank in range(4)]
    for rank, error in enumerate(world(4).run(_build, specs, 5.0)):  # the others come within a tenth of it
        assert error == "did not come" if rank == absent else re.search(rf"\[{absent}\]", error), error


def _come_in_turn() -> str:
    rank, timeout = dist.get_rank(), 3.0
    time.sleep([1.0, 0.0, 4.0][rank])
    return _build(["pipe=3"] * 3, timeout)


@pytest.mark.thorough
def test_a_rank_that_came_in_time_raises_if_another_rank_timed_out(world: Worlds) -> None:
    """Rank 1 has timed out before rank 2 comes, so ranks 0 and 2 must not create groups with it."""
    for rank, error in enumerate(world(3).run(_come_in_turn)):
        assert "ranks [2] did not come within" in error, rank


def _ask_alone() -> None:
    with PipelineParallelGrid("pipe=2,data=2,model=2", timeout=timedelta(seconds=1.5)) as grid:
        if dist.get_rank() == 5:
            with pytest.raises(DisagreementError, match=r"ranks \[1, 3, 7\] did not come"):
                grid.get_group(("pipe", "data"))
        dist.barrier()


def test_a_group_that_one_rank_alone_requests_names_its_peers(world: Worlds) -> None:
    world(8).run(_ask_alone)


def test_a_rank_that_died_before_it_was_counted_is_named_with_its_plan() -> None:
    store = dist.HashStore()
    append(store, "ds_topo/x/1/came/0", '[1, "host1", "abc", "plan: other"]\n')
    verdict = _round(store, 0, range(3), 1.0).verdict("plan: mine", None)
    assert "ranks [2] did not come within" in verdict
    assert "ranks [1] on host1 -> plan: other" in verdict


# -- rounds of threads over one store ------------------------------------------------------------------------------


def _round(store: dist.Store, rank: int, members: Sequence[int], seconds: float, number: int = 1) -> Round:
    limit = timedelta(seconds=seconds)
    return Round(store, f"ds_topo/x/{number}", rank, members, "a test", limit, DisagreementError)


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
    """Run the ranks that come in threads, on hosts ``h0``, ``h1``, ...; return their verdicts."""
    shared, came = store or dist.HashStore(), list(members or outcomes)
    heard: dict[int, Future[str]] = {rank: Future() for rank in outcomes}

    def host() -> str:
        return f"{host_name}{int(threading.current_thread().name) // ranks_of_host}"

    def take_part(rank: int) -> None:
        time.sleep((later or {}).get(rank, 0.0))
        own = lines.get(rank, []) if lines else None
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
    """Return the one verdict of all ranks."""
    (verdict,) = set(_verdicts(outcomes, members, **options))
    return verdict


def _message(*problems: str) -> str:
    return "\n  ".join(["the ranks do not agree on a test:", *problems])


def test_agreement_ends_at_once_and_leaves_one_key() -> None:
    store, started = dist.HashStore(), time.monotonic()
    for number in range(1, 5):
        assert _verdicts(dict.fromkeys((0, 2, 5), "plan: a"), store=store, number=number) == [""] * 3
        assert store.num_keys() == 1, "the verdict, which some ranks may not have read"
    assert time.monotonic() - started < 10


def _places(verdict: str, plan: str) -> list[str]:
    """Return the ranks and hosts that brought a plan, sorted, since hosts are listed in the order of arrival."""
    (where,) = re.findall(rf"\n  (ranks .*) -> plan: {plan}$", verdict, re.MULTILINE)
    return sorted(where.split("; "))


def test_a_disagreement_names_ranks_and_hosts_at_once() -> None:
    started, store = time.monotonic(), dist.HashStore()
    verdict = _verdict({0: "plan: a", 1: "plan: b", 2: "plan: b", 4: "plan: b", 5: "plan: a"}, store=store)
    assert store.add("ds_topo/x/1/number/0", 0) == 5, "rank 0 waits for those that came, and counts nobody twice"
    assert _places(verdict, "a") == ["ranks [0] on h0", "ranks [5] on h1"]
    assert _places(verdict, "b") == ["ranks [1, 2] on h0", "ranks [4] on h1"]
    assert verdict.startswith("the ranks do not agree on a test:\n  ranks ")
    assert len(verdict.splitlines()) == 3
    assert time.monotonic() - started < 10


def test_rank_0_alone_waits_until_all_that_came_have_read_a_disagreement() -> None:
    store, waits = dist.HashStore(), list[tuple[str, Callable[[], bool], timedelta]]()

    def linger(is_over: Callable[[], bool], limit: timedelta) -> None:
        waits.append((threading.current_thread().name, is_over, limit))

    with mock.patch.object(council, "linger", linger):
        _verdict({0: "plan: a", 1: "plan: b", 2: "plan: b"}, seconds=4.0, store=store)
    ((rank, is_over, limit),) = waits
    assert (rank, is_over(), limit) == ("0", True, timedelta(seconds=1))
    assert store.add("ds_topo/x/1/read/0", -1) == 2, "each rank has counted itself once"
    assert not is_over()


@pytest.mark.parametrize("failed", [(0,), (0, 1), (0, 1, 2)], ids=len)
def test_failures_are_reported_even_if_all_ranks_fail_alike(failed: tuple[int, ...]) -> None:
    outcomes, store = {rank: "failed: x" if rank in failed else "plan: a" for rank in range(3)}, dist.HashStore()
    verdict = _verdict(outcomes, lines={rank: ["mine"] for rank in outcomes}, store=store)
    assert f"ranks {list(failed)} on h0 -> failed: x" in verdict
    assert not any(store.check([f"ds_topo/x/1/difference/{rank}/0"]) for rank in range(3)), "one plan is not compared"


def test_absent_ranks_are_named_before_the_timeout_with_the_time_waited() -> None:
    started = time.monotonic()
    verdicts = set(_verdicts({0: "plan: a", 2: "plan: a"}, range(4), seconds=2.0))
    waited = time.monotonic() - started
    (verdict,) = verdicts
    told = re.search(
        r"ranks \[1, 3\] did not come within 0:00:0([\d.]+): let every rank .*\n  ranks \[0, 2\] on h0 -> plan: a$",
        verdict,
    )
    assert told is not None, verdict
    assert 1.0 < float(told[1]) < 2.0
    assert float(told[1]) - 0.01 < waited < 2.0 + 3.0


def test_a_late_rank_still_takes_part_before_the_verdict() -> None:
    came_late = {2: 1.4}
    assert _verdict(dict.fromkeys(range(3), "plan: a"), seconds=2.0, later=came_late) == ""
    verdict = _verdict({0: "plan: a", 1: "plan: a", 2: "plan: b"}, seconds=2.0, later=came_late)
    assert verdict == _message("ranks [0, 1] on h0 -> plan: a", "ranks [2] on h0 -> plan: b")


def test_a_verdict_is_written_if_the_rank_that_was_to_write_it_died() -> None:
    store = dist.HashStore()
    store.add("ds_topo/x/1/patience/0", 1)
    assert "ranks [1] did not come" in _verdict({0: "plan: a"}, range(2), seconds=1.0, store=store)


def test_a_rank_waits_for_the_timeout_in_all() -> None:
    store, waited = dist.HashStore(), list[float]()

    def wait(keys: Sequence[str], limit: timedelta) -> None:
        waited.append(limit.total_seconds())
        raise dist.DistStoreError("wait timeout")

    patient: Any = mock.Mock(wraps=store, wait=wait)
    patient.add("ds_topo/x/1/patience/0", 1)
    assert "ranks [1] did not come" in _round(patient, 0, range(2), 20.0).verdict("plan: a", None)
    assert sum(waited) == pytest.approx(20.0)


def test_a_lost_store_connection_is_reported() -> None:
    store = mock.Mock(**{"add.side_effect": RuntimeError("it is gone")})
    told = _round(store, 0, range(2), 20.0).verdict("plan: a", None)
    assert told.startswith("the ranks do not agree on a test: the connection to the store of the job was lost: ")
    assert told.endswith(": it is gone")
    assert "0:00:20" not in told


def test_a_store_that_does_not_answer_in_time_is_reported() -> None:
    store = mock.Mock(**{"add.side_effect": dist.DistStoreError("wait timeout after 20000ms")})
    told = "the ranks do not agree on a test: no answer within 0:00:20: wait timeout after 20000ms"
    assert _round(store, 0, range(2), 20.0).verdict("plan: a", None) == told


# -- messages about many ranks and plans ---------------------------------------------------------------------------


def test_eight_ranks_of_a_plan_are_named_and_the_rest_counted() -> None:
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


@pytest.mark.parametrize(("absent", "told"), [(32, ""), (33, " and 1 further"), (40, " and 8 further")])
def test_the_first_absent_ranks_are_named_and_the_rest_counted(absent: int, told: str) -> None:
    verdict = _verdict({0: "plan: a"}, range(1 + absent), seconds=0.5)
    assert f"ranks {list(range(1, 33))}{told} did not come" in verdict


def test_the_most_frequent_plans_are_listed_in_the_order_of_their_first_ranks() -> None:
    plans = ["a", "b", "c", "d", "d", "e", "e", "f", "g", "g"]
    verdict = _verdict({rank: f"plan: {plan}" for rank, plan in enumerate(plans)}, ranks_of_host=100)
    shown = re.findall(r"-> plan: (\w)", verdict)
    assert shown == ["a", "b", "d", "e", "g"], "a and b are as frequent as c and f, and come first"
    assert verdict.endswith("\n  and 2 further plans")
    assert "further" not in _verdict({rank: f"plan: {rank}" for rank in range(5)})


def test_a_message_about_many_long_plans_is_bounded() -> None:
    lines = {rank: [f"{rank} {index} {'x' * 90}" for index in range(50)] for rank in range(12)}
    verdict = _verdict({rank: f"plan: {rank} {'long ' * 5000}" for rank in lines}, lines=lines)
    assert len(verdict) <= MAX_MESSAGE
    assert verdict.count("long ") > 5 * 50, "something of each"
    assert verdict.count(" ...") == 5 + 2, "where each plan and each comparison ends"
    assert verdict.count("only rank 0: ") == 2


def test_plans_beyond_500_characters_are_cut() -> None:
    whole, longer = f"plan: {'a' * 494}", f"plan: {'b' * 495}"
    verdict = _verdict({0: whole, 1: longer})
    assert verdict == _message(f"ranks [0] on h0 -> {whole}", f"ranks [1] on h0 -> {longer[:496]} ...")


def test_a_message_with_long_host_names_is_bounded() -> None:
    plans = {rank: f"plan: {rank // 8} {'long ' * 500}" for rank in range(40)}
    lines = {rank: [plan] for rank, plan in plans.items()}
    verdict = _verdict(plans, lines=lines, ranks_of_host=1, host_name="host-" * 20)
    assert 2000 < len(verdict) <= MAX_MESSAGE
    assert verdict.count("only rank 0: ") == 2, "there is room for what differs"
    assert "host-" * 13 not in verdict, "the first 64 letters of a host's name"


def test_lines_of_three_plans_are_compared_and_failures_are_skipped() -> None:
    lines = {0: ["same", "first"], 1: ["same", "second"], 2: ["first", "same"], 3: ["fourth"], 4: ["failed"]}
    outcomes = {0: "plan: a", 1: "plan: b", 2: "plan: c", 3: "plan: d", 4: "failed: x"}
    assert _verdict(outcomes, lines=lines).split("\n  ")[6:] == [
        "only rank 0: ['first']; only rank 1: ['second']",
        "rank 2: the same in another order",
    ]
    assert _verdict({rank: outcomes[rank] for rank in (1, 3)}, lines=lines).split("\n  ")[3:] == [
        "only rank 1: ['same', 'second']; only rank 3: ['fourth']"
    ]


def test_the_verdict_stands_where_a_rank_died_before_it_wrote_its_lines() -> None:
    store = dist.HashStore()
    append(store, "ds_topo/x/1/came/0", '[0, "h0", "abc", "plan: other"]\n')
    store.add("ds_topo/x/1/number/0", 1)
    verdict = _verdict({1: "plan: mine"}, range(2), seconds=1.0, store=store, lines={1: ["mine"]})
    assert verdict == _message("ranks [0] on h0 -> plan: other", "ranks [1] on h0 -> plan: mine")


# -- one round after the other -------------------------------------------------------------------------------------


def test_every_round_of_every_set_of_ranks_has_its_own_token() -> None:
    sets: list[Sequence[int]] = [range(4), range(3), range(1, 4), range(0, 4, 3), [0, 1, 3], [0, 2, 3], [0, 13], [0, 1]]
    with fake_world(0, 14):
        tokens = [agree("plan", members, timedelta(seconds=1)) for members in sets * 3]
        again = [agree("plan", members, timedelta(seconds=1)) for members in ([0, 1, 2, 3], range(4), [1, 2, 3])]
    assert len({*tokens, *again}) == len(tokens) + len(again)
    first, third, *runs = (token.rsplit("/", 1) for token in (tokens[0], tokens[2], *again))
    assert [where for where, _ in runs] == [first[0], first[0], third[0]], "equal sets, whatever their type"
    assert [int(number) for _, number in runs] == [int(first[1]) + 3, int(first[1]) + 4, int(third[1]) + 3]


def test_a_round_may_last_a_little_longer_than_its_own_timeout() -> None:
    limits = []

    def within(limit: timedelta, what: str, function: Callable[[], str]) -> str:
        limits.append(limit.total_seconds())
        return ""

    with (
        fake_world(0, 2),
        mock.patch.object(council, "communicates", return_value=True),
        mock.patch.object(council, "within", within),
    ):
        agree("plan", range(2), timedelta(seconds=10))
    assert limits == [10 * council.UNANSWERED_AFTER], "so the message of the round itself is the one that is seen"


def test_a_failure_is_raised_without_other_processes() -> None:
    with fake_world(0, 4):
        with pytest.raises(KeyError, match="mine"):
            agree("plan", range(4), timedelta(seconds=1), failure=KeyError("mine"))
        assert agree("plan", range(4), timedelta(seconds=1))


def test_a_rank_that_waits_long_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(council, "NOTICE_AFTER", timedelta(seconds=0.5))
    assert "ranks [1, 3] did not come within" in _verdict({0: "plan", 2: "plan"}, members=range(4), seconds=2.0)
    (notice,) = capsys.readouterr().err.splitlines()
    assert "for ranks [1, 3] to agree on a test. Call it on every rank" in notice
