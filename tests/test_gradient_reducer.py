"""The gradient reducer beside torch's DDP, and beside one process with every rank's samples."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ds_topo import GradientReducer, PipelineParallelGrid
from ds_topo.errors import DisagreementError
from ds_topo.reducer import ReductionOptions, probes
from ds_topo.reducer.routes import scaling
from ds_topo.reducer.two_level import TwoLevelReduction
from tests.ranks import run_ranks

SMALL = {"bucket_bytes": 1000, "first_bucket_bytes": 300, "last_bucket_bytes": 600, "two_level": False}
"""So that a small model has several buckets."""
SAMPLES = 4


class Model(nn.Module):
    """Tied, strided, frozen and conditionally used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.convolution = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.hidden = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.hidden[0].bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, branch: int | None = None) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.convolution(hidden.unsqueeze(1)).mean(1)
        for index, layer in enumerate(self.hidden):
            hidden = hidden + F.gelu(layer(hidden)) / (index + 1)
        for index, layer in enumerate(self.branches):
            if branch is None or branch == index:
                hidden = hidden + layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten().roll(1))


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def tokens(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(13, (SAMPLES, 5), generator=generator)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name.removeprefix("module."): None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
    }


def assert_equal_on_all_ranks(found: dict[str, torch.Tensor | None], group: Any = None) -> None:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, found, group=group)
    for other in everyone[1:]:
        assert found.keys() == other.keys()
        for name, gradient in everyone[0].items():
            assert (gradient is None) == (other[name] is None), name
            assert gradient is None or torch.equal(gradient.to_dense(), other[name].to_dense()), name


def assert_close(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None), name
        if gradient is not None:
            assert found[name].dtype == gradient.dtype
            scale = float(gradient.to_dense().abs().max())
            torch.testing.assert_close(found[name].to_dense(), gradient.to_dense(), rtol=rtol, atol=rtol * scale)


def alone(step: int, micro_batches: int, world_size: int) -> dict[str, torch.Tensor | None]:
    """Gradients of one process that has every rank's samples."""
    module = model()
    for micro_batch in range(micro_batches):
        for rank in range(world_size):
            (module(tokens(10 * step + micro_batch, rank)) / world_size).backward()
    return gradients(module)


# -- equal to DDP and to one process ---------------------------------------------------------------------------------


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
def test_gradients_equal_ddps_and_one_process(micro_batches: int, set_to_none: bool) -> None:
    layouts = run_ranks(2, _against_ddp, micro_batches, set_to_none)
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


def test_a_grid_gives_the_group() -> None:
    run_ranks(4, _with_grid)


# -- options ---------------------------------------------------------------------------------------------------------


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


def test_scaling_and_communication_dtype() -> None:
    run_ranks(2, _scaled)


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


def test_nccl_multiplies_by_itself() -> None:
    run_ranks(2, _native_ops)


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


def test_bf16_gradients_accumulate_in_fp32() -> None:
    run_ranks(2, _bf16_accumulated_wide)


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


def test_ddp_communication_hooks() -> None:
    run_ranks(2, _hooked)


# -- experts, unused, sparse -----------------------------------------------------------------------------------------


