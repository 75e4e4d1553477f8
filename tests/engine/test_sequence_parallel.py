"""DeepSpeed-Ulysses over a ``seq`` axis trains as one process does, in every order and ZeRO stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from itertools import permutations
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

from ds_topo import PipelineParallelGrid, groups, use
from ds_topo.checkpoint import engine_facts as facts
from tests.support.autotp_training import whole_parameters
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks
from tests.support.training import (
    Batch,
    Run,
    assert_trained_alike,
    destroy_engine,
    engine_config,
    own_samples,
    parameters_of,
    train_by_hand,
    train_engine,
)
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

BATCH, POSITIONS, WIDTH, HEADS, STEPS = 4, 8, 16, 4, 3
SPLIT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*qkv\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
        {"patterns": [r".*output\.weight$"], "partition_type": "row"},
    ],
}
"""How AutoTP splits the layer: by heads."""
DESCENT = {"lr": 0.5, "momentum": 0.9}
OPTIONS: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2, "reduce_scatter": True},
    "zero2-all_reduce": {"stage": 2, "reduce_scatter": False},
    "zero3": {"stage": 3, "reduce_scatter": True},
    "zero3-all_reduce": {"stage": 3, "reduce_scatter": False},
    "zero3-small_buckets": {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": 300},
    "zero3-separate_gradients": {"stage": 3, "reduce_scatter": False, "contiguous_gradients": False},
}


class Model(nn.Module):
    """A layer of attention, ``[b, s, h]`` -> ``[b, s, h]``; ``attention`` maps three ``[b, s, n, d]`` to one."""

    def __init__(self, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = attention

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = (part.unflatten(-1, (-1, WIDTH // HEADS)) for part in self.qkv(hidden).chunk(3, dim=-1))
        attended: torch.Tensor = self.output(self.attention(*parts).flatten(2))
        return hidden + attended


def local_attention(*parts: torch.Tensor) -> torch.Tensor:
    query, key, value = (part.transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Ulysses(nn.Module):
    """The same layer over a group in which each rank has a part of the positions."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.distributed = DistributedAttention(local_attention, group, scatter_idx=2, gather_idx=1)

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.distributed(*parts, batch_dim_idx=0)
        return attended


