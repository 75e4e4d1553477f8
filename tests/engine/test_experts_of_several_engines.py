"""Each engine uses its own expert groups, beside other engines, other mpus and an earlier world."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe import utils as deepspeed_moe
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from ds_topo import PipelineParallelGrid, groups
from ds_topo.errors import ExpertGroupError
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


class Mixture(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(256, 256)
        self.moe = MoE(
            256, nn.Linear(256, 256), num_experts=4, ep_size=size, k=1, drop_tokens=False, use_rts=False, min_capacity=0
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.moe(self.dense(hidden))[0]
        return output


def _second_engine_without_a_grid() -> None:
    start()
    with PipelineParallelGrid("data=2,model=2") as grid:
        grid.check_samples = False  # only the ranks that exchange tokens matter here
        groups.create_expert_groups(grid, 2)
        first, *_ = deepspeed.initialize(model=Mixture(2), mpu=grid, config=settings())
        first(torch.randn(2, 256))
        with pytest.raises(ExpertGroupError, match=r"uses 'ep_size_2', the groups of Pipeline.*pass mpu=grid"):
            deepspeed.initialize(model=Mixture(2), config=settings())
        other, *_ = deepspeed.initialize(model=Mixture(4), config=settings())  # DeepSpeed's own groups
        assert dist.get_process_group_ranks(deepspeed_groups._get_expert_parallel_group("ep_size_4")) == [0, 1, 2, 3]
        other(torch.randn(2, 256))
        for engine in (first, other):
            engine.destroy()
    deepspeed_groups._EXPERT_PARALLEL_GROUP.clear()
    deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP.clear()


def test_engine_without_the_grid_cannot_use_its_expert_groups(world: Worlds) -> None:
    world(4).run(_second_engine_without_a_grid)


def _slices_of_two_grids() -> None:
    start()
    sliced, whole = PipelineParallelGrid("data=2,model=2"), PipelineParallelGrid("data=4")
    groups.create_expert_groups(sliced, 2, expert_tensor_parallel=True)
    degrees: list[int] = []

    class Model(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            degrees.append(deepspeed_groups._get_expert_model_parallel_world_size())
            return super().forward(inputs)

    engines = [
        deepspeed.initialize(model=Model(4, 4), mpu=grid, config=settings())[0] for grid in (sliced, whole, sliced)
    ]
    assert deepspeed_groups.mpu is sliced
    for engine in engines:
        engine.eval()
        engine(torch.ones(1, 4))
    assert degrees == [2, 1, 2]
    sliced.destroy()
    assert deepspeed_groups.mpu is None
    assert deepspeed_groups._get_expert_model_parallel_world_size() == 1
    whole.destroy()


def test_expert_slices_follow_the_current_mpu(world: Worlds) -> None:
    world(4).run(_slices_of_two_grids)


class OtherMpu:
    """An mpu that is not a grid."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def get_data_parallel_group(self) -> Any:
        return self.group

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_model_parallel_world_size(self) -> int:
        return 2

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self.group)

    def get_tensor_model_parallel_group(self) -> Any:
        return self.group


def _tokens_of_another_mpu() -> None:
    from deepspeed.moe import mappings

    start()
    with PipelineParallelGrid("data=1,model=2") as grid:
        groups.create_expert_groups(grid, 1)
        deepspeed_groups.mpu = grid
        assert mappings.gather_tokens(torch.ones(2, 3)).shape == (4, 3)
        deepspeed_groups.mpu = OtherMpu(dist.group.WORLD)
        with mock.patch.object(deepspeed.comm, "all_gather_into_tensor") as theirs:
            mappings.gather_tokens(torch.ones(2, 3))
        theirs.assert_called_once()
    deepspeed_groups.mpu = None


def test_tokens_of_another_mpu_are_gathered_by_deepspeed(world: Worlds) -> None:
    world(2).run(_tokens_of_another_mpu)


def _a_new_world() -> None:
    start()
    grid = PipelineParallelGrid("data=2")
    groups.create_expert_groups(grid, 2)
    dist.barrier()
    deepspeed.comm.destroy_process_group()
    store = dist.PrefixStore("again", dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, False))
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    with PipelineParallelGrid("data=2") as again:
        assert groups.create_expert_groups(again, 2).expert_ranks == [0, 1]
    assert groups._get_max_expert_size() is None


def test_a_new_world_has_no_expert_groups(world: Worlds) -> None:
    world(2).run(_a_new_world)


def _slices_of_another_mpu() -> None:
    start()
    other = OtherMpu(dist.group.WORLD)
    with PipelineParallelGrid("data=2") as grid:
        deepspeed.initialize(model=nn.Linear(4, 4), mpu=other, config=settings())
        deepspeed_groups.expert_tensor_parallel_world_size = 2  # as DeepSpeed does for sliced experts
        deepspeed.initialize(model=nn.Linear(4, 4), mpu=other, config=settings())
        on_grid, *_ = deepspeed.initialize(model=nn.Linear(4, 4), mpu=grid, config=settings())
        on_grid(torch.ones(1, 4))
        assert (deepspeed_groups.mpu, deepspeed_groups._get_expert_model_parallel_world_size()) == (other, 2)
    deepspeed_groups.mpu, deepspeed_groups.expert_tensor_parallel_world_size = None, 1


def test_engines_of_another_mpu_keep_its_expert_slices(world: Worlds) -> None:
    world(2).run(_slices_of_another_mpu)


class HashedByRank(dict[str, None]):
    """A set whose order differs between ranks, as that of texts between processes with other seeds of hashes."""

    def add(self, name: str) -> None:
        self[name] = None

    def __iter__(self) -> Any:
        return iter(sorted(self.keys(), reverse=dist.get_rank() == 1))


def _groups_of_optimizer(way: str) -> list[str]:
    start()
    with PipelineParallelGrid("data=2") as grid:
        grid.check_samples = False
        for size in (1, 2):
            groups.create_expert_groups(grid, size)
        module = nn.Sequential(Mixture(1), Mixture(2))
        given: dict[str, Any] = {"config": settings(zero_optimization={"stage": 1}, gradient_clipping=0.1)}
        with mock.patch.object(deepspeed_moe, "set", HashedByRank, create=True):
            if way != "config":
                dense = {"params": [*module.parameters()], "name": "dense", "lr": 0.1}
                parts = deepspeed_moe.split_params_into_different_moe_groups_for_optimizer(dense)
                given |= {"model_parameters": parts} if way == "groups" else {"optimizer": torch.optim.SGD(parts)}
            engine, *_ = deepspeed.initialize(model=module, mpu=grid, **given)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 256)).square().mean())
            engine.step()
        names = [group["name"] for group in engine.optimizer.param_groups]
        engine.destroy()
    return names


@pytest.mark.parametrize("way", ["optimizer", pytest.param("groups", marks=pytest.mark.exhaustive), "config"])
def test_groups_of_experts_have_one_order_on_all_ranks(world: Worlds, way: str) -> None:
    """DeepSpeed's function collects their names in a set; ranks with other orders would wait for each other."""
    assert [names[1:] for names in world(2).run(_groups_of_optimizer, way)] == [["ep_size_1", "ep_size_2"]] * 2
