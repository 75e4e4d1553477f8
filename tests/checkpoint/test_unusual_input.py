"""Unusual input raises clear errors or is kept: used names, own types, another order of parameters, partial steps."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_topo import PipelineParallelGrid, checkpoint, initialize
from ds_topo.checkpoint.folder import LATEST, look_at, remove_old
from ds_topo.cli import main
from ds_topo.errors import CheckpointError, CheckpointLayoutError
from tests.checkpoint.handmade import make
from tests.checkpoint.jobs import ADAM, KINDS, Kind, job
from tests.support.small_engines import start
from tests.support.training import destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

KIND = KINDS["zero1"]


# -- names that are in use ---------------------------------------------------------------------------------------------


def _save_over(folder: Path) -> list[str]:
    said = []
    with job(KIND) as here:
        here.train(range(1))
        for tag in ("book", "history.json"):
            with pytest.raises(CheckpointError) as caught:
                checkpoint.save(here.engine, folder, tag)
            said.append(str(caught.value))
        with pytest.raises(ValueError, match="not 'latest', which is the file that names one"):
            checkpoint.save(here.engine, folder, "latest")
        checkpoint.save(here.engine, folder, "step1")
        checkpoint.save(here.engine, folder, "step1")
    return said


def test_save_replaces_only_checkpoints(world: Worlds, tmp_path: Path) -> None:
    (tmp_path / "book").mkdir()
    (tmp_path / "book/thesis.tex").write_text("years")
    (tmp_path / "history.json").write_text("{}")
    for said in world(2).run(_save_over, tmp_path):
        assert f"{tmp_path / 'book'} exists and is not a checkpoint" in said[0]
        assert "history.json exists and is not a checkpoint" in said[1]
    assert (tmp_path / "book/thesis.tex").read_text() == "years"
    assert (tmp_path / "history.json").read_text() == "{}"
    assert look_at(tmp_path, "step1").is_whole


def test_export_writes_over_no_folder(world: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world(2).run(_save_step, KIND, tmp_path)
    (tmp_path / "sources.pt").mkdir()
    assert main(["export", str(tmp_path), str(tmp_path / "sources.pt")]) == 2
    assert "sources.pt is a folder: give the file to write" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "step1"), str(tmp_path / "w.pt"), "--tag", "step2"]) == 2
    assert "is one checkpoint, 'step1'" in capsys.readouterr().err


def _save_step(kind: Kind, folder: Path) -> None:
    with job(kind) as here:
        here.train(range(1))
        checkpoint.save(here.engine, folder, "step1", {"step": 1})


def test_remove_old_keeps_latest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, f"step{step}", step)
    (tmp_path / LATEST).write_text("step1")
    assert remove_old(tmp_path, 1, "step3") == ["step2"]


# -- a program's own types ---------------------------------------------------------------------------------------------


def _save_objects(folder: Path) -> list[dict[str, Any]]:
    state = {
        "words": Counter("aab"),
        "loss": np.float64(1.5),
        "rows": np.arange(3),
        "average": {"weight": nn.Parameter(torch.ones(2)), "wide": torch.ones(1).expand(3)},
        "arguments": Namespace(mean=torch.ones(2), lr=0.1),
        "step": 1,
    }
    with job(KIND, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}}) as here:
        here.train(range(1))
        checkpoint.save(here.engine, folder, "at_once", state)
        checkpoint.save_in_background(here.engine, folder, "later", state).finish()
        return [checkpoint.load(here.engine, folder, tag)[1] for tag in ("at_once", "later")]


def test_numpy_values_and_counters_are_restored(world: Worlds, tmp_path: Path) -> None:
    for state in (state for states in world(2).run(_save_objects, tmp_path) for state in states):
        assert state["words"] == {"a": 2, "b": 1}
        assert state["loss"] == 1.5
        assert state["rows"].tolist() == [0, 1, 2]
        assert state["average"]["weight"].tolist() == [1.0, 1.0]
    [state] = world(1).run(_load_state, Kind("data=1", zero=2), tmp_path)
    assert state["average"]["weight"].tolist() == state["arguments"].mean.tolist() == [1.0, 1.0]
    assert state["average"]["wide"].tolist() == [1.0, 1.0, 1.0]


def _load_state(kind: Kind, folder: Path) -> Any:
    with job(kind) as here:
        return checkpoint.load(here.engine, folder, load_lr_scheduler_states=False)[1]


def _save_other_types(folder: Path) -> str:
    with job(KIND) as here:
        checkpoint.save(here.engine, folder, "dates", {"day": np.datetime64("2024-01-01")})
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(here.engine, folder)
    return str(caught.value)


def test_type_that_torch_refuses_late_is_named(world: Worlds, tmp_path: Path) -> None:
    for said in world(2).run(_save_other_types, tmp_path):
        assert "numpy.dtypes.DateTime64DType" in said
        assert "add_safe_globals" in said


# -- another order of parameters --------------------------------------------------------------------------------------


class Swapped(nn.Module):
    """A model of two layers of the same size, with its parameters in either order."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        made = {name: nn.Linear(4, 4) for name in ("body", "head")}
        for layer in made.values():
            for parameter in layer.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator)
        for name in names:
            self.add_module(name, made[name])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.tanh(self.body(hidden)))
        return result


