"""Interactions of a reducer with user hooks, ``zero_grad()``, optimizers, changed modules and exceptions."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_topo import GradientReducer, PipelineParallelGrid
from ds_topo.reduction.buckets import GradientBucket
from tests.support.failing import FailsInBackward
from tests.support.fake_world import fake_world
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

SMALL = {"bucket_bytes": 1000, "first_bucket_bytes": 300, "last_bucket_bytes": 600, "two_level": False}
LARGE = 128  # the width of a weight that is large enough to be copied in at once


def inputs(step: int = 0, rank: int | None = None, width: int = 8) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


def chain(width: int = 8, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def assert_equal_on_all_ranks(tensor: torch.Tensor) -> None:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    for other in everyone[1:]:
        assert torch.equal(everyone[0], other)


# -- user hooks -------------------------------------------------------------------------------------------------------


def _hooks_of_the_users(width: int) -> None:
    """Change gradients in place by hooks registered before and after the reducer; DDP runs both before it reduces."""
    module = nn.Linear(width, width, bias=False)
    nn.init.ones_(module.weight)

    def times(factor: float) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)

        return hook

    module.weight.register_post_accumulate_grad_hook(times(2.0))
    reducer = GradientReducer(module, broadcast_at_start=False)
    module.weight.register_post_accumulate_grad_hook(times(5.0))
    for _ in range(3):
        module(torch.full((1, width), 1.0 + dist.get_rank())).sum().backward()
        reducer.finish()
        assert torch.equal(module.weight.grad, torch.full((width, width), 15.0))
        module.zero_grad()


@pytest.mark.parametrize("width", [4, LARGE])
def test_user_hooks_run_before_the_reduction(world: Worlds, width: int) -> None:
    world(2).run(_hooks_of_the_users, width)


# -- zero_grad --------------------------------------------------------------------------------------------------------


def _discarded_micro_batches(set_to_none: bool, by_optimizer: bool) -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    reducer = GradientReducer(module, accumulation_dtype=torch.float32)
    owner: Any = torch.optim.SGD(module.parameters(), lr=1.0) if by_optimizer else module
    for value, is_kept in ((100.0, False), (1.0, True)):
        with reducer.no_sync():
            module(torch.full((1, 1), value / 2, dtype=torch.bfloat16)).sum().backward()
        if not is_kept:
            owner.zero_grad(set_to_none=set_to_none)
    module(torch.full((1, 1), 0.5, dtype=torch.bfloat16)).sum().backward()
    reducer.finish()
    assert module.weight.main_grad.item() == 1.0


@pytest.mark.parametrize("by_optimizer", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_discards_accumulated_micro_batches(world: Worlds, set_to_none: bool, by_optimizer: bool) -> None:
    world(2).run(_discarded_micro_batches, set_to_none, by_optimizer)


def _main_grad_goes() -> None:
    module = nn.Linear(4, 4, dtype=torch.bfloat16)
    reducer = GradientReducer(module, accumulation_dtype=torch.float32)
    for end in (module.zero_grad, reducer.detach):
        module(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        reducer.finish()
        assert module.weight.main_grad is not None
        end()
        assert not hasattr(module.weight, "main_grad")


def test_zero_grad_ends_the_refusal_of_steps_on_unreduced_gradients() -> None:
    with fake_world(0, 2):
        module = nn.Linear(4, 4)
        reducer, optimizer = GradientReducer(module, two_level=False), torch.optim.SGD(module.parameters())
        for clear in (optimizer.zero_grad, reducer.forget_unreduced):  # an engine's calls the second one
            with reducer.no_sync():
                module(torch.ones(1, 4)).sum().backward()
            with pytest.raises(RuntimeError, match="gradients are not reduced"):
                optimizer.step()
            clear()
            optimizer.step()
        reducer.detach()


def test_detach_between_micro_batches_leaves_gradients_without_a_warning() -> None:
    with fake_world(0, 2):
        module = nn.Linear(4, 1)
        reducer = GradientReducer(module, two_level=False)
        with reducer.no_sync():
            module(torch.ones(1, 4)).sum().backward()
        reducer.detach()
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [[1.0] * 4]


def test_large_gradients_are_copied_at_once_and_small_ones_together() -> None:
    with fake_world(0, 2):
        module = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 1))
        reducer = GradientReducer(module, two_level=False)
        with mock.patch.object(GradientBucket, "copy_in", autospec=True, side_effect=GradientBucket.copy_in) as copied:
            module(torch.ones(1, 128)).sum().backward()
        reducer.finish()
        reducer.detach()
    calls = [([state.name for state in call.args[1]], call.kwargs) for call in copied.call_args_list]
    assert calls[0] == (["0.weight"], {"in_one_pass": True})
    assert not any(options for _, options in calls[1:])


def test_zero_grad_and_detach_delete_main_grad(world: Worlds) -> None:
    world(2).run(_main_grad_goes)


class Gan:
    """A generator and a discriminator, each with its own optimizer."""

    def __init__(self) -> None:
        self.generator, self.discriminator = chain(), chain()
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]

    def step(self, samples: torch.Tensor, finish: Any, set_to_none: bool) -> None:
        """Train both; the generator's loss passes through the discriminator, whose gradients are then cleared."""
        for_generator, for_discriminator = self.optimizers
        self.discriminator(self.generator(samples)).square().mean().backward()
        finish(self.generator)
        for_generator.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        self.discriminator(samples).square().mean().backward()
        finish(self.discriminator)
        for_discriminator.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def _gan(set_to_none: bool) -> None:
    ours, alone = Gan(), Gan()
    reducers = {id(part): GradientReducer(part, **SMALL) for part in (ours.generator, ours.discriminator)}
    for step in range(3):
        ours.step(inputs(step), lambda part: reducers[id(part)].finish(), set_to_none)
        alone.step(torch.cat([inputs(step, rank) for rank in range(2)]), lambda part: None, set_to_none)
    for mine, theirs in ((ours.generator, alone.generator), (ours.discriminator, alone.discriminator)):
        for parameter, expected in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_loss_may_pass_through_the_module_of_another_reducer(world: Worlds, set_to_none: bool) -> None:
    world(2).run(_gan, set_to_none)


