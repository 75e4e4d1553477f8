"""Peers along ``pipe``, ``model`` and ``seq`` read the same samples from DeepSpeed's own data loaders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as loader_of_variable_batches,
)
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_topo import DualPipeVModule, PipelineModule, PipelineParallelGrid, checkpoint
from ds_topo.base.patches import DualPipeVEngine
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.engine.pipelines.pipeline_engine import PipelineOnGrid
from ds_topo.errors import EngineOptionError
from tests.support.exhaustive import mark_exhaustive
from tests.support.small_engines import data_efficiency, settings, start
from tests.support.world import Worlds

NEEDS_DUALPIPE = pytest.mark.skipif(
    not issubclass(DualPipeVEngine, DeepSpeedEngine), reason="this DeepSpeed has no DualPipeV"
)

STEPS, ACCUMULATION = 3, 4
SPECS = ("seq=2,data=2", "model=2,data=2", "model=2,seq=2", "data=4")
PIPELINES = ("pipe=2,seq=2", "pipe=2,model=2", "seq=2,pipe=2", "pipe=4")


class Numbered(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that contain their number."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), float(index)), torch.full((4,), float(index))


_inputs: list[list[int]] = []
_labels: list[list[int]] = []


def _note(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    _labels.append([int(row[0]) for row in labels])
    return (outputs - labels).square().mean()


class Notes(nn.Linear):
    """A layer that notes the samples that it gets."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        _inputs.append([int(row[0]) for row in inputs])
        return super().forward(inputs)


def _config(folder: str | None, **more: Any) -> dict[str, Any]:
    if folder is None:
        return settings(gradient_accumulation_steps=ACCUMULATION, **more)
    return settings(gradient_accumulation_steps=ACCUMULATION, data_efficiency=data_efficiency(folder), **more)


@contextmanager
def _without_workers() -> Iterator[None]:
    """Let DeepSpeed's loaders read in their own process, because ranks of tests may not start others."""
    build = deepspeed_engine.DeepSpeedDataLoader

    def loader(**options: Any) -> Any:
        return build(**options | {"num_local_io_workers": 0})

    with mock.patch.object(deepspeed_engine, "DeepSpeedDataLoader", loader):
        yield


def _samples_of_plain_engine(spec: str, folder: str | None, micro_batch: int) -> tuple[int, list[list[int]]]:
    start()
    with PipelineParallelGrid(spec) as grid, _without_workers():
        engine, _, loader, _ = deepspeed.initialize(
            model=nn.Linear(4, 4),
            mpu=grid,
            config=_config(folder, train_micro_batch_size_per_gpu=micro_batch),
            training_data=Numbered(),
        )
        read, found = iter(loader), []
        for _ in range(STEPS * ACCUMULATION):
            inputs, _ = next(read)
            found.append([int(row[0]) for row in inputs])
            engine.backward(engine(inputs).sum() * 1e-6)
            engine.step()
        share = grid.get_sample_rank()
        engine.destroy()
    return share, found


def _assert_dealt(found: list[tuple[int, list[list[int]]]], expected: list[list[int]]) -> None:
    """Compare the union of all shares with what one process reads, and peers with each other."""
    by_share: dict[int, list[list[int]]] = {}
    for share, read in found:
        assert by_share.setdefault(share, read) == read, "peers read different samples"
    for number, wanted in enumerate(expected):
        assert sorted(index for read in by_share.values() for index in read[number]) == sorted(wanted)


def _consumed(folder: str, checkpoints: str) -> tuple[int, int]:
    """Save an engine, and load its checkpoint at another ZeRO stage; return the samples that each has consumed."""
    start()
    consumed = []
    for is_saving in (True, False):
        with PipelineParallelGrid("data=1") as grid, _without_workers():
            config = _config(folder, zero_optimization={"stage": 0 if is_saving else 1})
            engine, _, loader, _ = deepspeed.initialize(
                model=nn.Linear(4, 4), mpu=grid, config=config, training_data=Numbered()
            )
            if is_saving:
                for (inputs, _), _ in zip(loader, range(ACCUMULATION), strict=False):
                    engine.backward(engine(inputs).sum() * 1e-6)
                    engine.step()
                engine.save_checkpoint(checkpoints)
            else:
                checkpoint.load(engine, checkpoints)
            consumed.append(int(loader.data_sampler.consumed_samples))
            engine.destroy()
    return consumed[0], consumed[1]


def test_data_efficiency_goes_on_after_conversion(world: Worlds, tmp_path: Path) -> None:
    ((saved, loaded),) = world(1).run(_consumed, _folder(tmp_path, "clusters"), str(tmp_path / "checkpoints"))
    assert loaded == saved > 0


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        (DeepSpeedEngine, [0, 1, 2]),
        (PipelineEngine, [0, 2]),
        pytest.param(DualPipeVEngine, [0], marks=NEEDS_DUALPIPE),
    ],
)
def test_stages_with_inputs_or_labels_read_samples(kind: type, stages: list[int]) -> None:
    engine: Any = mock.Mock(spec=kind, mpu=mock.Mock())
    mixin: Any = EngineOnGrid if kind is DeepSpeedEngine else PipelineOnGrid
    engine.mpu.get_axis_size.return_value = 3
    found = []
    for stage in range(3):
        engine.mpu.get_axis_rank.return_value = stage
        found += [stage] if stage in mixin.reading_stages.fget(engine) else []
    assert found == stages


def _folder(tmp_path: Path, name: str) -> str:
    (tmp_path / name).mkdir()
    return str(tmp_path / name)


