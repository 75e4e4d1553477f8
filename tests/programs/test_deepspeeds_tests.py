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
DATA_LOADER = "a grid names the ranks whose samples differ, before DeepSpeed asserts"
MANIFEST = "a grid refuses files that have changed since they were saved, before DeepSpeed misses their metadata"
NEIGHBORS = "a grid refuses a sequence_parallel_size that joins neighboring ranks, and names the ranks along seq"
SAMPLES = "the test takes rank // slices for the index of its samples; it passes with the index along data"
IN_BOTH = {
    "TestTpDataloaderCorrectness": DATA_LOADER,
    "test_cpu_gloo_folded_checkpoint_edp_replica_resume": MANIFEST,
}
DIFFERENT: dict[str, dict[str, str]] = {
    "inner": IN_BOTH,
    "outer": {
        **IN_BOTH,
        "test_cpu_gloo_folded_zero0_router_gate_and_layernorm_grad_parity": SAMPLES,
        "test_cpu_gloo_folded_zero2_router_gate_and_layernorm_grad_parity": SAMPLES,
        "test_cpu_gloo_crosslane_tp2_ep4_zero0_router_gate_and_layernorm_grad_parity": SAMPLES,
        "test_cpu_gloo_crosslane_tp2_ep4_zero2_router_gate_and_layernorm_grad_parity": SAMPLES,
        "test_cpu_gloo_expert_weight_parity_mvp_tp2_ep4": SAMPLES,
        "test_cpu_gloo_expert_weight_parity_crosslane_tp4_ep4_edp2": SAMPLES,
        "test_sp_loss_backward_stability": NEIGHBORS,
    },
}
"""Tests that pass with stock DeepSpeed alone: for each order, a part of their name, and the reason."""


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
    assert len(passed) > 200
    differ = {name: found.get(name) for name in passed if found.get(name) != "passed"}
    expected = DIFFERENT[order]
    assert not {name: outcome for name, outcome in differ.items() if not any(part in name for part in expected)}
    assert not [part for part in expected if not any(part in name for name in differ)], "these pass by now"
