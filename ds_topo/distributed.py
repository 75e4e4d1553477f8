"""Model-parallel communication without handling groups: the eleven functions of ``torchshard.distributed``.

Use it on top of ``torch.distributed``, or of a grid, whose ``model`` group then serves. It has one group per process;
``ds_topo.collectives`` has the same operations, and more, for any group.

Differences from torchshard, where its documentation and its code disagree: ``get_rank`` and ``get_world_size`` are
those of this process's model-parallel group (torchshard compares the size of the world before it reduces over a group),
the results of the collectives are tensors, and no tensor of the caller's is changed by a backward pass.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ds_topo import collectives
from ds_topo.process_groups.agreement import agree
from ds_topo.process_groups.creation import ProcessGroup, ProcessGroups, require_initialized
from ds_topo.process_groups.torch_names import job_timeout
from ds_topo.topology.axes import MODEL
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

_DIMS = (None, 0, 1, -1)


class _HasGroups(Protocol):
    def get_group(self, axes: str) -> ProcessGroup: ...


class _ModelParallel:
    """The one owner of this process's model-parallel group: its own groups, or a grid's."""

    def __init__(self) -> None:
        self._own: ProcessGroups | None = None
        self._grid: _HasGroups | None = None

    @property
    def is_initialized(self) -> bool:
        return self._own is not None or self._grid is not None

    def initialize(self, own: ProcessGroups | None, grid: _HasGroups | None) -> None:
        self._own, self._grid = own, grid

    def destroy(self) -> None:
        if self._own is not None:
            self._own.destroy()
        self._own = self._grid = None

    def group(self, what: str) -> ProcessGroup:
        group: ProcessGroup | None = None
        if self._grid is not None:
            group = self._grid.get_group(MODEL)
        elif self._own is not None:
            group = self._own.get((MODEL,))
        if group is None:
            raise RuntimeError(f"{what}: call ds_topo.distributed.init_process_group() first")
        return group


_model_parallel = _ModelParallel()


def is_initialized() -> bool:
    """Whether ``init_process_group`` has been called.

    >>> is_initialized()
    False
    """
    return _model_parallel.is_initialized


def init_process_group(group_size: int = -1, *, grid: _HasGroups | None = None) -> None:
    """Join this process with ``group_size`` adjacent ranks, itself included, into a model-parallel group.

    Collective: all processes of the job must call it, with the same size.

    Args:
        group_size: ranks per group; it must divide the number of processes. -1: all of them, one group.
        grid: take this grid's ``model`` groups instead, in whatever order its axes are; they stay the grid's own.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, or this function was called before.
        ValueError: a size that does not divide the number of processes, or a size together with a grid.
        DisagreementError: the ranks came with different sizes, or did not come.

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
        _model_parallel.initialize(_adjacent_groups(group_size), None)
    elif group_size == -1:
        grid.get_group(MODEL)  # a destroyed grid raises here, not at first use
        _model_parallel.initialize(None, grid)
    else:
        raise ValueError(f"group_size={group_size}: the grid has its model groups already; leave group_size out")


def destroy_process_group() -> None:
    """Destroy the model-parallel groups made here and forget them; a grid's groups stay alive. Without any, nothing."""
    _model_parallel.destroy()


def get_group() -> ProcessGroup:
    """This process's model-parallel group, for ``torch.distributed`` and ``ds_topo.collectives``.

    Raises:
        RuntimeError: not initialised.
    """
    return _model_parallel.group("get_group")


def get_rank() -> int:
    """This process's rank in its model-parallel group (``torch.distributed.get_rank()`` is the one in the job).

    Raises:
        RuntimeError: not initialised.
    """
    return dist.get_rank(_model_parallel.group("get_rank"))


def get_world_size() -> int:
    """The number of processes in this process's model-parallel group.

    Raises:
        RuntimeError: not initialised.
    """
    return dist.get_world_size(_model_parallel.group("get_world_size"))


def get_group_size() -> int:
    """The number of processes per model-parallel group; the same as ``get_world_size()``.

    Raises:
        RuntimeError: not initialised.
    """
    return _model_parallel.group("get_group_size").size()


def scatter(tensor: Tensor, dim: int | None = -1) -> Tensor:
    """Keep this rank's shard: ``[..., d, ...] -> [..., d / n, ...]``. The gradient is gathered.

    Args:
        tensor: the same on all ranks of the group.
        dim: 0 (rows), 1 or -1 (columns); ``None``: not sharded, the tensor is returned as it is.

    Raises:
        RuntimeError: not initialised.
        ValueError: another ``dim``, or one that the group's size does not divide.
    """
    group = _model_parallel.group("scatter")
    dim = _checked_dim("scatter", dim)
    return tensor if dim is None else collectives.scatter(tensor, group, dim)


def gather(tensor: Tensor, dim: int | None = -1) -> Tensor:
    """Concatenate the shards of all ranks on every rank: ``[..., d, ...] -> [..., n * d, ...]``.

    The gradient is scattered. Arguments and errors as for ``scatter``.
    """
    group = _model_parallel.group("gather")
    dim = _checked_dim("gather", dim)
    return tensor if dim is None else collectives.gather(tensor, group, dim)


def reduce(tensor: Tensor) -> Tensor:
    """Sum over ranks, in place: ``[...] -> [...]``. The gradient passes unchanged.

    As with any operation in place, torch refuses a backward pass that needs the former value;
    ``collectives.reduce`` is the same out of place. A leaf that requires a gradient has its data
    replaced, and the returned tensor, not the leaf, is the one with a history.

    Returns:
        ``tensor`` itself (unless it is such a leaf).

    Raises:
        RuntimeError: not initialised.
    """
    total = collectives.reduce(tensor, _model_parallel.group("reduce"))
    if total is tensor:
        return tensor
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        with torch.no_grad():
            tensor.copy_(total)
        return total
    return tensor.copy_(total)


def copy(tensor: Tensor) -> Tensor:
    """Use a replicated tensor on every rank: forward the same, backward the sum of the gradients of all ranks.

    Raises:
        RuntimeError: not initialised.
    """
    return collectives.copy(tensor, _model_parallel.group("copy"))


def _checked_dim(operation: str, dim: int | None) -> int | None:
    if dim not in _DIMS or isinstance(dim, bool):
        raise ValueError(
            f"{operation}: dim={dim!r} is not one of None, 0, 1 and -1; ds_topo.collectives takes any dimension"
        )
    return dim


def _adjacent_groups(group_size: int) -> ProcessGroups:
    """Groups of adjacent ranks; a rank whose size is unusable tells the others before it raises."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    size = world_size if group_size == -1 else group_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world_size % size:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        error = ValueError(
            f"group_size={group_size!r} does not divide the {world_size} processes of the job; valid are -1 (all) and "
            f"{', '.join(map(str, divisors))}"
        )
        agree("", range(world_size), job_timeout(), failure=error)
    first = rank - rank % size
    ranks = tuple(range(first, first + size))
    return ProcessGroups(
        f"model-parallel groups of {size} adjacent ranks", [RankGroup((MODEL,), ranks)], range(world_size)
    )
