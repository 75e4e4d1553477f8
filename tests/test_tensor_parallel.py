"""GPT with tied, vocabulary-parallel embedding over pipe x data x model, in every order, equals one process."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch

from tests.gpt_training import Run, train_alone, train_pipeline
from tests.ranks import run_ranks

STEPS = 20
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
CASES: list[tuple[int, bool, dict[str, Any]]] = [
    (zero, sequence, more) for zero, more in ((0, {}), (1, {}), (0, BF16)) for sequence in (False, True)
]
ORDERS = [",".join(f"{axis}=2" for axis in order) for order in permutations(("pipe", "data", "model"))]


@pytest.fixture(scope="module")
def alone() -> Run:
    return run_ranks(1, train_alone, STEPS)[0]


def _train_cases(topology: str) -> list[Run]:
    return [train_pipeline(topology, STEPS, zero, sequence=sequence, **more) for zero, sequence, more in CASES]


@pytest.mark.parametrize("topology", ORDERS)
def test_training_equals_one_process(alone: Run, topology: str) -> None:
    for runs in run_ranks(8, _train_cases, topology, deadline=300):
        for (zero, sequence, more), run in zip(CASES, runs, strict=True):
            tolerance: dict[str, Any] = {
                "rtol": 3e-2 if more else 1e-4,
                "atol": 0,
                "msg": partial("ZeRO {}, sequence parallel {}, {}: {}".format, zero, sequence, more),
            }
            torch.testing.assert_close(run.losses, alone.losses, **tolerance)
            if zero or more:  # DeepSpeed keeps no norm without ZeRO in fp32
                torch.testing.assert_close(run.norms, alone.norms, **tolerance)
