"""Collectives and their gradients equal one process that holds all ranks' tensors, and numerical derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from ds_topo import PipelineParallelGrid, collectives
from tests.support.counted_collectives import CountedCollectives
from tests.support.exhaustive import mark_exhaustive
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("strict", exhaustive=("gloo",))

GRIDS = [(2, "model=2"), (4, "model=4"), (4, "model=2,data=2")]
"""World size and topology: whole worlds, and groups of ranks that are not adjacent."""

CPU = torch.device("cpu")
Group = dist.ProcessGroup
SHAPE = (4, 8, 4)
PAIRS = [(split, concat) for split in range(3) for concat in range(3)]


def _tensor_of(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return torch.complex(values, values.flip(0)).to(dtype) if dtype.is_complex else values.to(dtype)


def _expected(name: str, inputs: list[Tensor], rank: int, dims: tuple[int, ...]) -> Tensor:
    """Return what rank ``rank`` of a group must hold, from the inputs of all its ranks."""
    n, total = len(inputs), torch.stack(inputs).sum(0)
    if name == "copy":
        return inputs[rank]
    if name == "reduce":
        return total
    if name == "scatter":
        return inputs[rank].chunk(n, dims[0])[rank]
    if name in ("gather", "all_gather"):
        return torch.cat(inputs, dims[0])
    if name == "reduce_scatter":
        return total.chunk(n, dims[0])[rank]
    return torch.cat([x.chunk(n, dims[0])[rank] for x in inputs], dims[1])


DIMS: dict[str, list[tuple[int, ...]]] = {
    "copy": [()],
    "reduce": [()],
    **{name: [(0,), (1,), (2,), (-1,)] for name in ("scatter", "gather", "all_gather", "reduce_scatter")},
    "all_to_all": PAIRS,
}
"""The dimensions that every collective is called with."""
DUALS = {
    "copy": "reduce",
    "reduce": "copy",
    "scatter": "gather",
    "gather": "scatter",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}


def _compare_with_one_process(topology: str, dtype: torch.dtype, device: torch.device = CPU) -> None:
    with PipelineParallelGrid(topology) as grid:
        for name, calls in DIMS.items():
            for dims in calls:
                _compare(grid.get_group("model"), grid.get_ranks("model"), dtype, name, dims, device)


def _compare(
    group: Group, ranks: list[int], dtype: torch.dtype, name: str, dims: tuple[int, ...], device: torch.device
) -> None:
    tolerance: dict[str, Any] = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    me, n = ranks.index(dist.get_rank()), len(ranks)
    inputs = [_tensor_of(rank, dtype).to(device) for rank in ranks]
    x = inputs[me].clone().requires_grad_()
    for given in (x, x.transpose(0, 2).contiguous().transpose(0, 2)):
        result = getattr(collectives, name)(given, group, *dims)
        expected = _expected(name, inputs, me, dims)
        torch.testing.assert_close(result, expected, **tolerance)
        cotangents = [_tensor_of(rank + 100, dtype).to(device).repeat(n, 1, 1).flatten() for rank in ranks]
        cotangents = [values[: result.numel()].view(result.shape) for values in cotangents]
        before = cotangents[me].clone()
        (gradient,) = torch.autograd.grad(result, x, cotangents[me])
        torch.testing.assert_close(gradient, _expected(DUALS[name], cotangents, me, dims[::-1]), **tolerance)
        assert torch.equal(cotangents[me], before)
    assert torch.equal(x.detach(), inputs[me])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(("world_size", "topology"), GRIDS)
def test_forward_and_backward_equal_one_process(
    world: Worlds, world_size: int, topology: str, dtype: torch.dtype
) -> None:
    world(world_size).run(_compare_with_one_process, topology, dtype)


def _scatter_and_gather(dim: int, own: Callable[[Tensor], Tensor], x: Tensor, group: Group) -> Tensor:
    return collectives.gather(own(collectives.scatter(x, group, dim)), group, dim)


def _gather_and_scatter(dim: int, own: Callable[[Tensor], Tensor], x: Tensor, group: Group) -> Tensor:
    gathered = collectives.all_gather(collectives.scatter(x, group, dim), group, dim)
    return collectives.gather(collectives.reduce_scatter(own(gathered), group, dim), group, dim)


def _exchange(dim: int, own: Callable[[Tensor], Tensor], x: Tensor, group: Group) -> Tensor:
    exchanged = collectives.all_to_all(collectives.scatter(x, group, dim), group, 1 - dim, dim)
    return collectives.gather(own(exchanged), group, 1 - dim)


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor, Group], Tensor]] = {
    "copy, reduce": lambda own, x, group: collectives.reduce(own(collectives.copy(x, group)), group),
    **{f"scatter, gather {dim}": partial(_scatter_and_gather, dim) for dim in (0, 1)},
    **{f"all_gather, reduce_scatter {dim}": partial(_gather_and_scatter, dim) for dim in (0, 1)},
    **{f"all_to_all {dim}": partial(_exchange, dim) for dim in (0, 1)},
}
"""From one replicated tensor to another, through every collective, with work of each rank's own between."""


