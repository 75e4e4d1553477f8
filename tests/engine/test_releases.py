"""Older releases are refused, newer ones cause one warning, and all files list the same supported releases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from packaging.requirements import Requirement
from packaging.version import Version
from torch import nn

from ds_topo import DualPipeVModule, PipelineModule, PipelineParallelGrid
from ds_topo.base import OLDEST_PYTHON, supported
from ds_topo.base.ledger import Patch, Reliance, Row
from ds_topo.base.supported import (
    CHECKPOINTS_ON_CPU,
    DEEPSPEED,
    DUALPIPEV,
    ENGINES,
    PARTITIONED_PARAMETERS_ON_CPU,
    SEPARATE_GRADIENTS_ON_CPU,
    SEQUENCES_ON_CPU,
    SLICES_OF_PARTITIONED,
    SLICES_WITH_EXPERTS,
    TORCH,
    Feature,
    Supported,
    require,
    warn_of_newer_releases,
)
from tests.names import recorded
from tests.support.world import Worlds

ROOT = Path(__file__).parents[2]
OWN = Patch(DeepSpeedEngine, "step", "The same.", "An example.", "an example")
GONE = Reliance(DeepSpeedEngine, "_renamed", "An example.")


def _own() -> list[Row]:
    return [OWN, GONE]


@pytest.mark.parametrize(
    ("library", "release", "said"),
    [
        (DEEPSPEED, "0.20.1", f"['{GONE}']"),
        (TORCH, "3.0.0", "none"),
    ],
    ids=["deepspeed", "torch"],
)
def test_newer_release_warns_once_and_names_what_it_lacks(library: Supported, release: str, said: str) -> None:
    warn_of_newer_releases.cache_clear()
    with mock.patch.object(sys.modules[library.name.lower()], "__version__", release):
        start = f"{library.name} {release} is newer than {library.newest}, the newest that ds_topo was run with."
        with pytest.warns(RuntimeWarning, match=re.escape(start) + ".*" + re.escape(f"that it lacks: {said}. ")):
            warn_of_newer_releases(_own)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_newer_releases(_own)


@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_releases_that_were_run_do_not_warn(end: str) -> None:
    warn_of_newer_releases.cache_clear()
    rows = mock.Mock()
    with (
        mock.patch.object(deepspeed, "__version__", str(getattr(DEEPSPEED, end))),
        mock.patch.object(torch, "__version__", f"{getattr(TORCH, end)}.0+cpu"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        warn_of_newer_releases(rows)
    rows.assert_not_called()  # they import all parts


@pytest.mark.parametrize("release", ["0.19.6", "0.19.6+local", "0.19.7"])
def test_releases_with_a_feature_are_not_refused(release: str) -> None:
    with mock.patch.object(deepspeed, "__version__", release):
        require(ENGINES)


def _build_plain(spec: str, device: str = "cpu", **options: Any) -> None:
    accelerator = SimpleNamespace(device_name=lambda: device)
    with (
        PipelineParallelGrid(spec) as grid,
        mock.patch("deepspeed.accelerator.get_accelerator", return_value=accelerator),
    ):
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **options}
        if options.get("zero_optimization", {}).get("stage") == 3:
            with deepspeed.zero.Init(config_dict_or_path=config, mpu=grid):
                model = nn.Linear(8, 8)
        else:
            model = nn.Linear(8, 8)
        deepspeed.initialize(model=model, mpu=grid, config=config, model_parameters=list(model.parameters()))


def _build_pipeline(kind: type[PipelineModule], **options: Any) -> None:
    kind([nn.Linear(2, 2), nn.Linear(2, 2)], topology="data=2", **options)


SLICES = {"tensor_parallel": {"autotp_size": 2}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}
LACKING: list[tuple[str, Feature, Callable[[], None]]] = [
    ("0.19.5", ENGINES, partial(_build_plain, "data=2")),
    ("0.19.7", DUALPIPEV, partial(_build_pipeline, DualPipeVModule)),
    ("0.19.7", CHECKPOINTS_ON_CPU, partial(_build_pipeline, PipelineModule, activation_checkpoint_interval=1)),
    ("0.19.7", SLICES_WITH_EXPERTS, partial(_build_plain, "model=2", **SLICES, **EXPERTS)),
    (
        "0.19.7",
        SLICES_OF_PARTITIONED,
        partial(_build_plain, "model=2", "cuda", zero_optimization={"stage": 3}, **SLICES),
    ),
    ("0.19.7", PARTITIONED_PARAMETERS_ON_CPU, partial(_build_plain, "data=2", zero_optimization={"stage": 3})),
    ("0.19.7", SEQUENCES_ON_CPU, partial(_build_plain, "seq=2", compile={"passes": ["autosp"]})),
    (
        "0.19.7",
        SEPARATE_GRADIENTS_ON_CPU,
        partial(_build_plain, "data=2", zero_optimization={"stage": 2, "contiguous_gradients": False}),
    ),
]


def _refused(release: str, build: Callable[[], None]) -> str:
    deepspeed.init_distributed(verbose=False)
    warnings.simplefilter("ignore")
    with mock.patch.object(deepspeed, "__version__", release), pytest.raises(RuntimeError) as raised:
        build()
    return str(raised.value)


@pytest.mark.parametrize(("release", "feature", "build"), LACKING, ids=lambda value: getattr(value, "name", ""))
def test_older_releases_are_refused_what_they_cannot_do(
    world: Worlds, release: str, feature: Feature, build: Callable[[], None]
) -> None:
    for said in world(2).run(_refused, release, build):
        assert f"{feature.name} needs DeepSpeed >= {feature.oldest}, but {release} is installed. " in said
        assert said.endswith(feature.instead)


def _warnings_of_a_grid() -> list[str]:
    warn_of_newer_releases.cache_clear()
    with (
        mock.patch.object(supported, "TORCH", TORCH._replace(newest=Version("1.0"))),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        PipelineParallelGrid("data=2,model=2").destroy()
        PipelineParallelGrid("data=4").destroy()
    return [str(one.message) for one in caught if "newer than 1.0" in str(one.message)]


def test_one_rank_warns_of_a_newer_release(world: Worlds) -> None:
    assert [len(of_rank) for of_rank in world(4).run(_warnings_of_a_grid)] == [1, 0, 0, 0]


@pytest.mark.parametrize(("library", "release"), [("deepspeed", "0.17.6"), ("torch", "2.6.0+cpu")])
@pytest.mark.parametrize(
    "statement",
    ["from ds_topo import PipelineParallelGrid", "from ds_topo.checkpoint import load"],
    ids=["grid", "load"],
)
def test_older_release_is_refused_before_anything_of_it_is_imported(
    statement: str, library: str, release: str, tmp_path: Path
) -> None:
    folder = tmp_path / f"{library}-{release}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {release}\n")
    (tmp_path / library).mkdir()
    (tmp_path / library / "__init__.py").write_text("raise RuntimeError('it was imported')")
    script = f"""
