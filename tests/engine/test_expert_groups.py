"""Expert groups are registered with DeepSpeed once and removed again; errors name the remedy."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe import mappings
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups as deepspeed_groups

from ds_topo import PipelineParallelGrid, groups
from ds_topo.engine.experts import _saving_by_slice
from ds_topo.errors import ExpertGroupError, ExpertSizeError
from ds_topo.launch.launchers import REFERENCE
from tests.support.fake_world import fake_world

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

STRIDED = "model=2,data=2,pipe=2"


def test_destroy_restores_every_binding() -> None:
    def state() -> list[dict[str, Any]]:
        owners: list[ModuleType | type] = [deepspeed_groups, mappings]
        return [
            {name: dict(value) if isinstance(value, dict) else value for name, value in vars(o).items()} for o in owners
        ]

    before = state()
    with fake_world(5, 8):
        grid = PipelineParallelGrid(STRIDED)
        without_experts = state()
        first, second = groups.create_expert_groups(grid, 2), groups.create_expert_groups(grid, 4)
        assert groups.create_expert_groups(grid, 2) is first
        bound = state()
        assert all(now != then for now, then in zip(bound, without_experts, strict=True))
        second.destroy()
        assert list(deepspeed_groups._EXPERT_PARALLEL_GROUP) == ["ep_size_2"]
        assert mappings._gather_tokens is bound[1]["_gather_tokens"]
        first.destroy()
        assert state() == without_experts
        groups.create_expert_groups(grid, 1, expert_tensor_parallel=True)
        grid.destroy()
        assert state() == before


def test_second_setting_of_the_same_name_is_refused() -> None:
    with fake_world(0, 8):
        with PipelineParallelGrid("data=8") as grid, PipelineParallelGrid("data=4,model=2") as other:
            groups.create_expert_groups(grid, 2)
            with pytest.raises(ExpertGroupError, match=r"'ep_size_2' are already registered.*destroy"):
                groups.create_expert_groups(other, 2)
            with pytest.raises(ExpertGroupError, match="'ep_size_2' are already registered"):
                groups.create_expert_groups(grid, 2, use_data_before_expert=True)
            with pytest.raises(ExpertGroupError, match=r"True for 'ep_size_4', but False for 'ep_size_2'.*choose one"):
                groups.create_expert_groups(grid, 4, expert_tensor_parallel=True)
            with pytest.raises(ExpertSizeError, match=r"has no axis 'expert'"):
                groups.create_expert_groups(grid)
        with PipelineParallelGrid("data=4,model=2") as grid:
            assert groups.create_expert_groups(grid, 2, expert_tensor_parallel=True).expert_ranks == [0, 2]


def test_moe_layer_finds_created_groups() -> None:
    with fake_world(0, 8), PipelineParallelGrid("data=4,pipe=2") as grid:
        created = groups.create_expert_groups(grid, 2)
        layer = MoE(4, torch.nn.Linear(4, 4), num_experts=4, ep_size=2)
        layer.set_deepspeed_parallelism()
        assert layer.deepspeed_moe.ep_group is created.expert_group
        with pytest.raises(AssertionError, match=r"experts \(3\) should be divisible by expert parallel size \(2\)"):
            MoE(4, torch.nn.Linear(4, 4), num_experts=3, ep_size=2)


def test_groups_that_deepspeed_created_before_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(0, 8), PipelineParallelGrid("data=8") as grid:
        monkeypatch.setitem(deepspeed_groups._EXPERT_PARALLEL_GROUP, "ep_size_2", dist.group.WORLD)
        with pytest.raises(ExpertGroupError, match="already created its own groups 'ep_size_2'"):
            groups.create_expert_groups(grid, 2)


def test_sizes_that_optimizer_files_cannot_express_are_refused() -> None:
    with fake_world(0, 6), PipelineParallelGrid("data=6") as grid:
        for size in (1, 2, 3):
            groups.create_expert_groups(grid, size)
        engine: Any = SimpleNamespace(mpu=grid, zero_optimization=lambda: False)
        with pytest.raises(ExpertGroupError, match=r"sizes \[2\] do not divide the greatest, 3.*ZeRO stage 1"):
            _saving_by_slice(engine).__enter__()
        engine._config = SimpleNamespace(expert_parallel_config=SimpleNamespace(enabled=False))
        engine.zero_optimization = lambda: True
        with _saving_by_slice(engine):
            pass  # each partition has a file of its own
    with fake_world(0, 6), PipelineParallelGrid("data=6") as grid:
        for size in (1, 3):
            groups.create_expert_groups(grid, size)
        engine.mpu, engine.zero_optimization = grid, lambda: False
        with _saving_by_slice(engine):
            pass


@pytest.mark.parametrize(
    ("rank", "slices", "is_zero_3", "is_silent"),
    [
        (2, 2, False, True),
        (1, 2, False, False),  # the first replica on slice 1 writes
        (2, 1, False, False),  # without AutoTP, DeepSpeed chooses the writer
        (2, 2, True, False),  # each rank writes its partition
    ],
)
def test_one_replica_of_folded_experts_writes_them(rank: int, slices: int, is_zero_3: bool, is_silent: bool) -> None:
    engine: Any = SimpleNamespace(
        _config=SimpleNamespace(expert_parallel_config=SimpleNamespace(enabled=True, autoep_size=1)),
        zero_optimization=lambda: True,
        autotp_size=lambda: slices,
        zero_optimization_partition_weights=lambda: is_zero_3,
    )
    stock = deepspeed_groups._get_data_parallel_rank
    with fake_world(rank, 4), PipelineParallelGrid("data=2,model=2") as grid:
        with _saving_by_slice(engine):  # AutoEP has not created groups
            assert deepspeed_groups._get_data_parallel_rank is stock
        groups.create_expert_groups(grid, 1)
        with _saving_by_slice(engine):
            assert (deepspeed_groups._get_data_parallel_rank is not stock) == is_silent
            assert not is_silent or deepspeed_groups._get_data_parallel_rank() == 4


def test_a_rank_joins_only_its_own_groups() -> None:
    """Two calls among 16,384 ranks, for which DeepSpeed makes every rank call ``new_group`` 2,176 times."""
    for rank in (0, 9_999):
        with fake_world(rank, 16_384), PipelineParallelGrid("pipe=16,data=256,model=4") as grid:
            with mock.patch.object(dist, "new_group", wraps=dist.new_group) as ours:
                groups.create_expert_groups(grid, 8)
            assert [rank in call.args[0] for call in ours.call_args_list] == [True, True]


def test_each_process_of_a_reference_has_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REFERENCE, "1")
    with fake_world(0, 4), PipelineParallelGrid("data=4") as grid:
        created = groups.create_expert_groups(grid, 4)
        assert (created.expert_ranks, created.expert_data_ranks) == ([0], [0, 1, 2, 3])


def test_destroyed_grid_forgets_its_groups_of_the_second_partition() -> None:
    with fake_world(0, 4):
        with PipelineParallelGrid("data=4") as grid:
            created = groups.create_zero_partition_groups(grid, 2)
            assert deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is created
        assert deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is None
