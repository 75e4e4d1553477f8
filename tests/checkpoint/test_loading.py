"""Loading takes a complete checkpoint of this model and layout, or raises the same error on every rank."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_topo import PipelineParallelGrid, checkpoint, initialize
from ds_topo.errors import (
    CheckpointError,
    CheckpointLayoutError,
    CheckpointModelError,
    DamagedCheckpointError,
    MissingCheckpointError,
    UnsafeCheckpointError,
)
from tests.checkpoint.jobs import KINDS, Kind, Own, job
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

KIND = KINDS["zero1"]
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def _save_three(kind: Kind, folder: Path) -> list[tuple[dict[str, str], list[float]]]:
    """Save after steps 1, 2 and 3; return the state at each, and the losses of the two steps after it."""
    states = []
    with job(kind) as here:
        losses = []
        for step in range(1, 4):
            losses += here.train(range(step - 1, step))
            checkpoint.save(here.engine, folder, f"step{step}", {"step": step})
            states.append(here.state())
        losses += here.train(range(3, 5))
    return [(state, losses[step : step + 2]) for step, state in enumerate(states, 1)]


Saved = Callable[[str], tuple[Path, list[list[tuple[dict[str, str], list[float]]]]]]


@pytest.fixture(scope="module")
def saved(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function for a fresh copy of a kind's folder, and the states and losses of every rank."""
    made: dict[str, tuple[Path, Any]] = {}

    def copy_of(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, world(2).run(_save_three, KINDS[name], folder)
        copy = tmp_path_factory.mktemp("copy") / "folder"
        shutil.copytree(made[name][0], copy)
        return copy, made[name][1]

    return copy_of


def _load(kind: Kind, folder: Path, options: dict[str, Any]) -> tuple[dict[str, str], list[float], int, list[str]]:
    """Return the state, losses of two steps, the step of the checkpoint, and warnings."""
    with job(kind) as here, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message="checkpoints in")
        _, state = checkpoint.load(here.engine, folder, **options)
        step = state["step"]
        return here.state(), here.train(range(step, step + 2)), step, [str(one.message) for one in caught]


