"""Layers with groups of another layout are refused, and a program's own parallel state can have the grid's groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import deepspeed
import deepspeed.pipe
import pytest
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

from ds_topo import PipelineParallelGrid, parallel_state, use
from ds_topo.engine.checks import check_groups_of_layers
from ds_topo.errors import TopologyError
from ds_topo.layers import Parallel, ParallelCrossEntropyLoss, ParallelEmbedding, ParallelLinear
from tests.support.fake_world import fake_world
from tests.support.small_engines import TiedPipe, pipeline_losses, start
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
                check_groups_of_layers(module, grid)
        whole = dist.group.WORLD if axis == "data" else grid.get_group(axis)
        assert axis == "model" or grid.get_group(("data", "model")) == whole
        for group in (whole, grid.get_group(axis)):
            parts = [Parallel(group), group]
            layers: list[nn.Module] = [ParallelCrossEntropyLoss(group=each) for each in parts]
            for module in (ParallelEmbedding(4, 4, dim=0, group=group), *layers):
                with refused if axis == "data" else nullcontext():
                    check_groups_of_layers(nn.ModuleList([module]), grid)
        own: Any = nn.Linear(4, 4)
        own.weight.tensor_model_parallel, own.group_for_logs = True, grid.get_group(axis)
        check_groups_of_layers(own, grid)  # what a layer of the program uses its groups for is unknown
