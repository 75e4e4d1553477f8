"""GPT with tied, vocabulary-parallel embedding over pipe x data x model, in every order, equals one process."""

from __future__ import annotations

import os
from itertools import permutations
from typing import Any

import pytest

from tests.support.gpt_training import BF16, train_pipeline
from tests.support.training import Reference, Run, assert_trained_alike
from tests.support.world import Worlds

STEPS = 20
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
EVERY_WAY = os.environ.get("DS_TOPO_EVERY_WAY")
CASES = [
    (topology, way)
    for first, topology in enumerate(ORDERS)
    for second, way in enumerate(WAYS)
    if EVERY_WAY or (first + second) % 3 == 0  # each order in two ways, each way in two orders
]


@pytest.mark.parametrize(("topology", "way"), CASES)
def test_training_equals_one_process(
    world: Worlds, layers_alone: Reference, topology: str, way: dict[str, Any]
) -> None:
    world(8).run(_train_and_compare, topology, way, layers_alone(STEPS))
