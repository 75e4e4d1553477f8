"""Run every ``ds-topo plan`` of the guide and compare what it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ds_topo.cli import main

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "examples/guides/plan.md"
SHOWN = re.compile(r"```bash\n(ds-topo plan [^\n]*)\n```\n\n<!-- output -->\n```\n(.*?)```", re.DOTALL)
EXAMPLES = [(match[1], match[2]) for match in SHOWN.finditer(GUIDE.read_text())]


@pytest.mark.parametrize(("command", "output"), EXAMPLES, ids=[str(number) for number in range(len(EXAMPLES))])
def test_guide_commands_print_the_output_in_the_guide(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(shlex.split(command)[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == output.splitlines()


def test_guide_has_two_examples() -> None:
    assert len(EXAMPLES) == 2
