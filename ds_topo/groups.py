"""Expert, parameter-partition and sequence groups: ``deepspeed.utils.groups`` for any topology.

Every name of ``deepspeed.utils.groups`` is found here. What DeepSpeed answers rightly is DeepSpeed's own function, on
DeepSpeed's own state; what it computes from ``rank // n`` is answered from the grid's topology or the group itself.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine.expert_groups import create_expert_groups, create_zero_partition_groups
from ds_topo.engine.expert_registry import ExpertGroups
from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.engine.options import check_exchange_between_all_ranks
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.expert_tables import expert_parallel_ranks

__all__ = ["ExpertGroups", "create_expert_groups", "create_zero_partition_groups"]


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
    expert_parallel_size_: int, mpu: object, use_data_before_expert_parallel_: bool = False
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


def __getattr__(name: str) -> Any:
    """Everything else is DeepSpeed's own, state included."""
    try:
        return getattr(deepspeed_groups, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(deepspeed_groups)})
