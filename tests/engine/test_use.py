"""``use(grid)`` serves programs that call DeepSpeed themselves, derive from its classes, or have their own mpu."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from itertools import permutations
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import deepspeed.pipe
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe import topology as deepspeed_topology
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

import ds_topo
from ds_topo import GradientReducer, PipelineModule, PipelineParallelGrid, use
from ds_topo.base import patches
from ds_topo.engine import start as starting
from ds_topo.engine.start import warn_of_undealt_samples, with_samples_of
from ds_topo.engine.use import WHILE_A_GRID_IS_IN_USE
from ds_topo.errors import EngineOptionError, TopologyError
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.small_engines import TiedPipe, pipeline_losses, settings, start, tied_layers
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

ORDERS = [",".join(order) for order in permutations(("pipe=2", "data=2", "model=2"))]
stock_initialize = deepspeed.initialize
StockTopology = deepspeed_topology.PipeModelDataParallelTopology


def test_plain_model_gets_the_grid_of_its_config() -> None:
    engine = SimpleNamespace()
    with fake_world(0, 2), mock.patch.object(starting, "_deepspeed_initialize", return_value=(engine,)) as built:
        for section, spec in (({"topology": "data=2"}, "data=2"), ({}, None)):
            ds_topo.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 4, **section})
            mpu = built.call_args.kwargs.get("mpu")
            assert (mpu.topology().spec if mpu else None) == spec
            assert engine.gradient_reducer is None
            if mpu:
                mpu.destroy()


@pytest.mark.parametrize(
    ("spec", "config", "batch"),
    [
        ("data=2,model=2", {"train_batch_size": 24, "gradient_accumulation_steps": 3}, 12),
        ("data=2,model=2", {"train_batch_size": 8}, 4),
        ("data=2,model=2", {"train_batch_size": 4}, 4),
        ("data=2,model=2", {"train_batch_size": 8, "gradient_accumulation_steps": "auto"}, 8),
        ("data=2,model=2", {"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"}, 8),
        ("data=4", {"train_batch_size": 8}, 8),
    ],
)
def test_batch_size_of_all_ranks_becomes_that_of_the_samples(spec: str, config: dict[str, Any], batch: int) -> None:
    for rank in (0, 1):
        given = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 5, **config}
        with fake_world(rank, 4), PipelineParallelGrid(spec) as grid, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = with_samples_of(grid, given)
            assert with_samples_of(grid, "ds_config.json") == "ds_config.json"
        assert found == {**given, "train_batch_size": batch}
        assert len(said) == (rank == 0 and batch != config["train_batch_size"])


# -- pipelines of DeepSpeed's own class ------------------------------------------------------------------------------


def _stock_pipeline(order: str) -> tuple[list[float], list[float]]:
    start()
    grid = PipelineParallelGrid(order)
    with mock.patch("deepspeed.runtime.utils.set_random_seed", torch.manual_seed):
        ours = PipelineModule(tied_layers(), grid=grid, loss_fn=F.mse_loss, seed_layers=True)
        expected = pipeline_losses(ours, stock_initialize, grid)
        with use(grid):
            layout = {"topology": grid.topology()} if order.startswith("data") else {"num_stages": 2}
            stock = TiedPipe(**layout)
            assert stock.mpu().shares_groups_with(grid)
            found = pipeline_losses(stock, deepspeed.initialize, grid)
    grid.destroy()
    return found, expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", mark_exhaustive(ORDERS, lambda number, _: number in (0, 3)))
def test_deepspeeds_pipeline_class_trains_on_the_grid(world: Worlds, order: str) -> None:
    for found, expected in world(8).run(_stock_pipeline, order):
        assert found == expected
        assert expected[-1] < expected[0]


@pytest.mark.parametrize("order", ORDERS)
def test_topology_by_degrees_gets_the_order_of_the_grid(order: str) -> None:
    with fake_world(3, 8), PipelineParallelGrid(order) as grid, use(grid):
        by_degrees = deepspeed_topology.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
        assert by_degrees == grid.topology()
        other = deepspeed_topology.PipeModelDataParallelTopology(num_pp=4, num_mp=1, num_dp=2)
        assert other == ds_topo.PipeModelDataParallelTopology(num_pp=4, num_mp=1, num_dp=2)
    with fake_world(3, 8), PipelineParallelGrid("data=2,seq=2,pipe=2") as grid, use(grid):
        assert deepspeed_topology.PipeDataParallelTopology(2, 4).get_coord(6)._asdict() == {"pipe": 0, "data": 3}


def _other_layouts(order: str) -> dict[str, tuple[str, str, float]]:
    start()
    grid = PipelineParallelGrid(order)
    use(grid)
    group = dist.new_group([0, 1] if dist.get_rank() < 2 else [2, 3], use_local_synchronization=True)
    neighbors = SimpleNamespace(
        get_model_parallel_group=lambda: group,
        get_data_parallel_group=lambda: group,
    )
    mistakes: dict[str, Callable[[], Any]] = {
        "topology": lambda: TiedPipe(topology=StockTopology(num_pp=2, num_mp=1, num_dp=2)),
        "our class": lambda: PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, topology="pipe=2,data=2"),
        "stages": lambda: TiedPipe(num_stages=4),
        "mpu": lambda: deepspeed.initialize(model=nn.Linear(4, 4), mpu=neighbors, config=settings()),
        "by name": lambda: stock_initialize(model=nn.Linear(4, 4), config=settings()),
        "second": lambda: use(SimpleNamespace()),  # type: ignore[arg-type]
    }
    found = {}
    for name, make in mistakes.items():
        began = time.monotonic()
        with pytest.raises(Exception) as raised:  # noqa: PT011 (the caller looks at it)
            make()
        found[name] = (type(raised.value).__name__, str(raised.value), time.monotonic() - began)
    grid.destroy()
    return found


def test_a_second_layout_is_refused_on_every_rank(world: Worlds) -> None:
    messages: dict[str, set[str]] = {}
    for found in world(4).run(_other_layouts, "data=2,pipe=2"):
        for name, (kind, message, seconds) in found.items():
            assert seconds < 10
            assert kind in ("TopologyError", "DisagreementError", "EngineOptionError", "TypeError"), (
                name,
                kind,
                message,
            )
            messages.setdefault(name, set()).add(message)
    assert any("'pipe=2,data=2,model=1' is not the layout of the grid in use" in text for text in messages["topology"])
    assert any("ranks [1, 2] differently" in text for text in messages["topology"])
    assert any("ranks [1, 2] differently" in text for text in messages["our class"])
    assert any("num_stages=4" in text and "has 2" in text for text in messages["stages"])
    assert any("joins ranks [0, 1] on rank 1, where 'data=2,pipe=2' joins" in text for text in messages["mpu"])
    assert all("imported by name before ds_topo.use" in text for text in messages["by name"])


# -- plain engines ---------------------------------------------------------------------------------------------------


def _served() -> None:
    start()
    grid = PipelineParallelGrid("model=2,data=2")
    own = SimpleNamespace(  # a program's mpu of the same layout
        get_model_parallel_group=lambda: grid.get_group("model"),
        get_data_parallel_group=lambda: grid.get_group("data"),
    )
    with use(grid) as used, use(grid):  # a library that also calls use(), inside a program that has called it
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=settings(gradient_reducer=True))
        assert engine.mpu is grid
        assert isinstance(engine.gradient_reducer, GradientReducer)
        engine.destroy()
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), mpu=own, config=settings())
        assert engine.mpu is grid
        engine.destroy()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=settings(train_batch_size=16))
        counted = [
            str(warning.message) for warning in caught if "2 x 2 samples on each of 4 ranks" in str(warning.message)
        ]
        assert len(counted) == (dist.get_rank() == 0)
        assert engine.train_batch_size() == 8
        engine.destroy()
        used.release()
        assert deepspeed.initialize is ds_topo.initialize  # the inner one still holds the grid
    assert deepspeed.initialize is stock_initialize
    grid.destroy()
    with PipelineParallelGrid("data=4") as other:
        use(other)
        assert deepspeed.initialize is ds_topo.initialize
    assert deepspeed.initialize is stock_initialize


def test_engines_get_the_grid_and_the_config_sections(world: Worlds) -> None:
    world(4).run(_served)


def _in_its_place() -> None:
    start()
    deepspeed.initialize = ds_topo.initialize
    try:
        with PipelineParallelGrid("data=2") as grid:
            engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), mpu=grid, config=settings(gradient_reducer=True))
            assert isinstance(engine.gradient_reducer, GradientReducer)
            engine.destroy()
    finally:
        deepspeed.initialize = stock_initialize


def test_initialize_assigned_to_deepspeed_does_not_recurse(world: Worlds) -> None:
    world(2).run(_in_its_place)


def _partitioned() -> None:
    start()
    with PipelineParallelGrid("data=2,model=2") as grid:
        config = settings(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
        use(grid)
        with deepspeed.zero.Init(config_dict_or_path=config):  # as from_pretrained() does: without a group
            module = nn.Linear(8, 8)
        assert dist.get_process_group_ranks(module.weight.ds_process_group) == grid.get_ranks("data")
        given = grid.get_group(["data", "model"])
        with deepspeed.zero.Init(config_dict_or_path=config, data_parallel_group=given):
            other = nn.Linear(8, 8)
        assert other.weight.ds_process_group == given, "the program's own group counts"
        engine, *_ = deepspeed.initialize(model=module, config=config)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
        engine.destroy()


def test_zero_3_partitions_over_replicas(world: Worlds) -> None:
    world(4).run(_partitioned)


def _initialized_over(spec: str, how: str, stage: int = 3) -> float | str:
    """Build slices under ``zero.Init``; return the error, or by how much the engine's differ from those built."""
    start()
    with PipelineParallelGrid(spec) as grid:
        config = settings(zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0})
        partitions: dict[str, Any] = {
            "world": {},
            "mpu": {"mpu": grid},
            "group": {"data_parallel_group": grid.get_partition_group()},
        }
        torch.manual_seed(grid.get_model_parallel_rank())
        built = nn.Linear(8, 8).weight.detach()
        torch.manual_seed(grid.get_model_parallel_rank())
        if how == "module":
            module = deepspeed.zero.Init(module=nn.Linear(8, 8), config_dict_or_path=config).module
        else:
            with deepspeed.zero.Init(config_dict_or_path=config, **partitions[how]):
                module = nn.Linear(8, 8)
        module.is_pipeline_stage = module.weight.tensor_model_parallel = module.bias.tensor_model_parallel = True
        try:
            engine, *_ = deepspeed.initialize(model=module, mpu=grid, config=config)
        except EngineOptionError as error:
            return str(error)
        with deepspeed.zero.GatheredParameters([module.weight]):
            difference = (module.weight - built).norm() / built.norm()
        engine.destroy()
    return difference.item()


