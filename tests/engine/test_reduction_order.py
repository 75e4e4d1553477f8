"""Ranks that use other parameters, or use them in another order, get averages, or the same error on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_topo import PipelineParallelGrid, initialize
from ds_topo.engine import reduction_order
from ds_topo.errors import DisagreementError
from tests.support.exhaustive import mark_exhaustive
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


class Parts(nn.Module):
    """A sum of parts, in any order: backward produces the gradients in the opposite order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(4))

    def forward(self, inputs: torch.Tensor, order: list[int]) -> torch.Tensor:
        return sum((inputs @ self.parts[index]).tanh() * (index + 1) for index in order).square().mean()


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(("scatters", "is_contiguous"), [(True, True), (False, False), (False, True)])
def test_ranks_compare_what_they_have_gathered_with_the_last_bucket(
    is_known: bool, is_last: bool, scatters: bool, is_contiguous: bool
) -> None:
    parameters, modules = [SimpleNamespace(ds_id=number) for number in (5, 3)], [SimpleNamespace(ds_id=9)]
    outside = [SimpleNamespace(ds_id=4)]
    coordinator: Any = SimpleNamespace(is_complete_trace=lambda: is_known)
    vars(coordinator).update({reduction_order._GATHERED: 8, reduction_order._ORDER: modules})
    optimizer: Any = SimpleNamespace(
        ipg_buckets={torch.float32: SimpleNamespace(params=parameters)},
        reduce_scatter=scatters,
        contiguous_gradients=is_contiguous,
        parameter_offload=SimpleNamespace(get_param_coordinator=lambda: coordinator),
    )
    compared = mock.Mock(waits_for_device=is_last, external_parameters=lambda: outside)
    reduction_order.compare_partitioned_bucket(compared, optimizer, torch.float32)
    content, named, facts = compared.compare.call_args.args
    names, *others = named.values()
    ids = [5, 3] if is_contiguous and not scatters else [3, 5]
    order = [-1, *([] if is_known else [9]), -1, 4]
    assert content == ids + ([is_known, 8, *order] if is_last else [])
    assert [each.ds_id for each in names] == ids
    assert others == ([[] if is_known else modules, outside] if is_last else [])
    assert len(facts) == is_last


_USES = {
    "another order": ([0, 1, 2, 3], [3, 2, 1, 0]),
    "other parameters": ([0, 1, 3], [0, 2, 3]),
    "more parameters": ([0, 1, 3], [0, 1, 2, 3]),
}
"""The parts that even and odd ranks use, in that order."""


def _samples(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _train(spec: str, use: str, zero: dict[str, Any], alike: int = 0) -> float:
    """Return the largest relative difference from one process after two steps; the first ``alike`` are equal."""
    start()
    module, alone = Parts(), Parts()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    with PipelineParallelGrid(spec) as grid:
        engine, *_ = initialize(model=module, mpu=grid, config=settings(zero_optimization=zero))
        for step in range(4):
            order_of = [_USES[use][rank % 2 if step >= alike else 0] for rank in range(grid.world_size)]
            engine.backward(engine(_samples(step, dist.get_rank()), order_of[dist.get_rank()]))
            engine.step()
            for rank, order in enumerate(order_of):
                (alone(_samples(step, rank), order) / (2 * grid.world_size)).backward()
            if step % 2:
                for parameter in alone.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                optimizer.step()
                optimizer.zero_grad()
        with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=zero["stage"] == 3):
            found = [parameter.detach().clone() for parameter in module.parameters()]
        engine.destroy()
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, alone.parameters(), strict=True))


@pytest.mark.parametrize("spec", ["data=2", "data=2,shard=2"])
@pytest.mark.parametrize("use", mark_exhaustive(_USES, lambda number, _: number > 0))
def test_zero_1_averages_whatever_ranks_use(world: Worlds, use: str, spec: str) -> None:
    assert max(world(2 * spec.count("2")).run(_train, spec, use, {"stage": 1})) < 1e-6


