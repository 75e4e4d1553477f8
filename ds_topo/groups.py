"""Expert, parameter-partition and sequence groups: ``deepspeed.utils.groups`` for any topology.

Every name of ``deepspeed.utils.groups`` is found here. What DeepSpeed answers rightly is DeepSpeed's own function, on
DeepSpeed's own state; what it computes from ``rank // n`` is answered from the grid's topology or the group itself.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups

from .errors import ExpertGroupError, ExpertSizeError
from .expert_ranks import EXPERT, ExpertPlan, expert_parallel_ranks, zero_partition_ranks
from .grid import PipelineParallelGrid
from .integrations.engine_checks import check_exchange_between_all_ranks
from .integrations.experts import ExpertGroups, registry
from .process_groups import ProcessGroup
from .rank_groups import RankGroup

__all__ = ["ExpertGroups", "create_expert_groups", "create_zero_partition_groups"]


def create_expert_groups(
    grid: PipelineParallelGrid,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel: bool = False,
    use_data_before_expert: bool = False,
) -> ExpertGroups:
    """Create the expert groups of one size on all ranks, and let ``deepspeed.moe.layer.MoE`` find them.

    Collective over the grid; call it before ``deepspeed.initialize``, once for each ``ep_size`` in the model. A rank
    joins only the two groups that it belongs to. Repeating a call gives the same groups.

    Args:
        grid: the mpu of the engine (``module.mpu()`` of a ``PipelineModule``).
        expert_parallel_size: the layers' ``ep_size``; the degree of the axis ``expert`` by default.
        expert_tensor_parallel: the layers' ``enable_expert_tensor_parallelism``: experts are split along ``model``.
        use_data_before_expert: replicas of an expert, not the experts of a layer, sit on neighboring ranks.

    Raises:
        ExpertSizeError: a size that does not divide the ranks that share experts; the message lists those that do.
        ExpertGroupError: the name is taken by another grid's table, or the setting differs from other sizes'.
        DisagreementError: ranks asked for different groups, or did not ask.

    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    >>> with PipelineParallelGrid("data=4,pipe=2") as grid:
    ...     experts = create_expert_groups(grid, expert_parallel_size=2)
    ...     experts.expert_ranks, experts.expert_data_ranks, _get_max_expert_size()
    ([5, 7], [1, 5], 2)
    >>> dist.destroy_process_group()
    """
    failure: Exception | None = None
    try:
        if expert_parallel_size is None:
            expert_parallel_size = _size_of_expert_axis(grid)
        plan = ExpertPlan(grid.topology(), expert_parallel_size, expert_tensor_parallel, use_data_before_expert)
        registry.check(grid, plan)
    except (ExpertSizeError, ExpertGroupError) as error:
        failure, plan = error, ExpertPlan(grid.topology(), 1)
    known = registry.find(plan.name)
    names = ("experts", "expert data")
    ranks = (plan.expert_ranks(grid.grid_rank), plan.expert_data_ranks(grid.grid_rank))
    groups = grid.create_groups(
        f"{plan}",
        [
            RankGroup((kind, plan.name, str(plan)), grid.to_global(members))
            for kind, members in zip(names, ranks, strict=True)
        ],
        failure,
    )
    if known is not None:
        return known
    created = ExpertGroups(grid, plan, *groups)
    registry.add(created)
    return created


def create_zero_partition_groups(grid: PipelineParallelGrid, size: int) -> ProcessGroup:
    """Create the groups of ZeRO++'s second partition (hpZ) inside the data parallel groups, for DeepSpeed to find.

    Collective over the grid; call it before ``deepspeed.initialize`` with the config's ``zero_hpz_partition_size``. It
    is for all ZeRO-3 engines until the grid is destroyed.

    Raises:
        ExpertSizeError: a size that does not divide the data parallel group; the message lists those that do.
        RuntimeError: there are such groups already.
        DisagreementError: ranks asked for different sizes, or did not ask.
    """
    failure: Exception | None = None
    ranks: list[int] = []
    try:
        ranks = zero_partition_ranks(grid.topology(), size, grid.grid_rank)
        if deepspeed_groups._get_zero_param_intra_parallel_group() is not None:
            raise ExpertGroupError(
                "ZeRO parameter intra parallel group is already initialized: destroy its grid before creating another"
            )
    except (ExpertSizeError, ExpertGroupError) as error:
        failure = error
    name = f"hpZ {size}"
    (group,) = grid.create_groups(name, [RankGroup((name,), grid.to_global(ranks))], failure)
    binding = mock.patch.object(deepspeed_groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", group)
    binding.start()
    grid.on_destroy(binding.stop)
    return group


# -- DeepSpeed's names, where its own answer assumes an order ---------------------------------------------------------


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, *args: Any, use_data_before_expert_parallel_: bool = False, **options: Any
) -> None:
    """Expert groups whose experts are not tensor parallel, on the current mpu's grid (DeepSpeed's own without one)."""
    grid = _current_grid()
    if grid is None:
        deepspeed_groups._create_expert_and_data_parallel(
            expert_parallel_size_,
            *args,
            use_data_before_expert_parallel_=use_data_before_expert_parallel_,
            **options,
        )
    else:
        create_expert_groups(grid, expert_parallel_size_, False, use_data_before_expert_parallel_)


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """Expert groups of tensor-parallel experts on a grid (DeepSpeed's own on another mpu)."""
    if isinstance(mpu, PipelineParallelGrid):
        create_expert_groups(mpu, expert_parallel_size_, True, use_data_before_expert_parallel_)
    else:
        deepspeed_groups._create_expert_data_and_model_parallel(
            expert_parallel_size_, mpu, use_data_before_expert_parallel_
        )


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """DeepSpeed's tables for its own order, pipe x data x model; ``ExpertPlan`` has them for any."""
    return expert_parallel_ranks(
        world_size,
        tensor_parallel_size_,
        expert_parallel_size_,
        pipeline_parallel_size_,
        use_data_before_expert_parallel_,
    )


def _get_max_expert_size() -> int | None:
    """The largest expert parallel size for which there are groups, or None."""
    groups = deepspeed_groups._get_expert_parallel_group_dict().values()
    return max((dist.get_world_size(group) for group in groups), default=None)


def _get_expert_parallel_src_rank(group_name: str) -> int:
    """The first global rank of the expert parallel group."""
    return min(dist.get_process_group_ranks(deepspeed_groups._get_expert_parallel_group(group_name)))


def get_tensor_model_parallel_src_rank() -> int:
    """The first global rank of the tensor model parallel group: the current mpu's, or what DeepSpeed created."""
    grid = _current_grid()
    if grid is not None:
        return grid.get_tensor_model_parallel_src_rank()
    return min(dist.get_process_group_ranks(deepspeed_groups.get_tensor_model_parallel_group()))


def _create_zero_param_parallel_group(group_size: int) -> None:
    """hpZ groups on the current mpu's grid (DeepSpeed's own without one)."""
    grid = _current_grid()
    if grid is None:
        deepspeed_groups._create_zero_param_parallel_group(group_size)
    else:
        create_zero_partition_groups(grid, min(group_size, len(grid.dp_group)))


def _zero_param_parallel_is_initialized() -> bool:
    """Whether there are hpZ groups (DeepSpeed's own answers None for yes)."""
    return deepspeed_groups._get_zero_param_intra_parallel_group() is not None


def _get_local_all_to_all_group() -> dict[str, ProcessGroup]:
    """Groups of quantized gradients (qgZ), which DeepSpeed lays over all ranks of the job.

    Raises:
        EngineOptionError: a grid with ``pipe`` or ``model``: gradients of different parameters would be mixed.
    """
    grid = _current_grid()
    if grid is not None:
        check_exchange_between_all_ranks("zero_quantized_gradients", grid)
    groups: dict[str, ProcessGroup] = deepspeed_groups._get_local_all_to_all_group()
    return groups


def _current_grid() -> PipelineParallelGrid | None:
    return deepspeed_groups.mpu if isinstance(deepspeed_groups.mpu, PipelineParallelGrid) else None


def _size_of_expert_axis(grid: PipelineParallelGrid) -> int:
    if EXPERT not in grid.topology().axes:
        raise ExpertSizeError(
            f"expert_parallel_size is not given and {grid.topology().spec!r} has no axis {EXPERT!r}: give one of them"
        )
    return grid.get_axis_size(EXPERT)


def __getattr__(name: str) -> Any:
    """Everything else is DeepSpeed's own, state included."""
    try:
        return getattr(deepspeed_groups, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(deepspeed_groups)})
