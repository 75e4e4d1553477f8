"""A folder may hold anything, and other jobs may change it: nothing hangs, and one bad entry hides no checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_topo import checkpoint
from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint.folder import (
    candidates,
    check_folder,
    check_tag,
    checkpoints_in,
    draft_of,
    entries_in,
    hold,
    is_held,
    look_at,
    named_latest,
    other_kind,
    problem_of_latest,
    remove_old,
    replace_text,
    tags_in,
    tidy,
)
from ds_topo.cli import main
from ds_topo.errors import CheckpointError, MissingCheckpointError
from tests.checkpoint.handmade import make

FILE = "mp_rank_00_model_states.pt"


def _device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, which never ends


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": lambda path: os.mkfifo(path),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "device": _device,
    "folder": Path.mkdir,
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
}
PLACES = ("step2/manifest.json", f"step2/{FILE}", "step2/extra.pt", "latest", "step2", "step3", "step2/sub")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two complete checkpoints, of which ``latest`` names the second."""
    for step in (1, 2):
        make(tmp_path, f"step{step}", step)
    (tmp_path / "latest").write_text("step2")
    return tmp_path


def _first_whole(folder: Path) -> str:
    return next(one.tag for one in candidates(folder) if one.is_whole)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_anything_in_the_place_of_a_file_neither_blocks_nor_hides_others(
    folder: Path, kind: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / place
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    try:
        KINDS[kind](path)
    except PermissionError:
        pytest.skip("only root makes devices")
    is_needed = place in ("step2/manifest.json", f"step2/{FILE}", "step2")
    assert _first_whole(folder) == ("step1" if is_needed else "step2")
    found = {one.tag: one.is_whole for one in checkpoints_in(folder, digests=True)}
    assert found.get("step2", False) != is_needed
    if kind == "pipe":
        assert main(["checkpoint", str(folder), "--verify"]) == int("step2" in found and is_needed)
        assert ("DAMAGED" in capsys.readouterr().out) == ("step2" in found and is_needed)
    draft_of(folder, "step4").mkdir()
    tidy(folder)
    make(folder, "step5", 5)
    assert "step1" in remove_old(folder, 1, "step5")


@pytest.mark.parametrize("name", ["stat", "scandir", "listdir"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOENT])
def test_unreadable_checkpoint_does_not_hide_older_ones(
    folder: Path, name: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, name)

    def failing(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and "step2" in os.fspath(path):
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, name, failing)
    monkeypatch.setattr(Path, "stat", lambda path, **options: os.stat(path, **options))
    found = {one.tag: one for one in candidates(folder)}
    assert found["step1"].is_whole
    if name != "listdir":
        assert not found["step2"].is_whole
    if code != errno.ENOENT and name == "stat":
        assert found["step2"].problems == (os.strerror(code),)


def test_checkpoint_that_vanishes_meanwhile_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.listdir

    def removing(path: Any) -> list[str]:
        found = real(path)
        if Path(path) == folder:
            shutil.rmtree(folder / "step2", ignore_errors=True)
        return found

    monkeypatch.setattr(os, "listdir", removing)
    assert tags_in(folder) == ["step1"]
    assert _first_whole(folder) == "step1"


def test_unreadable_folder_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "listdir", failing)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
        checkpoints_in(folder)


def test_entries_in_reports_subfolders_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    real = os.scandir

    def failing(path: Any) -> Any:
        if os.fspath(path).endswith("sub"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path)

    monkeypatch.setattr(os, "scandir", failing)
    assert entries_in(tmp_path) == {"sub": "cannot be read: Input/output error"}


def test_impossible_number_in_a_name_is_damage(folder: Path) -> None:
    (folder / "own").mkdir()
    for number in ("0", "9" * 30):
        (folder / f"own/zero_pp_rank_{number}_mp_rank_00_optim_states.pt").write_bytes(b"x")
    (folder / "own" / FILE).write_bytes(b"x")
    assert len(look_at(folder, "own").problems) == 1000
    os.utime(folder / "own", (1 << 40, 1 << 40))
    assert [one.tag for one in checkpoints_in(folder)] == ["step2", "step1", "own"]


