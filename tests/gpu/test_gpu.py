"""``tests/gpu.sh`` says what it needs, judges its ranks, and its checks pass on CPUs as far as they can run there."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.gpu.__main__ import CHECKS, ROOT, Check, Outcome, Place, places, run, table

pytestmark = pytest.mark.thorough  # for those who change ds_topo

HERE = Place("two", 2, "gloo", "cpu")


def _gpu_sh(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(ROOT / "tests/gpu.sh"), *options], capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_script_fails_and_says_what_to_do() -> None:
    ran = _gpu_sh()
    assert ran.returncode == 1
    assert ran.stderr.count("torch finds no NVIDIA GPU here") == 1
    assert "tests/gpu.sh --rehearse" in ran.stderr


def test_the_list_names_every_check() -> None:
    ran = _gpu_sh("--list")
    assert [line.split()[0] for line in ran.stdout.splitlines()] == [check.name for check in CHECKS]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [each.name for each in CHECKS])
def test_a_rehearsal_of_the_check_passes(name: str) -> None:
    ran = _gpu_sh("--rehearse", "--only", name)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ("passed" in ran.stdout) == (name != "calibrate"), "that measures GPUs"
    assert "nothing was checked on a GPU" in ran.stdout


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], Check]:
    """``program(text, seconds)``: a check that runs a program on every rank."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(text: str, seconds: float) -> Check:
        (tmp_path / "rank_program.py").write_text(text)
        return Check("program", "", ("two",), seconds, command=("rank_program",))

    return make


def test_a_rank_that_fails_fails_its_check_and_its_output_is_shown(
    program: Callable[[str, float], Check], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(
        program("import os, sys; sys.exit('no luck' if os.environ['RANK'] == '1' else 0)", 60), HERE, tmp_path
    )
    assert outcome.result == "failed: rank 1 ended with status 1"
    assert outcome.is_failure
    assert "no luck" in capsys.readouterr().out


HANGS = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def test_ranks_that_hang_are_killed_with_their_children(
    program: Callable[[str, float], Check], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(program(HANGS, 5), HERE, tmp_path)
    assert outcome.result == "failed: rank 0 did not end and was killed; rank 1 did not end and was killed"
    children = re.findall(r"child (\d+)", capsys.readouterr().out)
    assert len(children) == 2
    end = time.monotonic() + 30  # a killed process may need a moment to end
    while any(map(_runs, children)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(_runs, children))


def _runs(process: str) -> bool:
    command = Path(f"/proc/{process}/cmdline")
    with suppress(OSError):
        return command.exists() and bool(command.read_bytes())
    return False


def test_a_check_that_is_not_possible_names_the_reason(program: Callable[[str, float], Check], tmp_path: Path) -> None:
    outcome = run(program("import sys; print('not possible here: no triton'); sys.exit(77)", 60), HERE, tmp_path)
    assert outcome.result == "not possible here: no triton"
    assert not outcome.is_failure


def test_the_table_has_a_row_for_each_outcome() -> None:
    lines = table([Outcome("zero", HERE, "passed", 12.3), Outcome("arriving", HERE, "failed: x", 1.0)]).splitlines()
    assert lines[0].split() == ["check", "ranks", "backend", "seconds", "result"]
    assert lines[1].split() == ["zero", "2", "gloo", "cpu", "12", "passed"]
    assert len(lines) == 3


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 2), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)])
def test_ranks_on_all_gpus_are_a_power_of_two(gpus: int, ranks: int) -> None:
    many = places(gpus)["many"]
    assert many.ranks == ranks
    assert bool(many.reason) == (gpus == 1)
    assert (many.backend, many.device) == ("nccl", "cuda")
