"""Pipelines with the DualPipeV schedule train as one process does, in every order, and as stock DeepSpeed's do."""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_topo import DualPipeVModule, PipelineParallelGrid, checkpoint, initialize, use
from ds_topo.base.ledger import find, is_absent
from ds_topo.base.patches import StockDualPipeVModule as StockModule
from ds_topo.cli import main
from ds_topo.errors import EngineOptionError, TopologyError
from ds_topo.plan.memory import chunks_in_flight
from ds_topo.plan.step_time import mirrored_bubble
from tests.support.exhaustive import mark_exhaustive
from tests.support.gpt_training import BATCH, batch, pipeline, train
from tests.support.training import Reference, Run, assert_trained_alike, destroy_engine, engine_config, own_samples
from tests.support.world import Worlds

DualPipeVSchedule = find("deepspeed.runtime.pipe.schedule.DualPipeVSchedule")
pytestmark = [
    pytest.mark.backends("gloo", exhaustive=("strict",)),
    pytest.mark.skipif(is_absent(StockModule), reason="DualPipeV needs DeepSpeed >= 0.19.8"),
]

STEPS, GAS = 3, 4
SMALL = {"bucket_bytes": 600, "first_bucket_bytes": 200, "last_bucket_bytes": 200}
"""Bucket sizes with which most parameters have their own."""
TOPOLOGIES = ["data=2,pipe=2", "pipe=2,data=2", "model=2,pipe=2", "pipe=2,model=2", "seq=2,pipe=2"]


def _train_and_compare(topology: str, zero: int, reducer: bool, expected: Run) -> None:
    reducing = {"gradient_reducer": dict(SMALL)} if reducer else {}
    with pipeline(topology, zero=zero, gas=GAS, kind=DualPipeVModule, **reducing) as (engine, grid):
        run = train(engine, grid, range(STEPS))
        own = {name: _own(parameter, expected.parameters[name], grid) for name, parameter in named(engine.module)}
    assert_trained_alike(run, replace(expected, parameters=own), losses=1e-6, norms=1e-5, tensors=1e-5)
    if reducer:
        assert run.buckets > 2
        assert run.reductions >= STEPS * (run.buckets - 1)


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters())


