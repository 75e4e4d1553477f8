"""``ds-topo verify`` runs programs, reports by its exit status, and refuses what it cannot run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_topo.cli import main

ROOT = Path(__file__).parents[2]
GPT = ["examples/train_gpt.py", "--batch-size", "8", "--context", "16", "--width", "32", "--depth", "2", "--steps", "3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "--topology is missing"),
        (["train.py", "--topology", "data=2"], "program 'train.py': there is no such file"),
        (["train.py", "--topology", "data=-1"], "give all degrees"),
        (["train.py", "--topology", "colour=2"], "colour"),
        (["--steps", "0", __file__, "--topology", "data=2"], "steps=0: give a number of steps from 1 on"),
        (["--timeout", "0", "train.py", "--topology", "data=2"], "--timeout 0.0: give seconds above 0"),
        (["--png", "errors.svg", "train.py", "--topology", "data=2"], "give a file name that ends in .png"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", ["data=2", "data=2,pipe=2", "model=2,pipe=2", "pipe=2,model=2,data=2"])
def test_gpt_is_equal_in_a_layout(topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = tmp_path / "found.json"
    options = ["--json", str(found), "--png", str(tmp_path / "errors.png")]
    assert main(["verify", *options, *GPT, "--out", str(tmp_path), "--topology", topology]) == 0
    report = json.loads(found.read_text())
    assert (report["topology"], report["findings"], report["steps"]) == (topology, [], 2)
    assert list(tmp_path.glob("global_step*")) == [], "the program did not go on"


@pytest.mark.exhaustive
def test_fault_of_a_program_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (ROOT / "examples").glob("*.py"):
        (tmp_path / source.name).write_text(source.read_text())
    gpt = tmp_path / "gpt.py"
    lost = "projection = F.linear(self.attention(self.attention_norm(hidden)), self.projection.weight)"
    text = gpt.read_text().replace(
        "hidden = hidden + self.projection(self.attention(self.attention_norm(hidden)))",
        f"{lost}\n        hidden = hidden + projection + self.projection.bias",
    )
    assert text != gpt.read_text()
    gpt.write_text(text)
    monkeypatch.chdir(ROOT)
    arguments = [str(tmp_path / GPT[0].split("/")[1]), *GPT[1:], "--config", "examples/train_gpt.json"]
    assert main(["verify", *arguments, "--out", str(tmp_path), "--topology", "data=2,model=2"]) == 1
    assert "first difference" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_failure_of_a_program_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "train.py"
    program.write_text("raise ValueError('no data')\n")
    assert main(["verify", str(program), "--topology", "data=2"]) == 2
    assert "ValueError: no data" in capsys.readouterr().err