@contextmanager
def _swapped(zero: int, *names: str, steps: int = 1) -> Iterator[Any]:
    start()
    grid = PipelineParallelGrid("data=2")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "optimizer": ADAM,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = initialize(model=Swapped(names), config=config, mpu=grid)
    yield engine
    destroy_engine(engine)
    grid.destroy()


def _train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(engine(inputs), inputs.sin())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _save_swapped(zero: int, folder: Path) -> list[float]:
    with _swapped(zero, "body", "head") as engine:
        _train(engine, range(3))
        checkpoint.save(engine, folder, "step3")
        return _train(engine, range(3, 6))


def _load_swapped(zero: int, folder: Path) -> tuple[str, list[float]]:
    with _swapped(zero, "head", "body") as engine:
        with pytest.raises(CheckpointLayoutError) as caught:
            checkpoint.load(engine, folder, convert=False)
        checkpoint.load(engine, folder)
        return str(caught.value), _train(engine, range(3, 6))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_other_order_of_parameters_is_refused_and_converted(world: Worlds, tmp_path: Path, zero: int) -> None:
    expected = world(2).run(_save_swapped, zero, tmp_path)
    for (said, losses), wanted in zip(world(2).run(_load_swapped, zero, tmp_path), expected, strict=True):
        assert "position 0 of group 0 is parameter 'body.weight' in the checkpoint, and parameter 'head.weight'" in said
        assert losses == pytest.approx(wanted, rel=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


# -- warnings and omissions --------------------------------------------------------------------------------------------


def _save_two(folder: Path) -> None:
    with job(KIND) as here:
        for step in (1, 2):
            here.train(range(step - 1, step))
            checkpoint.save(here.engine, folder, f"step{step}", {"step": step})


def _convert_warned(folder: Path) -> tuple[str, int]:
    with job(Kind("data=2", zero=3)) as here, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message="checkpoints in")
        _, state = checkpoint.load(here.engine, folder)
        return " ".join(str(one.message) for one in caught), state["step"]


def test_conversion_warns_of_damaged_checkpoint(
    world: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world(2).run(_save_two, tmp_path)
    (tmp_path / "step2/mp_rank_00_model_states.pt").write_bytes(b"cut off")
    said = "'step2' is damaged: mp_rank_00_model_states.pt has 7 bytes"
    warned = world(2).run(_convert_warned, tmp_path)
    assert [step for _, step in warned] == [1, 1]
    assert said in warned[0][0]
    assert main(["export", str(tmp_path), str(tmp_path / "weights.pt")]) == 0
    assert said in capsys.readouterr().err


def _save_in_partial_step(folder: Path) -> list[str]:
    with _swapped(1, "body", "head", steps=2) as engine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message="saving after")
        _train(engine, range(2))
        checkpoint.save(engine, folder, "end")
        _train(engine, range(2, 3))
        checkpoint.save(engine, folder, "middle")
        return [str(one.message) for one in caught]


def test_save_in_partial_step_warns(world: Worlds, tmp_path: Path) -> None:
    first, second = world(2).run(_save_in_partial_step, tmp_path)
    assert [text.partition(":")[0] for text in first] == ["saving after 1 of 2 micro-batches of a step"]
    assert second == []


def _save_without_frozen(zero: int, folder: Path) -> None:
    with _swapped(zero, "body", "head") as engine:
        _train(engine, range(1))
        engine.module.head.weight.requires_grad_(False)
        checkpoint.save(engine, folder, "all")
        checkpoint.save(engine, folder, f"zero{zero}", exclude_frozen_parameters=True)


@pytest.mark.parametrize("zero", [0, 1])
def test_excluded_parameters_are_not_in_manifest(world: Worlds, tmp_path: Path, zero: int) -> None:
    world(2).run(_save_without_frozen, zero, tmp_path)
    of_all, manifest = (look_at(tmp_path, tag).manifest for tag in ("all", f"zero{zero}"))
    assert of_all is not None
    assert manifest is not None
    assert [row.name for row in of_all.parameters if not row.is_trained] == ["head.weight"]
    assert [row.name for row in manifest.parameters] == ["body.weight", "body.bias", "head.bias"]
    assert main(["export", str(tmp_path), str(tmp_path / "weights.pt")]) == 0
    assert sorted(torch.load(tmp_path / "weights.pt")) == ["body.bias", "body.weight", "head.bias"]
