"""What people do with engines that have a reducer, or experts, beside what DeepSpeed alone makes of it."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from deepspeed.utils import groups as deepspeed_groups
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from ds_topo import GradientReducer, PipelineModule, PipelineParallelGrid, groups, initialize
from ds_topo.engine import gradient_reducer
from ds_topo.errors import ExpertGroupError
from ds_topo.reducer import probes, routes
from tests.support.failing import FailsInBackward
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

SMALL = {"bucket_bytes": 600, "first_bucket_bytes": 200, "last_bucket_bytes": 200}
ZERO_1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}


def samples(step: int, width: int = 8) -> torch.Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


class Unruly(nn.Module):
    """Layers of which one fails in backward, is left out, or is repeated, as told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, hidden: torch.Tensor, what: str = "") -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == 2 and what == "fail":
                hidden = FailsInBackward.apply(hidden)
            for _ in range(3 if index == 2 and what == "repeat" else 1):
                if index != 2 or what != "skip":
                    hidden = hidden + checkpoint(layer, hidden, use_reentrant=True)
        return hidden


def trained(script: list[str], reduced: bool, torch_style: bool = False, **more: Any) -> dict[str, torch.Tensor]:
    """Parameters after a script of micro-batches, with or without our reducer."""
    with PipelineParallelGrid("data=2") as grid:
        module = Unruly()
        config = settings(gradient_reducer=SMALL if reduced else False, **more)
        engine, *_ = initialize(model=module, mpu=grid, config=config)
        dtype = next(module.parameters()).dtype
        for step, what in enumerate(script):
            if what in ("freeze", "unfreeze"):
                module.layers[1].requires_grad_(what == "unfreeze")
                continue
            hidden = samples(step).to(dtype).requires_grad_()
            loss = engine(hidden, what).square().mean()
            try:
                loss.backward() if torch_style else engine.backward(loss)
            except ArithmeticError:
                engine.optimizer.zero_grad()
                engine.zero_grad()
                continue
            engine.step()
        engine.destroy()
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


SCRIPTS = {
    "an exception in the last micro-batch": ["", "", "", "fail", "", "", ""],
    "an exception in every step": ["", "fail", "", "fail", "", "", ""],
    "a layer left out": ["", "", "skip", "skip", "", ""],
    "a layer repeated": ["", "", "repeat", "repeat", "", "repeat", "", ""],
    "a layer repeated in the first step": ["repeat", "repeat", "", "", "repeat", "repeat"],
    "frozen and unfrozen": ["", "", "freeze", "", "", "unfreeze", "", ""],
}


def _as_without(script: str, torch_style: bool, more: dict[str, Any]) -> None:
    start()
    expected = trained(SCRIPTS[script], False, torch_style, **more)
    found = trained(SCRIPTS[script], True, torch_style, **more)
    tolerance = 2e-2 if "bf16" in more else 1e-6
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=f"{script}: {name}")
        everyone = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(everyone, found[name])
        assert torch.equal(*everyone), "replicas are bit-equal"


@pytest.mark.parametrize("more", [{}, ZERO_1, BF16], ids=["ZeRO 0", "ZeRO 1", "bf16"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_plain_engines_train_on_as_without_the_reducer(world: Worlds, script: str, more: dict[str, Any]) -> None:
    world(2).run(_as_without, script, False, more)


@pytest.mark.parametrize("script", [name for name in SCRIPTS if "exception" not in name])
def test_torchs_own_backward(world: Worlds, script: str) -> None:
    """``loss.backward()``, which DeepSpeed takes under ZeRO, and which it does not survive an exception of."""
    world(2).run(_as_without, script, True, ZERO_1)


# -- pipelines --------------------------------------------------------------------------------------------------------


class MayFail(nn.Linear):
    """A stage's layer whose backward fails in the steps that it is told."""

    fails = False

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden).tanh()
        return FailsInBackward.apply(hidden) if self.fails else hidden


def _pipeline_after_an_exception(zero: int) -> None:
    """Backward fails on the last stage of every replica, before anything is sent back to the first one."""
    start()
    results = []
    for reduced in (False, True):
        with PipelineParallelGrid("data=4") as grid:
            module = PipelineModule([LayerSpec(MayFail)] * 4, grid=grid, loss_fn=F.mse_loss, seed_layers=True)
            config = settings(gradient_reducer=SMALL if reduced else False, zero_optimization={"stage": zero})
            engine, *_ = initialize(model=module, config=config)
            for step in range(6):
                MayFail.fails = step in (1, 3)
                batches = [(samples(10 * step + index), samples(10 * step + index).roll(1, 1)) for index in range(2)]
                try:
                    engine.train_batch(iter(batches))
                except ArithmeticError:
                    engine.timers("train_batch").stop()  # DeepSpeed alone would refuse the next batch
                    engine.optimizer.zero_grad()
                    engine.zero_grad()
            results.append([parameter.detach().clone() for parameter in module.parameters()])
            engine.destroy()
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_pipeline_goes_on_after_an_exception(world: Worlds, zero: int) -> None:
    world(4).run(_pipeline_after_an_exception, zero)


def _frozen_middle_stage(zero: int) -> None:
    start()
    results = []
    for reduced in (False, True):
        with PipelineParallelGrid("pipe=3,data=2") as grid:
            module = PipelineModule([LayerSpec(nn.Linear, 8, 8)] * 3, grid=grid, loss_fn=F.mse_loss, seed_layers=True)
            if grid.stage_id == 1:
                module.requires_grad_(False)
            config = settings(gradient_reducer=SMALL if reduced else False, zero_optimization={"stage": zero})
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            config.pop("optimizer")
            engine, *_ = initialize(model=module, config=config, optimizer=optimizer)
            for step in range(3):
                data = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + grid.get_sample_rank()))
                engine.train_batch(iter([(data, data.roll(1, 1))] * 2))
            if reduced and grid.stage_id == 1:
                assert engine.gradient_reducer.buckets == []
                assert "0 buckets" in str(engine.gradient_reducer.report())
            results.append([parameter.detach().clone() for parameter in module.parameters()])
            engine.destroy()
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_stage_with_nothing_to_train_has_a_reducer_with_nothing_to_do(world: Worlds) -> None:
    world(6).run(_frozen_middle_stage, 0)


