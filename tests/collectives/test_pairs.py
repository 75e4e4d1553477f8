"""Collectives with gradients: against one process that holds all ranks' tensors, and by numerical differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from ds_topo import DisagreementError, PipelineParallelGrid, collectives
from tests.support.counted_collectives import CountedCollectives
from tests.support.ranks import run_ranks

GRIDS = [(2, "model=2"), (4, "model=4"), (4, "model=2,data=2")]
"""World size and topology: whole worlds, and groups of ranks that are not adjacent."""

Group = dist.ProcessGroup
SHAPE = (4, 8, 4)
PAIRS = [(split, concat) for split in range(3) for concat in range(3)]


def _tensor_of(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return torch.complex(values, values.flip(0)).to(dtype) if dtype.is_complex else values.to(dtype)


def _expected(name: str, inputs: list[Tensor], rank: int, dims: tuple[int, ...]) -> Tensor:
    """What rank ``rank`` of a group must hold, from the inputs of all its ranks."""
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


CALLS = [
    ("copy", ()),
    ("reduce", ()),
    *((name, (dim,)) for name in ("scatter", "gather", "all_gather", "reduce_scatter") for dim in (0, 1, 2, -1)),
    *(("all_to_all", pair) for pair in PAIRS),
]
DUALS = {
    "copy": "reduce",
    "reduce": "copy",
    "scatter": "gather",
    "gather": "scatter",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}


def _compare_with_one_process(topology: str) -> None:
    grid = PipelineParallelGrid(topology)
    group, ranks = grid.get_group("model"), grid.get_ranks("model")
    me, n = ranks.index(dist.get_rank()), len(ranks)
    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        tolerance: dict[str, Any] = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
        inputs = [_tensor_of(rank, dtype) for rank in ranks]
        for name, dims in CALLS:
            x = inputs[me].clone().requires_grad_()
            for given in (x, x.transpose(0, 2).contiguous().transpose(0, 2)):
                result = getattr(collectives, name)(given, group, *dims)
                expected = _expected(name, inputs, me, dims)
                torch.testing.assert_close(result, expected, **tolerance)
                cotangents = [_tensor_of(rank + 100, dtype).repeat(n, 1, 1).flatten() for rank in ranks]
                cotangents = [values[: result.numel()].view(result.shape) for values in cotangents]
                before = cotangents[me].clone()
                (gradient,) = torch.autograd.grad(result, x, cotangents[me])
                torch.testing.assert_close(gradient, _expected(DUALS[name], cotangents, me, dims[::-1]), **tolerance)
                assert torch.equal(cotangents[me], before)
            assert torch.equal(x.detach(), inputs[me])


@pytest.mark.parametrize(("world_size", "topology"), GRIDS)
def test_forward_and_backward_equal_one_process(world_size: int, topology: str) -> None:
    run_ranks(world_size, _compare_with_one_process, topology)


def _replicated_functions(group: Group, weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions from one replicated tensor to another, through every collective, with work of each rank's own between.

    All ranks perturb the same element at the same time, so that differences of values are true derivatives.
    """
    c = collectives

    def own(x: Tensor) -> Tensor:
        return torch.sin(x * weight.reshape(-1)[: x.numel()].view(x.shape))

    functions: dict[str, Callable[[Tensor], Tensor]] = {}
    functions["copy, reduce"] = lambda x: c.reduce(own(c.copy(x, group)), group)
    for dim in (0, 1):
        functions[f"scatter, gather {dim}"] = lambda x, dim=dim: c.gather(own(c.scatter(x, group, dim)), group, dim)
        functions[f"all_gather, reduce_scatter {dim}"] = lambda x, dim=dim: c.gather(
            c.reduce_scatter(own(c.all_gather(c.scatter(x, group, dim), group, dim)), group, dim), group, dim
        )
        functions[f"all_to_all {dim}"] = lambda x, dim=dim: c.gather(
            own(c.all_to_all(c.scatter(x, group, dim), group, 1 - dim, dim)), group, 1 - dim
        )
    return functions


