"""Names of torch that the reducer replaces for a while, and private ones that it calls."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from ds_topo.ledger import Change, Reliance

A_REDUCER = "a reducer exists"
ZERO_GRAD_OF_MODULES = Change(
    nn.Module,
    "zero_grad",
    instead="the same, and reducers discard what they hold of these gradients",
    why="gradients that accumulate in another data type or buffer are not in parameter.grad",
    during=A_REDUCER,
)
ZERO_GRAD_OF_OPTIMIZERS = Change(
    torch.optim.Optimizer,
    "zero_grad",
    instead=ZERO_GRAD_OF_MODULES.instead,
    why=ZERO_GRAD_OF_MODULES.why,
    during=A_REDUCER,
)
ROWS: tuple[Change | Reliance, ...] = (
    ZERO_GRAD_OF_MODULES,
    ZERO_GRAD_OF_OPTIMIZERS,
    Reliance(torch, "_foreach_copy_", "gradients into a bucket, many at a time"),
    Reliance(torch, "_foreach_mul_", "gradients of a bucket, scaled at once"),
    Reliance(dist, "_broadcast_coalesced", "parameters at the start, many at a time"),
    Reliance(dist, "_make_nccl_premul_sum", "NCCL multiplies while it sums", releases="builds with NCCL"),
)

_BROADCAST_BYTES = 250 << 20
"""How much goes at once, as in DDP."""
ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"


def premultiplied_sum(factor: float) -> ReduceOp:
    """NCCL's ``ReduceOp`` that multiplies by ``factor`` while it sums."""
    op: ReduceOp = dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
    return op


def broadcast_coalesced(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank of the group its first rank's values, in place; collective."""
    if tensors:
        tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]  # gloo's types
        dist._broadcast_coalesced(group, tensors, _BROADCAST_BYTES, 0)  # type: ignore[attr-defined]
