"""The norm of gradients on a grid: what each rank counts, against the norm of the whole model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_topo import PipelineParallelGrid, groups, mark_tensor_parallel_gradients
from ds_topo.engine import norms
from tests.support.world import Worlds


def parameter(value: float, **marks: Any) -> nn.Parameter:
    """Four elements whose gradient has the given norm."""
    made = nn.Parameter(torch.zeros(4))
    made.grad = torch.full((4,), value / 2)
    for name, mark in marks.items():
        setattr(made, name, mark)
    return made


def _parameters(grid: PipelineParallelGrid, name: str, sliced: bool) -> list[nn.Parameter]:
    """Replicated, sharded, tied and expert parameters; gradients of replicas are equal, others have their own value."""
    stage, slice_rank = grid.get_stage_id(), grid.get_slice_parallel_rank()
    place = dist.get_rank(groups._get_expert_parallel_group(name))
    expert = {"allreduce": False, "group_name": name}
    shard = {"tensor_model_parallel": True}
    made = [
        parameter(1.0 + stage),
        parameter(3.0 + 2 * stage + slice_rank, **shard),
        parameter(50.0, ds_pipe_replicated=stage > 0),
        parameter(10.0 + 4 * stage + 2 * place + (slice_rank if sliced else 0), **expert, **(shard if sliced else {})),
    ]
    if sliced:  # a bias that slices replicate
        made.append(parameter(20.0 + 2 * stage + place, **expert, tensor_model_parallel=False))
    if grid.pipe_parallel_size == 1:
        made[2].ds_pipe_replicated = False  # type: ignore[attr-defined]
    return made


def _expected(stages: int, slices: int, places: int, sliced: bool) -> float:
    total = 50.0**2
    for stage in range(stages):
        total += (1.0 + stage) ** 2
        total += sum((3.0 + 2 * stage + slice_rank) ** 2 for slice_rank in range(slices))
        for place in range(places):
            if sliced:
                total += sum((10.0 + 4 * stage + 2 * place + slice_rank) ** 2 for slice_rank in range(slices))
                total += (20.0 + 2 * stage + place) ** 2
            else:
                total += (10.0 + 4 * stage + 2 * place) ** 2
    return float(total**0.5)


def _norm(topology: str, size: int, sliced: bool, partitioned: bool) -> None:
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid(topology) as grid:
        name = groups.create_expert_groups(grid, size, sliced).plan.name
        made = _parameters(grid, name, sliced)
        if grid.pipe_parallel_size > 1:
            norms.count_each_parameter_once(nn.ParameterList(made[:3]), grid)
        expected = _expected(grid.pipe_parallel_size, grid.slice_parallel_size, size, sliced)
        if not partitioned:
            norm = norms.clip_gradients(made, expected / 4, grid)
            assert float(norm) == pytest.approx(expected, rel=1e-6)
            assert float(made[1].grad.norm()) == pytest.approx(
                float(3.0 + 2 * grid.stage_id + grid.get_axis_rank("model")) / 4, rel=1e-5
            )
            return
        own = [
            index
            for index, p in enumerate(made)
            if index % len(_replicas(p, grid)) == _replicas(p, grid).index(grid.global_rank)
        ]
        optimizer = SimpleNamespace(
            cpu_offload=False,
            device=torch.device("cpu"),
            params_in_partition=[[made[index] for index in own]],
            averaged_gradients={0: [made[index].grad for index in own]},
        )
        assert float(norms.zero_gradient_norm(optimizer, grid)) == pytest.approx(expected, rel=1e-6)
        made[0].grad[0] = torch.inf
        assert float(norms.zero_gradient_norm(optimizer, grid)) == -1


def _replicas(p: nn.Parameter, grid: PipelineParallelGrid) -> list[int]:
    """The ranks between which ZeRO deals a parameter."""
    if getattr(p, "allreduce", True):
        return grid.dp_group
    return list(dist.get_process_group_ranks(groups._get_expert_data_parallel_group(p.group_name)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize(
    ("topology", "size", "sliced"),
    [
        ("data=2,model=2", 2, True),
        ("model=2,data=2", 1, True),
        ("data=2,model=2", 4, False),
        ("model=2,data=2", 2, False),
        ("pipe=2,data=2", 2, False),
        ("data=2,pipe=2", 1, False),
    ],
)
def test_every_parameter_counts_once(world: Worlds, topology: str, size: int, sliced: bool, partitioned: bool) -> None:
    world(4).run(_norm, topology, size, sliced, partitioned)


def test_marks_for_another_mpu_are_taken_back() -> None:
    module = nn.Linear(3, 3)
    module.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    remove = mark_tensor_parallel_gradients(module)
    module(torch.ones(1, 3)).sum().backward()
    assert module.weight.grad.model_parallel
    assert not hasattr(module.bias.grad, "model_parallel")
    remove()
    module.zero_grad()
    module(torch.ones(1, 3)).sum().backward()
    assert not hasattr(module.weight.grad, "model_parallel")
