"""Run every snippet and command of README.md and the guides, and compare the output with what they show.

``<!-- run: 4 ranks -->`` before a block of Python runs it on four ranks. ``<!-- run: 2 ranks, stopped and started again
-->`` also stops it in the middle, starts it again in the same folder, and once more after its end. ``<!-- output -->``
before the next block marks lines that the ranks print, in this order, first those of rank 0. ``...`` stands for text
that varies, and on a line of its own for other lines. Commands that start an example run with a small model and few
steps. A block of ``console`` holds commands such as ``$ ds-topo show ...``, each with its exact output in 80 columns.
"""

from __future__ import annotations

import doctest
import os
import pkgutil
import re
import shlex
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

import ds_topo
from ds_topo.checkpoint import manifest
from ds_topo.checkpoint.folder import Checkpoint, look_at, tags_in
from ds_topo.cli import main
from tests.support.example_jobs import SMALL, record_in, run_command
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "examples/guides").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)```", re.DOTALL)
CHECKER, FLAGS = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Snippet(NamedTuple):
    """A program in a guide, and the output that the guide shows."""

    guide: str
    line: int
    ranks: int
    source: str
    output: str
    is_restarted: bool = False

    def __str__(self) -> str:
        return f"{self.guide}:{self.line}"


def snippets() -> Iterator[Snippet]:
    for guide in GUIDES:
        text = guide.read_text()
        blocks = list(BLOCK.finditer(text))
        for block, following in zip(blocks, [*blocks[1:], None], strict=False):
            mark = re.fullmatch(r"run: (\d+) ranks?(, stopped and started again)?", block["mark"] or "")
            if mark:
                shown = following["text"] if following and following["mark"] == "output" else ""
                line = text[: block.start("text")].count("\n") + 1
                yield Snippet(guide.name, line, int(mark[1]), block["text"], shown, is_restarted=mark[2] is not None)


def commands() -> list[str]:
    """List the commands that start an example on this host."""
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
    """Yield the commands that a guide shows with their output."""
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


def _check_output(wanted: str, by_rank: list[str]) -> None:
    printed = iter([line for text in by_rank for line in text.splitlines(keepends=True)])
    for line in wanted.splitlines(keepends=True):
        if line != "...\n":
            assert any(CHECKER.check_output(line, found, FLAGS) for found in printed), f"not printed: {line}{by_rank}"


@pytest.mark.thorough
@pytest.mark.parametrize("snippet", [one for one in snippets() if not one.is_restarted], ids=str)
def test_snippet_prints_its_output(snippet: Snippet) -> None:
    _check_output(snippet.output, run_ranks(snippet.ranks, _run, snippet.source, str(snippet)))


# -- programs that save and load ---------------------------------------------------------------------------------------

Losses = dict[int, list[float]]
"""The losses of a rank's micro-batches, by the steps that the engine had taken before."""


class _Killed(BaseException):
    """The end of a rank that gets no signal."""


def _run_in(folder: Path, source: str, name: str, stop: int | None, by_signal: bool) -> tuple[str, Losses]:
    """Run a program in a folder until its end, or until a step; return what it prints, and the losses."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    losses = defaultdict[int, list[float]](list)
    backward = DeepSpeedEngine.backward

    def recorded(engine: Any, loss: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if engine.global_steps == stop and stop not in losses:
            if not by_signal:
                raise _Killed
            if dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
        losses[engine.global_steps].append(float(loss.detach()))
        return backward(engine, loss, *arguments, **options)

    with mock.patch.object(DeepSpeedEngine, "backward", recorded):
        if stop is None:
            return _run(source, name), dict(losses)
        with pytest.raises(SystemExit if by_signal else _Killed) as ended:
            _run(source, name)
    assert not by_signal or ended.value.args == (128 + signal.SIGTERM,)
    return "", dict(losses)


def _checkpoints_in(folder: Path) -> list[Checkpoint]:
    [root] = {path.parents[1] for path in folder.rglob(manifest.NAME)}
    return [look_at(root, tag, digests=True) for tag in tags_in(root)]


RESTARTED = [
    (snippet, how)
    for snippet in snippets()
    if snippet.is_restarted
    for how in ("SIGTERM" if "signal.SIGTERM" in snippet.source else "", "killed")
    if how
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("snippet", "how"),
    mark_exhaustive(RESTARTED, lambda number, case: (case[0].guide, case[1]) != ("elastic.md", "killed")),
    ids=str,
)
def test_program_goes_on_where_it_was_stopped(snippet: Snippet, how: str, tmp_path: Path) -> None:
    def start(folder: str, stop: int | None = None) -> tuple[list[str], list[Losses]]:
        program = (snippet.source, str(snippet), stop, how == "SIGTERM")
        found = run_ranks(snippet.ranks, _run_in, tmp_path / folder, *program)
        return [text for text, _ in found], [losses for _, losses in found]

    printed, through = start("through")
    _check_output(snippet.output, printed)
    last = snippet.output.splitlines(keepends=True)[-1]
    steps = len(through[0])
    _, before = start("stopped", steps * 2 // 3)
    printed, after = start("stopped")
    _check_output(last, printed)
    for whole, first, second in zip(through, before, after, strict=True):
        assert {**first, **second} == whole, "each step has the loss of the undisturbed job"
        assert max(second) == steps - 1
        assert not first.keys() & second.keys() or how == "killed", "SIGTERM repeats no step"
        assert min(second) > 0, "it goes on"
    wanted, found = (_checkpoints_in(tmp_path / folder) for folder in ("through", "stopped"))
    assert max(one.age[0] for one in found) == max(one.age[0] for one in wanted) == steps
    assert all(one.is_whole for one in wanted + found)
    printed, again = start("stopped")
    _check_output(last, printed)
    assert not any(again), "the job was complete"


@pytest.mark.thorough
@pytest.mark.parametrize("command", commands())
def test_command_trains(command: str, tmp_path: Path) -> None:
    short = ["--continuation", "12"] if "examples/train_gpt.py" in command else []
    run_command(command, *SMALL, "--steps", "2", *short, "--out", str(tmp_path))
    assert len(record_in(tmp_path)["history"]) == 2


@pytest.mark.parametrize(("command", "printed"), list(shown_commands()))
def test_command_prints_its_output(
    command: str, printed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    program, *arguments = shlex.split(command)
    assert program == "ds-topo"
    code = main(arguments)
    output, errors = capsys.readouterr()
    assert [line.rstrip() for line in (errors if code else output).splitlines()] == printed.splitlines()


def test_search_finds_snippets_and_commands() -> None:
    assert len(list(snippets())) >= 10
    assert len(commands()) >= 3
    assert len(list(shown_commands())) >= 5


DOCUMENTS = [*GUIDES, ROOT / "ds_topo/README.md", ROOT / ".github/CONTRIBUTING.md", *ROOT.glob("tests/README.md")]


def test_names_in_documents_and_messages_exist() -> None:
    for path in [*DOCUMENTS, ROOT / "CHANGELOG.md", *sorted((ROOT / "ds_topo").rglob("*.py"))]:
        for name in sorted(set(re.findall(r"\bds_topo(?:\.\w+)+", path.read_text()))):
            assert _exists(name), f"{path.relative_to(ROOT)} names {name}"


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(path.read_text() for path in sorted((ROOT / "examples/reference").glob("*.rst")))
    entries = re.findall(r"^\.\. auto\w+:: ds_topo\.(\w+)$", pages, re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert set(ds_topo.__all__) <= set(entries)


def test_the_program_in_eight_lines_has_eight_lines() -> None:
    [text] = re.findall(r"## In eight lines\n.*?```python\n(.*?)```", GUIDES[0].read_text(), re.DOTALL)
    assert len([line for line in text.splitlines() if line]) == 8


def test_links_between_documents_exist() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