def _experts() -> None:
    """Four data-parallel ranks, expert parallelism 2: expert peers are ranks {0, 2} and {1, 3}."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    module = nn.ModuleDict({"dense": nn.Linear(2, 2, bias=False), "expert": nn.Linear(2, 2, bias=False)})
    module["expert"].weight.allreduce, module["expert"].weight.group_name = False, "ep_size_2"
    with pytest.raises(ValueError, match=r"expert_groups: parameter 'expert.weight'.*'ep_size_2'"):
        GradientReducer(module)
    torch.nn.init.constant_(module["expert"].weight, rank)
    reducer = GradientReducer(module, expert_groups={"ep_size_2": groups[rank % 2]})
    assert torch.equal(module["expert"].weight, torch.full((2, 2), float(rank % 2))), "equal among expert peers only"
    inputs = torch.full((1, 2), float(2**rank))
    (module["dense"](inputs) + module["expert"](inputs)).sum().backward()
    reducer.finish()
    assert torch.equal(module["dense"].weight.grad, torch.full((2, 2), 15 / 4))
    assert torch.equal(module["expert"].weight.grad, torch.full((2, 2), (1 + 4 if rank % 2 == 0 else 2 + 8) / 4))


def test_experts_over_their_group_with_the_full_divisor() -> None:
    run_ranks(4, _experts)


def _unused() -> None:
    """Branch 0 on one rank only, branch 1 on the other, branch 2 nowhere."""
    rank = dist.get_rank()
    ours = model()
    theirs = DistributedDataParallel(model(), find_unused_parameters=True)
    reducer = GradientReducer(ours, find_unused_parameters=True, **SMALL)
    for step, branch in enumerate((rank, None, 1 - rank, 2)):
        for module in (ours, theirs):
            module.zero_grad()
        ours(tokens(step, rank), branch).backward()
        reducer.finish()
        theirs(tokens(step, rank), branch).backward()
        found = gradients(ours)
        assert_close(found, gradients(theirs))
        assert_equal_on_all_ranks(found)
        assert (found["branches.2.weight"] is None) == (step in (0, 2))
        assert found["branches.0.weight"] is not None or step == 3


def test_unused_parameters_as_ddp_finds_them() -> None:
    run_ranks(2, _unused)


def _unused_without_leave() -> None:
    rank = dist.get_rank()
    module = model()
    reducer = GradientReducer(module, **SMALL)
    module(tokens(0, rank), branch=0 if rank == 0 else None).backward()
    with pytest.raises(RuntimeError, match=r"'branches.1.weight'.*got no gradient on .*find_unused_parameters=True"):
        reducer.finish()
    module.zero_grad()
    module(tokens(0, rank)).backward()  # the next step is sound again
    reducer.finish()
    assert_equal_on_all_ranks(gradients(module))


def test_ranks_that_use_different_parameters_raise_instead_of_hanging() -> None:
    run_ranks(2, _unused_without_leave)


def _sparse() -> None:
    rank = dist.get_rank()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 3))

    ours, theirs = build(), DistributedDataParallel(build())
    reducer = GradientReducer(ours)
    for step in range(3):
        for module in (ours, theirs):
            module.zero_grad()
            module(tokens(step, rank)).square().mean().backward()
        reducer.finish()
        assert ours[0].weight.grad.is_sparse
        assert_close(gradients(ours), gradients(theirs))


def test_sparse_gradients() -> None:
    run_ranks(2, _sparse)


def _ignored() -> None:
    module = model()
    reducer = GradientReducer(module, ignored_parameters=["hidden.1.weight", module.hidden[2].weight], **SMALL)
    module(tokens(0, dist.get_rank())).backward()
    reducer.finish()
    local = model()
    local(tokens(0, dist.get_rank())).backward()
    for layer in (1, 2):
        assert torch.equal(module.hidden[layer].weight.grad, local.hidden[layer].weight.grad)
    assert not torch.equal(module.hidden[3].weight.grad, local.hidden[3].weight.grad)


def test_ignored_parameters_stay_local() -> None:
    run_ranks(2, _ignored)


class Checkpointed(nn.Module):
    """One layer used twice, each time in a reentrant checkpoint: its gradient arrives twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        return hidden.square().mean()


