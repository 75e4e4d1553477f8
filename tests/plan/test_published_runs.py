"""Compare predictions with published runs: those that constants were fitted to, and others."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from tests.bench.published_runs import print_table
from tests.plan.published_runs import AVAILABLE, FILES, Verdict, judge, read_runs


@pytest.fixture(scope="module", params=[FILES[0], pytest.param(FILES[1], marks=pytest.mark.exhaustive)])
def judged(request: pytest.FixtureRequest) -> list[Verdict]:
    return [judge(run) for run in read_runs(request.param)]


def test_predictions_are_within_15_percent_and_their_median_within_7(judged: list[Verdict]) -> None:
    assert [(one.name, one.error) for one in judged if abs(one.error) > 0.15] == []
    assert median(abs(one.error) for one in judged) <= 0.07
    assert len(judged) >= 15


def test_published_layouts_fit_in_memory(judged: list[Verdict]) -> None:
    assert [str(verdict.plan.layout) for verdict in judged if not verdict.fits] == []


def test_most_published_layouts_are_near_the_best(judged: list[Verdict]) -> None:
    for verdict in judged:
        assert verdict.best is not None
        assert bool(verdict.note) == (verdict.plan.seconds > AVAILABLE * verdict.best.seconds)
    assert sum(not verdict.note for verdict in judged) >= 0.7 * len(judged)


def test_full_recomputation_computes_a_third_more(judged: list[Verdict]) -> None:
    for verdict in judged:
        if verdict.plan.layout.recompute.value == "full":
            assert verdict.plan.time.recompute == pytest.approx(verdict.plan.time.compute / 3, rel=0.1)


def test_guide_shows_the_table(judged: list[Verdict], capsys: pytest.CaptureFixture[str]) -> None:
    print_table(judged)
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    shown = printed in (Path(__file__).parents[2] / "examples/guides/plan.md").read_text()
    assert shown == (len(judged) == len(read_runs(FILES[0])))
