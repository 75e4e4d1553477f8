"""DeepSpeed's own tests of its parallelism pass on grids as they do without them, in two orders of the axes.

``DEEPSPEED_TESTS`` gives the folder ``tests`` of a clone of DeepSpeed, of a commit near the installed release.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive
FOLDERS = ("model_parallelism", "runtime/tensor_parallel", "runtime/pipe", "v1/moe", "sequence_parallelism")
FILES = ("ulysses_alst/test_ulysses_sp_hf.py",)
DIFFERENT: dict[str, str] = {
    "TestTpDataloaderCorrectness": "a grid names the ranks whose samples differ, before DeepSpeed asserts",
    "test_save_load_same_ep_and_metadata": "a grid refuses clipping in half precision without ZeRO, as below",
    "TestMOETensorParallel": "a grid refuses clipping in half precision without ZeRO, where the norm omits experts",
    "_router_gate_and_layernorm_grad_parity": "outer: the test takes rank // slices for the index of its samples",
    "_expert_weight_parity": "outer: as above",
    "test_sp_loss_backward_stability": "outer: sequence_parallel_size in the config joins neighboring ranks",
}
"""Tests that pass with stock DeepSpeed alone, by a part of their name, with the reason."""


@cache
def _results(order: str, where: Path) -> dict[str, str]:
    """Run DeepSpeed's tests; return the outcome of each."""
    clone = os.environ.get("DEEPSPEED_TESTS")
    if clone is None:
        pytest.skip("DeepSpeed's own tests are needed: set DEEPSPEED_TESTS to the folder tests of a clone")
    found, environment = where / f"{order}.tsv", {**os.environ, "DS_TOPO_ORDER": order, "LOCAL_SIZE": "8"}
    environment |= {"DS_TOPO_RESULTS": str(found), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for tests in (*FOLDERS, *FILES):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.programs.deepspeeds_tests",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-m", "not nightly", f"--basetemp={where / order}", f"unit/{tests}"]
        subprocess.run(command, cwd=clone, env=environment, check=False, stdout=subprocess.DEVNULL)
    rows = (line.split("\t") for line in found.read_text(encoding="utf-8").splitlines())
    return {name: outcome for outcome, name, _ in rows}


@pytest.mark.parametrize("order", ["inner", "outer"])
def test_deepspeeds_tests_pass_on_grids(order: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    where = tmp_path_factory.getbasetemp()
    stock, found = _results("stock", where), _results(order, where)
    passed = [name for name, outcome in stock.items() if outcome == "passed"]
    assert len(passed) > 300
    differ = {name: found.get(name) for name in passed if found.get(name) != "passed"}
    unexpected = {name: outcome for name, outcome in differ.items() if not any(one in name for one in DIFFERENT)}
    assert not unexpected
