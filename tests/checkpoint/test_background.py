"""A checkpoint that is written while training goes on has the state at which it was begun."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ds_topo import CheckpointError, checkpoint
from ds_topo.checkpoint_files.folder import look_at, named_latest
from ds_topo.engine.checkpoints import host_copies, written_files
from tests.checkpoint.jobs import KINDS, Kind, job
from tests.support.world import Worlds


def _save(kind: Kind, folder: Path) -> tuple[dict[str, str], list[float]]:
    """State when the save began, and losses after it; nothing is on the disk until the job has gone on."""
    may_write = threading.Event()
    flush = written_files.flush

    def waiting_flush(path: Path) -> None:
        assert may_write.wait(60)
        flush(path)

    with job(kind) as here, mock.patch.object(host_copies, "_LARGE", 0):
        here.train(range(1))
        checkpoint.save_in_background(here.engine, folder, "one").finish()  # its memory is used again
        here.train(range(1, 2))
        state = here.state()
        with mock.patch.object(written_files, "flush", waiting_flush):
            saving = checkpoint.save_in_background(here.engine, folder, "two", {"step": 2})
            assert not saving.is_written
            losses = here.train(range(2, 4))
            assert named_latest(folder) == "one"
            may_write.set()
            assert saving.finish() == saving.finish() == folder / "two"
        assert saving.is_written
        assert look_at(folder, "two", digests=True).is_whole
        return state, losses


def _load(kind: Kind, folder: Path) -> tuple[dict[str, str], list[float]]:
    with job(kind) as here:
        checkpoint.load(here.engine, folder, "two")
        return here.state(), here.train(range(2, 4))


@pytest.mark.parametrize("kind", [*KINDS.values(), Kind("data=2", zero=2, reduced=True)], ids=str)
def test_it_has_the_state_at_which_it_began(world: Worlds, other_world: Worlds, kind: Kind, tmp_path: Path) -> None:
    assert world(2).run(_save, kind, tmp_path) == other_world(2).run(_load, kind, tmp_path)


def _next_one_finishes(folder: Path) -> None:
    with job(KINDS["zero1"]) as here:
        here.train(range(1))
        checkpoint.save_in_background(here.engine, folder, "one", {"step": 1})
        checkpoint.save_in_background(here.engine, folder, "two", {"step": 1})
        assert named_latest(folder) == "one"
        checkpoint.load(here.engine, folder)
        assert named_latest(folder) == "two"


def test_the_next_call_finishes_it(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_next_one_finishes, tmp_path)


def _full(folder: Path) -> str:
    def full(path: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with job(KINDS["zero1"]) as here:
        here.train(range(1))
        with mock.patch.object(written_files, "flush", full if dist.get_rank() else written_files.flush):
            saving = checkpoint.save_in_background(here.engine, folder, "one")
            with pytest.raises(CheckpointError) as raised:
                saving.finish()
        with pytest.raises(CheckpointError, match="was not saved"):
            saving.finish()
        dist.barrier()
        assert [path.name for path in folder.iterdir()] == []
        return str(raised.value)


def test_a_full_disk_is_told_in_the_end(world: Worlds, tmp_path: Path) -> None:
    first, second = world(2).run(_full, tmp_path)
    assert first == second
    assert "ranks [1] on" in first
    assert "No space left on device" in first
