"""``ds_topo.groups`` answers DeepSpeed's names for any topology."""

from __future__ import annotations

import deepspeed
import pytest
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups

from ds_topo import PipelineParallelGrid, ProcessTopology, groups
from ds_topo.errors import EngineOptionError, ExpertGroupError
from ds_topo.topology.rank_tables import ExpertPlan
from tests.support.fake_world import fake_world
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

STRIDED = "model=2,data=2,pipe=2"


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_source_ranks_and_group_ranks_on_every_rank(monkeypatch: pytest.MonkeyPatch, tensor_parallel: bool) -> None:
    plan = ExpertPlan(ProcessTopology.from_spec(STRIDED), 2, tensor_parallel)
    monkeypatch.setattr(deepspeed_groups, "dist", dist)
    for rank in range(8):
        with fake_world(rank, 8), PipelineParallelGrid(STRIDED) as grid:
            groups.create_expert_groups(grid, 2, tensor_parallel)
            monkeypatch.setattr(deepspeed_groups, "mpu", grid)
            assert groups.get_tensor_model_parallel_src_rank() == rank % 4
            assert deepspeed_groups.get_tensor_model_parallel_src_rank() == rank % 4
            assert groups._get_expert_parallel_src_rank("ep_size_2") == min(plan.expert_ranks(rank))
            assert groups._get_expert_parallel_rank("ep_size_2") == plan.expert_ranks(rank).index(rank)
            assert groups._get_expert_data_parallel_rank("ep_size_2") == plan.expert_data_ranks(rank).index(rank)
            assert groups._get_expert_broadcast_src_rank("ep_size_2") == min(plan.expert_data_ranks(rank))


def _second_partition() -> list[int]:
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=2,model=2") as grid:
        deepspeed_groups.mpu = grid
        with pytest.raises(EngineOptionError, match="zero_quantized_gradients"):
            groups._get_local_all_to_all_group()
        groups._create_zero_param_parallel_group(2)
        with pytest.raises(ExpertGroupError, match="already initialized"):
            groups._create_zero_param_parallel_group(2)
        ranks = dist.get_process_group_ranks(groups._get_zero_param_intra_parallel_group())
    assert groups._get_zero_param_intra_parallel_group() is None
    return ranks


def test_second_partition_groups_follow_the_grid(world: Worlds) -> None:
    assert world(4).run(_second_partition) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def _exchange() -> int:
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("seq=2,data=2") as grid:
        deepspeed_groups.mpu = grid
        return len(groups._get_local_all_to_all_group())


def test_all_to_all_groups_exist_on_a_grid_without_pipe_and_model(world: Worlds) -> None:
    assert all(exchange > 0 for exchange in world(4).run(_exchange))