def _step_before_finish(kind: str) -> None:
    module = chain()
    reducer = GradientReducer(module, **SMALL)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if kind == "accumulated":
        with reducer.no_sync():
            module(inputs()).sum().backward()
    else:
        module(inputs()).sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) .*before finish\(\)"):
        optimizer.step()
    if kind == "accumulated":
        module(inputs(1)).sum().backward()
    reducer.finish()
    optimizer.step()
    with reducer.no_sync():  # local steps are allowed here
        module(inputs(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.optim.SGD(chain().parameters(), lr=0.1).step()  # parameters without a reducer


@pytest.mark.parametrize("kind", ["in flight", "accumulated"])
def test_optimizer_step_on_unreduced_gradients_raises(world: Worlds, kind: str) -> None:
    world(2).run(_step_before_finish, kind)


# -- changed modules --------------------------------------------------------------------------------------------------


def _replaced(how: str, options: dict[str, Any]) -> None:
    module = chain()
    module[3].requires_grad_(how != "frozen layer")
    reducer = GradientReducer(module, **SMALL, **options)
    module(inputs()).sum().backward()
    reducer.finish()
    module.zero_grad()
    if how == "layer":
        module[1] = nn.Linear(8, 8)
    elif how == "parameter":
        module[1].weight = nn.Parameter(torch.ones(8, 8))
    elif how == "frozen layer":
        module[3] = nn.Linear(8, 8)
    else:
        module[1].weight.data = module[1].weight.data.double()
        module[1].bias.data = module[1].bias.data.double()
    samples = inputs(1)
    if how == "data type":
        hidden = module[0](samples).double()
        module[3](module[2](module[1](hidden).float())).sum().backward()
        match = r"\['1\.weight', '1\.bias'\] were moved or cast"
    else:
        module(samples).sum().backward()
        names = {"layer": r"\['1\.weight', '1\.bias'\]", "parameter": r"\['1\.weight'\]"}
        match = names.get(how, r"\['3\.weight', '3\.bias'\]") + " were replaced"
    with pytest.raises(RuntimeError, match=match):
        reducer.finish()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"zero_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("how", ["layer", "parameter", "frozen layer", "data type"])
def test_finish_raises_if_parameters_were_replaced(world: Worlds, how: str, options: dict[str, Any]) -> None:
    world(2).run(_replaced, how, options)


def _tied_element_replaced_by_an_equal_one() -> None:
    module = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(2)))
    module[1].weight = module[0].weight
    reducer = GradientReducer(module)
    module[1].weight = nn.Parameter(module[0].weight.detach().clone())
    module(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match=r"\['1\.weight'\] were added"):
        reducer.finish()


