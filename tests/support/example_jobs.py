"""Run the training examples on forked ranks, without the seconds that a launcher and fresh imports take."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from tests.support.ranks import run_ranks

SMALL = ("--batch-size", "16", "--context", "16", "--width", "32", "--depth", "2")
"""Options for a model that trains in a moment."""


def run_main(name: str, *options: str) -> str:
    """Call the main function of an example, as its command line does; return the lines that it prints."""
    sys.argv = [name, *options]
    with redirect_stdout(StringIO()) as printed:
        importlib.import_module(name).main()
    return printed.getvalue()


def run_command(command: str, *options: str) -> str:
    """Run ``torchrun --nproc-per-node 4 examples/train_gpt.py ...`` with more options; return rank 0's output."""
    launcher, count, ranks, program, *given = shlex.split(command)
    assert (launcher, count) == ("torchrun", "--nproc-per-node")
    assert Path(program).resolve().is_file()
    return str(run_ranks(int(ranks), run_main, Path(program).stem, *given, *options)[0])


def record_in(out: Path) -> dict[str, Any]:
    """Read the record that an example wrote."""
    record: dict[str, Any] = json.loads((out / "history.json").read_text())
    return record
