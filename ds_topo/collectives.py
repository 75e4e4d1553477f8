"""Communicate differentiably over a given process group: Megatron's f and g, their duals, and Ulysses' exchange.

``copy``, ``reduce``, ``scatter`` and ``gather`` are for tensor parallelism, ``all_gather`` and ``reduce_scatter`` for
sequence parallelism, ``all_to_all`` for the exchange between heads and sequence. For example,
``collectives.copy(x, grid.get_group("model"))``.

Note [Dual pairs]. A tensor is *replicated* in a group (equal on all ranks), *partial* (the ranks' tensors are
summands), *varied* (each rank has its own) or *sharded* along a dimension. The loss is one replicated number. Then the
gradient of a replicated tensor is replicated, and the gradient of a varied tensor consists of partial contributions:

    copy            replicated -> varied      backward  reduce            Megatron's f
    reduce          partial -> replicated     backward  copy              Megatron's g
    scatter         replicated -> sharded     backward  gather
    gather          sharded -> replicated     backward  scatter
    all_gather      sharded -> varied         backward  reduce_scatter    g of sequence parallelism
    reduce_scatter  partial -> sharded        backward  all_gather        its dual
    all_to_all      sharded -> sharded        backward  all_to_all, dimensions exchanged      (Ulysses)

Each of them is linear, and each backward *is* the public function of its dual, so derivatives of any order are right.
Communication involves the ranks of the group only; in a group of one rank there is none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from ds_topo.base.backends import traits_of
from ds_topo.base.torch_names import describe, devices_of
from ds_topo.errors import DisagreementError, by_value
from ds_topo.process_groups.creation import destroyed, gathered

__all__ = ["all_gather", "all_to_all", "copy", "debug", "gather", "own_part", "reduce", "reduce_scatter", "scatter"]


# -- arguments, and the debug mode in which ranks compare them --------------------------------------------------------

debug_mode = SimpleNamespace(enabled=os.environ.get("DS_TOPO_DEBUG_COLLECTIVES", "0") not in ("", "0"))
"""One switch per process: the backward pass may run in other threads."""


@contextmanager
def debug(enabled: bool = True) -> Iterator[None]:
    """Make every collective of this module first compare operation, shape and dtype between its ranks.

    All ranks of a group must use it together: the comparison is a collective itself, and it is expensive. The
    environment variable ``DS_TOPO_DEBUG_COLLECTIVES=1`` sets it for the whole process. Compiled code is not checked.

    Raises:
        DisagreementError: raised by the collectives, on every rank of the group; names the ranks that differ.

    >>> with debug():
    ...     debug_mode.enabled
    True
    """
    before, debug_mode.enabled = debug_mode.enabled, enabled
    try:
        yield
    finally:
        debug_mode.enabled = before


def require_group(operation: str, group: object) -> dist.ProcessGroup:
    """Return a group, or raise TypeError if it is none of this rank's."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{operation}: group is {group!r}, which is not a process group that this rank belongs to; pass one, "
            'such as grid.get_group("model"), or torch.distributed.group.WORLD for all ranks'
        )
    return group


def _check_call(operation: str, x: Tensor, group: Any, *dims: int) -> None:
    """Raise if the group cannot serve this tensor; in debug mode, compare the call with the other ranks."""
    if torch.compiler.is_compiling():
        return
    served = set(devices_of(require_group(operation, group)))
    if x.device.type not in served:
        raise ValueError(
            f"{operation}: the tensor is on {x.device}, but this group's backend ({dist.get_backend(group)}) serves "
            f"{' and '.join(sorted(served))}; move the tensor there, or initialise torch.distributed with a backend "
            f"for {x.device.type} too"
        )
    if debug_mode.enabled and group.size() > 1:
        _compare(operation, x, group, dims)


def _compare(operation: str, x: Tensor, group: dist.ProcessGroup, dims: tuple[int, ...]) -> None:
    """Raise on every rank of the group unless all of them are about to do the same."""
    mine = f"{operation}(tensor {list(x.shape)} of {x.dtype}" + "".join(f", dim {dim}" for dim in dims) + ")"
    calls = gathered((dist.get_rank(), socket.gethostname(), mine), group)
    if len({call for _, _, call in calls}) > 1:
        raise DisagreementError(
            f"{operation}: the ranks of this group do not call the same collective; make them:{by_value(calls)}"
        )


def _checked_dim(operation: str, x: Tensor, dim: int, n: int = 1) -> int:
    """Return a dimension counted from the front; raise unless the number of ranks ``n`` divides its length."""
    if not -x.dim() <= dim < x.dim():
        valid = f"-{x.dim()} to {x.dim() - 1}" if x.dim() else "none, since it is a scalar"
        raise ValueError(f"{operation}: dim={dim} is not a dimension of a tensor {list(x.shape)}; valid are {valid}")
    dim %= x.dim()
    length = x.shape[dim]
    if length % n:
        raise ValueError(
            f"{operation}: dimension {dim} of a tensor {list(x.shape)} is {length} long, which the group's {n} ranks "
            f"do not divide: {length % n} left over; pad it to {length + n - length % n}, cut it to "
            f"{length - length % n} or choose another dimension or group"
        )
    return dim


