"""Experts in pipelines keep their values in other stages, degrees and ZeRO stages, and jobs continue alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_topo import checkpoint
from tests.checkpoint.continued_jobs import BEFORE, STEPS, TAG, continue_experts, hop_experts, save_experts, values_in
from tests.support.exhaustive import mark_exhaustive
from tests.support.moe_training import EXPERTS, Case, canonical_name
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

PAIRS = [
    (Case("pipe=2,data=2", (0, 2, 2, 2), 1), Case("data=2", (0, 1, 1, 1), 0)),
    (Case("pipe=2,data=2", (0, 0, 2, 0), 0), Case("pipe=2,data=1", (0, 0, 1, 0), 0)),
    (Case("pipe=2,data=2", (0, 2, 0, 0), 0), Case("data=4", (0, 4, 0, 0), 1)),
    (Case("data=2,pipe=2", (2, 2, 0, 2), 0), Case("pipe=2,data=1", (1, 1, 0, 1), 1)),
    (Case("pipe=2,data=1,model=2", (0, 2, 2, 0), 1), Case("pipe=2,data=2", (0, 1, 1, 0), 1)),
    (
        Case("pipe=2,data=1,model=2", (0, 1, 1, 0), 1, tensor_parallel=True),
        Case("pipe=1,data=2", (0, 2, 2, 0), 0, tensor_parallel=True),
    ),
    (Case("data=1", (0, 1, 0, 1), 0), Case("pipe=2,data=2", (0, 2, 0, 2), 1)),
]


@pytest.mark.parametrize(("case", "now"), mark_exhaustive(PAIRS, lambda number, _: number == 0), ids=str)
def test_experts_in_a_pipeline_continue_alike(world: Worlds, case: Case, now: Case, tmp_path: Path) -> None:
    world(case.world_size).run(save_experts, case, tmp_path)
    world(now.world_size).run(continue_experts, now, tmp_path, now.reference(STEPS))
    found = checkpoint.look_at(tmp_path, TAG)
    there, back = tmp_path / "there", tmp_path / "back"
    world(now.world_size).run(hop_experts, now, tmp_path, there)
    world(case.world_size).run(hop_experts, case, there, back)
    before, after = values_in(found.path), values_in(back / TAG)
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] != after[key]] == []
    weights = torch.load(checkpoint.to_single_file(found, tmp_path / "weights.pt"), weights_only=True)
    whole = {canonical_name(name) for name in weights}
    reference = case.reference(BEFORE)
    assert whole == reference.parameters.keys()
    assert sum(".experts." in name for name in whole) == 2 * EXPERTS * sum(size > 0 for size in case.sizes)
    for name, value in weights.items():
        assert torch.allclose(value, reference.parameters[canonical_name(name)], atol=1e-5), name
