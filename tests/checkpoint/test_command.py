"""``ds-topo checkpoint`` prints the checkpoints of a folder in a table and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ds_topo.checkpoint import manifest as manifests
from ds_topo.cli import main
from tests.checkpoint.handmade import make


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two checkpoints of ours, the newer one damaged, and one of DeepSpeed alone."""
    monkeypatch.setenv("COLUMNS", "120")
    make(tmp_path, "step3", 3)
    make(tmp_path, "step6", 6)
    (tmp_path / "step6/mp_rank_00_model_states.pt").unlink()
    (tmp_path / "own").mkdir()
    (tmp_path / "own/mp_rank_00_model_states.pt").write_bytes(b"anything")
    (tmp_path / ".step9.saving/step9").mkdir(parents=True)
    (tmp_path / "latest").write_text("step6")
    return tmp_path


def test_table_shows_newest_first_and_problems(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", str(folder)]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1].startswith("step6 DAMAGED 6 ")
    assert lines[1].endswith(" pipe=2,data=2, ZeRO 1, fp32")
    assert lines[2].startswith("step3 complete 3 ")
    assert lines[3] == "own seems complete ? 8 B no manifest"
    assert lines[5:] == ["step6: mp_rank_00_model_states.pt is missing", "latest: step6"]


def test_verify_compares_digests(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step3/mp_rank_00_model_states.pt").write_bytes(b"model 1")
    assert main(["checkpoint", str(folder / "step3")]) == 0
    capsys.readouterr()
    assert main(["checkpoint", str(folder / "step3"), "--verify"]) == 1
    assert "mp_rank_00_model_states.pt was changed after it was written" in capsys.readouterr().out


def test_one_checkpoint_is_shown_with_parameters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["checkpoint", str(folder)])
    size = re.split("  +", capsys.readouterr().out.splitlines()[2])[3]
    assert main(["checkpoint", str(folder / "step3"), "--verify"]) == 0
    text = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert text[0] == "step3: complete, digests agree"
    assert "layout pipe=2,data=2 (4 ranks), ZeRO 1, fp32" in text
    assert any(line.startswith("files ") and size in line for line in text), "both count the manifest"
    assert text[-2:] == ["float32 [4, 2] 0 0.weight", "float32 [2, 2] 1 dimension 0 1.weight"]


def test_experts_are_shown_and_lines_have_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made = make(tmp_path, "step100", 100)
    layout = replace(made.layout, experts=(manifests.SavedExperts(2),))
    text = manifests.to_text(replace(made, layout=layout))
    (tmp_path / "step100" / manifests.NAME).write_text(text)
    assert main(["checkpoint", str(tmp_path), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("  pipe=2,data=2, ZeRO 1, fp32, experts over 2")
    assert "step100  verified" in lines[1]
    assert max(map(len, lines)) <= 80


def test_long_names_are_found_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    made = make(tmp_path, "step3", 3)
    names = [f"module.{number}." + "very_long_name." * 12 + "weight" for number in range(2)]
    rows = tuple(replace(row, name=name) for row, name in zip(made.parameters, names, strict=True))
    (tmp_path / "step3" / manifests.NAME).write_text(manifests.to_text(replace(made, parameters=rows)))
    assert main(["checkpoint", str(tmp_path / "step3")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if "very_long_name" in line] == names


def test_json_output_is_complete(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", str(folder), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert (content["latest"], [one["tag"] for one in content["checkpoints"]]) == ("step6", ["step6", "step3", "own"])
    assert content["checkpoints"][1]["manifest"]["layout"]["topology"] == "pipe=2,data=2"
    assert content["checkpoints"][0]["problems"] == ["mp_rank_00_model_states.pt is missing"]


@pytest.mark.parametrize(("name", "said"), [("empty", "no checkpoint in"), ("absent", "is not a folder")])
def test_folder_without_checkpoint_is_an_error(
    tmp_path: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["checkpoint", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err