def test_finish_raises_if_a_tied_parameter_of_one_element_was_replaced_by_an_equal_one(world: Worlds) -> None:
    world(1).run(_tied_element_replaced_by_an_equal_one)


def _frozen_and_unfrozen(options: dict[str, Any]) -> None:
    module, alone = chain(), chain()
    reducer = GradientReducer(module, **SMALL, **options)
    for step, is_frozen in enumerate((False, True, True, False)):
        for part in (module, alone):
            part[1].requires_grad_(not is_frozen)
            part.zero_grad()
        module(inputs(step)).square().mean().backward()
        reducer.finish()
        alone(torch.cat([inputs(step, rank) for rank in range(2)])).square().mean().backward()
        for (name, mine), theirs in zip(module.named_parameters(), alone.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7, msg=name)
            else:
                assert mine.grad is None, "the optimizer must not move a frozen parameter"


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"zero_unused_parameters": True}], ids=str)
def test_parameters_that_may_be_unused_can_be_frozen_for_a_while(world: Worlds, options: dict[str, Any]) -> None:
    world(2).run(_frozen_and_unfrozen, options)


def _ignored_and_unfrozen() -> None:
    module = chain()
    module[1].requires_grad_(False)
    reducer = GradientReducer(module, ignored_parameters=["1.weight", module[1].bias], **SMALL)
    for step in range(2):
        module(inputs(step)).sum().backward()
        reducer.finish()
        module.zero_grad()
        module[1].requires_grad_(True)


def test_ignored_parameters_can_be_unfrozen(world: Worlds) -> None:
    world(2).run(_ignored_and_unfrozen)


# -- unusual gradients ------------------------------------------------------------------------------------------------


def _complex_gradients() -> None:
    module = nn.Linear(4, 4, dtype=torch.complex64)
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)
    reducer = GradientReducer(module, communication_dtype=torch.float32)
    samples = torch.complex(inputs(width=4), inputs(1, width=4))
    for _ in range(2):
        module.zero_grad()
        module(samples).abs().square().mean().backward()
        reducer.finish()
        twin = nn.Linear(4, 4, dtype=torch.complex64)
        twin.load_state_dict(module.state_dict())
        twin(samples).abs().square().mean().backward()
        assert module.weight.grad.imag.any()
        torch.testing.assert_close(module.weight.grad, mean_over_ranks(twin.weight.grad))


def test_complex_gradients_are_not_reduced_in_a_real_type(world: Worlds) -> None:
    world(2).run(_complex_gradients)


def _create_graph(width: int) -> None:
    module, twin = nn.Linear(width, width), nn.Linear(width, width)
    twin.load_state_dict(module.state_dict())
    dist.broadcast(twin.weight.data, 0)
    dist.broadcast(twin.bias.data, 0)
    reducer = GradientReducer(module, **SMALL)
    for step in range(2):
        samples = inputs(step, width=width)
        module(samples).square().mean().backward(create_graph=True)
        reducer.finish()
        twin(samples).square().mean().backward()
        torch.testing.assert_close(module.weight.grad, mean_over_ranks(twin.weight.grad))
        assert not module.weight.grad.requires_grad
        module.zero_grad()
        twin.zero_grad()


@pytest.mark.parametrize("width", [4, LARGE])
def test_backward_with_create_graph_leaves_plain_gradients(world: Worlds, width: int) -> None:
    world(2).run(_create_graph, width)


