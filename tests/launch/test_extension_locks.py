"""A lock of a killed build is removed; a lock that any process holds is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from ds_topo.launch import build_locks
from ds_topo.launch.build_locks import OLD_SECONDS, remove_abandoned_locks

linux = pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
BUILD = "from torch.utils.file_baton import FileBaton; import sys, time; assert FileBaton(sys.argv[1]).try_acquire(); "
OTHER_PROCESSES = ["unshare", "--pid", "--mount", "--fork", "--kill-child=KILL", "--mount-proc"]
"""Start a process in its own namespaces, as in a container."""


@linux
def test_the_lock_of_a_killed_build_is_removed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    subprocess.run([sys.executable, "-c", f"{BUILD} import os; os.kill(os.getpid(), 9)", str(lock)], check=False)
    assert lock.exists()
    with pytest.warns(RuntimeWarning, match=r"removed .*lock: a process that was killed while it compiled"):
        assert remove_abandoned_locks([tmp_path]) == [lock]
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    baton.release()


@pytest.mark.thorough
@linux
@pytest.mark.parametrize("namespaces", [[], OTHER_PROCESSES])
def test_held_lock_is_kept(namespaces: list[str], tmp_path: Path) -> None:
    if namespaces and os.geteuid() != 0:
        pytest.skip("namespaces need root")
    lock = tmp_path / "lock"
    script = f"{BUILD} print('held', flush=True); time.sleep(60)"
    command = [*namespaces, sys.executable, "-c", script, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "held\n"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert remove_abandoned_locks([tmp_path]) == []
        assert lock.exists()
        builder.kill()


@linux
def test_lock_that_its_builder_is_about_to_remove_is_left_to_it(tmp_path: Path) -> None:
    """torch closes a lock before it removes it, and fails if the file is gone by then."""
    lock = tmp_path / "lock"
    script = (
        "import os, sys, time; os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)); print('closed', flush=True); "
        "time.sleep(0.3); os.remove(sys.argv[1])"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "closed\n"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert remove_abandoned_locks([tmp_path]) == []
    assert builder.returncode == 0


@linux
def test_concurrent_ranks_remove_a_lock_once(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    look = "from ds_topo.launch.build_locks import remove_abandoned_locks; import sys; "
    script = f"{look} print(len(remove_abandoned_locks(sys.argv[1:])))"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    assert sum(int(rank.communicate(timeout=60)[0]) for rank in ranks) == 1


def test_old_lock_of_unknown_state_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_locks, "_remove_unless_held", lambda _: None)
    lock = tmp_path / "lock"
    lock.touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert remove_abandoned_locks([tmp_path]) == []
    long_ago = time.time() - 2 * OLD_SECONDS
    os.utime(lock, (long_ago, long_ago))
    with pytest.warns(RuntimeWarning, match="is 20 minutes old"):
        assert remove_abandoned_locks([tmp_path]) == []
    assert lock.exists()


@linux
@pytest.mark.parametrize("waits", [True, False])
def test_default_folders_are_cleared_only_for_a_torch_that_waits(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.14 locks the file instead, and never removes it: it is there at every start."""
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton, raising=False)
    if not waits:
        monkeypatch.delattr(cpp_extension, "FileBaton")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert remove_abandoned_locks() == [lock] * waits
    assert (len(warned), lock.exists()) == (int(waits), not waits)


@pytest.mark.skipif(Version(torch.__version__) < Version("2.14"), reason="torch waits for the file")
def test_file_that_torch_leaves_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    with cpp_extension.FileLock(folder / "lock"):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert remove_abandoned_locks() == []
    assert (folder / "lock").exists()


def test_torchs_own_folder_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton, raising=False)  # torch 2.14 does not wait for locks
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "fused_adam").mkdir()
    (tmp_path / "fused_adam" / "lock").touch()
    (tmp_path / "cpu_adam").mkdir()
    assert build_locks._build_folders() == [tmp_path / "fused_adam"]
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build = tmp_path / "torch_extensions" / "py311_cpu" / "cpu_adam"
    build.mkdir(parents=True)
    (build / "lock").touch()
    assert build_locks._build_folders() == [build]
