"""Private names of torch that the reducer calls."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.distributed as dist

from ds_topo.ledger import Change, Reliance

ROWS: tuple[Change | Reliance, ...] = (
    Reliance(torch, "_foreach_copy_", "gradients into a bucket, many at a time"),
    Reliance(torch, "_foreach_mul_", "gradients of a bucket, scaled at once"),
    Reliance(dist, "_make_nccl_premul_sum", "NCCL multiplies while it sums", releases="builds with NCCL"),
)

ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"


def premultiplied_sum(factor: float) -> ReduceOp:
    """NCCL's ``ReduceOp`` that multiplies by ``factor`` while it sums."""
    op: ReduceOp = dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
    return op
