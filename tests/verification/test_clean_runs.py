"""Layouts that train right are equal to their references: chosen ones, and small engines drawn at random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.checkpoint.matrix.pairs import Side, draw_pair
from tests.engine.test_random_engines import OF_FOUR, OVER_SHARD, Engine, engines
from tests.support.exhaustive import mark_exhaustive
from tests.support.world import Worlds
from tests.verification.recorded_training import Job, References

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
ZERO = [{"zero_optimization": {"stage": stage}} for stage in range(4)]


@pytest.mark.parametrize(
    "job",
    mark_exhaustive(
        [
            Job("pipe=2,data=2"),
            Job("data=4", False, ZERO[2]),
            Job("pipe=2,model=2", settings=ZERO[1]),
            Job("model=2,data=2", False),
            Job("data=2,model=2", False, ZERO[3]),
            Job("model=2,pipe=2", settings=BF16),
            Job("data=2,pipe=2", settings=BF16 | ZERO[1]),
            Job("data=2,model=2", False, BF16 | ZERO[2]),
            Job("data=2,model=2", False, FP16),
            Job("pipe=2,data=2", settings=FP16 | ZERO[1]),
            Job("data=2,seq=2", False, ZERO[3], "sequences"),
            Job("pipe=2,seq=2", settings=ZERO[1]),
            Job("model=2,data=2", False, {"sizes": (0, 2)}, "experts"),
            Job("data=2,model=2", False, {"sizes": (0, 2), "zero": 2, "tensor_parallel": True, "clip": 0.1}, "experts"),
            Job("pipe=2,model=2", True, {"sizes": (2, 2), "drop_tokens": True}, "experts"),
        ],
        default=lambda number, _: number == 0,
    ),
    ids=str,
)
def test_right_layout_is_equal(job: Job, world: Worlds, tmp_path: Path) -> None:
    report = References(world, tmp_path).verify(job, tmp_path / "wanted")
    assert (report.findings, report.undecided) == ((), ())
    assert (report.compared > 40, report.steps) == (True, 2)


DRAWN = [side for number in range(20) for side in (draw_pair(7, number).source, draw_pair(7, number).target)]
SIDES = [side for side in DRAWN if not side.is_stock and side.optimizer != "Adafactor"]
"""Adafactor depends on norms of a rank's part of a parameter, and so trains otherwise in each layout."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("side", SIDES, ids=str)
def test_random_engine_of_conversions_is_equal(side: Side, world: Worlds, tmp_path: Path) -> None:
    """Engines at ZeRO 0 to 3 in three precisions, of pipelines, experts, slices, tied and frozen weights."""
    report = References(world, tmp_path).verify(Job(side.topology, drawn=side), tmp_path / "wanted")
    assert (report.findings, report.undecided) == ((), ())


@pytest.mark.exhaustive
def test_random_engine_of_the_reducer_is_equal(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines with every kind of layer, accumulation, clipping, hooks, and an axis shard."""

    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(engines(OF_FOUR + OVER_SHARD))
    def is_equal(drawn: Engine) -> None:
        # a hook is on the last parameter of each stage, or changes gradients after the backward pass; DeepSpeed does
        # not clip sparse gradients
        layers = tuple("plain" if kind == "embedding" and drawn.clip else kind for kind in drawn.layers)
        engine = replace(drawn, hook_before="", hook_after="", layers=layers)
        folder = tmp_path_factory.mktemp("engine")
        report = References(world, folder).verify(Job(engine.topology, drawn=engine), folder / "wanted")
        assert (report.findings, report.undecided) == ((), ()), engine

    is_equal()
