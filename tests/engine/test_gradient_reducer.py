"""The gradient reducer in DeepSpeed's engines trains as DeepSpeed's own reduction, and as one process."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from packaging.version import Version
from torch import nn

from ds_topo import GradientReducer, PipelineModule, PipelineParallelGrid, initialize
from ds_topo.base.patches import DualPipeVEngine
from ds_topo.engine.engine_driver import EngineDriver
from ds_topo.engine.pipelines.pipeline_driver import PipelineDriver
from ds_topo.errors import DisagreementError
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.gpt_training import BF16, SMALL_BUCKETS, train_pipeline
from tests.support.small_engines import settings, start
from tests.support.training import Reference, Run, assert_trained_alike, destroy_engine, engine_config
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

STEPS = 3
CASES: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 0, "gas": 4, "checkpointed": True},
    {"zero": 1, "gas": 4, "checkpointed": True},
    {"zero": 1, **BF16},
    {"zero": 1, "gas": 4, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    {"zero": 0, "checkpointed": True, **BF16},
    {"zero": 0, "prescale_gradients": False, "gradient_predivide_factor": 2.0},
]
LAYOUTS: list[tuple[str, list[dict[str, Any]]]] = [
    ("pipe=2,data=2", CASES),
    ("data=2,pipe=2", CASES),
    ("pipe=2,seq=2", CASES[:2]),
    ("data=4", CASES[:2]),
    ("pipe=4", CASES[1:2]),
    ("pipe=2,model=2,data=2", [*CASES[:2], {"zero": 1, "sequence": True}]),
]


@pytest.mark.parametrize(("stage", "communication", "defers"), [(0, [1], False), (1, [49], True), (1, [50], False)])
def test_a_stage_defers_its_reduction_if_it_waits_longer_for_earlier_stages(
    stage: int, communication: list[int], defers: bool
) -> None:
    driver: Any = SimpleNamespace(engine=SimpleNamespace(stage_id=stage), backward_ns=100)
    of_steps = [SimpleNamespace(communication_ns=each, ended_ns=1) for each in communication]
    under_way = SimpleNamespace(communication_ns=10**9, ended_ns=0)
    assert PipelineDriver.prefers_to_defer(driver, [*of_steps, under_way]) is defers  # type: ignore[list-item]
    assert PipelineDriver.prefers_to_defer(driver, [under_way]) is False, "nothing is known yet"  # type: ignore[list-item]
    driver.engine = mock.Mock(spec=DualPipeVEngine, stage_id=stage)
    assert PipelineDriver.prefers_to_defer(driver, of_steps) is False  # type: ignore[arg-type]


def test_last_backward_is_of_this_engine_in_the_last_micro_batch() -> None:
    engine: Any = SimpleNamespace(inside_no_sync_ctxt=False, is_gradient_accumulation_boundary=lambda: is_boundary)
    is_boundary, driver = True, EngineDriver(engine, {})
    driver.gradients = gradients = SimpleNamespace(reduces_always=False)  # type: ignore[assignment]
    assert not driver.is_last_backward(), "of another engine's loss"
    with driver.in_backward():
        driver.begin_backward()
        with driver.in_backward():
            assert driver.is_last_backward()
        assert driver.is_last_backward()
    assert not driver.is_last_backward()
    driver.begin_backward()  # loss.backward() without the engine
    assert driver.is_last_backward()
    is_boundary = False
    assert not driver.is_last_backward()
    gradients.reduces_always = True
    assert driver.is_last_backward()
    engine.inside_no_sync_ctxt = True
    assert not driver.is_last_backward()
    engine.inside_no_sync_ctxt = False
    driver.end_backward()
    assert not driver.is_last_backward()


@pytest.mark.parametrize(
    ("averages", "sequence", "postscales", "predivides", "expected"),
    [
        (True, 1, True, 1.0, {}),
        (True, 2, True, 1.0, {"divisor": 2}),
        (True, 1, True, 8.0, {"predivide_factor": 8.0}),
        (True, 1, False, 8.0, {}),
        (False, 2, True, 8.0, {"op": "sum"}),
    ],
)
@pytest.mark.parametrize("kind", [EngineDriver, PipelineDriver])
def test_factors_of_the_reduction_are_those_of_the_engine(
    kind: type[EngineDriver], averages: bool, sequence: int, postscales: bool, predivides: float, expected: Any
) -> None:
    with fake_world(0, 4):
        driver: Any = object.__new__(kind)
        driver.engine = SimpleNamespace(
            mpu=SimpleNamespace(get_data_parallel_group=lambda: dist.group.WORLD),
            seq_data_parallel_group=dist.group.WORLD,
            sequence_parallel_size=sequence,
            gradient_average=averages,
            postscale_gradients=lambda: postscales,
            gradient_predivide_factor=lambda: predivides,
            communication_data_type=torch.float32,
            has_moe_layers=False,
        )
        driver.gradients = SimpleNamespace(partitions=())
        options = driver.options()
    factors = {name: options.get(name) for name in ("op", "divisor", "predivide_factor") if name in options}
    assert factors == ({} if kind is PipelineDriver and "divisor" in expected else expected)
    assert not options["broadcast_at_start"], "the engine has done that"


def _train_both_ways(topology: str, options: dict[str, Any], alone: Run) -> Run:
    theirs = train_pipeline(topology, STEPS, **options)
    ours = train_pipeline(topology, STEPS, **options, gradient_reducer=SMALL_BUCKETS)
    of_bf16 = 2e-3 if Version(torch.__version__) >= Version("2.13") else 2**-8  # half a unit of bf16 on older torch
    tolerance = of_bf16 if "bf16" in options else 1e-5
    assert_trained_alike(ours, theirs, losses=tolerance, norms=tolerance, elements=(4 * tolerance, 4 * tolerance))
    assert ours.parameters.keys() == theirs.parameters.keys()
    if "bf16" not in options:
        assert_trained_alike(ours, alone, losses=1e-5, norms=1e-4)
    assert ours.buckets > 1
    assert theirs.reductions == 0
    assert ours.reductions == STEPS * ours.buckets, "once per bucket and step, for any number of micro-batches"
    return ours


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("topology", "options"),
    mark_exhaustive(
        ((topology, options) for topology, cases in LAYOUTS for options in cases),
        # most layouts and cases once
        default=lambda number, _: number in (0, 5, 10, 14, 18, 23),
    ),
)
def test_pipelines_train_as_one_process_and_as_deepspeeds_reduction(
    world: Worlds, layers_alone: Reference, topology: str, options: dict[str, Any]
) -> None:
    has_slices = "model" in topology
    runs = world(8 if has_slices else 4).run(_train_both_ways, topology, options, layers_alone(STEPS))
    for one in runs if not has_slices else []:
        for other in runs:
            for name in one.parameters.keys() & other.parameters.keys():
                assert torch.equal(one.parameters[name], other.parameters[name]), "replicas are bit-equal"


OVERLAPPED = {**SMALL_BUCKETS, "overlap_parameters": True}


def _overlapped(topology: str, options: dict[str, Any]) -> None:
    in_step = train_pipeline(topology, STEPS, **options, gradient_reducer=SMALL_BUCKETS)
    on_their_way = train_pipeline(topology, STEPS, **options, gradient_reducer=OVERLAPPED)
    assert on_their_way.losses == in_step.losses
    for name, value in in_step.parameters.items():
        assert torch.equal(on_their_way.parameters[name], value), name


@pytest.mark.thorough
@pytest.mark.parametrize("topology", ["pipe=2,data=2", pytest.param("data=2,pipe=2", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "options",
    mark_exhaustive([{"zero": 1}, {"zero": 1, "gas": 4, "checkpointed": True}, CASES[5]], lambda i, _: i == 1),
)
def test_parameters_arrive_during_the_next_step_of_a_pipeline(
    world: Worlds, topology: str, options: dict[str, Any]
) -> None:
    world(4).run(_overlapped, topology, options)


# -- unsupported engines, and detach -----------------------------------------------------------------------------------


class TwoOutputs(nn.Linear):
    """A stage that returns two tensors, so that the engine calls backward twice per micro-batch."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, hidden: Any) -> Any:
        hidden = hidden[0] + hidden[1] if isinstance(hidden, tuple) else hidden
        return super().forward(hidden).tanh(), hidden


