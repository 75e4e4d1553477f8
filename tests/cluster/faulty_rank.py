"""Run ``ds-topo`` on a rank with a fault: ``python -m tests.cluster.faulty_rank FAULT check SPEC ...``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_topo.cli import main


def other_version() -> None:
    """Report another version of torch."""
    torch.__version__ = "2.12.0"


def wrong_sums() -> None:
    """Make sums wrong on this rank alone."""
    right = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        work = right(tensor, *args, **options)
        if tensor.numel() > 1:
            tensor.flatten()[tensor.numel() // 3] += 1
        return work

    dist.all_reduce = all_reduce


def wrong_parts() -> None:
    """Make this rank's contribution to sums wrong; every rank receives the wrong sum."""
    right = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.numel() > 1:
            tensor.flatten()[tensor.nonzero()[0][-1]] += 1
        return right(tensor, *args, **options)

    dist.all_reduce = all_reduce


def wrong_products() -> None:
    """Make every fifth matrix product wrong."""
    right = torch.Tensor.__matmul__
    calls: list[int] = []

    def matmul(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        product = right(left, other)
        return product + 1 if left.is_floating_point() and len(calls) % 5 == 0 else product

    torch.Tensor.__matmul__ = matmul  # type: ignore[method-assign, assignment]


def dies() -> None:
    """Exit in the middle of the check."""
    _instead_of_all_reduce(sys.exit)


def hangs() -> None:
    """Hang in the middle of the check."""
    _instead_of_all_reduce(lambda: time.sleep(600))


def _instead_of_all_reduce(happens: Callable[[], Any]) -> None:
    def all_reduce(*args: Any, **options: Any) -> Any:
        happens()

    dist.all_reduce = all_reduce


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
