"""AutoSP on the ``seq`` axis trains as one process does, in every order, and as stock DeepSpeed in its own order."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_topo
from ds_topo import PipelineParallelGrid
from tests.support.training import (
    Run,
    assert_trained_alike,
    destroy_engine,
    engine_config,
    parameters_of,
    train_by_hand,
    train_engine,
)
from tests.support.world import Worlds

pytest.importorskip("torch", minversion="2.9")
BATCH, POSITIONS, WIDTH, HEADS, VOCABULARY, STEPS = 4, 8, 16, 4, 32, 3
DESCENT: dict[str, float] = {"lr": 0.5, "momentum": 0.9}


class Decoder(nn.Module):
    """A causal language model of one block that computes its own loss, ``[b, s]`` -> a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.position(positions)
        shape = (*tokens.shape, HEADS, -1)  # AutoSP needs the length in the graph
        heads = (part.reshape(shape).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(hidden.shape)
        return F.cross_entropy(self.output(hidden + attended).flatten(0, 1), labels.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (BATCH, POSITIONS), generator=torch.Generator().manual_seed(step))
    return tokens, tokens.roll(-1, 1)


def _loss(module: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

    positions = torch.arange(POSITIONS).expand(len(tokens), -1).contiguous()
    loss: torch.Tensor = module(*prepare_autosp_inputs(tokens.clone(), labels.clone(), positions)[:3])
    return loss


@cache
def _train_alone() -> Run:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), **DESCENT)
    return train_by_hand(model, optimizer, map(batch, range(STEPS)), _loss)


def _train(spec: str, stage: int, reducer: bool = False, **options: Any) -> Run:
    """Train on a grid, or with stock DeepSpeed on neighboring ranks; graphs run as they are, without inductor."""
    from deepspeed.compile.custom_ops import sp_dp_registry

    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=2,seq=2" if spec == "stock" else spec) as grid:
        share, count = grid.get_sample_rank(), grid.get_sample_world_size()
        config = engine_config(
            BATCH // count,
            zero_optimization={"stage": stage},
            compile={"deepcompile": True, "passes": ["autosp"]},
            gradient_reducer=reducer,
            **options,
        )
        if spec == "stock":
            config.pop("gradient_reducer")
        model = Decoder()
        engine, *_ = (deepspeed if spec == "stock" else ds_topo).initialize(
            model=model,
            mpu=None if spec == "stock" else grid,
            config=config,
            optimizer=torch.optim.SGD(model.parameters(), **DESCENT),
        )
        # DeepSpeed replaces a function of torch for the rest of the process, and fails when it does so again
        with mock.patch("deepspeed.compile.init_sp.register_long_context_checkpointing"):
            engine.compile()
        own = (tuple(part.chunk(count)[share] for part in batch(step)) for step in range(STEPS))
        with mock.patch("torch._inductor.compile", lambda graph, _: graph):
            run = train_engine(engine, grid, own, _loss)  # type: ignore[arg-type]
        run.losses = [loss / grid.get_axis_size("seq") for loss in run.losses]  # the mean of each part, not its share
        run.parameters = parameters_of(model)
        assert sp_dp_registry.GROUP_REGISTRY["SP_SIZE"] == grid.get_axis_size("seq")
        destroy_engine(engine)
    if spec == "stock":
        sp_dp_registry.GROUP_REGISTRY.clear()
    assert not sp_dp_registry.GROUP_REGISTRY
    torch.compiler.reset()
    return run


def _compare(spec: str, stage: int, alone: Run, reducer: bool) -> None:
    assert_trained_alike(_train(spec, stage, reducer), alone, losses=1e-6, tensors=1e-6)


@pytest.mark.parametrize(
    ("spec", "stage"),
    [
        ("seq=2,data=2", 1),
        *(
            pytest.param(spec, stage, marks=pytest.mark.exhaustive)
            for spec in ("seq=2,data=2", "data=2,seq=2", "seq=4", "seq=2,model=2", "model=2,seq=2")
            for stage in (0, 1)
            if (spec, stage) != ("seq=2,data=2", 1)
        ),
    ],
)
def test_autosp_in_any_order_equals_one_process(world: Worlds, spec: str, stage: int) -> None:
    world(4).run(_compare, spec, stage, _train_alone(), False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", ["data=2,seq=2,model=2", "seq=2,model=2,data=2", "model=2,data=2,seq=2"])
def test_autosp_with_data_and_model_equals_one_process(world: Worlds, spec: str) -> None:
    world(8).run(_compare, spec, 1, _train_alone(), False)


@pytest.mark.exhaustive
def test_autosp_with_a_reducer_equals_one_process(world: Worlds) -> None:
    world(4).run(_compare, "seq=2,data=2", 1, _train_alone(), True)


def _compare_with_stock(stage: int) -> None:
    stock, ours = _train("stock", stage, sequence_parallel_size=2), _train("data=2,seq=2", stage)
    assert ours.losses == stock.losses
    assert all(torch.equal(ours.parameters[name], stock.parameters[name]) for name in stock.parameters)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 1])
def test_autosp_equals_stock_bit_for_bit(world: Worlds, stage: int) -> None:
    world(4).run(_compare_with_stock, stage)
