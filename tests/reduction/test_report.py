"""The report of steps, and their number of collectives and peak memory."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_topo import GradientReducer
from ds_topo.reduction import reducer as reducers
from ds_topo.reduction.buckets import BucketTiming, StepTiming
from ds_topo.reduction.report import GradientReport
from tests.support.reduced_model import SMALL, backward, model
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


def _report() -> tuple[str, int]:
    module = model()
    with mock.patch.object(reducers, "REPORTED_STEPS", 3):
        reducer = GradientReducer(module, **SMALL)
    size = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad) * 4
    for step in range(5):
        module.zero_grad()
        backward(module, step)
        reducer.finish()
    report = reducer.report()
    assert [step.step for step in report.steps] == [2, 3, 4]
    assert sum(row["nbytes"] for row in report.rows()) == size
    assert 0.0 <= report.hidden_fraction <= 1.0
    for step in report.steps:
        for bucket in step.buckets:
            assert step.started_ns <= bucket.launched_ns <= bucket.done_ns <= step.ended_ns
    return str(report), len(reducer.buckets)


def test_report_covers_the_last_steps(world: Worlds) -> None:
    for table, buckets in world(2).run(_report):
        assert len(table.splitlines()) == buckets + 2


def _collectives_of_a_step() -> dict[str, int]:
    module = model()
    reducer = GradientReducer(module, **SMALL)
    for step in range(2):
        module.zero_grad()
        backward(module, step)
        reducer.finish()
    before = reducer.reduction_count
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for micro_batch in range(5):
            with reducer.no_sync() if micro_batch < 4 else nullcontext():
                backward(module, micro_batch)
        reducer.finish()
    return {
        "calls": all_reduce.call_count,
        "reductions": reducer.reduction_count - before,
        "buckets": len(reducer.buckets),
    }


def test_one_reduction_per_bucket_per_step(world: Worlds) -> None:
    counted = world(2).run(_collectives_of_a_step)[0]
    assert counted["reductions"] == counted["buckets"]
    assert counted["calls"] == counted["buckets"] + 1, "and one small all_reduce of the notes"


def _peak_gradient_bytes() -> tuple[int, int, int]:
    """Return the peak bytes of gradients and buckets, and the bytes of the parameters and of the largest bucket."""
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    reducer = GradientReducer(module, **SMALL | {"bucket_bytes": 40_000})
    peak = 0

    def look(_: torch.Tensor) -> None:
        nonlocal peak
        tensors = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        tensors += [bucket.flat for bucket in reducer._layout.buckets]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        peak = max(peak, sum(storages.values()))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    for _ in range(3):
        module.zero_grad()
        module(torch.ones(2, 64)).sum().backward()
        reducer.finish()
    reducer.detach()  # the hooks above keep it alive
    return (
        peak,
        sum(parameter.nbytes for parameter in module.parameters()),
        max(b.nbytes for b in reducer._layout.buckets),
    )


def test_peak_memory_is_the_parameters_size_and_at_most_one_bucket(world: Worlds) -> None:
    for peak, parameters, largest_bucket in world(2).run(_peak_gradient_bytes):
        assert parameters <= peak <= parameters + largest_bucket


def test_exposed_time_is_communication_after_finish_began() -> None:
    def bucket(launched: int, done: int) -> BucketTiming:
        return BucketTiming(0, 1, 1, "data", launched, done, wait_started_ns=0, wait_ended_ns=0)

    step = StepTiming(0, 0, finish_ns=100, ended_ns=160, buckets=[bucket(10, 40), bucket(30, 60), bucket(90, 150)])
    assert (step.communication_ns, step.exposed_ns) == (50 + 60, 50)
    after = StepTiming(1, 0, finish_ns=20, ended_ns=90, buckets=[bucket(30, 50), bucket(40, 80)])
    assert (after.communication_ns, after.exposed_ns) == (50, 50)
    early = StepTiming(2, 0, finish_ns=100, ended_ns=101, buckets=[bucket(10, 90)])
    assert (early.communication_ns, early.exposed_ns) == (80, 0)
    assert GradientReport(0, (step,)).hidden_fraction == pytest.approx(60 / 110)
    gathered = StepTiming(3, 0, finish_ns=100, ended_ns=101, gathers=[bucket(10, 40)])
    gathered.gathers[0].nbytes = 3 << 20
    assert "1 regions of parameters, 3.00 MiB a step" in GradientReport(0, (gathered,)).table()
