"""Run ``ds-topo examples``: copy the examples and the guides of this release to a folder."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from ds_topo.errors import TopologyError

SUMMARY = "copy the examples and guides to a folder"
DESCRIPTION = (
    "Copy the training programs and the guides that belong to this release to a new folder, to run, read and change. "
    "Guides and messages name the programs as they are started next to that folder, such as examples/train_gpt.py."
)
EXAMPLES = """examples:
  ds-topo examples
  torchrun --nproc-per-node 4 examples/train_gpt.py --topology "pipe=2,data=2"
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="new or empty folder; default: examples")


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder or "examples")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TopologyError(f"{str(folder)!r} exists and is not an empty folder: name another one")
    shutil.copytree(_source(), folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    release = sys.modules["ds_topo"].__version__
    print(f"copied the examples and guides of ds_topo {release} to {folder}; start with {folder}/README.md")
    return 0


def _source() -> Path:
    """Return the folder of the examples: in an installed package, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "examples", package.parent / "examples"):
        if (folder / "train_gpt.py").is_file():
            return folder
    raise TopologyError(f"{package} was installed without its examples: install a wheel of ds_topo")
