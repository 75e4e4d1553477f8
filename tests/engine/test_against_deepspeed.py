"""Engines of a grid, with and without our reducer, train step by step as engines of DeepSpeed without a grid.

The table is the product of ZeRO stages, precisions, situations and accumulation steps, plus rows for experts and for
offload. Loss, learning rate, norm, loss scale and skipped steps are compared after every step, and parameters at
the end. ``STOCK_FAILS`` and ``OTHER_NORMS`` list the known differences, each with its reason.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import nn

from ds_topo import PipelineParallelGrid, initialize
from tests.support.failing import FailsInBackward
from tests.support.small_engines import settings
from tests.support.training import destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.exhaustive

WIDTH, STEPS, UNUSUAL_STEPS = 8, 5, (1, 3)
RANKS = 4
SMALL = {"bucket_bytes": 1200, "first_bucket_bytes": 600, "last_bucket_bytes": 300}
MUON = {"type": "Muon", "params": {"lr": 0.1, "momentum": 0.9, "torch_adam": True}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "": {},
    "Muon": {"optimizer": MUON},
    "Muon, sums in fp32": {"optimizer": MUON, "data_types": {"grad_accum_dtype": "fp32"}},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}
SITUATIONS = (
    "plain",
    "evaluation between micro-batches",
    "NaN loss on one rank",
    "exception in backward",
    "engine.compile",
    "torch.compile",
    "load_checkpoint into a live engine",
    "unused parameters on one rank",
)
MIXTURES: dict[str, dict[str, Any]] = {
    "top-1": {"k": 1},
    "top-2": {"k": 2},
    "residual": {"k": 1, "use_residual": True},
    "min_capacity": {"k": 1, "min_capacity": 3, "capacity_factor": 0.25},
}


@dataclass(frozen=True)
class Row:
    """A row of the table: the options of an engine, and what happens while it trains."""

    stage: int
    precision: str = "fp32"
    accumulation: int = 1
    situation: str = "plain"
    experts: str = ""
    expert_parallel_size: int = 2
    offload: bool = False
    clip: float = 0.3
    spec: str = "data=4"
    optimizer: str = ""
    """SGD with momentum by default."""


@dataclass
class Record:
    """The losses and states that one rank of an engine recorded."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)


class Layers(nn.Module):
    """A chain of layers, some with experts, that may skip one layer or fail in backward."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        if row.experts:
            options = {"use_rts": False, "top2_2nd_expert_sampling": False, "capacity_factor": 2.0} | MIXTURES[
                row.experts
            ]
            self.experts = MoE(
                WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=row.expert_parallel_size, **options
            )

    def forward(self, hidden: torch.Tensor, what: str = "") -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == 3 and what == "fail":
                hidden = FailsInBackward.apply(hidden)
            if index != 3 or what != "skip":
                hidden = hidden + torch.tanh(layer(hidden))
        if hasattr(self, "experts"):
            hidden = hidden + self.experts(hidden)[0]
        return hidden


def config_of(row: Row, reduced: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": row.stage}
    if row.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    schedule = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 3, "total_num_steps": 9}
    return settings(
        train_micro_batch_size_per_gpu=4 * RANKS // dist.get_world_size(),
        gradient_accumulation_steps=row.accumulation,
        gradient_clipping=row.clip,
        zero_optimization=zero,
        scheduler={"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
        gradient_reducer=SMALL if reduced else False,
        **OPTIMIZERS[row.optimizer],
        **PRECISIONS[row.precision],
    )


def samples(row: Row, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a micro-batch of this rank; of all ranks where one process trains alone."""
    ranks = [dist.get_rank()] if dist.get_world_size() > 1 else range(RANKS)
    seeds = [1000 * step + 100 * micro_batch + rank for rank in ranks]
    parts = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    inputs = torch.cat(parts).to(DTYPES[row.precision])
    return inputs, inputs.roll(1, dims=1).sin()


