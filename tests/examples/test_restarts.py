"""A job that is killed and restarted goes on as if nothing had happened."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from tests.restarts import SHAPE, curve, train_and_kill
from tests.support.ranks import run_ranks

OPTIONS = (*SHAPE, "--topology", "pipe=2", "--steps", "9", "--save-every", "3")


def _run_main(*options: str) -> None:
    sys.argv = ["train_gpt", *options]
    importlib.import_module("train_gpt").main()


def test_a_job_killed_while_it_saves_has_the_same_curve(tmp_path: Path) -> None:
    through, killed = tmp_path / "through", tmp_path / "killed"
    run_ranks(2, _run_main, *OPTIONS, "--out", str(through))
    kills = train_and_kill(killed, 2, ["save"], OPTIONS, deadline=240.0)
    assert kills[0].known >= 3, "it had something to go on from"
    assert curve(killed) == curve(through)
    assert [step for step, _ in curve(killed)[0]] == list(range(1, 10))
