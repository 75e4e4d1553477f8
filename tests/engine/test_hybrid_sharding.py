"""Engines that partition over the axis ``shard`` train as engines that partition over all replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
from tests.support.world import Worlds

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
