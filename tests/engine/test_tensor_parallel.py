"""A GPT with a tied, vocabulary-parallel embedding trains over pipe x data x model, in every order, as one process."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest

from tests.support.exhaustive import mark_exhaustive
from tests.support.gpt_training import BF16, train_pipeline
from tests.support.training import Reference, Run, assert_trained_alike
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

STEPS = 3
ORDERS = [",".join(f"{axis}=2" for axis in order) for order in permutations(("pipe", "data", "model"))]


def _train_and_compare(topology: str, options: dict[str, Any], expected: Run) -> None:
    run = train_pipeline(topology, STEPS, **options)
    is_bf16 = "bf16" in options
    assert_trained_alike(run, expected, losses=1e-3 if is_bf16 else 1e-4, norms=1e-2 if is_bf16 else 1e-4)


WAYS: tuple[dict[str, Any], ...] = tuple(
    {**options, "sequence": sequence}
    for sequence in (False, True)
    for options in ({"zero": 0}, {"zero": 1}, {"zero": 0, **BF16})
)
CASES = mark_exhaustive(
    product(ORDERS, WAYS),
    # three orders, each with another way
    default=lambda number, _: number // len(WAYS) == number % len(WAYS) and number // len(WAYS) % 2 == 0,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("topology", "way"), CASES)
def test_training_equals_one_process(
    world: Worlds, layers_alone: Reference, topology: str, way: dict[str, Any]
) -> None:
    world(8).run(_train_and_compare, topology, way, layers_alone(STEPS))