INITIALIZED = [
    (spec, how)
    for spec in ("model=2,data=2", "data=2,pipe=2", "data=2,shard=2", "data=2,seq=2", "+copies=2,data=2")
    for how in ("world", "mpu", "module", "group")
]


FEW_INITIALIZED = [("model=2,data=2", "world"), ("model=2,data=2", "group"), ("data=2,pipe=2", "mpu")]


@pytest.mark.parametrize(
    ("spec", "how"),
    mark_exhaustive(
        INITIALIZED,
        default=lambda _, case: case in FEW_INITIALIZED,
    ),
)
def test_parameters_from_zero_init_stay_what_they_are_or_are_refused(world: Worlds, spec: str, how: str) -> None:
    is_right = how == "group" or "seq" in spec or "copies" in spec
    for rank, found in enumerate(world(4).run(_initialized_over, spec, how)):
        if is_right:
            assert found == 0.0
        else:
            assert isinstance(found, str), "accepted in silence"
            assert "over ranks [0, 1, 2, 3]" in found
            assert f"partitions over {[0, 2] if spec == 'data=2,pipe=2' else [0, 1]}" in found or rank > 0
            assert "data_parallel_group=grid.get_partition_group()" in found


def test_parameters_from_zero_init_are_refused_at_other_stages(world: Worlds) -> None:
    for found in world(2).run(_initialized_over, "data=2", "mpu", 1):
        assert "the engine is at ZeRO stage 1" in str(found)


