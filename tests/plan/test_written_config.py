"""Run ``ds-topo plan --write``, then an example with the written config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_topo.cli import main
from tests.support.example_jobs import record_in, run_main
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks

JOB = "--layers 4 --hidden 32 --heads 4 --vocab 256 --sequence 16 --hosts 1 --slots 4 --batch 16 --precision fp32"
JOB += " --software deepspeed-pipeline --accelerator A100"
MODEL = "--batch-size 16 --context 16 --width 32 --heads 4 --depth 4"
"""The same model in the words of the examples."""
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
    assert main(["plan", *JOB.split(), *PLANS[name].split(), "--json", "--write", str(path)]) == 0
    best, config = json.loads(capsys.readouterr().out)["plans"][0], json.loads(path.read_text())
    options = [*MODEL.split(), "--steps", "2", *(["--sequence-parallel"] if best["sequence_parallel"] else [])]
    program, own = "train_gpt", ["--continuation", "12"]
    if name == "experts":
        program, own = "train_moe", ["--experts", "4", "--expert-parallel", "2"]
    arguments = ["--config", str(path), *options, *own, "--out", str(tmp_path)]
    printed = run_ranks(4, run_main, program, *arguments)[0]
    assert f"steps on {','.join(f'{axis}={size}' for axis, size in config['topology'].items())}" in printed
    assert len(record_in(tmp_path)["history"]) == 2
