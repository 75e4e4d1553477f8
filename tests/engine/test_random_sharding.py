"""Random engines with the axis ``shard`` in any position train as ZeRO over all replicas, and as one process.

Losses, norms, loss scales, skipped steps, parameters and optimizer states are compared. The number of a case is the
seed of its draw: ``pytest -m exhaustive tests/engine/test_random_sharding.py -k 'alike and 17'`` repeats one.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, ProcessTopology, initialize
from ds_topo.errors import EngineOptionError
from tests.engine.test_against_deepspeed import DTYPES, PRECISIONS, SMALL, TOLERANCES, shared_folder
from tests.support.training import destroy_engine, engine_config
from tests.support.world import Worlds

pytestmark = [pytest.mark.exhaustive, pytest.mark.backends("gloo", exhaustive=("strict",))]

WIDTH, BLOCKS, STEPS, SAMPLES, EXPERTS = 8, 6, 5, 4, 4
OVERFLOW_STEP, RESUMED_STEP = 2, 3
OFFLOAD = {"device": "cpu"}
LOCAL_EXPERT = re.compile(r"deepspeed_experts\.(\d+)\.")
OF_FOUR = [
    *("data=2,shard=2", "shard=2,data=2", "shard=4", "data=4,shard=1"),
    *(f"{first}=2,{last}=2" for axis in ("pipe", "model", "seq") for first, last in permutations((axis, "shard"))),
]
OF_EIGHT = [
    *("data=2,shard=4", "data=4,shard=2", "shard=4,data=2"),
    *(
        ",".join(f"{axis}=2" for axis in order)
        for axis in ("pipe", "model", "seq")
        for order in permutations(("data", "shard", axis))
    ),
]


@dataclass
class Record:
    """The losses and states that one rank of an engine recorded."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    states: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """The layout and options of an engine, and what happens while it trains."""

    spec: str
    stage: int
    precision: str
    accumulation: int
    clip: float
    replicas: int
    """The number of shares of samples."""
    zero: dict[str, Any] = field(default_factory=dict)
    """Further options of ``zero_optimization``."""
    reduced: bool = False
    """True if our reducer reduces the gradients."""
    wide_sums: bool = False
    mixture: dict[str, Any] = field(default_factory=dict)
    """Options of the layer with experts; empty without one."""
    overflow: tuple[int, int] | None = None
    """The rank, and the micro-batch, whose gradients are infinite in one step."""
    no_sync: bool = False
    zero_init: bool = False
    resumes: bool = False

    @property
    def is_pipeline(self) -> bool:
        return "pipe" in self.spec


def draw(seed: int, specs: list[str]) -> Case:
    """Draw an engine that DeepSpeed itself trains on such groups."""
    of = random.Random(seed)
    spec = specs[seed % len(specs)]
    topology, is_pipeline = ProcessTopology.from_spec(spec), "pipe" in spec
    stage = 1 if is_pipeline else of.choice([1, 2, 2, 3])
    precision = of.choice(["fp32", "bf16", "fp16", "fp16"])
    accumulation = of.choice([1, 2, 3])
    wide_sums = precision == "bf16" and stage == 1 and of.random() < 0.5
    zero: dict[str, Any] = {}
    if of.random() < 0.4 and not wide_sums:
        zero["offload_optimizer"] = OFFLOAD
    if stage == 3:
        zero |= of.choice([{}, {"stage3_param_persistence_threshold": 0}, {"stage3_param_persistence_threshold": 20}])
        zero |= of.choice([{}, {"stage3_prefetch_bucket_size": 0}, {"stage3_prefetch_bucket_size": 100}])
        zero |= of.choice([{}, {"sub_group_size": 100}])
        if of.random() < 0.4:
            zero["offload_param"] = OFFLOAD
        if of.random() < 0.15:
            zero["zero_hpz_partition_size"] = 2  # refused
    if of.random() < 0.5:
        zero["reduce_bucket_size"] = of.choice([100, 500])
    if of.random() < 0.5:
        zero["overlap_comm"] = of.choice([True, False])
    if stage == 2 and of.random() < 0.3:
        zero["round_robin_gradients"] = True
    mixture: dict[str, Any] = {}
    if stage < 3 and of.random() < 0.6:
        mixture = {"ep_size": of.choice([1, 2]), "k": of.choice([1, 2]), "use_residual": of.random() < 0.3}
    return Case(
        spec,
        stage,
        precision,
        accumulation,
        of.choice([0.0, 0.05]),
        math.prod(max(1, topology.get_dim(axis)) for axis in ("data", "shard")),
        zero,
        reduced=stage < 3 and "offload_optimizer" not in zero and of.random() < 0.6,
        wide_sums=wide_sums,
        mixture=mixture,
        overflow=(of.randrange(4), of.randrange(accumulation)) if precision == "fp16" else None,
        # DeepSpeed's own reduction refuses a second backward pass in no_sync(), except with an offloaded optimizer
        no_sync=stage == 1 and not is_pipeline and of.random() < 0.3 and "offload_optimizer" in zero,
        zero_init=stage == 3 and of.random() < 0.4,
        resumes=of.random() < 0.5,
    )


class _Overflow(torch.autograd.Function):
    """The identity, with infinite gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.full_like(gradients[0], math.inf)


