"""A ring of heartbeats over one store names ranks at fault, ignores slow ones, and bounds its messages."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from ds_topo.base.torch_names import clone
from ds_topo.health.activity import Activity, Wait
from ds_topo.health.heartbeat import (
    FAILED,
    GONE,
    HAS_FAILED,
    TRANSPORT,
    Heartbeat,
    RankFault,
    Ring,
    blocked,
    message,
    named,
)
from ds_topo.health.witness import Address
from ds_topo.launch.launchers import COORDINATE
from tests.support.exhaustive import mark_exhaustive

INTERVAL, LIMIT = 0.05, 0.5
SIZE = 4
EVERYONE = tuple(range(SIZE))
Look = Callable[[], Activity]


@contextmanager
def witness(answer: bytes | None) -> Iterator[Address]:
    """Serve an address with this answer. With ``b""`` nothing listens there, with None nothing answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        address = Address(*server.getsockname(), question="00" * 16, answer="11" * 16)
        if answer == b"":
            server.close()
        elif answer is not None:
            threading.Thread(target=_answer, args=(server, answer), daemon=True).start()
        yield address


def _answer(server: socket.socket, answer: bytes) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.recv(16)
            connection.sendall(bytes.fromhex("11" * 16) + answer)


class Job:
    """A job whose ranks are threads."""

    def __init__(
        self,
        stack: ExitStack,
        looks: dict[int, Look] | None = None,
        answers: dict[int, bytes | None] | None = None,
        limit: float = LIMIT,
    ) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.hearts = [
            Heartbeat(
                clone(self.store),
                Ring("watch", rank, f"node{rank}", SIZE, limit, INTERVAL),
                (looks or {}).get(rank, Activity),
                serves=False,
            )
            for rank in EVERYONE
        ]
        for rank, heart in enumerate(self.hearts):
            heart.prepare(stack.enter_context(witness((answers or {}).get(rank, b"S"))))
        stack.callback(self.stop)

    def start(self, *without: int) -> None:
        for rank, heart in enumerate(self.hearts):
            if rank not in without:
                heart.start()

    def stop(self) -> None:
        for heart in self.hearts:
            heart.stop(5)

    def verdicts(self, ranks: tuple[int, ...], seconds: float = 20.0) -> set[str]:
        """Return the different verdicts of these ranks when all have one."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(self.hearts[rank].verdict for rank in ranks):
            time.sleep(INTERVAL / 2)
        found = [self.hearts[rank].verdict for rank in ranks]
        assert all(found), found
        return {verdict.text for verdict in found if verdict}

    def assert_no_verdict(self, seconds: float = 3 * LIMIT) -> None:
        time.sleep(seconds)
        assert [heart.verdict for heart in self.hearts] == [None] * SIZE


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.delenv(COORDINATE, raising=False)
    with ExitStack() as entered:
        yield entered


def finding(kind: int, rank: int, what: str) -> RankFault:
    return RankFault(kind, rank, f"rank {rank} on node{rank} {what}.")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"T", "has been stopped by a signal"),
        (b"", "its process was killed, or crashed"),
        (b"Z", "its process was killed, or crashed"),
        (None, "does not answer, and neither does its host"),
    ],
)
def test_a_silent_rank_is_named_with_its_witnesss_answer(stack: ExitStack, answer: bytes | None, said: str) -> None:
    job = Job(stack, answers={2: answer})
    job.start(2)
    [text] = job.verdicts((0, 1, 3))
    assert "rank 2 on node2" in text
    assert said in text
    assert "Noticed by rank 1 on node1" in text


@pytest.mark.parametrize("letter", mark_exhaustive([b"S", b"R", b"D", b"t"], lambda number, _: number == 0))
def test_a_silent_rank_whose_process_is_alive_is_no_fault(stack: ExitStack, letter: bytes) -> None:
    job = Job(stack, answers={2: letter})
    job.start(2)
    job.assert_no_verdict()


def test_all_ranks_of_a_lost_host_are_named(stack: ExitStack) -> None:
    job = Job(stack, answers={1: None, 2: None})
    job.start(1, 2)
    [text] = job.verdicts((0, 3))
    assert "rank 1 on node1" in text
    assert "rank 2 on node2" in text


def test_a_failure_explains_errors_of_the_transport(stack: ExitStack) -> None:
    job = Job(stack)
    job.start()
    job.hearts[0].report(finding(TRANSPORT, 0, "could not reach others: Connection closed by peer"))
    job.hearts[3].report(finding(FAILED, 3, "has failed: ValueError: no"))
    [text] = job.verdicts(EVERYONE)
    assert "rank 3 on node3 has failed: ValueError: no" in text
    assert "Connection closed" not in text
    assert {heart.verdict.speaker for heart in job.hearts if heart.verdict} == {0}, (
        "the lowest rank that is not to blame"
    )


def test_an_alarm_finds_a_lost_rank_before_it_is_silent_for_the_limit(stack: ExitStack) -> None:
    job = Job(stack, answers={2: b""}, limit=600.0)
    job.start(2)
    job.hearts[0].report(finding(TRANSPORT, 0, "could not reach others"))
    [text] = job.verdicts((0, 1, 3))
    assert "rank 2 on node2 is gone" in text


def test_ended_ranks_are_no_fault_unless_others_wait_for_them(stack: ExitStack) -> None:
    job = Job(stack)
    job.start()
    for rank in (1, 2):
        job.hearts[rank].stop(5)
    job.assert_no_verdict()
    job.hearts[0].report(finding(TRANSPORT, 0, "could not reach others"))
    [text] = job.verdicts((0, 3))
    assert "rank 2 on node2 has ended before the others" in text or "rank 1 on node1 has ended before" in text


def waits(call: str, *, seconds: float = 9.0, quiet: float = 9.0, ranks: tuple[int, ...] = EVERYONE) -> Activity:
    return Activity(5, wait=Wait(call, "data", "0", ranks), seconds=seconds, quiet=quiet)


def test_ranks_that_wait_for_each_other_are_named(stack: ExitStack) -> None:
    looks: dict[int, Look] = {rank: lambda: waits("all_reduce") for rank in EVERYONE}
    job = Job(stack, looks={**looks, 2: lambda: waits("barrier")})
    job.start()
    [text] = job.verdicts(EVERYONE)
    assert "no byte moves" in text
    assert "rank 2: after 5 steps, waiting in barrier of data" in text


def test_an_ended_rank_is_no_fault_if_the_wait_may_be_for_others(stack: ExitStack) -> None:
    unknown = replace(waits("all_reduce"), wait=Wait("wait() for a collective"))
    job = Job(stack, looks={0: lambda: unknown, 1: lambda: Activity(5, "save")})
    job.start()
    job.hearts[2].stop(5)
    job.assert_no_verdict()


def test_an_ended_rank_is_named_if_its_group_waits(stack: ExitStack) -> None:
    job = Job(stack, looks={0: lambda: waits("all_reduce", ranks=(0, 2)), 1: lambda: Activity(5, "save")})
    job.start()
    job.hearts[2].stop(5)
    [text] = job.verdicts((0, 1, 3))
    assert "rank 2 on node2 has ended while others wait for it" in text


@pytest.mark.parametrize(
    "of_rank_2",
    [
        Activity(5, "forward"),
        waits("all_reduce", seconds=LIMIT / 5, quiet=0),
        waits("all_reduce", quiet=0),
        replace(Activity(5), handling="ValueError: no", handled=LIMIT / 5),
    ],
    ids=["computes", "has just started to wait", "bytes move", "handles an exception for a moment"],
)
def test_a_slow_rank_is_no_fault(stack: ExitStack, of_rank_2: Activity) -> None:
    looks: dict[int, Look] = {rank: lambda: waits("all_reduce") for rank in EVERYONE}
    job = Job(stack, looks={**looks, 2: lambda: of_rank_2})
    job.start()
    job.assert_no_verdict()


def test_a_long_exception_handler_is_named(stack: ExitStack) -> None:
    looks: dict[int, Look] = {rank: lambda: waits("all_reduce") for rank in EVERYONE}
    job = Job(stack, looks={**looks, 2: lambda: Activity(5, handling="ValueError: no", handled=9.0)})
    job.start()
    [text] = job.verdicts(EVERYONE)
    assert "rank 2 on node2 keeps others waiting while it handles ValueError: no" in text


def test_an_internal_error_ends_no_job(stack: ExitStack, capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(stack, looks={1: Mock(side_effect=KeyError)})
    job.start()
    job.assert_no_verdict()
    assert "it continues without rank 1" in capfd.readouterr().err


def test_the_number_of_reports_is_bounded(stack: ExitStack) -> None:
    job = Job(stack)
    job.start(1, 2, 3)
    for number in range(100):
        job.hearts[0].report(finding(TRANSPORT, number, "could not reach others"))
    time.sleep(4 * INTERVAL)
    assert len(job.store.get("watch/found/").splitlines()) == 16


def test_a_failed_rank_is_not_taken_for_dead(stack: ExitStack) -> None:
    job = Job(stack, answers={2: b""})
    job.hearts[2].state = HAS_FAILED
    job.start()
    job.hearts[2].stop(5)
    job.assert_no_verdict()
    assert json.loads(job.store.get("watch/beat/2"))["state"] == HAS_FAILED


# -- messages ----------------------------------------------------------------------------------------------------------


def numbered(kind: int, rank: int) -> RankFault:
    who = named(rank, f"node{rank // 8}", f"data={rank}")
    seen = "It was last seen after 3 steps.\n  Noticed by rank 0 on node0, after 4 steps."
    return RankFault(kind, rank, f"{who} did {kind}.\n  {seen}")


def test_a_message_describes_only_the_most_telling_cause() -> None:
    text = message([numbered(TRANSPORT, 1), numbered(GONE, 2), numbered(FAILED, 3)], 8)
    assert text.splitlines() == [
        "ds_topo watch: a fault in a job of 8 ranks.",
        "rank 3 (data=3) on node0 did 0.",
        "  It was last seen after 3 steps.",
        "  Noticed by rank 0 on node0, after 4 steps.",
        "Its own output has the traceback.",
    ]


def test_a_message_is_bounded_and_names_every_rank_once() -> None:
    text = message([numbered(GONE, rank) for rank in range(16) for _ in range(3)], 16384)
    assert len(text) < 2000
    assert text.count("rank 5 ") == 1
    assert "The same: ranks [6, 7, 8" in text
    assert len(blocked([(rank, "waiting in all_reduce of data") for rank in range(256)])) < 500
