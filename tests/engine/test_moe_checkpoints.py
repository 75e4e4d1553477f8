"""Saved, loaded by fresh processes and continued, a mixture of experts is bit for bit what it would have been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.moe_training import Case, Trainer
from tests.support.ranks import run_ranks

PIPELINES = [
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
]
PLAIN = [
    *(Case(order, (0, 2, 1), zero, pipeline=False) for order in ("data=4", "model=2,data=2") for zero in (0, 1, 2)),
    Case("data=2,model=2", (0, 2, 1), 1, tensor_parallel=True, pipeline=False),
    Case("model=2,data=2", (0, 2, 1), 0, tensor_parallel=True, pipeline=False),
]


def _save(cases: list[Case], folder: Path) -> dict[Case, dict[str, torch.Tensor]]:
    """Parameters after four steps, with a checkpoint after two."""
    trained = {}
    for number, case in enumerate(cases):
        trainer = Trainer(case)
        trainer.train(range(2))
        trainer.engine.save_checkpoint(folder / str(number))
        trainer.train(range(2, 4))
        trained[case] = trainer.parameters()
        trainer.destroy()
    return trained


def _load(cases: list[Case], folder: Path) -> dict[Case, dict[str, torch.Tensor]]:
    """Parameters after two steps from the checkpoint, of engines that had gone elsewhere before."""
    trained = {}
    for number, case in enumerate(cases):
        trainer = Trainer(case)
        trainer.train(range(7, 8))
        assert trainer.engine.load_checkpoint(folder / str(number))[0] is not None
        trainer.train(range(2, 4))
        trained[case] = trainer.parameters()
        trainer.destroy()
    return trained


@pytest.mark.parametrize(("world_size", "cases"), [(8, PIPELINES), (4, PLAIN)], ids=["pipelines", "plain"])
def test_continues_bit_for_bit(world_size: int, cases: list[Case], tmp_path: Path) -> None:
    without_stop = run_ranks(world_size, _save, cases, tmp_path, deadline=240)
    continued = run_ranks(world_size, _load, cases, tmp_path, deadline=240)
    for rank, (wanted, found) in enumerate(zip(without_stop, continued, strict=True)):
        for case in cases:
            assert wanted[case].keys() == found[case].keys()
            differing = [name for name, value in wanted[case].items() if not torch.equal(value, found[case][name])]
            assert not differing, (rank, case, differing)