import ds_topo, ds_topo.errors
ds_topo.checkpoint.look_at  # works without both
try:
    {statement}
except ImportError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    oldest = {"deepspeed": DEEPSPEED, "torch": TORCH}[library].oldest
    name = {"deepspeed": "DeepSpeed"}.get(library, library)
    assert done.stdout == (
        f"{name} {release} is installed, but ds_topo imports names that older releases than {oldest} do not have. "
        f"Upgrade it: pip install '{library}>={oldest}'\n"
    ), done.stderr


@pytest.mark.thorough
def test_older_torch_is_refused_by_modules_that_need_no_deepspeed() -> None:
    code = """
import importlib, torch
torch.__version__ = '2.7.1'
modules = "collectives", "distributed", "layers", "launch.joining", "process_groups.process_grid", "reduction.reducer"
for module in modules:
    try:
        importlib.import_module(f"ds_topo.{module}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    refusal = "torch 2.7.1 is installed, but ds_topo imports names"
    assert [line.startswith(refusal) for line in done.stdout.splitlines()] == [True] * 6, done.stderr


def test_older_python_is_refused_first() -> None:
    code = "import sys; sys.version_info, sys.version = (3, 9, 7), '3.9.7 (main)'\nimport ds_topo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    said = done.stderr.splitlines()[-1]
    assert said.startswith("ImportError: Python 3.9.7 runs this program, but ds_topo needs Python 3.10 or newer")


# -- the bounds agree ----------------------------------------------------------------------------------------------


def _project(key: str) -> str:
    """Return a value of ``pyproject.toml``; ``tomllib`` needs Python 3.11."""
    found = re.search(rf"^{key} = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def _supported_line() -> str:
    return next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("Supported: "))


@pytest.mark.parametrize("library", [DEEPSPEED, TORCH], ids=lambda library: library.name)
def test_all_files_have_the_same_releases(library: Supported) -> None:
    wanted = [Requirement(text) for text in re.findall(r'"([^"]+)"', _project("dependencies"))]
    (requirement,) = (one for one in wanted if one.name == library.name.lower())
    assert str(requirement.specifier) == f">={library.oldest}"
    least = re.search(rf"{library.name} >= ([\d.]+\d)", _supported_line())
    assert least is not None
    assert Version(least[1]) == library.oldest
    commands = re.findall(r"^\| `tests/releases.sh ([\d.]+) ([\d.]+) ", _contributing(), re.MULTILINE)
    run = {Version(command[library is TORCH]) for command in commands}
    assert (min(run), max(run)) == (library.oldest, library.newest)


def _contributing() -> str:
    return (ROOT / ".github/CONTRIBUTING.md").read_text()


def test_table_of_releases_has_the_features_of_each() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| DeepSpeed | "))
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[first : first + 5]]
    columns = [Version(cell) for cell in table[0][1:]]
    known = [name.partition(" ")[2] for name in recorded() if name.startswith("deepspeed ")]
    assert columns == sorted({DEEPSPEED.oldest, *map(Version, known)})
    for row, oldest in zip(table[2:], (DEEPSPEED.oldest, ENGINES.oldest, DUALPIPEV.oldest), strict=True):
        assert row[1:] == ["yes" if column >= oldest else "no" for column in columns], row[0]


def test_all_files_have_the_same_versions_of_python() -> None:
    said = re.search(r"Python >= ([\d.]+\d)", _supported_line())
    assert said is not None
    assert _project("requires-python") == f'">={said[1]}"'
    assert ".".join(map(str, OLDEST_PYTHON)) == said[1]
