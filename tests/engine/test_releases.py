"""Releases that were not run cause one warning, and all files list the same supported releases."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ds_topo.mpu.releases import DEEPSPEED, TORCH, Supported, warn_of_releases

ROOT = Path(__file__).parents[2]
RUN = (str(DEEPSPEED.newest), str(TORCH.newest))


@pytest.mark.parametrize(
    ("releases", "said"),
    [
        (("0.17.6", RUN[1]), r"DeepSpeed 0\.17\.6 is older than 0\.19\.8.*upgrade it"),
        (("0.20.1", RUN[1]), r"DeepSpeed 0\.20\.1 is newer than 0\.19\.8.*python -m ds_topo\.engine"),
        ((RUN[0], "2.6.0+cpu"), r"torch 2\.6\.0\+cpu is older than 2\.8.*upgrade it"),
        ((RUN[0], "3.0.0a0+git123"), r"torch 3\.0\.0a0\+git123 is newer than 2\.13.*python -m ds_topo\.engine"),
    ],
    ids=["old DeepSpeed", "new DeepSpeed", "old torch", "new torch"],
)
def test_release_that_was_not_run_warns_once(releases: tuple[str, str], said: str) -> None:
    with pytest.warns(RuntimeWarning, match=said):
        warn_of_releases(*releases)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_releases(*releases)


@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_releases_that_were_run_do_not_warn(end: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_releases(str(getattr(DEEPSPEED, end)), f"{getattr(TORCH, end)}+cu128")


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