def _filled_on_rank_0(spec: str) -> list[float]:
    """Fill partitioned parameters as from_pretrained() does, with a batch size computed from all ranks."""
    start()
    with PipelineParallelGrid(spec) as grid, use(grid):
        config = settings(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0}, train_batch_size=16)
        with deepspeed.zero.Init(None, None, True, None, False, config, None, True, None, None):
            whole, slices = nn.Linear(4, 4), nn.Linear(4, 4)
        slices.weight.tensor_model_parallel = True  # type: ignore[assignment]
        for module, is_writer in ((whole, dist.get_rank() == 0), (slices, grid.get_axis_rank("data") == 0)):
            with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
                if is_writer:
                    nn.init.constant_(module.weight, 3.0 + dist.get_rank())
        with deepspeed.zero.GatheredParameters([whole.weight, slices.weight]):
            found = [whole.weight[3, 3].item(), slices.weight[3, 3].item()]
        engine, *_ = deepspeed.initialize(model=whole, config=config)
        assert engine.train_batch_size() == 4 * grid.get_sample_world_size()
        with deepspeed.zero.GatheredParameters(whole.weight, modifier_rank=0):  # an engine's may be unmarked slices
            nn.init.constant_(whole.weight, dist.get_rank())
        with deepspeed.zero.GatheredParameters(whole.weight):
            assert whole.weight[0, 0].item() == grid.get_ranks("data")[0]
        engine.destroy()
    return found


