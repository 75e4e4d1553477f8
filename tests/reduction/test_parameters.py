"""Experts, and unused, ignored, and shared parameters."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ds_topo import GradientReducer
from ds_topo.reduction.options import ReductionOptions
from ds_topo.reduction.parameters import Changes, ignored_identities, watch
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

pytestmark = pytest.mark.backends("gloo", "strict")


@pytest.mark.parametrize("numel", [1, 3])
@pytest.mark.parametrize("value", [1.0, 2.0])
def test_parameters_are_compared_by_identity(numel: int, value: float) -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(numel)), nn.Parameter(torch.zeros(1))])
    changes = Changes(module, [], {}, ReductionOptions(), "nothing")
    assert changes._holds_the_same()
    kept, module[0] = module[0], nn.Parameter(torch.full((numel,), value))
    assert not changes._holds_the_same()
    module[0] = kept
    assert changes._holds_the_same()
    module[0].data = torch.full((numel,), value)
    assert changes._holds_the_same()
    module.append(kept)
    assert not changes._holds_the_same()


def _experts() -> None:
    """Use four data-parallel ranks and expert parallelism 2: expert peers are ranks {0, 2} and {1, 3}."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    module = nn.ModuleDict({"dense": nn.Linear(2, 2, bias=False), "expert": nn.Linear(2, 2, bias=False)})
    module["expert"].weight.allreduce, module["expert"].weight.group_name = False, "ep_size_2"
    with pytest.raises(ValueError, match=r"expert_groups: parameter 'expert.weight'.*'ep_size_2'"):
        GradientReducer(module)
    torch.nn.init.constant_(module["expert"].weight, rank)
    reducer = GradientReducer(module, expert_groups={"ep_size_2": groups[rank % 2]})
    assert torch.equal(module["expert"].weight, torch.full((2, 2), float(rank % 2))), (
        "experts are equal among expert peers only"
    )
    inputs = torch.full((1, 2), float(2**rank))
    (module["dense"](inputs) + module["expert"](inputs)).sum().backward()
    reducer.finish()
    assert torch.equal(module["dense"].weight.grad, torch.full((2, 2), 15 / 4))
    assert torch.equal(module["expert"].weight.grad, torch.full((2, 2), (1 + 4 if rank % 2 == 0 else 2 + 8) / 4))


def test_experts_are_summed_over_their_group_and_divided_by_all_replicas(world: Worlds) -> None:
    world(4).run(_experts)


def _unused() -> None:
    """Use branch 0 on one rank only, branch 1 on the other, and branch 2 on none."""
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


def _used_before_the_last_micro_batch(options: dict[str, Any]) -> None:
    module = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    reducer = GradientReducer(module, find_unused_parameters=True, **options)
    inputs = torch.full((1, 2), dist.get_rank() + 1.0)
    for _ in range(2):
        module.zero_grad()
        with reducer.no_sync():
            (module[0](inputs) + module[1](inputs)).sum().backward()
        module[0](inputs).sum().backward()
        reducer.finish()
        assert torch.equal(module[0].weight.grad, torch.full((2, 2), 3.0)), "twice the mean of 1 and 2"
        assert torch.equal(module[1].weight.grad, torch.full((2, 2), 1.5))


@pytest.mark.parametrize("options", [{}, {"accumulation_dtype": torch.float64}], ids=["views", "sums apart"])
def test_parameter_of_an_earlier_micro_batch_is_used(world: Worlds, options: dict[str, Any]) -> None:
    world(2).run(_used_before_the_last_micro_batch, options)


def test_find_unused_parameters_gives_gradients_of_ddp(world: Worlds) -> None:
    world(2).run(_unused)


def _unused_without_leave() -> None:
    rank = dist.get_rank()
    module = model()
    reducer = GradientReducer(module, **SMALL)
    module(tokens(0, rank), branch=0 if rank == 0 else None).backward()
    with pytest.raises(RuntimeError, match=r"'branches.1.weight'.*got no gradient on .*find_unused_parameters=True"):
        reducer.finish()
    module.zero_grad()
    module(tokens(0, rank)).backward()  # the next step works again
    reducer.finish()
    assert_equal_on_all_ranks(gradients(module))


def test_finish_raises_on_all_ranks_if_they_use_different_parameters(world: Worlds) -> None:
    world(2).run(_unused_without_leave)


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


def test_a_tied_parameter_is_ignored_by_any_of_its_names() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    options = ReductionOptions(ignored_parameters=["1.weight"])
    assert ignored_identities(module, options) == {id(module[0].weight)}


class Checkpointed(nn.Module):
    """A model that uses a layer twice in reentrant checkpoints: its gradient arrives twice in one backward."""

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


def test_static_graph_allows_several_gradients_in_one_backward(world: Worlds) -> None:
    world(2).run(_static_graph)


def test_copy_of_module_can_have_its_own_reducer(world: Worlds) -> None:
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


class _Told:
    """Counts the steps of optimizers, and does something in each."""

    def __init__(self, act: Any = lambda: None) -> None:
        self.steps, self.act = 0, act

    def before_optimizer_step(self, parameters: object) -> None:
        self.steps += 1
        self.act()


def _free_a_reducer_in_a_step() -> list[int]:
    old = [_Told()]
    freed = weakref.ref(old[0])

    def free() -> None:
        old.clear()
        gc.collect()

    others = [_Told(free), _Told()]
    leave = [watch(told) for told in (*old, *others)][1:]
    torch.optim.SGD(nn.Linear(2, 2).parameters()).step()
    assert freed() is None
    for end in leave:
        end()
    torch.optim.SGD(nn.Linear(2, 2).parameters()).step()
    return [told.steps for told in others]


def test_a_reducer_may_be_freed_while_an_optimizer_steps(world: Worlds) -> None:
    assert world(1).run(_free_a_reducer_in_a_step) == [[1, 1]]
