"""A mixture of experts that fresh processes load from a checkpoint continues bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.exhaustive import mark_exhaustive
from tests.support.moe_training import Case, trainer
from tests.support.training import Run, assert_trained_alike
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

CASES = [
    *(
        Case(order, (0, 2, 1, 0), zero)
        for order in ("pipe=2,data=2,model=2", "model=2,data=2,pipe=2")
        for zero in (0, 1)
    ),
    Case("pipe=2,model=2,data=2", (0, 2, 2, 0), 1),
    Case("pipe=2,model=2,data=2", (0, 1, 2, 0), 1, tensor_parallel=True),
    Case("pipe=2,model=2,data=2", (0, 2, 1, 0), 0, tensor_parallel=True),
    Case("data=4,pipe=2", (0, 4, 2, 0), 1, data_first=True),
    Case("data=4,pipe=2", (0, 0, 2, 4), 0),
    Case("data=4,pipe=2", (0, 0, 2, 4), 1),
    *(Case(order, (0, 2, 1), zero, pipeline=False) for order in ("data=4", "model=2,data=2") for zero in (0, 1, 2)),
    Case("data=2,model=2", (0, 2, 1), 1, tensor_parallel=True, pipeline=False),
    Case("model=2,data=2", (0, 2, 1), 0, tensor_parallel=True, pipeline=False),
]


def _save(case: Case, folder: Path) -> Run:
    """Train four steps, and save a checkpoint after two."""
    with trainer(case) as rank:
        rank.train(range(2))
        rank.engine.save_checkpoint(folder)
        return rank.train(range(2, 4))


def _load(case: Case, folder: Path) -> Run:
    """Load the checkpoint into an engine that has trained on other samples, and train two steps."""
    with trainer(case) as rank:
        rank.train(range(7, 8))
        assert rank.engine.load_checkpoint(folder)[0] is not None
        return rank.train(range(2, 4))


@pytest.mark.parametrize("case", mark_exhaustive(CASES, default=lambda number, _: number == 14))
def test_saved_experts_continue_bit_for_bit(world: Worlds, other_world: Worlds, case: Case, tmp_path: Path) -> None:
    without_stop = world(case.world_size).run(_save, case, tmp_path)
    continued = other_world(case.world_size).run(_load, case, tmp_path)
    for wanted, found in zip(without_stop, continued, strict=True):
        assert wanted.parameters.keys() == found.parameters.keys()
        assert_trained_alike(found, wanted, losses=0.0, norms=0.0, elements=(0.0, 0.0))