class Repeated(nn.Module):
    """A model that reaches one layer ``times`` times in one backward, by reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, samples: torch.Tensor, times: int) -> torch.Tensor:
        hidden = self.first(samples)
        for _ in range(times):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        return self.last(hidden).square().mean()


def _reached_more_often_later(options: dict[str, Any]) -> None:
    module, alone = Repeated(), Repeated()
    options = SMALL | {"static_graph": True, "allow_late_gradients": True, "zero_unused_parameters": True} | options
    reducer = GradientReducer(module, **options)
    for step, times in enumerate((1, 1, 3, 2, 3, 1)):
        for micro_batch in range(2):
            with reducer.no_sync() if micro_batch == 0 else nullcontext():
                module(inputs(2 * step + micro_batch), times).backward()
            for rank in range(2):
                (alone(inputs(2 * step + micro_batch, rank), times) / 2).backward()
        reducer.finish()
        for (name, mine), theirs in zip(module.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7, msg=f"{step} {name}")
            assert_equal_on_all_ranks(mine.grad)
        module.zero_grad()
        alone.zero_grad()


@pytest.mark.parametrize(
    "options", [{}, {"overlap": False}, {"bucket_bytes": 10**6, "first_bucket_bytes": 10**6}], ids=str
)
def test_late_gradients_are_reduced_in_finish(world: Worlds, options: dict[str, Any]) -> None:
    world(2).run(_reached_more_often_later, {**options})


# -- after an exception -----------------------------------------------------------------------------------------------


def _exception_in_backward(who: str) -> None:
    module, alone = chain(), chain()
    reducer = GradientReducer(module, **SMALL)
    fails = who == "all" or dist.get_rank() == 0
    for step in range(2):
        try:
            hidden = module[:2](inputs(step))
            module[2:](FailsInBackward.apply(hidden) if fails else hidden).square().mean().backward()
            reducer.finish()
        except ArithmeticError:
            reducer.reset()
        except RuntimeError as error:
            if fails or "1 of 2 ranks failed" not in str(error):
                raise
        assert all(parameter.grad is None for parameter in module.parameters()) or not fails
        module.zero_grad()
        for trained, samples in ((module, inputs(9)), (alone, torch.cat([inputs(9, rank) for rank in range(2)]))):
            trained(samples).square().mean().backward()
        reducer.finish()
        for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        module.zero_grad()
        alone.zero_grad()


@pytest.mark.parametrize("who", ["all", "one rank"])
@pytest.mark.backends("gloo")
def test_reset_gives_up_a_step_after_an_exception(world: Worlds, who: str) -> None:
    world(2).run(_exception_in_backward, who)


# -- lifetime --------------------------------------------------------------------------------------------------------


def _forgotten() -> None:
    module = chain()
    reducer = GradientReducer(module, **SMALL)
    module(inputs()).sum().backward()
    reducer.finish()
    references = [weakref.ref(thing) for thing in (module, reducer, next(module.parameters()))]
    del module, reducer
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_undetached_reducer_is_freed_with_its_module(world: Worlds) -> None:
    world(2).run(_forgotten)


def _kept_by_the_module() -> None:
    module = chain()
    GradientReducer(module, **SMALL)  # the module holds the only reference
    gc.collect()
    module(inputs()).sum().backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        module(inputs()).sum().backward()


def test_module_keeps_its_reducer_alive(world: Worlds) -> None:
    world(2).run(_kept_by_the_module)


def _threads() -> None:
    from unittest import mock

    with mock.patch("socket.gethostname", return_value=f"host{dist.get_rank() // 2}"):
        before = threading.active_count()
        for _ in range(3):
            reducer = GradientReducer(chain(), bucket_bytes=1000)
            reducer.detach()
        assert threading.active_count() == before


def test_construction_and_detach_leave_no_thread(world: Worlds) -> None:
    world(4).run(_threads)


def _unsorted_group() -> None:
    group = dist.new_group([2, 0], sort_ranks=False)
    if dist.get_rank() in (0, 2):
        assert dist.get_process_group_ranks(group) == [2, 0]
        with pytest.raises(ValueError, match=r"process_group: its ranks \[2, 0\] do not ascend.*sort_ranks"):
            PipelineParallelGrid("data=2", process_group=group)
    dist.barrier()


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts the ranks of every group"
)
def test_grid_refuses_group_whose_ranks_do_not_ascend(world: Worlds) -> None:
    world(4).run(_unsorted_group)
