"""Compare gradients with torch's DDP, one process and DeepSpeed's engine, and check when buckets are launched."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo import GradientReducer, PipelineParallelGrid, initialize
from tests.support.reduced_model import (
    SMALL,
    alone,
    assert_close,
    assert_equal_on_all_ranks,
    gradients,
    model,
    tokens,
)
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", "strict")


def _against_ddp(micro_batches: int, set_to_none: bool) -> list[list[str]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ours = model(seed=rank)  # construction gives it the values of the first rank
    reducer = GradientReducer(ours, process_group=dist.group.WORLD, **SMALL)
    theirs = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    layouts = [reducer.buckets]
    for step in range(3):
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            for module, quiet in ((ours, reducer.no_sync), (theirs, theirs.no_sync)):
                with nullcontext() if is_last else quiet():
                    module(tokens(10 * step + micro_batch, rank)).backward()
        reducer.finish()
        found = gradients(ours)
        assert_equal_on_all_ranks(found)
        assert_close(found, gradients(theirs))
        assert_close(found, alone(step, micro_batches, world_size))
        for bucket in reducer._layout.buckets:  # the optimizer reads the bucket itself
            inside = bucket.flat.untyped_storage().data_ptr()
            assert all(member.parameter.grad.untyped_storage().data_ptr() == inside for member in bucket.members)
        for module in (ours, theirs):
            module.zero_grad(set_to_none=set_to_none)
        layouts.append(reducer.buckets)
    assert reducer.reduction_count == sum(len(layout) for layout in (layouts[0], layouts[2], layouts[2]))
    return layouts[-1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("micro_batches", "set_to_none"), [(1, True), (3, False), (3, True)])
def test_gradients_equal_those_of_ddp_and_of_one_process(world: Worlds, micro_batches: int, set_to_none: bool) -> None:
    layouts = world(2).run(_against_ddp, micro_batches, set_to_none)
    assert layouts[0] == layouts[1]
    names = [name for bucket in layouts[0] for name in bucket]
    assert len(layouts[0]) > 3
    assert names.index("branches.2.weight") < names.index("hidden.5.weight") < names.index("convolution.weight")
    assert len(names) == len(set(names))
    assert "hidden.0.bias" not in names


def _with_grid() -> None:
    """Reduce over the replicas of each pipeline stage, which has its own model."""
    with PipelineParallelGrid("pipe=2,data=2") as grid:
        module = nn.Linear(3, 2) if grid.is_first_stage else nn.Linear(2, 5)
        reducer = GradientReducer(module, grid=grid)
        module(torch.full((1, module.in_features), 1.0 + grid.get_data_parallel_rank())).sum().backward()
        reducer.finish()
        assert torch.equal(module.weight.grad, torch.full_like(module.weight, 1.5))
        reducer.detach()


def test_group_of_grid_is_its_data_parallel_group(world: Worlds) -> None:
    world(4).run(_with_grid)


LARGE = 128
"""The width of a weight that is large enough to be copied in at once."""


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
def test_large_gradients_equal_the_average_of_autograd(world: Worlds, accumulate: bool, set_to_none: bool) -> None:
    world(2).run(_large_gradients, accumulate, set_to_none)


# -- the order of launches --------------------------------------------------------------------------------------------


def _events(overlap: bool | None, steps: int) -> list[str]:
    """Return the events of the last step: arriving gradients, launched buckets, and the call of ``finish()``."""
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
def test_each_bucket_is_launched_when_it_is_full(world: Worlds, overlap: bool | None, steps: int) -> None:
    expected = [event for index in range(5, -1, -1) for event in (f"gradient {index}", "bucket")]
    assert world(2).run(_events, overlap, steps) == [[*expected, "finish", "notes"]] * 2


def test_buckets_without_overlap_are_launched_in_finish(world: Worlds) -> None:
    gradients = [f"gradient {index}" for index in range(5, -1, -1)]
    for events in world(2).run(_events, False, 3):
        assert events == [*gradients, "finish", *["bucket"] * 6, "notes"]


# -- the divisor in an engine ------------------------------------------------------------------------------------------


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
def test_engine_with_seq_axis_trains_as_with_deepspeeds_reduction(world: Worlds, topology: str) -> None:
    world(4).run(_over_seq_both_ways, topology)
