"""What goes over the wire: torch's functional collectives, for any layout in memory and complex dtypes, no autograd.

Functional collectives can be traced by ``torch.compile``. They are called and waited for directly: the public wrappers
return a tensor subclass that waits lazily, which costs more in eager than it gains where the next operation needs the
result anyway. All results are new tensors; nothing here writes to its input.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

_functional = torch.ops._c10d_functional
_HINT = "ds_topo.collectives.debug() names ranks of a group that call different collectives, or with different shapes"


def _wait(result: Tensor) -> Tensor:
    """The result once it is there; what goes wrong is most often that ranks differ."""
    if torch.compiler.is_compiling():
        return cast("Tensor", _functional.wait_tensor(result))
    try:
        return cast("Tensor", _functional.wait_tensor(result))
    except RuntimeError as error:
        error.args = (f"{error} ({_HINT})",)
        raise


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks: ``[...] -> [...]``."""
    total = _functional.all_reduce(_contiguous_real(x), "sum", group.group_name)
    return _like(_wait(total), x)


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate over ranks: ``[..., d, ...] -> [..., n * d, ...]``."""
    shard, n = _contiguous_real(x), group.size()
    shards = _wait(_functional.all_gather_into_tensor(shard, n, group.group_name))
    return _like(_merge(shards.view(n, *shard.shape), dim), x)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, one part each: ``[..., d, ...] -> [..., d / n, ...]``."""
    parts, n = _split(_contiguous_real(x), dim, group.size()), group.size()
    total: Tensor = _wait(_functional.reduce_scatter_tensor(parts, "sum", n, group.group_name))
    return _like(total.squeeze(0), x)


def all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: dist.ProcessGroup) -> Tensor:
    """Part ``i`` of ``split_dim`` goes to rank ``i``; what comes is concatenated along ``concat_dim``."""
    parts, each = _split(_contiguous_real(x), split_dim, group.size()), [1] * group.size()
    received = _wait(_functional.all_to_all_single(parts, each, each, group.group_name))
    return _like(_merge(received, concat_dim), x)


def own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, without communication: ``[..., d, ...] -> [..., d / n, ...]``."""
    length = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * length, length).contiguous()


def _split(x: Tensor, dim: int, n: int) -> Tensor:
    """``[..., d, ...] -> [n, ..., d / n, ...]``, contiguous."""
    parts: Tensor = x.unflatten(dim, (n, x.shape[dim] // n))
    return parts.movedim(dim, 0).contiguous()


def _merge(parts: Tensor, dim: int) -> Tensor:
    """``[n, ..., d, ...] -> [..., n * d, ...]``."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _contiguous_real(x: Tensor) -> Tensor:
    """Backends know real numbers only: a complex tensor travels with one more dimension, of 2."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).contiguous()


def _like(result: Tensor, x: Tensor) -> Tensor:
    return torch.view_as_complex(result) if x.is_complex() else result
