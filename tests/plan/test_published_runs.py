"""Compare predictions with published runs: those that constants were fitted to, and others."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from ds_topo.cli import main
from ds_topo.errors import TopologyError
from ds_topo.plan.published_runs import AVAILABLE, Verdict, judge, read_rows

FOLDER = Path(__file__).parent
FILES = ["published_runs.json", "more_published_runs.json"]


@pytest.fixture(scope="module", params=[FILES[0], pytest.param(FILES[1], marks=pytest.mark.exhaustive)])
def judged(request: pytest.FixtureRequest) -> list[Verdict]:
    return [judge(row) for row in read_rows(FOLDER / request.param)]


def test_predictions_are_within_15_percent_and_their_median_within_7(judged: list[Verdict]) -> None:
    errors = {verdict.row.name: verdict.error for verdict in judged}
    assert {name: error for name, error in errors.items() if abs(error) > 0.15} == {}
    assert median(map(abs, errors.values())) <= 0.07
    assert len(judged) >= 15


def test_published_layouts_fit_in_memory(judged: list[Verdict]) -> None:
    assert [str(verdict.plan.layout) for verdict in judged if not verdict.fits] == []


def test_note_names_what_a_much_faster_layout_changes(judged: list[Verdict]) -> None:
    for verdict in judged:
        assert verdict.best is not None
        far = verdict.plan.seconds > AVAILABLE * verdict.best.seconds
        assert bool(verdict.note) == far
        assert not far or "->" in verdict.note
    near = [verdict for verdict in judged if not verdict.note]
    assert len(near) >= 0.7 * len(judged)


def test_full_recomputation_computes_a_third_more(judged: list[Verdict]) -> None:
    for verdict in judged:
        if verdict.plan.layout.recompute.value == "full":
            assert verdict.plan.time.recompute == pytest.approx(verdict.plan.time.compute / 3, rel=0.1)


def _rows(path: Path, **change: object) -> str:
    [row, *_] = json.loads((FOLDER / FILES[0]).read_text())
    path.write_text(json.dumps([row | change]))
    return str(path)


def test_runs_exit_with_1_if_a_row_is_beyond_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = _rows(tmp_path / "good.json")
    bad = _rows(tmp_path / "bad.json", tflops_per_gpu_with_recomputation=250)
    assert main(["plan", "--runs", good, "--within", "15%"]) == 0
    assert "0 beyond 15%" in capsys.readouterr().out
    assert main(["plan", "--runs", bad]) == 1
    assert "1 beyond 15%" in capsys.readouterr().out
    assert main(["plan", "--runs", good, "--within", "0.01%"]) == 1


def test_runs_print_rows_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--runs", _rows(tmp_path / "row.json")]) == 0
    content = json.loads(capsys.readouterr().out)
    [row] = content["rows"]
    assert row["published"] == 137
    assert row["predicted"] == pytest.approx(137, rel=0.05)
    assert sum(row["seconds"].values()) > 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gpus": 33}, "data=33 does not divide the batch of"),
        ({"accelerator": "abacus"}, "'abacus' is not in the table"),
        *(
            ({field: 0}, f"row 1 .*: '{field}' is 0; a whole number from 1 on must be there")
            for field in ("gpus", "global_batch", "ffn", "layers", "heads", "data", "sequence")
        ),
        ({"kv_heads": 5}, "row 1 .*: --kv-heads 5 must divide"),
        ({"accelerator": "X"}, "row 1 .*: accelerator 'X' is not in the table"),
        ({"model": None, "parameters_billion": "many", "layers": 0}, "row 1 .*: 'layers' is 0"),
        ({"layers": None}, "'layers' is missing; a whole number from 1 on"),
        ({"tflops_per_gpu_with_recomputation": None}, "reports nothing: give one of"),
        ({"tflops_per_gpu_with_recomputation": -1}, "must be a positive number"),
        ({"data": 5}, "data=5 are not 32 GPUs"),
        ({"precision": "int4"}, "precision 'int4' is not known"),
        ({"software": "abacus"}, "software 'abacus' is not known"),
    ],
)
def test_runs_refuse_bad_rows(
    change: dict[str, object], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--runs", _rows(tmp_path / "row.json", **change)]) == 2
    with pytest.raises(TopologyError, match=text):
        raise TopologyError(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[]", "must be a JSON list of objects"),
        ('{"inside": 1}', "must be a JSON list of objects, one for each run"),
        ("{", "is not JSON"),
    ],
)
def test_read_rows_refuses_bad_files(content: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(content)
    with pytest.raises(TopologyError, match=text):
        read_rows(path)
    with pytest.raises(TopologyError, match="cannot be read"):
        read_rows(tmp_path / "absent.json")
