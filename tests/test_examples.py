"""The main job and README's first example run as they stand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]


def _train_gpt(*options: str) -> None:
    import train_gpt

    sys.argv = ["train_gpt.py", "--batch-size", "16", "--context", "16", "--width", "32", "--depth", "2", *options]
    train_gpt.main()


def test_the_main_job_trains_saves_draws_and_resumes(tmp_path: Path) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    topology = ("--topology", "data=2,pipe=2")
    run_ranks(4, _train_gpt, *topology, "--steps", "4", "--save-every", "2", "--out", str(through))
    assert (through / "loss.png").stat().st_size > 1000
    resumed.mkdir()
    (through / "global_step2").rename(resumed / "global_step2")
    (resumed / "latest").write_text("global_step2")
    run_ranks(4, _train_gpt, *topology, "--steps", "4", "--resume", "--out", str(resumed))

    whole, second_half = (json.loads((folder / "history.json").read_text()) for folder in (through, resumed))
    assert [row["step"] for row in second_half["history"]] == [3, 4]
    assert [row["loss"] for row in second_half["history"]] == [row["loss"] for row in whole["history"]][2:]
    assert second_half["validation_loss"] == whole["validation_loss"]


def _run_source(source: str) -> None:
    exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})


def test_the_first_example_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert "PipelineModule" in blocks[0]
    run_ranks(4, _run_source, blocks[0])
