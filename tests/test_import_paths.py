"""Every import path of a public name gives the same object, with the same protection."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import ds_topo

pytestmark = pytest.mark.thorough  # for those who change ds_topo

ROOT = Path(ds_topo.__file__).parents[1]
CLASSES = sorted(name for name in ds_topo.__all__ if inspect.isclass(getattr(ds_topo, name)))
FUNCTIONS = sorted(name for name in ds_topo.__all__ if inspect.isfunction(getattr(ds_topo, name)))


def modules() -> list[str]:
    """Every module of the package."""
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "ds_topo").rglob("*.py"))
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__"}
    return sorted(names)


@pytest.mark.parametrize("name", [*CLASSES, *FUNCTIONS])
def test_every_module_that_has_a_public_name_has_the_same_object(name: str) -> None:
    value = getattr(ds_topo, name)
    assert getattr(importlib.import_module(value.__module__), name) is value, "the module that an editor inserts"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for module in modules():
            found = vars(importlib.import_module(module)).get(name, value)
            if inspect.isclass(found) or inspect.isfunction(found):
                assert found is value, module


GRID_PATHS = [
    "from ds_topo import PipelineParallelGrid",
    "from ds_topo.engine.grid import PipelineParallelGrid",
    "from ds_topo.engine.grid import PipelineEngineGrid as PipelineParallelGrid",
]


FRESH_IMPORTS = """
import os, sys
import deepspeed, torch.distributed as dist  # once for all
from torch.testing._internal.distributed.fake_pg import FakeStore

assert not any(name.split(".")[0] == "ds_topo" for name in sys.modules)
for statement in {statements}:
    if os.fork() == 0:  # a process that imports nothing else of the package
        exec(statement)
        from ds_topo.base.ledger import ledger
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        with PipelineParallelGrid("data=2,seq=2"):
            during = sorted(change.name for change in ledger.in_force())
        print(repr((statement, during, ledger.in_force())), flush=True)
        os._exit(0)
    _, status = os.wait()
    assert status == 0, statement
"""


def test_every_path_to_the_grid_protects_engines() -> None:
    source = FRESH_IMPORTS.format(statements=GRID_PATHS)
    result = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    found = [ast.literal_eval(line) for line in result.stdout.splitlines() if line.startswith("('from ")]
    assert [statement for statement, *_ in found] == GRID_PATHS
    for statement, during, afterwards in found:
        assert during == ["__init__", "__init__"], statement
        assert afterwards == [], statement
