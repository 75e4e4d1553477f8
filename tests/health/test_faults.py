"""Real faults on virtual hosts are named by every rank. ``python -m tests.faults`` runs all cases."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster import missing_requirement
from tests.cluster.conftest import REQUIRE
from tests.faults.matrix import Case, Rig

CASES = [
    Case("plain1-reducer", "kill", "backward", victim=3),
    pytest.param(Case("pipe1", "stop", "forward", victim=0), marks=pytest.mark.exhaustive),
    Case("moe", "exception", "step", victim=2),
    pytest.param(Case("reducer-two-level", "flap", "forward", victim=1, limit=10.0), marks=pytest.mark.exhaustive),
    Case("plain1", "exception", "between", victim=0, limit=0.0, timeout=600.0),
    *(
        pytest.param(Case(engine, fault, phase, victim, limit=0.0, timeout=600.0), marks=pytest.mark.exhaustive)
        for engine, faults in (
            ("plain1", "exception start, exception grid, exception construction, exit start, exit grid, kill between"),
            ("plain3", "exception forward, kill backward, leave between"),
            ("pipe1", "exception forward, kill forward, exit between, leave between"),
        )
        for fault, phase in (each.split() for each in faults.split(", "))
        for victim in (0, 1)
    ),
]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    reason = missing_requirement(())
    if reason and os.environ.get(REQUIRE) != "1":
        pytest.skip(reason)
    with Rig() as started:
        yield started


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_names_the_faulty_rank_and_ends(rig: Rig, case: Case) -> None:
    outcome = rig.run(case)
    assert outcome.problems(timed=False) == [], "\n".join(outcome.outputs.values())
