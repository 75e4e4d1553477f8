"""The gradient reducer inside DeepSpeed's engines, beside DeepSpeed's own reduction and one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpt_training import Run, train_alone, train_pipeline
from tests.ranks import run_ranks

STEPS = 4
SMALL = {"bucket_bytes": 16_000, "first_bucket_bytes": 4_000, "last_bucket_bytes": 4_000}
"""So that a stage has several buckets."""
BF16 = {"bf16": {"enabled": True}}
PIPELINES: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 0, "gas": 4, "checkpointed": True},
    {"zero": 1, "gas": 4, "checkpointed": True},
    {"zero": 1, **BF16},
    {"zero": 1, "gas": 4, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    {"zero": 0, "checkpointed": True, **BF16},
    {"zero": 0, "prescale_gradients": False, "gradient_predivide_factor": 2.0},
]


def _both(topology: str, cases: list[dict[str, Any]]) -> list[tuple[Run, Run]]:
    return [
        (
            train_pipeline(topology, STEPS, **case),
            train_pipeline(topology, STEPS, **case, gradient_reducer=SMALL),
        )
        for case in cases
    ]


def _assert_alike(theirs: Run, ours: Run, tolerance: float) -> None:
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=tolerance, atol=0)
    torch.testing.assert_close(ours.norms, theirs.norms, rtol=tolerance, atol=0)
    for name, parameter in theirs.parameters.items():
        torch.testing.assert_close(ours.parameters[name], parameter, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("topology", ["pipe=2,data=2", "data=2,pipe=2"])
def test_pipelines_train_as_with_deepspeeds_own_reduction(topology: str) -> None:
    alone: Run = run_ranks(1, train_alone, STEPS)[0]
    for runs in run_ranks(4, _both, topology, PIPELINES, deadline=240):
        for case, (theirs, ours) in zip(PIPELINES, runs, strict=True):
            _assert_alike(theirs, ours, 2e-3 if "bf16" in case else 1e-5)
            if "bf16" not in case:
                torch.testing.assert_close(ours.losses, alone.losses, rtol=1e-5, atol=0)
                torch.testing.assert_close(ours.norms, alone.norms, rtol=1e-4, atol=0)
            assert ours.buckets > 1
            assert ours.reductions == STEPS * ours.buckets
