"""Files that changed after they were written: what is found before loading, what while loading, and what is said."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
import uuid
import warnings
import zipfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.state_dict_factory import SDLoaderFactory

from ds_topo import checkpoint
from ds_topo.base.torch_names import default_store
from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint.folder import look_at, named_latest, unreadable
from ds_topo.checkpoint.meeting import Meeting
from ds_topo.checkpoint.safe_reading import allowed_types, reading_checkpoint
from ds_topo.errors import CheckpointError, UnsafeCheckpointError
from tests.checkpoint.jobs import Job, Kind, Own, job
from tests.support.exhaustive import mark_exhaustive
from tests.support.world import Worlds

ONE = Kind("data=1", zero=1)
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def _save_two(here: Job, folder: Path) -> None:
    for step in (1, 2):
        here.train(range(step - 1, step))
        checkpoint.save(here.engine, folder, f"step{step}", {"step": step})


def _loaded(here: Job, folder: Path, tag: str | None = None, **options: Any) -> tuple[int, str]:
    """Return the step that was loaded, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, state = checkpoint.load(here.engine, folder, tag, **options)
    told = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
    return int(state["step"]), " ".join(told)


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


def _changed_bytes(folder: Path, further: int) -> None:
    with job(ONE) as here:
        _save_two(here, folder / "saved")
        places = random.Random(0)
        for name in (MODEL, OPTIMIZER):
            size = (folder / "saved/step2" / name).stat().st_size
            for position in [0, size - 22, *places.sample(range(size), further)]:
                copy = copytree(folder / "saved", folder / "copy")
                _flip(copy / "step2" / name, position)
                said = ""
                try:
                    step, said = _loaded(here, copy)
                    is_said = step == 2 or f"'step2' is damaged: {name}" in said
                except CheckpointError as error:
                    said = str(error)
                    is_said = f"{copy}/step2/{name} cannot be read" in said
                    is_said = is_said and f"ds-topo checkpoint {copy}/step2 --verify" in said
                assert is_said, said
                rmtree(copy)