def train_step(engine: Any, row: Row, step: int) -> float:
    """Train one step; return the mean loss of this rank."""
    unusual = row.situation if step in UNUSUAL_STEPS else ""
    total = 0.0
    for micro_batch in range(row.accumulation):
        inputs, targets = samples(row, step, micro_batch)
        is_last = micro_batch == row.accumulation - 1
        if unusual == "exception in backward" and is_last:
            with pytest.raises(ArithmeticError, match="in backward"):
                engine.backward(F.mse_loss(engine(inputs.requires_grad_(), "fail"), targets))
            engine.zero_grad()
            if hasattr(engine.optimizer, "clear_hp_grads"):
                engine.optimizer.clear_hp_grads()
        if row.situation == "evaluation between micro-batches":
            engine.eval()
            with torch.no_grad():
                engine(inputs)
            engine.train()
        skips = unusual == "unused parameters on one rank" and dist.get_rank() == 1
        loss = F.mse_loss(engine(inputs, "skip" if skips else ""), targets)
        if unusual == "NaN loss on one rank" and is_last and dist.get_rank() == 1:
            loss = loss * float("nan")
        engine.backward(loss)
        engine.step()
        total += float(loss) / row.accumulation
    return total


def parameters_of(engine: Any) -> list[torch.Tensor]:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=engine.zero_optimization_stage() == 3):
        return [parameter.detach().float().clone() for parameter in parameters]


