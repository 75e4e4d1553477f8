"""Gradients beside torch's DDP, and beside one process with every rank's samples."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo import GradientReducer, PipelineParallelGrid
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


def _against_ddp(micro_batches: int, set_to_none: bool) -> list[list[str]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ours = model(seed=rank)  # made equal to the first rank's at the start
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
        for bucket in reducer._layout.buckets:  # no copy out: what the optimizer reads is the bucket
            inside = bucket.flat.untyped_storage().data_ptr()
            assert all(member.parameter.grad.untyped_storage().data_ptr() == inside for member in bucket.members)
        for module in (ours, theirs):
            module.zero_grad(set_to_none=set_to_none)
        layouts.append(reducer.buckets)
    assert reducer.reduction_count == sum(len(layout) for layout in (layouts[0], layouts[2], layouts[2]))
    return layouts[-1]


@pytest.mark.parametrize(("micro_batches", "set_to_none"), [(1, True), (3, False), (3, True)])
def test_gradients_equal_ddps_and_one_process(world: Worlds, micro_batches: int, set_to_none: bool) -> None:
    layouts = world(2).run(_against_ddp, micro_batches, set_to_none)
    assert layouts[0] == layouts[1]
    names = [name for bucket in layouts[0] for name in bucket]
    assert len(layouts[0]) > 3
    assert names.index("branches.2.weight") < names.index("hidden.5.weight") < names.index("convolution.weight")
    assert len(names) == len(set(names))
    assert "hidden.0.bias" not in names


def _with_grid() -> None:
    """Replicas are the data and seq peers; the other pipeline stage has a model of its own."""
    with PipelineParallelGrid("pipe=2,data=2") as grid:
        module = nn.Linear(3, 2) if grid.is_first_stage else nn.Linear(2, 5)
        reducer = GradientReducer(module, grid=grid)
        module(torch.full((1, module.in_features), 1.0 + grid.get_data_parallel_rank())).sum().backward()
        reducer.finish()
        assert torch.equal(module.weight.grad, torch.full_like(module.weight, 1.5))
        reducer.detach()


def test_a_grid_gives_the_group(world: Worlds) -> None:
    world(4).run(_with_grid)
