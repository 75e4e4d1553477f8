"""``use(grid)``: programs that call DeepSpeed themselves, derive from its classes, or bring an mpu of their own."""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe import PipelineModule as StockPipelineModule
from deepspeed.runtime.pipe import topology as deepspeed_topology
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import ds_topo
from ds_topo import GradientReducer, PipelineModule, PipelineParallelGrid, TopologyError, parallel_state, use
from ds_topo.engine import changes, samples
from ds_topo.engine.frameworks import warn_of_undealt_samples
from ds_topo.engine.use import WHILE_A_GRID_IS_IN_USE
from ds_topo.errors import DisagreementError
from tests.support.fake_world import fake_world
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

ORDERS = [",".join(order) for order in permutations(("pipe=2", "data=2", "model=2"))]
stock_initialize = deepspeed.initialize
StockTopology = deepspeed_topology.PipeModelDataParallelTopology


# -- pipelines of DeepSpeed's own class ------------------------------------------------------------------------------


class GPTPipe(StockPipelineModule):  # type: ignore[misc]
    """As programs derive theirs: before there is a grid, with a tied layer."""

    def __init__(self, **layout: Any) -> None:
        tied = TiedLayerSpec("tied", nn.Linear, 8, 8)
        layers = [tied, LayerSpec(nn.Linear, 8, 8), torch.tanh, LayerSpec(nn.Linear, 8, 8), tied]
        super().__init__(layers, loss_fn=F.mse_loss, seed_layers=True, **layout)


def _losses(
    module: nn.Module, initialize: Callable[..., Any], grid: PipelineParallelGrid, steps: int = 3
) -> list[float]:
    engine, *_ = initialize(model=module, config=settings(gradient_clipping=0.1))
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + grid.get_sample_rank())
        micro_batches = [(torch.randn(2, 8, generator=generator), torch.ones(2, 8)) for _ in range(2)]
        found.append(engine.train_batch(iter(micro_batches)).item())
    engine.destroy()
    return found


def _stock_pipeline(order: str) -> tuple[list[float], list[float]]:
    start()
    grid = PipelineParallelGrid(order)
    with mock.patch("deepspeed.runtime.utils.set_random_seed", torch.manual_seed):
        tied = TiedLayerSpec("tied", nn.Linear, 8, 8)
        layers = [tied, LayerSpec(nn.Linear, 8, 8), torch.tanh, LayerSpec(nn.Linear, 8, 8), tied]
        ours = PipelineModule(layers, grid=grid, loss_fn=F.mse_loss, seed_layers=True)
        expected = _losses(ours, stock_initialize, grid)
        with use(grid):
            layout = {"topology": grid.topology()} if order.startswith("data") else {"num_stages": 2}
            stock = GPTPipe(**layout)
            assert stock.mpu().shares_groups_with(grid)
            found = _losses(stock, deepspeed.initialize, grid)
    grid.destroy()
    return found, expected


@pytest.mark.parametrize("order", ORDERS)
def test_a_pipeline_of_deepspeeds_class_trains_on_the_grid(world: Worlds, order: str) -> None:
    for found, expected in world(8).run(_stock_pipeline, order):
        assert found == expected
        assert expected[-1] < expected[0]


@pytest.mark.parametrize("order", ORDERS)
def test_a_topology_by_degrees_is_in_the_order_of_the_grid(order: str) -> None:
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
        "topology": lambda: GPTPipe(topology=StockTopology(num_pp=2, num_mp=1, num_dp=2)),
        "our class": lambda: PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, topology="pipe=2,data=2"),
        "stages": lambda: GPTPipe(num_stages=4),
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


