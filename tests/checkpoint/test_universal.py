"""DeepSpeed's own ``ds_to_universal`` converts our checkpoints, and engines of a grid load the result."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from packaging.version import Version
from torch import nn

from ds_topo import PipelineParallelGrid, checkpoint
from ds_topo.base.supported import number
from ds_topo.checkpoint.engine_facts import universal_info_of
from ds_topo.checkpoint.manifest import SavedSplit, SavedStructure
from tests.checkpoint.continued_jobs import engine_with_slices
from tests.checkpoint.gpt_jobs import (
    AFTER,
    BEFORE,
    TAG,
    TOLERANCE,
    Layout,
    greatest_difference,
    job,
    orders,
    save,
)
from tests.support import gpt_training
from tests.support.exhaustive import mark_exhaustive
from tests.support.world import Worlds

MERGES_SLICES = number(deepspeed.__version__) < Version("0.19.7")
"""True if DeepSpeed merges the files of slices as Megatron's when a model without a pipeline loads them, and fails."""

MIXED = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def _convert(folder: Path, tag: str = TAG) -> None:
    """Run DeepSpeed's command in this process."""
    options: dict[str, Any] = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    options |= {"strict": True, "inject_missing_state": False}
    to = folder / "universal"
    ds_to_universal.main(Namespace(input_folder=str(folder / tag), output_folder=str(to), **options))
    (folder / "latest_universal").write_text("universal")


def _go_on(layout: Layout, folder: Path) -> list[float]:
    settings = {**layout.settings, "checkpoint": {"load_universal": True}}
    with job(replace(layout, settings=settings)) as (engine, grid):
        assert engine.load_checkpoint(str(folder), tag="universal")[1] == {"of the program": 7}
        return gpt_training.train(engine, grid, range(BEFORE, BEFORE + AFTER)).losses


def _plain(topology: str, zero: int = 1) -> Layout:
    return Layout(topology, zero, is_pipeline=False)


CASES: list[tuple[Layout, list[Layout]]] = [
    *((Layout(order), [Layout("data=2,pipe=2"), Layout("model=2,pipe=2")]) for order in orders()),
    (Layout("pipe=2,data=2"), [Layout("data=4"), Layout("pipe=3,data=1")]),
    (Layout("pipe=2,data=2", settings=MIXED), [Layout("data=2,pipe=2", settings=MIXED)]),
    *(
        (_plain(topology, zero), [_plain("data=2", 3 - zero), _plain("model=4"), _plain("model=2,data=2", zero)])
        for topology in ("data=2,model=2", "model=2,data=2")
        for zero in (1, 2)
    ),
]
"""Layouts that save, and those that load: the vocabulary's embedding is split, and in pipelines tied."""


@pytest.mark.parametrize(
    ("saver", "loaders"),
    mark_exhaustive(CASES, lambda number, _: number in (1, 8)),
    ids=lambda value: str(value) if isinstance(value, Layout) else "",
)
def test_engines_continue_from_universal_checkpoints(
    world: Worlds, tmp_path: Path, saver: Layout, loaders: list[Layout]
) -> None:
    expected = world(saver.ranks).run(save, saver, tmp_path)[0]
    _convert(tmp_path)
    for loader in loaders:
        if MERGES_SLICES and "model" in saver.topology and not loader.is_pipeline:
            continue
        losses = world(loader.ranks).run(_go_on, loader, tmp_path)[0]
        assert greatest_difference(losses, expected) < (5e-3 if saver.settings else TOLERANCE), loader


