"""What is refused before anything is sent, and the debug mode in which ranks compare what they are about to send."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_topo.errors import DisagreementError
from ds_topo.process_groups.torch_names import devices_of

DEBUG_VARIABLE = "DS_TOPO_DEBUG_COLLECTIVES"


class DebugMode:
    """Whether ranks compare operation, shape and dtype before every collective. The backward pass may run in other
    threads, so that this is one switch per process."""

    def __init__(self) -> None:
        self.enabled = os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


debug_mode = DebugMode()


@contextmanager
def debug(enabled: bool = True) -> Iterator[None]:
    """Make every collective of this module compare operation, shape and dtype between its ranks first.

    All ranks of a group must be in it together: the comparison is a collective itself, and far from free. The
    environment variable ``DS_TOPO_DEBUG_COLLECTIVES=1`` sets it for the whole process. Compiled code is not checked.

    Raises:
        DisagreementError: from the collectives, on every rank of the group, naming the ranks that differ.

    >>> with debug():
    ...     debug_mode.enabled
    True
    """
    before, debug_mode.enabled = debug_mode.enabled, enabled
    try:
        yield
    finally:
        debug_mode.enabled = before


def check_call(operation: str, x: Tensor, group: object, *dims: int) -> None:
    """Refuse what the group cannot do with this tensor; compare with the other ranks in debug mode."""
    if torch.compiler.is_compiling():
        return
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{operation}: group is {group!r}, which is not a process group that this rank belongs to; pass one, "
            'such as grid.get_group("model"), or torch.distributed.group.WORLD for all ranks'
        )
    served = set(devices_of(group))
    if x.device.type not in served:
        raise ValueError(
            f"{operation}: the tensor is on {x.device}, but this group's backend ({dist.get_backend(group)}) serves "
            f"{' and '.join(sorted(served))}; move the tensor there, or initialise torch.distributed with a backend "
            f"for {x.device.type} too"
        )
    if debug_mode.enabled and group.size() > 1:
        _compare(operation, x, group, dims)


def check_dim(operation: str, x: Tensor, dim: int) -> int:
    """The dimension counted from the front."""
    if not -x.dim() <= dim < x.dim():
        valid = f"-{x.dim()} to {x.dim() - 1}" if x.dim() else "none, since it is a scalar"
        raise ValueError(f"{operation}: dim={dim} is not a dimension of a tensor {list(x.shape)}; valid are {valid}")
    return dim % x.dim()


def check_divisible(operation: str, x: Tensor, dim: int, group: dist.ProcessGroup) -> int:
    """The dimension counted from the front, if it can be divided evenly among the ranks."""
    dim, n = check_dim(operation, x, dim), group.size()
    length = x.shape[dim]
    if length % n:
        raise ValueError(
            f"{operation}: dimension {dim} of a tensor {list(x.shape)} is {length} long, which the group's {n} ranks "
            f"do not divide: {length % n} left over; pad it to {length + n - length % n}, cut it to "
            f"{length - length % n} or choose another dimension or group"
        )
    return dim


def _compare(operation: str, x: Tensor, group: dist.ProcessGroup, dims: tuple[int, ...]) -> None:
    """Raise on every rank of the group unless all of them are about to do the same."""
    mine = f"{operation}(tensor {list(x.shape)} of {x.dtype}" + "".join(f", dim {dim}" for dim in dims) + ")"
    calls: list[Any] = [None] * group.size()
    dist.all_gather_object(calls, mine, group=group)
    if len(set(calls)) > 1:
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, call in zip(dist.get_process_group_ranks(group), calls, strict=True):
            ranks_of[call].append(rank)
        listing = "\n  ".join(f"ranks {ranks}: {call}" for call, ranks in ranks_of.items())
        raise DisagreementError(f"{operation}: the ranks of this group do not call the same collective:\n  {listing}")
