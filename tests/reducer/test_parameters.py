"""Experts, unused, sparse, ignored, shared and stored parameters."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ds_topo import GradientReducer
from ds_topo.reducer.parameter_state import ParameterState
from ds_topo.reducer.routes import Route
from ds_topo.reducer.used_parameters import UsedParameters
from tests.support.fake_world import fake_world
from tests.support.reduced_model import (
    SMALL,
    assert_close,
    assert_equal_on_all_ranks,
    backward,
    gradients,
    model,
    tokens,
)
from tests.support.world import Worlds


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


def test_experts_over_their_group_with_the_full_divisor(world: Worlds) -> None:
    world(4).run(_experts)


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


def test_unused_parameters_as_ddp_finds_them(world: Worlds) -> None:
    world(2).run(_unused)


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


def test_ranks_that_use_different_parameters_raise_instead_of_hanging(world: Worlds) -> None:
    world(2).run(_unused_without_leave)


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


def test_sparse_gradients(world: Worlds) -> None:
    world(2).run(_sparse)


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


def test_ignored_parameters_stay_local(world: Worlds) -> None:
    world(2).run(_ignored)


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


def test_parameters_that_get_several_gradients_in_onebackward(world: Worlds) -> None:
    world(2).run(_static_graph)


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


def test_gradients_in_storage_of_the_users(world: Worlds) -> None:
    world(2).run(_stored)


def test_copies_of_a_module_may_have_their_own_reducer(world: Worlds) -> None:
    world(1).run(_copied)


def _copied() -> None:
    module = model()
    first = GradientReducer(module)
    twin = copy.deepcopy(module)
    second = GradientReducer(twin)
    backward(twin)
    second.finish()
    with pytest.raises(RuntimeError, match="IDLE"):
        first.finish()


@pytest.mark.parametrize("steps_of", [None, 0, 2], ids=["alike", "the first rank is ahead", "the last rank is ahead"])
def test_what_ranks_tell_each_other_at_the_end_of_a_step(steps_of: int | None) -> None:
    """Three ranks in turn, whose notes are then summed."""
    used = {"everywhere": [1, 1, 1], "some": [0, 1, 1], "nowhere": [0, 0, 0], "late": [1, 1, 1], "all late": [1, 1, 1]}
    late = [{"late", "all late"}, {"all late"}, {"all late", "nowhere"}]
    members = [
        ParameterState(10 - place, name, nn.Parameter(torch.zeros(1)), torch.float32, False)
        for place, name in enumerate(used)
    ]
    notes: list[torch.Tensor] = []
    works: list[mock.Mock] = []

    def all_reduce(counts: torch.Tensor, group: object, async_op: bool) -> mock.Mock:
        assert async_op
        notes.append(counts)
        works.append(mock.Mock())
        return works[-1]

    previous: Any = mock.Mock()
    with fake_world(0, 3), mock.patch.object(dist, "all_reduce", all_reduce):
        route = Route("data", dist.group.WORLD, 1.0, 1.0, dist.ReduceOp.SUM, None, 1, last_hook=previous)
        told = [
            UsedParameters(
                members,
                [bool(used[state.name][rank]) for state in members],
                {state.index for state in members if state.name in late[rank]},
                route,
                failed=rank == 1,
                prefers_to_defer=rank > 0,
                step=255 + (rank == steps_of),
            )
            for rank in range(3)
        ]
        previous.wait.assert_called_once_with()
        total = torch.stack(notes).sum(0)
        for rank in range(3):
            notes[rank].copy_(total)
            told[rank].settle()
            works[rank].wait.assert_called_once_with()
            counts = told[rank].counts()
            assert [state.name for state in counts.unused_anywhere] == ["some", "nowhere"]
            assert [state.name for state in counts.unused_everywhere] == ["nowhere"]
            assert [state.name for state in counts.late_anywhere] == ["nowhere", "late", "all late"]
            assert [state.name for state in counts.late_everywhere] == ["all late"]
            assert (counts.failed, counts.prefer_to_defer, counts.route) == (1, 2, route)
            assert counts.steps_differ == (steps_of is not None)


def test_notes_of_many_ranks_do_not_run_into_each_other() -> None:
    ranks, state = 30_000, ParameterState(0, "p", nn.Parameter(torch.zeros(1)), torch.float32, False)
    for late, unused in (((), False), ((0,), False), ((), True), ((0,), True)):
        with fake_world(0, ranks), mock.patch.object(dist, "all_reduce", lambda counts, **_: counts.mul_(ranks)):
            route = Route("data", dist.group.WORLD, 1.0, 1.0, dist.ReduceOp.SUM, None, 1)
            counts = UsedParameters(
                [state], [not unused], late, route, failed=True, prefers_to_defer=False, step=255
            ).counts()
        assert counts.late_everywhere == counts.late_anywhere == ([state] if late else [])
        assert counts.unused_everywhere == counts.unused_anywhere == ([state] if unused else [])
        assert (counts.failed, counts.prefer_to_defer, counts.steps_differ) == (ranks, 0, False)


def test_on_a_gpu_notes_are_copied_without_waiting_and_read_once_they_have_come() -> None:
    state, calls = ParameterState(0, "p", nn.Parameter(torch.zeros(1)), torch.float32, False), mock.Mock()
    calls.notes.is_cuda = True
    calls.notes.to.return_value.tolist.return_value = [2, 0, 0, 0, 0]
    with (
        fake_world(0, 2),
        mock.patch.object(torch, "tensor", return_value=calls.notes),
        mock.patch.object(torch.cuda, "Event", return_value=calls.event),
        mock.patch.object(dist, "all_reduce", return_value=calls.sum),
    ):
        route = Route("data", dist.group.WORLD, 1.0, 1.0, dist.ReduceOp.SUM, None, 1)
        told = UsedParameters([state], [True], (), route, failed=False, prefers_to_defer=False)
        told.settle()
        queued = [mock.call.sum.wait(), mock.call.notes.to("cpu", non_blocking=True), mock.call.event.record()]
        assert calls.mock_calls == queued
        assert told.counts().unused_anywhere == []
    assert calls.mock_calls == [*queued, mock.call.event.synchronize(), mock.call.notes.to().tolist()]