def _static_graph() -> None:
    def inputs(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))

    torch.manual_seed(0)
    ours, alone = Checkpointed(), Checkpointed()
    alone.load_state_dict(ours.state_dict())
    reducer = GradientReducer(ours, static_graph=True, **SMALL)
    for step in range(3):
        for micro_batch in range(2):
            with reducer.no_sync() if micro_batch == 0 else nullcontext():
                ours(inputs(2 * step + micro_batch, dist.get_rank())).backward()
            for rank in range(2):
                (alone(inputs(2 * step + micro_batch, rank)) / 2).backward()
        reducer.finish()
        assert_close(gradients(ours), gradients(alone))
        ours.zero_grad()
        alone.zero_grad()
    ours(inputs(0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"got more than the 2 gradients of the first step"):
        ours(inputs(0, 0)).backward()
    strict = Checkpointed()
    GradientReducer(strict)
    with pytest.raises(RuntimeError, match=r"'shared.* got a second gradient .*static_graph=True"):
        strict(inputs(0, 0)).backward()


def test_parameters_that_get_several_gradients_in_one_backward() -> None:
    run_ranks(2, _static_graph)


def _stored() -> None:
    """Gradients accumulate in one flat fp32 buffer of the user's, with a gap in the middle."""
    rank = dist.get_rank()
    module = model().bfloat16()
    flat = torch.full((20_000,), torch.nan)
    storage, offset = {}, 100
    for index, parameter in enumerate(parameter for parameter in module.parameters() if parameter.requires_grad):
        storage[parameter] = flat[offset : offset + parameter.numel()]
        offset += parameter.numel() + (3 if index == 4 else 0)
    reducer = GradientReducer(module, grad_buffers=storage, **SMALL | {"bucket_bytes": 2000})
    twin = model().bfloat16()
    expected = GradientReducer(twin, accumulation_dtype=torch.float32, **SMALL)
    for step in range(3):
        for micro_batch in range(2):
            for served, by in ((module, reducer), (twin, expected)):
                with by.no_sync() if micro_batch == 0 else nullcontext():
                    served(tokens(2 * step + micro_batch, rank)).backward()
        reducer.finish()
        expected.finish()
        for parameter, other in zip(module.parameters(), twin.parameters(), strict=True):
            if parameter.requires_grad:
                assert parameter.grad is None
                torch.testing.assert_close(storage[parameter], other.main_grad.reshape(-1), rtol=1e-6, atol=1e-8)
        module.zero_grad()
        twin.zero_grad()
    assert all(bucket.flat.untyped_storage().data_ptr() == flat.data_ptr() for bucket in reducer._layout.buckets)
    with pytest.raises(ValueError, match=r"grad_buffers: a tensor \[7\] on cpu for a parameter \[13, 8\]"):
        GradientReducer(model(), grad_buffers={model().embed.weight: torch.zeros(7)})


def test_gradients_in_storage_of_the_users() -> None:
    run_ranks(2, _stored)


# -- two levels ------------------------------------------------------------------------------------------------------


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


def test_two_levels_give_the_same_gradients() -> None:
    run_ranks(4, _two_level)


def _bucket_bytes() -> list[int]:
    module = nn.Linear(2, 2)
    sizes = []
    for slow_link_seconds in (0.0, 1e9):
        with mock.patch.object(probes, "_SLOW_LINK_SECONDS", slow_link_seconds):
            reducer = GradientReducer(module)
            sizes.append(reducer._dense.bucket_bytes)
            reducer.detach()
    return sizes


def test_buckets_fit_the_link() -> None:
    assert run_ranks(2, _bucket_bytes) == [[4 << 20, 25 << 20]] * 2


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


def test_two_levels_pass_failures_on() -> None:
    run_ranks(4, _two_level_failure)


# -- what goes wrong, on every rank ----------------------------------------------------------------------------------


def _backward(module: Model, step: int = 0) -> None:
    module(tokens(step, dist.get_rank())).backward()


def _finish_missing(module: Model, reducer: GradientReducer) -> None:
    _backward(module)
    _backward(module)


def _no_sync_before_finish(module: Model, reducer: GradientReducer) -> None:
    _backward(module)
    with reducer.no_sync():
        pass


def _finish_twice(module: Model, reducer: GradientReducer) -> None:
    _backward(module)
    reducer.finish()
    reducer.finish()


def _finish_inside_no_sync(module: Model, reducer: GradientReducer) -> None:
    with reducer.no_sync():
        _backward(module)
        reducer.finish()


def _second_reducer(module: Model, reducer: GradientReducer) -> None:
    GradientReducer(module)


def _added(module: Model, reducer: GradientReducer) -> None:
    if dist.get_rank() == 0:
        module.extra = nn.Linear(2, 2)
    _backward(module)
    reducer.finish()


def _frozen(module: Model, reducer: GradientReducer) -> None:
    if dist.get_rank() == 0:
        module.hidden[1].weight.requires_grad_(False)
    _backward(module)
    reducer.finish()


def _unfrozen(module: Model, reducer: GradientReducer) -> None:
    module.hidden[0].bias.requires_grad_(True)
    _backward(module)
    reducer.finish()


def _replaced(module: Model, reducer: GradientReducer) -> None:
    _backward(module)
    if dist.get_rank() == 0:
        module.hidden[1].weight.grad = module.hidden[1].weight.grad * 2
    reducer.finish()


def _detached(module: Model, reducer: GradientReducer) -> None:
    reducer.detach()
    reducer.detach()
    _backward(module)
    reducer.finish()


MISTAKES = [
    (_finish_missing, r"got a second gradient before finish\(\)", None),
    (_no_sync_before_finish, r"no_sync\(\) while REDUCING: call finish\(\)", None),
    (_finish_twice, r"finish\(\) while IDLE: no gradient arrived since the last", None),
    (_finish_inside_no_sync, r"finish\(\) while ACCUMULATING: leave no_sync\(\) first", None),
    (_second_reducer, "already have a GradientReducer", None),
    (_added, r"\['extra.weight', 'extra.bias'\] were added", "1 of 2 ranks failed"),
    (_frozen, r"\['hidden.1.weight'\] were frozen", "1 of 2 ranks failed"),
    (_unfrozen, r"\['hidden.0.bias'\] were unfrozen", None),
    (_replaced, r"\['hidden.1.weight'\] were replaced", "1 of 2 ranks failed"),
    (_detached, "it was detached", None),
]


def _make_every_mistake() -> None:
    for mistake, first_ranks, other_ranks in MISTAKES:
        module = model()
        reducer = GradientReducer(module, **SMALL)
        expected = first_ranks if dist.get_rank() == 0 or other_ranks is None else other_ranks
        with pytest.raises(RuntimeError, match=expected):
            mistake(module, reducer)
        dist.barrier()


def test_mistakes_raise_on_every_rank() -> None:
    run_ranks(2, _make_every_mistake)


def _different_models() -> None:
    rank = dist.get_rank()
    module = nn.Sequential(nn.Linear(2, 2 + rank), nn.Linear(2 + rank, 1))
    with pytest.raises(
        DisagreementError, match=r"only rank 0: \['0.weight \[2, 2\].*only rank 1: \['0.weight \[3, 2\]"
    ):
        GradientReducer(module)
    with pytest.raises(DisagreementError, match=r"bucket_bytes=1000.*bucket_bytes=1001"):
        GradientReducer(model(), bucket_bytes=1000 + rank)
    kind, text = ((ValueError, "op='mean'"), (DisagreementError, "rank 0: ValueError: op='mean'"))[rank]
    with pytest.raises(kind, match=text):
        GradientReducer(model(), op="mean" if rank == 0 else "average")


def test_ranks_with_different_parameters_or_options_are_named() -> None:
    run_ranks(2, _different_models)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
        ({"op": "sum", "divisor": 2.0}, "a sum is not divided"),
        ({"predivide_factor": 0.0}, "must be positive"),
        ({"communication_dtype": torch.int32}, "floating-point type"),
        ({"keep_steps": 0}, "at least 1 step"),
    ],
)
def test_options_are_validated(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReductionOptions(**options)


# -- report and cost -------------------------------------------------------------------------------------------------


def _report(path: str) -> tuple[str, int]:
    module = model()
    reducer = GradientReducer(module, keep_steps=3, **SMALL)
    size = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad) * 4
    for step in range(5):
        module.zero_grad()
        _backward(module, step)
        reducer.finish()
    report = reducer.report()
    assert [step.step for step in report.steps] == [2, 3, 4]
    assert sum(row["nbytes"] for row in report.rows()) == size
    assert 0.0 <= report.hidden_fraction <= 1.0
    for step in report.steps:
        for bucket in step.buckets:
            assert step.started_ns <= bucket.launched_ns <= bucket.done_ns <= step.ended_ns
    report.save_trace(path.format(dist.get_rank()))
    return str(report), len(reducer.buckets)


