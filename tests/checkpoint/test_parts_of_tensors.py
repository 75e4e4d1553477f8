"""Parts of tensors for torch's checkpoints: spans of slices as boxes of the whole tensor, and the keys of programs."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.metadata import MetadataIndex

from ds_topo.checkpoint.engine_state import PartOfTensor, part_of
from ds_topo.checkpoint.manifest import SavedSplit
from ds_topo.checkpoint.table import Slice
from ds_topo.checkpoint.torch_format import Keys
from tests.checkpoint.handmade import slice_of

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], SavedSplit, int]:
    """Draw the shape of a slice, its split, and the number of slices."""
    shape = list(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dim, stride = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
    shape[dim] *= stride
    return tuple(shape), SavedSplit(dim, stride), draw(st.integers(1, 3))


@given(splits(), st.lists(st.floats(0, 1), max_size=3))
def test_partitions_of_slices_cover_the_whole_once(
    given_split: tuple[tuple[int, ...], SavedSplit, int], cuts: list[float]
) -> None:
    shape, split, slices = given_split
    numel = torch.Size(shape).numel()
    ends = [0, *sorted(int(where * numel) for where in cuts), numel]
    of_slices = [Slice(shape, split.dim, slices, place, split.stride) for place in range(slices)]
    full = torch.arange(1, numel * slices + 1).view(of_slices[0].whole_shape)
    put_together = torch.zeros_like(full)
    for place, of in enumerate(of_slices):
        own = slice_of(full, split, place, slices).flatten()
        for start, stop in pairwise(ends):
            for offsets, memory in part_of(own[start:stop].clone(), of, start, stop).boxes.items():
                _in(put_together, offsets, memory.shape).add_(memory)
    assert torch.equal(put_together, full), "every element is in one box"


def _in(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@pytest.fixture
def part() -> PartOfTensor:
    """Return elements 2 to 7 of the second of two slices of a tensor of [3, 8]."""
    return part_of(torch.arange(5.0), Slice((3, 4), dim=1, slices=2, place=1), 2, 7)


def test_part_has_shape_of_whole_and_shares_memory() -> None:
    memory = torch.arange(5.0)
    part = part_of(memory, Slice((3, 4), dim=1, slices=2, place=1), 2, 7)
    assert (part.shape, part.dtype, part.device.type) == (torch.Size([3, 8]), torch.float32, "cpu")
    part.__get_tensor_shard__(MetadataIndex("weight", torch.Size((1, 4)))).fill_(9)
    assert memory.tolist() == [0, 1, 9, 9, 9]
    assert repr(part) == "PartOfTensor([3, 8], 2 boxes here)"


def test_strided_slice_is_not_copied() -> None:
    memory = torch.arange(12.0).view(4, 3).t()
    part = part_of(memory, Slice((3, 4), dim=1, slices=2, place=0, stride=2), 0, 12)
    assert {offsets: box.tolist() for offsets, box in part.boxes.items()} == {
        (0, 0): memory[:, :2].tolist(),
        (0, 4): memory[:, 2:].tolist(),
    }
    assert all(box.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr() for box in part.boxes.values())


def test_computing_with_part_is_refused(part: PartOfTensor) -> None:
    into_part = partial(torch.neg, torch.ones(3, 8), out=part)
    for compute in (lambda: part + 1, lambda: 1 + part, part.sum, partial(torch.stack, [part]), into_part):
        with pytest.raises(RuntimeError, match=r"aten\..*can be saved and loaded") as refusal:
            compute()
        assert refusal.type is RuntimeError


def test_part_that_is_not_written_is_read() -> None:
    part = part_of(torch.arange(2.0), Slice((2,)), 0, 2, is_written=False)
    assert (part.__create_write_items__("weight", part), len(part.__create_chunk_list__())) == ([], 1)


STAGERS: dict[str, Callable[[], Any]] = {"of FileSystemWriter": staging.BlockingAsyncStager}
if hasattr(staging, "DefaultStager"):  # since torch 2.9
    STAGERS["by default"] = lambda: staging.DefaultStager(staging.StagingOptions(False, False, False, False))


@pytest.mark.parametrize("stager", STAGERS)
def test_torch_stagers_copy_parts(part: PartOfTensor, stager: str) -> None:
    expected = {offsets: memory.clone() for offsets, memory in part.boxes.items()}
    staged = STAGERS[stager]().stage({"model": {"weight": part, "again": [part]}, "number": torch.tensor(3.0)})
    for memory in part.boxes.values():
        memory.fill_(-1)
    for found in (staged["model"]["weight"], staged["model"]["again"][0]):
        assert (type(found), found.shape, found.boxes.keys()) == (PartOfTensor, part.shape, expected.keys())
        assert all(torch.equal(found.boxes[offsets], value) for offsets, value in expected.items())


def test_parts_can_be_pickled_and_copied(part: PartOfTensor) -> None:
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    for found in (torch.load(file, weights_only=False), copy.deepcopy(part)):
        assert (found.shape, found.dtype, found.is_written) == (part.shape, part.dtype, True)
        assert [box.tolist() for box in found.boxes.values()] == [box.tolist() for box in part.boxes.values()]


KEYS = {
    "torch": (["app.model.w", "app.optim.state.w.step", "app.optim.param_groups.0.params"], True),
    "others": (["model.w", "optim.state.w.step", "optim.param_groups.w.lr"], False),
    "torchtitan": (["w", "optimizer.state.w.step", "optimizer.param_groups.w.lr"], False),
}


@pytest.mark.parametrize("program", KEYS)
def test_keys_of_programs_are_found(program: str) -> None:
    found, by_group = KEYS[program]
    keys = Keys.of(found)
    assert (keys.weights + "w", keys.state("w", "step"), keys.is_by_group) == (*found[:2], by_group)
    assert keys.hyperparameters(found, ["w"]) == found[2:]
