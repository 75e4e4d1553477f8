"""The wheel and the source distribution hold what README names, and the wheel works without a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest

from ds_topo import __version__
from ds_topo.cli import examples_command, main
from ds_topo.errors import TopologyError

ROOT = Path(__file__).parents[1]
BUILD = "import hatchling.build as backend; backend.build_sdist('dist'); backend.build_wheel('dist')"
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


class Built(NamedTuple):
    """What was built from the files of the checkout."""

    sources: list[str]
    """The files from which it was built."""
    log: str
    wheel: Path
    sdist: Path

    @property
    def in_wheel(self) -> set[str]:
        return set(zipfile.ZipFile(self.wheel).namelist())

    @property
    def in_sdist(self) -> set[str]:
        with tarfile.open(self.sdist) as file:
            return {one.name.partition("/")[2] for one in file if one.isfile()}

    @property
    def metadata(self) -> Message:
        (name,) = (name for name in self.in_wheel if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(zipfile.ZipFile(self.wheel).read(name))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build both as pip does, from a copy of the files, without the network."""
    if not (ROOT / ".git").exists():
        pytest.skip("the files of a checkout are known to git")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    sources = [name for name in listed if (ROOT / name).is_file()]
    folder = tmp_path_factory.mktemp("checkout")
    for name in sources:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = folder.glob("dist/*.whl"), folder.glob("dist/*.tar.gz")
    return Built(sources, done.stdout + done.stderr, wheel, sdist)


def test_source_distribution_holds_every_file(built: Built) -> None:
    assert set(built.sources) - built.in_sdist == set()
    assert built.in_sdist - set(built.sources) == {"PKG-INFO"}


def test_wheel_holds_the_package_and_the_examples(built: Built) -> None:
    wanted = {name for name in built.sources if name.startswith("ds_topo/")}
    wanted |= {f"ds_topo/{name}" for name in built.sources if name.startswith("examples/")}
    found = {name for name in built.in_wheel if ".dist-info/" not in name}
    assert found == wanted
    assert {"ds_topo/py.typed", "ds_topo/examples/train_gpt.json"} <= found


def test_metadata_has_no_deprecated_form(built: Built) -> None:
    assert "Deprecat" not in built.log
    metadata = built.metadata
    assert (metadata["Version"], metadata["License-Expression"], metadata["License-File"]) == (
        __version__,
        "Apache-2.0",
        "LICENSE",
    )
    classifiers = metadata.get_all("Classifier", [])
    assert not [one for one in classifiers if one.startswith("License ::")], "SPDX text excludes them"
    assert "Operating System :: POSIX :: Linux" in classifiers


def test_page_on_an_index_has_no_links_to_files(built: Built) -> None:
    readme, page = (ROOT / "README.md").read_text(), str(built.metadata.get_payload())
    links = LINK.findall(readme)
    assert "examples/guides/checkpoints.md" in links
    assert LINK.findall(page) == []
    for name in links:
        assert (ROOT / name).exists()
        assert f"(`{name}`)" in page, "the page still names the file"
    assert built.metadata["Description-Content-Type"] == "text/markdown"


# -- the examples of a wheel -------------------------------------------------------------------------------------------


def test_examples_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples"]) == 0
    assert "start with examples/README.md" in capsys.readouterr().out
    names = {path.name for path in (ROOT / "examples").iterdir()} - {"__pycache__"}
    assert {path.name for path in (tmp_path / "examples").iterdir()} == names
    assert (tmp_path / "examples/guides/plan.md").is_file()
    assert main(["examples"]) == 2
    assert "'examples' exists and is not an empty folder: name another one" in capsys.readouterr().err
    assert main(["examples", "again/here"]) == 0
    assert (tmp_path / "again/here/train_gpt.py").is_file()


def test_package_without_examples_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples_command, "__file__", str(tmp_path / "ds_topo/cli/examples_command.py"))
    with pytest.raises(TopologyError, match="was installed without its examples: install a wheel"):
        examples_command._source()


@pytest.mark.exhaustive
def test_first_command_of_readme_runs_from_a_wheel(built: Built, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", built.wheel]
    subprocess.run(pip, check=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    where = [sys.executable, "-c", "import ds_topo; print(ds_topo.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(tmp_path)
    script = [tmp_path / "site/bin/ds-topo", "examples"]
    subprocess.run(script, cwd=tmp_path, env=environment, check=True)
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip install"))
    command = line.rpartition("&& ")[2].replace("torchrun", f"{sys.executable} -m torch.distributed.run", 1)
    small = "--batch-size 16 --context 16 --width 32 --depth 2 --steps 2 --continuation 12"
    done = subprocess.run(
        f"{command} {small}", shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "after 2 steps on pipe=2,data=2" in done.stdout
    assert (tmp_path / "runs/gpt/history.json").is_file()