def test_another_layout_in_the_same_job_is_refused_on_every_rank(world: Worlds) -> None:
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
    with use(grid) as used, use(grid):  # a library inside a program that does the same
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=settings(gradient_reducer=True))
        assert engine.mpu is grid
        assert isinstance(engine.gradient_reducer, GradientReducer)
        engine.destroy()
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), mpu=own, config=settings())
        assert engine.mpu is grid
        engine.destroy()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=settings(train_batch_size=16))
        counted = [
            str(warning.message) for warning in told if "2 x 2 samples on each of 4 ranks" in str(warning.message)
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


def test_engines_get_the_grid_and_what_the_config_says(world: Worlds) -> None:
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


def test_our_initialize_in_deepspeeds_place_does_not_call_itself(world: Worlds) -> None:
    world(2).run(_in_its_place)


def _partitioned() -> None:
    start()
    with PipelineParallelGrid("data=2,model=2") as grid:
        config = settings(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
        use(grid)
        with deepspeed.zero.Init(config_dict_or_path=config):  # as from_pretrained() does: without a group
            module = nn.Linear(8, 8)
        assert dist.get_process_group_ranks(module.weight.ds_process_group) == grid.get_ranks("data")
        engine, *_ = deepspeed.initialize(model=module, config=config)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
        engine.destroy()


def test_zero_3_partitions_over_the_replicas(world: Worlds) -> None:
    world(4).run(_partitioned)


def _filled_on_rank_0(spec: str) -> list[float]:
    """As from_pretrained() fills partitioned parameters, from a config in which a framework has counted all ranks."""
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
def test_parameters_that_rank_0_alone_has_filled_are_on_all_slices(world: Worlds, spec: str) -> None:
    found = world(4).run(_filled_on_rank_0, spec)
    first = {"model=2,data=2": [0, 0, 2, 2], "data=2,model=2": [0, 1, 0, 1], "model=4": [0, 1, 2, 3]}[spec]
    assert found == [[3.0, 3.0 + rank] for rank in first]


def test_names_are_as_before_after_use_and_after_destroy() -> None:
    rows = [change for change, _ in WHILE_A_GRID_IS_IN_USE] + list(changes.LONG_SEQUENCES)
    before = [vars(row.owner)[row.name] for row in rows]
    for _ in range(2):
        with fake_world(0, 4), PipelineParallelGrid("seq=2,data=2") as grid, use(grid):
            assert all(vars(row.owner)[row.name] is not value for row, value in zip(rows, before, strict=True))
            assert deepspeed.pipe.PipelineModule is PipelineModule
            assert deepspeed_topology.ProcessTopology is ds_topo.ProcessTopology
        assert [vars(row.owner)[row.name] for row in rows] == before
        with fake_world(0, 4), PipelineParallelGrid("seq=2,data=2") as grid:
            use(grid)
        assert [vars(row.owner)[row.name] for row in rows] == before


def test_attention_that_was_registered_before_is_refused() -> None:
    with fake_world(0, 4), PipelineParallelGrid("seq=2,data=2") as grid:
        before = deepspeed.initialize
        with mock.patch.object(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", dist.new_group([0, 1])):
            with pytest.raises(TopologyError, match=r"has joined ranks \[0, 1\] before, .* call it after use"):
                use(grid)
            assert deepspeed.initialize is before
        with mock.patch.object(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", dist.new_group([0, 2])):
            use(grid).release()


def test_accelerate_that_is_imported_too_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    with fake_world(0, 4), PipelineParallelGrid("data=2,model=2") as grid, PipelineParallelGrid("data=4") as whole:
        with pytest.warns(RuntimeWarning, match="accelerate was imported after ds_topo.use"):
            warn_of_undealt_samples(grid)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_undealt_samples(whole)


def test_one_grid_is_in_use_at_a_time() -> None:
    with fake_world(0, 4), PipelineParallelGrid("data=4") as first, PipelineParallelGrid("data=2,model=2") as second:
        with use(first), pytest.raises(RuntimeError, match="'data=4' is in use: release"):
            use(second)
        use(second)
        second.destroy()
        with pytest.raises(RuntimeError, match="the grid was destroyed"):
            use(second)


# -- programs with a parallel state of their own ---------------------------------------------------------------------


@contextmanager
def program(name: str, **functions: Any) -> Iterator[ModuleType]:
    """A program's package with its parallel state."""
    package, module = ModuleType(name), ModuleType(f"{name}.mpu")
    vars(module).update(functions)
    vars(package)["mpu"] = module
    with mock.patch.dict(sys.modules, {name: package, module.__name__: module}):
        yield module


def _neighbors(size: int) -> Any:
    """A group of adjacent ranks, whatever the grid says."""
    first = dist.get_rank() // size * size
    return dist.new_group(range(first, first + size), use_local_synchronization=True)


class UsersLinear(nn.Linear):
    """Of a file that may import a parallel state."""


def _another_state_in_the_process() -> None:
    start()
    group = _neighbors(2)
    answers = {"get_tensor_model_parallel_group": lambda: group, "get_data_parallel_group": lambda: None}
    with PipelineParallelGrid("model=2,data=2") as grid, program("inference", **answers):
        engine, *_ = deepspeed.initialize(model=UsersLinear(4, 4), mpu=grid, config=settings())
        engine.destroy()


def test_a_parallel_state_that_no_layer_asks_may_differ(world: Worlds) -> None:
    world(4).run(_another_state_in_the_process)


def _half_swapped(case: str) -> tuple[str, float]:
    start()
    grid = PipelineParallelGrid("model=2,pipe=2")
    group = _neighbors(2)
    functions: dict[str, Any] = {"get_data_parallel_group": lambda: dist.new_group([dist.get_rank()])}
    if case == "their state":  # our topology in another order, their own mpu
        functions = {"get_tensor_model_parallel_group": lambda: group, "get_data_parallel_group": lambda: None}
    elif case == "our names":  # one to one
        functions = {
            "get_io_parallel_group": lambda: None,
            "get_data_parallel_group": grid.get_data_parallel_group,
            "get_model_parallel_group": grid.get_model_parallel_group,
        }
    elif case == "our names, wrapped":
        functions = {
            "get_io_parallel_group": lambda: None,
            "get_data_parallel_group": lambda: grid.get_data_parallel_group(),
            "get_model_parallel_group": lambda: grid.get_model_parallel_group(),
        }
    with program("megatron_like", **functions) as module:
        if case == "our grid":
            vars(module)["get_io_parallel_group"] = lambda: None
            vars(sys.modules["megatron_like"])["mpu"] = grid
        layer: Any = type("ParallelLinear", (nn.Linear,), {"__module__": "megatron_like"})
        if case == "their state":  # a layer of the user's own file, which imports the program's state
            layer = UsersLinear
            globals()["their_mpu"] = module
        pipe = PipelineModule([LayerSpec(layer, 4, 4)] * 2, grid=grid, loss_fn=F.mse_loss)
        began = time.monotonic()
        with pytest.raises((TopologyError, DisagreementError)) as raised:
            deepspeed.initialize(model=pipe, config=settings())
    text, seconds = str(raised.value), time.monotonic() - began
    grid.destroy()
    return text, seconds


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("their state", "get_tensor_model_parallel_group() of megatron_like.mpu joins ranks"),
        ("our names", "megatron_like.mpu.get_model_parallel_group is the grid's"),
        ("our names, wrapped", "get_model_parallel_group() of megatron_like.mpu joins ranks"),
        ("our grid", "megatron_like.mpu is the grid's, whose model parallel group is pipe x model (4 ranks)"),
    ],
)
def test_half_a_swap_is_an_error_and_not_a_hang(world: Worlds, case: str, message: str) -> None:
    for text, seconds in world(4).run(_half_swapped, case):
        assert message in text
        assert "parallel_state.install(grid, " in text
        assert seconds < 10


def _whole_swap() -> list[float]:
    start()
    grid = PipelineParallelGrid("model=2,pipe=2")
    names = ("get_io_parallel_group", "get_data_parallel_group", "get_model_parallel_group")
    source = "\n".join(f"def {name}():\n    raise AssertionError('not initialized')" for name in names)
    with program("megatron_like") as module:
        exec(source, vars(module))
        parallel_state.install(grid, module)
        with use(grid):
            pipe = GPTPipe(topology=module.get_topology() if hasattr(module, "get_topology") else grid.topology())
            losses = _losses(pipe, deepspeed.initialize, grid)
    grid.destroy()
    return losses


def test_an_installed_state_is_the_grids(world: Worlds) -> None:
    assert len({tuple(losses) for losses in world(4).run(_whole_swap)}) == 1


# -- samples ---------------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), float(index)), torch.zeros(4)


def _dealt(kind: str, dealt_by: str) -> str | list[float]:
    start()
    grid = PipelineParallelGrid("data=2,model=2" if kind == "plain" else "pipe=2,data=2")
    data = Numbers()
    if dealt_by == "torch":
        loader: DataLoader[Any] = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))
    else:
        loader = grid.data_loader(data, 2, drop_last=True)
    grid.check_samples = dealt_by != "torch, meant"
    if dealt_by == "torch, meant":
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))
    batches = iter(loader)
    found: list[float] = []
    try:
        if kind == "plain":
            engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), mpu=grid, config=settings())
            for _ in range(4):
                inputs, labels = next(batches)
                loss = F.mse_loss(engine(inputs), labels)
                engine.backward(loss)
                engine.step()
                found.append(inputs[0, 0].item())
        else:
            module = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, grid=grid, loss_fn=F.mse_loss)
            engine, *_ = deepspeed.initialize(model=module, config=settings())
            found = [engine.train_batch(batches).item() for _ in range(2)]
    except DisagreementError as error:
        return str(error)
    finally:
        grid.destroy()
    return found


