"""Single properties of the reducer, each of which a small slip would break: scale, order of events, sizes, times."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_topo import GradientReducer, PipelineParallelGrid, initialize
from ds_topo.reducer.planning import BucketSizes, plan_buckets
from ds_topo.reducer.report import BucketTiming, GradientReport, StepTiming
from tests.support.world import Worlds

LARGE = 128
"""A weight of 128 x 128 is scaled into its bucket at once."""


def _large_gradients(accumulate: bool, set_to_none: bool) -> None:
    module = nn.Sequential(nn.Linear(LARGE, LARGE), nn.Linear(LARGE, 2))
    reducer = GradientReducer(module)
    for step in range(3):
        expected = [torch.zeros_like(parameter) for parameter in module.parameters()]
        for micro_batch in range(3 if accumulate else 1):
            is_last = micro_batch == (2 if accumulate else 0)
            for rank in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
                samples = torch.randn(3, LARGE, generator=generator)
                if rank == dist.get_rank():
                    with nullcontext() if is_last else reducer.no_sync():
                        module(samples).square().sum().backward()
                gradients = torch.autograd.grad(module(samples).square().sum(), list(module.parameters()))
                for total, gradient in zip(expected, gradients, strict=True):
                    total += gradient / 2
        reducer.finish()
        for parameter, total in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, total, rtol=1e-5, atol=1e-4)
        module.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_large_gradients_are_averaged_as_small_ones_are(world: Worlds, accumulate: bool, set_to_none: bool) -> None:
    world(2).run(_large_gradients, accumulate, set_to_none)


# -- overlap: an order of events --------------------------------------------------------------------------------------


def _events(overlap: bool | None, steps: int) -> list[str]:
    """What happens in the last step: gradients as they arrive, buckets as they leave, and the call of ``finish()``."""
    module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    reducer = GradientReducer(
        module, bucket_bytes=1024, first_bucket_bytes=1024, last_bucket_bytes=1024, overlap=overlap
    )
    events: list[str] = []
    for index, layer in enumerate(module):
        layer.weight.register_post_accumulate_grad_hook(lambda _, index=index: events.append(f"gradient {index}"))
    all_reduce = dist.all_reduce

    def seen(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        events.append("bucket" if tensor.is_floating_point() else "notes")
        return all_reduce(tensor, *args, **options)

    for _ in range(steps):
        events.clear()
        module.zero_grad()
        with mock.patch.object(dist, "all_reduce", seen):
            module(torch.ones(1, 16)).sum().backward()
            events.append("finish")
            reducer.finish()
    return events


@pytest.mark.parametrize("overlap", [None, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_each_bucket_leaves_as_soon_as_it_is_full(world: Worlds, overlap: bool | None, steps: int) -> None:
    expected = [event for index in range(5, -1, -1) for event in (f"gradient {index}", "bucket")]
    assert world(2).run(_events, overlap, steps) == [[*expected, "finish", "notes"]] * 2


def test_without_overlap_buckets_leave_in_finish(world: Worlds) -> None:
    gradients = [f"gradient {index}" for index in range(5, -1, -1)]
    for events in world(2).run(_events, False, 3):
        assert events == [*gradients, "finish", *["bucket"] * 6, "notes"]


# -- the divisor of an engine whose replicas share samples ------------------------------------------------------------


def _over_seq(topology: str, reduced: bool) -> list[torch.Tensor]:
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    with PipelineParallelGrid(topology) as grid:
        module = nn.Linear(6, 3)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "gradient_reducer": reduced,
        }
        engine, *_ = initialize(model=module, mpu=grid, config=config)
        for step in range(3):
            samples = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            engine.backward(engine(samples).square().mean())
            engine.step()
        engine.destroy()
        return [parameter.detach().clone() for parameter in module.parameters()]


def _over_seq_both_ways(topology: str) -> None:
    for ours, theirs in zip(_over_seq(topology, True), _over_seq(topology, False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("topology", ["data=2,seq=2", "seq=4"])
def test_gradients_over_seq_are_summed_in_an_engine_too(world: Worlds, topology: str) -> None:
    world(4).run(_over_seq_both_ways, topology)


# -- sizes and times --------------------------------------------------------------------------------------------------


def test_the_last_bucket_holds_what_fits_and_no_more() -> None:
    sizes = BucketSizes(bucket_bytes=1000, first_bytes=10, last_bytes=30)
    assert plan_buckets([10, 10, 10, 10, 10, 10], ["kind"] * 6, range(6), sizes) == [(0,), (1, 2), (3, 4, 5)]
    assert plan_buckets([10, 10, 10, 15, 10], ["kind"] * 5, range(5), sizes) == [(0,), (1, 2), (3, 4)]
    assert plan_buckets([10, 10, 40], ["kind"] * 3, range(3), sizes) == [(0,), (1,), (2,)], "at least one"


def test_the_first_bucket_is_closed_by_what_reaches_its_capacity() -> None:
    sizes = BucketSizes(bucket_bytes=100, first_bytes=30, last_bytes=1)
    assert plan_buckets([20, 20, 60, 60, 10], ["kind"] * 5, range(5), sizes) == [(0, 1), (2, 3), (4,)]


def test_exposed_is_what_finish_waits_for() -> None:
    def bucket(launched: int, done: int) -> BucketTiming:
        return BucketTiming(0, 1, 1, "data", launched, done, wait_started_ns=0, wait_ended_ns=0)

    step = StepTiming(0, 0, finish_ns=100, ended_ns=160, buckets=[bucket(10, 40), bucket(30, 60), bucket(90, 150)])
    assert (step.communication_ns, step.exposed_ns) == (50 + 60, 50)
    after = StepTiming(1, 0, finish_ns=20, ended_ns=90, buckets=[bucket(30, 50), bucket(40, 80)])
    assert (after.communication_ns, after.exposed_ns) == (50, 50)
    early = StepTiming(2, 0, finish_ns=100, ended_ns=101, buckets=[bucket(10, 90)])
    assert (early.communication_ns, early.exposed_ns) == (80, 0)
    assert GradientReport(0, (step,)).hidden_fraction == pytest.approx(60 / 110)