def _differentiate(topology: str, dtype: torch.dtype) -> None:
    """All ranks perturb the same element at the same time, so that differences of values are true derivatives."""
    weight = torch.randn(64, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)

    def own(x: Tensor) -> Tensor:
        return torch.sin(x * weight.reshape(-1)[: x.numel()].view(x.shape))

    with PipelineParallelGrid(topology) as grid:
        for way in WAYS:
            function = partial(WAYS[way], own, group=grid.get_group("model"))
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)
            assert gradcheck(function, (x.clone().requires_grad_(),)), way
            if not dtype.is_complex:
                x = x.clone().requires_grad_()
                assert gradgradcheck(function, (x,), fast_mode=True, gen_non_contig_grad_outputs=False), way


@pytest.mark.parametrize(
    ("world_size", "topology", "dtype"),
    mark_exhaustive(
        [(*grid, torch.float64) for grid in GRIDS] + [(*GRIDS[0], torch.complex128)],
        default=lambda number, _: number == 0,
    ),
)
@pytest.mark.backends("gloo", exhaustive=("strict",))
def test_numerical_derivatives(world: Worlds, world_size: int, topology: str, dtype: torch.dtype) -> None:
    world(world_size).run(_differentiate, topology, dtype)


def _run(function: Callable[[Tensor], Any], device: torch.device, **autocast: Any) -> tuple[Tensor, Tensor | None]:
    """A result, and the gradient of the sum of its squares."""
    x = torch.linspace(-1, 1, 16, device=device).view(2, 8).requires_grad_()
    with torch.autocast(device.type, **autocast):
        result = function(x)
    result.float().square().sum().backward()
    return result.detach(), x.grad


MODES: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "eager": lambda layer: layer,
    "compiled": lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True),
    "reentrant checkpoint": lambda layer: partial(checkpoint, layer, use_reentrant=True),
    "checkpoint": lambda layer: partial(checkpoint, layer, use_reentrant=False),
    "autocast": lambda layer: layer,
}


def _in_torchs_mode(mode: str, device: torch.device = CPU) -> None:
    group = dist.group.WORLD
    torch.manual_seed(0)
    first, second = torch.randn(8, 4).to(device), torch.randn(4, 8).to(device)

    def layer(x: Tensor) -> Tensor:
        inner = torch.relu(collectives.copy(x, group) @ collectives.scatter(first, group, 1))
        return collectives.reduce(inner @ collectives.scatter(second, group, 0), group)

    whole = _run(lambda x: torch.relu(x @ first) @ second, device, enabled=False)
    if mode == "autocast":
        result, gradient = _run(layer, device, dtype=torch.bfloat16)
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(gradient, whole[1], rtol=0.1, atol=0.5)
    else:
        torch.testing.assert_close(_run(MODES[mode](layer), device, enabled=False), whole)


@pytest.mark.parametrize("mode", MODES)
def test_works_under_compile_checkpointing_and_autocast(world: Worlds, mode: str) -> None:
    if mode == "compiled" and world.backend != "gloo" and torch.__version__ < "2.9":
        pytest.skip("this torch cannot compile calls of a group that is implemented in Python")
    world(2).run(_in_torchs_mode, mode)


def _count_in_a_group_of_one() -> None:
    with PipelineParallelGrid("data=2,model=1") as grid:
        x, group = torch.ones(3, 5, requires_grad=True), grid.get_group("model")
        for name, dims in ((name, dims) for name, every in DIMS.items() for dims in every):
            if all(dim < 2 for dim in dims):
                with CountedCollectives() as counter:
                    assert getattr(collectives, name)(x, group, *dims) is x
                assert not counter.calls


def test_group_of_one_returns_the_input_without_communication(world: Worlds) -> None:
    world(2).run(_count_in_a_group_of_one)
