"""Pairs of jobs drawn at random load exactly, or are refused by every rank with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.matrix.pairs import SPECIAL, draw_pair, run
from tests.support.world import Worlds

FAULTS = (29, 81, 82, 186)
"""Pairs of seed 0 that were wrong once: one group in torch's format became two, a weight frozen in the second job lost
the precision of its master weight, files that DeepSpeed alone saved were loaded with another
``round_robin_gradients``, and the refusal of a weight that was frozen in the first job named no remedy."""
FEW = (12, 20, 21, 28, 46, 64, 84, 91, *FAULTS)
"""Pairs of all precisions, stages of ZeRO and groups, with slices, frozen and tied weights, our reducer,
offload, and another optimizer."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(FEW, id="few"),
        *(
            pytest.param(range(first, first + 33), id=f"{first}-{first + 32}", marks=pytest.mark.exhaustive)
            for first in (*range(0, 330, 33), *range(SPECIAL, SPECIAL + 66, 33))
        ),
    ],
)
def test_random_pairs_are_exact_or_refused(world: Worlds, numbers: range, tmp_path: Path) -> None:
    report = run(world, [draw_pair(0, number) for number in numbers], tmp_path)
    assert report.wrong == []
    assert {kind for _, kind in report.counts} <= {"exact", "refused"}
