"""Mixtures of experts train as one process does, in every order of axes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from tests.support.moe_training import Case, Trainer, train_reference, worst_difference
from tests.support.ranks import run_ranks

STEPS = 2
ORDERS = [
    "pipe=2,data=2,model=2",
    "pipe=2,model=2,data=2",
    "data=2,pipe=2,model=2",
    "model=2,data=2,pipe=2",
    "data=4,pipe=2",
]


def _differences(cases: list[Case], references: dict[Any, dict[str, torch.Tensor]]) -> dict[Case, float]:
    differences = {}
    for case in cases:
        trainer = Trainer(case)
        trainer.train(range(STEPS))
        differences[case] = worst_difference(trainer, references[case.reference])
        trainer.destroy()
    return differences


def _check(world_size: int, cases: list[Case]) -> None:
    references = {case.reference: train_reference(case.reference[0], STEPS, case.clip) for case in cases}
    for differences in run_ranks(world_size, _differences, cases, references, deadline=400):
        for case, (difference, name) in differences.items():
            assert difference < 1e-5, (case, name)


def _sizes(topology: str) -> Iterator[tuple[int, bool]]:
    """Expert parallel sizes that four ranks of a stage can have, and whether experts are tensor parallel."""
    yield from ((size, False) for size in (1, 2, 4))
    if "model" in topology:
        yield from ((size, True) for size in (1, 2))


def test_pipelines() -> None:
    cases = [
        Case(topology, (0, size, size, 0), zero, tensor_parallel)
        for topology, zero in product(ORDERS, (0, 1))
        for size, tensor_parallel in _sizes(topology)
    ]
    cases += [Case(ORDERS[1], (0, 2, 2, 0), data_first=True), Case(ORDERS[4], (2, 1, 2, 1))]
    _check(8, cases)


def test_plain_engines() -> None:
    cases = [
        Case(topology, (0, size, size), zero, tensor_parallel, pipeline=False)
        for topology, zero in product(("data=4", "data=2,model=2", "model=2,data=2"), (0, 1, 2))
        for size, tensor_parallel in _sizes(topology)
    ]
    cases += [Case("model=2,data=2", (0, 2), drop_tokens=True, pipeline=False)]
    _check(4, cases)


CLIP = 0.05
"""Far below the norm of gradients in every step."""


def test_pipelines_clip_by_the_norm_of_the_whole_model() -> None:
    cases = [Case(topology, (0, 2, 2, 0), zero, clip=CLIP) for topology in ORDERS[1:3] for zero in (0, 1)]
    cases += [Case(ORDERS[2], (0, 2, 2, 0), zero, True, clip=CLIP) for zero in (0, 1)]
    _check(8, cases)


def test_experts_in_some_stages_only() -> None:
    cases = [
        Case(topology, sizes, zero, clip=CLIP, created=created)
        for topology in (ORDERS[0], ORDERS[4])
        for sizes, zero, created in (
            ((0, 0, 0, 2), 0, True),
            ((0, 0, 2, 1), 1, False),
            ((4, 2, 0, 2), 1, True),
        )
    ]
    _check(8, cases)


def test_plain_engines_clip_by_the_norm_of_the_whole_model() -> None:
    cases = [
        Case(topology, (0, 2, 1), zero, clip=CLIP, pipeline=False)
        for topology in ("data=4", "model=2,data=2")
        for zero in (0, 1, 2)
    ]
    cases += [Case("model=2,data=2", (0, 2), zero, True, clip=CLIP, pipeline=False) for zero in (0, 1, 2)]
    cases += [Case("model=2,data=2", (0, 2, 1), zero, clip=CLIP, pipeline=False, offload=True) for zero in (1, 2)]
    _check(4, cases)


def test_our_reducer_in_pipelines() -> None:
    cases = [
        Case(topology, sizes, zero, split, clip=CLIP, reduced=True)
        for topology in (ORDERS[2], ORDERS[4])
        for zero in (0, 1)
        for sizes, split in (
            ((0, 2, 1, 0), False),
            ((0, 4, 4, 0), False),
            ((0, 2, 2, 0), "model" in topology),
        )
    ]
    cases += [Case(ORDERS[0], (0, 0, 0, 2), zero, clip=CLIP, reduced=True) for zero in (0, 1)]
    _check(8, cases)


def test_our_reducer_in_plain_engines() -> None:
    cases = [
        Case(topology, sizes, zero, clip=CLIP, pipeline=False, reduced=True)
        for topology in ("data=4", "model=2,data=2")
        for zero in (0, 1)
        for sizes in ((0, 2, 1), (0, 4))
    ]
    cases += [Case("model=2,data=2", (0, 2), 1, True, clip=CLIP, pipeline=False, reduced=True)]
    _check(4, cases)