@pytest.mark.parametrize("kind", ["plain", "pipeline"])
def test_peers_that_train_on_other_samples_are_named(world: Worlds, kind: str) -> None:
    for rank, message in enumerate(world(4).run(_dealt, kind, "torch")):
        assert isinstance(message, str), "accepted in silence"
        assert f"rank {rank // 2 * 2 if kind == 'plain' else 0} (" in message
        assert "read different samples" in message
        assert "grid.sampler(dataset)" in message
    for losses in world(4).run(_dealt, kind, "torch, meant"):
        assert isinstance(losses, list)
    for losses in world(4).run(_dealt, kind, "the grid"):
        assert isinstance(losses, list)


UNLIKE: dict[str, tuple[Any, Any]] = {
    "values": (torch.arange(3), torch.arange(1, 4)),
    "shapes": (torch.ones(3), torch.ones(1, 3)),
    "types": (torch.ones(3), torch.ones(3, dtype=torch.bfloat16)),
    "one of several": ({"a": torch.ones(1), "b": [torch.ones(2)]}, {"a": torch.ones(1), "b": [torch.zeros(2)]}),
    "an order": ((torch.ones(1), torch.zeros(1)), (torch.zeros(1), torch.ones(1))),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_what_differs_has_another_digest(what: str) -> None:
    one, other = UNLIKE[what]
    assert samples.digest(one) != samples.digest(other)
    assert samples.digest(one) == samples.digest(copy.deepcopy(one)) > 0


@pytest.mark.parametrize(
    "nothing", [None, (), {"a": None}, "words", 3.0, torch.zeros(2, 3), (torch.zeros(1), torch.empty(0))], ids=repr
)
def test_samples_that_a_stage_has_no_use_for_have_none(nothing: Any) -> None:
    assert samples.digest(nothing) == 0


@pytest.mark.parametrize(
    "lawful", [torch.tensor(3.0), torch.ones(4, 4).t(), torch.ones(2).bfloat16(), torch.ones(1) > 0]
)
def test_samples_of_any_kind_have_a_digest(lawful: torch.Tensor) -> None:
    assert samples.digest(lawful) == samples.digest((lawful.clone().contiguous(),)) > 0


def _changed_at_random() -> None:
    start()
    with PipelineParallelGrid("pipe=2,data=2") as grid:
        module = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, grid=grid, loss_fn=F.mse_loss)
        engine, *_ = deepspeed.initialize(model=module, config=settings())
        noise = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            engine.train_batch(iter([(torch.randn(2, 4, generator=noise), torch.ones(2, 4))] * 2))
        engine.destroy()