@pytest.mark.parametrize("spec", ["model=2,data=2", "data=2,model=2", "model=4"])
def test_parameters_filled_on_rank_0_reach_all_slices(world: Worlds, spec: str) -> None:
    found = world(4).run(_filled_on_rank_0, spec)
    first = {"model=2,data=2": [0, 0, 2, 2], "data=2,model=2": [0, 1, 0, 1], "model=4": [0, 1, 2, 3]}[spec]
    assert found == [[3.0, 3.0 + rank] for rank in first]


def test_release_and_destroy_restore_every_name() -> None:
    of_sequences = [patches.SEQUENCE_GROUP, patches.SEQUENCE_DATA_GROUP, patches.INITIALIZE_SEQUENCES]
    rows = [change for change, _ in WHILE_A_GRID_IS_IN_USE] + of_sequences
    before = [vars(row.owner)[row.name] for row in rows]
    for _ in range(2):
        with fake_world(0, 4), PipelineParallelGrid("seq=2,data=2") as grid, use(grid):
            assert all(vars(row.owner)[row.name] is not value for row, value in zip(rows, before, strict=True))
            assert deepspeed_topology.ProcessTopology is ds_topo.ProcessTopology
        assert [vars(row.owner)[row.name] for row in rows] == before
        with fake_world(0, 4), PipelineParallelGrid("seq=2,data=2") as grid:
            use(grid)
        assert [vars(row.owner)[row.name] for row in rows] == before


def test_use_refuses_other_sequence_parallel_groups() -> None:
    with fake_world(0, 4), PipelineParallelGrid("seq=2,data=2") as grid:
        before = deepspeed.initialize
        with mock.patch.object(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", dist.new_group([0, 1])):
            with pytest.raises(TopologyError, match=r"has already joined ranks \[0, 1\], .* call it after use"):
                use(grid)
            assert deepspeed.initialize is before
        with mock.patch.object(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", dist.new_group([0, 2])):
            use(grid).release()
        with use(grid):
            parallel_state_sp.initialize_sequence_parallel(2)
            with pytest.raises(TopologyError, match="sequence_parallel_size 4, but the grid in use is 'seq=2,data=2'"):
                parallel_state_sp.initialize_sequence_parallel(4)
            assert parallel_state_sp._SEQUENCE_PARALLEL_GROUP is grid.get_group("seq")
        assert parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None


def test_warns_if_accelerate_is_imported_after_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    with fake_world(0, 4), PipelineParallelGrid("data=2,model=2") as grid, PipelineParallelGrid("data=4") as whole:
        with pytest.warns(RuntimeWarning, match="accelerate was imported after ds_topo.use"):
            warn_of_undealt_samples(grid)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_undealt_samples(whole)


def test_only_one_grid_is_in_use_at_a_time() -> None:
    with fake_world(0, 4), PipelineParallelGrid("data=4") as first, PipelineParallelGrid("data=2,model=2") as second:
        with use(first), pytest.raises(RuntimeError, match="'data=4' is in use: release"):
            use(second)
        use(second)
        second.destroy()
        with pytest.raises(RuntimeError, match="the grid was destroyed"):
            use(second)


def test_use_warns_of_an_engine_that_was_built_before_without_an_mpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(0, 4), PipelineParallelGrid("data=2,model=2") as grid, PipelineParallelGrid("data=4") as whole:
        monkeypatch.setattr(deepspeed_groups, "_WORLD_GROUP", dist.group.WORLD)
        with pytest.warns(RuntimeWarning, match="has no effect on an engine that DeepSpeed has built before"):
            use(grid).release()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(whole).release()
