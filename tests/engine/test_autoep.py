"""AutoEP distributes experts over the groups of a grid, with and without AutoTP, in any order of the axes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_topo import PipelineParallelGrid, initialize
from ds_topo.errors import EngineOptionError
from tests.support.autotp_training import SAMPLES, batches_of, mixtral, start, train_alone, train_on, whole_parameters
from tests.support.ranks import run_ranks
from tests.support.training import Run, assert_trained_alike, destroy_engine, engine_config

pytest.importorskip("transformers")
STEPS = 3
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "torch_adam": True}}
WITH_SLICES = {"tensor_parallel": {"preset_model": "mixtral"}}


def engine_on(grid: PipelineParallelGrid, zero: int, size: int | None, **options: Any) -> Any:
    """Return an engine whose experts AutoEP distributes; by default over the axis ``expert``."""
    from transformers.utils import output_capturing

    section: dict[str, Any] = {"enabled": True, "preset_model": "mixtral"} | (
        {} if size is None else {"autoep_size": size}
    )
    config = engine_config(
        SAMPLES // grid.get_sample_world_size(),
        clip=0.1,
        optimizer=ADAM,
        zero_optimization={"stage": zero},
        expert_parallel=section,
        **(WITH_SLICES if grid.slice_parallel_size > 1 else {}),
        **options,
    )
    # transformers 5.24 has another registry of recorded outputs than DeepSpeed 0.19.8 expects, with or without a grid
    model = mixtral()
    with mock.patch.object(output_capturing, "_CAN_RECORD_REGISTRY", None):
        return initialize(model=model, mpu=grid, config=config)[0]


def _require_equal(run: Run, engine: Any, alone: Run) -> None:
    """Compare a run with one process, whose experts are in two fused weights."""
    found = whole_parameters(engine)
    for prefix, layer in engine.module.named_modules():
        if type(layer).__name__ == "AutoEPMoELayer":
            for name in ("w1", "w2", "w3"):
                part = found.pop(f"{prefix}.experts.{name}")
                parts = [torch.empty_like(part) for _ in range(layer.ep_size)]
                dist.all_gather(parts, part.contiguous(), group=layer.ep_group)
                found[f"{prefix}.experts.{name}"] = torch.cat(parts)
            gate, up = (found.pop(f"{prefix}.experts.{name}") for name in ("w1", "w3"))
            found[f"{prefix}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
            found[f"{prefix}.experts.down_proj"] = found.pop(f"{prefix}.experts.w2")
            found[f"{prefix}.gate.weight"] = found.pop(f"{prefix}.router.gate.weight")
    run.parameters = found
    assert found.keys() == alone.parameters.keys()
    assert_trained_alike(run, alone, losses=1e-6, norms=1e-6, elements=(1e-6, 1e-6))


def _train(topology: str, cases: list[tuple[int, int | None, dict[str, Any]]]) -> None:
    start()
    alone = train_alone(mixtral, STEPS)
    with PipelineParallelGrid(topology) as grid:
        for zero, size, options in cases:
            engine = engine_on(grid, zero, size, **options)
            assert engine.mpu is grid
            run = train_on(grid, engine, batches_of(engine.module, STEPS), gather=False)
            _require_equal(run, engine, alone)
            destroy_engine(engine)


REDUCED = {"gradient_reducer": True}
CASES: dict[str, list[tuple[int, int | None, dict[str, Any]]]] = {
    "data=4": [(zero, 2, {}) for zero in range(4)] + [(zero, 2, REDUCED) for zero in range(3)] + [(1, 4, {})],
    "expert=2,data=2": [(zero, None, {}) for zero in range(4)],
    "data=2,expert=2": [(1, None, {})],
    "data=2,model=2": [(zero, 2, {}) for zero in range(4)],
    "model=2,data=2": [*((zero, 2, {}) for zero in range(4)), (1, 4, {})],
    "expert=2,model=2": [(1, None, {})],
    "model=2,expert=2": [(1, None, {})],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", CASES)
def test_mixtral_trains_as_in_one_process(topology: str) -> None:
    run_ranks(4, _train, topology, CASES[topology], deadline=200)


def _refuse_reducer() -> None:
    start()
    with (
        PipelineParallelGrid("model=2,data=2") as grid,
        pytest.raises(EngineOptionError, match="GradientReducer with AutoEP and AutoTP"),
    ):
        engine_on(grid, 1, 2, gradient_reducer=True)


@pytest.mark.exhaustive
def test_the_reducer_is_refused_beside_slices_of_autotp() -> None:
    run_ranks(4, _refuse_reducer)


def _resume(folder: str, topologies: list[str], zero: int) -> None:
    start()
    alone, batches = train_alone(mixtral, STEPS), batches_of(mixtral(), STEPS)
    with PipelineParallelGrid(topologies[0]) as grid:
        engine = engine_on(grid, zero, 2)
        train_on(grid, engine, batches[:2], gather=False)
        engine.save_checkpoint(folder, "saved")
        destroy_engine(engine)
    for topology in topologies:
        with PipelineParallelGrid(topology) as grid:
            engine = engine_on(grid, zero, 2)
            engine.load_checkpoint(folder, "saved")
            run = train_on(grid, engine, batches[2:], gather=False)
            assert run.losses == pytest.approx(alone.losses[2:], rel=1e-6), topology
            destroy_engine(engine)
    if len(topologies) > 1:
        return
    if dist.get_rank() == 0:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
        command += ["--num_merge_workers", "1", "--input_folder", f"{folder}/saved", "--output_folder"]
        subprocess.run([*command, f"{folder}/universal"], check=True, capture_output=True)
        Path(folder, "latest_universal").write_text("universal")
    dist.barrier()
    for size in (2, 4):
        with PipelineParallelGrid(topologies[0]) as grid:
            engine = engine_on(grid, zero, size, checkpoint={"load_universal": True})
            engine.load_checkpoint(folder, tag="universal")
            run = train_on(grid, engine, batches[2:], gather=False)
            assert run.losses == pytest.approx(alone.losses[2:], rel=1e-6), size
            destroy_engine(engine)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_checkpoints_load_in_another_order(tmp_path: Path, zero: int) -> None:
    run_ranks(4, _resume, str(tmp_path), ["model=2,data=2", "data=2,model=2"], zero, deadline=200)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [1, 3])
def test_universal_checkpoints_load_with_another_number_of_ranks(tmp_path: Path, zero: int) -> None:
    run_ranks(4, _resume, str(tmp_path), ["data=4"], zero, deadline=200)
