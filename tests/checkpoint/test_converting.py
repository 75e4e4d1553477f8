"""Conversions keep every value, jobs continue alike after them, and impossible ones are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from parallel_layers import Parallel
from torch import nn

from ds_topo import PipelineParallelGrid, checkpoint, cli, initialize
from ds_topo.checkpoint import conversion, disk, file_filling
from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.conversion import convert, to_single_file
from ds_topo.checkpoint.deepspeed_reader import Source
from ds_topo.checkpoint.engine_filling import EngineFilling
from ds_topo.checkpoint.manifest import Place, SavedSplit
from ds_topo.checkpoint.saved_model import WholeModel
from ds_topo.checkpoint.shards import Slice, elements_of_slice
from ds_topo.errors import CheckpointError, CheckpointLayoutError, CheckpointModelError, TopologyError
from tests.checkpoint.conversions.layouts import AFTER, BEFORE, TAG, TOLERANCE, Layout, go_on, greatest_difference, save
from tests.checkpoint.handmade import slice_of
from tests.support import gpt_training
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks
from tests.support.small_engines import start
from tests.support.training import destroy_engine, engine_config
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

PIPELINE = Layout("pipe=2,data=2")
PLAIN = Layout("data=2,model=2", is_pipeline=False)

MIXED = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
"""DeepSpeed's ``BF16_Optimizer``."""
HALF_PIPELINE = Layout("pipe=2,data=2", settings=MIXED)
HALF = Layout("data=2", 3, is_pipeline=False, settings={"bf16": {"enabled": True}})

Saved = Callable[[Layout], tuple[checkpoint.Checkpoint, list[float]]]


