"""A GPT that asks its program's own parallel state, over pipe x data x model in every order, equals one process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from itertools import permutations, product
from typing import Any, TypeAlias

import deepspeed
import pytest
import torch

from ds_topo import PipelineModule, PipelineParallelGrid, parallel_state
from tests.support.exhaustive import mark_exhaustive
from tests.support.megatron_style import PROGRAMS, program_of
from tests.support.training import Run, assert_trained_alike, destroy_engine, engine_config, train_by_hand, train_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

STEPS = 3
MICRO_BATCHES = 2
CLIP = 0.5
"""Far below the norm of gradients in every step."""
ORDERS = [",".join(f"{axis}=2" for axis in order) for order in permutations(("pipe", "data", "model"))]

Trained: TypeAlias = tuple[Run, float]
"""A run, and the norm of all parameters after it as the program finds it."""


def _optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def _train_alone(name: str) -> Trained:
    """The reference: one process, laid out by the program's own parallel state."""
    with program_of(name) as program:
        layers = program.layers
        layers.initialize(tensor=1, pipe=1)
        module = torch.nn.Sequential(*(spec.build() for spec in layers.specs()))
        run = train_by_hand(
            module,
            _optimizer_of(module.parameters()),
            map(layers.batch, range(STEPS)),
            lambda model, inputs, labels: layers.loss_of(model(inputs), labels),
            CLIP,
        )
        return run, layers.norm_of(module.parameters())


@pytest.fixture(scope="module")
def alone(world: Worlds) -> Callable[[str], Trained]:
    """``alone(program)``: trained by one process."""
    return cache(lambda name: world(1).run(_train_alone, name)[0])


def _train_and_compare(spec: str, name: str, expected: Trained) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    deepspeed.init_distributed(verbose=False)
    with program_of(name) as program:
        before = _contents_of(program)
        with PipelineParallelGrid(spec) as grid:
            parallel_state.install(grid, program.mpu)
            program.layers.initialize(tensor=2, pipe=2)
            assert _contents_of(program) != before
            for zero in (0, 1):
                run, norm = _train(program.layers, grid, zero)
                assert_trained_alike(run, expected[0], losses=1e-5, norms=1e-5)
                assert norm == pytest.approx(expected[1], rel=1e-5)
        assert _contents_of(program) == before


def _contents_of(program: Any) -> dict[str, dict[str, Any]]:
    return {path: dict(vars(module)) for path, module in sys.modules.items() if path.startswith(program.__name__)}


def _train(layers: Any, grid: PipelineParallelGrid, zero: int) -> Trained:
    module = PipelineModule(layers.specs(), grid=grid, loss_fn=layers.loss_of)
    micro_batch = layers.BATCH // grid.get_data_parallel_world_size() // MICRO_BATCHES
    config = engine_config(micro_batch, MICRO_BATCHES, CLIP, zero_optimization={"stage": zero})
    engine, *_ = deepspeed.initialize(model=module, config=config, optimizer=_optimizer_of(module.parameters()))
    run = train_engine(engine, grid, map(layers.batch, range(STEPS)))
    norm = layers.norm_of(module.parameters())
    destroy_engine(engine)
    return run, norm


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spec", "name"),
    mark_exhaustive(
        product(ORDERS, PROGRAMS), default=lambda number, _: number % 7 == 0
    ),  # orders and programs in turn
)
def test_training_equals_one_process(world: Worlds, alone: Callable[[str], Trained], spec: str, name: str) -> None:
    world(8).run(_train_and_compare, spec, name, alone(name))


def test_both_programs_train_alike_and_always_clip(alone: Callable[[str], Trained]) -> None:
    (neox, _), (megatron, _) = (alone(name) for name in PROGRAMS)
    assert_trained_alike(neox, megatron, losses=0, norms=0, elements=(0, 0))
    assert min(neox.norms) > CLIP