def batch(step: int) -> Batch:
    """Return inputs and targets ``[b, s, h]`` of a step."""
    inputs = torch.randn(BATCH, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.roll(1, dims=1).sin()


def loss_of(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(module(inputs), targets)


@cache
def _train_alone() -> Run:
    model = Model(local_attention)
    return train_by_hand(model, torch.optim.SGD(model.parameters(), **DESCENT), map(batch, range(STEPS)), loss_of)


def _train_and_compare(topology: str, options: dict[str, Any], alone: Run, is_split: bool = False) -> None:
    """Compare with one process; ``is_split``: AutoTP splits the layers along ``model``."""
    warnings.simplefilter("ignore", FutureWarning)
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid(topology) as grid:
        if "zero_hpz_partition_size" in options:
            groups.create_zero_partition_groups(grid, options["zero_hpz_partition_size"])
        pieces = grid.get_sequence_parallel_world_size()

        def own_positions(step: int) -> Batch:
            own = own_samples(batch(step), grid)
            inputs, targets = (part.chunk(pieces, 1)[grid.get_sequence_parallel_rank()] for part in own)
            return inputs, targets

        model = Model(Ulysses(grid.get_sequence_parallel_group()))
        optimizer = {"type": "SGD", "params": DESCENT}
        config = engine_config(
            BATCH // grid.get_data_parallel_world_size(),
            optimizer=optimizer,
            zero_optimization=options,
            **({"tensor_parallel": {"partition_config": SPLIT}} if is_split else {}),
        )
        parameters = list(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, mpu=grid, config=config, model_parameters=parameters)
        run = train_engine(engine, grid, map(own_positions, range(STEPS)), lambda *args: loss_of(*args) / pieces)
        if is_split:
            assert tuple(facts.shape_of(model.output.weight)) == (WIDTH, WIDTH // 2)
            run.parameters = whole_parameters(engine)
        with deepspeed.zero.GatheredParameters(parameters):
            run.parameters = run.parameters or parameters_of(model)
        destroy_engine(engine)
    assert_trained_alike(run, alone, losses=1e-5, tensors=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "topology",
    [
        "data=2,seq=2",
        *(
            pytest.param(spec, marks=pytest.mark.exhaustive)
            for spec in ("seq=4", "seq=2,data=2", "seq=2,model=2", "model=2,seq=2")
        ),
    ],
)
def test_attention_over_seq_equals_one_process(world: Worlds, topology: str, options: dict[str, Any]) -> None:
    world(4).run(_train_and_compare, topology, options, _train_alone())


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("order", list(permutations(("data", "shard", "seq"))), ids="-".join)
def test_attention_over_seq_and_shard_equals_one_process(
    world: Worlds, order: tuple[str, ...], options: dict[str, Any]
) -> None:
    world(8).run(_train_and_compare, ",".join(f"{axis}=2" for axis in order), options, _train_alone())


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", ["data=2,seq=2,model=2", "seq=2,model=2,data=2", "model=2,data=2,seq=2"])
@pytest.mark.parametrize("options", ["zero1", "zero3"])
def test_attention_over_seq_with_data_and_model_equals_one_process(world: Worlds, topology: str, options: str) -> None:
    world(8).run(_train_and_compare, topology, OPTIONS[options], _train_alone())


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", list(permutations(("data", "seq", "model"))), ids="-".join)
def test_attention_over_seq_of_heads_that_autotp_splits_equals_one_process(order: tuple[str, ...]) -> None:
    run_ranks(8, _train_each, ",".join(f"{axis}=2" for axis in order), _train_alone(), deadline=200)


def _train_each(topology: str, alone: Run) -> None:
    second_partition = {"stage": 3, "zero_hpz_partition_size": 2}
    for options in (*(OPTIONS[f"zero{stage}"] for stage in range(4)), second_partition):
        _train_and_compare(topology, options, alone, is_split=True)


# -- programs for DeepSpeed alone -------------------------------------------------------------------------------------


def _trained_by_a_program_for_stock(layouts: tuple[str, ...], stage: int) -> list[list[Any]]:
    """Return, for each layout, the norm of the first step and the parameters after two, by plain SGD."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    found: list[list[Any]] = []
    for spec in layouts:
        with ExitStack() as undo:
            for name in ("_SEQUENCE_PARALLEL_GROUP", "_SEQUENCE_DATA_PARALLEL_GROUP"):
                undo.callback(setattr, parallel_state_sp, name, None)
            grid = undo.enter_context(PipelineParallelGrid("data=2,seq=2" if spec == "stock" else spec))
            if spec != "stock":
                undo.enter_context(use(grid))
            parallel_state_sp.initialize_sequence_parallel(2)
            torch.manual_seed(0)
            model = nn.Linear(WIDTH, WIDTH)
            config = engine_config(
                1, optimizer={"type": "SGD", "params": {"lr": 0.1}}, zero_optimization={"stage": stage}
            )
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config, mpu=parallel_state_sp
            )
            share = 2 * grid.get_axis_rank("data") + grid.get_axis_rank("seq")
            for step in range(2):
                inputs, targets = (part[share] for part in batch(step))
                engine.backward(loss_of(engine, inputs, targets))
                engine.step()
                if step == 0:
                    found.append([engine.get_global_grad_norm()])
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                found[-1] += [parameter.detach().clone() for parameter in model.parameters()]
            destroy_engine(engine)
    return found


@pytest.mark.parametrize("stage", mark_exhaustive(range(4), default=lambda _, stage: stage == 3))
def test_program_for_stock_keeps_its_scale_of_gradients(world: Worlds, stage: int) -> None:
    """Stock DeepSpeed sums over ``seq`` at ZeRO 0 to 2, and averages at ZeRO 3. Losses of programs fit that."""
    layouts = ("stock", "data=2,seq=2", "seq=2,data=2")
    for stock, *others in world(4).run(_trained_by_a_program_for_stock, layouts, stage):
        for found in others:
            torch.testing.assert_close(found, stock, rtol=1e-6, atol=1e-7)
