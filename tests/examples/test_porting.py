"""The changes in the guide apply to ``encoder.py``; every form trains alike and continues the others' files."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
LAYOUTS = ["", "data=2", "data=2,model=2", "pipe=2,data=2", "data=2,shard=2"]
"""Where each form runs; the first is plain PyTorch."""


def forms() -> list[str]:
    """Return the source of the script, and what each step of the guide makes of it."""
    sources = [(EXAMPLES / "encoder.py").read_text()]
    guide = (EXAMPLES / "guides/porting.md").read_text()
    for change in re.findall(r"<!-- change -->\n```diff\n(.*?)```", guide, re.DOTALL):
        source = sources[-1]
        for hunk in re.split(r"^@@.*\n", change, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
            assert source.count(old) == 1, f"these lines are in the script once:\n{old}"
            source = source.replace(old, new)
        sources.append(source)
    return sources


FORMS = forms()


def _run(source: str, *options: str) -> list[list[float]]:
    """Run a form; return training and validation loss of each epoch that this rank logs."""
    logging.getLogger().handlers.clear()
    sys.argv = ["encoder.py", "--epochs", "2", *options]
    with redirect_stderr(StringIO()) as printed:
        exec(compile(source, "encoder.py", "exec"), {"__name__": "__main__"})
    lines = re.findall(r"^epoch \d+: (\S+), validation (\S+), \d+ tokens/s$", printed.getvalue(), re.MULTILINE)
    return [[float(loss) for loss in line] for line in lines]


def train(form: int, layout: str, out: Path, *options: str) -> list[list[float]]:
    """Run a form on its ranks, of which one logs."""
    options = ("--out", str(out), *options, *(("--topology", layout) if layout else ()))
    ranks = {"": 1, "data=2": 2}.get(layout, 4)
    first, *others = run_ranks(ranks, _run, FORMS[form], *options)
    assert others == [[]] * (ranks - 1)
    return list(first)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """The files and the losses of the script itself."""
    out = tmp_path_factory.mktemp("plain")
    return out, train(0, "", out, "--epochs", "3")


def assert_same_losses(losses: list[list[float]], plain: list[list[float]]) -> None:
    """Compare losses in bf16, whose weights engines round and autocast does not."""
    assert len(losses) == len(plain)
    for epoch, expected in zip(losses, plain, strict=True):
        assert epoch == pytest.approx(expected, rel=2e-3)


def test_guide_has_a_change_for_every_layout() -> None:
    assert len(FORMS) == len(LAYOUTS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", mark_exhaustive(range(1, 5), lambda _, form: form == 4))
def test_every_form_trains_alike(form: int, plain: tuple[Path, list[list[float]]], tmp_path: Path) -> None:
    _, losses = plain
    assert losses[1][0] < losses[0][0] - 0.05, "it learns"
    assert_same_losses(train(form, LAYOUTS[form], tmp_path), losses[:2])


@pytest.mark.thorough
def test_pipeline_continues_the_files_of_the_script_and_the_script_those_of_the_pipeline(
    plain: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    out, losses = plain
    assert_same_losses(train(4, "pipe=2,model=2", tmp_path, "--resume", str(out / "epoch0")), losses[1:2])
    back = train(0, "", tmp_path, "--epochs", "3", "--resume", str(tmp_path / "epoch1"))
    assert_same_losses(back, losses[2:])
