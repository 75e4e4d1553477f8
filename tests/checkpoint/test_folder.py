"""Check, replace and remove the checkpoints of a folder; a kill at any moment leaves complete checkpoints."""

from __future__ import annotations

import contextlib
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint.folder import (
    candidates,
    check_tag,
    checkpoints_in,
    discard,
    draft_of,
    look_at,
    put_in_place,
    remove_old,
    replace_text,
    require_free,
    take_back_replaced,
    tidy,
    wrong_in_stock_checkpoint,
)
from ds_topo.errors import CheckpointError
from tests.checkpoint.handmade import LAYOUT, make


class Killed(BaseException):
    """Raised in the place of a kill during a change of the folder."""


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
    ids=["missing", "truncated", "manifest", "not text"],
)
def test_look_at_names_damaged_file(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    make(tmp_path, "last", 7)
    assert look_at(tmp_path, "last").is_whole
    damage(tmp_path / "last")
    assert said in "; ".join(look_at(tmp_path, "last").problems)


def test_candidates_start_with_latest_then_newest(tmp_path: Path) -> None:
    for step in (3, 12, 6):
        make(tmp_path, f"step{step}", step)
    (tmp_path / "latest").write_text("step6\n")
    assert [one.tag for one in candidates(tmp_path)] == ["step6", "step12", "step3"]
    (tmp_path / "latest").write_text("gone")
    assert [(one.tag, one.is_whole) for one in candidates(tmp_path)][:2] == [("gone", False), ("step12", True)]


@pytest.mark.parametrize("tag", [".hidden", "a/b", "..", " a", "a\0"])
def test_check_tag_refuses_names_that_are_no_folder(tag: str) -> None:
    with pytest.raises(ValueError, match="a tag is the name of a folder"):
        check_tag(tag)


# -- kills during changes ----------------------------------------------------------------------------------------------


def _kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise ``Killed`` in place of change number ``step`` of the folder and all later ones."""
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


@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("step", range(8))
def test_kill_during_replacement_leaves_one_complete_checkpoint(
    step: int, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "same", 1)
    make(draft_of(tmp_path, "same"), "same", 2)
    with monkeypatch.context() as patch:
        _kill_at(step, patch)
        if not can_exchange:
            patch.setattr(folders, "exchange", lambda *_: False)
        try:
            put_in_place(draft_of(tmp_path, "same") / "same", tmp_path, "same")
            discard(draft_of(tmp_path, "same"))
        except Killed:
            pass
        else:
            assert step >= 3, "something was changed"
            assert _whole(tmp_path) == {"same": 2}
    take_back_replaced(tmp_path)
    assert list(_whole(tmp_path)) == ["same"], "before anything is tidied up"
    tidy(tmp_path)
    assert list(_whole(tmp_path)) == ["same"]
    assert [path.name for path in tmp_path.iterdir()] == ["same"]


@pytest.mark.parametrize("step", range(6))
def test_kill_during_removal_leaves_no_partial_checkpoint(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 5):
        make(tmp_path, f"step{number}", number)
    with monkeypatch.context() as patch:
        _kill_at(step, patch)
        with contextlib.suppress(Killed):
            remove_old(tmp_path, 2, "step4")
    left = {one.tag: one.is_whole for one in checkpoints_in(tmp_path)}
    assert set(left.values()) == {True}, "none of them is removed in part"
    assert {"step3", "step4"} <= left.keys()
    tidy(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == left.keys()


def test_remove_old_counts_only_complete_checkpoints(tmp_path: Path) -> None:
    for number in range(1, 6):
        make(tmp_path, f"step{number}", number)
    (tmp_path / "step4/mp_rank_00_model_states.pt").unlink()
    (tmp_path / "step1/mp_rank_00_model_states.pt").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mp_rank_00_model_states.pt").write_bytes(b"saved by DeepSpeed alone")
    assert sorted(remove_old(tmp_path, 2, "step5")) == ["step1", "step2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "step3", "step4", "step5"]


def test_remove_old_keeps_damaged_ones_until_enough_are_complete(tmp_path: Path) -> None:
    for number in (1, 2):
        make(tmp_path, f"step{number}", number)
    (tmp_path / "step1/mp_rank_00_model_states.pt").unlink()
    assert remove_old(tmp_path, 2, "step2") == []
    make(tmp_path, "step3", 3)
    assert remove_old(tmp_path, 2, "step3") == ["step1"]


def test_remove_old_treats_last_saved_as_newest(tmp_path: Path) -> None:
    for number in (5, 9):
        make(tmp_path, f"step{number}", number)
    make(tmp_path, "again", 2)
    assert sorted(remove_old(tmp_path, 1, "again")) == ["step5", "step9"]


def test_latest_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def deepspeed_folder(tmp_path: Path) -> Path:
    for model in (0, 1):
        _archive(tmp_path / f"last/mp_rank_{model:02d}_model_states.pt")
        for replica in (0, 1):
            _archive(tmp_path / f"last/zero_pp_rank_{replica}_mp_rank_{model:02d}_optim_states.pt")
    return tmp_path / "last"


def test_complete_checkpoint_of_deepspeed_has_no_problems(deepspeed_folder: Path) -> None:
    assert wrong_in_stock_checkpoint(deepspeed_folder, LAYOUT) == []


@pytest.mark.parametrize(
    "name",
    ["mp_rank_00_model_states.pt", *(f"zero_pp_rank_{i}_mp_rank_0{j}_optim_states.pt" for i in "01" for j in "01")],
)
def test_missing_file_of_deepspeed_is_named(deepspeed_folder: Path, name: str) -> None:
    (deepspeed_folder / name).unlink()
    assert f"{name} is missing" in wrong_in_stock_checkpoint(deepspeed_folder, LAYOUT)


@pytest.mark.parametrize("name", ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "old_model_states.pt"])
def test_folder_without_weights_of_a_model_rank_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"some bytes")
    assert wrong_in_stock_checkpoint(tmp_path) == ["there is no *_model_states.pt of a model rank"]


def test_unreadable_file_of_deepspeed_is_named_once(deepspeed_folder: Path) -> None:
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    (deepspeed_folder / name).unlink()
    (deepspeed_folder / name).symlink_to("nothing")
    assert len(wrong_in_stock_checkpoint(deepspeed_folder, LAYOUT)) == 1


def test_truncated_file_of_deepspeed_is_named(deepspeed_folder: Path) -> None:
    file = deepspeed_folder / "mp_rank_01_model_states.pt"
    file.write_bytes(file.read_bytes()[:-30])
    (problem,) = look_at(deepspeed_folder.parent, "last").problems
    assert problem.startswith("mp_rank_01_model_states.pt is damaged, or was changed")
    file.write_bytes(b"")
    assert look_at(deepspeed_folder.parent, "last").problems == ("mp_rank_01_model_states.pt is empty",)


def test_folder_without_states_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    assert checkpoints_in(tmp_path) == []
    assert checkpoints_in(tmp_path / "absent") == []


def test_passed_over_checkpoints_are_named_if_they_still_exist(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, f"step{step}", step)
    for tag in ("step2", "step3"):
        (tmp_path / tag / "mp_rank_00_model_states.pt").unlink()
    chosen, *damaged = (look_at(tmp_path, tag) for tag in ("step1", "step3", "step2"))
    shutil.rmtree(tmp_path / "step2")
    said = folders.why_passed_over(tmp_path, chosen, damaged)
    assert "'step3' is damaged: mp_rank_00_model_states.pt is missing" in said
    assert "'step2'" not in said


def test_new_checkpoint_replaces_only_checkpoints_and_empty_folders(tmp_path: Path) -> None:
    make(tmp_path, "last", 7)
    (tmp_path / "empty").mkdir()
    (tmp_path / "book").mkdir()
    (tmp_path / "book/thesis.tex").write_text("years")
    for tag in ("new", "last", "empty"):
        require_free(tmp_path, tag)
    with pytest.raises(CheckpointError, match="book exists and is not a checkpoint"):
        require_free(tmp_path, "book")
