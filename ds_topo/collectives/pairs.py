"""Differentiable collectives over an explicit process group, in dual pairs: the backward of one is the other.

Note [Dual pairs]. A tensor is *replicated* in a group (equal on all ranks), *partial* (the ranks' tensors are
summands), *varied* (each rank has its own) or *sharded* along a dimension. The loss is one replicated number. Then the
gradient of a replicated tensor is replicated, of what varies partial contributions come back, and

    copy            replicated -> varied      backward  reduce            Megatron's f
    reduce          partial -> replicated     backward  copy              Megatron's g
    scatter         replicated -> sharded     backward  gather
    gather          sharded -> replicated     backward  scatter
    all_gather      sharded -> varied         backward  reduce_scatter    sequence parallelism's g
    reduce_scatter  partial -> sharded        backward  all_gather        and its dual
    all_to_all      sharded -> sharded        backward  all_to_all, dimensions exchanged      (Ulysses)

Every one is linear, and each backward *is* the public function of its dual, so that derivatives of any order are right.
Communication goes over ``group.size()`` ranks only, and not at all in a group of one.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ds_topo.collectives import functional
from ds_topo.collectives.checks import check_call, check_dim, check_divisible


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Use a replicated tensor on every rank: ``[...] -> [...]``. Forward identity, backward sum (Megatron's f).

    Put it before a column-parallel layer. The gradient of ``x`` is the sum over the group, as a new tensor.

    Args:
        x: the same on all ranks of the group; any dtype, complex too, any strides.
        group: the ranks, for instance ``grid.get_group("model")``. In a group of one ``x`` itself is returned.

    Raises:
        TypeError: ``group`` is not a process group of this rank (``None`` is not taken for the whole world).
        ValueError: the tensor is on a device that the group's backend does not serve.
        DisagreementError: in ``debug()`` mode, ranks came with different operations, shapes or dtypes.

    >>> import torch, torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    >>> x, group = torch.arange(6.0).view(2, 3), dist.group.WORLD
    >>> torch.equal(copy(x, group), x)
    True
    >>> dist.destroy_process_group()
    """
    check_call("copy", x, group)
    return x if group.size() == 1 else _apply(_Copy, x, group)


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the tensors of all ranks: ``[...] -> [...]``. Forward sum, backward identity (Megatron's g).

    Put it after a row-parallel layer. ``x`` is not changed; ``distributed.reduce`` works in place.
    Arguments and errors as for ``copy``.
    """
    check_call("reduce", x, group)
    return x if group.size() == 1 else _apply(_Reduce, x, group)


def scatter(x: Tensor, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """Keep this rank's part of a replicated tensor: ``[..., d, ...] -> [..., d / n, ...]``. Backward gathers.

    Nothing is sent forward, since every rank has ``x``. Arguments and errors as for ``copy``, and:

    Args:
        dim: the dimension to divide, counted from either end.

    Raises:
        ValueError: there is no such dimension, or the group's size does not divide it.

    >>> import torch, torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    >>> scatter(torch.arange(6).view(3, 2), dist.group.WORLD).tolist()
    [[1], [3], [5]]
    >>> scatter(torch.arange(6).view(3, 2), dist.group.WORLD, dim=0)
    Traceback (most recent call last):
    ValueError: scatter: dimension 0 of a tensor [3, 2] is 3 long, which the group's 2 ranks do not divide: ...
    >>> dist.destroy_process_group()
    """
    check_call("scatter", x, group, dim)
    dim = check_divisible("scatter", x, dim, group)
    return x if group.size() == 1 else _apply(_Scatter, x, group, dim)


def gather(x: Tensor, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """Concatenate all ranks' shards for replicated use: ``[..., d, ...] -> [..., n * d, ...]``. Backward scatters.

    All ranks must go on with the result in the same way: then each one's gradient is complete, and its own part is
    the shard's. Where they go on differently, take ``all_gather``. Arguments and errors as for ``scatter``.
    """
    check_call("gather", x, group, dim)
    dim = check_dim("gather", x, dim)
    return x if group.size() == 1 else _apply(_Gather, x, group, dim)


def all_gather(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Concatenate all ranks' shards for varied use: ``[..., d, ...] -> [..., n * d, ...]``. Backward reduce-scatters.

    Put it before a column-parallel layer whose input is sharded along the sequence.
    Arguments and errors as for ``scatter``.
    """
    check_call("all_gather", x, group, dim)
    dim = check_dim("all_gather", x, dim)
    return x if group.size() == 1 else _apply(_AllGather, x, group, dim)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Sum over ranks and keep this rank's part: ``[..., d, ...] -> [..., d / n, ...]``. Backward gathers.

    Put it after a row-parallel layer whose output is to be sharded along the sequence.
    Arguments and errors as for ``scatter``.
    """
    check_call("reduce_scatter", x, group, dim)
    dim = check_divisible("reduce_scatter", x, dim, group)
    return x if group.size() == 1 else _apply(_ReduceScatter, x, group, dim)


def all_to_all(x: Tensor, group: dist.ProcessGroup, split_dim: int, concat_dim: int) -> Tensor:
    """Move the sharding from one dimension to another: ``[..., s, ..., c, ...] -> [..., s / n, ..., n * c, ...]``.

    Ulysses: ``[b, s/n, h, d] -> [b, s, h/n, d]`` before attention, with ``split_dim=2, concat_dim=1``, and back after.
    Arguments and errors as for ``scatter``; both dimensions may be the same one, whose length then stays.
    """
    check_call("all_to_all", x, group, split_dim, concat_dim)
    split_dim, concat_dim = check_divisible("all_to_all", x, split_dim, group), check_dim("all_to_all", x, concat_dim)
    return x if group.size() == 1 else _apply(_AllToAll, x, group, split_dim, concat_dim)


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


class _Copy(Function):
    """Identity, and ``reduce`` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return reduce(gradient, ctx.group), None


class _Reduce(Function):
    """Sum over ranks, and ``copy`` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return functional.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return copy(gradient, ctx.group), None


class _Scatter(Function):
    """This rank's part, and ``gather`` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return functional.own_part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gather(gradient, ctx.group, ctx.dim), None, None


class _Gather(Function):
    """All shards, and ``scatter`` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return functional.all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return scatter(gradient, ctx.group, ctx.dim), None, None


class _AllGather(Function):
    """All shards, and ``reduce_scatter`` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return functional.all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return reduce_scatter(gradient, ctx.group, ctx.dim), None, None


class _ReduceScatter(Function):
    """This rank's part of the sum, and ``all_gather`` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return functional.reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return all_gather(gradient, ctx.group, ctx.dim), None, None


class _AllToAll(Function):
    """Exchange of parts, and of the gradient's the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, split_dim: int, concat_dim: int) -> Tensor:
        ctx.group, ctx.split_dim, ctx.concat_dim = group, split_dim, concat_dim
        return functional.all_to_all(x, split_dim, concat_dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return all_to_all(gradient, ctx.group, ctx.concat_dim, ctx.split_dim), None, None, None