def test_report_and_trace(tmp_path: Any) -> None:
    for rank, (table, buckets) in enumerate(run_ranks(2, _report, f"{tmp_path}/trace{{}}.json")):
        assert len(table.splitlines()) == buckets + 2
        events = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X" and event["name"].startswith("bucket")]
        assert len(spans) == 3 * buckets
        by_thread: dict[int, float] = {}
        for span in spans:  # spans of one track must not overlap, or viewers stack them wrongly
            assert span["ts"] >= by_thread.get(span["tid"], 0.0)
            by_thread[span["tid"]] = span["ts"] + span["dur"]


def _collectives_of_a_step() -> dict[str, int]:
    module = model()
    reducer = GradientReducer(module, **SMALL)
    for step in range(2):
        module.zero_grad()
        _backward(module, step)
        reducer.finish()
    before = reducer.reduction_count
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for micro_batch in range(5):
            with reducer.no_sync() if micro_batch < 4 else nullcontext():
                _backward(module, micro_batch)
        reducer.finish()
    return {
        "calls": all_reduce.call_count,
        "reductions": reducer.reduction_count - before,
        "buckets": len(reducer.buckets),
    }


def test_one_reduction_per_bucket_per_step() -> None:
    counted = run_ranks(2, _collectives_of_a_step)[0]
    assert counted["reductions"] == counted["buckets"]
    assert counted["calls"] == counted["buckets"] + 1, "and one small message in which the ranks compare notes"


def _peak_gradient_bytes() -> tuple[int, int, int]:
    """The most bytes that gradients and buckets ever hold, those of the parameters, and of the largest bucket."""
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
    return (
        peak,
        sum(parameter.nbytes for parameter in module.parameters()),
        max(b.nbytes for b in reducer._layout.buckets),
    )


def test_gradients_take_the_parameters_size_and_at_most_one_bucket() -> None:
    for peak, parameters, largest_bucket in run_ranks(2, _peak_gradient_bytes):
        assert parameters <= peak <= parameters + largest_bucket


def test_copies_of_a_module_may_have_their_own_reducer() -> None:
    run_ranks(1, _copied)


def _copied() -> None:
    module = model()
    first = GradientReducer(module)
    twin = copy.deepcopy(module)
    second = GradientReducer(twin)
    _backward(twin)
    second.finish()
    with pytest.raises(RuntimeError, match="IDLE"):
        first.finish()
