"""Through torch.distributed.checkpoint: other programs, other degrees and stages; the same losses after."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from ds_topo import checkpoint
from tests.checkpoint.plain_torch import Program
from tests.checkpoint.torch_jobs import Layout, job
from tests.support.world import Worlds

BEFORE, AFTER = range(3), range(3, 6)
TOLERANCE = 1e-5
EVERY_WAY = os.environ.get("DS_TOPO_EVERY_WAY") == "1"


def _save(layout: Layout, folder: Path, form: str = "app") -> list[float]:
    with job(layout) as rank:
        rank.train(BEFORE)
        state = checkpoint.TorchState(rank.engine, layout.rename, flatten_optimizer_state_dict=form != "app")
        if form == "app":
            dcp.save({"app": state}, checkpoint_id=folder)
        else:
            values = state.state_dict()
            dcp.save({**values["model"], "optimizer": values["optim"]}, checkpoint_id=folder)
        return rank.train(AFTER)


def _load(layout: Layout, folder: Path) -> list[float]:
    with job(layout, has_own_start=False) as rank:
        checkpoint.load_torch(rank.engine, folder, rename=layout.rename)
        return rank.train(AFTER)


def _load_by_torch(folder: Path, form: str) -> list[float]:
    program = Program()
    program.load(str(folder), form)
    return program.train(AFTER)


def _save_by_torch(folder: Path, form: str) -> list[float]:
    program = Program()
    program.train(BEFORE)
    program.save(str(folder), form)
    return program.train(AFTER)


Saved = Callable[[Layout, str], tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def saved(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The checkpoint of an engine, and the losses with which that goes on."""
    made: dict[tuple[Layout, str], tuple[Path, list[float]]] = {}

    def of(layout: Layout, form: str) -> tuple[Path, list[float]]:
        if (layout, form) not in made:
            folder = tmp_path_factory.mktemp("saved")
            made[layout, form] = folder, world(layout.ranks).run(_save, layout, folder, form)[0]
        return made[layout, form]

    return of


EVERYTHING = [
    *(
        Layout("data=2", zero, reduced=reduced)
        for zero in range(4)
        for reduced in (False, True)
        if not (zero == 3 and reduced)
    ),
    *(Layout("data=3", zero) for zero in range(4)),
    *(
        Layout(spec, zero, reduced=reduced)
        for spec in ("model=2", "data=2,model=2", "model=2,data=2")
        for zero in range(4)
        for reduced in (False, True)
        if not (zero == 3 and reduced)
    ),
    *(
        Layout(spec, zero, is_pipeline=True, reduced=reduced)
        for spec in ("pipe=2", "data=2,pipe=2", "pipe=2,model=2", "model=2,data=1,pipe=2")
        for zero in (0, 1)
        for reduced in (False, True)
    ),
]


@pytest.mark.parametrize("layout", EVERYTHING, ids=str)
def test_try(world: Worlds, tmp_path: Path, layout: Layout) -> None:
    expected = world(layout.ranks).run(_save, layout, tmp_path)[0]
    print(expected)
    found = world(2).run(_load_by_torch, tmp_path, "app")[0]
    assert found == pytest.approx(expected, rel=TOLERANCE)
    found = world(layout.ranks).run(_load, layout, tmp_path)[0]
    assert found == pytest.approx(expected, rel=TOLERANCE)
