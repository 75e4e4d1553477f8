"""Through torch.distributed.checkpoint: other programs, other degrees and stages; the same losses after."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ds_topo import checkpoint
from tests.checkpoint.plain_torch import Program
from tests.checkpoint.torch_jobs import BF16, Layout, job
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


def content(folder: Path) -> dict[str, Any]:
    """Everything that a checkpoint has, read by one process."""
    values: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, folder / "whole.pt")
    found = torch.load(folder / "whole.pt", weights_only=False)
    (folder / "whole.pt").unlink()

    def add(before: str, value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
        if items is None or (isinstance(value, list) and value and isinstance(value[0], str)):
            values[before] = sorted(value) if isinstance(value, list) else value
            return
        for key, one in items:
            add(f"{before}.{key}", one)

    add("", found)
    return values


def assert_same_content(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
        elif not key.endswith("deepspeed"):
            assert found[key] == value, key


def _load_and_save(layout: Layout, folder: Path, again: Path) -> list[float]:
    with job(layout, has_own_start=False) as rank:
        checkpoint.load_torch(rank.engine, folder, rename=layout.rename)
        dcp.save({"app": checkpoint.TorchState(rank.engine, layout.rename)}, checkpoint_id=again)
        return rank.train(AFTER)


def _where(zeros: tuple[int, ...], *specs: str, is_pipeline: bool = False, **more: Any) -> list[Layout]:
    return [
        Layout(spec, zero, is_pipeline, reduced, **more)
        for spec in specs
        for zero in zeros
        for reduced in ((False, True) if zero < 3 else (False,))
    ]


FP32 = [
    *_where((0, 1, 2, 3), "data=2", "model=2", "data=2,model=2", "model=2,data=2", "data=3"),
    *_where((0, 1), "pipe=2", "data=2,pipe=2", "pipe=2,model=2", "model=2,data=1,pipe=2", is_pipeline=True),
]
IN_BF16 = [
    *_where((0, 1, 2, 3), "data=2", "data=2,model=2", settings=BF16),
    *_where((1,), "data=2,pipe=2", is_pipeline=True, settings=BF16),
    Layout("data=2", 0, settings={**BF16, "data_types": {"grad_accum_dtype": "bf16"}}),
]


@pytest.mark.skipif(not EVERY_WAY, reason="DS_TOPO_EVERY_WAY=1: minutes")
@pytest.mark.parametrize("target", FP32, ids=str)
@pytest.mark.parametrize("source", [FP32[0], FP32[4], FP32[6], FP32[18], FP32[-1], FP32[-3]], ids=str)
def test_every_way(world: Worlds, saved: Saved, tmp_path: Path, source: Layout, target: Layout) -> None:
    folder, expected = saved(source, "app")
    losses = world(target.ranks).run(_load_and_save, target, folder, tmp_path)[0]
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert_same_content(content(tmp_path), content(folder))


@pytest.mark.skipif(not EVERY_WAY, reason="DS_TOPO_EVERY_WAY=1: minutes")
@pytest.mark.parametrize("target", IN_BF16, ids=str)
@pytest.mark.parametrize("source", [IN_BF16[0], IN_BF16[2], IN_BF16[6], IN_BF16[-1], IN_BF16[-2]], ids=str)
def test_every_way_in_bf16(world: Worlds, saved: Saved, tmp_path: Path, source: Layout, target: Layout) -> None:
    folder, expected = saved(source, "app")
    losses = world(target.ranks).run(_load_and_save, target, folder, tmp_path)[0]
    assert losses == pytest.approx(expected, rel=2e-2)
    assert_same_content(content(tmp_path), content(folder))
