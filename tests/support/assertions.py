"""Show the values of failed asserts in processes that pytest did not start.

pytest rewrites the ``assert`` statements of a module with an import hook of its own process. A rank installs the same
hook before it imports any test. This file has all code that depends on pytest's internals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import util

ROOT = Path(__file__).parents[2]
OPTIONS = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--noconftest", "--capture=no"]
REWRITTEN = ["-o", "python_files=tests/[!b]*.py"]
"""Test modules and their helpers, at any depth (in pytest's own process, ``tests/conftest.py`` names the helpers).

Benchmarks are excluded: each is a program that its ranks run again, which pytest's hook does not support."""


def show_values_of_asserts() -> None:
    """Rewrite the asserts of every module below ``tests`` that this process imports from now on."""
    config = pytest.Config.fromdictargs({}, [*OPTIONS, *REWRITTEN])  # reading the options installs the hook

    def explain(operator: str, left: Any, right: Any) -> str | None:
        """Format the first plugin's comparison of two values as pytest does."""
        for lines in config.hook.pytest_assertrepr_compare(config=config, op=operator, left=left, right=right):
            if lines:
                return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    util._reprcompare = explain