def _own(parameter: nn.Parameter, whole: torch.Tensor, grid: PipelineParallelGrid) -> torch.Tensor:
    """Return this rank's slice of a parameter."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    return whole.chunk(grid.get_axis_size("model"), parameter.partition_dim)[grid.get_axis_rank("model")]


@pytest.mark.parametrize(
    ("topology", "zero", "reducer"),
    mark_exhaustive(product(TOPOLOGIES, (0, 1), (False, True)), default=lambda number, _: number in (3, 8)),
)
def test_training_equals_one_process(
    world: Worlds, layers_alone: Reference, topology: str, zero: int, reducer: bool
) -> None:
    world(4).run(_train_and_compare, topology, zero, reducer, layers_alone(STEPS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", ["pipe=2,data=2,model=2", "model=2,pipe=2,data=2", "data=2,model=2,pipe=2"])
@pytest.mark.parametrize("reducer", [False, True])
def test_three_axes_equal_one_process(world: Worlds, layers_alone: Reference, topology: str, reducer: bool) -> None:
    world(8).run(_train_and_compare, topology, 1, reducer, layers_alone(STEPS))


# -- the schedule and the reducer ------------------------------------------------------------------------------------


def _launches_in_each_phase() -> None:
    with pipeline("pipe=2,data=2", gas=GAS, kind=DualPipeVModule, gradient_reducer=dict(SMALL)) as made:
        engine, grid = made
        reducer = engine.gradient_reducer
        train(engine, grid, range(2))  # the second step has the buckets in the order of arrival
        before, launched = reducer.reduction_count, []

        def note() -> None:
            launched.append(reducer.reduction_count - before)

        with mock.patch.object(reducer, "launch_deferred", note):
            train(engine, grid, [2])
        assert len(launched) == 2 * GAS, "one entry after each backward pass"
        assert launched[-2] > 0, "phase 1 ends before the last pass of phase 0"
        assert launched[-4 if grid.stage_id else -5] == 0
        assert reducer.reduction_count - before == len(reducer.buckets)


def test_gradients_leave_at_the_end_of_each_phase(world: Worlds) -> None:
    world(4).run(_launches_in_each_phase)


def _on_paper(stages: int, micro_batches: int, forward: float, backward: float) -> tuple[float, list[int]]:
    """Run the schedule without communication; return its time, and the most activations that each rank keeps."""
    rows = [DualPipeVSchedule(micro_batches, stages, stage).steps() for stage in range(stages)]
    programs = [deque(instruction for step in steps for instruction in step) for steps in rows]
    clock, kept, most = [0.0] * stages, [0] * stages, [0] * stages
    queued: list[list[tuple[bool, tuple[Any, ...]]]] = [[] for _ in range(stages)]
    sent: dict[tuple[Any, ...], float] = {}
    while any(programs):
        before = sum(map(len, programs))
        for stage, program in enumerate(programs):
            while program:
                name, options = type(program[0]).__name__, program[0].kwargs
                if name in ("SendActivation", "RecvActivation", "SendGrad", "RecvGrad"):
                    is_send, is_gradient = name.startswith("Send"), name.endswith("Grad")
                    step = 1 if (options["phase"] == 0) == (is_send != is_gradient) else -1
                    ends = (stage, stage + step) if is_send else (stage + step, stage)
                    queued[stage].append((is_send, (is_gradient, options["buffer_id"], *ends)))
                elif name == "CommitP2P":
                    sent.update((key, clock[stage]) for is_send, key in queued[stage] if is_send and key not in sent)
                    wanted = [key for is_send, key in queued[stage] if not is_send]
                    if not sent.keys() >= set(wanted):
                        break
                    clock[stage] = max([clock[stage], *(sent[key] for key in wanted)])
                    queued[stage].clear()
                elif name in ("ForwardPass", "BackwardPass"):
                    clock[stage] += forward if name == "ForwardPass" else backward
                    kept[stage] += 1 if name == "ForwardPass" else -1
                    most[stage] = max(most[stage], kept[stage])
                program.popleft()
        assert sum(map(len, programs)) < before, "no rank waits for ever"
    return max(clock), most


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_guide_states_the_bubble_and_the_activations_of_the_schedule(stages: int) -> None:
    for micro_batches, backward in product((2 * stages, 5 * stages), (1.0, 1.5)):
        seconds, parts = _on_paper(stages, micro_batches, 0.5, backward)  # of half a stage
        bubble = seconds - (1 + 2 * backward) * micro_batches
        if backward == 1.0:
            assert bubble == (5 * stages - 6) / 2
        planned: Any = SimpleNamespace(forward=1.0, backward=2 * backward)
        assert bubble == pytest.approx(mirrored_bubble(stages, planned) * (stages - 1) * (1 + 2 * backward))
        assert parts == [2 * stages + 1] * stages
        assert chunks_in_flight(0, stages, 1, micro_batches, mirrors=True) == parts[0] / 2


def test_planned_pipelines_with_dualpipev_wait_less_and_keep_more(capsys: pytest.CaptureFixture[str]) -> None:
    job = "plan --layers 16 --hidden 1024 --heads 16 --vocab 1024 --sequence 512 --hosts 1 --slots 4 --batch 32"
    job += " --accelerator A100-80GB --json"
    found = []
    for software in ("deepspeed-pipeline", "deepspeed-dualpipev"):
        assert main([*job.split(), "--micro-batch", "1", "--topology", "pipe=4", "--software", software]) == 0
        found.append(json.loads(capsys.readouterr().out))
    bubbles = [plan["plans"][0]["seconds_by_term"]["bubble"] for plan in found]
    kept = [plan["plans"][0]["memory_by_term"]["activations"] for plan in found]
    assert bubbles[1] < 0.9 * bubbles[0]
    assert kept[1] > kept[0]


# -- against stock DeepSpeed -----------------------------------------------------------------------------------------


def _layers() -> list[Any]:
    """Nine layers, of which the first and the last but one are the same."""
    ends = (TiedLayerSpec("ends", nn.Linear, 8, 8) for _ in range(2))
    return [next(ends), *(LayerSpec(nn.Linear, 8, 8) for _ in range(6)), next(ends), torch.tanh]


def _train_small(kind: type, zero: int, **layout: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Train four steps and evaluate; return the losses and this rank's parameters."""
    deepspeed.init_distributed(verbose=False)
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    torch.manual_seed(0)
    module = kind(_layers(), loss_fn=nn.functional.mse_loss, seed_layers=True, partition_method="uniform", **layout)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    config = engine_config(1, 8, zero_optimization={"stage": zero})
    engine, *_ = deepspeed.initialize(model=module, config=config, optimizer=optimizer)
    grid = module.mpu()

    def samples(step: int) -> Any:
        generator = torch.Generator().manual_seed(10 * step + grid.get_data_parallel_rank())
        return iter([(torch.randn(1, 8, generator=generator), torch.zeros(1, 8)) for _ in range(8)])

    losses = [float(engine.train_batch(samples(step))) for step in range(4)]
    losses.append(float(engine.eval_batch(samples(9))))
    parameters = [parameter.detach().clone() for parameter in module.parameters()]
    destroy_engine(engine)
    if kind is DualPipeVModule:
        grid.destroy()
    return losses, parameters


