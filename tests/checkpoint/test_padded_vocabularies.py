"""The padding of a vocabulary follows the degree of ``model``: real rows keep every bit, and new rows are zero."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file
from torch import nn

from ds_topo import PipelineParallelGrid, checkpoint
from ds_topo.errors import CheckpointLayoutError, CheckpointModelError
from tests.checkpoint.continued_jobs import engine_with_slices
from tests.support.exhaustive import mark_exhaustive
from tests.support.world import Worlds

REAL = 21
"""Words of the vocabulary. Jobs pad it to a multiple of 8 times the degree of ``model``."""


def _rows(slices: int) -> int:
    return -(-REAL // (8 * slices)) * 8 * slices


class Words(nn.Module):
    """One slice of an embedding of words, in which each slice trains its own rows."""

    def __init__(self, slices: int, place: int, real: int | None = REAL, rows: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1 + place)
        self.embedding = nn.Embedding((rows or _rows(slices)) // slices, 3)
        torch.manual_seed(0)
        self.norm = nn.Linear(3, 3)
        weight: Any = self.embedding.weight
        weight.tensor_model_parallel, weight.partition_dim = True, 0
        if real is not None:
            weight.unpadded_size = real

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.embedding(words).square().mean() + self.norm(self.norm.weight).square().mean()
        return loss


def _engine(topology: str, zero: int, precision: str = "fp32", **model: Any) -> AbstractContextManager[Any]:
    def build(grid: PipelineParallelGrid) -> Words:
        return Words(grid.get_slice_parallel_world_size(), grid.get_slice_parallel_rank(), **model)

    return engine_with_slices(topology, build, zero, precision)


def _train(engine: Any) -> None:
    rows = engine.module.embedding.num_embeddings
    for _ in range(2):
        engine.backward(engine(torch.arange(rows)))
        engine.step()


def _save(topology: str, zero: int, precision: str, folder: Path) -> None:
    with _engine(topology, zero, precision) as engine:
        _train(engine)
        checkpoint.save(engine, folder, "saved")
        dcp.save({"app": checkpoint.TorchState(engine)}, checkpoint_id=folder / "torch")


def _states(folder: Path, slices: int, zero: int) -> dict[str, torch.Tensor]:
    """Return the rows of the embedding's weight and states at ZeRO 0 or on one replica, read from the files alone."""
    found: dict[str, list[torch.Tensor]] = {}
    for place in range(slices):
        model = torch.load(folder / f"mp_rank_{place:02d}_model_states.pt", weights_only=False)
        shape = model["module"]["embedding.weight"].shape
        found.setdefault("weight", []).append(model["module"]["embedding.weight"])
        if zero:
            name = next(folder.glob(f"*zero_pp_rank_0_mp_rank_{place:02d}_optim_states.pt"))
            file = torch.load(name, weights_only=False)["optimizer_state_dict"]
            state = {
                "fp32": file["single_partition_of_fp32_groups"][0],
                **file["base_optimizer_state"]["state"].get(0, {}),
            }
        else:
            state = model["optimizer"]["state"].get(0, {})
        for key, value in state.items():
            if key != "step":
                found.setdefault(key, []).append(value.reshape(-1)[: shape.numel()].view(shape))
    return {key: torch.cat(values) for key, values in found.items()}


def _load_and_save(topology: str, zero: int, precision: str, folder: Path, to: Path, is_torch: bool = False) -> None:
    with _engine(topology, zero, precision) as engine:
        if is_torch:
            checkpoint.load_torch(engine, folder / "torch")
        else:
            checkpoint.load(engine, folder, "saved")
        checkpoint.save(engine, to, "saved")