@pytest.fixture(scope="module")
def saved(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the checkpoint of a job in a layout, and the losses with which that job continues."""
    made: dict[Layout, tuple[Path, list[float]]] = {}

    def of(layout: Layout) -> tuple[checkpoint.Checkpoint, list[float]]:
        if layout not in made:
            folder = tmp_path_factory.mktemp("saved")
            made[layout] = folder, world(layout.ranks).run(save, layout, folder)[0]
        folder, losses = made[layout]
        return checkpoint.look_at(folder, TAG), losses

    return of


def _same(one: Any, other: Any, where: str) -> None:
    """Assert that every value of ``one`` is in ``other``, bit by bit."""
    if torch.is_tensor(one):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        for key in one:
            assert key in other, f"{where}.{key}"
            _same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            _same(left, right, f"{where}.{number}")
    elif type(one).__name__ != "LossScaler":
        assert one == other, where


def _same_checkpoint(one: Path, other: Path, without: tuple[str, ...] = ()) -> None:
    names = [path.name for path in one.glob("*_states.pt") if not path.name.startswith("random")]
    assert names
    for name in names:
        contents = [torch.load(path / name, weights_only=False) for path in (one, other)]
        for key in without:
            contents[0].get("optimizer_state_dict", {}).pop(key, None)
        _same(*contents, name)


@pytest.mark.parametrize(
    ("layout", "spec", "zero"),
    [
        (PIPELINE, "data=4", 1),
        (PIPELINE, "model=2,data=3,pipe=3", 1),
        (PLAIN, "model=4,data=3", 3),
        (HALF, "data=3,model=2", 1),
        (HALF_PIPELINE, "pipe=3,model=2,data=5", 1),
        *mark_exhaustive(
            [
                (PIPELINE, "pipe=1", 0),
                (PIPELINE, "data=2,pipe=6,model=4", 0),
                (PLAIN, "data=5", 1),
                (PLAIN, "data=7", 2),
                (PLAIN, "data=1", 0),
            ],
            default=lambda *_: False,
        ),
    ],
)
def test_conversion_there_and_back_keeps_every_bit(
    saved: Saved, layout: Layout, spec: str, zero: int, tmp_path: Path
) -> None:
    found, _ = saved(layout)
    convert(found, tmp_path / "there", spec, zero=zero)
    between = checkpoint.look_at(tmp_path / "there", TAG, digests=True)
    assert between.is_whole
    assert between.manifest is not None
    assert between.manifest.layout.topology == spec.replace(" ", "")
    convert(between, tmp_path / "back", layout.topology, zero=layout.zero)
    _same_checkpoint(found.path, tmp_path / "back" / TAG, () if zero in (1, 2) else ("clip_grad",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "there"]
    assert not [path for path in (tmp_path / "back").iterdir() if path.name.startswith(".")]


def test_zero_0_with_bf16_optimizer_converts_to_zero_1(saved: Saved, tmp_path: Path) -> None:
    sums = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    found, _ = saved(Layout("pipe=2,data=2", 0, settings=sums))
    convert(found, tmp_path, "pipe=2,data=2", zero=1)
    names = [path.name for path in found.path.glob("*optim_states.pt")]
    assert len(names) == 4
    for name in names:
        before, after = (torch.load(path / name, weights_only=False) for path in (found.path, tmp_path / TAG))
        before, after = before["optimizer_state_dict"], after["optimizer_state_dict"]
        _same(before["base_optimizer_state"], after["base_optimizer_state"], name)
        groups = zip(*(one["single_partition_of_fp32_groups"] for one in (before, after)), strict=True)
        assert all(
            torch.equal(whole[: part.numel()], part) and not whole[part.numel() :].any() for whole, part in groups
        )
    with pytest.raises(CheckpointLayoutError, match="ZeRO 0 in bf16"):
        convert(found, tmp_path / "no", "data=4")


@pytest.mark.parametrize("split", [SavedSplit(0), SavedSplit(1), SavedSplit(0, stride=3), SavedSplit(1, stride=2)])
@pytest.mark.parametrize(("before", "slices"), [(1, 4), (4, 1), (2, 4), (4, 2), (2, 3), (3, 2), (4, 4)])
def test_elements_of_slice_reads_no_more_than_needed(split: SavedSplit, before: int, slices: int) -> None:
    full = torch.arange(72 * 48).view(72, 48)
    there = [slice_of(full, split, place, before) for place in range(before)]
    read: list[int] = []

    def elements(number: int, start: int, stop: int) -> torch.Tensor:
        read.append(stop - start)
        return there[number].flatten()[start:stop]

    for place in range(slices):
        shape = slice_of(full, split, place, slices).shape
        expected = slice_of(full, split, place, slices).flatten()
        for first, last in ((0, len(expected)), (0, 1), (7, 500), (len(expected) // 2, len(expected))):
            read.clear()
            wanted = Slice(shape, split.dim, slices, place, split.stride)
            found = elements_of_slice(elements, wanted, before, first, last)
            assert torch.equal(found, expected[first:last])
            wanted = last - first if split.dim == 0 else 4 * (last - first + 2 * 48)  # read with other ranks' rows
            assert sum(read) <= wanted


def test_single_file_has_all_weights_of_a_pipeline(saved: Saved, tmp_path: Path) -> None:
    found, _ = saved(PIPELINE)
    plain = convert(found, tmp_path / "one", "pipe=1", zero=0)
    weights = torch.load(to_single_file(found, tmp_path / "weights.pt"), weights_only=True)
    states = torch.load(plain / "layer_02-model_states.pt", weights_only=False)
    assert torch.equal(weights["2.qkv.weight"], states["qkv.weight"])
    assert [name for name in weights if name.startswith("tied")] == ["tied_modules.embedding.weight"]
    assert weights["tied_modules.embedding.weight"].shape == (256, 32), "one entry, with all slices"


@pytest.mark.parametrize(("spec", "zero"), [("data=3", 1), ("data=3", 2), ("data=3", 3), ("data=1", 2)])
def test_zero_to_fp32_reads_converted_checkpoint(saved: Saved, spec: str, zero: int, tmp_path: Path) -> None:
    found, _ = saved(PLAIN)
    convert(found, tmp_path / "to", spec, zero=zero)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "to"), TAG)
    expected = torch.load(to_single_file(found, tmp_path / "weights.pt"), weights_only=True)
    _same(expected, weights, "weights")
    assert (tmp_path / "to" / "zero_to_fp32.py").exists()


def _with_deepspeed_alone(folder: Path, zero: int) -> list[float]:
    """Load without a grid, by DeepSpeed's own call, and continue training."""
    deepspeed.init_distributed(verbose=False)
    config = gpt_training.engine_config(2, gpt_training.MICRO_BATCHES, gpt_training.CLIP)
    module = gpt_training.PlainGPT(Parallel(dist.new_group([dist.get_rank()], use_local_synchronization=True)))
    engine, *_ = deepspeed.initialize(
        model=module,
        config={**config, "zero_optimization": {"stage": zero}},
        optimizer=gpt_training.optimizer_of(module.parameters()),
    )
    path, state = engine.load_checkpoint(str(folder))
    assert (path is not None, state["of the program"]) == (True, 7)
    losses = []
    for step in range(BEFORE, BEFORE + AFTER):
        inputs, labels = (part.chunk(2)[dist.get_rank()] for part in gpt_training.batch(step))
        mean = torch.zeros(())
        for some in zip(inputs.split(2), labels.split(2), strict=True):
            loss = engine(*some)
            engine.backward(loss)
            engine.step()
            mean += loss.detach() / gpt_training.MICRO_BATCHES
        dist.all_reduce(mean)
        losses.append(float(mean) / 2)
    destroy_engine(engine)
    return losses


def test_deepspeed_alone_continues_from_converted_checkpoint(world: Worlds, saved: Saved, tmp_path: Path) -> None:
    found, expected = saved(PLAIN)
    convert(found, tmp_path, "data=2", zero=2)
    losses = world(2).run(_with_deepspeed_alone, tmp_path, 2)[0]
    assert greatest_difference(losses, expected) < TOLERANCE


def test_missing_safetensors_package_is_named(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="needs the package safetensors"):
        to_single_file(saved(PIPELINE)[0], tmp_path / "weights", "safetensors")


def test_safetensors_file_equals_torch_file(saved: Saved, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    found, _ = saved(PLAIN)
    weights = safetensors.load_file(to_single_file(found, tmp_path / "weights.safetensors", "safetensors"))
    _same(torch.load(to_single_file(found, tmp_path / "weights.pt"), weights_only=True), weights, "weights")


class Various(nn.Module):
    """A model with a tied parameter, a frozen one, a buffer, and parameters of two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 7)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Linear(7, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.arange(8.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.inner(self.frozen(self.embedding(tokens))) + self.scale)
        return F.cross_entropy(self.head(hidden), tokens)


def _various(zero: int, folder: Path, options: dict[str, Any] | None) -> list[float]:
    """Train two steps and save, or load; return the losses of the two steps after that."""
    start()
    with PipelineParallelGrid(f"data={dist.get_world_size()}") as grid:
        module = Various()
        some = [one for one in module.parameters() if one.requires_grad]
        groups = [
            {"params": [one for one in some if one.dim() > 1], "weight_decay": 0.1},
            {"params": [one for one in some if one.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
        ]
        engine, *_ = initialize(
            model=module,
            config=engine_config(8 // grid.get_data_parallel_world_size(), zero_optimization={"stage": zero}),
            optimizer=torch.optim.AdamW(groups, lr=0.01),
            mpu=grid,
        )
        losses = []
        for step in range(4):
            if step == 2 and options is None:
                checkpoint.save(engine, folder, TAG)
            elif step == 2:
                checkpoint.load(engine, folder, **(options or {}))
            own = grid.get_data_parallel_rank() * (8 // grid.get_data_parallel_world_size())
            tokens = torch.arange(8)[own : own + 8 // grid.get_data_parallel_world_size()] + step
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / dist.get_world_size())
        destroy_engine(engine)
        return losses[2:]


def test_groups_frozen_and_tied_parameters_and_buffers_are_converted(world: Worlds, tmp_path: Path) -> None:
    expected = world(2).run(_various, 1, tmp_path / "saved", None)[0]
    found = checkpoint.look_at(tmp_path / "saved", TAG)
    for number, (spec, zero) in enumerate(
        (("data=3", 3), ("data=4", 2), ("data=2", 3), ("data=2,shard=3", 3), ("shard=2,data=2", 2))
    ):
        there, back = tmp_path / f"there{number}", tmp_path / f"back{number}"
        convert(found, there, spec, zero=zero)
        convert(checkpoint.look_at(there, TAG), back, "data=2", zero=1)
        _same_checkpoint(found.path, back / TAG, () if zero < 3 else ("clip_grad",))
    assert world(2).run(_various, 2, found.path.parent, {"convert": True})[0] == pytest.approx(expected, rel=TOLERANCE)
    assert world(1).run(_various, 2, found.path.parent, {"convert": True})[0] == pytest.approx(expected, rel=TOLERANCE)
    weights = torch.load(to_single_file(found, tmp_path / "weights.pt"), weights_only=True)
    assert weights.keys() == Various().state_dict().keys()
    assert torch.equal(weights["head.weight"], weights["embedding.weight"])
    convert(found, tmp_path / "without", "data=2", zero=0)
    convert(checkpoint.look_at(tmp_path / "without", TAG), tmp_path / "with", "data=2", zero=1)
    _same_checkpoint(found.path, tmp_path / "with" / TAG, ("clip_grad",))
    assert world(2).run(_various, 0, found.path.parent, {"convert": True})[0] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("order", ["data=2,shard=2", "shard=2,data=2"])
def test_job_with_another_degree_of_shard_continues_with_the_same_losses(
    world: Worlds, saved: Saved, order: str, zero: int
) -> None:
    for before, after in ((order, "data=2"), ("data=4", order), (order, "shard=4"), (order, "data=2,shard=1")):
        found, expected = saved(Layout(before, zero, is_pipeline=False))
        now = Layout(after, zero, is_pipeline=False)
        losses = world(now.ranks).run(go_on, now, found.path.parent, {"convert": True, "verify": "digests"})[0]
        assert greatest_difference(losses, expected) < TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ["shard=2,data=2,pipe=2", "data=2,shard=2,pipe=2"])
def test_pipeline_with_a_shard_axis_continues_with_the_same_losses(world: Worlds, tmp_path: Path, order: str) -> None:
    half = {"bf16": {"enabled": True}}
    for number, settings in enumerate(({}, half, {**half, "data_types": {"grad_accum_dtype": "fp32"}})):
        layout = Layout(order, 1, settings=settings)
        expected = world(8).run(save, layout, tmp_path / str(number))[0]
        losses = world(8).run(go_on, layout, tmp_path / str(number), {})[0]
        assert greatest_difference(losses, expected) < (1e-3 if settings else TOLERANCE)


def test_each_partition_is_saved_once(saved: Saved) -> None:
    def bytes_of(spec: str) -> dict[str, int]:
        found, _ = saved(Layout(spec, 3, is_pipeline=False))
        return {file.path: file.bytes for file in found.manifest.files if "random" not in file.path}

    assert bytes_of("data=2,shard=2").keys() == bytes_of("data=2").keys()
    assert sum(bytes_of("data=2,shard=2").values()) < 1.01 * sum(bytes_of("data=2").values())


@pytest.mark.parametrize(
    ("layout", "now"),
    [(PIPELINE, Layout("data=1,model=2", 0)), (PLAIN, Layout("data=2", 3, is_pipeline=False))],
    ids=["pipeline", "plain"],
)
def test_job_of_other_degrees_continues_with_the_same_losses(
    world: Worlds, saved: Saved, layout: Layout, now: Layout
) -> None:
    found, expected = saved(layout)
    with pytest.raises(AssertionError, match="CheckpointLayoutError"):
        world(2).run(go_on, now, found.path.parent, {})
    losses = world(2).run(go_on, now, found.path.parent, {"convert": True, "verify": "digests"})[0]
    assert greatest_difference(losses, expected) < TOLERANCE
    assert [path.name for path in found.path.parent.iterdir() if path.name.startswith(".")] == []


def _other_model(folder: Path) -> str:
    from tests.checkpoint.jobs import Kind, job

    with job(Kind("data=2", zero=1)) as here, pytest.raises(CheckpointModelError) as raised:
        checkpoint.load(here.engine, folder, convert=True)
    return str(raised.value)


def test_load_names_first_parameter_of_another_model(world: Worlds, saved: Saved) -> None:
    found, _ = saved(PLAIN)
    assert "it has no parameter '0.linear.weight' [8, 8]" in world(2).run(_other_model, found.path.parent)[0]


@pytest.mark.parametrize(
    ("layout", "spec", "options", "said"),
    [
        (PIPELINE, "data=4", {"zero": 2}, "ZeRO 2 with a PipelineModule"),
        (PIPELINE, "pipe=7", {}, "pipe=7: the pipeline has 6 layers"),
        (PIPELINE, "pipe=2", {"bounds": (0, 6)}, "give 3 rising numbers of layers, from 0 to 6"),
        (PIPELINE, "pipe=3", {"method": "size"}, "'size' cannot divide layers into stages"),
        (PLAIN, "pipe=2,data=2", {}, "whose model has no layers to divide into stages"),
        (PLAIN, "model=3", {}, "which must be a multiple of 3"),
        (PLAIN, "data=4", {"zero": 4}, "ZeRO 4 is not a stage"),
        (PLAIN, "data=4", {"bounds": (0, 3)}, "leave the partition method and the bounds of stages out"),
        (PLAIN, "data=4", {"method": "uniform"}, "leave the partition method and the bounds of stages out"),
        (PLAIN, "data=1000000000", {}, "has 1,000,000,000 ranks: a checkpoint can have up to 4,194,304"),
        (PLAIN, "data=two", {}, "data"),
    ],
)
def test_unreachable_layout_is_refused_before_writing(
    saved: Saved, layout: Layout, spec: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises((TopologyError, CheckpointLayoutError), match=said):
        convert(saved(layout)[0], tmp_path / "to", spec, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("zero", [1, 3])
def test_vectors_are_laid_out_once_for_all_replicas(
    saved: Saved, zero: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = saved(PLAIN)
    calls: list[Place] = []
    vectors = WholeModel.vectors

    def counted(self: WholeModel, place: Place, *options: Any) -> Any:
        calls.append(place)
        return vectors(self, place, *options)

    monkeypatch.setattr(WholeModel, "vectors", counted)
    path = convert(found, tmp_path, "data=48", zero=zero)
    assert len(list(path.glob("*optim_states.pt"))) == 48
    assert len(calls) <= 3, "two slices of the saved layout, and the new layout"


def test_undeclared_splits_are_refused_and_named(saved: Saved, tmp_path: Path) -> None:
    found, _ = saved(PLAIN)
    assert found.manifest is not None
    assert found.manifest.structure is not None
    splits = {name: split for name, split in found.manifest.structure.splits.items() if name != "embedding.weight"}
    structure = replace(found.manifest.structure, splits=splits, undeclared=("embedding.weight",))
    undeclared = replace(found, manifest=replace(found.manifest, structure=structure))
    with pytest.raises(CheckpointLayoutError, match=r"\['embedding.weight'\] are marked as slices"):
        convert(undeclared, tmp_path, "data=4")
    convert(undeclared, tmp_path, "data=3,model=2")  # the same number of slices
    converted = checkpoint.look_at(tmp_path, TAG)
    assert converted.is_whole
    assert converted.manifest is not None
    assert converted.manifest.numel() == found.manifest.numel()


def test_checkpoint_without_structure_is_refused(saved: Saved, tmp_path: Path) -> None:
    found, _ = saved(PLAIN)
    assert found.manifest is not None
    with pytest.raises(CheckpointLayoutError, match="does not describe the model"):
        convert(replace(found, manifest=replace(found.manifest, structure=None)), tmp_path, "data=4")
    with pytest.raises(CheckpointLayoutError, match=r"the program's optimizer is not known.*convert while loading"):
        convert(replace(found, manifest=None), tmp_path, "data=4")


def test_full_disk_is_found_before_writing(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    with pytest.raises(CheckpointError, match=r"takes about [\d,]+ bytes, and the disk .* has 1,000"):
        convert(saved(PLAIN)[0], tmp_path / "to", "data=4")
    assert list(tmp_path.iterdir()) == []


def test_failure_to_write_names_the_folder_and_the_free_space(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"saved could not be written: RuntimeError: .*; [\d,]+ bytes are free"):
        convert(saved(PLAIN)[0], tmp_path, "data=4")


def test_second_conversion_into_the_same_folder_is_refused(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "is_held", lambda folder: folder.name == f".{TAG}.converting")
    with pytest.raises(CheckpointError, match="another process is converting into"):
        convert(saved(PLAIN)[0], tmp_path / "to", "data=4")
    assert list(tmp_path.iterdir()) == []


def test_conversion_never_replaces_its_source(saved: Saved) -> None:
    found, _ = saved(PLAIN)
    with pytest.raises(CheckpointError, match="would be replaced by its own conversion"):
        convert(found, found.path.parent, "data=4")


def test_killed_conversion_is_resumed(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = saved(PIPELINE)
    monkeypatch.setattr(file_filling, "_NOTED", 1)
    read: list[tuple[object, ...]] = []
    elements = Source.elements

    def counted(self: Source, *piece: Any) -> torch.Tensor:
        if len(read) == most:
            raise KeyboardInterrupt
        read.append(piece)
        return elements(self, *piece)

    monkeypatch.setattr(Source, "elements", counted)
    most = 50
    with pytest.raises(KeyboardInterrupt):
        convert(found, tmp_path, "data=4")
    assert [path.name for path in tmp_path.iterdir()] == [f".{TAG}.converting"], "the new checkpoint has no name yet"
    assert len(read) == 50
    most = 10_000
    convert(found, tmp_path, "data=4")
    assert 100 < len(read) == len(set(read)), "no span is read twice"
    monkeypatch.undo()
    convert(found, tmp_path / "at once", "data=4")
    _same_checkpoint(tmp_path / "at once" / TAG, tmp_path / TAG)


KILLS = [
    *((Source, "elements", count) for count in (0, 50)),
    *((conversion, "replace_text", count) for count in (0, 1, 2)),  # the plan, the manifest, latest
    *((conversion, name, 0) for name in ("make_room", "fill_all", "put_in_place", "discard", "flush")),
]
"""Where a conversion dies: a function, and the number of calls before that."""


@pytest.mark.parametrize(("owner", "name", "count"), KILLS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_conversion_killed_at_any_point_leaves_nothing_half_written(
    saved: Saved, tmp_path: Path, owner: Any, name: str, count: int
) -> None:
    found, _ = saved(PIPELINE)
    convert(found, tmp_path / "at once", "data=4")
    function, left = getattr(owner, name), [count]

    def dying(*arguments: Any, **options: Any) -> Any:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return function(*arguments, **options)

    if (child := os.fork()) == 0:
        setattr(owner, name, dying)
        with suppress(BaseException):
            convert(found, tmp_path / "to", "data=4")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert checkpoint.look_at(found.path.parent, TAG, digests=True).is_whole
    assert all(one.is_whole for one in checkpoint.checkpoints_in(tmp_path / "to", digests=True))
    convert(found, tmp_path / "to", "data=4")
    assert [path.name for path in (tmp_path / "to").iterdir() if path.name.startswith(".")] == []
    _same_checkpoint(tmp_path / "at once" / TAG, tmp_path / "to" / TAG)


def _die_while_loading(layout: Layout, folder: Path, rank: int, name: str) -> None:
    own = getattr(EngineFilling, name)

    def dying(self: EngineFilling) -> Any:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(self)

    setattr(EngineFilling, name, dying)
    try:
        go_on(layout, folder, {"convert": True})
    except Exception as error:
        (folder / f"rank{dist.get_rank()}.txt").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["compare", "copy", "finish"])
def test_rank_killed_while_loading_ends_the_others(
    saved: Saved, tmp_path: Path, rank: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.ranks.GRACE_SECONDS", 60.0)  # the others end by themselves, within the timeout
    found, expected = saved(PIPELINE)
    shutil.copytree(found.path.parent, tmp_path / "from")
    layout = Layout("data=1,model=2", 0)
    with pytest.raises(AssertionError, match=r"killed|died"):
        run_ranks(2, _die_while_loading, layout, tmp_path / "from", rank, name, deadline=90, timeout=20)
    told = (tmp_path / "from" / f"rank{1 - rank}.txt").read_text()
    assert "Error" in told
    assert checkpoint.look_at(tmp_path / "from", TAG, digests=True).is_whole
    losses = run_ranks(2, go_on, layout, tmp_path / "from", {"convert": True})[0]
    assert greatest_difference(losses, expected) < TOLERANCE


def test_conversion_to_another_layout_discards_the_files_of_a_killed_one(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = saved(PIPELINE)
    with monkeypatch.context() as patch:
        patch.setattr(Source, "elements", lambda self, *piece: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            convert(found, tmp_path, "pipe=3")
    convert(found, tmp_path, "data=4")
    convert(found, tmp_path / "at once", "data=4")
    _same_checkpoint(tmp_path / "at once" / TAG, tmp_path / TAG)


def test_command_converts_by_folder_and_by_checkpoint(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = saved(PIPELINE)
    folder, to = str(found.path.parent), str(tmp_path / "to")
    assert cli.main(["convert", folder, to, "--topology", "data=4", "--new-tag", "new"]) == 0
    assert capsys.readouterr().out == f"{to}/new\n"
    assert (tmp_path / "to" / "latest").read_text() == "new"
    assert cli.main(["convert", str(found.path), str(tmp_path / "one.pt"), "--to", "torch"]) == 0
    assert cli.main(["convert", folder, to, "--topology", "pipe=3", "--stages", "0,1,2,6"]) == 0
    content = json.loads((tmp_path / "to" / TAG / manifests.NAME).read_text())
    assert content["structure"]["bounds"] == [0, 1, 2, 6]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "to", "--topology", "data=4"], "no checkpoint in nowhere"),
        (["FROM", "to"], "give either --topology"),
        (["FROM", "to", "--topology", "data=4", "--tag", "other"], "no checkpoint 'other' in"),
        (["FROM", "to", "--topology", "pipe=2", "--stages", "a"], "give numbers of layers"),
        (["FROM", "to", "--topology", "pipe=-1"], "give all degrees"),
    ],
)
def test_command_explains_wrong_arguments(
    saved: Saved, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(saved(PIPELINE)[0].path.parent)
    assert cli.main(["convert", *(folder if word == "FROM" else word for word in arguments)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: (path / "layer_02-model_states.pt").unlink(), "layer_02-model_states.pt is missing"),
        (lambda path: _change_version(path / manifests.NAME), "version 999 of the manifest"),
    ],
    ids=["damaged", "newer"],
)
def test_command_refuses_damaged_and_newer_checkpoints(
    saved: Saved, change: Callable[[Path], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved(PIPELINE)[0].path, tmp_path / "from" / TAG)
    change(tmp_path / "from" / TAG)
    folder, to = str(tmp_path / "from" / TAG), str(tmp_path / "to")
    assert cli.main(["convert", folder, to, "--topology", "data=4"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


def _change_version(path: Path) -> None:
    path.write_text(path.read_text().replace('"version": 1', '"version": 999'))
