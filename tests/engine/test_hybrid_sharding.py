"""Engines that partition over the axis ``shard`` train as engines that partition over all replicas."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfigError
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, groups, initialize, use
from ds_topo.engine import partition_sums, shard
from ds_topo.engine.config_options import OPTIONS
from ds_topo.errors import EngineOptionError
from ds_topo.reduction.exchange import _PIECES_UNDER_WAY, PartitionHolders, _Worker
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
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.gpt_training import batch, loss_of, plain_engine, train_pipeline
from tests.support.ranks import run_ranks
from tests.support.small_engines import settings, start
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

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

STEPS = 3
HAS_MUON_WITH_FP32_SUMS = hasattr(BF16_Optimizer, "_prepare_muon_updates")
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


@pytest.mark.parametrize(
    ("spec", "copies"), [("data=4", 0), ("shard=4", 0), ("data=2,shard=2", 2), ("data=4,shard=1", 4)]
)
def test_copies_are_the_ranks_that_hold_the_same_partition(spec: str, copies: int) -> None:
    with fake_world(0, 4), PipelineParallelGrid(spec) as grid:
        found = shard.copies_of(grid)
        assert (found.number if found else 0) == copies
    assert shard.copies_of(None) is None


class _Zero3:
    """The part of ZeRO 3 that keeps the gradients of a rank's partitions."""

    def __init__(self, group: Any, offloads: bool) -> None:
        self.dp_process_group, self.offload_optimizer = group, offloads
        self.reduce_and_partition_stream = None
        self.ends_step = False
        self.seen: list[bool] = []
        self.finalized = 0

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.ends_step

    def set_gradient_accumulation_boundary(self, value: bool) -> None:
        self.ends_step = value

    def get_param_comm_dtype(self, parameter: Any) -> torch.dtype:
        return torch.float32

    def _finalize_offload_gradient_accumulation(self) -> None:
        self.finalized += 1


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_gradients_of_zero_3_are_summed_over_the_copies_once_in_a_step(rank: int, offloads: bool) -> None:
    with fake_world(rank, 4), PipelineParallelGrid("data=2,shard=2") as grid:
        group = grid.get_group("shard")
        copies = PartitionHolders(grid.get_group("data"), grid.get_data_parallel_group())
        optimizer: Any = _Zero3(group, offloads)
        # The second parameter has one element, which is in the first partition.
        parameters = [
            SimpleNamespace(ds_numel=numel, partition_numel=lambda numel=numel: -(-numel // 2)) for numel in (4, 1)
        ]
        filled = parameters if dist.get_rank(group) == 0 else parameters[:1]
        kept = [torch.zeros(each.partition_numel()) for each in filled]

        def add(given: list[Any], partitions: list[torch.Tensor]) -> list[torch.Tensor]:
            optimizer.seen.append(optimizer.ends_step)
            for tensor, part in zip(kept, partitions, strict=True):
                tensor += part
            return kept

        sums = partition_sums.SumsOfStep(copies)
        sums.end(optimizer)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            for step in (1, 2):
                for micro_batch in range(3):
                    optimizer.ends_step = micro_batch == 2
                    ones = [torch.ones_like(each) for each in kept]
                    assert sums.start(add, optimizer, parameters, ones) is kept
                    assert optimizer.ends_step is (micro_batch == 2)
                    assert all_reduce.call_count == step - 1 + (micro_batch == 2), "in the last micro-batch alone"
                    sums.end(optimizer)
                assert all(set(each.tolist()) == {1.5} for each in kept), "half of 3, as the other copy adds nothing"
                for each in kept:
                    each.zero_()
            (call, _) = all_reduce.call_args_list
            assert call.kwargs == {"group": copies.group, "async_op": True}
        assert optimizer.seen == [False, False, not offloads] * 2, "an offloaded optimizer must not get them before"
        assert optimizer.finalized == (2 if offloads else 0)


def test_a_shard_axis_trains_as_stock_deepspeed(world: Worlds) -> None:
    compare(world, (Row(2, accumulation=3),))


def test_a_shard_axis_at_stage_3_trains_as_stock_deepspeed(world: Worlds) -> None:
    compare(world, (Row(3, accumulation=3),), ("grid",))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("side", "options"),
    mark_exhaustive(
        [("grid", {}), ("grid", {"offload": True}), ("reducer", {}), ("grid", {"accumulation": 1})],
        lambda number, _: number == 0,
    ),
)
def test_muon_makes_updates_of_the_gradients_of_all_copies(world: Worlds, side: str, options: dict[str, Any]) -> None:
    stages = (1,) if side == "reducer" else (1, 2)  # a reducer refuses Muon at stage 2
    compare(world, tuple(Row(stage, **{"accumulation": 3, **options}, optimizer="Muon") for stage in stages), (side,))


def test_muon_with_sums_in_fp32_trains_as_stock_deepspeed_without_an_mpu(world: Worlds) -> None:
    if not HAS_MUON_WITH_FP32_SUMS:
        pytest.skip("in this release BF16_Optimizer does not know Muon")
    compare(world, (Row(1, "bf16", optimizer="Muon, sums in fp32"),), ("grid",))  # a reducer refuses it


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(1, 4))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sums_of_two_ranks_are_bitwise_equal(world: Worlds, precision: str, stage: int) -> None:
    """Two summands have one order, whether they meet along ``shard``, along ``data``, or without an axis ``shard``."""
    specs = ("data=2", "shard=2", "data=1,shard=2", "data=2,shard=1")
    rows = tuple(Row(stage, precision, clip=0.0, spec=spec) for spec in specs)
    for side in ("grid",) if stage == 3 else ("grid", "reducer"):
        for expected, *others in world(2).run(train, rows, side):
            assert isinstance(expected, Record)
            for spec, found in zip(specs[1:], others, strict=True):
                assert isinstance(found, Record)
                assert found.losses == expected.losses, (side, spec)
                assert all(map(torch.equal, found.parameters, expected.parameters)), (side, spec)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "zero",
    [
        {"param_persistence_threshold": 0, "prefetch_bucket_size": 0},
        {"param_persistence_threshold": 0, "prefetch_bucket_size": 100_000, "overlap_comm": True},
        {"param_persistence_threshold": 100, "prefetch_bucket_size": 500, "reduce_bucket_size": 500},
    ],
    ids=["gathered", "prefetched", "some_persistent"],
)
@pytest.mark.parametrize("order", ["data=2,shard=2", "shard=2,data=2"])
def test_gathered_and_prefetched_parameters_equal_one_process(
    world: Worlds, module_alone: Reference, order: str, zero: dict[str, Any]
) -> None:
    settings = {"zero_optimization": {"stage": 3, **zero}, "gradient_reducer": False}
    world(4).run(_train_plain, order, settings, module_alone(STEPS))


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


