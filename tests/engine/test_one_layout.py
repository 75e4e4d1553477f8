"""A program's own parallel state is refused if its groups have other ranks than those of the grid."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import deepspeed
import deepspeed.pipe
import pytest
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, parallel_state, use
from ds_topo.engine.one_layout import check_programs
from ds_topo.errors import DisagreementError, TopologyError
from ds_topo.layers import Parallel, ParallelCrossEntropyLoss, ParallelEmbedding, ParallelLinear
from tests.support.fake_world import fake_world
from tests.support.small_engines import TiedPipe, pipeline_losses, settings, start
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


@contextmanager
def program(name: str, **functions: Any) -> Iterator[ModuleType]:
    """Create a program's package with its parallel state."""
    package, module = ModuleType(name), ModuleType(f"{name}.mpu")
    vars(module).update(functions)
    vars(package)["mpu"] = module
    with mock.patch.dict(sys.modules, {name: package, module.__name__: module}):
        yield module


def _neighbors(size: int) -> Any:
    """Create a group of adjacent ranks, independent of the grid."""
    first = dist.get_rank() // size * size
    return dist.new_group(range(first, first + size), use_local_synchronization=True)


class UsersLinear(nn.Linear):
    """A layer of a user's file, which may import a parallel state."""


def _another_state_in_the_process() -> None:
    start()
    group = _neighbors(2)
    answers = {"get_tensor_model_parallel_group": lambda: group, "get_data_parallel_group": lambda: None}
    with PipelineParallelGrid("model=2,data=2") as grid, program("inference", **answers):
        engine, *_ = deepspeed.initialize(model=UsersLinear(4, 4), mpu=grid, config=settings())
        engine.destroy()


def test_parallel_state_that_no_layer_uses_may_differ(world: Worlds) -> None:
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
        ("our names", "megatron_like.mpu.get_model_parallel_group belongs to the grid"),
        ("our names, wrapped", "get_model_parallel_group() of megatron_like.mpu joins ranks"),
        ("our grid", "megatron_like.mpu belongs to the grid, whose model parallel group is pipe x model (4 ranks)"),
    ],
)
def test_half_installed_parallel_state_raises_instead_of_hanging(world: Worlds, case: str, message: str) -> None:
    for text, seconds in world(4).run(_half_swapped, case):
        assert message in text
        assert "parallel_state.install(grid, " in text
        assert seconds < 10


@pytest.mark.parametrize(
    ("spec", "is_neox", "is_refused"),
    [("pipe=2,data=2", True, True), ("model=2,data=2", True, False), ("pipe=2,model=2", False, False)],
)
def test_grid_replaces_the_state_of_gpt_neox_only_without_stages(spec: str, is_neox: bool, is_refused: bool) -> None:
    with fake_world(0, 4), PipelineParallelGrid(spec) as grid:
        functions = {"get_model_parallel_group": grid.get_model_parallel_group}
        if is_neox:
            functions["get_io_parallel_group"] = grid.get_pipe_parallel_group
        layer: Any = type("ParallelLinear", (nn.Linear,), {"__module__": "megatron_like"})
        refused = pytest.raises(TopologyError, match="belongs to the grid") if is_refused else nullcontext()
        with program("megatron_like", **functions), refused:
            check_programs(layer(4, 4), grid)


def _whole_swap() -> list[float]:
    start()
    grid = PipelineParallelGrid("model=2,pipe=2")
    names = ("get_io_parallel_group", "get_data_parallel_group", "get_model_parallel_group")
    source = "\n".join(f"def {name}():\n    raise AssertionError('not initialized')" for name in names)
    with program("megatron_like") as module:
        exec(source, vars(module))
        parallel_state.install(grid, module)
        with use(grid):
            pipe = TiedPipe(topology=module.get_topology() if hasattr(module, "get_topology") else grid.topology())
            losses = pipeline_losses(pipe, deepspeed.initialize, grid)
    grid.destroy()
    return losses


def test_installed_parallel_state_trains_on_the_grid(world: Worlds) -> None:
    assert len({tuple(losses) for losses in world(4).run(_whole_swap)}) == 1


@pytest.mark.parametrize("axis", ["data", "model"])
def test_layers_that_are_split_over_replicas_are_refused(axis: str) -> None:
    with fake_world(0, 4), PipelineParallelGrid("data=2,model=2") as grid:
        model = nn.Sequential(ParallelLinear(4, 4, dim=-1, group=grid.get_group(axis)))
        attention = DistributedAttention(nn.Identity(), grid.get_group(axis))
        refused = pytest.raises(TopologyError, match="which read different samples along data: give it the group")
        for module in (model, attention):
            with refused if axis == "data" else nullcontext():
                check_programs(module, grid)
        whole = dist.group.WORLD if axis == "data" else grid.get_group(axis)
        assert axis == "model" or grid.get_group(("data", "model")) == whole
        for group in (whole, grid.get_group(axis)):
            parts = [Parallel(group), group]
            layers: list[nn.Module] = [ParallelCrossEntropyLoss(group=each) for each in parts]
            for module in (ParallelEmbedding(4, 4, dim=0, group=group), *layers):
                with refused if axis == "data" else nullcontext():
                    check_programs(nn.ModuleList([module]), grid)
        own: Any = nn.Linear(4, 4)
        own.weight.tensor_model_parallel, own.group_for_logs = True, grid.get_group(axis)
        check_programs(own, grid)  # what a layer of the program uses its groups for is unknown
