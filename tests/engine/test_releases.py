"""Older releases are refused, newer ones cause one warning, and all files list the same supported releases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ds_topo import PipelineParallelGrid
from ds_topo.mpu import supported
from ds_topo.mpu.supported import DEEPSPEED, TORCH, Supported, warn_of_newer_releases
from tests.support.world import Worlds

ROOT = Path(__file__).parents[2]
RUN = (str(DEEPSPEED.newest), str(TORCH.newest))


@pytest.mark.parametrize(
    ("releases", "said"),
    [
        (("0.20.1", RUN[1]), rf"DeepSpeed 0\.20\.1 is newer than {DEEPSPEED.newest}.*python -m ds_topo\.engine"),
        ((RUN[0], "3.0.0a0+git123"), rf"torch 3\.0\.0a0\+git123 is newer than {TORCH.newest}.*ds_topo\.engine"),
    ],
    ids=["DeepSpeed", "torch"],
)
def test_newer_release_warns_once(releases: tuple[str, str], said: str) -> None:
    with pytest.warns(RuntimeWarning, match=said):
        warn_of_newer_releases(*releases)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_newer_releases(*releases)


@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_releases_that_were_run_do_not_warn(end: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_newer_releases(str(getattr(DEEPSPEED, end)), f"{getattr(TORCH, end)}+cu128")


def _warnings_of_a_grid() -> list[str]:
    supported.warn_of_newer_releases.cache_clear()
    older = TORCH._replace(newest=Version("1.0"))
    with (
        mock.patch.object(supported, "TORCH", older),
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
    run = {Version(one) for one in re.findall(rf"{library.name} ([\d.]+\d)", _supported_line())}
    assert least is not None
    assert Version(least[1]) == library.oldest
    assert run == {library.oldest, library.newest}
    default = re.search(rf"{library.name.lower()}=\$\{{\d:-(.+?)\}}", (ROOT / "tests/oldest.sh").read_text())
    assert default is not None
    assert Version(default[1]) == library.oldest


def test_all_files_have_the_same_versions_of_python() -> None:
    said = re.search(r"Python >= ([\d.]+\d)", _supported_line())
    assert said is not None
    assert _project("requires-python") == f'">={said[1]}"'
