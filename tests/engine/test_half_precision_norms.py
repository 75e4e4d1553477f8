"""Engines in half precision: norms count every shard and expert, and losses are scaled without ZeRO, too."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, groups, initialize
from tests.support.small_engines import settings, start
from tests.support.training import destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

ZERO_1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 100, "hysteresis": 1}}


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
def test_norm_counts_every_shard(world: Worlds, reduced: bool) -> None:
    """In bf16 without ZeRO, DeepSpeed itself needs marks on gradients, too."""
    for ratio in world(4).run(_norm_of_shards, reduced):
        assert ratio == pytest.approx(1.0, rel=1e-2)


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
def test_slices_without_tensor_parallel_parameters_train(world: Worlds, topology: str, wide: bool) -> None:
    world(4).run(_whole_model_on_slices, topology, wide)


class _Chain(nn.Sequential):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self:
            out = layer(hidden)
            hidden = hidden + (out[0] if isinstance(out, tuple) else out)
        return hidden


def _trained(stage: int, precision: dict[str, Any], with_experts: bool, **more: Any) -> list[tuple[float, ...]]:
    """Train a few steps, of which one overflows in fp16; return losses, norms, loss scales and sums of weights."""
    is_fp16, seen = "fp16" in precision, []
    with PipelineParallelGrid("data=2") as grid:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(8, 8), nn.Linear(8, 8)]
        if with_experts:
            groups.create_expert_groups(grid, dist.get_world_size())
            options = {"k": 1, "use_rts": False, "num_experts": 2, "ep_size": dist.get_world_size()}
            layers.append(MoE(8, nn.Linear(8, 8), capacity_factor=4.0, **options))
        module = _Chain(*layers)
        parameters: Any = [{"params": list(module.parameters()), "name": "all"}]
        if with_experts:
            parameters = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(parameters)
        optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.5)  # AdamW takes a first step when it is built
        config = settings(zero_optimization={"stage": stage}, gradient_clipping=0.05, **precision, **more)
        engine, *_ = initialize(model=module, optimizer=optimizer, mpu=grid, config=config)
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            overflows = is_fp16 and step == 3 and dist.get_rank() == dist.get_world_size() - 1
            inputs = torch.randn(8, 8, generator=generator) * (3e4 if overflows else 1e-2)
            loss = engine(inputs.to(torch.float16 if is_fp16 else torch.bfloat16)).float().square().mean()
            engine.backward(loss)
            engine.step()
            total = sum(float(p.double().abs().sum()) for p in module.parameters())
            norm = float(engine.get_global_grad_norm())
            seen.append((0.0 if overflows else float(loss), norm, engine.skipped_steps, total))
        destroy_engine(engine)
    return seen


def _half_precision_without_zero(precision: dict[str, Any], with_experts: bool) -> None:
    deepspeed.init_distributed(verbose=False)
    wanted = _trained(1, precision, with_experts, gradient_accumulation_steps=1)
    for reduced in (False, True):
        found = _trained(0, precision, with_experts, gradient_accumulation_steps=1, gradient_reducer=reduced)
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("with_experts", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("precision", [FP16, BF16], ids=["fp16", "bf16"])
def test_half_precision_without_zero_trains_as_with_zero(
    world: Worlds, precision: dict[str, Any], with_experts: bool
) -> None:
    world(2).run(_half_precision_without_zero, precision, with_experts)


class _Experts(nn.Module):
    """Experts as a layer of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(8, nn.Linear(8, 8), num_experts=2, k=1, min_capacity=0, capacity_factor=4.0, use_rts=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.moe(hidden)[0]


def _pipeline_in_fp16(stage: int, with_experts: bool) -> list[tuple[float, ...]]:
    with PipelineParallelGrid("pipe=2") as grid:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(4)]
        if with_experts:
            groups.create_expert_groups(grid, 1)
            layers[3] = _Experts()
        module = PipelineModule(layers, grid=grid, loss_fn=lambda out, wanted: F.mse_loss(out.float(), wanted.float()))
        more = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.05, **FP16}
        parameters: Any = {"params": list(module.parameters()), "name": "all"}
        if with_experts:
            parameters = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(parameters)
        optimizer = torch.optim.SGD([*parameters] if with_experts else [parameters], lr=0.5, momentum=0.5)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings(**more))
        seen = []
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            data = [tuple(torch.randn(2, 2, 8, generator=generator).half()) for _ in range(2)]
            loss = float(engine.train_batch(iter(data)))
            seen.append((loss, float(engine.get_global_grad_norm()), engine.skipped_steps))
        destroy_engine(engine)
    return seen


def _pipeline_without_zero(with_experts: bool) -> None:
    deepspeed.init_distributed(verbose=False)
    wanted, found = (_pipeline_in_fp16(stage, with_experts) for stage in (1, 0))
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("with_experts", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_pipeline_in_fp16_without_zero_trains_as_with_zero(world: Worlds, with_experts: bool) -> None:
    world(2).run(_pipeline_without_zero, with_experts)


def _step_with_infinity() -> None:
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=2") as grid:
        config = settings(**BF16, **ZERO_1, data_types={"grad_accum_dtype": "fp32"}, gradient_accumulation_steps=1)
        engine, *_ = deepspeed.initialize(model=nn.Linear(8, 8), mpu=grid, config=config)
        assert isinstance(engine.optimizer, BF16_Optimizer)
        before = engine.module.weight.detach().clone()
        inputs = torch.ones(2, 8, dtype=torch.bfloat16)
        for step, scale in enumerate([torch.inf if dist.get_rank() == 1 else 1.0, 1.0]):
            engine.backward(engine(inputs).float().square().mean() * scale)
            engine.step()
            assert engine.skipped_steps == 1
            assert bool(torch.equal(engine.module.weight, before)) == (step == 0)
            assert bool(torch.isfinite(engine.module.weight).all())
        engine.destroy()


def test_bf16_engine_discards_infinite_gradients(world: Worlds) -> None:
    world(2).run(_step_with_infinity)