def _train_coalesced(zero: dict[str, Any]) -> float:
    """Return the largest relative difference from one process after a step of two backward passes in one block."""
    start()
    module, alone = Parts(), Parts()
    config = {"gradient_accumulation_steps": 1, "zero_optimization": zero}
    with PipelineParallelGrid("data=2") as grid:
        engine, *_ = initialize(model=module, mpu=grid, config=settings(**config))
        orders = _USES["other parameters"]
        with engine.coalesce_grad_reduction():
            for step in range(2):
                engine.backward(engine(_samples(step, dist.get_rank()), orders[dist.get_rank()]) / 2)
        engine.step()
        for step in range(2):
            for rank, order in enumerate(orders):
                (alone(_samples(step, rank), order) / 4).backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        found = [parameter.detach().clone() for parameter in module.parameters()]
        engine.destroy()
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, alone.parameters(), strict=True))


@pytest.mark.parametrize(
    "zero", mark_exhaustive([{"stage": 1}, {"stage": 2}, {"stage": 1, "overlap_comm": True}], lambda n, _: n < 2)
)
def test_coalesced_gradients_are_averages(world: Worlds, zero: dict[str, Any]) -> None:
    assert max(world(2).run(_train_coalesced, zero)) < 1e-6


_REDUCED_IN_BACKWARD = [
    ({"stage": 2}, "another order"),
    ({"stage": 2}, "more parameters"),
    ({"stage": 2, "overlap_comm": True, "reduce_bucket_size": 100}, "other parameters"),
    ({"stage": 2, "contiguous_gradients": False}, "another order"),
    ({"stage": 1, "overlap_comm": True}, "another order"),
    ({"stage": 3}, "another order"),
    ({"stage": 3, "reduce_bucket_size": 64, "stage3_param_persistence_threshold": 10**6}, "other parameters"),
]


@pytest.mark.parametrize(("zero", "use"), mark_exhaustive(_REDUCED_IN_BACKWARD, lambda n, _: n not in (3, 4)))
@pytest.mark.parametrize("spec", mark_exhaustive(["data=2", "data=2,shard=2"], lambda number, _: number == 0))
def test_buckets_that_differ_are_refused_on_all_ranks(
    world: Worlds, backend: str, spec: str, zero: dict[str, Any], use: str
) -> None:
    if (backend, use, zero.get("overlap_comm")) == ("strict", "more parameters", None):
        pytest.skip("the stand-in refuses sizes that differ at once, where NCCL waits until the optimizer's step")
    size = 2 * spec.count("2")
    for error in world(size).run(_train, spec, use, zero, expect_failure=True):
        with pytest.raises(DisagreementError) as raised:
            raise error
        text = str(raised.value)
        assert "the gradients that they reduce together" in text
        assert "ranks [0" in text or "ranks [2" in text
        assert "parts." in text
        assert "GradientReducer" in text


def test_a_later_step_that_differs_is_refused(world: Worlds) -> None:
    for error in world(2).run(_train, "data=2", "another order", {"stage": 2}, 2, expect_failure=True):
        assert "1. parts." in str(error)


def _end_backward_early() -> None:
    """Train at ZeRO 3; in the last step, backward on rank 1 does not reach the first module, without parameters."""
    start()
    module = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
    with PipelineParallelGrid("data=2") as grid:
        engine, *_ = initialize(model=module, mpu=grid, config=settings(zero_optimization={"stage": 3}))
        for step in range(6):
            inputs = _samples(step, dist.get_rank()).requires_grad_(step < 5 or dist.get_rank() == 0)
            engine.backward(engine(inputs).square().mean())
            engine.step()


def test_another_number_of_gathers_is_refused(world: Worlds) -> None:
    for error in world(2).run(_end_backward_early, expect_failure=True):
        with pytest.raises(DisagreementError, match="modules have gathered parameters, in the order of earlier steps"):
            raise error


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_that_do_the_same_train_as_one_process(world: Worlds, stage: int, overlap: bool) -> None:
    zero = {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 100}
    assert max(world(2).run(_train, "data=2", "another order", zero, 9)) < 1e-6
