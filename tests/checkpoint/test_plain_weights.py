"""Plain files of weights are read into engines of any layout, and written from their checkpoints, bit by bit."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ds_topo import PipelineParallelGrid, checkpoint, cli
from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint.manifest import SavedSplit
from ds_topo.checkpoint.plain_weights import files_of_weights
from ds_topo.errors import CheckpointError, CheckpointModelError, DamagedCheckpointError, MissingCheckpointError
from tests.checkpoint.continued_jobs import engine_with_slices
from tests.checkpoint.handmade import slice_of
from tests.support.exhaustive import mark_exhaustive
from tests.support.world import Worlds

SPLITS = {"embedding.weight": (0, 1), "qkv.weight": (0, 3), "out.weight": (1, 1)}
"""The dimension along which slices split a weight, and the stride."""


class Model(nn.Module):
    """Layers split in several ways, with a tied head and a buffer; or one slice of them."""

    def __init__(self, slices: int = 1) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(8 // slices, 4)
        self.qkv = nn.Linear(4, 12 // slices, bias=False)
        self.out = nn.Linear(4 // slices, 4)
        self.head = nn.Linear(4, 8 // slices, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor([3]))
        for name, (dim, stride) in SPLITS.items():
            weight: Any = self.get_parameter(name)
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, stride

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def _engine(
    topology: str, zero: int, precision: str = "fp32", module: nn.Module | None = None
) -> AbstractContextManager[Any]:
    def build(grid: PipelineParallelGrid) -> nn.Module:
        return module or Model(grid.get_slice_parallel_world_size())

    return engine_with_slices(topology, build, zero, precision)


def _weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return the weights of the whole model, with values that every type can hold."""
    state = Model().state_dict()
    del state["head.weight"]
    weights = {name: torch.arange(one.numel()).view(one.shape) / 64 - 0.5 for name, one in state.items()}
    return {**{name: one.to(dtype) for name, one in weights.items()}, "count": torch.tensor([5])}


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: one.clone() for name, one in tensors.items()}, path)


