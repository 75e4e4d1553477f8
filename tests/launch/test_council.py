"""A council decides on the first rank; the others read its answer, its error, or raise in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast
from unittest import mock

import pytest
import torch.distributed as dist

from ds_topo.errors import CheckpointError, DamagedCheckpointError, StoreTimeoutError
from ds_topo.launch import council as council_module
from ds_topo.launch.council import MOMENT, Council, apart
from tests.support.served_store import errors_of

Part = Callable[[Council], Any]


def _council(store: dist.Store, rank: int, size: int, seconds: float = 10.0) -> Council:
    return Council(store, "c", rank, range(size), "a test", timedelta(seconds=seconds), CheckpointError)


def _outcomes(part: Part, *, size: int) -> list[Any]:
    """Let all ranks do a part in threads; return the result of each."""
    shared = dist.HashStore()
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: part(_council(shared, rank, size)), range(size)))


class _Impatient:
    """A store whose waits end at once if a key is missing. It notes how long they would have lasted."""

    def __init__(self) -> None:
        self._store, self.waited = dist.HashStore(), list[float]()

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self.waited.append(limit.total_seconds())
        self._store.wait(keys, timedelta(milliseconds=1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _impatient(size: int, *posted: int, seconds: float) -> tuple[_Impatient, list[Council]]:
    """Return a store in which these ranks have posted their number, and the council as each rank sees it."""
    store = _Impatient()
    councils = [_council(cast("dist.Store", store), rank, size, seconds) for rank in range(size)]
    for rank in posted:
        councils[rank]._write(f"who/{rank}", rank)
    return store, councils


def test_every_member_reads_what_the_first_one_decided() -> None:
    def part(council: Council) -> Any:
        listed = council.decide("one", council.rank + 1, lambda posted: sorted(posted.items()))
        alone = council.decide("two", None, lambda posted: [posted, "alone"], posting=())
        some = council.decide("three", council.rank, lambda posted: sum(posted.values()), posting=(1, 2))
        return [[list(each) for each in listed], alone, some]

    assert _outcomes(part, size=3) == [[[[0, 1], [1, 2], [2, 3]], [{}, "alone"], 3]] * 3


def test_an_error_is_raised_on_all_ranks_in_its_class_and_the_council_goes_on() -> None:
    def part(council: Council) -> list[str]:
        said = []
        for error in (DamagedCheckpointError("it is\n damaged"), KeyError("x")):
            judge = mock.Mock(side_effect=error)
            with pytest.raises(CheckpointError) as caught:
                council.decide(f"about {error!r}", council.rank, judge)
            said.append(f"{type(caught.value).__name__}: {caught.value}")
        return [*said, council.decide("again", 1, lambda posted: f"{len(posted)} came")]

    damaged, other = "DamagedCheckpointError: it is damaged", "CheckpointError: a test: rank 0: KeyError: 'x'"
    assert _outcomes(part, size=2) == [[damaged, other, "2 came"]] * 2


def test_ranks_that_did_not_come_are_absent_and_not_awaited_at_the_end() -> None:
    store, councils = _impatient(4, 2, seconds=10.0)
    for rank in (0, 2):
        assert councils[rank].decide("who", rank, sorted) == [0, 2]
    councils[2].end()
    assert store.check(["c/read/all"]), "rank 0 waits for rank 2 alone"


@pytest.mark.parametrize(("seconds", "moment"), [(60.0, MOMENT.total_seconds()), (1.0, 0.25)])
def test_rank_0_waits_a_moment_for_readers_and_no_longer(seconds: float, moment: float) -> None:
    store, councils = _impatient(2, 1, seconds=seconds)
    councils[0].decide("who", 0, len)
    store.waited.clear()
    councils[0].end()
    assert store.waited == [moment]


def test_a_first_rank_that_dies_before_it_decides_is_named_on_the_others() -> None:
    store, councils = _impatient(2, seconds=0.5)
    said = "a test: rank 0 did not report its result, no answer within 0:00:00.500000: "
    with pytest.raises(CheckpointError, match=f"^{said}"):
        councils[1].decide("who", 1, len)
    assert store.waited == [0.5]


def test_a_first_rank_that_comes_late_is_awaited_for_the_spread() -> None:
    """And a rank that does not come at all is still known to all."""
    store, councils = _impatient(3, 1, seconds=10.0)
    for rank in (0, 1):
        assert councils[rank].decide("who", rank, sorted, spread=timedelta(seconds=3.0)) == [0, 1]
    assert store.waited == [3.0 + 9.0, 2 * 3.0 + 10.0], "the first rank may itself come last"


def test_a_lost_store_is_reported_on_each_rank() -> None:
    store = mock.Mock(**{"set.side_effect": RuntimeError("it is gone"), "host": "", "port": 0})
    for rank in (0, 1):
        with pytest.raises(CheckpointError, match=r"a test: .*connection to the store of the job was lost.*it is gone"):
            _council(store, rank, 2).decide("who", rank, len)


@pytest.mark.parametrize("length", [0, 97, 98, 99, 100, 950])
def test_long_values_travel_in_parts(length: int) -> None:
    def part(council: Council) -> Any:
        return council.decide("text", "x" * length, lambda posted: "".join(posted.values()))

    with mock.patch.object(council_module, "_PART", 100), mock.patch.object(council_module, "_AT_ONCE", 2):
        assert _outcomes(part, size=5) == ["x" * 5 * length] * 5


class _Counting:
    """A store that counts requests."""

    def __init__(self, store: dist.Store, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        if name in ("set", "get", "wait", "check", "add", "multi_get", "compare_set"):
            self._counts[name] += 1
        return getattr(self._store, name)


def test_a_decision_takes_three_requests_of_a_rank_and_few_of_the_first() -> None:
    store, size = dist.HashStore(), 600
    counts = [Counter[str](), Counter[str]()]
    for rank in range(2, size):
        _council(store, rank, size)._write(f"who/{rank}", rank)

    def part(rank: int) -> Any:
        return _council(cast("dist.Store", _Counting(store, counts[rank])), rank, size).decide("who", rank, len)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(part, range(2))) == [size, size]
    assert counts == [{"set": 2, "wait": 1, "multi_get": 3}, {"set": 1, "wait": 1, "multi_get": 1}]


def test_store_whose_server_has_ended_is_asked_once() -> None:
    asked: list[object] = []
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(minutes=10))
    assert apart(client, timedelta(minutes=1), "a key", lambda store: store.add("key", 1)) == 1
    del server
    for _ in range(2):
        [error] = errors_of(lambda: apart(client, timedelta(minutes=1), "a key", asked.append), seconds=30)
        assert isinstance(error, StoreTimeoutError)
    assert not asked