# -- hooks, norms, unfreezing -----------------------------------------------------------------------------------------


def _comm_hook_in_an_engine() -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        engine, *_ = deepspeed.initialize(model=Unruly(), mpu=grid, config=settings())
        reducer = GradientReducer.attach(engine)
        reducer.register_comm_hook(None, default_hooks.bf16_compress_hook)
        for step in range(4):
            engine.backward(engine(samples(step).requires_grad_()).square().mean())
            engine.step()
        weights = [torch.empty(8, 8) for _ in range(2)]
        dist.all_gather(weights, engine.module.layers[0].weight.detach())
        assert torch.equal(*weights)
        reducer.detach()
        stated = GradientReducer.attach(engine, communication_dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="communication_dtype are a communication hook's own business"):
            stated.register_comm_hook(None, default_hooks.bf16_compress_hook)
        engine.destroy()


def test_a_communication_hook_in_an_engine(world: Worlds) -> None:
    world(2).run(_comm_hook_in_an_engine)


def _norm_of_shards(reduced: bool) -> float:
    start()
    with PipelineParallelGrid("data=2,model=2") as grid:
        torch.manual_seed(grid.get_slice_parallel_rank())
        module = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 8))
        for parameter in module.parameters():
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        config = settings(**BF16, gradient_accumulation_steps=1, gradient_clipping=1.0, gradient_reducer=reduced)
        engine, *_ = initialize(model=module, mpu=grid, config=config)
        data = torch.ones(2, 128, dtype=torch.bfloat16)
        engine.backward(engine(data).float().square().sum())
        own = [parameter.grad.float().square().sum() for parameter in module.parameters()]
        total = torch.stack(own).sum()
        dist.all_reduce(total, group=grid.get_slice_parallel_group())
        engine.step()
        norm = float(engine.get_global_grad_norm())
        engine.destroy()
        return norm / float(total.sqrt())


@pytest.mark.parametrize("reduced", [False, True])
def test_the_norm_of_half_precision_counts_every_shard(world: Worlds, reduced: bool) -> None:
    """Large gradients in bf16 without ZeRO, one micro-batch: nothing needs to be called for it."""
    for ratio in world(4).run(_norm_of_shards, reduced):
        assert ratio == pytest.approx(1.0, rel=1e-2)


# -- experts ----------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(256, 256)
        self.moe = MoE(
            256, nn.Linear(256, 256), num_experts=4, ep_size=size, k=1, drop_tokens=False, use_rts=False, min_capacity=0
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.moe(self.dense(hidden))[0]
        return output


def _whole_model_on_slices(topology: str, wide: bool) -> None:
    start()
    more: dict[str, Any] = {**ZERO_1, "data_types": {"grad_accum_dtype": "fp32"}} if wide else {}
    with PipelineParallelGrid(topology) as grid:
        module = nn.Linear(8, 8)
        config = settings(**BF16, **more, gradient_accumulation_steps=1)
        engine, *_ = deepspeed.initialize(model=module, mpu=grid, config=config)
        hidden = torch.ones(2, 8, dtype=torch.bfloat16)  # the same on all replicas
        alone = torch.autograd.grad(engine.module(hidden).float().square().mean(), list(module.parameters()))
        for step in range(2):
            engine.backward(engine(hidden).float().square().mean())
            engine.step()
            if step == 0:
                norm = torch.stack([gradient.float().norm() for gradient in alone]).norm()
                assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-2)
        engine.destroy()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("topology", ["data=2,model=2", "model=4"])
def test_slices_without_a_tensor_parallel_parameter_train_in_bf16(world: Worlds, topology: str, wide: bool) -> None:
    world(4).run(_whole_model_on_slices, topology, wide)