@pytest.mark.parametrize(
    "spec", mark_exhaustive(SPECS, default=lambda _, spec: spec in ("seq=2,data=2", "model=2,seq=2"))
)
def test_data_efficiency_distributes_each_batch_once(world: Worlds, tmp_path: Path, spec: str) -> None:
    shares = 4 // (2 if "seq" in spec else 1) // (2 if "model" in spec else 1)
    ((_, expected),) = world(1).run(_samples_of_plain_engine, "data=1", _folder(tmp_path, "one"), 2 * shares)
    found = world(4).run(_samples_of_plain_engine, spec, _folder(tmp_path, "grid"), 2, timeout=20.0)
    assert len({share for share, _ in found}) == shares
    _assert_dealt(found, expected)


def _samples_of_pipeline(spec: str, folder: str | None, kind: str) -> tuple[Any, Any, Any]:
    start()
    _inputs.clear()
    _labels.clear()
    with PipelineParallelGrid(spec) as grid, _without_workers():
        build = DualPipeVModule if kind == "DualPipeV" else PipelineModule
        layers = [Notes(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        module = build(layers, grid=grid, loss_fn=_note)
        config = _config(folder, optimizer={"type": "SGD", "params": {"lr": 0.0}})
        engine, *_ = deepspeed.initialize(model=module, config=config, training_data=Numbered())
        for _ in range(STEPS):
            engine.train_batch()
        evaluation = engine.deepspeed_io(Numbered(), route="eval")
        first = next(iter(evaluation))[0][:, 0].tolist() if folder is None else None
        engine.destroy()
    return [*_inputs], [*_labels], first


@pytest.mark.parametrize(
    ("spec", "efficient", "kind"),
    mark_exhaustive(
        [
            (spec, efficient, kind)
            for spec in PIPELINES
            for efficient in (False, True)
            for kind in ("1F1B", "DualPipeV")
            if kind == "1F1B" or spec == "pipe=2,seq=2"
        ],
        default=lambda _, case: case in [("pipe=2,seq=2", False, "1F1B"), ("pipe=4", True, "1F1B")],
    ),
)
def test_stages_slices_and_seq_peers_read_the_same_samples(
    world: Worlds, tmp_path: Path, spec: str, efficient: bool, kind: str
) -> None:
    readers = 1 if spec == "pipe=4" else 2
    folders = [_folder(tmp_path, name) if efficient else None for name in ("one", "grid")]
    ((_, expected),) = world(1).run(_samples_of_plain_engine, "data=1", folders[0], 2)
    found = world(4).run(_samples_of_pipeline, spec, folders[1], kind, timeout=20.0)
    if not efficient:  # one share: DeepSpeed's own sampler of a pipeline does not shuffle
        expected = [[2 * number, 2 * number + 1] for number in range(STEPS * ACCUMULATION)]
    for inputs, labels, evaluated in found:
        assert inputs in ([], expected)
        assert labels in ([], expected)
        assert evaluated in (None, [0.0, 1.0])
    assert sum(bool(inputs) for inputs, _, _ in found) == sum(bool(labels) for _, labels, _ in found) == readers


def _variable_batches(spec: str) -> tuple[int, int, list[Any]]:
    start()
    sampling = {"enabled": True, "dynamic_batching": {"enabled": True, "max_tokens": 8, "metrics_path": "unused"}}
    data = {"enabled": True, "seed": 1, "data_sampling": sampling}
    with PipelineParallelGrid(spec) as grid:
        engine, *_ = deepspeed.initialize(
            model=nn.Linear(4, 4), mpu=grid, config=settings(train_micro_batch_size_per_gpu=1, data_efficiency=data)
        )
        lengths = [1 + number % 5 for number in range(96)]
        loader, *_ = loader_of_variable_batches(
            list(range(96)), engine, dataset_seqlens=lengths, dataloader_collate_fn=list
        )
        engine.backward(engine(torch.ones(1, 4)).sum())  # the engine reduces over its own groups
        engine.step()
        found = [sorted(batch) for batch in loader]
        result = grid.get_sample_rank(), engine.train_batch_size(), found
        engine.destroy()
    return result


@pytest.mark.parametrize("spec", mark_exhaustive(SPECS, default=lambda _, spec: spec == "seq=2,data=2"))
def test_variable_batches_are_dealt_to_shares(world: Worlds, spec: str) -> None:
    found = world(4).run(_variable_batches, spec, timeout=20.0)
    by_share: dict[int, list[Any]] = {}
    for share, _, read in found:
        assert by_share.setdefault(share, read) == read, "peers read different samples"
    dealt = [index for read in by_share.values() for batch in read for index in batch]
    assert len(dealt) == len({*dealt}) > 60


def _refused(what: str) -> None:
    start()
    dynamic = {"enabled": True, "dynamic_batching": {"enabled": True, "max_tokens": 8, "metrics_path": "unused"}}
    with PipelineParallelGrid("pipe=2,seq=2") as grid:
        if what == "dynamic_batching":
            model: nn.Module = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], grid=grid)
            config, mpu = settings(data_efficiency={"enabled": True, "data_sampling": dynamic}), None
        else:
            model, config, mpu = nn.Linear(4, 4), _config("unused"), grid
            model.is_pipeline_stage = True  # type: ignore[assignment]
        deepspeed.initialize(model=model, mpu=mpu, config=config)


@pytest.mark.parametrize("what", ["dynamic_batching", "curriculum_learning"])
def test_samplers_that_cannot_serve_all_ranks_are_refused(world: Worlds, what: str) -> None:
    for error in world(4).run(_refused, what, timeout=20.0, expect_failure=True):
        assert isinstance(error, EngineOptionError)
        assert f'"data_sampling" with "{what}"' in str(error)