@contextmanager
def shared_folder() -> Iterator[str]:
    """Yield a temporary folder that all ranks share."""
    name = [tempfile.mkdtemp(prefix="against-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    try:
        yield name[0]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(name[0])


def train(rows: tuple[Row, ...], side: str) -> list[Record | str]:
    """Train one side of some rows: ``stock``, ``grid`` or ``reducer``; a string is the message of a refusal."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    found: list[Record | str] = []
    for row in rows:
        grid = None if side == "stock" else PipelineParallelGrid(row.spec)
        if grid is not None and row.stage == 0 and row.precision == "fp16":
            grid.correct_norms = False  # stock divides gradients by the loss scale, but does not multiply losses by it
        module: Any = Layers(row)
        if row.situation == "torch.compile":
            module = torch.compile(module, backend="aot_eager")
        parameters = [{"params": list(module.parameters()), "name": "all"}]
        if row.experts:
            parameters = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(parameters)
        arguments = {"model": module, "model_parameters": parameters, "config": config_of(row, side == "reducer")}
        torch.manual_seed(1 + dist.get_rank())
        try:
            if side == "stock":
                engine, *_ = deepspeed.initialize(**arguments)
            else:
                engine, *_ = initialize(mpu=grid, **arguments)
        except ValueError as error:
            assert grid is not None
            found.append(str(error))
            grid.destroy()
            continue
        if row.situation == "engine.compile":
            engine.compile(backend="eager")
        with torch.compiler.set_stance("force_eager") if row.optimizer else nullcontext():  # Muon compiles its kernels
            found.append(record(engine, row))
        destroy_engine(engine)
        if grid is not None:
            grid.destroy()
    return found


def record(engine: Any, row: Row) -> Record:
    run = Record()
    with shared_folder() as folder:
        for step in range(STEPS):
            if row.situation == "load_checkpoint into a live engine":
                if step == 2:
                    engine.save_checkpoint(folder)
                if step == 4:
                    assert engine.load_checkpoint(folder)[0] is not None
            run.losses.append(train_step(engine, row, step))
            norm = engine.get_global_grad_norm()
            run.norms.append(None if norm is None else float(norm))
            run.rates.append(engine.get_lr()[0])
            scaled = getattr(engine.optimizer, "loss_scale_config", engine.optimizer)
            run.scales.append(float(getattr(scaled, "cur_scale", 1.0)))
            run.skipped.append(engine.skipped_steps)
    run.parameters = parameters_of(engine)
    return run


REFUSED = {3: "ZeRO stage 3 partitions parameters", "offload": "an offloaded optimizer"}
STOCK_FAILS: dict[tuple[int, str], tuple[str, int | None]] = {
    (1, "unused parameters on one rank"): ("its ranks all-reduce buckets of different sizes, which ends in gloo", 0),
    (2, "unused parameters on one rank"): ("its ranks all-reduce buckets of different sizes, which ends in gloo", 0),
    (3, "unused parameters on one rank"): ("its ranks gather different parameters, which hangs", None),
    (2, "exception in backward"): ("it refuses a second reduction of the parameters that were reduced before", 1),
    (3, "exception in backward"): ("parameters that were reduced before are still in its bucket", None),
    (3, "torch.compile"): ("its hooks read the attribute '_in_forward' of a dict", None),
}
"""What stock DeepSpeed 0.19.8 cannot do, with the reason, and the stage that does the same arithmetic and can do it.

Engines of a grid without a reducer run the same code. With a reducer they are compared with that stage.
"""
OTHER_NORMS = "at ZeRO 1 and 2 our norm counts each expert once; stock's depends on the number of ranks of an expert"


def assert_alike(found: Record, expected: Record, tolerance: float, norms: bool = True) -> None:
    assert (found.rates, found.scales, found.skipped) == (expected.rates, expected.scales, expected.skipped)
    near = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(found.losses, expected.losses, **near)
    if norms and None not in (*expected.norms, *found.norms):
        torch.testing.assert_close(found.norms, expected.norms, **near)
    assert found.parameters
    for mine, theirs in zip(found.parameters, expected.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, **near)


def compare(world: Worlds, rows: tuple[Row, ...]) -> None:
    """Train the rows on all sides and compare each rank with the same rank of stock DeepSpeed."""
    stage, tolerance = rows[0].stage, TOLERANCES[rows[0].precision]
    reason, instead = STOCK_FAILS.get((stage, rows[0].situation), ("", stage))
    if instead == 0 < stage and rows[0].precision == "fp16":
        instead = None  # in fp16, stock itself trains differently at stages 0 and 1
    if instead is None:
        pytest.skip(f"stock DeepSpeed cannot do this: {reason}")
    stock = world(4).run(train, tuple(replace(row, stage=instead) for row in rows), "stock")
    reduced = world(4).run(train, rows, "reducer")
    on_grid = [] if reason else world(4).run(train, rows, "grid")
    refusal = REFUSED[3] if stage == 3 else REFUSED["offload"] if rows[0].offload else ""
    has_norms = not (rows[0].experts and stage)  # OTHER_NORMS
    for rank in range(4):
        for number, expected in enumerate(stock[rank]):
            if on_grid:  # the same code, bit for bit; experts have groups of their own, whose sums have another order
                assert_alike(on_grid[rank][number], expected, 1e-6 if rows[0].experts else 0.0, has_norms)
            if refusal:
                assert refusal in reduced[rank][number]
            else:
                assert_alike(reduced[rank][number], expected, tolerance, has_norms)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", range(4))
def test_engines_train_as_stock_deepspeed(world: Worlds, stage: int, precision: str, situation: str) -> None:
    compare(world, tuple(Row(stage, precision, accumulation, situation) for accumulation in (1, 3)))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("experts", MIXTURES)
@pytest.mark.parametrize("stage", range(3))
def test_experts_train_as_in_stock_deepspeed(world: Worlds, stage: int, experts: str, size: int) -> None:
    rows = (Row(stage, "fp32", accumulation, "plain", experts, size, clip=0.0) for accumulation in (1, 3))
    compare(world, tuple(rows))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(1, 4))
def test_offloaded_engines_train_as_stock_deepspeed(world: Worlds, stage: int, precision: str) -> None:
    compare(world, tuple(Row(stage, precision, accumulation, offload=True) for accumulation in (1, 3)))


@pytest.mark.parametrize("situation", ["plain", "load_checkpoint into a live engine"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_engines_train_as_one_process(world: Worlds, stage: int, precision: str, situation: str) -> None:
    rows = tuple(Row(stage, precision, accumulation, situation) for accumulation in (1, 3))
    [alone] = world(1).run(train, rows, "stock")
    for side in ("grid", "reducer") if stage < 3 else ("grid",):
        ranks = world(4).run(train, rows, side)
        for expected, *found in zip(alone, *ranks, strict=True):
            means = [sum(losses) / RANKS for losses in zip(*(each.losses for each in found), strict=True)]
            for each in found:
                assert_alike(replace(each, losses=means), expected, TOLERANCES[precision])
