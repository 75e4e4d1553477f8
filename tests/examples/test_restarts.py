"""A job that is killed and restarted has the losses of an uninterrupted job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.restarts import SHAPE, curve, train_and_kill
from tests.support.example_jobs import run_main
from tests.support.ranks import run_ranks

OPTIONS = (*SHAPE, "--topology", "pipe=2", "--steps", "9", "--save-every", "3")


@pytest.mark.exhaustive
def test_job_killed_during_save_has_equal_losses(tmp_path: Path) -> None:
    through, killed = tmp_path / "through", tmp_path / "killed"
    run_ranks(2, run_main, "train_gpt", *OPTIONS, "--out", str(through))
    kills = train_and_kill(killed, 2, ["save"], OPTIONS, deadline=240.0)
    assert kills[0].known >= 3, "there was a checkpoint to resume from"
    assert curve(killed) == curve(through)
    assert [step for step, _ in curve(killed)[0]] == list(range(1, 10))