def _links_of_different_speed() -> list[list[str]]:
    """One data parallel group measures a slow link, the other a fast one; expert-data groups span both."""
    start()
    with PipelineParallelGrid("data=2,model=2") as grid:
        grid.check_samples = False  # only the buckets matter here
        groups.create_expert_groups(grid, 1)
        engine, *_ = deepspeed.initialize(model=Mixture(1), mpu=grid, config=settings(**ZERO_1))
        slow = dist.get_process_group_ranks(grid.get_data_parallel_group()) == [0, 2]

        def measured(group: Any, device: Any) -> int:
            sizes = probes.suitable_bucket_bytes(group, device)  # its collectives, whatever they say
            spans_both = dist.get_world_size(group) == 4
            return max(sizes, 1) * 0 + (700_000 if spans_both or slow else 2_000_000)

        with mock.patch.object(routes, "suitable_bucket_bytes", measured):
            reducer = GradientReducer.attach(engine)
        for step in range(4):
            engine.backward(engine(samples(step, 256)).square().mean())
            engine.step()
        buckets = [[name for name in bucket if "experts" in name] for bucket in reducer.buckets]
        engine.destroy()
        return [bucket for bucket in buckets if bucket]


def test_buckets_of_experts_are_equal_on_all_their_replicas(world: Worlds) -> None:
    layouts = world(4).run(_links_of_different_speed)
    assert layouts[0] == layouts[1] == layouts[2] == layouts[3]
    assert len(layouts[0]) > 1


def _second_engine_without_a_grid() -> None:
    start()
    with PipelineParallelGrid("data=2,model=2") as grid:
        grid.check_samples = False  # only who exchanges them matters here
        groups.create_expert_groups(grid, 2)
        first, *_ = deepspeed.initialize(model=Mixture(2), mpu=grid, config=settings())
        first(samples(0, 256))
        with pytest.raises(ExpertGroupError, match=r"asks for 'ep_size_2', the groups of Pipeline.*pass mpu=grid"):
            deepspeed.initialize(model=Mixture(2), config=settings())
        other, *_ = deepspeed.initialize(model=Mixture(4), config=settings())  # DeepSpeed's own groups
        assert dist.get_process_group_ranks(deepspeed_groups._get_expert_parallel_group("ep_size_4")) == [0, 1, 2, 3]
        other(samples(0, 256))
        for engine in (first, other):
            engine.destroy()
    deepspeed_groups._EXPERT_PARALLEL_GROUP.clear()
    deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP.clear()


def test_another_engine_with_experts_but_without_the_grid(world: Worlds) -> None:
    world(4).run(_second_engine_without_a_grid)


def _slices_of_two_grids() -> None:
    start()
    sliced, whole = PipelineParallelGrid("data=2,model=2"), PipelineParallelGrid("data=4")
    groups.create_expert_groups(sliced, 2, expert_tensor_parallel=True)
    deepspeed_groups.mpu = sliced
    assert deepspeed_groups._get_expert_model_parallel_world_size() == 2
    deepspeed_groups.mpu = whole
    assert deepspeed_groups._get_expert_model_parallel_world_size() == 1
    sliced.destroy()
    assert deepspeed_groups._get_expert_model_parallel_world_size() == 1
    whole.destroy()
    assert deepspeed_groups.mpu is None


def test_slices_of_experts_are_those_of_the_engines_grid(world: Worlds) -> None:
    world(4).run(_slices_of_two_grids)


class OtherMpu:
    """An mpu that is none of our grids."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def get_tensor_model_parallel_world_size(self) -> int:
        return 2

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self.group)

    def get_tensor_model_parallel_group(self) -> Any:
        return self.group


def _tokens_of_another_mpu() -> None:
    from deepspeed.moe import mappings

    start()
    with PipelineParallelGrid("data=1,model=2") as grid:
        groups.create_expert_groups(grid, 1)
        deepspeed_groups.mpu = grid
        assert mappings.gather_tokens(torch.ones(2, 3)).shape == (4, 3)
        deepspeed_groups.mpu = OtherMpu(dist.group.WORLD)
        with mock.patch.object(deepspeed.comm, "all_gather_into_tensor") as theirs:
            mappings.gather_tokens(torch.ones(2, 3))
        theirs.assert_called_once()
    deepspeed_groups.mpu = None


def test_tokens_of_another_mpu_are_gathered_by_deepspeed(world: Worlds) -> None:
    world(2).run(_tokens_of_another_mpu)


def _a_new_world() -> None:
    start()
    grid = PipelineParallelGrid("data=2")
    groups.create_expert_groups(grid, 2)
    dist.barrier()
    deepspeed.comm.destroy_process_group()
    store = dist.PrefixStore("again", dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, False))
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    with PipelineParallelGrid("data=2") as again:
        assert groups.create_expert_groups(again, 2).expert_ranks == [0, 1]
    assert groups._get_max_expert_size() is None


def test_a_new_world_forgets_the_experts_of_the_former(world: Worlds) -> None:
    world(2).run(_a_new_world)


def test_the_reducer_room_is_not_the_engines() -> None:
    assert gradient_reducer.GradientReducer.__mro__[1].__module__ == "ds_topo.reducer.reducer"
