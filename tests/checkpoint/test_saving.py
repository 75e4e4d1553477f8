"""Saving is atomic, and a job that loads continues bit for bit; failures are the same error on every rank."""

from __future__ import annotations

import datetime
import errno
import io
import os
import random
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import nn

from ds_topo import checkpoint
from ds_topo.checkpoint import engine_facts
from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint.folder import checkpoints_in, look_at, named_latest
from ds_topo.checkpoint.meeting import Meeting
from ds_topo.checkpoint.saving import HostCopies, deepspeeds_part
from ds_topo.errors import CheckpointError, CheckpointSpaceError, DisagreementError, UnsafeCheckpointError
from tests.checkpoint.jobs import KINDS, Kind, Own, job
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import RankFailure, Ranks, run_ranks
from tests.support.served_store import serve_a_store
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

CASES = [
    *KINDS.values(),
    Kind("data=2", zero=0),
    Kind("data=2", zero=2, reduced=True),
    Kind("data=2", zero=1, bf16=True),
    Kind("pipe=2", zero=1, is_pipeline=True, reduced=True),
]


def _save(kind: Kind, folder: Path) -> tuple[dict[str, str], list[float], dict[str, str]]:
    with job(kind) as here:
        here.train(range(2))
        checkpoint.save(here.engine, folder, client_state={"step": 2})
        saved = here.state()
        return saved, here.train(range(2, 4)), here.state()


def _load(kind: Kind, folder: Path) -> tuple[dict[str, str], list[float], dict[str, str]]:
    with job(kind) as here:
        if kind.zero != 3:  # DeepSpeed requires an untrained model there
            here.train(range(7, 8))
        path, state = checkpoint.load(here.engine, folder, verify="digests")
        assert (path, state) == (str(folder / "global_step2"), {"step": 2}), "nothing of DeepSpeed's"
        manifest = look_at(folder, "global_step2").manifest
        assert manifest is not None
        loaded = here.state()
        return loaded, here.train(range(2, 4)), here.state()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", CASES, ids=str)
def test_loaded_job_continues_bit_for_bit(world: Worlds, other_world: Worlds, kind: Kind, tmp_path: Path) -> None:
    without_stop = world(2).run(_save, kind, tmp_path)
    continued = other_world(2).run(_load, kind, tmp_path)
    for wanted, found in zip(without_stop, continued, strict=True):
        assert found[0] == wanted[0], "as it was saved"
        assert found[1:] == wanted[1:], "as if it had gone on"


# -- the program's own state ------------------------------------------------------------------------------------------


def _own_states(folder: Path) -> None:
    plain = {
        "started": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        "data": Path("/data/corpus"),
        "took": [datetime.timedelta(seconds=3), Fraction(1, 3)],
        "tensor": torch.ones(3),
    }
    with job(KINDS["zero1"]) as here:
        for state, error, message in (
            ({"module": 1}, ValueError, r"keys \['module'\], which are DeepSpeed's own"),
            ({"optimizer": 1, "dp_world_size": 2}, ValueError, r"keys \['dp_world_size', 'optimizer'\]"),
            ([1], TypeError, r"client_state=\[1\] is not a mapping"),
        ):
            with pytest.raises(error, match=message):
                here.engine.save_checkpoint(folder, client_state=state)
        assert not folder.exists() or not list(folder.iterdir())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            here.engine.save_checkpoint(folder, tag="plain", client_state=plain)
            told = [str(each.message) for each in caught if "load() will refuse" in str(each.message)]
            assert not told
            here.engine.save_checkpoint(folder, tag="own", client_state={"config": [Own(3)], "step": 1})
            told = [str(each.message) for each in caught if "load() will refuse" in str(each.message)]
        assert not (folder / "plain" / engine_facts.name_of_states(here.engine)).exists(), "as DeepSpeed saves"
        assert len(told) == (dist.get_rank() == 0)
        assert all("{'config': ['tests.checkpoint.jobs.Own']}" in each for each in told)
        _, found = here.engine.load_checkpoint(folder, tag="plain")
        assert torch.equal(found.pop("tensor"), plain.pop("tensor"))
        assert found == plain
        replaced = {"ds_config": "its own", "universal_checkpoint_info": {"vocabulary": 8}}
        checkpoint.save_in_background(here.engine, folder, "replaced", {**replaced, "step": 1})
        checkpoint.save(here.engine, folder, "plain", plain)
        with deepspeeds_part(here.engine):
            _, by_stock = here.engine.load_checkpoint(folder)
        assert "ds_version" in by_stock
        here.engine.save_checkpoint(folder, "by stock", by_stock)
        for tag, wanted in (("replaced", {**replaced, "step": 1}), ("plain", plain), ("by stock", plain)):
            assert here.engine.load_checkpoint(folder, tag)[1] == wanted
        with pytest.raises(UnsafeCheckpointError, match="Own"):
            here.engine.load_checkpoint(folder, tag="own")


