"""The training examples train, save and resume, each on fresh ranks."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training import divide_batch

from ds_topo import PipelineParallelGrid
from ds_topo.errors import TopologyError
from tests.support.example_jobs import SMALL, record_in, run_main
from tests.support.fake_world import fake_world
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def _train(name: str, out: Path, *options: str) -> dict[str, Any]:
    """Run a job on four ranks; return its record."""
    run_ranks(4, run_main, name, *SMALL, "--out", str(out), *options)
    return record_in(out)


# -- the main job ----------------------------------------------------------------------------------------------------

STEPS = ("--topology", "data=2,pipe=2", "--steps", "4", "--continuation", "12")


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and record of the main job without an interruption."""
    out = tmp_path_factory.mktemp("through") / "out"
    return out, _train("train_gpt", out, *STEPS, "--save-every", "2", "--resume", "auto")


def test_main_job_writes_history_and_plot(through: tuple[Path, dict[str, Any]]) -> None:
    out, record = through
    assert (out / "loss.png").stat().st_size > 1000
    assert [row["step"] for row in record["history"]] == [1, 2, 3, 4]


def test_main_job_resumes_with_equal_losses(through: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, whole = through
    (tmp_path / "global_step2").symlink_to(out / "global_step2")
    (tmp_path / "latest").write_text("global_step2")
    resumed = _train("train_gpt", tmp_path, *STEPS, "--resume")
    assert resumed["history"][:2] == whole["history"][:2], "the checkpoint has the earlier steps"
    assert [row["step"] for row in resumed["history"]] == [1, 2, 3, 4]
    assert [row["loss"] for row in resumed["history"]] == [row["loss"] for row in whole["history"]]
    assert resumed["validation_loss"] == whole["validation_loss"]


@pytest.mark.thorough
def test_main_job_resumes_on_fewer_ranks_with_the_same_samples(
    through: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, whole = through
    (tmp_path / "global_step2").symlink_to(out / "global_step2")
    (tmp_path / "latest").write_text("global_step2")
    options = (*SMALL, "--out", str(tmp_path), *STEPS, "--topology", "data=-1", "--micro-batch-size", "4")
    run_ranks(2, run_main, "train_gpt", *options, "--resume", "auto")
    resumed = record_in(tmp_path)
    assert [row["step"] for row in resumed["history"]] == [1, 2, 3, 4]
    losses = [[row["loss"] for row in record["history"]] for record in (resumed, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert resumed["validation_loss"] == pytest.approx(whole["validation_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("size", "most", "expected"),
    [
        (32, None, (2, 4)),
        (32, 6, (4, 2)),
        (30, 6, "--batch-size 30: 30 samples cannot be divided among 4 replicas"),
    ],
)
def test_batch_of_a_step_is_divided_among_the_replicas(
    size: int, most: int | None, expected: tuple[int, int] | str
) -> None:
    arguments, config = argparse.Namespace(batch_size=size, micro_batch_size=most), {"gradient_accumulation_steps": 4}
    with fake_world(0, 8), PipelineParallelGrid("data=4,pipe=2") as grid:
        if isinstance(expected, str):
            with pytest.raises(TopologyError, match=expected):
                divide_batch(arguments, config, grid)
        else:
            divide_batch(arguments, config, grid)
            assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == expected


@pytest.mark.exhaustive
def test_resume_skips_damaged_checkpoint_and_its_record(through: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(through[0], out)
    for path in (out / "global_step4").glob("layer_*"):
        path.write_bytes(path.read_bytes()[:100])
    again = _train("train_gpt", out, *STEPS, "--resume", "auto")
    assert again["history"][:2] == through[1]["history"][:2], "the earlier steps"
    assert [row["step"] for row in again["history"]] == [1, 2, 3, 4]
    assert [row["loss"] for row in again["history"]] == [row["loss"] for row in through[1]["history"]]
    done = _train("train_gpt", out, *STEPS, "--resume")
    assert done["history"] == again["history"], "the job was already complete"


def test_resume_without_checkpoint_raises(tmp_path: Path) -> None:
    options = (*SMALL, "--out", str(tmp_path), *STEPS, "--resume")
    errors = run_ranks(4, run_main, "train_gpt", *options, expect_failure=True)
    assert {str(error) for error in errors} == {f"no checkpoint in {tmp_path}"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "message"),
    [(("--topology", "pip=2"), "did you mean 'pipe'?"), (("--heads", "3"), "--heads 3 must divide --width")],
    ids=["topology", "heads"],
)
def test_error_is_printed_once(options: tuple[str, ...], message: str) -> None:
    launcher = Path(sys.executable).with_name("torchrun")
    command = [launcher, "--nproc-per-node", "2", ROOT / "examples/train_gpt.py", "--steps", "1", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    printed = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode != 0
    assert len(printed) == 1, result.stderr
    assert message in printed[0]
    # torchrun's own traceback, of an environment that may be inside the checkout, is all right
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT / "examples") not in result.stderr


def test_main_job_reduces_during_backward(through: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    reduced = _train("train_gpt", tmp_path, *STEPS, "--overlap")
    assert reduced["validation_loss"] == pytest.approx(through[1]["validation_loss"], rel=1e-5)


# -- the mixture of experts ------------------------------------------------------------------------------------------


def _train_moe(out: Path, topology: str, *options: str) -> dict[str, Any]:
    return _train("train_moe", out, "--topology", topology, *options, "--steps", "6")


@pytest.fixture(scope="module")
def first_order(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of one order of axes."""
    return _train_moe(tmp_path_factory.mktemp("moe"), "pipe=2,data=2")


def test_mixture_of_experts_trains(first_order: dict[str, Any]) -> None:
    losses = [row["loss"] for row in first_order["history"]]
    assert losses[-1] < losses[0] - 0.2
    assert [len(shares) for shares in first_order["expert_load"]] == [4, 4]
    assert [sum(shares) for shares in first_order["expert_load"]] == pytest.approx([1, 1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [("data=2,model=2",), ("model=2,data=2", "--expert-tensor-parallel")],
    ids="".join,
)
def test_mixture_of_experts_trains_equally_in_every_order(
    first_order: dict[str, Any], options: tuple[str, ...], tmp_path: Path
) -> None:
    other = _train_moe(tmp_path, *options)
    losses = [row["loss"] for row in first_order["history"]]
    assert [row["loss"] for row in other["history"]] == pytest.approx(losses, rel=1e-4)
    assert other["validation_loss"] == pytest.approx(first_order["validation_loss"], rel=1e-4)
    assert other["expert_load"] == [pytest.approx(shares, abs=2e-3) for shares in first_order["expert_load"]]


# -- what a user sees --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("earlier", "shown"), [([], "first step"), ([{"step": 3, "loss": 2.5, "tokens_per_second": 9.0}], "loss 2.500")]
)
def test_progress_starts_with_what_is_known(
    earlier: list[dict[str, float]],
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    training: Any = importlib.import_module("training")
    arguments = SimpleNamespace(steps=len(earlier) and 3, out=tmp_path, joined=0.0, resume="auto")
    engine = SimpleNamespace(
        gradient_reducer=None, train_micro_batch_size_per_gpu=lambda: 1, gradient_accumulation_steps=lambda: 1
    )
    with fake_world(0, 1), PipelineParallelGrid("data=1") as grid:
        assert training.train(engine, grid, None, arguments, earlier) == earlier
    printed = capsys.readouterr().out
    assert shown in printed
    assert "tokens/s" not in printed
