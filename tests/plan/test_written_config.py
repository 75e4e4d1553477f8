"""Run ``ds-topo plan --write``, then the training command that it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_topo.cli import main
from tests.support.example_jobs import record_in, run_command
from tests.support.exhaustive import mark_exhaustive

JOB = "--layers 4 --hidden 32 --heads 4 --vocab 256 --sequence 16 --hosts 1 --slots 4 --batch 16 --precision fp32"
JOB += " --software deepspeed-pipeline --accelerator A100"
PLANS = {
    "pipe and data": "--fix pipe=2,data=2",
    "data outermost": "--topology data=2,pipe=2 --zero 1",
    "model": "--topology pipe=2,model=2 --micro-batch 4",
    "sequence parallel": "--topology data=2,model=2 --sequence-parallel",
    "recomputed": "--topology pipe=2,model=2 --recompute full --zero 0 --sequence-parallel",
    "deep": "--topology pipe=4",
    "experts": "--experts 4 --top-k 1 --no-gated --topology pipe=2,data=2 --expert-parallel 2",
    "the best in slices": "--fix model=2 --sequence-parallel",
}


@pytest.mark.parametrize("name", mark_exhaustive(PLANS, default=lambda _, name: name == "the best in slices"))
def test_written_plan_trains(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds_config.json"
    assert main(["plan", *JOB.split(), *PLANS[name].split(), "--write", str(path)]) == 0
    [command] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train with: ")]
    config = json.loads(path.read_text())
    short = [] if "--experts" in command else ["--continuation", "12"]
    printed = run_command(command.removeprefix("train with: "), "--steps", "2", *short, "--out", str(tmp_path))
    assert f"steps on {','.join(f'{axis}={size}' for axis, size in config['topology'].items())}" in printed
    assert len(record_in(tmp_path)["history"]) == 2
