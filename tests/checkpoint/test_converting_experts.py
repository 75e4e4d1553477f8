"""Experts keep their values in other expert groups, stages, degrees and ZeRO stages, and jobs continue alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import configure_moe_param_groups, is_moe_param
from torch import nn

from ds_topo import PipelineParallelGrid, checkpoint, groups
from ds_topo.checkpoint.by_name import require_reachable
from ds_topo.checkpoint.deepspeed_reader import WEIGHT, DeepSpeedFiles
from ds_topo.checkpoint.engine_facts import experts_of, structure_of
from ds_topo.checkpoint.manifest import (
    Manifest,
    SavedExperts,
    SavedLayout,
    SavedOptions,
    SavedParameter,
    SavedStructure,
    why_unreachable,
)
from ds_topo.checkpoint.plain_weights import to_single_file
from ds_topo.checkpoint.saved_model import model_of
from ds_topo.checkpoint.table import FileRecorder, Piece, Slice
from ds_topo.errors import CheckpointLayoutError
from tests.checkpoint.continued_jobs import BEFORE, STEPS, TAG, continue_experts, hop_experts, save_experts, values_in
from tests.support.exhaustive import mark_exhaustive
from tests.support.moe_training import EXPERTS, Case, canonical_name
from tests.support.small_engines import settings
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

PLAIN = {"pipeline": False}
PAIRS = [
    (Case("data=4", (0, 2, 0), 1, **PLAIN), Case("data=4", (0, 4, 0), 1, **PLAIN)),
    (Case("data=4", (0, 4, 0), 0, **PLAIN), Case("data=2", (0, 1, 0), 2, **PLAIN)),
    (Case("data=2,model=2", (0, 2, 1), 1, **PLAIN), Case("data=1", (0, 1, 1), 0, **PLAIN)),
    (Case("data=2", (0, 2, 1), 2, **PLAIN), Case("model=2,data=2", (0, 4, 2), 0, **PLAIN)),
    (Case("data=1", (0, 1, 1), 0, **PLAIN), Case("data=4", (0, 2, 4), 1, **PLAIN, reduced=True)),
    (
        Case("data=2,model=2", (0, 2, 1), 1, tensor_parallel=True, **PLAIN),
        Case("model=2", (0, 1, 1), 2, tensor_parallel=True, **PLAIN),
    ),
    (
        Case("model=2,data=2", (0, 2, 0), 0, tensor_parallel=True, **PLAIN),
        Case("data=2,model=2", (0, 1, 0), 1, tensor_parallel=True, **PLAIN),
    ),
    (Case("data=4", (0, 2, 0), 1, data_first=True, **PLAIN), Case("data=4", (0, 2, 0), 1, **PLAIN)),
    (Case("expert=2,data=2", (0, 2, 0), 1, **PLAIN), Case("data=2,expert=2", (0, 4, 0), 2, **PLAIN)),
    (Case("data=2,shard=2", (0, 2, 0), 1, **PLAIN), Case("shard=2,data=2", (0, 4, 0), 2, **PLAIN, reduced=True)),
    (Case("shard=2,data=2", (0, 2, 0), 2, **PLAIN, reduced=True), Case("data=4", (0, 2, 0), 1, **PLAIN)),
    (Case("data=4", (0, 4, 0), 1, **PLAIN), Case("data=2,shard=2", (0, 2, 0), 1, **PLAIN)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "now"), mark_exhaustive(PAIRS, lambda number, _: number in (2, 5)), ids=str)
def test_job_with_other_expert_groups_continues_alike(world: Worlds, case: Case, now: Case, tmp_path: Path) -> None:
    world(case.world_size).run(save_experts, case, tmp_path)
    world(now.world_size).run(continue_experts, now, tmp_path, now.reference(STEPS))


IN_PIPELINES = [
    (Case("pipe=2,data=2", (0, 2, 2, 2), 1), Case("data=2", (0, 1, 1, 1), 0)),
    (Case("pipe=2,data=2", (0, 0, 2, 0), 0), Case("pipe=2,data=1", (0, 0, 1, 0), 0)),
    (Case("pipe=2,data=2", (0, 2, 0, 0), 0), Case("data=4", (0, 4, 0, 0), 1)),
    (Case("data=2,pipe=2", (2, 2, 0, 2), 0), Case("pipe=2,data=1", (1, 1, 0, 1), 1)),
    (Case("pipe=2,data=1,model=2", (0, 2, 2, 0), 1), Case("pipe=2,data=2", (0, 1, 1, 0), 1)),
    (
        Case("pipe=2,data=1,model=2", (0, 1, 1, 0), 1, tensor_parallel=True),
        Case("pipe=1,data=2", (0, 2, 2, 0), 0, tensor_parallel=True),
    ),
    (Case("data=1", (0, 1, 0, 1), 0), Case("pipe=2,data=2", (0, 2, 0, 2), 1)),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "now"), mark_exhaustive(IN_PIPELINES, lambda number, _: number == 0), ids=str)
def test_experts_in_a_pipeline_continue_alike(world: Worlds, case: Case, now: Case, tmp_path: Path) -> None:
    world(case.world_size).run(save_experts, case, tmp_path)
    world(now.world_size).run(continue_experts, now, tmp_path, now.reference(STEPS))
    found = checkpoint.look_at(tmp_path, TAG)
    there, back = tmp_path / "there", tmp_path / "back"
    world(now.world_size).run(hop_experts, now, tmp_path, there)
    world(case.world_size).run(hop_experts, case, there, back)
    before, after = values_in(found.path), values_in(back / TAG)
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] != after[key]] == []
    weights = torch.load(checkpoint.to_single_file(found, tmp_path / "weights.pt"), weights_only=True)
    whole = {canonical_name(name) for name in weights}
    reference = case.reference(BEFORE)
    assert whole == reference.parameters.keys()
    assert sum(".experts." in name for name in whole) == 2 * EXPERTS * sum(size > 0 for size in case.sizes)
    for name, value in weights.items():
        assert torch.allclose(value, reference.parameters[canonical_name(name)], atol=1e-5), name


def test_copies_of_a_partition_save_experts_alone(world: Worlds, tmp_path: Path) -> None:
    world(4).run(save_experts, Case("shard=2,data=2", (0, 2, 0), 1, **PLAIN, reduced=True), tmp_path)
    held = []
    for rank in range(4):
        file = torch.load(tmp_path / TAG / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", weights_only=False)
        held.append([master.numel() > 0 for master in file["optimizer_state_dict"]["single_partition_of_fp32_groups"]])
    assert held == [[True, True], [False, True], [True, True], [False, True]], "dense parameters, experts"


def _whole_experts_that_declare_a_split() -> None:
    """An expert of tensor-parallel layers over a group of one rank is whole, though its layers name a dimension."""
    with PipelineParallelGrid("data=1") as grid:
        groups.create_expert_groups(grid, 1)
        module = nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2))
        for parameter in filter(is_moe_param, module.parameters()):
            parameter.partition_dim = 0  # type: ignore[attr-defined]
        parameters = configure_moe_param_groups(list(module.parameters()))
        engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, mpu=grid, config=settings())
        assert structure_of(engine, experts_of(engine.module)).splits == {}
        engine.destroy()


def test_whole_experts_of_split_layers_are_saved_whole(world: Worlds) -> None:
    world(1).run(_whole_experts_that_declare_a_split)


def test_single_file_numbers_experts_over_the_layer(world: Worlds, tmp_path: Path) -> None:
    case = PAIRS[0][0]
    world(case.world_size).run(save_experts, case, tmp_path)
    weights = torch.load(to_single_file(checkpoint.look_at(tmp_path, TAG), tmp_path / "weights.pt"), weights_only=True)
    experts = [name for name in weights if name.endswith(".expand.weight")]
    assert experts == [f"1.moe.deepspeed_moe.experts.deepspeed_experts.{one}.expand.weight" for one in range(EXPERTS)]
    one = torch.load(tmp_path / TAG / "layer_0_expert_3_mp_rank_00_model_states.pt", weights_only=True)
    assert torch.equal(weights[experts[3]], one[experts[3]])


def _saved_by_auto_ep(zero: int) -> Manifest:
    """Return the manifest of a layer of four experts, of which AutoEP stacks two on each of two ranks."""
    name, optimizer = "0.experts.w1", "DeepSpeedZeroOptimizer_Stage3" if zero == 3 else "DeepSpeedZeroOptimizer"
    layout = SavedLayout("data=2", 2, 1, 2, zero, optimizer, "fp32", experts=(SavedExperts(2),))
    structure = SavedStructure("AdamW", (((name,),),), experts={name: 2}, options=SavedOptions())
    row = SavedParameter(name, (2, 3, 4), "float32", (0,), experts=4)
    return Manifest(TAG, 1, "2026-01-01T00:00:00+00:00", layout, (), (row,), structure=structure)


def test_stacked_experts_are_read_in_parts_of_any_number(tmp_path: Path) -> None:
    manifest = _saved_by_auto_ep(1)
    assert manifest.numel() == 4 * 3 * 4
    name, whole = "0.experts.w1", torch.arange(4.0 * 3 * 4).view(4, 3, 4)
    recorders = [
        FileRecorder(0, {name: Piece(name, Slice((2, 3, 4), 0, 2, part))}, [], stacked=[name]) for part in range(2)
    ]
    for number, expert in enumerate(whole):
        file, content = f"layer_0_expert_{number}_mp_rank_00_model_states.pt", {f"{name}.{number}": expert.clone()}
        torch.save(content, tmp_path / file)
        recorders[number // 2].describe(content, file)
    for part, recorder in enumerate(recorders):
        (tmp_path / f"{part}.json").write_text(recorder.table().to_text())
    tables = tuple(
        recorder.table().described(f"{part}.json", [name], (0, 1)) for part, recorder in enumerate(recorders)
    )
    source = DeepSpeedFiles(model_of(replace(manifest, tables=tables)), tmp_path)
    for parts in (1, 2, 4):
        numel = whole.numel() // parts
        for part in range(parts):
            expected = whole.view(-1)[part * numel : (part + 1) * numel]
            for start, stop in ((0, numel), (5, 9), (numel - 1, numel)):
                found = source.elements("0.experts.w1", WEIGHT, part, parts, start, stop)
                assert torch.equal(found, expected[start:stop])


def test_stacked_experts_in_partitions_name_the_ways_that_work() -> None:
    model = model_of(_saved_by_auto_ep(3))
    with pytest.raises(CheckpointLayoutError, match=r"partitions of ZeRO 3, .* in torch's format \(TorchState\)"):
        require_reachable(model, model.layout, model.structure, has_states=True)
    layouts = [replace(model.layout, topology=spec, world_size=4) for spec in ("data=2,model=2", "model=2,data=2")]
    assert "loads partitions on the ranks that saved them only" in why_unreachable(*layouts)
    assert why_unreachable(layouts[0], layouts[0]) == ""
    unstacked = replace(_saved_by_auto_ep(1), structure=replace(model.structure, experts={}))
    with pytest.raises(CheckpointLayoutError, match=r"has experts that are not of deepspeed\.moe.* or AutoEP"):
        model_of(unstacked)