def _compare_with_stock(zero: int) -> None:
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    stock, theirs = _train_small(StockModule, zero, topology=PipeDataParallelTopology(2, 2))
    ours, mine = _train_small(DualPipeVModule, zero, topology="pipe=2,data=2")
    assert ours == stock
    assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
    with PipelineParallelGrid("data=2,pipe=2") as grid, use(grid):
        in_use, _ = _train_small(StockModule, zero, num_stages=2)  # the program keeps DeepSpeed's class
    assert in_use == stock


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_training_equals_stock_bit_for_bit(world: Worlds, zero: int) -> None:
    world(4).run(_compare_with_stock, zero)


# -- checkpoints and evaluation --------------------------------------------------------------------------------------


def _save_and_continue(topology: str, folder: str) -> tuple[list[float], float]:
    with pipeline(topology, zero=1, gas=GAS, kind=DualPipeVModule) as (engine, grid):
        if not list(Path(folder).iterdir()):
            dist.barrier()
            train(engine, grid, range(2))
            checkpoint.save(engine, folder)
        else:
            checkpoint.load(engine, folder)
        inputs, labels = own_samples(batch(7), grid)
        size = BATCH // grid.get_sample_world_size() // GAS
        loss = engine.eval_batch(iter(zip(inputs.split(size), labels.split(size), strict=True)))
        return train(engine, grid, [2]).losses, float(loss)


def test_checkpoints_load_in_another_order(world: Worlds, other_world: Worlds, tmp_path: Path) -> None:
    losses, evaluated = world(4).run(_save_and_continue, "pipe=2,data=2", str(tmp_path))[0]
    for again, loss in other_world(4).run(_save_and_continue, "data=2,pipe=2", str(tmp_path)):
        assert again == pytest.approx(losses, rel=1e-6)
        assert loss == pytest.approx(evaluated, rel=1e-6)


def _continue(topology: str, folder: str, tag: str, zero: int, gas: int) -> list[float]:
    with pipeline(topology, zero=zero, gas=gas, kind=DualPipeVModule) as (engine, grid):
        assert checkpoint.load(engine, folder, tag)
        return train(engine, grid, [2]).losses


@pytest.mark.exhaustive
def test_checkpoints_load_at_other_degrees(world: Worlds, other_world: Worlds, tmp_path: Path) -> None:
    losses, _ = world(4).run(_save_and_continue, "pipe=2,data=2", str(tmp_path))[0]
    for spec, zero, gas in (("data=1,pipe=2", 0, 4), ("pipe=3,data=1", 1, 8)):
        ranks = int(spec.partition("pipe=")[2][0])
        for found in other_world(ranks).run(_continue, spec, str(tmp_path), "global_step2", zero, gas):
            assert found == pytest.approx(losses, rel=1e-5)


# -- what is refused -------------------------------------------------------------------------------------------------


def _refuse() -> None:
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("pipe=2,model=2") as grid:
        with pytest.raises(TopologyError, match=r"3 layers for the 2 stages .* at least 2 \(DualPipeV\)"):
            DualPipeVModule(_layers()[:3], grid=grid)
        with pytest.raises(ValueError, match="dynamic_shape=True with DualPipeV"):
            DualPipeVModule(_layers(), grid=grid, dynamic_shape=True)
        module = DualPipeVModule(_layers(), grid=grid, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        whole = {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}
        for gas, settings, message in (
            (3, whole, "gradient_accumulation_steps 3 with DualPipeV .* to 4 or more"),
            (4, {}, r"\['pipe_partitioned', 'grad_partitioned'\] \(true by default\) with DualPipeV"),
        ):
            with pytest.raises(EngineOptionError, match=message):
                initialize(model=module, config=engine_config(1, gas, **settings), optimizer=optimizer)
        engine, *_ = initialize(model=module, config=engine_config(1, 4, **whole), optimizer=optimizer)
        with pytest.raises(ValueError, match="needs at least 2 \\* 2 micro-batches, got 3"):
            engine.eval_batch(iter([(torch.zeros(1, 8),) * 2] * 4), num_micro_batches=3)
        destroy_engine(engine)


def test_unsupported_options_are_refused_by_name(world: Worlds) -> None:
    world(4).run(_refuse)
