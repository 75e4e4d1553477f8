"""``ds_topo.verify`` compares the steps of a live engine."""

from __future__ import annotations

import pytest

import ds_topo
from ds_topo.errors import EngineOptionError
from ds_topo.layers import Parallel
from tests.support.gpt_training import PlainGPT, batch, loss_of, plain_engine
from tests.support.training import own_samples
from tests.support.world import Worlds
from tests.verification.faults import without_collective

SETTINGS = {"zero_optimization": {"stage": 1}}


def _verify() -> tuple[int, str]:
    with plain_engine("data=2,model=2", SETTINGS) as (engine, grid):
        inputs, labels = own_samples(batch(0), grid)
        micro = engine.train_micro_batch_size_per_gpu()
        batches = list(zip(inputs.split(micro), labels.split(micro), strict=True)) * 2
        with pytest.raises(EngineOptionError, match="pass reference="):
            ds_topo.verify(engine, batches, loss=loss_of)
        reference = PlainGPT(Parallel(grid.get_group("pipe")))
        equal = ds_topo.verify(engine, batches, reference=reference, loss=loss_of)
        assert (equal.status, equal.findings, equal.steps) == (0, (), 2)
        without_collective(engine, grid, "1.projection")
        report = ds_topo.verify(engine, batches, reference=reference, loss=loss_of)
        return report.status, f"{report.findings[0]} {report.findings[0].causes[0]}"


def test_engine_is_equal_until_it_loses_a_sum(world: Worlds) -> None:
    for status, first in world(4).run(_verify):
        assert status == 1
        assert first.startswith("`blocks.1.projection` output, step 1, all ranks")
        assert "not reduced: the values of the ranks along 'model' add up" in first
