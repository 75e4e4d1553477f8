"""Conversions keep every value, jobs continue alike after them, and impossible ones are refused."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO

from ds_topo import checkpoint, cli
from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.by_name import Loader
from ds_topo.checkpoint.deepspeed_reader import DeepSpeedFiles, Located
from ds_topo.checkpoint.plain_weights import to_single_file
from ds_topo.checkpoint.saved_model import WholeParameter, require_split
from ds_topo.checkpoint.table import Part, Piece, Slice, Vector
from ds_topo.errors import CheckpointError, CheckpointLayoutError
from tests.checkpoint.gpt_jobs import TAG, TOLERANCE, Layout, go_on, greatest_difference, job, save
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

PIPELINE = Layout("pipe=2,data=2")
PLAIN = Layout("data=2,model=2", is_pipeline=False)

MIXED = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
"""DeepSpeed's ``BF16_Optimizer``."""
HALF_PIPELINE = Layout("pipe=2,data=2", settings=MIXED)
BF16 = {"bf16": {"enabled": True}}
HALF = Layout("data=2", 3, is_pipeline=False, settings=BF16)

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


def _hop(layout: Layout, before: Path, after: Path) -> None:
    with job(layout) as (engine, _):
        _, state = checkpoint.load(engine, before, restore_random_states=False)
        assert UNIVERSAL_CHECKPOINT_INFO not in state
        own = {"of the program": state["of the program"]}
        checkpoint.save(engine, after, TAG, own, keep_random_states=False)


CHAINS = [
    (PIPELINE, Layout("data=4"), Layout("pipe=1"), PIPELINE),
    (PIPELINE, Layout("model=2,data=1,pipe=3"), PIPELINE),
    (PLAIN, Layout("model=4,data=1", 3, is_pipeline=False), Layout("data=3", 2, is_pipeline=False), PLAIN),
    (HALF, Layout("data=2,model=2", 1, is_pipeline=False, settings=BF16), HALF),
    (HALF_PIPELINE, Layout("pipe=3,data=2", settings=MIXED), HALF_PIPELINE),
    (PIPELINE, Layout("pipe=1", 0), Layout("data=2,pipe=2", 0), PIPELINE),
    (PLAIN, Layout("data=1", 0, is_pipeline=False), Layout("data=4", 1, is_pipeline=False), PLAIN),
    (PLAIN, Layout("data=2,shard=2", 3, is_pipeline=False), Layout("data=4,model=2", 2, is_pipeline=False), PLAIN),
    (Layout("data=2,model=2", 3, is_pipeline=False), PLAIN, Layout("data=2,model=2", 3, is_pipeline=False)),
]


@pytest.mark.thorough
@pytest.mark.parametrize("chain", mark_exhaustive(map(list, CHAINS), lambda number, _: number in (1, 3)))
def test_hops_that_return_keep_every_bit(world: Worlds, saved: Saved, tmp_path: Path, chain: Any) -> None:
    found, _ = saved(chain[0])
    before = found.path.parent
    for number, layout in enumerate(chain[1:]):
        world(layout.ranks).run(_hop, layout, before, tmp_path / str(number))
        before = tmp_path / str(number)
    _same_checkpoint(found.path, before / TAG)
    assert not [path for path in before.iterdir() if path.name.startswith(".")]


def test_single_file_has_all_weights_of_a_pipeline(saved: Saved, tmp_path: Path) -> None:
    found, _ = saved(PIPELINE)
    weights = torch.load(to_single_file(found, tmp_path / "weights.pt"), weights_only=True)
    states = torch.load(found.path / "layer_02-model_states.pt", weights_only=False)
    assert torch.equal(weights["2.qkv.weight"], states["qkv.weight"])
    assert [name for name in weights if name.startswith("tied")] == ["tied_modules.embedding.weight"]
    assert weights["tied_modules.embedding.weight"].shape == (256, 32), "one entry, with all slices"


def test_missing_safetensors_package_is_named(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="needs the package safetensors"):
        to_single_file(saved(PIPELINE)[0], tmp_path / "weights", "safetensors")


