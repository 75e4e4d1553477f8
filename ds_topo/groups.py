"""Answer for expert, parameter-partition and sequence groups: ``deepspeed.utils.groups`` for any topology.

Every name of ``deepspeed.utils.groups`` exists here. Where DeepSpeed's answer is right for any topology, the name is
DeepSpeed's own function on DeepSpeed's own state. The functions below replace those that compute ranks from
``rank // n``: they answer from the grid's topology, or from the group itself.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine.config_options import different_parameters
from ds_topo.engine.current_mpu import get_tensor_model_parallel_src_rank
from ds_topo.engine.expert_groups import create_expert_groups, create_zero_partition_groups
from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.errors import EngineOptionError, ExpertSizeError
from ds_topo.mpu import ExpertGroups
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology import ProcessTopology
from ds_topo.topology.rank_tables import ExpertPlan

__all__ = [
    "ExpertGroups",
    "create_expert_groups",
    "create_zero_partition_groups",
    "get_tensor_model_parallel_src_rank",
]


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, *args: Any, use_data_before_expert_parallel_: bool = False, **options: Any
) -> None:
    """Create groups of experts without tensor parallelism on the current mpu's grid; DeepSpeed's own without a grid."""
    grid = _current_grid()
    if grid is None:
        options["use_data_before_expert_parallel_"] = use_data_before_expert_parallel_
        deepspeed_groups._create_expert_and_data_parallel(expert_parallel_size_, *args, **options)
    else:
        create_expert_groups(grid, expert_parallel_size_, False, use_data_before_expert_parallel_)


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: object, use_data_before_expert_parallel_: bool = False
) -> None:
    """Create groups of tensor-parallel experts on a grid; DeepSpeed's own on another mpu."""
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
    """Return the tables of tensor-parallel experts in DeepSpeed's order, pipe x data x model.

    ``ExpertPlan`` has them for any order.

    >>> _get_expert_parallel_ranks(world_size=8, tensor_parallel_size_=2, expert_parallel_size_=2)
    ([[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]])
    """
    model_parallel_size = tensor_parallel_size_ * pipeline_parallel_size_
    if min(world_size, model_parallel_size) < 1 or world_size % model_parallel_size:
        raise ExpertSizeError(
            f"{tensor_parallel_size_} slices x {pipeline_parallel_size_} stages do not divide {world_size} ranks"
        )
    degrees = [pipeline_parallel_size_, world_size // model_parallel_size, tensor_parallel_size_]
    topology = ProcessTopology(["pipe", "data", "model"], degrees)
    plan = ExpertPlan(topology, expert_parallel_size_, True, use_data_before_expert_parallel_)
    return plan.expert_tables(), plan.expert_data_tables()


def _get_expert_parallel_src_rank(group_name: str) -> int:
    """Return the first global rank of the expert parallel group."""
    return min(dist.get_process_group_ranks(deepspeed_groups._EXPERT_PARALLEL_GROUP[group_name]))


def _create_zero_param_parallel_group(group_size: int) -> None:
    """Create hpZ groups on the current mpu's grid; DeepSpeed's own without a grid."""
    grid = _current_grid()
    if grid is None:
        deepspeed_groups._create_zero_param_parallel_group(group_size)
    else:
        create_zero_partition_groups(grid, min(group_size, len(grid.dp_group)))


def _zero_param_parallel_is_initialized() -> bool:
    """Return whether there are hpZ groups. (DeepSpeed's own function returns None if there are.)"""
    return deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is not None


def _get_local_all_to_all_group() -> dict[str, ProcessGroup]:
    """Return the groups for quantized gradients (qgZ), which DeepSpeed lays over all ranks of the job.

    Raises:
        EngineOptionError: the grid has a ``pipe`` or ``model`` axis, which would mix gradients of different parameters.
    """
    grid = _current_grid()
    if grid is not None:
        for problem in different_parameters("zero_quantized_gradients", grid):
            raise EngineOptionError(problem)
    groups: dict[str, ProcessGroup] = deepspeed_groups._get_local_all_to_all_group()
    return groups


def _current_grid() -> PipelineParallelGrid | None:
    return deepspeed_groups.mpu if isinstance(deepspeed_groups.mpu, PipelineParallelGrid) else None


def __getattr__(name: str) -> Any:
    """Return DeepSpeed's own attribute for every other name, state included."""
    try:
        return getattr(deepspeed_groups, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(deepspeed_groups)})
