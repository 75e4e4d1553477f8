"""The main job and README's first example run as they stand."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def _train(name: str, *options: str) -> None:
    sys.argv = [name, "--batch-size", "16", "--context", "16", "--width", "32", "--depth", "2", *options]
    importlib.import_module(name).main()


def test_the_main_job_trains_saves_draws_and_resumes(tmp_path: Path) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    topology = ("--topology", "data=2,pipe=2")
    run_ranks(4, _train, "train_gpt", *topology, "--steps", "4", "--save-every", "2", "--out", str(through))
    assert (through / "loss.png").stat().st_size > 1000
    resumed.mkdir()
    (through / "global_step2").rename(resumed / "global_step2")
    (resumed / "latest").write_text("global_step2")
    run_ranks(4, _train, "train_gpt", *topology, "--steps", "4", "--resume", "--out", str(resumed))
    overlapped = tmp_path / "overlapped"
    run_ranks(4, _train, "train_gpt", *topology, "--steps", "4", "--overlap", "--out", str(overlapped))

    whole, second_half = (json.loads((folder / "history.json").read_text()) for folder in (through, resumed))
    assert [row["step"] for row in second_half["history"]] == [3, 4]
    assert [row["loss"] for row in second_half["history"]] == [row["loss"] for row in whole["history"]][2:]
    assert second_half["validation_loss"] == whole["validation_loss"]
    reduced = json.loads((overlapped / "history.json").read_text())
    assert reduced["validation_loss"] == pytest.approx(whole["validation_loss"], rel=1e-5)
    assert json.loads((overlapped / "trace.json").read_text())["traceEvents"]


def test_the_mixture_of_experts_trains_alike_in_every_order(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    for topology, *options in (("pipe=2,data=2",), ("data=2,model=2",), ("model=2,data=2", "--expert-tensor-parallel")):
        run_ranks(4, _train, "train_moe", "--topology", topology, *options, "--steps", "6", "--out", str(tmp_path))
        records.append(json.loads((tmp_path / "history.json").read_text()))
    first = records[0]
    losses = [row["loss"] for row in first["history"]]
    assert losses[-1] < losses[0] - 0.2
    assert [len(shares) for shares in first["expert_load"]] == [4, 4]
    assert [sum(shares) for shares in first["expert_load"]] == pytest.approx([1, 1])
    for other in records[1:]:
        assert [row["loss"] for row in other["history"]] == pytest.approx(losses, rel=1e-4)
        assert other["validation_loss"] == pytest.approx(first["validation_loss"], rel=1e-4)
        assert other["expert_load"] == [pytest.approx(shares, abs=2e-3) for shares in first["expert_load"]]


def _run_source(source: str) -> None:
    exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})


def test_the_first_example_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert "PipelineModule" in blocks[0]
    run_ranks(4, _run_source, blocks[0])
