"""Scaling, types, communication hooks, two levels, sizes of buckets: the ways that a bucket takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ds_topo import GradientReducer
from ds_topo.reducer import ReductionOptions, probes
from ds_topo.reducer.routes import scaling
from ds_topo.reducer.two_level import TwoLevelReduction
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


def _reduced(**options: Any) -> dict[str, torch.Tensor | None]:
    module = model()
    reducer = GradientReducer(module, **SMALL | options)
    module(tokens(0, dist.get_rank())).backward()
    reducer.finish()
    return gradients(module)


def _scaled() -> None:
    average = _reduced()
    for options, factor in (
        ({"op": "sum"}, 2.0),
        ({"predivide_factor": 4.0}, 1.0),
        ({"divisor": 8}, 0.25),
        ({"op": "sum", "predivide_factor": 2.0}, 2.0),
    ):
        expected = {name: None if value is None else value * factor for name, value in average.items()}
        assert_close(_reduced(**options), expected)
    rounded = _reduced(communication_dtype=torch.bfloat16)
    assert_close(rounded, average, rtol=2e-2)
    assert not all(torch.equal(rounded[name], value) for name, value in average.items() if value is not None)
    assert_equal_on_all_ranks(rounded)


def test_scaling_and_communication_dtype(world: Worlds) -> None:
    world(2).run(_scaled)


def _native_ops() -> None:
    group = dist.group.WORLD
    with (
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch.object(dist, "_make_nccl_premul_sum", lambda factor: ("premul", factor), create=True),
    ):
        assert scaling(ReductionOptions(), 2, group) == (1.0, 1.0, dist.ReduceOp.AVG)
        assert scaling(ReductionOptions(), 8, group) == (1.0, 1.0, ("premul", 0.125)), "experts: a group of 2 out of 8"
        assert scaling(ReductionOptions(predivide_factor=4.0), 2, group) == (1.0, 2.0, ("premul", 0.25))
        assert scaling(ReductionOptions(op="sum"), 2, group) == (1.0, 1.0, dist.ReduceOp.SUM)
        assert scaling(ReductionOptions(), 2, group, is_flat=False) == (0.5, 1.0, dist.ReduceOp.SUM)
    assert scaling(ReductionOptions(), 2, group) == (0.5, 1.0, dist.ReduceOp.SUM)


def test_nccl_multiplies_by_itself(world: Worlds) -> None:
    world(2).run(_native_ops)


def _bf16_accumulated_wide() -> None:
    """Many small bf16 gradients: adding them in bf16 stops short, adding them in fp32 does not."""
    count = 300
    module = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    reducer = GradientReducer(module, accumulation_dtype=torch.float32)
    for _ in range(2):
        for index in range(count):
            with reducer.no_sync() if index < count - 1 else nullcontext():
                module(torch.full((1, 4), 1.0 + dist.get_rank(), dtype=torch.bfloat16)).sum().backward()
        reducer.finish()
        assert torch.equal(module.weight.main_grad, torch.full((4, 4), 1.5 * count))
        assert module.weight.grad.dtype == torch.bfloat16
        assert torch.equal(module.weight.grad, torch.full((4, 4), 1.5 * count, dtype=torch.bfloat16))
        module.zero_grad()


def test_bf16_gradients_accumulate_in_fp32(world: Worlds) -> None:
    world(2).run(_bf16_accumulated_wide)


def _hooked() -> None:
    rank = dist.get_rank()
    hooks: list[tuple[Callable[[], Any], Callable[..., Any]]] = [
        (lambda: None, default_hooks.allreduce_hook),
        (lambda: None, default_hooks.bf16_compress_hook),
        (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        (
            lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1),
            powerSGD_hook.powerSGD_hook,
        ),
    ]
    sizes = {"bucket_bytes": 1 << 20, "first_bucket_bytes": 1 << 20, "last_bucket_bytes": 1 << 20}  # DDP's: one bucket
    for make_state, hook in hooks:
        ours, theirs = model(), DistributedDataParallel(model(), gradient_as_bucket_view=True)
        reducer = GradientReducer(ours, **SMALL | sizes)
        reducer.register_comm_hook(make_state(), hook)
        with mock.patch.object(DistributedDataParallel, "_check_comm_hook"):  # it wants CUDA for bf16
            theirs.register_comm_hook(make_state(), hook)
        for step in range(4):
            for module in (ours, theirs):
                module.zero_grad()
            ours(tokens(step, rank)).backward()
            reducer.finish()
            theirs(tokens(step, rank)).backward()
            if hook is not powerSGD_hook.powerSGD_hook or step < 2:
                assert_close(gradients(ours), gradients(theirs))
            assert_equal_on_all_ranks(gradients(ours))
        exact = alone(3, 1, 2)
        if hook is powerSGD_hook.powerSGD_hook:  # an approximation whose error depends on the order in the bucket
            assert reducer._dense.hook_state.error_dict
            assert not torch.equal(ours.hidden[1].weight.grad, exact["hidden.1.weight"])
        with pytest.raises(ValueError, match="predivide_factor"):
            GradientReducer(model(), predivide_factor=2.0).register_comm_hook(None, hook)


def test_ddp_communication_hooks(world: Worlds) -> None:
    world(2).run(_hooked)


def _two_level() -> None:
    """Two hosts by name, two ranks each."""
    rank = dist.get_rank()
    with mock.patch("socket.gethostname", return_value=f"host{rank // 2}"):
        module = model(seed=rank)
        reducer = GradientReducer(module, **SMALL | {"two_level": True})
        assert reducer.uses_two_levels
        for step in range(3):
            module.zero_grad()
            module(tokens(10 * step, rank)).backward()
            reducer.finish()
            assert_equal_on_all_ranks(gradients(module))
            assert_close(gradients(module), alone(step, 1, 4))
        trace = reducer.report().chrome_trace()
        reducer.detach()
        chosen = GradientReducer(model(), bucket_bytes=1000)  # measured: all ranks choose alike
        choices: list[bool] = [False] * 4
        dist.all_gather_object(choices, chosen.uses_two_levels)
        assert len(set(choices)) == 1
        assert len([event for event in trace["traceEvents"] if event["name"] == "bucket 0"]) == 3
    with pytest.raises(ValueError, match="two_level=True: the group must span at least two hosts"):
        GradientReducer(model(), two_level=True)


def test_two_levels_give_the_same_gradients(world: Worlds) -> None:
    world(4).run(_two_level)


def _bucket_bytes() -> list[int]:
    module = nn.Linear(2, 2)
    sizes = []
    for slow_link_seconds in (0.0, 1e9):
        with mock.patch.object(probes, "_SLOW_LINK_SECONDS", slow_link_seconds):
            reducer = GradientReducer(module)
            sizes.append(reducer._dense.bucket_bytes)
            reducer.detach()
    return sizes


def test_buckets_fit_the_link(world: Worlds) -> None:
    assert world(2).run(_bucket_bytes) == [[4 << 20, 25 << 20]] * 2


def _two_level_failure() -> None:
    """A failing collective reaches whoever waits, on the tensor that it failed for."""
    levels = TwoLevelReduction({0: "a", 1: "a", 2: "b", 3: "b"})
    good, bad = torch.ones(4), torch.ones(3)
    first, second = levels.submit(good), levels.submit(bad)
    levels.flush()
    first.result(timeout=30)
    assert torch.equal(good, torch.full((4,), 4.0))
    with pytest.raises(RuntimeError):
        second.result(timeout=30)
    levels.destroy()


def test_two_levels_pass_failures_on(world: Worlds) -> None:
    world(4).run(_two_level_failure)