def test_inputs_that_the_first_stage_alone_has_changed_are_no_other_samples(world: Worlds) -> None:
    world(4).run(_changed_at_random)


def _other_kinds_of_samples() -> None:
    start()
    with PipelineParallelGrid("pipe=2,model=2") as grid:
        module = nn.Linear(4, 4)
        module.is_pipeline_stage = True  # type: ignore[assignment]
        engine, *_ = deepspeed.initialize(model=module, mpu=grid, config=settings())
        stage, slice_ = grid.get_axis_rank("pipe"), grid.get_axis_rank("model")
        for _ in range(2):  # later stages are given parts of sequences
            engine(torch.full((2, 4), float(stage * slice_)))
        engine.destroy()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with PipelineParallelGrid("model=2,data=2") as grid:
        engine, *_ = deepspeed.initialize(model=TakesAnything(), mpu=grid, config=settings())
        engine(torch.ones(3, dtype=torch.cfloat).conj(), [nested, torch.eye(2).to_sparse(), torch.empty(0, 3), None])
        with pytest.raises(DisagreementError, match="read different samples"):
            engine({"phase": torch.full((3,), complex(0, grid.get_axis_rank("model"))).conj()})
        engine.destroy()


def _one_replica_alone() -> None:
    start()
    with PipelineParallelGrid("model=2,data=2") as grid:
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), mpu=grid, config=settings())
        for _ in range(grid.get_sample_rank() + 1):  # as to show a first result, without engine.eval()
            engine(torch.ones(2, 4))
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        engine.destroy()