def _rows_of_resumed_experts(stages: tuple[int, ...], precision: str, size: int) -> tuple[Row, ...]:
    situation = "load_checkpoint into a live engine"
    return tuple(Row(stage, precision, 1, situation, "top-1", expert_parallel_size=size, clip=0.0) for stage in stages)


def test_later_copies_go_on_with_the_dense_states_of_the_first(world: Worlds) -> None:
    compare(world, _rows_of_resumed_experts((0, 1), "fp32", 2), ("grid",))


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_go_on_from_a_checkpoint_with_a_shard_axis(world: Worlds, precision: str, size: int) -> None:
    compare(world, _rows_of_resumed_experts((1, 2), precision, size))


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [2, 3])
def test_an_offloaded_engine_that_accumulates_trains_alike_with_a_shard_axis(world: Worlds, stage: int) -> None:
    compare(world, (Row(stage, accumulation=3, offload=True),), ("grid",))


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", range(1, 4))
def test_an_offloaded_engine_trains_alike_with_a_shard_axis(world: Worlds, stage: int, precision: str) -> None:
    compare(world, tuple(Row(stage, precision, accumulation, offload=True) for accumulation in (1, 3)), ("grid",))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(1, 4))
def test_an_offloaded_engine_skips_a_step_on_all_copies(world: Worlds, stage: int) -> None:
    compare(world, (Row(stage, "fp16", 2, "NaN loss on one rank", offload=True),), ("grid",))


