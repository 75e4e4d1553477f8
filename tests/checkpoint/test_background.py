"""A save in the background has the state at its start, although training continues."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ds_topo import checkpoint
from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint import saving
from ds_topo.checkpoint.folder import look_at, named_latest
from ds_topo.errors import CheckpointError
from tests.checkpoint.jobs import KINDS, Kind, job
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


def _save(kind: Kind, folder: Path) -> tuple[dict[str, str], list[float]]:
    """Return the state at the start of the save, and losses after it. Files are flushed only after further steps."""
    may_write = threading.Event()
    flush = folders.flush

    def waiting_flush(path: Path) -> None:
        assert path.is_dir() or may_write.wait(60)
        flush(path)

    with job(kind) as here, mock.patch.object(saving, "_LARGE", 0):
        here.train(range(1))
        checkpoint.save_in_background(here.engine, folder, "one").finish()  # the next save reuses its memory
        here.train(range(1, 2))
        state = here.state()
        with mock.patch.object(folders, "flush", waiting_flush):
            started = checkpoint.save_in_background(here.engine, folder, "two", {"step": 2})
            assert not started.is_written
            losses = here.train(range(2, 4))
            assert named_latest(folder) == "one"
            may_write.set()
            assert started.finish() == started.finish() == folder / "two"
        assert started.is_written
        assert look_at(folder, "two", digests=True).is_whole
        return state, losses


def _load(kind: Kind, folder: Path) -> tuple[dict[str, str], list[float]]:
    with job(kind) as here:
        checkpoint.load(here.engine, folder, "two")
        return here.state(), here.train(range(2, 4))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [*KINDS.values(), Kind("data=2", zero=2, reduced=True)], ids=str)
def test_background_save_has_state_at_its_start(world: Worlds, other_world: Worlds, kind: Kind, tmp_path: Path) -> None:
    assert world(2).run(_save, kind, tmp_path) == other_world(2).run(_load, kind, tmp_path)


def _next_one_finishes(folder: Path) -> None:
    with job(KINDS["zero1"]) as here:
        here.train(range(1))
        checkpoint.save_in_background(here.engine, folder, "one", {"step": 1})
        checkpoint.save_in_background(here.engine, folder, "two", {"step": 1})
        assert named_latest(folder) == "one"
        checkpoint.load(here.engine, folder)
        assert named_latest(folder) == "two"


def test_next_save_or_load_finishes_background_save(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_next_one_finishes, tmp_path)


def _full(folder: Path) -> tuple[str, list[str]]:
    said: list[str] = []

    def full(path: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with job(KINDS["zero1"]) as here:
        here.train(range(1))
        with mock.patch.object(folders, "flush", full if dist.get_rank() else folders.flush):
            with mock.patch.object(saving, "tell", said.append):
                started = checkpoint.save_in_background(here.engine, folder, "one")
                wait(started._files._started.values())  # while the program trains
            with pytest.raises(CheckpointError) as raised:
                started.finish()
        with pytest.raises(CheckpointError, match="was not saved"):
            started.finish()
        dist.barrier()
        assert [path.name for path in folder.iterdir()] == []
        return str(raised.value), said


def test_finish_raises_if_disk_was_full(world: Worlds, tmp_path: Path) -> None:
    (first, others), (second, [said]) = world(2).run(_full, tmp_path)
    assert others == []
    assert "No space left on device" in said, "before finish()"
    assert first == second
    assert "ranks [1] on" in first
    assert "No space left on device" in first


def _leave_unfinished(folder: Path) -> list[str]:
    said: list[str] = []
    with job(Kind("data=2")) as here, mock.patch.object(saving, "tell", said.append):
        started = checkpoint.save_in_background(here.engine, folder, "one")
        saving.name_what_is_unfinished()  # as at the end of the process
        started.finish()
        saving.name_what_is_unfinished()
    return said


def test_end_of_the_program_names_a_save_without_finish(world: Worlds, tmp_path: Path) -> None:
    (text,), others = world(2).run(_leave_unfinished, tmp_path)
    assert f"without finish() of the checkpoint 'one', which save_in_background was writing into {tmp_path}" in text
    assert others == []
