"""Provide the eleven functions of ``torchshard.distributed``: model-parallel communication without handling groups.

Use it on top of ``torch.distributed``, or on a grid, whose ``model`` group it then uses. It has one group per process;
``ds_topo.collectives`` has the same operations, and more, for any group.

It differs from torchshard where torchshard's documentation and code disagree. ``get_rank`` and ``get_world_size`` refer
to this process's model-parallel group. (torchshard compares the size of the world before it reduces over a group.) The
collectives return tensors, and no backward pass changes a caller's tensor. Functions that need the group raise
RuntimeError before ``init_process_group``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ds_topo import collectives
from ds_topo.base.torch_names import job_timeout
from ds_topo.launch.council import agree
from ds_topo.process_groups.creation import ProcessGroup, ProcessGroups, require_initialized
from ds_topo.process_groups.process_grid import ProcessGrid
from ds_topo.topology.axes import MODEL, divisors
from ds_topo.topology.rank_tables import RankGroup

__all__ = [
    "copy",
    "destroy_process_group",
    "gather",
    "get_group",
    "get_group_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "reduce",
    "scatter",
]


class _ModelParallel:
    """The model-parallel group of this process: from groups made here, or from a grid."""

    own: ProcessGroups | None = None
    grid: ProcessGrid | None = None


_model_parallel = _ModelParallel()


def is_initialized() -> bool:
    """Return whether ``init_process_group`` has been called.

    >>> is_initialized()
    False
    """
    return _model_parallel.own is not None or _model_parallel.grid is not None


def init_process_group(group_size: int = -1, *, grid: ProcessGrid | None = None) -> None:
    """Join this process with ``group_size`` adjacent ranks, itself included, into a model-parallel group.

    Collective: all processes of the job must call it, with the same size.

    Args:
        group_size: the number of ranks per group, which must divide the number of processes; -1: one group of all.
        grid: use this grid's ``model`` groups instead, whatever the order of its axes. The grid keeps owning them.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, or this function was called before.
        ValueError: the size does not divide the number of processes, or a size is given together with a grid.
        DisagreementError: the ranks give different sizes, or some rank does not call this function.

    >>> import torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    >>> init_process_group(group_size=2)
    >>> dist.get_process_group_ranks(get_group()), get_rank(), get_world_size(), get_group_size()
    ([4, 5], 1, 2, 2)
    >>> init_process_group(group_size=3)
    Traceback (most recent call last):
    RuntimeError: init_process_group: already initialised with groups of 2 ranks; call destroy_process_group() first
    >>> destroy_process_group()
    >>> dist.destroy_process_group()
    """
    require_initialized("ds_topo.distributed.init_process_group")
    if is_initialized():
        raise RuntimeError(
            f"init_process_group: already initialised with groups of {get_group_size()} ranks; "
            "call destroy_process_group() first"
        )
    if grid is None:
        _model_parallel.own = _adjacent_groups(group_size)
    elif group_size == -1:
        grid.get_group(MODEL)  # a destroyed grid raises here, not at first use
        _model_parallel.grid = grid
    else:
        raise ValueError(
            f"group_size={group_size}: the grid already has its model groups, whose size is fixed; leave group_size out"
        )


def destroy_process_group() -> None:
    """Destroy the model-parallel groups that ``init_process_group`` created; a grid's groups stay alive.

    No-op without such groups.
    """
    if _model_parallel.own is not None:
        _model_parallel.own.destroy()
    _model_parallel.own = _model_parallel.grid = None


def get_group() -> ProcessGroup:
    """Return this process's model-parallel group, for ``torch.distributed`` and ``ds_topo.collectives``."""
    group = None
    if _model_parallel.grid is not None:
        group = _model_parallel.grid.get_group(MODEL)
    elif _model_parallel.own is not None:
        group = _model_parallel.own.get((MODEL,))
    if group is None:
        raise RuntimeError(
            "ds_topo.distributed has no model-parallel group: pass group=grid.get_group('model') to the layer, or call "
            "ds_topo.distributed.init_process_group(grid=grid) first, or init_process_group(group_size) without a grid"
        )
    return group


def get_rank() -> int:
    """Return this process's rank in its model-parallel group. (``torch.distributed.get_rank()`` is its global rank.)"""
    return dist.get_rank(get_group())


def get_world_size() -> int:
    """Return the number of processes in this process's model-parallel group."""
    return dist.get_world_size(get_group())


def get_group_size() -> int:
    """Return the number of processes per model-parallel group, as ``get_world_size()`` does."""
    return get_world_size()


def scatter(tensor: Tensor, dim: int | None = -1) -> Tensor:
    """Keep this rank's shard: ``[..., d, ...] -> [..., d / n, ...]``. The gradient is gathered.

    Args:
        tensor: a tensor that is the same on all ranks of the group.
        dim: 0 (rows), 1 or -1 (columns). With ``None`` the tensor is not sharded but returned as it is.

    Raises:
        ValueError: ``dim`` is none of these, or the group's size does not divide that dimension.
    """
    return _along(collectives.scatter, tensor, dim)


def gather(tensor: Tensor, dim: int | None = -1) -> Tensor:
    """Concatenate the shards of all ranks on every rank: ``[..., d, ...] -> [..., n * d, ...]``.

    The gradient is scattered. Arguments and errors as for ``scatter``.
    """
    return _along(collectives.gather, tensor, dim)


def reduce(tensor: Tensor) -> Tensor:
    """Sum over ranks, in place: ``[...] -> [...]``. The gradient passes unchanged. Return ``tensor`` itself.

    As with any operation in place, torch refuses a backward pass that needs the former value; ``collectives.reduce``
    works out of place. If ``tensor`` is a leaf that requires a gradient, its data are replaced, and another tensor is
    returned, which has the history.
    """
    total = collectives.reduce(tensor, get_group())
    if total is tensor:
        return tensor
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        with torch.no_grad():
            tensor.copy_(total)
        return total
    return tensor.copy_(total)


def copy(tensor: Tensor) -> Tensor:
    """Use a replicated tensor on every rank: forward identity, backward the sum of all ranks' gradients."""
    return collectives.copy(tensor, get_group())


def _along(operation: Callable[[Tensor, ProcessGroup, int], Tensor], tensor: Tensor, dim: int | None) -> Tensor:
    group = get_group()
    if dim not in (None, 0, 1, -1) or isinstance(dim, bool):
        raise ValueError(
            f"{operation.__name__}: dim={dim!r} is not one of None, 0, 1 and -1; ds_topo.collectives takes any"
        )
    return tensor if dim is None else operation(tensor, group, dim)


def _adjacent_groups(group_size: int) -> ProcessGroups:
    """Create groups of adjacent ranks. If the size is invalid on one rank, all ranks raise."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    size = world_size if group_size == -1 else group_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world_size % size:
        error = ValueError(
            f"group_size={group_size!r} does not divide the {world_size} processes of the job; valid are -1 (all) and "
            f"{', '.join(map(str, divisors(world_size)))}"
        )
        agree("", range(world_size), job_timeout(), failure=error)
    first = rank - rank % size
    ranks = tuple(range(first, first + size))
    return ProcessGroups(
        f"model-parallel groups of {size} adjacent ranks", [RankGroup((MODEL,), ranks)], range(world_size)
    )
