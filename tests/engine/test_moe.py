"""Mixtures of experts train as one process does, in every order of axes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from tests.support.exhaustive import mark_exhaustive
from tests.support.moe_training import Case, assert_trains_as_one_process
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

STEPS = 2
CLIP = 0.05
"""A limit far below the gradient norm of every step."""
ORDERS = [
    "pipe=2,data=2,model=2",
    "pipe=2,model=2,data=2",
    "data=2,pipe=2,model=2",
    "model=2,data=2,pipe=2",
    "data=4,pipe=2",
]


def _sizes(topology: str) -> Iterator[tuple[int, bool]]:
    """The expert parallel sizes that four ranks of a stage can have, each with and without tensor-parallel experts."""
    yield from ((size, False) for size in (1, 2, 4))
    if "model" in topology:
        yield from ((size, True) for size in (1, 2))


PIPELINES = [
    *mark_exhaustive(
        (
            Case(topology, (0, size, size, 0), zero, tensor_parallel)
            for topology, zero in product(ORDERS, (0, 1))
            for size, tensor_parallel in _sizes(topology)
        ),
        default=lambda number, _: number % 17 == 0,
    ),
    Case(ORDERS[1], (0, 2, 2, 0), data_first=True),
    Case(ORDERS[4], (2, 1, 2, 1)),
]
PLAIN_ENGINES = [
    *mark_exhaustive(
        (
            Case(topology, (0, size, size), zero, tensor_parallel, pipeline=False)
            for topology, zero in product(("data=4", "data=2,model=2", "model=2,data=2"), (0, 1, 2))
            for size, tensor_parallel in _sizes(topology)
        ),
        default=lambda number, _: number % 7 == 0,  # every stage of ZeRO and every size
    ),
    Case("model=2,data=2", (0, 2), drop_tokens=True, pipeline=False),
]
CLIPPED_PIPELINES = [
    *(Case(topology, (0, 2, 2, 0), zero, clip=CLIP) for topology in ORDERS[1:3] for zero in (0, 1)),
    *(Case(ORDERS[2], (0, 2, 2, 0), zero, True, clip=CLIP) for zero in (0, 1)),
]
SOME_STAGES = [
    Case(topology, sizes, zero, clip=CLIP, created=created)
    for topology in (ORDERS[0], ORDERS[4])
    for sizes, zero, created in (
        ((0, 0, 0, 2), 0, True),
        ((0, 0, 2, 1), 1, False),
        ((4, 2, 0, 2), 1, True),
    )
]
CLIPPED_PLAIN_ENGINES = [
    *(
        Case(topology, (0, 2, 1), zero, clip=CLIP, pipeline=False)
        for topology in ("data=4", "model=2,data=2")
        for zero in (0, 1, 2)
    ),
    *(Case("model=2,data=2", (0, 2), zero, True, clip=CLIP, pipeline=False) for zero in (0, 1, 2)),
    *(Case("model=2,data=2", (0, 2, 1), zero, clip=CLIP, pipeline=False, offload=True) for zero in (1, 2)),
]
REDUCED_PIPELINES = [
    *(
        Case(topology, sizes, zero, split, clip=CLIP, reduced=True)
        for topology in (ORDERS[2], ORDERS[4])
        for zero in (0, 1)
        for sizes, split in (
            ((0, 2, 1, 0), False),
            ((0, 4, 4, 0), False),
            ((0, 2, 2, 0), "model" in topology),
        )
    ),
    *(Case(ORDERS[0], (0, 0, 0, 2), zero, clip=CLIP, reduced=True) for zero in (0, 1)),
]
REDUCED_PLAIN_ENGINES = [
    *(
        Case(topology, sizes, zero, clip=CLIP, pipeline=False, reduced=True)
        for topology in ("data=4", "model=2,data=2")
        for zero in (0, 1)
        for sizes in ((0, 2, 1), (0, 4))
    ),
    Case("model=2,data=2", (0, 2), 1, True, clip=CLIP, pipeline=False, reduced=True),
]
BIASED = [
    *(
        Case(
            "model=2,data=2", (0, 2), 1, True, clip=CLIP, pipeline=False, bias=True, bf16=True, wide=True, reduced=each
        )
        for each in (False, True)
    ),
    *(
        Case("model=2,data=2", (0, 2), zero, True, clip=CLIP, pipeline=False, bias=True, bf16=bf16, reduced=reduced)
        for zero in (0, 1, 2)
        for bf16 in (False, True)
        for reduced in (False, True)
    ),
    *(
        Case("model=2,data=2", (0, 2), zero, True, clip=CLIP, pipeline=False, bias=True, offload=True)
        for zero in (1, 2)
    ),
    *(
        Case("pipe=2,model=2", (0, 1, 1, 0), zero, True, clip=CLIP, bias=True, bf16=wide, wide=wide, reduced=reduced)
        for zero, wide in ((0, False), (1, False), (1, True))
        for reduced in (False, True)
    ),
    *(
        Case("pipe=2,data=2", (0, 0, 0, 2), 1, clip=CLIP, bf16=True, wide=True, reduced=reduced)
        for reduced in (False, True)
    ),
    Case("pipe=2", (0, 0, 0, 1), clip=CLIP, bf16=True),
    Case("pipe=2,model=2", (0, 1, 1, 0), clip=CLIP, bf16=True),
]
"""Experts with a bias that slices replicate, and experts on some stages, for each optimizer."""


def _check(world: Worlds, case: Case) -> None:
    world(case.world_size).run(assert_trains_as_one_process, case, case.reference(STEPS))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", PIPELINES)
def test_pipelines_with_experts_train_as_one_process(world: Worlds, case: Case) -> None:
    _check(world, case)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", PLAIN_ENGINES)
def test_plain_engines_with_experts_train_as_one_process(world: Worlds, case: Case) -> None:
    _check(world, case)


@pytest.mark.parametrize("case", mark_exhaustive(CLIPPED_PIPELINES, lambda number, _: number in (0, 5)))
def test_pipelines_clip_by_the_norm_of_the_whole_model(world: Worlds, case: Case) -> None:
    _check(world, case)


@pytest.mark.parametrize("case", mark_exhaustive(SOME_STAGES, lambda number, _: number in (0, 4)))
def test_pipelines_with_experts_in_some_stages_train(world: Worlds, case: Case) -> None:
    _check(world, case)


@pytest.mark.parametrize("case", mark_exhaustive(CLIPPED_PLAIN_ENGINES, lambda number, _: number in (2, 4, 8)))
def test_plain_engines_clip_by_the_norm_of_the_whole_model(world: Worlds, case: Case) -> None:
    _check(world, case)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", mark_exhaustive(REDUCED_PIPELINES, lambda number, _: number in (5, 9, 13)))
def test_pipelines_with_experts_and_reducer_train_as_one_process(world: Worlds, case: Case) -> None:
    _check(world, case)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", mark_exhaustive(REDUCED_PLAIN_ENGINES, lambda number, _: number in (0, 5, 8)))
def test_plain_engines_with_experts_and_reducer_train_as_one_process(world: Worlds, case: Case) -> None:
    _check(world, case)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", mark_exhaustive(BIASED, lambda number, case: number in (0, 1) or case in BIASED[-2:]))
def test_norm_counts_what_slices_of_experts_replicate_once(world: Worlds, case: Case) -> None:
    _check(world, case)
