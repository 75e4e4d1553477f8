"""Layouts that train right are equal to their references."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.world import Worlds
from tests.verification.recorded_training import Job, References

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
ZERO = [{"zero_optimization": {"stage": stage}} for stage in range(4)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "job",
    [
        Job("pipe=2,data=2"),
        Job("data=4", False, ZERO[2]),
        Job("pipe=2,model=2", settings=ZERO[1]),
        Job("model=2,data=2", False),
        Job("data=2,model=2", False, ZERO[3]),
        Job("model=2,pipe=2", settings=BF16),
        Job("data=2,pipe=2", settings=BF16 | ZERO[1]),
        Job("data=2,model=2", False, BF16 | ZERO[2]),
        Job("data=2,model=2", False, FP16),
        Job("pipe=2,data=2", settings=FP16 | ZERO[1]),
    ],
    ids=str,
)
def test_right_layout_is_equal(job: Job, world: Worlds, tmp_path: Path) -> None:
    report = References(world, tmp_path).verify(job, tmp_path / "wanted")
    assert (report.findings, report.undecided) == ((), ())
    assert (report.compared > 50, report.steps) == (True, 2)
