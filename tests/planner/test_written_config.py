"""A written plan trains at once: ``ds-topo plan --write``, then the command that it prints."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ds_topo.cli import main
from ds_topo.planner.cluster import Link
from ds_topo.planner.machine import Machine
from tests.planner.jobs import CPU_SPEEDS

ROOT = Path(__file__).parents[2]
JOB = "--layers 4 --hidden 32 --heads 4 --vocab 256 --sequence 16 --hosts 1 --slots 4 --batch 16 --precision fp32"
CPU = Machine(1, 4, CPU_SPEEDS, inside=Link(1e9, 1e-4))
"""As ``plan --calibrate`` would write it: DeepSpeed's own Adam, which is to be compiled, is for other transports."""
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
IN_CI = ("the best in slices",)


@pytest.mark.parametrize("name", PLANS)
def test_a_written_plan_trains(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name not in IN_CI and not os.environ.get("DS_TOPO_ALL_PLANS"):
        pytest.skip("set DS_TOPO_ALL_PLANS=1")
    path, machine = tmp_path / "ds_config.json", tmp_path / "machine.json"
    machine.write_text(json.dumps(CPU.as_json()))
    assert main(["plan", *JOB.split(), "--machine", str(machine), *PLANS[name].split(), "--write", str(path)]) == 0
    [command] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train with: ")]
    words = shlex.split(command.removeprefix("train with: "))
    launcher = str(Path(sys.executable).with_name(words[0]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    short = [] if "--experts" in words else ["--continuation", "12"]
    result = subprocess.run(
        [launcher, *words[1:], "--steps", "2", *short, "--out", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    written = json.loads(path.read_text())["topology"]
    assert f"steps on {','.join(f'{axis}={size}' for axis, size in written.items())}" in result.stdout
    assert len(json.loads((tmp_path / "history.json").read_text())["history"]) == 2