CASES = [(0, "fp32", 1, 4), (1, "bf16", 1, 2), (0, "fp32", 2, 1), (2, "fp32", 2, 1), (1, "fp32", 1, 3)]
"""The stage, the precision, and the degrees of ``model`` before and after; ``data`` is 1."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("zero", "precision", "old", "new"), mark_exhaustive(CASES, lambda number, _: number < 3))
@pytest.mark.parametrize("is_torch", [False, True], ids=["files", "torch"])
def test_padding_follows_the_degree_of_model(
    world: Worlds, tmp_path: Path, zero: int, precision: str, old: int, new: int, is_torch: bool
) -> None:
    world(old).run(_save, f"data=1,model={old}", zero, precision, tmp_path / "from")
    found = checkpoint.look_at(tmp_path / "from", "saved")
    before = _states(found.path, old, zero)
    folders = tmp_path / "from", tmp_path / "to"
    world(new).run(_load_and_save, f"data=1,model={new}", zero, precision, *folders, is_torch)
    after = _states(tmp_path / "to/saved", new, zero)
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert len(value) == _rows(old)
        assert len(after[key]) == _rows(new)
        assert after[key].dtype == value.dtype
        assert torch.equal(after[key][:REAL], value[:REAL]), key
        padding = value[REAL:] if _rows(new) == _rows(old) else torch.zeros(_rows(new) - REAL, 3, dtype=value.dtype)
        assert torch.equal(after[key][REAL:], padding), key
    there = checkpoint.look_at(tmp_path / "to", "saved", digests=True)
    assert there.is_whole
    assert there.manifest is not None
    split = there.manifest.structure.splits["embedding.weight"]
    assert (split.real, split.padded) == (REAL, _rows(new))
    checkpoint.to_hugging_face(found, tmp_path / "weights")
    weights = load_file(tmp_path / "weights/model.safetensors")
    assert torch.equal(weights["embedding.weight"], before["weight"][:REAL])


def _load_weights(topology: str, zero: int, folder: Path) -> None:
    for name, tag in ((".", "saved"), ("files", None)):
        with _engine(topology, zero) as engine:
            checkpoint.load(engine, folder / name, tag)
            checkpoint.save(engine, folder / topology, "of weights" if tag is None else "of states")


def test_engines_pad_plain_weights_and_at_zero_3(world: Worlds, tmp_path: Path) -> None:
    world(1).run(_save, "data=1", 0, "fp32", tmp_path)
    real = _states(tmp_path / "saved", 1, 0)["weight"][:REAL]
    checkpoint.to_hugging_face(checkpoint.look_at(tmp_path, "saved"), tmp_path / "files")
    for topology, zero in (("model=2", 1), ("data=2", 3)):
        world(2).run(_load_weights, topology, zero, tmp_path)
    for tag in ("of states", "of weights"):
        assert torch.equal(_states(tmp_path / "model=2" / tag, 2, 1)["weight"][:REAL], real)
        weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "data=2"), tag)
        assert torch.equal(weights["embedding.weight"][:REAL], real)


def _refuse(folder: Path) -> list[str]:
    said = []
    for model, kind in (
        ({"real": REAL - 1, "rows": 32}, CheckpointLayoutError),
        ({"real": None, "rows": 32}, CheckpointModelError),
        ({"rows": 20}, CheckpointLayoutError),
    ):
        with _engine("data=1", 1, **model) as engine, pytest.raises(kind) as caught:
            checkpoint.load(engine, folder, "saved")
        said.append(str(caught.value))
    with _engine("data=1", 1, rows=32) as engine:  # the same degrees with other padding
        checkpoint.load(engine, folder, "saved")
        assert not engine.module.embedding.weight[REAL:].any()
    return said


def test_unknown_padding_is_refused(world: Worlds, tmp_path: Path) -> None:
    world(1).run(_save, "data=1", 1, "fp32", tmp_path)
    [said] = world(1).run(_refuse, tmp_path)
    for text, expected in zip(
        said,
        ("has 21 rows without padding in the checkpoint, and 20 here", "is [24, 3] in the checkpoint", "20 in the new"),
        strict=True,
    ):
        assert expected in text
