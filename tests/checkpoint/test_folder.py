"""A folder has a whole checkpoint at every moment, and says which one is damaged and why."""

from __future__ import annotations

import contextlib
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_topo.checkpoint_files import folder as folders
from ds_topo.checkpoint_files.durable import discard, exchange, replace_text
from ds_topo.checkpoint_files.folder import (
    candidates,
    check_tag,
    checkpoints_in,
    draft_of,
    look_at,
    put_in_place,
    remove_old,
    take_back_replaced,
    tidy,
)
from ds_topo.checkpoint_files.wholeness import Places
from tests.checkpoint.made import FILES, make


class Killed(BaseException):
    """In the middle of something."""


def _whole(folder: Path, *, digests: bool = True) -> dict[str, int]:
    found = checkpoints_in(folder, digests=digests)
    return {one.tag: one.manifest.step for one in found if one.is_whole and one.manifest}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "mp_rank_00_model_states.pt").unlink(), "mp_rank_00_model_states.pt is missing"),
        (
            lambda path: (path / "mp_rank_01_model_states.pt").write_bytes(b"mod"),
            "mp_rank_01_model_states.pt has 3 bytes instead of 9",
        ),
        (lambda path: (path / "manifest.json").write_text("{}"), 'manifest.json: "format" must be'),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"), "can't decode"),
    ],
    ids=["missing", "cut off", "manifest", "not text"],
)
def test_damage_is_named(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    make(tmp_path, "last", 7)
    assert look_at(tmp_path, "last").is_whole
    damage(tmp_path / "last")
    assert said in "; ".join(look_at(tmp_path, "last").problems)


def test_a_changed_byte_is_found_by_digests_alone(tmp_path: Path) -> None:
    make(tmp_path, "last", 7)
    (tmp_path / "last/mp_rank_00_model_states.pt").write_bytes(b"model 1")
    assert look_at(tmp_path, "last").is_whole
    (problem,) = look_at(tmp_path, "last", digests=True).problems
    assert problem.startswith("mp_rank_00_model_states.pt is not as it was written")


def test_what_latest_names_comes_first_then_the_newest(tmp_path: Path) -> None:
    for step in (3, 12, 6):
        make(tmp_path, f"step{step}", step)
    (tmp_path / "latest").write_text("step6\n")
    assert [one.tag for one in candidates(tmp_path)] == ["step6", "step12", "step3"]
    (tmp_path / "latest").write_text("gone")
    assert [(one.tag, one.is_whole) for one in candidates(tmp_path)][:2] == [("gone", False), ("step12", True)]


@pytest.mark.parametrize("tag", ["", ".hidden", "a/b", "..", " a", "a\0"])
def test_a_tag_is_the_name_of_a_folder(tag: str) -> None:
    with pytest.raises(ValueError, match="a tag is the name of a folder"):
        check_tag(tag)


# -- killed in the middle ----------------------------------------------------------------------------------------------


def _kill_at(step: int, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the so-many-th change of the folder not happen."""
    left = [step]

    def counted(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def change(*arguments: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, change)

    counted(Path, "rename")
    counted(Path, "replace")
    counted(shutil, "rmtree")


@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchanged", "one after the other"])
@pytest.mark.parametrize("step", range(8))
def test_a_tag_is_replaced_and_never_gone(
    step: int, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "same", 1)
    make(draft_of(tmp_path, "same"), "same", 2)
    change_places = exchange if can_exchange else lambda *_: False
    with monkeypatch.context() as patch:
        _kill_at(step, patch)
        try:
            put_in_place(draft_of(tmp_path, "same") / "same", tmp_path, "same", change_places)
            discard(draft_of(tmp_path, "same"))
        except Killed:
            pass
        else:
            assert step >= 3, "something was changed"
    take_back_replaced(tmp_path)
    assert list(_whole(tmp_path)) == ["same"], "before anything is tidied up"
    tidy(tmp_path)
    assert list(_whole(tmp_path)) == ["same"]
    assert [path.name for path in tmp_path.iterdir()] == ["same"]


def test_two_folders_change_places(tmp_path: Path) -> None:
    make(tmp_path, "one", 1)
    make(tmp_path, "two", 2)
    if not exchange(tmp_path / "one", tmp_path / "two"):
        pytest.skip("this file system cannot")
    assert _whole(tmp_path) == {"one": 2, "two": 1}


@pytest.mark.parametrize("step", range(6))
def test_old_ones_go_as_a_whole(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 5):
        make(tmp_path, f"step{number}", number)
    with monkeypatch.context() as patch:
        _kill_at(step, patch)
        with contextlib.suppress(Killed):
            remove_old(tmp_path, 2, "step4")
    left = {one.tag: one.is_whole for one in checkpoints_in(tmp_path)}
    assert set(left.values()) == {True}, "none of them is half gone"
    assert {"step3", "step4"} <= left.keys()
    tidy(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == left.keys()


def test_damaged_ones_do_not_count_among_those_kept(tmp_path: Path) -> None:
    for number in range(1, 6):
        make(tmp_path, f"step{number}", number)
    (tmp_path / "step4/mp_rank_00_model_states.pt").unlink()
    (tmp_path / "step1/mp_rank_00_model_states.pt").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mp_rank_00_model_states.pt").write_bytes(b"of DeepSpeed alone")
    assert sorted(remove_old(tmp_path, 2, "step5")) == ["step1", "step2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "step3", "step4", "step5"]


def test_the_newest_is_the_one_just_saved(tmp_path: Path) -> None:
    for number in (5, 9):
        make(tmp_path, f"step{number}", number)
    make(tmp_path, "again", 2)
    assert sorted(remove_old(tmp_path, 1, "again")) == ["step5", "step9"]


def test_latest_is_replaced_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_text(tmp_path / "latest", "one")
    with monkeypatch.context() as patch:
        _kill_at(0, patch)
        with pytest.raises(Killed):
            replace_text(tmp_path / "latest", "two")
    assert folders.named_latest(tmp_path) == "one"
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


# -- without a manifest ------------------------------------------------------------------------------------------------


def _archive(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"x" * 1000)


@pytest.fixture
def of_deepspeed(tmp_path: Path) -> Path:
    for model in (0, 1):
        _archive(tmp_path / f"last/mp_rank_{model:02d}_model_states.pt")
        for replica in (0, 1):
            _archive(tmp_path / f"last/zero_pp_rank_{replica}_mp_rank_{model:02d}_optim_states.pt")
    return tmp_path / "last"


def test_deepspeeds_own_seems_whole(of_deepspeed: Path) -> None:
    assert look_at(of_deepspeed.parent, "last", expected=Places(2, 2)).problems == ()


@pytest.mark.parametrize(
    "name",
    ["mp_rank_00_model_states.pt", *(f"zero_pp_rank_{i}_mp_rank_0{j}_optim_states.pt" for i in "01" for j in "01")],
)
def test_a_missing_file_of_deepspeeds_is_named(of_deepspeed: Path, name: str) -> None:
    (of_deepspeed / name).unlink()
    assert f"{name} is missing" in look_at(of_deepspeed.parent, "last", expected=Places(2, 2)).problems


def test_a_cut_off_file_of_deepspeeds_is_named(of_deepspeed: Path) -> None:
    file = of_deepspeed / "mp_rank_01_model_states.pt"
    file.write_bytes(file.read_bytes()[:-30])
    assert look_at(of_deepspeed.parent, "last").problems == ("mp_rank_01_model_states.pt is cut off or damaged",)
    file.write_bytes(b"")
    assert look_at(of_deepspeed.parent, "last").problems == ("mp_rank_01_model_states.pt is empty",)


def test_files_without_states_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    assert checkpoints_in(tmp_path) == []
    assert checkpoints_in(tmp_path / "absent") == []
    assert set(FILES) == {"mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"}
