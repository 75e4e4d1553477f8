"""Create the expert groups of a grid, and the groups of ZeRO++'s second partition."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.base import patches
from ds_topo.base.ledger import around, ledger
from ds_topo.errors import ExpertGroupError, ExpertSizeError
from ds_topo.launch.launchers import REFERENCE
from ds_topo.mpu import ExpertGroups, MpuGrid, registry, require_grid
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.axes import EXPERT
from ds_topo.topology.rank_tables import ExpertPlan, RankGroup, zero_partition_ranks


def create_expert_groups(
    grid: MpuGrid,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel: bool = False,
    use_data_before_expert: bool = False,
) -> ExpertGroups:
    """Create the expert groups of one size on all ranks, and register them for ``deepspeed.moe.layer.MoE``.

    Collective over the grid; call it before ``deepspeed.initialize``, once for each ``ep_size`` in the model. A rank
    joins only the two groups that it belongs to. Repeating a call gives the same groups.

    Args:
        grid: the mpu of the engine (``module.mpu()`` of a ``PipelineModule``).
        expert_parallel_size: the layers' ``ep_size``; the degree of the axis ``expert`` by default.
        expert_tensor_parallel: the layers' ``enable_expert_tensor_parallelism``: experts are split along ``model``.
        use_data_before_expert: place the replicas of an expert, not the experts of a layer, on neighboring ranks.

    Raises:
        TypeError: ``grid`` is not a grid.
        ExpertSizeError: the size does not divide the number of ranks that share experts; the message lists valid sizes.
        ExpertGroupError: another grid has groups of that name, or ``expert_tensor_parallel`` differs between sizes.
        DisagreementError: ranks asked for different groups, or a rank did not call the function.

    >>> import torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    >>> from ds_topo import PipelineParallelGrid
    >>> with PipelineParallelGrid("data=4,pipe=2") as grid:
    ...     experts = create_expert_groups(grid, expert_parallel_size=2)
    ...     experts.expert_ranks, experts.expert_data_ranks
    ([5, 7], [1, 5])
    >>> dist.destroy_process_group()
    """
    require_grid(grid)
    failure: Exception | None = None
    registry.forget_former_worlds()
    try:
        if REFERENCE in os.environ:  # each process of a reference has all experts
            expert_parallel_size = 1
        elif expert_parallel_size is None:
            if EXPERT not in grid.topology().axes:
                raise ExpertSizeError(
                    f"expert_parallel_size is not given and {grid.topology().spec!r} has no axis {EXPERT!r}: give one "
                    "of both"
                )
            expert_parallel_size = grid.get_axis_size(EXPERT)
        plan = ExpertPlan(grid.topology(), expert_parallel_size, expert_tensor_parallel, use_data_before_expert)
        registry.check(grid, plan)
    except Exception as error:  # of any kind, because the other ranks must raise, too
        failure, plan = error, ExpertPlan(grid.topology(), 1)
    known = registry.find(plan.name)
    own = {
        "experts": plan.expert_ranks(grid.grid_rank),
        "expert data": plan.expert_data_ranks(grid.grid_rank),
    }
    wanted = [RankGroup((kind, plan.name, str(plan)), grid.to_global(ranks)) for kind, ranks in own.items()]
    groups = grid.create_groups(f"{plan}", wanted, failure)
    if known is not None:
        return known
    created = ExpertGroups(grid, plan, *groups)
    registry.add(created, ledger.bind(patches.GATHER_TOKENS, _gathered_into_a_list))
    return created


def create_zero_partition_groups(grid: MpuGrid, size: int) -> ProcessGroup:
    """Create the groups of ZeRO++'s second partition (hpZ) inside the data parallel groups, and register them.

    Collective over the grid; call it before ``deepspeed.initialize`` with the config's ``zero_hpz_partition_size``. All
    ZeRO-3 engines use the groups until the grid is destroyed.

    Raises:
        TypeError: ``grid`` is not a grid.
        ExpertSizeError: the size does not divide the data parallel group; the message lists valid sizes.
        RuntimeError: such groups exist already.
        DisagreementError: ranks asked for different sizes, or a rank did not call the function.
    """
    require_grid(grid)
    failure: Exception | None = None
    ranks: list[int] = []
    try:
        ranks = zero_partition_ranks(grid.topology(), size, grid.grid_rank)
        if deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is not None:
            raise ExpertGroupError(
                "the ZeRO parameter intra parallel group is already initialized, and a process has only one: "
                "destroy its grid first"
            )
    except Exception as error:
        failure = error
    name = f"hpZ {size}"
    (group,) = grid.create_groups(name, [RankGroup((name,), grid.to_global(ranks))], failure)
    deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group
    grid.on_destroy(partial(_forget_zero_partition, group))
    return group


def _forget_zero_partition(group: ProcessGroup) -> None:
    if deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is group:
        deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


@around
def _gathered_into_a_list(gather: Any, tokens: torch.Tensor, dim: int = 0) -> torch.Tensor:
    if not isinstance(deepspeed_groups.mpu, MpuGrid):
        others: torch.Tensor = gather(tokens, dim)
        return others
    group = deepspeed_groups.mpu.get_slice_parallel_group()
    like = torch.contiguous_format
    parts = [torch.empty_like(tokens, memory_format=like) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tokens.contiguous(), group=group)
    return torch.cat(parts, dim=dim)