# -- latest, and clocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no file 'latest'"),
        ("step9", "'latest' names 'step9', which does not exist"),
        ("no//nse nse\n../x", r"'latest' names no checkpoint ('no//nse nse\n../x')"),
        ("\x1b[31mstep2", r"'latest' names no checkpoint ('\x1b[31mstep2')"),
        (b"\xff\xfe", "'latest' names no checkpoint (no text)"),
        ("x" * 5000, "'latest' names no checkpoint (longer than 4,096 bytes)"),
        ("..", "'latest' names no checkpoint ('..')"),
        ("", "'latest' names no checkpoint ('')"),
    ],
    ids=["absent", "missing", "nonsense", "escape", "bytes", "long", "dots", "empty"],
)
def test_latest_without_a_checkpoint_is_explained(
    folder: Path, content: str | bytes | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is None:
        (folder / "latest").unlink()
    else:
        (folder / "latest").write_bytes(content.encode() if isinstance(content, str) else content)
    assert named_latest(folder) in (None, "step9")
    assert problem_of_latest(folder) == said
    assert main(["checkpoint", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{said}."


def test_clock_that_jumps_back_does_not_change_the_newest(tmp_path: Path) -> None:
    for step, time in ((1, 3), (2, 2), (3, 1)):
        make(tmp_path, f"step{step}", step, f"202{time}-01-01T00:00:00+00:00")
        os.utime(tmp_path / f"step{step}", (time, time))
    assert [one.tag for one in checkpoints_in(tmp_path)] == ["step3", "step2", "step1"]
    assert remove_old(tmp_path, 1, "step3") == ["step2", "step1"]


# -- names that could act on a terminal --------------------------------------------------------------------------------


def test_names_from_the_disk_cannot_control_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder, "step3\x1b]0;title\x07", 3)
    make(folder, "[b]step4[red]", 4)
    (folder / "own").mkdir()
    (folder / f"own/{FILE}").write_bytes(b"x")
    (folder / "own/\x1b[31m_states.pt").write_bytes(b"")
    assert main(["checkpoint", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert r"step3\x1b]0;title\x07: its name has characters that cannot be printed: rename the folder" in shown
    assert "[b]step4[red]" in shown
    assert r"own: \x1b[31m_states.pt is empty" in shown
    assert main(["checkpoint", str(folder / "[b]step4[red]")]) == 0
    assert "[b]step4[red]: complete" in capsys.readouterr().out
    (folder / "latest").unlink()
    assert _first_whole(folder) == "[b]step4[red]"
    assert str(CheckpointError("step\x1b[31m\nnext")) == "step\\x1b[31m\nnext"
    with pytest.raises(ValueError, match="without control characters"):
        check_tag("step\x1b[31m")


# -- wrong types -------------------------------------------------------------------------------------------------------

WRONG = (None, 7, b"x", ["a"], {"a": 1})


@pytest.mark.parametrize("given", WRONG, ids=repr)
def test_wrong_types_are_named(folder: Path, given: Any) -> None:
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("folder=", lambda: checkpoints_in(given)),
        ("folder=", lambda: look_at(given, "step1")),
        ("folder=", lambda: checkpoint.to_hugging_face(look_at(folder, "step1"), given)),
        ("path=", lambda: checkpoint.to_single_file(look_at(folder, "step1"), given)),
        ("checkpoint=", lambda: checkpoint.to_single_file(given, folder / "weights.pt")),
        ("checkpoint=", lambda: checkpoint.to_hugging_face(given, folder / "new")),
    ]
    if given != 7:
        calls += [("tag=", lambda: look_at(folder, given)), ("tag=", lambda: check_tag(given))]
    for said, call in calls:
        with pytest.raises(TypeError, match=said):
            call()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "is not a path: give one"),
        (" ", "is not a path: give one"),
        ("a\0b", "is not a path: give one"),
        ("s3://bucket/run", "is a URL: give a path of a file system that all hosts share"),
        (Path("s3://bucket/run"), "is a URL: give a path"),
        ("~/runs", "begins with a home folder in the form that only shells replace: give '/"),
    ],
    ids=repr,
)
def test_folders_that_are_no_paths_are_refused(
    folder: Path, given: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for call in (check_folder, checkpoints_in):
        with pytest.raises(ValueError, match=said):
            call(given)
    if str(given).strip():
        assert main(["checkpoint", str(given)]) == 2
        assert main(["export", str(given), str(folder / "new")]) == 2
        assert main(["export", str(folder), str(given)]) == 2
        assert capsys.readouterr().err.count(said) == 3


def test_empty_tag_and_absent_checkpoint_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="tag='' is empty"):
        look_at(folder, "")
    with pytest.raises(MissingCheckpointError, match=r"no checkpoint 'step9' in .*: there are \['step1', 'step2'\]"):
        checkpoint.to_single_file(look_at(folder, "step9"), folder / "new")


@pytest.mark.parametrize("tag", ["a" * 300, "a/b", "..", "a\0"])
def test_tags_that_name_no_folder_are_problems(folder: Path, tag: str) -> None:
    assert not look_at(folder, tag).is_whole


# -- several jobs ------------------------------------------------------------------------------------------------------

_OTHER_JOB = """
import sys
from pathlib import Path
from ds_topo.checkpoint.folder import hold
held = hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_draft_of_a_running_job_is_kept_until_it_ends(tmp_path: Path) -> None:
    draft = draft_of(tmp_path, "step1")
    draft.mkdir()
    command = [sys.executable, "-c", _OTHER_JOB, str(draft)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert is_held(draft)
        with pytest.raises(BlockingIOError):
            hold(draft)
        tidy(tmp_path)
        assert draft.is_dir()
        other.kill()
    assert not is_held(draft)
    tidy(tmp_path)
    assert not draft.exists()


def test_text_is_replaced_although_another_job_tidies_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = folders.flush, [2]

    def tidied(path: Path) -> None:
        real(path)
        if path != tmp_path and left[0]:
            left[0] -= 1
            tidy(tmp_path)

    monkeypatch.setattr(folders, "flush", tidied)
    replace_text(tmp_path / "latest", "step1")
    assert (tmp_path / "latest").read_text() == "step1"
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_json_of_odd_names_is_complete(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder, "step3\x1b[31m", 3)
    assert main(["checkpoint", str(folder), "--json"]) == 1
    assert [one["tag"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [
        "step3\x1b[31m",
        "step2",
        "step1",
    ]


def test_other_kind_names_the_call_that_loads_weights(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    file.touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").touch()
    assert other_kind(file).endswith(f"or into the engine, by load(engine, {str(file)!r})")
    assert other_kind(tmp_path).endswith(f"or into the engine, by load(engine, {str(file)!r})")
    assert other_kind(tmp_path / "model").endswith(f"by load(engine, {str(tmp_path / 'model')!r})")
    assert other_kind(tmp_path / "none") == ""
