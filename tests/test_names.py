"""Fingerprints ignore comments and docstrings, notice code, and lead to the lines that a release has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
from packaging.version import Version

from ds_topo.base.ledger import Reliance
from ds_topo.base.supported import DEEPSPEED, TORCH
from tests import names
from tests.names import (
    ROWS,
    comparison,
    differences,
    fingerprint,
    fingerprints,
    record,
    recorded,
    release_to_compare,
    sources,
    without_source,
)

pytestmark = pytest.mark.thorough  # for those who change ds_topo

SOURCE = '''
@decorated
def f(x, *, y=None):
    """Add."""
    return f"{x:>{y}} {x + 1}"
'''
EDITED = "deepspeed.utils.groups._get_expert_data_parallel_rank"


@pytest.mark.parametrize(
    "same",
    [
        SOURCE.replace('    """Add."""\n', "    # Add.\n"),
        SOURCE.replace("f(x, *, y=None)", "f(\n    x,\n    *,\n    y=None,\n)"),
        SOURCE.replace("\n", "\n    "),
        SOURCE.replace("return f", "return (f").replace('1}"', '1}")'),
    ],
    ids=["comment", "line breaks", "indentation", "parentheses"],
)
def test_fingerprint_ignores_text_without_meaning(same: str) -> None:
    assert fingerprint(same) == fingerprint(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"), [("x + 1", "x + 2"), ("y=None", "y=0"), ("@decorated", "@other"), (":>", ":<"), ("def f", "def g")]
)
def test_fingerprint_notices_code(old: str, new: str) -> None:
    assert old in SOURCE
    assert fingerprint(SOURCE.replace(old, new)) != fingerprint(SOURCE)


def test_fingerprint_does_not_depend_on_the_version_of_python() -> None:
    assert fingerprint(SOURCE) == "0e7643471e9428f6"


def test_fingerprints_of_the_newest_release_are_recorded() -> None:
    known = recorded()
    for library in (DEEPSPEED, TORCH):
        releases_of = [Version(one.partition(" ")[2]) for one in known if one.startswith(f"{library.name.lower()} ")]
        assert max(releases_of) == library.newest
    for release, found in fingerprints(ROWS).items():
        if release in known:
            assert known[release] == found


def test_every_row_has_a_fingerprint_or_is_listed_as_a_value() -> None:
    found, skipped = sources(ROWS).keys(), without_source(ROWS)
    assert not found & set(skipped)
    text = comparison()
    assert all(f"    {name}\n" in f"{text}\n" for name in skipped)
    assert EDITED in found
    assert "deepspeed.utils.groups.mpu" in skipped


def test_a_release_without_record_is_compared_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["deepspeed 0.19.8", "deepspeed 0.19.10", "deepspeed 0.21", "torch 2.8"]
    for installed, nearest in (("0.20", "0.19.10"), ("0.19.9", "0.19.8"), ("0.18", "0.19.8"), ("0.21", "0.21")):
        monkeypatch.setitem(names.INSTALLED, "deepspeed", installed)
        assert release_to_compare("deepspeed", known) == f"deepspeed {nearest}"
    assert release_to_compare("accelerate", known) is None


@pytest.mark.exhaustive
def test_another_release_shows_what_it_changes(tmp_path: Path) -> None:
    folder = tmp_path / "edited"
    shutil.copytree(Path(deepspeed.__file__).parent, folder / "deepspeed")
    version = folder / "deepspeed/git_version_info_installed.py"
    newer = f"{Version(deepspeed.__version__).base_version}.1"
    version.write_text(version.read_text().replace(deepspeed.__version__, newer))
    groups = folder / "deepspeed/utils/groups.py"
    line = "    return dist.get_rank(group=_get_expert_data_parallel_group(group_name))"
    text = groups.read_text()
    assert text.count(line) == 1
    groups.write_text("# A comment.\n" + text.replace(line, f"    # Another comment.\n{line} or 0"))
    shown = _run(folder)
    assert f"deepspeed {newer}" in shown
    assert f"1 of {len([n for n in sources(ROWS) if n.startswith('deepspeed.')])} functions and classes" in shown
    assert f"    {EDITED}\n    To see the differences: pip install --no-deps --target FOLDER deepspeed==" in shown
    title, _, _, *lines = differences(str(folder))
    assert title == f"--- {EDITED} (deepspeed {newer})"
    assert [one for one in lines if not one.startswith(" ")] == [
        "-    # Another comment.",
        f"-{line} or 0",
        f"+{line}",
    ]


def _run(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "tests.names", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True).stdout


def test_update_records_the_installed_release_beside_others(tmp_path: Path) -> None:
    file = tmp_path / "fingerprints.json"
    file.write_text('{"deepspeed 0.1": {"a": "b"}}')
    record(ROWS, file)
    assert recorded(file) == {"deepspeed 0.1": {"a": "b"}, **fingerprints(ROWS)}


def test_folder_without_a_usable_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/__init__.py").write_text("raise ImportError('broken')")
    with pytest.raises(RuntimeError, match=r"cannot be imported with the libraries of this folder"):
        list(differences(str(tmp_path), [Reliance(dict, "keys", "")]))
