"""The one message of a fault."""

from __future__ import annotations

from ds_topo.watch.findings import BLOCKED, FAILED, GONE, TRANSPORT, Finding, Who, blocked, message, read


def finding(kind: int, rank: int) -> Finding:
    who = Who(rank, f"node{rank // 8}", f"data={rank}")
    return Finding(kind, who, f"did {kind}", "was after 3 steps", Who(0, "node0"), "after 4 steps")


def test_the_most_telling_cause_explains_the_others() -> None:
    text = message([finding(TRANSPORT, 1), finding(GONE, 2), finding(FAILED, 3)], 8)
    assert text.splitlines() == [
        "ds_topo watch: a fault in a job of 8 ranks.",
        "rank 3 (data=3) on node0 did 0.",
        "  It was after 3 steps.",
        "  Noticed by rank 0 on node0, after 4 steps.",
        "Its own output has the traceback.",
    ]


def test_it_is_bounded_and_names_every_rank_once() -> None:
    text = message([finding(GONE, rank) for rank in range(16) for _ in range(3)], 16384)
    assert len(text) < 2000
    assert text.count("rank 5 ") == 1
    assert "The same: ranks [6, 7, 8" in text
    assert len(blocked([(rank, "waiting in all_reduce of data") for rank in range(256)])) < 500


def test_findings_survive_the_store() -> None:
    found = [finding(BLOCKED, 1), finding(GONE, 9)]
    assert read("".join(each.to_line() for each in found)) == found
