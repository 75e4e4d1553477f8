"""A job that is killed or terminated and restarted has the losses of an uninterrupted job, and says what that cost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import training
from attempts import ATTEMPTS, Attempt, cost_of_restarts, describe_restarts, read_attempts

from tests.restarts import SHAPE, curve, train_and_kill
from tests.support.example_jobs import run_main
from tests.support.exhaustive import mark_exhaustive
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


def _terminated(name: str, *options: str) -> int:
    """Train until this job's last rank gets SIGTERM in the sixth step; return the exit code of this rank."""
    draw = training.windows

    def windows(text: Any, length: int, step: int, *more: Any) -> Any:
        if step == 5 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(text, length, step, *more)

    training.windows = windows
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run_main(name, *options)
    assert signal.getsignal(signal.SIGTERM) is former
    return int(str(ended.value.code))


@pytest.mark.parametrize(
    ("name", "options"),
    mark_exhaustive(
        [("train_gpt", OPTIONS), ("train_moe", (*OPTIONS, "--topology", "data=2"))], lambda number, _: not number
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_job_that_gets_sigterm_saves_its_step_and_repeats_none(
    name: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    through, out = tmp_path / "through", tmp_path / "out"
    run_ranks(2, run_main, name, *options, "--out", str(through))
    assert run_ranks(2, _terminated, name, *options, "--out", str(out), "--resume", "auto") == [143, 143]
    assert (out / "latest").read_text() == "global_step6"
    for _ in ("goes on", "is complete"):
        printed = run_ranks(2, run_main, name, *options, "--out", str(out), "--resume", "auto")[0]
        assert curve(out) == curve(through)
        assert "1 restart, 0 of 9 steps repeated" in printed
        assert "after 9 steps" in printed
    assert describe_restarts(through) == ""


def _write(path: Path, *entries: dict[str, Any]) -> None:
    with path.open("a") as lines:
        lines.writelines("\n" + json.dumps(entry) for entry in entries)


def test_cost_of_restarts_has_the_phases_and_the_steps_that_were_repeated(tmp_path: Path) -> None:
    path = tmp_path / ATTEMPTS
    steps = [{"time": 20.0 + step, "step": step, "loss": 1.0} for step in (1, 2, 3, 4, 5)]
    _write(path, {"born": 10.0, "joined": 14.0, "loaded": 20.0, "step": 0, "what": "data=2"}, *steps)
    path.write_text(path.read_text() + '\n{"time": 26.0, "st')  # killed while it wrote
    again = [{"time": 45.0 + 2 * step, "step": step, "loss": 1.0} for step in (4, 5, 6)]
    _write(path, {"born": 32.0, "joined": 36.0, "loaded": 50.0, "step": 3, "what": "data=1"}, *again)
    _write(path, {"born": 60.0, "joined": 61.0, "loaded": 62.0, "step": 6, "what": "data=2"}, {"ended": 63.0})
    _write(path, {"born": 90.0, "joined": 91.0, "loaded": 92.0, "step": 6, "what": "data=2"}, {"ended": 94.0})
    assert [len(attempt) for attempt in read_attempts(tmp_path)] == [6, 4, 2, 2]
    costs, repeated = cost_of_restarts(read_attempts(tmp_path))
    assert costs == [[7.0, 4.0, 14.0, 5.0], [3.0, 1.0, 1.0, 0.0]], "the last start is no restart"
    assert repeated == 2
    assert describe_restarts(tmp_path) == (
        "2 restarts, 2 of 8 steps repeated, 35 of 84 s lost (42%): 10 s until new processes, 5 s to join, 15 s to "
        "build and load, 5 s in repeated steps"
    )


def test_a_job_from_the_start_begins_a_new_record(tmp_path: Path) -> None:
    for continues, expected in ((True, 1), (True, 2), (False, 1)):
        Attempt(tmp_path, joined=1.0, step=0, what="data=1 on 1 ranks", continues=continues)
        assert len(read_attempts(tmp_path)) == expected
    Attempt(tmp_path, joined=1.0, step=0, what="", writes=False).add_step(1, 2.0)
    assert len(read_attempts(tmp_path)[0]) == 1