def test_states_of_the_program_are_loaded_again_or_named_at_once(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_own_states, tmp_path / "saved")


# -- DeepSpeed alone ---------------------------------------------------------------------------------------------------


def _weights(kind: Kind, folder: Path) -> dict[str, torch.Tensor]:
    with job(kind) as here:
        here.train(range(2))
        assert here.engine.save_checkpoint(str(folder), "mine") is True, "DeepSpeed's own method"
        with deepspeed.zero.GatheredParameters(list(here.engine.module.parameters())):
            return {name: value.detach().clone() for name, value in here.engine.module.named_parameters()}


@pytest.mark.parametrize("kind", [KINDS["zero1"], pytest.param(KINDS["zero3"], marks=pytest.mark.exhaustive)], ids=str)
def test_zero_to_fp32_reads_our_checkpoint(world: Worlds, kind: Kind, tmp_path: Path) -> None:
    weights, _ = world(2).run(_weights, kind, tmp_path)
    script, out = tmp_path / "zero_to_fp32.py", tmp_path / "out"
    command = [sys.executable, str(script), str(tmp_path), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


# -- failures ---------------------------------------------------------------------------------------------------------


def _refused_write(kind: Kind, folder: Path, where: str) -> tuple[str, str, list[str]]:
    """Return the error of a save in which the disk of rank 1 is full, and the content of the folder then."""
    with job(kind) as here:
        here.train(range(1))
        checkpoint.save(here.engine, folder, "before")
        here.train(range(1, 2))
        owner: Any = {"save": type(here.engine.checkpoint_engine), "flush": folders}[where]
        real = getattr(owner, where)

        def full(*arguments: Any, **options: Any) -> Any:
            if here.grid.global_rank == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        with mock.patch.object(owner, where, full), pytest.raises(CheckpointError) as raised:
            checkpoint.save(here.engine, folder, "after")
        dist.barrier()  # rank 0 removes the draft after the ranks agreed on the failure
        left_behind = sorted(path.name for path in folder.iterdir() if not path.name.endswith(".py"))
        here.train(range(2, 3))
        checkpoint.save(here.engine, folder, "again")
        assert named_latest(folder) == "again"
        return type(raised.value).__name__, str(raised.value), left_behind


@pytest.mark.sampled(8)
@pytest.mark.parametrize("where", ["save", "flush"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_full_disk_raises_same_error_on_every_rank(world: Worlds, kind: Kind, where: str, tmp_path: Path) -> None:
    errors = world(2).run(_refused_write, kind, tmp_path, where)
    assert errors[0] == errors[1], "the same on all ranks"
    name, text, left_behind = errors[0]
    assert (name, left_behind) == ("CheckpointError", ["before", "latest"])
    assert "saving the checkpoint 'after'" in text
    assert re.search(
        r"ranks \[1\] on \S+ -> \S*/\.after\.saving/after/\S+\.pt could not be written: OSError: No space left on "
        r"device \(errno 28\); [\d,]+ bytes are free there",
        text,
    ), text


class _WritesAtCommit(CheckpointEngine):  # type: ignore[misc]
    """A checkpoint engine that writes all files in ``commit()``, as those with writers of their own may."""

    def __init__(self) -> None:
        super().__init__()
        self._content: dict[str, io.BytesIO] = {}

    def create(self, info: object) -> None:
        """No-op: there is one checkpoint."""

    def save(self, state_dict: Any, path: str) -> None:
        """Keep the content of a file."""
        torch.save(state_dict, self._content.setdefault(path, io.BytesIO()))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file."""
        return torch.load(path, map_location, weights_only=True)

    def commit(self, info: object) -> bool:
        """Write the files, each at first in part."""
        for path, content in self._content.items():
            Path(path).write_bytes(content.getvalue()[:100])
        time.sleep(0.1)
        for path, content in self._content.items():
            Path(path).write_bytes(content.getvalue())
        return True


def _save_with_a_late_writer(folder: Path) -> None:
    with job(KINDS["zero1"]) as here:
        here.train(range(1))
        here.engine.checkpoint_engine = _WritesAtCommit()
        checkpoint.save(here.engine, folder, "late")
        saved = here.state()
        here.train(range(1, 2))
        checkpoint.load(here.engine, folder, verify="digests")
        assert here.state() == saved


def test_files_that_a_checkpoint_engine_writes_late_are_waited_for(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_save_with_a_late_writer, tmp_path)


def _two_jobs(folder: Path) -> str:
    """Save while another job, on a file system without locks, starts to save into the same folder."""
    with job(KINDS["zero1"]) as here:
        here.train(range(1))
        checkpoint.save(here.engine, folder, "before")
        owner = type(here.engine.checkpoint_engine)
        real = owner.save

        def save(*arguments: Any, **options: Any) -> Any:
            if here.grid.global_rank == 1:
                end = time.monotonic() + 10
                while not any(folder.glob(".after*/after/mp_rank_00*")) and time.monotonic() < end:
                    time.sleep(0.01)  # otherwise rank 0 would create the folder again before its first file
                for draft in folder.glob(".after*"):
                    folders.discard(draft)
            return real(*arguments, **options)

        with mock.patch.object(owner, "save", save), pytest.raises(CheckpointError) as raised:
            checkpoint.save(here.engine, folder, "after")
        dist.barrier()
        assert named_latest(folder) == "before"
        checkpoint.save(here.engine, folder, "again")
        return str(raised.value)


def test_error_names_second_job_in_same_folder(world: Worlds, tmp_path: Path) -> None:
    errors = world(2).run(_two_jobs, tmp_path)
    assert errors[0] == errors[1]
    assert "its folder was removed meanwhile: does a second job save into the same folder?" in errors[0]


def _too_little_space(kind: Kind, folder: Path) -> str:
    with job(kind) as here:
        here.train(range(1))
        with (
            mock.patch.object(folders, "free_bytes", return_value=1000),
            pytest.raises(CheckpointSpaceError) as raised,
        ):
            checkpoint.save(here.engine, folder, "first")
        assert list(folder.iterdir()) == []
        checkpoint.save(here.engine, folder, "second")
        (found,) = checkpoint.checkpoints_in(folder)
        estimate = engine_facts.bytes_of_checkpoint(here.engine)
        assert estimate <= found.bytes, "the estimate refuses no save that fits"
        elements = sum(parameter.numel() for parameter in here.engine.module.parameters())
        assert estimate >= 12 * elements, "weights and Adam's two states, in fp32, of all ranks"
        return str(raised.value)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_too_little_space_is_refused_before_writing(world: Worlds, kind: Kind, tmp_path: Path) -> None:
    errors = world(2).run(_too_little_space, kind, tmp_path)
    assert errors[0] == errors[1]
    assert re.search(r"'first' takes about [\d,]+ bytes, and the disk of \S+ has 1,000: make room", errors[0])


def _flushed(folder: Path) -> None:
    with job(Kind("data=1", zero=1)) as here:
        checkpoint.save(here.engine, folder, "one")
        with (
            mock.patch.object(os, "fsync", wraps=os.fsync) as flush,
            mock.patch.object(folders, "manifest_of", wraps=folders.manifest_of) as read,
            mock.patch.object(torch, "save", wraps=torch.save) as write,
        ):
            checkpoint.save(here.engine, folder, "two")
        manifest = look_at(folder, "two").manifest
        assert manifest is not None
        others = ("the manifest", "its folder", "latest", "the folder of all")
        assert (flush.call_count, read.call_count) == (len(manifest.files) + len(others), 0)
        first = Path(write.call_args_list[0].args[1])
        assert first.name.startswith("random_states"), "it is flushed while DeepSpeed writes the others"


def test_second_save_flushes_each_file_once_and_reads_no_manifest(world: Worlds, tmp_path: Path) -> None:
    world(1).run(_flushed, tmp_path)


def test_random_states_are_restored() -> None:
    engine: Any = SimpleNamespace(module=nn.Identity())
    states = engine_facts.random_states(engine)
    wanted = random.random(), np.random.rand(), float(torch.rand(()))
    engine_facts.restore_random_states(engine, states)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == wanted


def test_copies_of_large_tensors_reuse_memory() -> None:
    values = [torch.full((1 << 18,), float(number)) for number in range(2)]
    former = HostCopies()
    former.of(values[0])
    copies = HostCopies(former.large)
    first, second = copies.of(values)
    assert first.data_ptr() == former.large[0].data_ptr() != second.data_ptr()
    assert all(map(torch.equal, (first, second), values))


def _several(folder: Path) -> list[str]:
    with job(KINDS["zero1"]) as here:
        (folder / ".left.saving" / "left").mkdir(parents=True, exist_ok=True)
        for step in range(4):
            here.train(range(step, step + 1))
            checkpoint.save(here.engine, folder, f"step{step}", keep_last=2)
            assert named_latest(folder) == f"step{step}", "on every rank"
            assert look_at(folder, f"step{step}", digests=True).is_whole
        checkpoint.save(here.engine, folder, "step2", keep_last=2, save_latest=False)
        assert named_latest(folder) == "step3"
        manifest = look_at(folder, "step2").manifest
        assert manifest is not None
        assert manifest.step == 4, "the former checkpoint was replaced"
        assert {file.rank for file in manifest.files} == {0, 1}
        return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".py"))


def test_keep_last_removes_older_checkpoints_and_drafts(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(_several, tmp_path)[0] == ["latest", "step2", "step3"]


def _different(folder: Path) -> str:
    with job(KINDS["zero1"]) as here:
        with pytest.raises(DisagreementError) as raised:
            checkpoint.save(here.engine, folder, f"of rank {here.grid.global_rank}")
        return str(raised.value)


def test_error_names_ranks_with_different_tags(world: Worlds, tmp_path: Path) -> None:
    first, second = world(2).run(_different, tmp_path)
    assert "ranks [0] on" in first
    assert "'of rank 1'" in first
    assert "tag 'of rank 0'" in second
    assert not list(tmp_path.iterdir())


def _one_writes(kind: Kind, folder: Path) -> list[str]:
    """Save; then again while rank 1 believes that another rank writes its partition; return the errors."""
    with job(kind) as here:
        here.train(range(1))
        checkpoint.save(here.engine, folder, "whole")
        here.engine.save_zero_checkpoint = dist.get_rank() == 0
        said = []
        for save in (
            lambda: checkpoint.save(here.engine, folder, "lacking"),
            lambda: checkpoint.save_in_background(here.engine, folder, "lacking").finish(),
        ):
            with pytest.raises(CheckpointError, match=r"no rank has written .* not put in place") as raised:
                save()
            said.append(str(raised.value))
        dist.barrier()  # rank 0 has discarded the draft
        assert [each.tag for each in checkpoints_in(folder)] == ["whole"]
        assert not (folder / ".lacking.saving").exists()
        return said


PARTITIONED = [KINDS["zero1"], KINDS["zero3"], KINDS["moe"], Kind("data=2", zero=2, bf16=True)]


@pytest.mark.parametrize("kind", mark_exhaustive(PARTITIONED, lambda number, _: number == 0), ids=str)
def test_missing_partition_is_named_when_it_is_saved(world: Worlds, kind: Kind, tmp_path: Path) -> None:
    first, second = world(2).run(_one_writes, kind, tmp_path)
    assert first == second


def _interrupted(folder: Path) -> str:
    """Save while rank 1 leaves DeepSpeed's function early."""
    with job(KINDS["zero1"]) as here:
        here.train(range(1))
        failing = mock.patch.object(here.engine, "_save_zero_checkpoint", side_effect=KeyError("no such state"))
        with failing if dist.get_rank() else nullcontext(), pytest.raises(CheckpointError) as raised:
            checkpoint.save(here.engine, folder, "one")
        return str(raised.value)


@pytest.mark.thorough
def test_rank_that_fails_early_is_named_in_time(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        first, second = ranks.call(_interrupted, (tmp_path,), deadline=60, timeout=6)
    for text in (first, second):
        assert "ranks [1] on" in text
        assert "KeyError: 'no such state'" in text
    assert checkpoints_in(tmp_path) == []


# -- the end of rank 0, which serves the store -------------------------------------------------------------------------


def _saves_and_ends(folder: Path, late: float) -> None:
    serve_a_store()
    read = Meeting._read

    def read_late(meeting: Meeting, names: Sequence[str]) -> list[Any]:
        time.sleep(late * (meeting.rank > 0))
        return read(meeting, names)

    with job(KINDS["zero1"]) as here, mock.patch.object(Meeting, "_read", read_late):
        here.train(range(1))
        try:
            checkpoint.save(here.engine, folder)
        except CheckpointError as error:
            Path(folder, f"error{dist.get_rank()}").write_text(str(error))
        else:
            Path(folder, f"saved{dist.get_rank()}").touch()
        if dist.get_rank() == 0:
            os._exit(0)


@pytest.mark.parametrize("late", mark_exhaustive([0, 0.001, 0.5], lambda _, late: late == 0.5))
def test_rank_0_may_end_right_after_a_save(tmp_path: Path, late: float) -> None:
    with pytest.raises(RankFailure):  # of rank 0, which returns nothing
        run_ranks(2, _saves_and_ends, tmp_path, late)
    assert {path.read_text() for path in tmp_path.glob("error*")} == set()
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def _reads_from_rank_0(folder: str) -> None:
    serve_a_store()
    meeting = Meeting.begin("a test", "")
    if dist.get_rank() == 0:
        time.sleep(1)
        os._exit(0)
    with pytest.raises(CheckpointError) as caught:
        meeting.decide("choice", None, lambda _: None, posting=())
    Path(folder, "error").write_text(str(caught.value))


def test_a_lost_store_is_reported_as_lost(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(2, _reads_from_rank_0, str(tmp_path))
    error = (tmp_path / "error").read_text()
    assert "rank 0 did not report its result, the connection to the store of the job was lost" in error
    assert "within 0:" not in error


def _decide_on_a_full_disk() -> str:
    def fail(posted: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    meeting = Meeting.begin("saving the checkpoint 'step1'", "", None)
    with pytest.raises(CheckpointError) as caught:
        meeting.decide("room", None, fail, posting=())
    return str(caught.value)


def test_error_of_rank_0_says_on_every_rank_whose_it_is(world: Worlds) -> None:
    text = "saving the checkpoint 'step1': rank 0: OSError: [Errno 28] No space left on device"
    assert world(2).run(_decide_on_a_full_disk) == [text, text]