class Block(nn.Module):
    """A layer ``[b, WIDTH] -> [b, WIDTH]`` that depends on its number alone; it may overflow in backward."""

    overflows_at: int | None = None
    """The micro-batch of this step in which this rank overflows."""

    def __init__(self, number: int, mixture: dict[str, Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layer: nn.Module = nn.Linear(WIDTH, WIDTH)
        if mixture:
            rest = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 1}
            self.layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, capacity_factor=float(EXPERTS), **rest, **mixture)
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed = self.layer(hidden)
        changed = changed[0] if isinstance(self.layer, MoE) else torch.tanh(changed)
        if self.calls == Block.overflows_at:
            changed = _Overflow.apply(changed)
        self.calls += 1
        return hidden + changed


def blocks(case: Case) -> list[LayerSpec]:
    found = [LayerSpec(Block, number) for number in range(BLOCKS)]
    for number in (1, 4) if case.mixture else ():  # one in every stage of a pipeline
        found[number] = LayerSpec(Block, number, case.mixture)
    return found


def config_of(case: Case) -> dict[str, Any]:
    config = engine_config(
        SAMPLES * case.replicas if dist.get_world_size() == 1 else SAMPLES,
        1 if case.no_sync else case.accumulation,
        case.clip,
        optimizer={"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        zero_optimization={"stage": case.stage, **case.zero},
        gradient_reducer=SMALL if case.reduced else False,
        **PRECISIONS[case.precision],
    )
    if case.wide_sums:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def build(case: Case, grid: PipelineParallelGrid) -> Any:
    config = config_of(case)
    module: Any
    if case.is_pipeline:
        module = PipelineModule(blocks(case), grid=grid, loss_fn=F.mse_loss, partition_method="uniform")
    else:
        partitions = {"data_parallel_group": grid.get_partition_group(), "config_dict_or_path": config, "mpu": grid}
        with deepspeed.zero.Init(**partitions) if case.zero_init else nullcontext():
            module = nn.Sequential(*(spec.build() for spec in blocks(case)))
    parameters: Any = list(module.parameters())
    if case.mixture:
        named = {"params": parameters, "name": "all"}
        parameters = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer([named])
    arguments = {} if case.is_pipeline else {"mpu": grid}
    engine, *_ = initialize(model=module, model_parameters=parameters, config=config, **arguments)
    return engine


def samples(case: Case, step: int, micro_batch: int, grid: PipelineParallelGrid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a micro-batch of this rank; of all replicas where one process trains alone."""
    ranks = [grid.get_sample_rank()] if dist.get_world_size() > 1 else range(case.replicas)
    seeds = [1000 * step + 100 * micro_batch + rank for rank in ranks]
    parts = [torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    inputs = torch.cat(parts).to(DTYPES[case.precision])
    return inputs, inputs.roll(1, dims=1).sin()


def train_step(engine: Any, case: Case, grid: PipelineParallelGrid, step: int) -> float:
    """Train one step; return the mean loss over all replicas."""
    Block.overflows_at = None
    if case.overflow is not None and step == OVERFLOW_STEP:
        rank, micro_batch = case.overflow
        Block.overflows_at = micro_batch if dist.get_world_size() == 1 or dist.get_rank() == rank else None
    for module in engine.module.modules():
        if isinstance(module, Block):
            module.calls = 0
    batches = [samples(case, step, micro_batch, grid) for micro_batch in range(case.accumulation)]
    if case.is_pipeline:
        return float(engine.train_batch(iter(batches)))
    mean = torch.zeros(())
    for number, (inputs, targets) in enumerate(batches):
        is_last = number == case.accumulation - 1
        with engine.no_sync() if case.no_sync and not is_last else nullcontext():
            loss = F.mse_loss(engine(inputs), targets)
            engine.backward(loss / max(1, grid.topology().get_dim("seq")))  # gradients are summed along seq
        if is_last or not case.no_sync:
            engine.step()
        mean += loss.detach().float() / case.accumulation
    dist.all_reduce(mean, group=grid.get_data_parallel_group())
    return mean.item() / dist.get_world_size(grid.get_data_parallel_group())


def states_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return parameters, and in fp32 parameters and optimizer states, under names of one process."""
    found = {}
    modules = dict(engine.module.named_modules())
    for name, parameter in engine.module.named_parameters():
        whole = name
        if expert := LOCAL_EXPERT.search(name):
            moe = modules[name.split(".deepspeed_moe")[0]].deepspeed_moe
            number = dist.get_rank(moe.ep_group) * moe.num_local_experts + int(expert[1])
            whole = LOCAL_EXPERT.sub(f"deepspeed_experts.{number}.", name)
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            found[whole] = parameter.detach().float().clone()
        if engine.zero_round_robin_gradients():  # DeepSpeed's functions then return parts of other parameters
            continue
        found[f"{whole} master"] = safe_get_full_fp32_param(parameter).clone()
        if not expert:  # DeepSpeed links the states of its first group alone
            found[f"{whole} momentum"] = safe_get_full_optimizer_state(parameter, "momentum_buffer").clone()
    return found


def refuse(case: Case) -> None:
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid(case.spec) as grid:
        build(replace(case, zero_init=False), grid)


def train(case: Case, spec: str) -> Record:
    """Train a case on some grid."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    run = Record()
    with PipelineParallelGrid(spec) as grid:
        engine = build(case, grid)
        for step in range(STEPS):
            if case.resumes and step == RESUMED_STEP:
                with shared_folder() as folder:
                    engine.save_checkpoint(folder)
                    destroy_engine(engine)
                    engine = build(case, grid)
                    assert engine.load_checkpoint(folder)[0] is not None
            run.losses.append(train_step(engine, case, grid, step))
            run.norms.append(float(engine.get_global_grad_norm()))
            run.scales.append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
            run.skipped.append(engine.skipped_steps)
        run.states = states_of(engine)
        destroy_engine(engine)
    return run


def assert_alike(found: Record, expected: Record, tolerance: float) -> None:
    assert (found.scales, found.skipped) == (expected.scales, expected.skipped)
    near = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(found.losses, expected.losses, **near)
    torch.testing.assert_close(found.norms, expected.norms, **near)
    assert found.states.keys() <= expected.states.keys()
    for name, mine in found.states.items():
        torch.testing.assert_close(mine, expected.states[name], **near, msg=lambda text, name=name: f"{name}: {text}")


def compare(world: Worlds, ranks: int, case: Case) -> None:
    """Compare a case with ZeRO over all replicas on the same ranks, and with one process."""
    print(case)
    if "zero_hpz_partition_size" in case.zero:
        for error in world(ranks).run(refuse, case, expect_failure=True):
            assert isinstance(error, EngineOptionError)
            assert "zero_hpz_partition_size (hpZ)" in str(error)
        return
    alone = replace(case, spec="data=1", zero={}, mixture=case.mixture and case.mixture | {"ep_size": 1})
    ours = world(ranks).run(train, case, case.spec)
    theirs = world(ranks).run(train, replace(case, reduced=False), case.spec.replace("shard", "+rows"))
    (expected,) = world(1).run(train, replace(alone, reduced=False, zero_init=False), alone.spec)
    for mine, other in zip(ours, theirs, strict=True):
        assert_alike(mine, other, TOLERANCES[case.precision])
        assert_alike(mine, expected, TOLERANCES[case.precision])


@pytest.mark.parametrize("seed", range(3 * len(OF_FOUR)))
def test_random_engines_of_four_ranks_train_alike(world: Worlds, seed: int) -> None:
    compare(world, 4, draw(seed, OF_FOUR))


@pytest.mark.parametrize("seed", range(100, 100 + len(OF_EIGHT)))
def test_random_engines_of_eight_ranks_train_alike(world: Worlds, seed: int) -> None:
    compare(world, 8, draw(seed, OF_EIGHT))