class Parts(nn.Module):
    """Parameters that slices split in every way, of which one slice is here."""

    def __init__(self, slices: int, place: int) -> None:
        super().__init__()
        whole = torch.arange(24.0)
        self.rows = nn.Parameter(whole.view(8, 3).chunk(slices)[place].clone())
        self.columns = nn.Parameter(whole.view(3, 8).chunk(slices, 1)[place].clone())
        self.mixed = nn.Parameter(torch.cat(whole.view(12, 2).chunk(3 * slices)[place::slices]))
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.shared = nn.Parameter(whole[:3].clone())
        for parameter, dim, stride in ((self.rows, 0, 1), (self.columns, 1, 1), (self.mixed, 0, 3)):
            own: Any = parameter
            own.tensor_model_parallel, own.partition_dim, own.partition_stride = True, dim, stride

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 0.0 * sum(parameter.sum() for parameter in self.parameters())


def _save_parts(topology: str, folder: Path, attribute: str) -> None:
    def build(grid: PipelineParallelGrid) -> nn.Module:
        return Parts(grid.get_slice_parallel_world_size(), grid.get_slice_parallel_rank())

    with engine_with_slices(topology, build, 1) as engine:
        engine.backward(engine(torch.zeros(())))  # the command reads nothing of an optimizer without states
        engine.step()
        if attribute:
            delattr(engine.module.rows, attribute)
        checkpoint.save(engine, folder, TAG, {"mine": 1})
        assert not hasattr(engine.module, UNIVERSAL_CHECKPOINT_INFO)
        assert checkpoint.load(engine, folder)[1].keys() & {"mine", UNIVERSAL_CHECKPOINT_INFO} == {"mine"}


@pytest.mark.parametrize("topology", ["data=2,model=2", "model=4"])
def test_slices_of_every_kind_are_put_together(world: Worlds, tmp_path: Path, topology: str) -> None:
    world(4).run(_save_parts, topology, tmp_path, "")
    _convert(tmp_path)
    for name, parameter in Parts(1, 0).named_parameters():
        found = torch.load(tmp_path / "universal/zero" / name / "fp32.pt", weights_only=False)["param"]
        decayed = parameter.detach() * (1 - 0.01 * 0.01)
        assert torch.allclose(found.view(parameter.shape), decayed, rtol=1e-6, atol=0), name


def test_each_parameter_is_in_one_list_of_the_universal_format() -> None:
    splits = {
        "columns": SavedSplit(0),
        "rows": SavedSplit(1),
        "mixed": SavedSplit(0, stride=3),
        "words": SavedSplit(0, real=30, padded=32),
        "bias": SavedSplit(0, real=30, padded=32),
        "labels": SavedSplit(0, real=10, padded=16),
    }
    shapes = dict.fromkeys(("columns", "rows", "mixed", "norm"), ((6, 4), False))
    shapes |= {"words": ((16, 4), False), "bias": ((16,), False), "labels": ((8, 4), False)}
    last = {"words": ((16, 4), True), "norm": ((6, 4), True), "late": ((6, 4), True)}
    structure = SavedStructure(None, ((tuple(shapes),),), splits)
    found = universal_info_of([{"dense": shapes}, {"dense": last}], structure, 2)
    assert found["parameter_with_row_parallelism_patterns"] == ["^rows$"]
    assert found["vocabulary_parameter_patterns"] == ["^words$"], "one size of a vocabulary, and no biases"
    assert found["original_vocab_size"] == 30
    assert found["tp_replicated_parameter_patterns"] == ["^norm$", "^late$"]
    assert found["pipeline_replicated_parameter_patterns"] == ["^words$", "^norm$", "^late$"]
    assert found["parameter_with_sub_params"] == [
        {"patterns": ["^mixed$"], "shape": [(4, 4, 4), 4], "partition_dim": 0}
    ]
    assert found["sub_param_shard_widths"] == {"^mixed$": [[2, 2]] * 3}
    assert list(found["autotp_unsupported_parameter_patterns"]) == ["^late$"], "the first stage does not have it"


def test_slices_that_declare_no_dimension_are_refused(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_save_parts, "model=2", tmp_path, "partition_dim")
    with pytest.raises(ValueError, match=r"rows.*is marked as a slice, and does not declare partition_dim"):
        _convert(tmp_path)