def _write_files(folder: Path) -> None:
    """Write the same weights in several forms."""
    for name in ("one", "several", "renamed", "tied", "untied", "larger"):
        (folder / name).mkdir(parents=True)
    weights = _weights()
    _write(folder / "one/model.safetensors", _weights(torch.bfloat16))
    torch.save({**weights, "head.weight": weights["embedding.weight"]}, folder / "weights.pt")
    names, index = [[*weights][:2], [*weights][2:]], {}
    for number, part in enumerate(names):
        _write(folder / f"several/part{number}.safetensors", {name: weights[name] for name in part})
        index.update(dict.fromkeys(part, f"part{number}.safetensors"))
    (folder / "several/model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    _write(folder / "renamed/model.safetensors", {f"model.{name}": one for name, one in weights.items()})
    head = weights["embedding.weight"]
    others = {name: one for name, one in weights.items() if name != "embedding.weight"}
    _write(folder / "tied/model.safetensors", {**others, "head.weight": head})
    _write(folder / "untied/model.safetensors", {**weights, "head.weight": head + 1})
    _write(folder / "larger/model.safetensors", {**weights, "added": head})


FORMS: list[tuple[str, Any]] = [
    ("one", None),
    ("weights.pt", None),
    ("several", None),
    ("renamed", lambda name: f"model.{name}"),
    ("tied", None),
]
ENGINES = [
    ("data=2", 0, "fp32"),
    ("data=2", 1, "bf16"),
    ("data=2", 3, "fp32"),
    ("model=2", 0, "bf16"),
    ("model=2", 2, "fp32"),
    ("model=2", 3, "fp32"),
]


def _wrong(engine: Any) -> list[str]:
    """Return the names of what an engine has other values of than the files."""
    place, slices = engine.mpu.get_slice_parallel_rank(), engine.mpu.get_slice_parallel_world_size()
    wrong = [] if int(engine.module.count) == 5 else ["count"]
    for name, parameter in engine.module.named_parameters():
        whole = _weights()[name]
        if name in SPLITS and slices > 1:
            whole = slice_of(whole, SavedSplit(*SPLITS[name]), place, slices)
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_tensor")):
            wrong += [] if torch.equal(parameter.detach().float(), whole) else [name]
    return wrong


def _load_all(topology: str, zero: int, precision: str, folder: Path) -> list[tuple[str, list[str]]]:
    found = []
    for form, rename in FORMS:
        with _engine(topology, zero, precision) as engine:
            assert checkpoint.load(engine, folder / form, rename=rename) == (str(folder / form), {})
            found.append((form, _wrong(engine)))
            checkpoint.save(engine, folder / "saved", precision)
    return found


@pytest.mark.parametrize(("topology", "zero", "precision"), mark_exhaustive(ENGINES, lambda number, _: number == 3))
def test_engines_of_any_layout_read_and_write_plain_weights(
    world: Worlds, tmp_path: Path, topology: str, zero: int, precision: str
) -> None:
    _write_files(tmp_path)
    for found in world(2).run(_load_all, topology, zero, precision, tmp_path):
        assert found == [(form, []) for form, _ in FORMS]
    for saved in checkpoint.checkpoints_in(tmp_path / "saved"):
        to, dtype = tmp_path / f"of {saved.tag}", torch.bfloat16 if "bf16" in saved.tag else torch.float32
        checkpoint.to_hugging_face(saved, to, largest=100, rename=lambda name: f"model.{name}")
        index = json.loads((to / "model.safetensors.index.json").read_text())
        files = {name: load_file(to / name) for name in set(index["weight_map"].values())}
        assert len(files) > 2
        assert sorted(path.name for path in to.iterdir()) == sorted([*files, "model.safetensors.index.json"])
        expected = {f"model.{name}": one for name, one in _weights(dtype).items()}
        assert index["weight_map"].keys() == expected.keys()
        assert index["metadata"]["total_size"] == sum(one.nbytes for one in expected.values())
        for name, one in expected.items():
            there = files[index["weight_map"][name]][name]
            assert there.dtype == one.dtype
            assert torch.equal(there, one)


def _refuse(folder: Path) -> list[str]:
    said, seen = [], []
    with _engine("data=1", 1) as engine:
        before = engine.module.out.weight.detach().clone()
        for form, options, kind in (
            ("untied", {}, CheckpointModelError),
            ("larger", {}, CheckpointModelError),
            ("renamed", {}, CheckpointModelError),
            ("one", {"rename": {"out.weight": ""}}, CheckpointError),
            ("several", {"convert": False}, MissingCheckpointError),
            ("nothing", {}, MissingCheckpointError),
            ("bad", {}, DamagedCheckpointError),
            ("nested.pt", {}, CheckpointError),
        ):
            with pytest.raises(kind) as caught:
                checkpoint.load(engine, folder / form, **options)
            said.append(str(caught.value))
        assert torch.equal(engine.module.out.weight, before)
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            checkpoint.load(engine, folder / "larger", load_module_strict=False)
        seen += [str(one.message) for one in caught_warnings if "was loaded although" in str(one.message)]
        assert _wrong(engine) == []
    with _engine("data=1", 1, module=nn.Linear(4, 3)) as engine:
        with pytest.raises(CheckpointModelError) as raised:
            checkpoint.load(engine, folder / "one", rename={"weight": "out.weight", "bias": "out.bias"})
        said.append(str(raised.value))
    return [*said, *seen]


def test_weights_of_other_models_are_refused(world: Worlds, tmp_path: Path) -> None:
    _write_files(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/model.safetensors").write_bytes(b"\x10" + bytes(40))
    torch.save({"model": _weights()}, tmp_path / "nested.pt")
    [said] = world(1).run(_refuse, tmp_path)
    for text, expected in zip(
        said,
        (
            "'embedding.weight' and 'head.weight' differ, and are one parameter in the model",
            "it has 'added' [8, 4], which the model does not have",
            "it has no parameter 'embedding.weight' [8, 4]",
            "rename gives '' for 'out.weight'",
            "or into the engine, by load(engine,",
            "no checkpoint in",
            "cannot be read as safetensors",
            "is not a state dict, which has tensors by name: it holds ['model']",
            "parameter 'out.weight' is [4, 4] in the checkpoint and [3, 4] in the model",
            "was loaded although it has 'added'",
        ),
        strict=True,
    ):
        assert expected in text


def test_files_of_an_index_are_in_its_folder(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for content, said in (
        ({"weight_map": {"a": "../a.safetensors"}}, "not in its folder"),
        ({"weight_map": {"a": "a.safetensors"}}, "not in its folder"),
        ({"weight_map": [1]}, "is not an index of weights"),
        ([], "is not an index of weights"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(DamagedCheckpointError, match=said):
            files_of_weights(tmp_path)
    index.unlink()
    assert files_of_weights(tmp_path) == files_of_weights(tmp_path / "no") == []
    (tmp_path / "a.safetensors").touch()
    assert files_of_weights(tmp_path) == [tmp_path / "a.safetensors"]


def _save(folder: Path) -> None:
    with _engine("data=1", 1) as engine:
        checkpoint.save(engine, folder, "saved")


@pytest.mark.parametrize("umask", [0o022, 0o027])
@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "folder"])
def test_files_are_readable_as_the_umask_says(world: Worlds, tmp_path: Path, name: str, umask: int) -> None:
    world(1).run(_save, tmp_path / "saved")
    former = os.umask(umask)
    try:
        assert cli.main(["export", str(tmp_path / "saved"), str(tmp_path / name)]) == 0
    finally:
        os.umask(former)
    [written] = [one for one in (tmp_path / name, *(tmp_path / name).glob("*")) if one.is_file()]
    assert written.stat().st_mode & 0o777 == 0o666 & ~umask


def test_command_writes_files_of_hugging_face(
    world: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world(1).run(_save, tmp_path / "saved")
    names = tmp_path / "names.json"
    names.write_text('{"out.weight": "o.w"}')
    export = ["export", str(tmp_path / "saved")]
    assert cli.main([*export, str(tmp_path / "to"), "--rename", str(names)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'to'}\n"
    assert f"wrote step 0 of {tmp_path / 'saved/saved'}: 5 tensors in float32, int64\n" in err
    found = load_file(tmp_path / "to/model.safetensors")
    assert sorted(found) == ["count", "embedding.weight", "o.w", "out.bias", "qkv.weight"]
    assert torch.equal(found["o.w"], Model().out.weight)
    with mock.patch.object(folders, "free_bytes", return_value=300):
        assert cli.main([*export, str(tmp_path / "full")]) == 2
    assert "takes about 400 bytes, and the disk of" in capsys.readouterr().err, "4 bytes for each of 100 elements"
    assert cli.main([*export, str(tmp_path / "all.pt")]) == 0
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    assert whole.keys() == Model().state_dict().keys(), "both names of the tied weight"
    assert all(map(torch.equal, whole.values(), [Model().state_dict()[name] for name in whole]))
    assert cli.main([*export, str(tmp_path / "all.pt"), "--overwrite"]) == 0
    for options, said in (
        ([str(tmp_path / "to")], "has files of weights already"),
        ([str(tmp_path / "all.pt")], "all.pt' exists: give another name, or --overwrite to replace it"),
        ([str(tmp_path / "other"), "--overwrite"], "--overwrite has no effect: it needs a file as TO"),
        ([str(tmp_path / "to.pt"), "--rename", str(names)], "has no effect: it needs a folder as TO"),
        ([str(tmp_path / "to"), "--rename", str(tmp_path / "no")], "No such file"),
    ):
        capsys.readouterr()
        assert cli.main([*export, *options]) == 2
        assert said in capsys.readouterr().err
    names.write_text('{"out.weight": "out.bias"}')
    assert cli.main([*export, str(tmp_path / "b"), "--rename", str(names)])
    assert "the same name, 'out.bias'" in capsys.readouterr().err
