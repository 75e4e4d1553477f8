"""Every snippet of README.md and of the guides runs, and prints what it says.

``<!-- run: 4 ranks -->`` before a block of Python runs it on four ranks; ``<!-- output -->`` before the next block
holds lines that the ranks print, rank by rank, in this order; ``...`` stands for whatever varies, and in a line of its
own for other lines. Commands that start an example run too, with a small model and few steps. A block of ``console``
holds commands, ``$ ds-topo show ...``, each with exactly what it prints in 80 columns.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ds_topo.cli import main
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "examples").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)```", re.DOTALL)
CHECKER, FLAGS = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SMALL = "--steps 2 --batch-size 16 --context 16 --width 32 --depth 2"


class Snippet(NamedTuple):
    """A program of a guide."""

    guide: str
    line: int
    ranks: int
    source: str
    output: str

    def __str__(self) -> str:
        return f"{self.guide}:{self.line}"


def snippets() -> Iterator[Snippet]:
    for guide in GUIDES:
        text = guide.read_text()
        blocks = list(BLOCK.finditer(text))
        for block, following in zip(blocks, [*blocks[1:], None], strict=False):
            mark = re.fullmatch(r"run: (\d+) ranks?", block["mark"] or "")
            if mark:
                shown = following["text"] if following and following["mark"] == "output" else ""
                line = text[: block.start("text")].count("\n") + 1
                yield Snippet(guide.name, line, int(mark[1]), block["text"], shown)


def commands() -> list[str]:
    """Commands that start an example on this host."""
    found = [
        line
        for guide in GUIDES
        for block in BLOCK.finditer(guide.read_text())
        if block["language"] == "bash"
        for line in block["text"].splitlines()
        if "examples/" in line
    ]
    return [command.rpartition("&& ")[2] for command in found]


def shown_commands() -> Iterator[Any]:
    """Commands that are shown with what they print."""
    for guide in GUIDES:
        for block in BLOCK.finditer(guide.read_text()):
            if block["language"] == "console":
                for part in re.split(r"^\$ ", block["text"], flags=re.MULTILINE)[1:]:
                    command, _, printed = part.partition("\n")
                    yield pytest.param(command, printed, id=command)


def _run(source: str, name: str) -> str:
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(source, name, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("snippet", list(snippets()), ids=str)
def test_a_snippet_runs_and_prints_what_it_says(snippet: Snippet) -> None:
    by_rank = run_ranks(snippet.ranks, _run, snippet.source, str(snippet))
    printed = iter([line for text in by_rank for line in text.splitlines(keepends=True)])
    for wanted in snippet.output.splitlines(keepends=True):
        if wanted != "...\n":
            assert any(CHECKER.check_output(wanted, line, FLAGS) for line in printed), f"not printed: {wanted}{by_rank}"


@pytest.mark.parametrize("command", commands())
def test_a_command_starts_an_example(command: str, tmp_path: Path) -> None:
    if "--sequence-parallel" not in command and not os.environ.get("DS_TOPO_EVERY_WAY"):
        pytest.skip("tests/examples start this example, too: DS_TOPO_EVERY_WAY=1")
    words = shlex.split(f"{command} {SMALL} --out {tmp_path}")
    words += ["--continuation", "12"] if "examples/train_gpt.py" in words else []
    launcher = str(Path(sys.executable).with_name(words[0]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [launcher, *words[1:]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert (tmp_path / "history.json").exists()


@pytest.mark.parametrize(("command", "printed"), list(shown_commands()))
def test_a_command_prints_what_is_shown(
    command: str, printed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    program, *arguments = shlex.split(command)
    assert program == "ds-topo"
    code = main(arguments)
    output, errors = capsys.readouterr()
    assert [line.rstrip() for line in (errors if code else output).splitlines()] == printed.splitlines()


def test_the_guides_are_found() -> None:
    assert len(list(snippets())) >= 10
    assert len(commands()) >= 3
    assert len(list(shown_commands())) >= 5


def test_links_between_documents_lead_somewhere() -> None:
    documents = [*GUIDES, ROOT / "ds_topo/README.md", ROOT / ".github/CONTRIBUTING.md", *ROOT.glob("tests/README.md")]
    for document in documents:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