@pytest.mark.parametrize("further", [2, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_changed_byte_is_passed_over_or_named(world: Worlds, tmp_path: Path, further: int) -> None:
    world(1).run(_changed_bytes, tmp_path, further)


def test_unreadable_finds_everything_but_bytes_of_tensors(tmp_path: Path) -> None:
    file = tmp_path / "states.pt"
    torch.save({"weight": torch.ones(100)}, file)
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        found = {one.filename.rpartition("/")[2]: one for one in archive.infolist()}
    assert unreadable(tmp_path, [file.name]) == []
    _flip(file, whole.index(b"weight"))
    reason = f"Bad CRC-32 for file {found['data.pkl'].filename!r}"
    assert unreadable(tmp_path, [file.name]) == [
        f"states.pt is damaged, or was changed after it was written ({reason})"
    ]
    file.write_bytes(whole[:-30])
    assert "states.pt is damaged" in unreadable(tmp_path, [file.name])[0]
    file.unlink()
    assert unreadable(tmp_path, [file.name]) == ["states.pt cannot be read: No such file or directory"]
    torch.save(torch.ones(1), file, _use_new_zipfile_serialization=False)
    assert unreadable(tmp_path, [file.name]) == [], "torch's older format"


# -- what the check before loading cannot find -------------------------------------------------------------------------


def _rewritten(folder: Path) -> None:
    """Load checkpoints without a manifest, whose files are whole archives of something else."""
    with job(ONE) as here:
        _save_two(here, folder)
        (folder / "step2/manifest.json").unlink()
        step, told = _loaded(here, folder)
        assert step == 2
        assert f"{folder}/step2 has no manifest.json: DeepSpeed alone saved it, or the file is lost" in told
        assert _loaded(here, folder, "step1") == (1, "")
        torch.save({"epoch": 3}, folder / "step2" / MODEL)
        with pytest.raises(CheckpointError, match=r"DeepSpeed could not load \S+step2: KeyError: .*step2 --verify, or"):
            checkpoint.load(here.engine, folder)
        with zipfile.ZipFile(folder / "step2" / MODEL, "w") as archive:
            archive.writestr("archive/version", "3\n")
            archive.writestr("archive/data.pkl", b"\x80\x02}q\x00X\x05\x00\x00\x00\xff\xff\xff\xff\xffq\x01K\x01s.")
        with pytest.raises(CheckpointError, match=rf"step2/{MODEL} cannot be read \(UnicodeDecodeError: .*--verify"):
            checkpoint.load(here.engine, folder)
        for trusted in (True, False):
            with pytest.raises(CheckpointError, match=rf"step2/{MODEL} cannot be read"):
                checkpoint.load(here.engine, folder, trusted=trusted)


def test_files_that_torch_or_deepspeed_cannot_use_are_named(world: Worlds, tmp_path: Path) -> None:
    world(1).run(_rewritten, tmp_path)


# -- types that run code, on any thread --------------------------------------------------------------------------------


def _on_another_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_files_of_the_checkpoint_are_restricted_on_every_thread(tmp_path: Path) -> None:
    inside, outside = tmp_path / "step1/states.pt", tmp_path / "own.pt"
    inside.parent.mkdir()
    for path in (inside, outside):
        torch.save({"own": Own(3)}, path)
    (tmp_path / "link.pt").symlink_to(inside)

    def read(path: Path) -> Any:
        return torch.load(path, weights_only=False)

    def read_open(path: Path) -> Any:
        with path.open("rb") as file:
            return torch.load(file, weights_only=False)

    with reading_checkpoint(inside.parent):
        for load in (read, read_open):
            with pytest.raises(UnsafeCheckpointError, match=r"holds tests\.checkpoint\.jobs\.Own"):
                load(outside)  # on this thread, DeepSpeed may read whatever it likes
            assert _on_another_thread(lambda load=load: load(outside))["own"].value == 3
            for path in (inside, tmp_path / "link.pt"):
                found = _on_another_thread(lambda load=load, path=path: load(path))
                assert isinstance(found, UnsafeCheckpointError)
    assert read(inside)["own"].value == 3


def test_deepspeeds_loader_reads_its_first_file_once(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.pt") for number in range(2)]
    for path in paths:
        torch.save({"module": {"weight": torch.ones(2)}, "mp_world_size": 1}, path)
    load = mock.Mock(wraps=torch.load)
    with mock.patch.object(torch, "load", load), reading_checkpoint(tmp_path):
        loader = SDLoaderFactory.get_sd_loader(paths[:1], TorchCheckpointEngine())
        _, content, _ = loader.load(1, 0)
        assert load.call_count == 1
        torch.load(paths[0])["module"]["weight"].zero_()
        assert load.call_count == 2, "anything else gets tensors of its own"
        assert content["module"]["weight"].tolist() == [1, 1]
        SDLoaderFactory.get_sd_loader(paths[:1], TorchCheckpointEngine())
        torch.load(paths[1])  # content of other files is not kept
        loader.load(1, 0)
        assert load.call_count == 5


def test_types_that_the_program_allows_stay_allowed() -> None:
    with torch.serialization.safe_globals([uuid.UUID, Own]):
        with allowed_types():
            assert uuid.UUID in torch.serialization.get_safe_globals()
            with allowed_types():
                pass
            assert slice in torch.serialization.get_safe_globals()
        known = torch.serialization.get_safe_globals()
        assert uuid.UUID in known
        assert Own in known
        assert slice not in known


# -- the store ---------------------------------------------------------------------------------------------------------


class _CountingStore:
    """The job's store, with the number of calls."""

    def __init__(self, store: Any) -> None:
        self._store, self.calls = store, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._store, name)


def _calls_of_the_store(rows: int, late: float) -> int:
    """Count this rank's calls in a meeting in which all ranks post so many rows, and the last comes late."""
    store = _CountingStore(default_store())
    meeting = Meeting.begin("a test", "")
    meeting.store = cast("dist.Store", store)
    content = [{"name": f"layers.{row}.weight"} for row in range(rows)]
    if dist.get_rank():
        time.sleep(late)
    found = meeting.decided_from("rows", content, lambda posted: sum(map(len, posted)))
    assert found == rows * dist.get_world_size()
    meeting.end()
    return store.calls


def test_calls_of_the_store_depend_neither_on_parameters_nor_on_late_ranks(world: Worlds) -> None:
    few = world(2).run(_calls_of_the_store, 1, 0.0)
    assert few == world(2).run(_calls_of_the_store, 5000, 0.0) == world(2).run(_calls_of_the_store, 1, 0.1)


def test_ranks_that_post_nothing_are_named() -> None:
    meeting = Meeting(dist.HashStore(), "token", 0, range(4), "a test", timedelta(seconds=1), CheckpointError)
    meeting._write("rows/2", "7")
    with pytest.raises(CheckpointError, match=r"^a test: ranks \[1, 3\] did not come within 0:00:00\."):
        meeting.decided_from("rows", "5", sum)


def _keys() -> int:
    dist.barrier()
    number = int(default_store().num_keys())  # type: ignore[no-untyped-call]
    dist.barrier()
    return number


KEYS_OF_A_FAILURE = ("post", "withdrawn", "count", "read")
"""The record of a failure, which ranks that begin to listen later skip (``health/first_cause.py``).

A rank that skips it also leaves its key ``wake``.
"""


def _keys_after(kind: Kind, folder: Path) -> dict[str, set[int]]:
    """Return the numbers of keys in the store after each of several saves and loads, from the second on."""
    found: dict[str, set[int]] = {}
    last = dist.get_world_size() - 1

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def failing_save(tag: str) -> None:
        with (
            mock.patch.object(folders, "flush", full if dist.get_rank() == last else folders.flush),
            pytest.raises(CheckpointError),
        ):
            checkpoint.save(here.engine, folder, tag)

    def failing_load(_: str) -> None:
        with pytest.raises(CheckpointError):
            checkpoint.load(here.engine, folder, "absent")

    with job(kind) as here:
        for name, work in {
            "save": lambda tag: checkpoint.save(here.engine, folder, tag),
            "load": lambda _: checkpoint.load(here.engine, folder),
            "background": lambda tag: checkpoint.save_in_background(here.engine, folder, tag).finish(),
            "failing save": failing_save,
            "failing load": failing_load,
        }.items():
            for number in range(4):
                work(f"{name.replace(' ', '_')}{number}")
                if number:
                    found.setdefault(name, set()).add(_keys())
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_saves_and_loads_leave_no_keys_in_the_store(world: Worlds, ranks: int, tmp_path: Path) -> None:
    for found in world(ranks).run(_keys_after, Kind(f"data={ranks}", zero=1), tmp_path):
        growth = {name: max(numbers) - min(numbers) for name, numbers in found.items()}
        of_failures = 2 * (len(KEYS_OF_A_FAILURE) + ranks) if ranks > 1 else 0
        assert all(more <= (of_failures if "failing" in name else 0) for name, more in growth.items()), found


# -- wrong arguments, and disks that fail ------------------------------------------------------------------------------


def _wrong_arguments(folder: Path) -> None:
    with job(ONE) as here:
        checkpoint.save(here.engine, folder, "step1")
        for given in (None, 7, b"x", ["a"]):
            for call in (checkpoint.save, checkpoint.save_in_background, checkpoint.load, checkpoint.load_torch):
                with pytest.raises(TypeError, match=r"folder=.* is not a path: give a str or a pathlib\.Path"):
                    call(here.engine, given)
        for given in (b"x", ["a"], True):
            for call in (checkpoint.save, checkpoint.load):
                with pytest.raises(TypeError, match=r"tag=.* is neither a text nor a number"):
                    call(here.engine, folder, given)
        for options, said in (
            ({"tag": "a/b"}, "a tag is the name of a folder"),
            ({"keep_last": 0}, "keep_last=0: give a number of checkpoints >= 1"),
            ({"keep_last": True}, "keep_last=True"),
        ):
            with pytest.raises(ValueError, match=said):
                checkpoint.save(here.engine, folder, **options)
        for path in (folder / "latest", folder / "latest/below"):
            with pytest.raises(CheckpointError, match="is a file, or below one: give a folder of checkpoints"):
                checkpoint.save(here.engine, path)
        assert sorted(path.name for path in folder.iterdir() if path.suffix != ".py") == ["latest", "step1"]


def test_wrong_folders_and_tags_are_refused(world: Worlds, tmp_path: Path) -> None:
    world(1).run(_wrong_arguments, tmp_path)


CALLS = {
    "fsync": os,
    "write_text": Path,
    "replace": Path,
    "rename": Path,
    "mkdir": Path,
    "open": os,
    "scandir": os,
    "stat": Path,
}
"""Functions of the operating system that a save calls, by their owners."""


def _failing_disk(folder: Path, name: str) -> int:
    """Let each call of a function fail once while a checkpoint is saved; return the number of calls."""
    with job(ONE) as here:
        checkpoint.save(here.engine, folder, "step1")
        before = sorted(path.name for path in folder.iterdir())
        for failing in range(100):
            calls = _Failing(getattr(CALLS[name], name), failing)
            said = ""
            with mock.patch.object(CALLS[name], name, calls):
                try:
                    checkpoint.save(here.engine, folder, "step2", keep_last=3)
                except CheckpointError as error:
                    said = str(error)
            latest = named_latest(folder)
            assert latest is not None
            assert look_at(folder, latest, digests=True).is_whole, said
            assert look_at(folder, "step1", digests=True).is_whole, said
            assert said or look_at(folder, "step2", digests=True).is_whole
            assert not said or any(one in said for one in ("Input/output error", "is missing", "errno 5")), said
            checkpoint.save(here.engine, folder, "step1")
            rmtree(folder / "step2", ignore_errors=True)
            assert sorted(path.name for path in folder.iterdir()) == before, said
            if calls.count <= failing:
                return failing
    raise AssertionError("there are more calls")


class _Failing:
    """A function of which one call fails."""

    def __init__(self, real: Callable[..., Any], failing: int) -> None:
        self.real, self.failing, self.count = real, failing, 0

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return self if instance is None else partial(self, instance)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        if self.count == self.failing + 1:
            path = arguments[0] if arguments and isinstance(arguments[0], (str, os.PathLike)) else ""
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
        return self.real(*arguments, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("name", mark_exhaustive(CALLS, default=lambda _, name: name in ("replace", "write_text")))
def test_every_failing_call_leaves_a_complete_checkpoint(world: Worlds, tmp_path: Path, name: str) -> None:
    assert min(world(1).run(_failing_disk, tmp_path, name)) > 0, "a call has failed"