def test_a_replica_that_looks_at_more_samples_does_not_wait_for_the_others(world: Worlds) -> None:
    world(4).run(_one_replica_alone)


class TakesAnything(nn.Module):
    """Takes whatever there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *_: Any) -> torch.Tensor:
        return self.weight.sum()


def test_samples_of_all_kinds_are_compared_where_they_are_read(world: Worlds) -> None:
    world(4).run(_other_kinds_of_samples)


@pytest.mark.parametrize("spec", ["pipe=2,data=3,seq=2", "model=2,data=3,pipe=2", "seq=3,data=2,+copies=2"])
def test_every_sample_is_dealt_once_and_to_all_peers(spec: str) -> None:
    world_size = ds_topo.ProcessTopology.from_spec(spec).world_size()
    shares: dict[int, set[tuple[int, ...]]] = {}
    for rank in range(world_size):
        with fake_world(rank, world_size), PipelineParallelGrid(spec) as grid:
            count = grid.get_sample_world_size()
            sampler = grid.sampler(range(12 * count), seed=3)
            sampler.set_epoch(1)
            shares.setdefault(grid.get_sample_rank(), set()).add(tuple(sampler))
            loader = grid.data_loader(range(12 * count), 5, drop_last=True)
            assert [len(batch) for batch in loader] == [5, 5]
    assert all(len(orders) == 1 for orders in shares.values())
    dealt = [index for orders in shares.values() for index in next(iter(orders))]
    assert sorted(dealt) == list(range(len(dealt)))


def test_samples_that_cannot_be_dealt() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with fake_world(0, 4), PipelineParallelGrid("data=4") as grid:
        with pytest.raises(TypeError, match="has no length: deal it by yourself"):
            grid.sampler(Stream())  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="samples are dealt by the grid"):
            grid.data_loader(range(8), sampler=[0, 1])