def _train_plain(topology: str, settings: dict[str, Any], expected: Run) -> None:
    with plain_engine(topology, settings) as (engine, grid):
        run = train_engine(engine, grid, (own_samples(batch(step), grid) for step in range(STEPS)), loss_of)
    assert_trained_alike(run, expected, losses=1e-4, norms=1e-4)


def _train_pipeline(topology: str, settings: dict[str, Any], expected: Run, tolerance: float) -> None:
    run = train_pipeline(topology, STEPS, zero=1, **settings)
    assert_trained_alike(run, expected, losses=tolerance, norms=tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "reduced"), [(1, False), (1, True), (2, False), (2, True), (3, False)])
@pytest.mark.parametrize("order", list(permutations(("data", "shard", "model"))), ids="-".join)
def test_a_sliced_model_equals_one_process(
    world: Worlds, module_alone: Reference, order: tuple[str, ...], stage: int, reduced: bool
) -> None:
    settings = {"zero_optimization": {"stage": stage}, "gradient_reducer": {} if reduced else False}
    world(8).run(_train_plain, ",".join(f"{axis}=2" for axis in order), settings, module_alone(STEPS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}, FP32_SUMS])
@pytest.mark.parametrize("order", list(permutations(("data", "shard", "pipe"))), ids="-".join)
def test_a_pipeline_equals_one_process(
    world: Worlds, layers_alone: Reference, order: tuple[str, ...], precision: dict[str, Any], reduced: bool
) -> None:
    settings = {"gradient_reducer": {} if reduced else False, **precision}
    tolerance = 1e-2 if precision else 1e-4
    world(8).run(_train_pipeline, ",".join(f"{axis}=2" for axis in order), settings, layers_alone(STEPS), tolerance)


def _refused(table: list[dict[str, Any]]) -> list[str]:
    """Return the error of an engine with each of these settings."""
    start()
    found = []
    with PipelineParallelGrid("data=1,shard=1") as grid:
        for settings in table:
            with pytest.raises((EngineOptionError, DeepSpeedConfigError)) as raised:  # DeepSpeed refuses MiCS itself
                initialize(model=nn.Linear(4, 4), mpu=grid, config=engine_config(1, **settings))
            found.append(str(raised.value))
    return found


def _build_pipeline(settings: dict[str, Any]) -> None:
    start()
    with PipelineParallelGrid("pipe=1") as grid:
        initialize(model=PipelineModule([nn.Linear(4, 4)], grid=grid), config=engine_config(1, **settings))


def test_options_with_groups_or_reductions_of_their_own_are_refused(world: Worlds) -> None:
    offload = {"device": "cpu"}
    table = {
        "zero_optimization.zero_hpz_partition_size (hpZ)": {"stage": 3, "zero_hpz_partition_size": 2},
        "zero_optimization.mics_shard_size (MiCS)": {"stage": 3, "mics_shard_size": 1},
        "zero_optimization.zero_quantized_gradients (qgZ)": {"stage": 3, "zero_quantized_gradients": True},
        "zero_optimization.zenflow (ZenFlow)": {
            "stage": 2,
            "zenflow": {"overlap_step": False},
            "offload_optimizer": offload,
        },
        "zero_optimization.offload_optimizer.super_offload (SuperOffload)": {
            "stage": 3,
            "offload_optimizer": {**offload, "super_offload": True},
        },
        "expert_parallel (AutoEP)": {"expert_parallel": {"enabled": True, "autoep_size": 1}},
        "compile.deepcompile (DeepCompile)": {"compile": {"deepcompile": True}},
        "managed_gradient_accumulation: false": {"managed_gradient_accumulation": False},
    }
    ignoring = [option for option in OPTIONS if option.ignores_shard]
    assert {*table} == {option.title for option in ignoring}
    guide = (Path(__file__).parents[2] / "examples/guides/hybrid_sharding.md").read_text()
    assert all((option.mechanism or option.key.rpartition(".")[2].partition(":")[0]) in guide for option in ignoring)
    rest = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    settings = [{**rest, **({"zero_optimization": each} if "stage" in each else each)} for each in table.values()]
    (errors,) = world(1).run(_refused, settings)
    for option, error in zip(table, errors, strict=True):
        assert option in error or "mics" in option
        assert "name that axis 'data'" in error or "mics" in option


