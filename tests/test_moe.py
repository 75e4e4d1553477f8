"""Mixtures of experts train as one process does, in every order of axes."""

from __future__ import annotations

import pytest
import torch

from tests.moe_training import Case, Trainer, train_reference, worst_difference
from tests.ranks import run_ranks

STEPS = 3
ORDERS = [
    "pipe=2,data=2,model=2",
    "pipe=2,model=2,data=2",
    "data=2,pipe=2,model=2",
    "model=2,data=2,pipe=2",
    "data=4,pipe=2",
]


def _differences(cases: list[Case], references: dict[tuple[int, ...], dict[str, torch.Tensor]]) -> dict[Case, float]:
    differences = {}
    for case in cases:
        trainer = Trainer(case)
        trainer.train(range(STEPS))
        differences[case] = worst_difference(trainer, references[tuple(min(size, 1) for size in case.sizes)])
        trainer.destroy()
    return differences


def _check(world_size: int, cases: list[Case]) -> None:
    layouts = {tuple(min(size, 1) for size in case.sizes) for case in cases}
    references = {layout: run_ranks(1, train_reference, layout, STEPS)[0] for layout in layouts}
    for differences in run_ranks(world_size, _differences, cases, references, deadline=240):
        for case, (difference, name) in differences.items():
            assert difference < 1e-5, (case, name)


@pytest.mark.parametrize(("topology", "zero"), [(order, index % 2) for index, order in enumerate(ORDERS)])
def test_pipelines(topology: str, zero: int) -> None:
    cases = [Case(topology, (0, size, size, 0), (zero + index) % 2) for index, size in enumerate((1, 2, 4))]
    cases.append(Case(topology, (0, 2, 2, 0), zero, data_first=True))
    if "model" in topology:
        cases.append(Case(topology, (0, 2, 2, 0), zero, tensor_parallel=True))
    else:
        cases.append(Case(topology, (2, 1, 2, 1)))
    _check(8, cases)


@pytest.mark.parametrize("topology", ["data=4", "data=2,model=2", "model=2,data=2"])
def test_plain_engines(topology: str) -> None:
    cases = [
        Case(topology, (0, size, size), zero, pipeline=False) for size, zero in ((1, 2), (2, 0), (2, 1), (2, 2), (4, 1))
    ]
    if "model" in topology:
        cases += [Case(topology, (0, size), zero, True, pipeline=False) for size, zero in ((1, 0), (2, 1), (2, 2))]
    cases += [Case(topology, (0, 2), drop_tokens=True, pipeline=False)]
    _check(4, cases)
