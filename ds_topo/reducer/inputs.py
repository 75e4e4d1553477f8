"""What a reducer is built from: a group, options and parameters, the same on all of its ranks."""

from __future__ import annotations

import warnings
from typing import Protocol, cast

import torch.distributed as dist
from torch import nn

from ds_topo.errors import abridged
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.options import ReductionArguments, ReductionOptions
from ds_topo.reducer.parameter_state import ParameterState
from ds_topo.reducer.parameters import agree_on_parameters, find_parameters


class HasDataParallelGroup(Protocol):
    """A grid, or any mpu."""

    def get_data_parallel_group(self) -> ProcessGroup:
        """All replicas of a parameter."""
        ...


def agreed_inputs(
    module: nn.Module, arguments: ReductionArguments, group: ProcessGroup, may_be_empty: bool
) -> tuple[ReductionOptions, list[ParameterState]]:
    """Options and parameters, compared between ranks; a rank that fails tells the others. Collective over the group.

    Raises:
        TypeError, ValueError, RuntimeError: options that cannot be, or parameters that cannot be served.
        DisagreementError: parameters or options differ, or another rank failed.
    """
    failure: Exception | None = None
    options, states = ReductionOptions(), []
    try:
        options = ReductionOptions(**_with_former_names(arguments))
        states = find_parameters(module, options, may_be_empty)
    except (TypeError, ValueError, RuntimeError) as error:
        failure = error
    agree_on_parameters(states, options, group, failure)
    return options, states


def _with_former_names(arguments: ReductionArguments) -> ReductionArguments:
    """``grad_buffers`` was called ``storage``."""
    if "storage" in arguments:
        warnings.warn("storage= is now grad_buffers=", DeprecationWarning, stacklevel=4)
        renamed = dict(arguments)
        renamed["grad_buffers"] = renamed.pop("storage")
        return cast("ReductionArguments", renamed)
    return arguments


def data_parallel_group(grid: HasDataParallelGroup | None, process_group: ProcessGroup | None) -> ProcessGroup:
    """The group of a grid, a group, or all ranks of the job.

    Raises:
        ValueError: both, or a group without this rank.
        TypeError: something else.
    """
    if grid is not None and process_group is not None:
        raise ValueError("grid and process_group: give one of them")
    if grid is not None and not hasattr(grid, "get_data_parallel_group"):
        raise TypeError(
            f"grid={abridged(grid)}: give a grid or another mpu, which has get_data_parallel_group(), such as "
            "PipelineParallelGrid('data=2,model=2')"
        )
    if process_group is not None and not isinstance(process_group, ProcessGroup):
        raise TypeError(f"process_group={abridged(process_group)}: give a torch.distributed process group, or a grid")
    group = grid.get_data_parallel_group() if grid is not None else process_group or _all_ranks()
    if dist.get_rank() not in dist.get_process_group_ranks(group):
        raise ValueError(f"process_group: rank {dist.get_rank()} is not one of its ranks")
    return group


def _all_ranks() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
