"""torchshard's own tests pass with the layers and functions of this package under torchshard's names.

``TORCHSHARD`` gives the folder of a clone. Its tests read marks that torchshard puts on activations, so the stand-in
for its package marks them, too.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo import distributed, layers
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.exhaustive
RANKS = 2
MARK = "parallel_dim"


def _marked(tensor: Any, dim: int | None) -> Any:
    setattr(tensor, MARK, dim)
    return tensor


def _mark_of(tensor: Any) -> int | None:
    found: int | None = getattr(tensor, MARK, None)
    return found


class _Linear(layers.ParallelLinear):
    def _split(self, full: nn.Linear, dim: int | None, group: Any, pieces: int) -> None:
        super()._split(full, dim, group, pieces)
        for parameter in self.parameters():
            _marked(parameter, dim)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        marked: torch.Tensor = _marked(super().forward(hidden), -1 if self.dim in (1, -1) else None)
        return marked


class _Loss(layers.ParallelCrossEntropyLoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.dim = -1 if _mark_of(input) in (1, -1) else None
        return super().forward(input, target)


class _Marking(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        marked: torch.Tensor = _marked(hidden, self.dim)
        return marked


def _cross_entropy(input: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    dim = -1 if _mark_of(input) in (1, -1) else None
    return layers.parallel_cross_entropy(input, target, reduction=reduction, dim=dim)


def _initialize_part(initialize: Callable[..., Any], tensor: torch.Tensor, **options: Any) -> None:
    """Initialize the whole of a split weight on rank 0, and keep this rank's part."""
    if tensor.dim() != 2:
        initialize(tensor, **options)
        return
    dim = {0: 1, 1: 0, -1: 0}.get(_mark_of(tensor))  # type: ignore[arg-type]
    sizes = [size * (RANKS if number == dim else 1) for number, size in enumerate(tensor.shape)]
    whole = torch.empty(sizes)
    initialize(whole, **options)
    dist.broadcast(whole, 0)
    with torch.no_grad():
        tensor.copy_(whole if dim is None else whole.chunk(RANKS, dim)[dist.get_rank()])


def _stand_in() -> ModuleType:
    package: Any = ModuleType("torchshard")
    functions = {name: getattr(distributed, name) for name in distributed.__all__}
    functions["scatter"] = lambda tensor, dim=-1: _marked(distributed.scatter(tensor, dim), dim)
    package.distributed = SimpleNamespace(**functions)
    package.nn = SimpleNamespace(
        ParallelLinear=_Linear,
        ParallelEmbedding=layers.ParallelEmbedding,
        ParallelCrossEntropyLoss=_Loss,
        RegisterParallelDim=_Marking,
        functional=SimpleNamespace(parallel_cross_entropy=_cross_entropy),
        init=SimpleNamespace(shard_init_helper_=_initialize_part),
    )
    package._PARALLEL_DIM, package.get_parallel_dim, package.register_parallel_dim = MARK, _mark_of, _marked
    package.slice = lambda tensor, pieces, dim=-1, contiguous=False: [
        part.contiguous() for part in tensor.chunk(pieces, dim)
    ]
    package.register_ddp_parameters_to_ignore = _ignore_parts
    return package  # type: ignore[no-any-return]


def _ignore_parts(module: Any) -> None:
    parts = [name for name, parameter in module.named_parameters() if _mark_of(parameter) is not None]
    module._ddp_params_and_buffers_to_ignore = parts


def _fail(*_: object) -> None:
    raise AssertionError("torchshard's test found a difference")


def _run(folder: str, reduction: str) -> list[str]:
    """Run every case on this rank; return the names."""
    sys.path.insert(0, f"{folder}/tests")
    done = []
    with (
        mock.patch.dict(sys.modules, torchshard=_stand_in()),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_: tensor),
        mock.patch.object(nn.Module, "cuda", lambda module, *_: module),
        mock.patch.object(nn.parallel, "DistributedDataParallel", partial(_on_cpu, DistributedDataParallel)),
    ):
        testing = importlib.import_module("testing")
        testing.barf = _fail
        distributed.init_process_group(group_size=RANKS)
        for name in ("test_cross_entropy", "test_layers", "test_nn", "test_modules"):
            if name == "test_cross_entropy" and reduction != "none":
                continue  # torchshard's reference there is for "none" alone
            module: Any = importlib.import_module(name)
            module.loss_reduction_type, module.threshold = reduction, 1e-5
            for kind in [each for each in vars(module).values() if isinstance(each, type)]:
                for case in [each for each in dir(kind) if each.startswith("run_test")]:
                    getattr(kind, case)(dist.get_rank())
                    done.append(case)
        distributed.destroy_process_group()
    return done


def _on_cpu(wrapper: Any, module: nn.Module, device_ids: object = None, **options: Any) -> Any:
    return wrapper(module, **options)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_torchshards_tests_pass(reduction: str) -> None:
    if (folder := os.environ.get("TORCHSHARD")) is None:
        pytest.skip("torchshard's own tests are needed: set TORCHSHARD to the folder of a clone")
    found = run_ranks(RANKS, _run, folder, reduction)
    assert len(found[0]) >= 14