def _differentiate(topology: str) -> None:
    grid = PipelineParallelGrid(topology)
    group = grid.get_group("model")
    for dtype in (torch.float64, torch.complex128) if dist.get_world_size() == 2 else (torch.float64,):
        weight = torch.randn(64, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)
        for name, function in _replicated_functions(group, weight).items():
            assert gradcheck(function, (x.clone().requires_grad_(),)), name
            if not dtype.is_complex:
                x = x.clone().requires_grad_()
                assert gradgradcheck(function, (x,), fast_mode=True, gen_non_contig_grad_outputs=False), name


@pytest.mark.parametrize(("world_size", "topology"), GRIDS)
def test_numerical_derivatives(world_size: int, topology: str) -> None:
    run_ranks(world_size, _differentiate, topology)


def _in_torchs_modes() -> None:
    group = dist.group.WORLD
    torch.manual_seed(0)
    first, second = torch.randn(8, 4), torch.randn(4, 8)

    def layer(x: Tensor) -> Tensor:
        inner = torch.relu(collectives.copy(x, group) @ collectives.scatter(first, group, 1))
        return collectives.reduce(inner @ collectives.scatter(second, group, 0), group)

    def run(function: Callable[[Tensor], Any], **autocast: Any) -> tuple[Tensor, Tensor | None]:
        x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
        with torch.autocast("cpu", **autocast):
            result = function(x)
        result.float().square().sum().backward()
        return result.detach(), x.grad

    whole = run(lambda x: torch.relu(x @ first) @ second, enabled=False)
    functions = (
        layer,
        torch.compile(layer, backend="aot_eager", fullgraph=True),
        lambda x: checkpoint(layer, x, use_reentrant=True),
        lambda x: checkpoint(layer, x, use_reentrant=False),
    )
    for function in functions:
        torch.testing.assert_close(run(function, enabled=False), whole)
    result, gradient = run(layer, dtype=torch.bfloat16)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, whole[1], rtol=0.1, atol=0.5)


def test_compile_checkpointing_and_autocast() -> None:
    run_ranks(2, _in_torchs_modes)


def _count_in_a_group_of_one() -> None:
    grid = PipelineParallelGrid("data=2,model=1")
    x, group = torch.ones(3, 5, requires_grad=True), grid.get_group("model")
    for name, dims in CALLS:
        if all(dim < 2 for dim in dims):
            with CountedCollectives() as counter:
                assert getattr(collectives, name)(x, group, *dims) is x
            assert not counter.calls


def test_a_group_of_one_is_free() -> None:
    run_ranks(2, _count_in_a_group_of_one)


def _errors() -> list[str]:
    x, group, messages = torch.zeros(6, 5), dist.group.WORLD, []
    calls: list[Callable[[], Any]] = [
        lambda: collectives.scatter(x, group, 1),
        lambda: collectives.scatter(x, group, 2),
        lambda: collectives.copy(x.to("meta"), group),
        lambda: collectives.reduce(x, None),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        messages.append(str(caught.value))
    with collectives.debug(), pytest.raises(DisagreementError) as disagreement:
        collectives.reduce(torch.zeros(2 + dist.get_rank()), group)
    with collectives.debug():  # where they agree, backward too
        y = x.clone().requires_grad_()
        collectives.reduce(collectives.copy(y, group), group).sum().backward()
    with collectives.debug(), pytest.raises(DisagreementError):
        collectives.gather(torch.zeros(2, dtype=torch.float32 if dist.get_rank() else torch.float64), group)
    return [*messages, str(disagreement.value)]


def test_errors_name_the_dimension_and_what_would_do() -> None:
    for indivisible, absent, device, no_group, disagreement in run_ranks(2, _errors):
        assert "dimension 1 of a tensor [6, 5] is 5 long" in indivisible
        assert "1 left over" in indivisible
        assert "valid are -2 to 1" in absent
        assert "on meta" in device
        assert "None" in no_group
        assert "ranks [0]: reduce(tensor [2]" in disagreement
        assert "ranks [1]: reduce(tensor [3]" in disagreement
