"""AutoEP distributes experts over the groups of a grid, with and without AutoTP, in any order of the axes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups
from packaging.version import Version
from torch.distributed import checkpoint as dcp

from ds_topo import PipelineParallelGrid, checkpoint, initialize
from ds_topo.engine.autoparallel import complete_sizes, tables_of_grid
from ds_topo.errors import CheckpointLayoutError, EngineOptionError
from tests.support.autotp_training import SAMPLES, batches_of, mixtral, start, train_alone, train_on, whole_parameters
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.ranks import run_ranks
from tests.support.training import Run, assert_trained_alike, destroy_engine, engine_config

pytest.importorskip("transformers")
STEPS = 3
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "torch_adam": True}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
WITH_SLICES = {"tensor_parallel": {"preset_model": "mixtral"}}


def engine_on(grid: PipelineParallelGrid | None, zero: int, size: int | None, slices: int = 1, **options: Any) -> Any:
    """Return an engine whose experts AutoEP distributes; by default over the axis ``expert``.

    Args:
        grid: the grid; None for stock DeepSpeed.
        zero: the stage.
        size: ``autoep_size``.
        slices: ``autotp_size`` of stock DeepSpeed.
        options: further options of the config.
    """
    from transformers.utils import output_capturing

    section: dict[str, Any] = {"enabled": True, "preset_model": "mixtral"} | (
        {} if size is None else {"autoep_size": size}
    )
    if Version(torch.__version__) < Version("2.9"):  # it has no grouped products on CPUs
        section["use_grouped_mm"] = False
    samples = dist.get_world_size() // slices if grid is None else grid.get_sample_world_size()
    config = engine_config(
        SAMPLES // samples,
        clip=0.1,
        optimizer=ADAM,
        zero_optimization={"stage": zero},
        expert_parallel=section,
        **(WITH_SLICES if grid is not None and grid.slice_parallel_size > 1 else {}),
        **options,
    )
    # transformers 5.24 has another registry of recorded outputs than DeepSpeed 0.19.8 expects, with or without a grid
    model = mixtral()
    with mock.patch.object(output_capturing, "_CAN_RECORD_REGISTRY", None):
        if grid is not None:
            return initialize(model=model, mpu=grid, config=config)[0]
        if slices > 1:
            config |= {"tensor_parallel": {"preset_model": "mixtral", "autotp_size": slices}}
        return deepspeed.initialize(model=model, config=config)[0]


def test_engines_without_autoep_leave_its_tables_alone() -> None:
    config: Any = SimpleNamespace(expert_parallel_config=SimpleNamespace(enabled=False))
    auto_ep_folding = pytest.importorskip("deepspeed.module_inject.auto_ep_folding")
    grid: Any = None
    stock = auto_ep_folding.expected_folding_group_tables
    with tables_of_grid(config, grid):
        assert auto_ep_folding.expected_folding_group_tables is stock


@pytest.mark.parametrize(("spec", "size"), [("data=4", 1), ("expert=2,data=2", 2)])
@pytest.mark.parametrize("given", [{}, {"autoep_size": 4}])
def test_size_that_the_config_leaves_out_is_the_degree_of_the_axis(spec: str, size: int, given: dict[str, int]) -> None:
    section = SimpleNamespace(enabled=True, autoep_size=4)
    config: Any = SimpleNamespace(
        _param_dict={"expert_parallel": given},
        expert_parallel_config=section,
        compile_config=SimpleNamespace(passes=[]),
    )
    with fake_world(0, 4), PipelineParallelGrid(spec) as grid:
        complete_sizes(config, grid)
    assert section.autoep_size == (4 if given else size)


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


@pytest.mark.parametrize("topology", mark_exhaustive(CASES, lambda _, topology: topology == "model=2,data=2"))
def test_mixtral_trains_as_in_one_process(topology: str) -> None:
    run_ranks(4, _train, topology, CASES[topology], deadline=200)


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", list(permutations(("data", "expert", "model"))), ids="-".join)
def test_mixtral_on_three_axes_trains_as_in_one_process(order: tuple[str, ...]) -> None:
    cases: list[tuple[int, int | None, dict[str, Any]]] = [(zero, None, {}) for zero in (0, 1, 2, 3)]
    run_ranks(8, _train, ",".join(f"{axis}=2" for axis in order), cases, deadline=300)


def _refuse_reducer() -> None:
    start()
    with (
        PipelineParallelGrid("model=2,data=2") as grid,
        pytest.raises(EngineOptionError, match=r"gradient_reducer.* with AutoEP and AutoTP"),
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


# -- checkpoints in other layouts -------------------------------------------------------------------------------------

Layout = tuple[str, int, int]
"""A topology, a stage of ZeRO and ``autoep_size``."""
ELSEWHERE: list[Layout] = [
    *(("data=4", zero, size) for zero, size in ((0, 2), (1, 4), (2, 1), (3, 2))),
    ("expert=2,data=2", 1, 2),
    ("model=2,data=2", 1, 2),
    ("data=2,model=2", 2, 4),
]


def _save_and_load(folder: str, saver: Layout, targets: list[Layout], options: dict[str, Any]) -> None:
    """Save after two steps in both formats; load elsewhere and take the third step."""
    start()
    batches = batches_of(mixtral(), STEPS)
    topology, stage, size = saver
    with PipelineParallelGrid(topology) as grid:
        engine = engine_on(grid, stage, size, **options)
        train_on(grid, engine, batches[:2], gather=False)
        checkpoint.save(engine, f"{folder}/deepspeed", "saved")
        dcp.save({"app": checkpoint.TorchState(engine)}, checkpoint_id=f"{folder}/torch")
        expected = train_on(grid, engine, batches[2:], gather=False)
        destroy_engine(engine)
    for topology, zero, size in targets:
        with PipelineParallelGrid(topology) as grid:
            for form in ("deepspeed", "torch"):
                case = (topology, zero, size)
                engine = engine_on(grid, zero, size, **options)
                if form == "deepspeed" and stage == 3 and case != saver:
                    with pytest.raises(CheckpointLayoutError, match="partitions of ZeRO 3, which only the topology"):
                        checkpoint.load(engine, f"{folder}/{form}")
                else:
                    if form == "torch":
                        checkpoint.load_torch(engine, f"{folder}/{form}")
                    else:
                        checkpoint.load(engine, f"{folder}/{form}")
                    run = train_on(grid, engine, batches[2:], gather=False)
                    close = 5e-3 if "bf16" in options else 1e-6
                    assert run.losses == pytest.approx(expected.losses, rel=close), (case, form)
                destroy_engine(engine)


@pytest.mark.exhaustive
@pytest.mark.parametrize("saver", [*(("data=4", zero, 2) for zero in range(4)), ("model=2,data=2", 1, 2)])
def test_checkpoints_load_with_other_numbers_of_ranks_per_expert(tmp_path: Path, saver: Layout) -> None:
    run_ranks(4, _save_and_load, str(tmp_path), saver, ELSEWHERE, {}, deadline=400)


@pytest.mark.thorough
def test_checkpoints_in_bf16_load_with_other_numbers_of_ranks_per_expert(tmp_path: Path) -> None:
    targets = [("data=4", 2, 4), ("data=2,model=2", 1, 2)]
    run_ranks(4, _save_and_load, str(tmp_path), ("data=4", 1, 2), targets, BF16, deadline=200)


def _refuse_other_order(folder: str) -> None:
    start()
    with PipelineParallelGrid("model=2,data=2") as grid:
        engine = engine_on(grid, 3, 2)
        checkpoint.save(engine, folder, "saved")
        destroy_engine(engine)
    with PipelineParallelGrid("data=2,model=2") as grid:
        engine = engine_on(grid, 3, 2)
        for options, said in (
            ({"convert": False}, "loads partitions on the ranks that saved them only"),
            ({}, "partitions of ZeRO 3, which only the topology"),
        ):
            with pytest.raises(CheckpointLayoutError, match=said):
                checkpoint.load(engine, folder, **options)
        destroy_engine(engine)


@pytest.mark.exhaustive
def test_zero_3_in_another_order_is_refused_with_the_ways_that_work(tmp_path: Path) -> None:
    run_ranks(4, _refuse_other_order, str(tmp_path))


# -- against stock ----------------------------------------------------------------------------------------------------


class _StockRanks:
    """The samples of stock DeepSpeed's ranks, of which ``slices`` neighbors read the same."""

    def __init__(self, slices: int) -> None:
        self.slices = slices

    def get_sample_world_size(self) -> int:
        return dist.get_world_size() // self.slices

    def get_sample_rank(self) -> int:
        return dist.get_rank() // self.slices

    def get_data_parallel_group(self) -> Any:
        return None if self.slices == 1 else deepspeed_groups.get_data_parallel_group()

    get_data_parallel_world_size = get_sample_world_size


