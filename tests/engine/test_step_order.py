"""The methods of ours that run in a step, in the order in which their classes state them."""

from __future__ import annotations

import inspect
import sys
import warnings
from itertools import groupby
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, groups, initialize
from ds_topo.base.classes import mixins_of, stock_class
from ds_topo.base.overrides import mixins
from ds_topo.engine import on_grid
from ds_topo.engine.config import Case
from ds_topo.engine.parts import load_all, parts_of
from ds_topo.errors import DisagreementError
from ds_topo.health import job_watch
from tests.step_order import mixins_for_optimizers, optimizer_of
from tests.support.small_engines import settings, start
from tests.support.world import Worlds


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=2, min_capacity=0, use_rts=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.moe(hidden)[0]
        return hidden + mixed


AS_READ = [
    "ReducedPipelineEngine.train_batch",
    "GuardedCallsOfPipeline.train_batch",
    "CountedMicroBatchesOfPipeline.begin_training",
    "ComparedSamplesOfPipeline.train_batch",
    "PipelineOnGrid.train_batch",
    "ComparedSamplesOfPipeline._next_batch",
    "ReducedZero.reduce_gradients",
    "ReducedEngine._take_model_step",
    "GuardedCalls._take_model_step",
    "NoticedSteps._take_model_step",
    "ComparedSamples._take_model_step",
    "NoticedWrites._take_model_step",
    "PartitionedZero.step",
    "NormsOfZero.scaled_global_norm",
    "PartitionedOptimizer.update_lp_params",
    "ReducedZero.zero_grad",
]
"""The overrides that a step of a pipeline at ZeRO 1 goes through, with experts, the reducer and a watch:
the reducer's outside, then the grid's."""


def _traced_step() -> tuple[list[str], list[list[str]], list[list[str]]]:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    load_all()
    codes = {
        inspect.unwrap(method).__code__: f"{kind.__name__}.{name}"
        for kind in mixins()
        for name, method in vars(kind).items()
        if inspect.isfunction(method)
    }
    watch = job_watch.start(60)
    try:
        with PipelineParallelGrid("pipe=2,data=2") as grid:
            groups.create_expert_groups(grid, 2)
            layers = [LayerSpec(nn.Linear, 8, 8), LayerSpec(Experts), LayerSpec(Experts), LayerSpec(nn.Linear, 8, 8)]
            module = PipelineModule(layers, grid=grid, loss_fn=F.mse_loss, partition_method="uniform")
            config = settings(zero_optimization={"stage": 1}, gradient_clipping=0.1, gradient_reducer=True)
            engine, *_ = initialize(model=module, config=config)
            called: list[tuple[Any, str]] = []

            def note(frame: Any, event: str, _: object) -> None:
                if event == "call" and frame.f_code in codes:
                    called.append((frame.f_locals["self"], codes[frame.f_code]))

            batches = iter([(torch.ones(2, 8), torch.zeros(2, 8))] * 4)
            engine.train_batch(batches)
            sys.setprofile(note)
            try:
                engine.train_batch(batches)
            finally:
                sys.setprofile(None)
            found, stated = [], []
            for (target, name), calls in groupby(called, lambda call: (call[0], call[1].partition(".")[2])):
                chain = [call for _, call in calls]
                kinds = [kind for mixin in mixins_of(target) for kind in mixin.__mro__]
                order = list(dict.fromkeys(f"{kind.__name__}.{name}" for kind in kinds if name in vars(kind)))
                found.append(chain)
                stated.append([call for call in order if call in chain])
            engine.destroy()
    finally:
        watch.stop()
    return [call for _, call in called], found, stated


def test_step_runs_as_the_classes_state(world: Worlds) -> None:
    for calls, found, stated in world(4).run(_traced_step):
        assert [dict.fromkeys(chain).keys() for chain in found] == [dict.fromkeys(chain).keys() for chain in stated]
        public = [call for call in dict.fromkeys(calls) if call in AS_READ]
        assert public == AS_READ


def _compared_steps() -> None:
    start()
    for reduced in (False, True):
        with (
            PipelineParallelGrid("data=2") as grid,
            mock.patch.multiple(on_grid, STEPS_BETWEEN=2, job_watch=mock.DEFAULT),
        ):
            engine, *_ = initialize(model=nn.Linear(4, 4), mpu=grid, config=settings(gradient_reducer=reduced))
            for _ in range(2 * 5):
                engine.backward(engine(torch.ones(2, 4)).sum())
                engine.step()
            calls = on_grid.job_watch.compare_steps.call_args_list  # type: ignore[attr-defined]
            group = grid.get_data_parallel_group()
            assert [call.args for call in calls] == ([] if reduced else [(group, 2), (group, 4)])
            engine.destroy()


@pytest.mark.parametrize(
    ("spec", "zero", "more"),
    [
        ("data=2", 0, {}),
        ("data=2,shard=2", 1, {}),
        ("data=2,shard=2", 3, {}),
        ("data=2,model=2", 0, {"bf16": {"enabled": True}}),
        ("data=2,seq=2", 3, {}),
        ("data=2,model=2", 2, {"fp16": {"enabled": True}}),
    ],
)
def test_the_page_shows_the_classes_of_an_engine(world: Worlds, spec: str, zero: int, more: dict[str, Any]) -> None:
    for shown, found in world(2 ** spec.count("=")).run(_shown_and_found, spec, zero, more):
        assert shown == found


def _shown_and_found(spec: str, zero: int, more: dict[str, Any]) -> tuple[list[list[str]], list[list[str]]]:
    start()
    with PipelineParallelGrid(spec) as grid:
        config = settings(zero_optimization={"stage": zero}, **more)
        engine, *_ = initialize(model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mpu=grid, config=config)
        case = Case(engine._config, grid)
        of_optimizer = mixins_of(engine.optimizer)
        listed = [mixin for part in reversed(parts_of(case)) for mixin in mixins_for_optimizers(part)]
        kind = stock_class(engine.optimizer)
        shown = [[part.mixin for part in reversed(parts_of(case))], [m.__name__ for m in listed if m in of_optimizer]]
        found = [[mixin.__name__ for mixin in mixins] for mixins in (mixins_of(engine), of_optimizer)]
        assert {optimizer_of(case) or kind} == {kind} or zero == 0  # a fused one in fp16
        engine.destroy()
    return shown, found


def _experts_on_one_rank() -> str:
    start()
    with PipelineParallelGrid("data=2") as grid:
        model = Experts() if grid.grid_rank else nn.Linear(8, 8)
        with pytest.raises(DisagreementError) as raised:
            initialize(model=model, mpu=grid, config=settings())
    return str(raised.value)


def test_ranks_compare_their_parts(world: Worlds) -> None:
    for message in world(2).run(_experts_on_one_rank):
        assert "parts=" in message
        assert "EngineWithExperts" in message


def test_steps_are_compared_now_and_then_unless_a_reducer_does_it(world: Worlds) -> None:
    world(2).run(_compared_steps)
