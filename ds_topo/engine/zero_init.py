"""Parameters that are partitioned while a model is built (ZeRO 3), on the grid in use.

``deepspeed.zero.Init`` and ``GatheredParameters`` take all ranks for replicas of one model, as ``from_pretrained()``
does when it fills parameters on rank 0 alone.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from ds_topo.engine import changes
from ds_topo.engine.frameworks import with_samples_of
from ds_topo.engine.one_layout import grid_in_use
from ds_topo.ledger import Change, Make
from ds_topo.topology.axes import MODEL, PIPE

_GROUPS = ("data_parallel_group", "sequence_data_parallel_group")
_CONFIGS = {"config_dict_or_path", "config"}


def _partitioned_over_replicas(construct: Any) -> Any:
    signature = inspect.signature(construct)

    @wraps(construct)
    def over_replicas(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options)
        grid = grid_in_use()
        if grid is not None and not any(given.arguments.get(name) for name in _GROUPS):
            given.arguments["data_parallel_group"] = grid.get_data_parallel_group()
            if given.arguments.get("mpu") is None:
                given.arguments["mpu"] = grid
            for name in _CONFIGS & given.arguments.keys():
                given.arguments[name] = with_samples_of(grid, given.arguments[name])
        construct(*given.args, **given.kwargs)

    return over_replicas


def _with_modifier_kept(construct: Any) -> Any:
    signature = inspect.signature(construct)

    @wraps(construct)
    def keep(context: Any, *args: Any, **options: Any) -> None:
        given = signature.bind(context, *args, **options)
        construct(context, *args, **options)
        context.ds_topo_modifier_rank = given.arguments.get("modifier_rank")

    return keep


def _modified_by_one(end: Any) -> Any:
    @wraps(end)
    def send_to_slices(context: Any, *exception: Any) -> Any:
        grid, rank = grid_in_use(), getattr(context, "ds_topo_modifier_rank", None)
        if context.enabled and grid is not None and rank is not None and grid.get_axis_size(MODEL) > 1:
            replicas = grid.get_data_parallel_group()
            group = grid.get_group([axis for axis in grid.topology().axes if axis != PIPE])
            for parameter in context.params:
                if parameter.ds_process_group == replicas and not _is_of_one_slice(parameter):
                    dist.broadcast(parameter.data.view(torch.uint8), dist.get_global_rank(group, rank), group=group)
        return end(context, *exception)

    return send_to_slices


def _is_of_one_slice(parameter: torch.Tensor) -> bool:
    """Whether the other slices may hold something else, by the marks of Megatron and DeepSpeed."""
    if hasattr(parameter, "_z3_optimizer"):  # an engine's already: it is read, to save it, and nobody fills it
        return True
    marks = ("tensor_model_parallel", "model_parallel")
    return any(getattr(parameter, mark, False) for mark in marks) or not getattr(parameter, "allreduce", True)


WHILE_A_GRID_IS_IN_USE: tuple[tuple[Change, Make], ...] = (
    (changes.ZERO_INIT, _partitioned_over_replicas),
    (changes.MODIFIED, _with_modifier_kept),
    (changes.MODIFIED_BY_ONE, _modified_by_one),
)