def _train_cases(topology: str, slices: int, cases: list[tuple[int, int, dict[str, Any]]]) -> list[Run]:
    """Train every case on a grid, or without a topology with stock DeepSpeed; return the runs of this rank."""
    start()
    runs = []
    with PipelineParallelGrid(topology) if topology else nullcontext() as grid:
        ranks: Any = grid or _StockRanks(slices)
        for zero, size, options in cases:
            engine = engine_on(grid, zero, size, slices, **options)
            run = train_on(ranks, engine, batches_of(engine.module, STEPS), gather=False)
            run.parameters = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
            runs.append(run)
            destroy_engine(engine)
    return runs


@pytest.mark.exhaustive
@pytest.mark.parametrize(("topology", "slices"), [("data=4", 1), ("data=2,model=2", 2)])
def test_experts_of_neighbors_train_bit_for_bit_as_stock(topology: str, slices: int) -> None:
    """Without clipping: stock's norm averages or omits experts of other ranks."""
    unclipped = {"gradient_clipping": 0.0}
    cases = [(zero, 2, {**unclipped, **way}) for zero in range(4) for way in ({}, BF16) if zero or not way]
    stock, ours = (run_ranks(4, _train_cases, where, slices, cases, deadline=200) for where in ("", topology))
    for theirs, mine in zip(stock, ours, strict=True):
        for case, expected, found in zip(cases, theirs, mine, strict=True):
            assert found.losses == expected.losses, case
            differ = [
                name for name, value in expected.parameters.items() if not torch.equal(found.parameters[name], value)
            ]
            assert not differ, case


def _train_in_bf16(topology: str, cases: list[tuple[int, int]]) -> None:
    start()
    alone = train_alone(mixtral, STEPS)
    with PipelineParallelGrid(topology) as grid:
        for zero, size in cases:
            engine = engine_on(grid, zero, size, **BF16)
            run = train_on(grid, engine, batches_of(engine.module, STEPS), gather=False)
            assert_trained_alike(run, replace(alone, parameters={}), losses=5e-3, norms=0.05)
            destroy_engine(engine)


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", ["expert=2,data=2", "model=2,data=2"])
def test_mixtral_trains_in_bf16_as_in_one_process(topology: str) -> None:
    run_ranks(4, _train_in_bf16, topology, [(zero, 2) for zero in (1, 2, 3)], deadline=200)