def _loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return (outputs[0] - labels).square().mean()


def _settings(**more: Any) -> dict[str, Any]:
    return engine_config(2, 2, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **more)


def _two_outputs(**more: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters after training with a reducer, and after further training without it."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid("pipe=2,data=2")
    module = PipelineModule([LayerSpec(TwoOutputs)] * 4, grid=grid, loss_fn=_loss, seed_layers=True)
    engine, *_ = initialize(model=module, config=_settings(**more))
    snapshots = []
    for step in range(6):
        if step == 3:
            if engine.gradient_reducer is not None:
                assert type(engine).__name__ == "PipelineEngineOnGridReduced"
                engine.gradient_reducer.detach()
                assert type(engine).__name__ == "PipelineEngineOnGrid"
            snapshots.append([parameter.detach().clone() for parameter in module.parameters()])
        generator = torch.Generator().manual_seed(10 * step + grid.get_data_parallel_rank())
        data = [(torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)) for _ in range(2)]
        engine.train_batch(iter(data))
    snapshots.append([parameter.detach().clone() for parameter in module.parameters()])
    destroy_engine(engine)
    grid.destroy()
    return snapshots[0], snapshots[1]


def _two_outputs_both_ways(overlap: bool | None) -> None:
    for ours, theirs in zip(_two_outputs(gradient_reducer={"overlap": overlap}), _two_outputs(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("overlap", [None, True, False], ids="overlap_{}".format)
def test_several_backward_calls_per_micro_batch_and_detach(world: Worlds, overlap: bool | None) -> None:
    world(4).run(_two_outputs_both_ways, overlap)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": 3}}, 'ZeRO stage 3 partitions parameters, too.*"overlap_comm": true'),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "an offloaded optimizer .*switch"),
    ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation=false"),
    ({"gradient_reducer": {"bucket_byte": 1}}, 'config section "gradient_reducer".*bucket_byte'),
    ({"gradient_reducer": {"bucket_bytes": 0}}, "bucket_bytes=0"),
    ({"gradient_reducer": {"bucket_bytes": 0}, "zero_optimization": {"stage": 1}}, "bucket_bytes=0"),
    ({"gradient_reducer": {"overlap_parameters": True}}, "overlap_parameters=True: .* ZeRO stages 1 and 2"),
    ({"gradient_reducer": {"overlap_parameters": "yes"}}, "overlap_parameters='yes': give True or False"),
]


def _refuse(settings: dict[str, Any], message: str) -> None:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with (
        PipelineParallelGrid("data=2") as grid,
        pytest.raises(ValueError, match=re.compile(message, re.DOTALL)),
    ):
        initialize(model=nn.Linear(4, 4), mpu=grid, config=_settings(**{"gradient_reducer": True, **settings}))


@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_attach_refuses_unsupported_engines(world: Worlds, settings: dict[str, Any], message: str) -> None:
    world(2).run(_refuse, settings, message)


def _misuse() -> None:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=2") as grid:
        with pytest.raises(TypeError, match=r"Linear is not what deepspeed\.initialize returns"):
            GradientReducer.attach(nn.Linear(4, 4))
        engine, *_ = initialize(model=nn.Linear(4, 4), mpu=grid, config=_settings())
        assert engine.gradient_reducer is None
        reducer = GradientReducer.attach(engine)
        with pytest.raises(RuntimeError, match="already have a GradientReducer"):
            GradientReducer.attach(engine)
        with pytest.raises(RuntimeError, match="detach"), engine.coalesce_grad_reduction():
            pass
        engine.destroy()
        assert reducer.state.name == "DETACHED"


def test_attach_refuses_a_second_reducer_and_other_objects(world: Worlds) -> None:
    world(2).run(_misuse)


def _reductions_of_a_step() -> None:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=2") as grid:
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        config = _settings(gradient_reducer={"bucket_bytes": 500, "first_bucket_bytes": 100})
        engine, *_ = initialize(model=module, mpu=grid, config=config)
        for _ in range(2):
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
                for _ in range(2):
                    engine.backward(engine(torch.ones(2, 8)).sum())
                    engine.step()
        buckets = len(engine.gradient_reducer.buckets)
        assert all_reduce.call_count == buckets + 1, "and one small message in which the ranks compare notes"
        engine.destroy()


def test_deepspeed_reduces_nothing_itself(world: Worlds) -> None:
    world(2).run(_reductions_of_a_step)


def _buckets_launched_in_backward(stage: int, more: dict[str, Any]) -> tuple[list[int], int]:
    """Return how many buckets each micro-batch launches before the first layer's gradients, and the number of all."""
    start()
    with PipelineParallelGrid("data=2") as grid:
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        small = dict.fromkeys(SMALL_BUCKETS, 400)
        config = _settings(zero_optimization={"stage": stage}, gradient_reducer=small, **more)
        engine, *_ = initialize(model=module, mpu=grid, config=config)
        reducer, launched = engine.gradient_reducer, []

        def note_launches(_: object, __: object, hidden: torch.Tensor) -> None:
            before = reducer.reduction_count
            hidden.register_hook(lambda _: launched.append(reducer.reduction_count - before))

        module[0].register_forward_hook(note_launches)
        for _ in range(6):
            engine.backward(engine(torch.ones(2, 8, dtype=module[0].weight.dtype)).float().sum())
            engine.step()
        buckets = len(reducer.buckets)
        engine.destroy()
    return launched, buckets


@pytest.mark.parametrize("more", [{}, pytest.param(BF16, marks=pytest.mark.exhaustive)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_buckets_are_launched_during_backward(world: Worlds, stage: int, more: dict[str, Any]) -> None:
    """Also at ZeRO 1 and 2, where DeepSpeed has hooks on all parameters."""
    launched, buckets = world(2).run(_buckets_launched_in_backward, stage, more)[0]
    assert buckets > 2
    assert launched[-2:] == [buckets - 1 if stage == 2 else 0, buckets - 1], "stage 2 reduces each micro-batch"


class HalfUsed(nn.Module):
    """A model of which one layer never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.used(hidden).tanh()


def _half_used(stage: int, reducer: Any) -> list[torch.Tensor]:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=2") as grid:
        torch.manual_seed(0)
        module = nn.Sequential(HalfUsed(), HalfUsed())
        config = _settings(
            bf16={"enabled": True},
            data_types={"grad_accum_dtype": "fp32"},
            zero_optimization={"stage": stage},
            gradient_reducer=reducer,
        )
        engine, *_ = initialize(model=module, mpu=grid, config=config)
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            inputs = torch.randn(2, 4, generator=generator).bfloat16()
            engine.backward(engine(inputs).float().square().mean())
            engine.step()
        engine.destroy()
    return [parameter.detach().float() for parameter in module.parameters()]


def _half_used_both_ways(stage: int) -> None:
    for ours, theirs in zip(_half_used(stage, {"bucket_bytes": 10**6}), _half_used(stage, False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_in_buckets_with_unused_parameters_count_once(world: Worlds, stage: int) -> None:
    """The bucket is not full when backward ends, and already holds gradients of earlier micro-batches."""
    world(2).run(_half_used_both_ways, stage)


def _leaves_out_a_step(stage: int) -> list[str]:
    start()
    grid = PipelineParallelGrid("data=4")
    config = settings(zero_optimization={"stage": stage}, gradient_accumulation_steps=1, gradient_reducer={})
    engine, *_ = initialize(model=nn.Linear(4, 1), config=config, mpu=grid)
    for step in range(3):
        loss = engine(torch.ones(2, 4)).sum()
        if step == 2:
            with pytest.raises(DisagreementError) as caught:
                engine.backward(loss)
            destroy_engine(engine)
            grid.destroy()
            return [str(caught.value)]
        engine.backward(loss)
        if (step, dist.get_rank()) != (1, 2):
            engine.step()
    return []


@pytest.mark.backends("gloo")
def test_a_skipped_step_is_reported_at_the_next_step(world: Worlds) -> None:
    """Without ZeRO, no collective of the skipped step would fail."""
    [message] = {message for [message] in world(4).run(_leaves_out_a_step, 0)}
    assert re.search(r"ranks \[0, 1, 3\] on .* have taken 2\n +ranks \[2\] on .* have taken 1\n", message)


def _unfreeze(stage: int, has_reducer: bool) -> tuple[list[float], str]:
    """Unfreeze a layer after a step, with the remedy that the error names; return the losses and the error."""
    start()
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[0].requires_grad_(False)
    config = settings(zero_optimization={"stage": stage}, gradient_accumulation_steps=1, gradient_reducer=has_reducer)
    losses, message = [], ""
    with PipelineParallelGrid("data=2") as grid:
        engine, *_ = initialize(model=module, model_parameters=[*module.parameters()], mpu=grid, config=config)
        for step in range(4):
            if step == 1:
                module[0].requires_grad_(True)
            inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss = (engine(inputs) - 1).square().mean()
            try:
                engine.backward(loss)
            except RuntimeError as error:
                message = str(error)
                if stage:
                    break
                engine.zero_grad()
                engine.gradient_reducer.detach()
                GradientReducer.attach(engine)
                loss = (engine(inputs) - 1).square().mean()
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        destroy_engine(engine)
    return losses, message


def _compare_unfreezing() -> None:
    expected, _ = _unfreeze(0, False)
    losses, message = _unfreeze(0, True)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert "['0.weight', '0.bias'] were unfrozen" in message
    assert "GradientReducer.attach(engine) on all ranks" in message
    _, message = _unfreeze(1, True)
    assert "DeepSpeedZeroOptimizer trains only what required gradients in deepspeed.initialize" in message


def test_unfrozen_parameters_are_refused_with_what_deepspeeds_optimizer_can_do(world: Worlds) -> None:
    world(2).run(_compare_unfreezing)