def _change_byte(path: Path) -> None:
    """Change a byte in the middle, where tensors are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, r" has [\d,]+ bytes instead of [\d,]+"),
    "missing": (Path.unlink, " is missing"),
    "changed": (_change_byte, r" was changed after it was written \(its SHA-256 differs\)"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", KINDS)
def test_load_falls_back_to_newest_complete(
    world: Worlds, saved: Saved, name: str, damage: str, tmp_path: Path
) -> None:
    folder, states = saved(name)
    change, said = DAMAGES[damage]
    file = sorted((folder / "step3").glob("*_states.pt"))[-1]
    change(file)
    found = world(2).run(_load, KINDS[name], folder, {"verify": "digests"})
    for rank, (state, losses, step, told) in enumerate(found):
        assert (step, state, losses) == (2, *states[rank][1])
        assert len(told) == (1 if rank == 0 else 0), "one warning, on rank 0"
    assert re.search(
        rf"'step3' is damaged: {file.name}{said}\. Continuing from the newest complete one, 'step2'", found[0][3][0]
    )


def test_checkpoint_that_was_being_replaced_is_found(world: Worlds, saved: Saved) -> None:
    folder, _ = saved("zero1")
    (folder / "step3").rename(folder / ".step3.former")
    assert [(step, told) for _, _, step, told in world(2).run(_load, KIND, folder, {})] == [(3, []), (3, [])]


def test_newest_is_loaded_without_latest(world: Worlds, saved: Saved) -> None:
    folder, _ = saved("zero1")
    (folder / "latest").unlink()
    found = world(2).run(_load, KIND, folder, {})
    assert [step for _, _, step, _ in found] == [3, 3]
    assert "there is no file 'latest'. Continuing from" in found[0][3][0]


def _errors(kind: Kind, folder: Path, options: dict[str, Any], settings: dict[str, Any]) -> tuple[type[Exception], str]:
    with job(kind, **settings) as here, pytest.raises(CheckpointError) as raised:
        checkpoint.load(here.engine, folder, **options)
    return type(raised.value), str(raised.value)


def _raised(
    world: Worlds, folder: Path, kind: Kind = KIND, size: int = 2, options: Any = None, **settings: Any
) -> tuple[type[Exception], str]:
    """Return the error that every rank raises."""
    errors = world(size).run(_errors, kind, folder, options or {}, settings)
    assert len(set(errors)) == 1, "the same on all ranks"
    return errors[0]


def test_unknown_tag_is_refused_with_known_tags(world: Worlds, saved: Saved) -> None:
    folder, _ = saved("zero1")
    error, text = _raised(world, folder, options={"tag": "step9"})
    assert (error, text) == (
        MissingCheckpointError,
        f"no checkpoint 'step9' in {folder}: there are ['step1', 'step2', 'step3']",
    )


def test_damaged_tag_is_refused(world: Worlds, saved: Saved) -> None:
    folder, _ = saved("zero1")
    (folder / "step3" / OPTIMIZER).unlink()
    error, text = _raised(world, folder, options={"tag": "step3"})
    assert error is DamagedCheckpointError
    assert text.endswith(f"'step3' of {folder} is damaged: {OPTIMIZER} is missing; the newest complete one is 'step2'")


def test_error_names_all_damaged_checkpoints(world: Worlds, saved: Saved) -> None:
    folder, _ = saved("zero1")
    for step in (1, 2, 3):
        (folder / f"step{step}" / MODEL).unlink()
    error, text = _raised(world, folder)
    assert error is DamagedCheckpointError
    assert text.count(f"{MODEL} is missing") == 3


def test_other_model_is_refused_with_first_parameter(world: Worlds, saved: Saved) -> None:
    folder, _ = saved("zero1")
    error, text = _raised(world, folder, Kind("data=2", zero=1, width=16))
    assert error is CheckpointModelError
    assert "parameter '0.linear.weight' is [8, 8] in the checkpoint and [16, 16] in the model" in text
    error, text = _raised(world, folder, Kind("data=2", zero=1, width=16), options={"convert": False})
    assert error is CheckpointModelError
    assert "parameter '0.linear.weight' is [8, 8] in the checkpoint and [16, 16] in the model" in text


@pytest.mark.parametrize(
    ("kind", "size", "reason"),
    [
        (Kind("data=4", zero=1), 4, "2 replicas became 4: ZeRO writes one partition for each replica"),
        (Kind("data=2", zero=3), 2, "DeepSpeedZeroOptimizer at ZeRO 1 became DeepSpeedZeroOptimizer_Stage3 at ZeRO 3"),
        (Kind("pipe=2", zero=1, is_pipeline=True), 2, "pipe=1 became pipe=2"),
        (KINDS["moe"], 2, r"experts over (ranks, tensor parallel) [] became [(2, False)]"),
    ],
    ids=["replicas", "ZeRO", "pipe", "experts"],
)
def test_other_layout_is_refused_with_both(world: Worlds, saved: Saved, kind: Kind, size: int, reason: str) -> None:
    folder, _ = saved("zero1")
    error, text = _raised(world, folder, kind, size, {"convert": False})
    assert error is CheckpointLayoutError
    assert (
        f"'step3' of {folder} is of data=2 (2 ranks), ZeRO 1, fp32; this job is {kind.topology} ({size} ranks)" in text
    )
    assert reason in text
    assert "in any order of axes" in text
    assert "or load by name (convert=True)" in text


# -- any order ---------------------------------------------------------------------------------------------------------

ORDERS = ["pipe=2,data=2", "data=2,pipe=2"]
SLICED = ["model=2,data=2", "data=2,model=2"]


def _save_here(kind: Kind, folder: Path) -> dict[tuple[int, ...], tuple[dict[str, str], list[float]]]:
    with job(kind) as here:
        here.train(range(2))
        checkpoint.save(here.engine, folder, client_state={"step": 2})
        return {_place(here): (here.state(), here.train(range(2, 4)))}


def _load_here(kind: Kind, folder: Path) -> dict[tuple[int, ...], tuple[dict[str, str], list[float]]]:
    with job(kind) as here:
        _, state = checkpoint.load(here.engine, folder)
        assert state == {"step": 2}
        return {_place(here): (here.state(), here.train(range(2, 4)))}


def _place(here: Any) -> tuple[int, ...]:
    coordinate = here.grid.topology().get_coord(here.grid.global_rank)._asdict()
    return tuple(coordinate[axis] for axis in sorted(coordinate))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
@pytest.mark.parametrize(("before", "after"), [*permutations(ORDERS), *permutations(SLICED)], ids=str)
def test_other_order_of_axes_continues_bit_for_bit(
    world: Worlds, other_world: Worlds, before: str, after: str, zero: int, tmp_path: Path
) -> None:
    is_pipeline = "pipe" in before
    wanted = world(4).run(_save_here, Kind(before, zero, is_pipeline), tmp_path)
    found = other_world(4).run(_load_here, Kind(after, zero, is_pipeline), tmp_path)
    by_place = [{place: run for one in runs for place, run in one.items()} for runs in (wanted, found)]
    assert by_place[0] == by_place[1]
    assert len(by_place[0]) == 4


# -- safe reading ------------------------------------------------------------------------------------------------------


def _save_with(kind: Kind, folder: Path) -> None:
    with job(kind) as here:
        here.train(range(1))
        checkpoint.save(here.engine, folder, "own", {"step": 1, "own": Own(3)})


def _load_trusted(kind: Kind, folder: Path) -> tuple[int, int]:
    with job(kind) as here:
        trusted = checkpoint.load(here.engine, folder, trusted=True)[1]["own"].value
        with torch.serialization.safe_globals([Own]):
            allowed = here.engine.load_checkpoint(folder)[1]["own"].value
        return trusted, allowed


def test_types_that_may_run_code_are_refused(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_save_with, KIND, tmp_path)
    error, text = _raised(world, tmp_path)
    assert error is UnsafeCheckpointError
    refusal = f"the checkpoint 'own' of {tmp_path}: {MODEL} holds tests.checkpoint.jobs.Own, and building it may run"
    assert text.startswith(refusal), "before DeepSpeed has read any file"
    assert "torch.serialization.add_safe_globals([...])" in text
    assert world(2).run(_load_trusted, KIND, tmp_path) == [(3, 3)] * 2
    error, text = _raised(world, tmp_path, KINDS["zero3"], options={"trusted": True})
    assert (error, text[: len(refusal)]) == (UnsafeCheckpointError, refusal), "files that are read by name"


# -- DeepSpeed's own methods -------------------------------------------------------------------------------------------


def _by_methods(folder: Path) -> None:
    with job(KIND) as here, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert here.engine.load_checkpoint(folder) == (None, None), "as DeepSpeed returns it"
        here.train(range(2))
        here.engine.save_checkpoint(folder, client_state={"more": 1})
        here.engine.save_checkpoint(folder, tag="unnamed", save_latest=False)
        assert (folder / "latest").read_text() == "global_step2"
        path, state = here.engine.load_checkpoint(folder)
        assert path == str(folder / "global_step2" / MODEL)
        assert state == {"more": 1}
        before = torch.get_rng_state()
        assert here.engine.load_checkpoint(folder, "unnamed", load_module_only=True)[0] is not None
        assert torch.equal(torch.get_rng_state(), before), "the engine's method restores no random states"
        with pytest.raises(MissingCheckpointError):
            here.engine.load_checkpoint(folder, "absent")


def _load_near(folder: Path) -> list[str]:
    """Load from folders that do not exist; return the warnings."""
    with job(KIND) as here, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        here.engine.save_checkpoint(folder / "run1" / "checkpoints")
        for place in ("run1/checkpoint", "run2/checkpoints", "first/start", "run1/checkpoints-of-another-kind"):
            assert here.engine.load_checkpoint(folder / place) == (None, None), place
        with pytest.raises(MissingCheckpointError, match=r"did you mean '.*run1/checkpoints'\?"):
            checkpoint.load(here.engine, folder / "run1" / "checkpoint")
    return [str(each.message) for each in said if "did you mean" in str(each.message)]


def test_a_folder_with_checkpoints_and_a_similar_name_is_named(world: Worlds, tmp_path: Path) -> None:
    (text,), others = world(2).run(_load_near, tmp_path)
    assert f"run1/checkpoint and returns (None, None), so training begins anew: did you mean '{tmp_path}" in text
    assert not others


def test_methods_of_engine_keep_deepspeeds_arguments(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_by_methods, tmp_path)


def _load_with(micro: int, folder: Path, saves: bool) -> list[str]:
    start()
    config = settings(train_micro_batch_size_per_gpu=micro, zero_optimization={"stage": 1})
    with PipelineParallelGrid("data=2") as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine, *_ = initialize(model=nn.Linear(4, 4), mpu=grid, config=config)
        checkpoint.save(engine, folder) if saves else checkpoint.load(engine, folder)
        engine.destroy()
    return [str(each.message) for each in said if "train_batch_size" in str(each.message)]


def test_other_batch_size_is_named_once(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(_load_with, 2, tmp_path, True) == [[], []]
    (text,), others = world(2).run(_load_with, 1, tmp_path, False)
    assert "was saved with a train_batch_size of 8, but this engine's is 4" in text
    assert "config |= grid.batch_sizes(8, 1)" in text
    assert others == []
    assert world(2).run(_load_with, 2, tmp_path, False) == [[], []]
