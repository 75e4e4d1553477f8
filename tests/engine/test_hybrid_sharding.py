"""Engines that partition over the axis ``shard`` train as engines that partition over all replicas."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from torch import nn

from ds_topo import PipelineParallelGrid, initialize
from tests.engine.test_against_deepspeed import (
    PRECISIONS,
    SITUATIONS,
    STOCK_FAILS,
    TOLERANCES,
    Record,
    Row,
    assert_alike,
    train,
)
from tests.support.gpt_training import batch, loss_of, plain_engine, train_pipeline
from tests.support.small_engines import start
from tests.support.training import (
    Reference,
    Run,
    assert_trained_alike,
    destroy_engine,
    engine_config,
    own_samples,
    train_engine,
)
from tests.support.world import Worlds

STEPS = 4
FP32_SUMS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
ORDERS = ("data=2,shard=2", "shard=2,data=2")


def compare(world: Worlds, rows: tuple[Row, ...], sides: tuple[str, ...] = ("grid", "reducer")) -> None:
    """Train rows that differ in their topology alone, on stock DeepSpeed and on both sides of ours."""
    expected = world(4).run(train, rows, "stock")
    for side in sides:
        trained = tuple(replace(row, spec=spec) for row in rows for spec in ORDERS)
        for rank, found in enumerate(world(4).run(train, trained, side)):
            for number, (row, ours) in enumerate(zip(trained, found, strict=True)):
                print(side, row)
                assert isinstance(ours, Record), ours
                theirs = expected[rank][number // len(ORDERS)]
                assert isinstance(theirs, Record)
                assert_alike(ours, theirs, TOLERANCES[row.precision], norms=not row.experts)


def test_a_shard_axis_trains_as_stock_deepspeed(world: Worlds) -> None:
    compare(world, (Row(1), Row(1, accumulation=3), Row(2), Row(2, accumulation=3)))


def test_a_shard_axis_at_stage_3_trains_as_stock_deepspeed(world: Worlds) -> None:
    compare(world, (Row(3), Row(3, accumulation=3)), ("grid",))


@pytest.mark.exhaustive
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", range(1, 4))
def test_a_shard_axis_trains_alike_in_each_situation(world: Worlds, stage: int, precision: str, situation: str) -> None:
    if (stage, situation) in STOCK_FAILS:
        pytest.skip(f"stock DeepSpeed cannot do this: {STOCK_FAILS[stage, situation][0]}")
    rows = tuple(Row(stage, precision, accumulation, situation) for accumulation in (1, 3))
    compare(world, rows, ("grid",) if stage == 3 else ("grid", "reducer"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_experts_train_alike_with_a_shard_axis(world: Worlds, stage: int, size: int) -> None:
    compare(
        world,
        tuple(Row(stage, "fp32", count, experts="top-1", expert_parallel_size=size, clip=0.0) for count in (1, 3)),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_offloaded_engine_trains_alike_with_a_shard_axis(world: Worlds, precision: str) -> None:
    compare(world, tuple(Row(3, precision, accumulation, offload=True) for accumulation in (1, 3)), ("grid",))


def _train_plain(topology: str, settings: dict[str, Any], expected: Run) -> None:
    with plain_engine(topology, settings) as (engine, grid):
        run = train_engine(engine, grid, (own_samples(batch(step), grid) for step in range(STEPS)), loss_of)
    assert_trained_alike(run, expected, losses=1e-4, norms=1e-4)


def _train_pipeline(topology: str, settings: dict[str, Any], expected: Run, tolerance: float) -> None:
    run = train_pipeline(topology, STEPS, zero=1, **settings)
    assert_trained_alike(run, expected, losses=tolerance, norms=tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "reduced"), [(1, False), (1, True), (2, False), (2, True), (3, False)])
@pytest.mark.parametrize("order", permutations(("data", "shard", "model")), ids="-".join)
def test_a_sliced_model_equals_one_process(
    world: Worlds, module_alone: Reference, order: tuple[str, ...], stage: int, reduced: bool
) -> None:
    settings = {"zero_optimization": {"stage": stage}, "gradient_reducer": {} if reduced else False}
    world(8).run(_train_plain, ",".join(f"{axis}=2" for axis in order), settings, module_alone(STEPS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}, FP32_SUMS])
@pytest.mark.parametrize("order", permutations(("data", "shard", "pipe")), ids="-".join)
def test_a_pipeline_equals_one_process(
    world: Worlds, layers_alone: Reference, order: tuple[str, ...], precision: dict[str, Any], reduced: bool
) -> None:
    settings = {"gradient_reducer": {} if reduced else False, **precision}
    tolerance = 1e-2 if precision else 1e-4
    world(8).run(_train_pipeline, ",".join(f"{axis}=2" for axis in order), settings, layers_alone(STEPS), tolerance)


def _build(settings: dict[str, Any], model: Any = None) -> None:
    start()
    with PipelineParallelGrid("data=1,shard=1") as grid:
        engine, *_ = initialize(model=nn.Linear(4, 4), mpu=grid, config=engine_config(1, **settings))
        destroy_engine(engine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "hpZ"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 1}}, "mics_shard_size"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "qgZ"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "use stage 3"),
    ],
)
def test_options_with_groups_of_their_own_are_refused(world: Worlds, settings: dict[str, Any], message: str) -> None:
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    (error,) = world(1).run(_build, {"optimizer": optimizer, **settings}, expect_failure=True)
    assert message in str(error)