# -- communication without autograd -----------------------------------------------------------------------------------
# torch's functional collectives, for any layout in memory and complex dtypes. torch.compile can trace them. They are
# called and waited for directly: the public wrappers return a tensor subclass that waits lazily, which costs more in
# eager mode than it gains, because the next operation needs the result anyway. Results are new tensors; inputs are
# never changed.

_functional = torch.ops._c10d_functional


def _wait(result: Tensor) -> Tensor:
    """Return the result when it has arrived; an error most often means that the ranks' calls differ."""
    if torch.compiler.is_compiling():
        return cast("Tensor", _functional.wait_tensor(result))
    try:
        return cast("Tensor", _functional.wait_tensor(result))
    except RuntimeError as error:
        hint = "ds_topo.collectives.debug() names ranks of a group that call different collectives, or other shapes"
        error.args = (f"{error} ({hint})",)
        raise


def functional_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks: ``[...] -> [...]``."""
    total = _functional.all_reduce(_contiguous_real(x), "sum", group.group_name)
    return _like(_wait(total), x)


def functional_all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate over ranks: ``[..., d, ...] -> [..., n * d, ...]``."""
    shard, n = _contiguous_real(x), group.size()
    if torch.compiler.is_compiling() or shard.is_cpu or traits_of(group, shard.device).gathers_functionally:
        shards = _wait(_functional.all_gather_into_tensor(shard, n, group.group_name))
    else:
        shards = shard.new_empty(n * shard.numel())
        dist.all_gather_into_tensor(shards, shard.view(-1), group=group)
    return _like(_merge(shards.view(n, *shard.shape), dim), x)


def functional_reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks and keep one part each: ``[..., d, ...] -> [..., d / n, ...]``."""
    parts, n = _split(_contiguous_real(x), dim, group.size()), group.size()
    total: Tensor = _wait(_functional.reduce_scatter_tensor(parts, "sum", n, group.group_name))
    return _like(total.squeeze(0), x)


def functional_all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: dist.ProcessGroup) -> Tensor:
    """Send part ``i`` of ``split_dim`` to rank ``i``; concatenate what arrives along ``concat_dim``."""
    parts, each = _split(_contiguous_real(x), split_dim, group.size()), [1] * group.size()
    received = _wait(_functional.all_to_all_single(parts, each, each, group.group_name))
    return _like(_merge(received, concat_dim), x)


def _own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part, without communication: ``[..., d, ...] -> [..., d / n, ...]``."""
    length = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * length, length).contiguous()