def test_a_pipeline_refuses_zero_2_and_says_why(world: Worlds) -> None:
    settings = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}
    (error,) = world(1).run(_build_pipeline, settings, expect_failure=True)
    assert "every rank holds all of them until then" in str(error)


def _live_bytes() -> int:
    """Return the bytes of all tensors of this process, without the spare receive buffers of ZeRO's exchanges.

    How many of those there are depends on how many pieces were in flight at once, and never exceeds the limit.
    """
    gc.collect()
    received = 0
    for worker in [item for item in gc.get_objects() if type(item) is _Worker]:
        sizes = [buffer.nbytes for buffer in worker._spare]
        assert len(sizes) <= _PIECES_UNDER_WAY * (worker._size - 1), "more buffers than pieces in flight can use"
        assert all(size <= worker._message_bytes for size in sizes)
        received += sum(sizes)
    time.sleep(0.1)  # a thread of gloo may still hold what it has sent
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = {}
    for tensor in tensors:
        with suppress(RuntimeError):  # torch has tensors without memory, for tracing
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values()) - received


def _memory(spec: str, stage: int, reduced: bool) -> list[float]:
    """Return the bytes per parameter at the end of backward and after a step."""
    start()
    width, count, before = 512, 8, _live_bytes()
    with PipelineParallelGrid(spec) as grid:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
        sizes = {"reduce_bucket_size": 1, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
        config = {
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage, **sizes},
            "gradient_reducer": {"bucket_bytes": 1 << 16} if reduced else False,
        }
        engine, *_ = initialize(model=model, mpu=grid, config=engine_config(1, **config))
        found = []
        for _ in range(2):
            engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).sum())
            after_backward = _live_bytes()
            engine.step()
            found = [after_backward - before, _live_bytes() - before]
        destroy_engine(engine)
    return [bytes_held / (count * width**2) for bytes_held in found]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("spec", "shards"), [("data=2,shard=2", 2), ("shard=4", 4)])
@pytest.mark.parametrize(("stage", "reduced"), [(1, False), (1, True), (2, False), (2, True), (3, False)])
def test_a_rank_holds_what_the_formulas_say(spec: str, shards: int, stage: int, reduced: bool) -> None:
    """In bf16 with Adam: stages 1 and 2 keep ``2 + 12 / s`` and gradients of ``2 / s``, stage 3 ``16 / s``."""
    states = 16 / shards if stage == 3 else 2 + 12 / shards
    gradients = 0 if stage == 3 else 2 / shards
    for after_backward, after_step in run_ranks(4, _memory, spec, stage, reduced):
        # DeepSpeed's own reduction keeps one bucket, here of one of eight weights
        bucket = 0.0 if reduced or stage == 3 else 2 / 8
        assert states <= after_step < states + bucket + 1e-4
        assert states + gradients <= after_backward < states + gradients + bucket + 1e-4


def _fill_on_first_rank() -> None:
    start()
    torch.manual_seed(dist.get_rank())
    grid = PipelineParallelGrid("data=2,shard=2")
    config = engine_config(1, zero_optimization={"stage": 3}, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    with use(grid):
        with deepspeed.zero.Init(config_dict_or_path=config):
            module = nn.Linear(4, 4)
        weight = module.weight
        assert sorted(dist.get_process_group_ranks(weight.ds_process_group)) == grid.get_ranks("shard")  # type: ignore[attr-defined]
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            if dist.get_rank() == 0:
                weight.data.fill_(3.0)
        engine, *_ = deepspeed.initialize(model=module, config=config)
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            assert set(weight.flatten().tolist()) == {3.0}
            biases: list[Any] = [None] * 4
            dist.all_gather_object(biases, module.bias.tolist())
        assert biases == [biases[0]] * 4, "zero.Init drew them on each rank; the first copy's values count"
        destroy_engine(engine)
    grid.destroy()


def test_copies_of_parameters_from_zero_init_are_equal(world: Worlds) -> None:
    world(4).run(_fill_on_first_rank)


def _in_no_sync(stage: int) -> None:
    """Accumulate two micro-batches in ``no_sync()``, and by ``gradient_accumulation_steps``."""
    start()
    found = []
    for accumulation in (1, 2):
        with PipelineParallelGrid("data=2,shard=2") as grid:
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
            more = {"zero_optimization": {"stage": stage}, "gradient_reducer": True}
            config = settings(**more, gradient_accumulation_steps=accumulation)
            engine, *_ = initialize(model=module, mpu=grid, config=config)
            for step in range(3):
                for micro_batch in range(2):
                    generator = torch.Generator().manual_seed(10 * step + 2 * dist.get_rank() + micro_batch)
                    is_local = accumulation == 1 and micro_batch == 0
                    with engine.no_sync() if is_local else nullcontext():
                        loss = engine(torch.randn(2, 8, generator=generator)).square().mean()
                        engine.backward(loss * accumulation / 2)
                    if not is_local:
                        engine.step()
            found.append([parameter.detach().clone() for parameter in module.parameters()])
            destroy_engine(engine)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1])