def test_safetensors_file_equals_torch_file(saved: Saved, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    found, _ = saved(PLAIN)
    weights = safetensors.load_file(to_single_file(found, tmp_path / "weights.safetensors", "safetensors"))
    _same(torch.load(to_single_file(found, tmp_path / "weights.pt"), weights_only=True), weights, "weights")


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("order", ["data=2,shard=2", "shard=2,data=2"])
def test_job_with_another_degree_of_shard_continues_with_the_same_losses(
    world: Worlds, saved: Saved, order: str, zero: int
) -> None:
    for before, after in ((order, "data=2"), ("data=4", order), (order, "shard=4"), (order, "data=2,shard=1")):
        found, expected = saved(Layout(before, zero, is_pipeline=False))
        now = Layout(after, zero, is_pipeline=False)
        losses = world(now.ranks).run(go_on, now, found.path.parent, {"verify": "digests"})[0]
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


@pytest.mark.thorough
def test_each_partition_is_saved_once(saved: Saved) -> None:
    def bytes_of(spec: str) -> dict[str, int]:
        found, _ = saved(Layout(spec, 3, is_pipeline=False))
        return {file.path: file.bytes for file in found.manifest.files if "random" not in file.path}

    assert bytes_of("data=2,shard=2").keys() == bytes_of("data=2").keys()
    assert sum(bytes_of("data=2,shard=2").values()) < 1.01 * sum(bytes_of("data=2").values())


def test_undeclared_splits_are_refused_and_named(world: Worlds, saved: Saved, tmp_path: Path) -> None:
    found, _ = saved(PLAIN)
    assert found.manifest is not None
    splits = {name: split for name, split in found.manifest.structure.splits.items() if name != "embedding.weight"}
    structure = replace(found.manifest.structure, splits=splits, undeclared=("embedding.weight",))
    shutil.copytree(found.path.parent, tmp_path / "from")
    text = manifests.to_text(replace(found.manifest, structure=structure))
    (tmp_path / "from" / TAG / manifests.NAME).write_text(text)
    with pytest.raises(AssertionError, match=r"\['embedding.weight'\] are marked as slices"):
        world(2).run(_load_undeclared, tmp_path / "from")


def test_slices_that_do_not_divide_a_parameter_are_refused() -> None:
    one = WholeParameter("weight", (3, 2), torch.float32, True, manifests.SavedSplit(0), 2)
    require_split(one, 3)
    with pytest.raises(CheckpointLayoutError, match="'weight' has 6 elements along dimension 0"):
        require_split(one, 4)


def _load_undeclared(folder: Path) -> None:
    with job(Layout("data=2", is_pipeline=False)) as (engine, _):
        del engine.module.embedding.weight.partition_dim
        checkpoint.load(engine, folder)


def _die_while_loading(layout: Layout, folder: Path, rank: int, name: str) -> None:
    own = getattr(Loader, name)

    def dying(self: Loader) -> Any:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(self)

    setattr(Loader, name, dying)
    try:
        go_on(layout, folder, {})
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
    losses = run_ranks(2, go_on, layout, tmp_path / "from", {})[0]
    assert greatest_difference(losses, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "to.pt"], "no checkpoint in nowhere"),
        (["FROM", "to.pt", "--tag", "other"], "no checkpoint 'other' in"),
        (["FROM", "to.npz"], "give a file that ends in .safetensors, .pt, .pth or .bin, or a folder"),
    ],
)
def test_command_explains_wrong_arguments(
    saved: Saved, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(saved(PIPELINE)[0].path.parent)
    assert cli.main(["export", *(folder if word == "FROM" else word for word in arguments)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: (path / "layer_02-model_states.pt").unlink(), "layer_02-model_states.pt is missing"),
        (
            lambda path: _change_byte(path / "mp_rank_00_model_states.pt"),
            "mp_rank_00_model_states.pt is damaged",
        ),
        (lambda path: _change_version(path / manifests.NAME), "version 999 of the manifest"),
    ],
    ids=["missing", "changed", "newer"],
)
def test_command_refuses_damaged_and_newer_checkpoints(
    saved: Saved, change: Callable[[Path], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved(PIPELINE)[0].path, tmp_path / "from" / TAG)
    change(tmp_path / "from" / TAG)
    folder, to = str(tmp_path / "from" / TAG), str(tmp_path / "to.pt")
    assert cli.main(["export", folder, to]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "to.pt").exists()


def _change_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"global_steps", b"global_stepz", 1))


def _change_version(path: Path) -> None:
    path.write_text(path.read_text().replace(f'"version": {manifests.VERSION}', '"version": 999'))


@pytest.mark.parametrize(
    ("split", "slices", "fits"),
    [
        (manifests.SavedSplit(0), 3, True),
        (manifests.SavedSplit(0), 5, False),
        (manifests.SavedSplit(0, stride=2), 3, True),
        (manifests.SavedSplit(0, stride=2), 4, False),
        (manifests.SavedSplit(1), 3, False),
    ],
    ids=str,
)
def test_slices_of_buffers_are_cut_anew_or_refused(split: manifests.SavedSplit, slices: int, fits: bool) -> None:
    source: Any = object.__new__(DeepSpeedFiles)
    structure = SimpleNamespace(splits={"table": split})
    source.model = SimpleNamespace(slices=2, parameters={}, structure=structure)
    said = rf"the buffer 'table' \[6\] of 2 slices cannot become {slices} slices"
    with (
        mock.patch.object(DeepSpeedFiles, "buffers", return_value={"table": torch.zeros(6)}),
        nullcontext() if fits else pytest.raises(CheckpointLayoutError, match=said),
    ):
        source.require_equal_copies(slices, has_states=True)


@pytest.mark.parametrize(("experts", "starts"), [(0, [0, 4]), (2, [0, 4, 5])], ids=["dense", "experts"])
def test_copies_of_several_ranks_give_each_element_once(experts: int, starts: list[int]) -> None:
    def part(model_rank: int, start: int) -> Any:
        return Located(model_rank, Piece("tied", Slice((8,))), Vector("", {}, {}, ()), Part(0, start, 8, 0))

    source: Any = object.__new__(DeepSpeedFiles)
    source.model = SimpleNamespace(parameters={"tied": SimpleNamespace(experts=experts)})
    parts = [part(2, 0), part(0, 4), part(2, 5), part(0, 0)]  # tied stages have partitions of different sizes
    with mock.patch.object(DeepSpeedFiles, "_parts", return_value=parts):
        assert [one.part.start for one in source._of_slice("tied", "weight")[0]] == starts