def _split(x: Tensor, dim: int, n: int) -> Tensor:
    """Split a dimension into ``n`` contiguous parts: ``[..., d, ...] -> [n, ..., d / n, ...]``."""
    parts: Tensor = x.unflatten(dim, (n, x.shape[dim] // n))
    return parts.movedim(dim, 0).contiguous()


def _merge(parts: Tensor, dim: int) -> Tensor:
    """Concatenate parts along a dimension: ``[n, ..., d, ...] -> [..., n * d, ...]``."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _contiguous_real(x: Tensor) -> Tensor:
    """Return the tensor as backends need it: contiguous, complex numbers as one more dimension of size 2."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).contiguous()


def _like(result: Tensor, x: Tensor) -> Tensor:
    return torch.view_as_complex(result) if x.is_complex() else result


# -- pairs ------------------------------------------------------------------------------------------------------------


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Use a replicated tensor on every rank: ``[...] -> [...]``. Forward identity, backward sum (Megatron's f).

    Use it before a column-parallel layer. The gradient of ``x`` is the sum over the group, as a new tensor.

    Args:
        x: a tensor that is the same on all ranks of the group, of any dtype (complex too) and any strides.
        group: the ranks, for instance ``grid.get_group("model")``. In a group of one ``x`` itself is returned.

    Raises:
        TypeError: ``group`` is not a process group of this rank. (``None`` does not mean the whole world.)
        ValueError: the tensor is on a device that the group's backend does not serve.
        DisagreementError: in ``debug()`` mode, the ranks call different operations, or with different shapes or dtypes.

    >>> import torch, torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    >>> x, group = torch.arange(6.0).view(2, 3), dist.group.WORLD
    >>> torch.equal(copy(x, group), x)
    True
    >>> dist.destroy_process_group()
    """
    return _apply("copy", _same, reduce, x, group)


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the tensors of all ranks: ``[...] -> [...]``. Forward sum, backward identity (Megatron's g).

    Use it after a row-parallel layer. ``x`` is not changed; ``distributed.reduce`` works in place.
    Arguments and errors as for ``copy``.
    """
    return _apply("reduce", functional_all_reduce, copy, x, group)


def scatter(x: Tensor, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """Keep this rank's part of a replicated tensor: ``[..., d, ...] -> [..., d / n, ...]``. Backward gathers.

    Nothing is sent forward, since every rank has ``x``. Arguments and errors as for ``copy``, and:

    Args:
        dim: the dimension to divide, counted from either end.

    Raises:
        ValueError: the tensor has no such dimension, or the group's size does not divide its length.

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
    return _apply("scatter", _own_part, gather, x, group, dim, divided=1)


def own_part(x: Tensor, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """Keep this rank's part of a tensor, as ``scatter`` does, without a gradient and on any device. Errors as there.

    Use it for weights of a layer that is built on the CPU while the group serves GPUs.
    """
    return _own_part(x.detach(), _checked_dim("own_part", x, dim, group.size()), group)


def explain_whole_weights(module: nn.Module, states: Mapping[str, Any], prefix: str, *lists: Any) -> None:
    """Say, in errors of ``load_state_dict``, how to load a whole weight into this rank's part of it.

    It is a hook for ``register_load_state_dict_pre_hook``.
    """
    told = "is a slice of a weight"
    if any(told in error for error in lists[-1]):
        return
    for name, part in module.named_parameters():
        given = states.get(f"{prefix}{name}")
        if not isinstance(given, Tensor) or not getattr(part, "tensor_model_parallel", False):
            continue
        if given.numel() > part.numel():
            lists[-1].append(
                f"{prefix}{name} {told}, {list(part.shape)}, but the state dict has {list(given.shape)}, the whole of "
                "it: load whole weights before the model is split (ParallelLinear.from_linear), or into the engine by "
                "ds_topo.checkpoint.load(engine, folder), which gives each rank its slice"
            )
            return


def gather(x: Tensor, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """Concatenate all ranks' shards for replicated use: ``[..., d, ...] -> [..., n * d, ...]``. Backward scatters.

    All ranks must use the result in the same way: then each rank's gradient is complete, and its own part of it is the
    shard's gradient. If ranks use it differently, call ``all_gather``. Arguments and errors as for ``scatter``.
    """
    return _apply("gather", functional_all_gather, scatter, x, group, dim)


def all_gather(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Concatenate all ranks' shards for varied use: ``[..., d, ...] -> [..., n * d, ...]``. Backward reduce-scatters.

    Use it before a column-parallel layer whose input is sharded along the sequence.
    Arguments and errors as for ``scatter``.
    """
    return _apply("all_gather", functional_all_gather, reduce_scatter, x, group, dim)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Sum over ranks and keep this rank's part: ``[..., d, ...] -> [..., d / n, ...]``. Backward gathers.

    Use it after a row-parallel layer whose output is to be sharded along the sequence.
    Arguments and errors as for ``scatter``.
    """
    return _apply("reduce_scatter", functional_reduce_scatter, all_gather, x, group, dim, divided=1)


def all_to_all(x: Tensor, group: dist.ProcessGroup, split_dim: int, concat_dim: int) -> Tensor:
    """Move the sharding from one dimension to another: ``[..., s, ..., c, ...] -> [..., s / n, ..., n * c, ...]``.

    Ulysses: ``[b, s/n, h, d] -> [b, s, h/n, d]`` before attention, with ``split_dim=2, concat_dim=1``, and back after.
    Arguments and errors as for ``scatter``; both dimensions may be the same one, which then keeps its length.
    """
    return _apply("all_to_all", functional_all_to_all, all_to_all, x, group, split_dim, concat_dim, divided=1)


_Function: TypeAlias = Callable[..., Tensor]


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _apply(
    operation: str, send: _Function, dual: _Function, x: Tensor, group: Any, *dims: int, divided: int = 0
) -> Tensor:
    """Check a call and send; the group's size must divide the length of the first ``divided`` dimensions."""
    _check_call(operation, x, group, *dims)
    n = group.size()
    dims = tuple(_checked_dim(operation, x, dim, n if place < divided else 1) for place, dim in enumerate(dims))
    if n == 1:
        return x
    try:
        result: Tensor = _Collective.apply(x, send, dual, group, *dims)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not torch.compiler.is_compiling() and group in destroyed:
            raise RuntimeError(
                f"{operation}: this group along {describe(group)[0]!r} was destroyed with the {destroyed[group]}: call "
                'forward and backward before grid.destroy(), or inside of the block if it is "with ... as grid:"'
            ) from error
        raise
    return result


class _Collective(Function):
    """Forward sends; backward calls the dual on the gradient, with the dimensions exchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: _Function, dual: _Function, group: Any, *dims: int) -> Tensor:
        ctx.dual, ctx.group, ctx.dims = dual, group, dims
        return send(x, *dims, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.dual(gradient, ctx.group, *ctx.dims[::-1]), None, None, None, *(None for _ in ctx.dims)