def test_reducer_accumulates_in_no_sync(world: Worlds, stage: int) -> None:
    world(4).run(_in_no_sync, stage)


class _Residual(nn.Sequential):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dense, experts = self
        return hidden + experts(dense(hidden))[0]


def _overflow_of_an_expert(stage: int) -> None:
    """Let the gradient of the last rank's own expert overflow, but no gradient that other ranks have, too."""
    start()
    with PipelineParallelGrid("data=2,shard=2") as grid:
        groups.create_expert_groups(grid, 4)
        torch.manual_seed(0)
        experts = MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=4, min_capacity=0, use_rts=False, capacity_factor=4.0)
        module = _Residual(nn.Linear(8, 8), experts)
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        config = settings(zero_optimization={"stage": stage}, fp16=fp16, gradient_accumulation_steps=1)
        parameters: Any = {"params": list(module.parameters()), "name": "all"}
        parameters = split_params_into_different_moe_groups_for_optimizer(parameters)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        engine, *_ = initialize(model=module, optimizer=optimizer, mpu=grid, config=config)
        if dist.get_rank() == 3:
            weight = next(value for value in module.parameters() if is_moe_param(value))
            weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        before = [value.detach().clone() for value in module.parameters()]
        engine.backward(engine(torch.ones(2, 8).half()).float().square().mean())
        engine.step()
        assert engine.skipped_steps == 1
        assert engine.optimizer.loss_scale == 2**7
        torch.testing.assert_close([value.detach() for value in module.parameters()], before, rtol=0, atol=0)
        destroy_engine(engine)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_of_one_expert_skips_the_step_on_all_copies(world: Worlds, stage: int) -> None:
    world(4).run(_overflow_of_an_expert, stage)


def _bf16_without_zero(spec: str, folder: str) -> None:
    """Save and load a pipeline with BF16_Optimizer, which partitions its states at ZeRO 0, too."""
    start()
    adam = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
    config = engine_config(1, bf16={"enabled": True}, optimizer=adam, zero_optimization={"stage": 0})
    samples, losses = torch.ones(1, 8, dtype=torch.bfloat16), []
    with PipelineParallelGrid(spec) as grid:
        for resumes in (False, True):
            torch.manual_seed(0)
            module = PipelineModule([nn.Linear(8, 8)], grid=grid, loss_fn=nn.functional.mse_loss)
            engine, *_ = initialize(model=module, config=config)
            if resumes:
                assert engine.load_checkpoint(folder)[0] is not None
            while engine.global_steps < 3:
                losses.append(float(engine.train_batch(iter([(samples, samples)]))))
                if engine.global_steps == 1:
                    engine.save_checkpoint(folder)
            destroy_engine(engine)
    assert losses[3:] == losses[1:3], "the same steps again"
    assert len(list(Path(folder).rglob("*optim_states.pt"))) == 2


@pytest.mark.parametrize(
    "spec", ["shard=2,data=2,pipe=1", pytest.param("pipe=1,data=2,shard=2", marks=pytest.mark.exhaustive)]
)
def test_partitions_of_bf16_without_zero_are_saved_once_in_any_order(world: Worlds, spec: str, tmp_path: Path) -> None:
    world(4).run(_bf16_without_zero, spec, str(tmp_path))
