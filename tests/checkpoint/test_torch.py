"""``torch.distributed.checkpoint`` carries values and losses to other programs, other degrees and other ZeRO stages."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.moe.layer import MoE
from deepspeed.utils.groups import _get_expert_parallel_group
from torch import nn
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ds_topo import PipelineParallelGrid, checkpoint, initialize
from ds_topo.checkpoint.engine_state import Held, begin_states
from ds_topo.errors import (
    CheckpointError,
    CheckpointLayoutError,
    CheckpointModelError,
    DamagedCheckpointError,
    MissingCheckpointError,
    UnsafeCheckpointError,
)
from tests.checkpoint import plain_torch, torch_jobs
from tests.checkpoint.jobs import state_of
from tests.checkpoint.plain_torch import Program
from tests.checkpoint.torch_jobs import BF16, Job, Layout, job
from tests.support import moe_training, small_engines
from tests.support.exhaustive import mark_exhaustive
from tests.support.moe_training import Case, trainer
from tests.support.ports import free_port
from tests.support.small_engines import start
from tests.support.training import destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

BEFORE, AFTER = range(3), range(3, 6)
TOLERANCE = 1e-5
Content = dict[str, Any]
Saved = Callable[..., tuple[Path, list[float]]]


def _layouts(zeros: tuple[int, ...], *specs: str, is_pipeline: bool = False, **more: Any) -> list[Layout]:
    """Return layouts with and without our reducer."""
    return [
        Layout(spec, zero, is_pipeline, reduced, **more)
        for spec in specs
        for zero in zeros
        for reduced in ((False, True) if zero < 3 else (False,))
    ]


FP32 = [
    *_layouts((0, 1, 2, 3), "data=2", "model=2", "data=2,model=2", "model=2,data=2", "data=3"),
    *_layouts((0, 1), "pipe=2", "data=2,pipe=2", "pipe=2,model=2", "model=2,data=1,pipe=2", is_pipeline=True),
]
OVER_SHARD = _layouts((1, 2, 3), "data=3,shard=2", "shard=2,data=3")
SLICED = Layout("data=2,model=2", 1, reduced=True)
PIPELINE = Layout("data=2,pipe=2", 1, is_pipeline=True, reduced=True)
ZERO_3 = Layout("data=2", 3)
ROUND_ROBIN = Layout("data=3", 2, settings={"zero_optimization": {"stage": 2, "round_robin_gradients": True}})


# -- functions on ranks -----------------------------------------------------------------------------------------------


def _state(rank: Job, **options: Any) -> checkpoint.TorchState:
    return checkpoint.TorchState(rank.engine, rank.layout.rename, **options)


def _save(layout: Layout, folder: Path, form: str) -> list[float]:
    with job(layout) as rank:
        rank.train(BEFORE)
        if form == "app":
            dcp.save({"app": _state(rank)}, checkpoint_id=folder)
        else:
            values = _state(rank, flatten_optimizer_state_dict=True).state_dict()
            dcp.save({**values["model"], "optimizer": values["optim"]}, checkpoint_id=folder)
        return rank.train(AFTER)


def _load(layout: Layout, folder: Path, again: Path | None = None) -> list[float]:
    with job(layout, has_own_start=False) as rank:
        for group in rank.engine.optimizer.param_groups:
            group["lr"] = 7.0
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "torch.distributed is disabled")  # it is not, and ranks read without it
            checkpoint.load_torch(rank.engine, folder, rename=layout.rename)
        if again is not None:
            dcp.save({"app": _state(rank)}, checkpoint_id=again)
        return rank.train(AFTER)


def _save_by_torch(folder: Path, form: str) -> list[float]:
    program = Program()
    program.train(BEFORE)
    program.save(str(folder), form)
    return program.train(AFTER)


def _load_by_torch(folder: Path, form: str) -> list[float]:
    program = Program()
    program.load(str(folder), form)
    return program.train(AFTER)


@pytest.fixture(scope="module")
def saved(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the checkpoint of a layout, or of an FSDP2 program, and its losses afterwards."""
    made: dict[tuple[Layout | None, str], tuple[Path, list[float]]] = {}

    def of(layout: Layout | None, form: str = "app") -> tuple[Path, list[float]]:
        if (layout, form) not in made:
            folder = tmp_path_factory.mktemp("saved")
            if layout is None:
                losses = world(2).run(_save_by_torch, folder, form)[0]
            else:
                losses = world(layout.ranks).run(_save, layout, folder, form)[0]
            made[layout, form] = folder, losses
        return made[layout, form]

    return of


# -- content of checkpoints -----------------------------------------------------------------------------------------


def _nested(folder: Path) -> Content:
    """Read a checkpoint with one process."""
    file = folder.with_name(f"{folder.name}.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, file)
    found: Content = torch.load(file, weights_only=False)
    return found


def _flat(value: Any, before: str = "") -> Content:
    if isinstance(value, list) and value and isinstance(value[0], str):
        return {before: sorted(value)}
    if not isinstance(value, (dict, list)):
        return {before: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: one for name, part in items for key, one in _flat(part, f"{before}.{name}").items()}


def assert_same_content(one: Path, other: Path, without: Sequence[str] = (".deepspeed",)) -> None:
    """Compare every value, bit by bit."""
    found, expected = (
        {key: value for key, value in _flat(_nested(folder)).items() if not any(word in key for word in without)}
        for folder in (one, other)
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


# -- other layouts ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (SLICED, ZERO_3),
        (ZERO_3, PIPELINE),
        (ROUND_ROBIN, ZERO_3),
        (ZERO_3, ROUND_ROBIN),
        pytest.param(PIPELINE, Layout("model=2", 0), marks=pytest.mark.exhaustive),
        pytest.param(ZERO_3, Layout("data=2", 2, reduced=True), marks=pytest.mark.exhaustive),
        (Layout("data=2", 2, reduced=True, settings=BF16), Layout("data=2", 3, settings=BF16)),
    ],
    ids=str,
)
def test_engine_continues_in_other_layout(
    world: Worlds, saved: Saved, tmp_path: Path, source: Layout, target: Layout
) -> None:
    path, expected = saved(source)
    losses = world(target.ranks).run(_load, target, path, tmp_path / "again")[0]
    assert losses == pytest.approx(expected, rel=2e-2 if source.settings == BF16 else TOLERANCE)
    assert_same_content(tmp_path / "again", path)


def _stage_that_writes(layout: Layout, name: str) -> tuple[int, bool]:
    """Return the stage of this rank, and True if it writes its part of a parameter."""
    with job(layout) as rank:
        part = _state(rank).state_dict()["model"][name]
        return rank.grid.get_stage_id(), part.is_written


def test_one_stage_writes_shared_weight(world: Worlds) -> None:
    found = world(4).run(_stage_that_writes, PIPELINE, "embedding.weight")
    assert sorted(found) == [(0, True), (0, True), (1, False), (1, False)]


def _part_of_buffer(layout: Layout) -> tuple[list[int], list[tuple[tuple[int, ...], list[float]]], bool]:
    """Return the shape, this rank's boxes and whether it writes them, of a buffer that slices split."""
    with job(layout) as rank:
        buffer: Any = torch.full((2,), float(rank.grid.get_slice_parallel_rank()))
        buffer.partition_dim = 0
        rank.engine.module.register_buffer("offset", buffer)
        part = _state(rank).state_dict()["model"]["offset"]
        return list(part.shape), [(at, one.tolist()) for at, one in part.boxes.items()], part.is_written


def test_every_slice_writes_its_part_of_a_buffer(world: Worlds) -> None:
    found = world(4).run(_part_of_buffer, SLICED)
    assert [shape for shape, *_ in found] == [[4]] * 4
    written = sorted(boxes for _, boxes, is_written in found if is_written)
    assert written == [[((0,), [0.0, 0.0])], [((2,), [1.0, 1.0])]]


# -- other programs --------------------------------------------------------------------------------------------------


def _gradient_of_fsdp2() -> tuple[float, float]:
    """Return the norm of a gradient, and the expected norm."""
    alone, program = plain_torch.Model(), Program()
    tokens = plain_torch.batch(0)
    alone(tokens).backward()
    program.model(tokens.chunk(2)[dist.get_rank()]).backward()
    gradient: Any = program.model.blocks[0].bias.grad
    return float(gradient.full_tensor().norm()), float(alone.blocks[0].bias.grad.norm())


@pytest.fixture(scope="module")
def fsdp2(world: Worlds) -> None:
    """Skip where FSDP2 does not average gradients: torch 2.8 uses gloo's sum as the mean."""
    found, expected = world(2).run(_gradient_of_fsdp2)[0]
    if found != pytest.approx(expected, rel=1e-4):
        pytest.skip(f"FSDP2 of torch {torch.__version__} does not average gradients on gloo")


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("fsdp2")
@pytest.mark.parametrize(
    ("layout", "form"),
    mark_exhaustive([(SLICED, "app"), (PIPELINE, "app"), (ZERO_3, "titan")], lambda number, _: number > 0),
    ids=["sliced", "pipeline", "titan"],
)
def test_fsdp2_continues_from_engine(world: Worlds, saved: Saved, layout: Layout, form: str) -> None:
    folder, expected = saved(layout, form)
    assert world(2).run(_load_by_torch, folder, form)[0] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.usefixtures("fsdp2")
@pytest.mark.parametrize(
    ("layout", "form"),
    mark_exhaustive([(SLICED, "titan"), (PIPELINE, "app"), (ZERO_3, "app")], lambda number, _: number == 0),
    ids=["sliced", "pipeline", "zero 3"],
)
def test_engine_continues_from_fsdp2(world: Worlds, saved: Saved, layout: Layout, form: str) -> None:
    folder, expected = saved(None, form)
    assert world(layout.ranks).run(_load, layout, folder)[0] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fsdp2")
@pytest.mark.parametrize("layout", [*FP32, *OVER_SHARD], ids=str)
@pytest.mark.parametrize("form", ["app", "titan"])
def test_every_layout_continues_to_and_from_fsdp2(world: Worlds, saved: Saved, layout: Layout, form: str) -> None:
    folder, expected = saved(layout, form)
    assert world(4).run(_load_by_torch, folder, form)[0] == pytest.approx(expected, rel=TOLERANCE)
    folder, expected = saved(None, form)
    assert world(layout.ranks).run(_load, layout, folder)[0] == pytest.approx(expected, rel=TOLERANCE)


def _program(ranks: int, *arguments: object) -> list[float]:
    """Return the losses of a program that imports torch alone."""
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common.pop("PYTHONPATH", None)
    started = [
        subprocess.Popen(
            [sys.executable, plain_torch.__file__, *map(str, arguments)],
            env={**common, "RANK": str(rank)} if ranks > 1 else common,
            cwd=Path(plain_torch.__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * ranks, said
    result = json.loads(said[0][0])
    assert result["others"] == []
    losses: list[float] = result["losses"]
    return losses


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_program_without_deepspeed_and_ds_topo_continues(saved: Saved, ranks: int) -> None:
    folder, expected = saved(SLICED)
    assert _program(ranks, folder, "app", 3, 6) == pytest.approx(expected, rel=TOLERANCE)


# -- experts ---------------------------------------------------------------------------------------------------------


def _require_declared(rank: moe_training.Trainer) -> None:
    """Check that experts in slices are refused unless they declare their dimension."""
    declared = {one: one.partition_dim for one in rank.engine.module.parameters() if hasattr(one, "partition_dim")}
    for parameter in declared:
        parameter.partition_dim = -1
    with pytest.raises(CheckpointError, match=r"experts are split over slices .*set partition_dim"):
        checkpoint.TorchState(rank.engine).state_dict()
    for parameter, dim in declared.items():
        parameter.partition_dim = dim


def _number_experts(rank: moe_training.Trainer) -> list[tuple[torch.Tensor, int]]:
    """Give each expert of this rank a buffer; return the buffers, with the numbers of the experts in their layers."""
    found = []
    for layer in (module for module in rank.engine.module.modules() if isinstance(module, MoE)):
        first = dist.get_rank(_get_expert_parallel_group(layer.expert_group_name)) * layer.num_local_experts
        for local, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            expert.register_buffer("number", torch.tensor(-1.0))
            found.append((expert.number, first + local))
    return found


def _save_experts(case: Case, folder: Path) -> list[float]:
    with trainer(case) as rank:
        if case.tensor_parallel:
            _require_declared(rank)
        for buffer, number in _number_experts(rank):
            buffer.fill_(number)
        rank.train(range(2))
        dcp.save({"app": checkpoint.TorchState(rank.engine)}, checkpoint_id=folder)
        return rank.train(range(2, 4)).losses


def _load_experts(case: Case, folder: Path, again: Path) -> list[float]:
    with trainer(case) as rank:
        numbered = _number_experts(rank)
        for parameter in rank.engine.module.parameters():
            parameter.data.fill_(7)
        checkpoint.load_torch(rank.engine, folder)
        assert [int(buffer) for buffer, _ in numbered] == [number for _, number in numbered]
        dcp.save({"app": checkpoint.TorchState(rank.engine)}, checkpoint_id=again)
        return rank.train(range(2, 4)).losses


@pytest.mark.thorough
def test_experts_continue_on_other_ranks(world: Worlds, tmp_path: Path) -> None:
    source = Case("data=2,model=2", (2, 0, 1), 1, tensor_parallel=True, pipeline=False)
    target = Case("data=2", (1, 0, 2), 2, pipeline=False, reduced=True)
    expected = world(4).run(_save_experts, source, tmp_path / "saved")[0]
    losses = world(2).run(_load_experts, target, tmp_path / "saved", tmp_path / "again")[0]
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert_same_content(tmp_path / "again", tmp_path / "saved", without=("param_groups", ".deepspeed"))


# -- one engine ------------------------------------------------------------------------------------------------------


class LateWriter(dcp.FileSystemWriter):
    """A writer that waits for the program before it writes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        self.may_write.wait()
        return super().write_data(*arguments, **options)


def _train_during_async_save(layout: Layout, folder: Path) -> None:
    stagers: dict[str, Any] = {"of the writer": {}}
    if hasattr(staging, "DefaultStager"):  # async_save uses it by default since torch 2.9
        options = staging.StagingOptions(False, False, False, False)
        stagers["by default"] = {"async_stager": staging.DefaultStager(options)}
    with job(layout) as rank:
        rank.train(BEFORE)
        dcp.save({"app": _state(rank)}, checkpoint_id=folder / "at once")
        group = dist.new_group(backend="gloo")
        for name, more in stagers.items():
            checkpoint.load_torch(rank.engine, folder / "at once", rename=layout.rename)
            writer = LateWriter(folder / name)
            saving: Any = dcp.async_save({"app": _state(rank)}, storage_writer=writer, process_group=group, **more)
            rank.train(AFTER)
            writer.may_write.set()
            saving.result()
        dist.barrier()
        dist.destroy_process_group(group)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [Layout("data=2", 1, reduced=True), Layout("model=2", 0)], ids=str)
def test_async_save_has_state_at_its_start(world: Worlds, tmp_path: Path, layout: Layout) -> None:
    world(2).run(_train_during_async_save, layout, tmp_path)
    saved = [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "at once"]
    assert saved
    for path in saved:
        assert_same_content(path, tmp_path / "at once", without=())


def _load_in_place(layout: Layout, folder: Path, is_flat: bool) -> None:
    layout = replace(layout, settings={**layout.settings, "scheduler": {"type": "WarmupLR", "params": {}}})
    with job(layout) as rank:
        rank.train(BEFORE)
        dcp.save({"app": _state(rank, flatten_optimizer_state_dict=is_flat)}, checkpoint_id=folder)
        saved, rates = _known(rank.engine), rank.engine.get_lr()
        expected = rank.train(AFTER)
    with job(layout, has_own_start=False) as rank:
        before = torch.get_rng_state()
        dcp.load({"app": _state(rank, flatten_optimizer_state_dict=is_flat)}, checkpoint_id=folder)
        assert torch.equal(torch.get_rng_state(), before)
        assert (_known(rank.engine), rank.engine.get_lr()) == (saved, rates)
        assert rank.train(AFTER) == expected
        checkpoint.load_torch(rank.engine, folder)
        assert (_known(rank.engine), rank.engine.get_lr()) == (saved, rates)
        assert rank.train(AFTER) == expected, "load_torch restores the same, bit by bit"


def _known(engine: Any) -> dict[str, str]:
    """Return digests of the whole state; under ZeRO 3, where some elements are padding, only the steps."""
    found = state_of(engine)
    return {"step": found["step"]} if engine.zero_optimization_stage() == 3 else found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("layout", "is_flat"),
    [(Layout("data=2", 0), True), (Layout("data=2", 2, settings=BF16), False), (Layout("data=2", 3), True)],
)
def test_loading_in_place_restores_steps_and_rates(
    world: Worlds, tmp_path: Path, layout: Layout, is_flat: bool
) -> None:
    world(2).run(_load_in_place, layout, tmp_path, is_flat)


def _before_the_first_step(layout: Layout) -> None:
    with job(layout) as rank:
        weight = rank.engine.module.blocks[0].bias
        weight.data.fill_(-0.0)
        before = torch.get_rng_state()
        states = _state(rank).state_dict()["optim"]["state"]
        assert {float(one["step"]) for one in states.values()} == {0}
        assert {"exp_avg", "exp_avg_sq"} <= states["blocks.0.up"].keys()
        assert weight.signbit().all()
        assert torch.equal(torch.get_rng_state(), before)


def test_initial_states_need_no_step(world: Worlds) -> None:
    world(1).run(_before_the_first_step, Layout("data=1", 0))


class Uneven(nn.Module):
    """A frozen layer, a parameter of one element, and a strided weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 5).requires_grad_(False)
        self.factor = nn.Parameter(torch.tensor([0.5]))
        self.convolution = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.convolution(self.frozen(inputs)[:, None]) * self.factor).pow(2).mean()


def _uneven(settings: dict[str, Any], source: Path | None, folder: Path) -> float:
    start()
    with PipelineParallelGrid("data=2") as grid:
        module = Uneven()
        if source is not None:
            for parameter in module.parameters():
                parameter.data.fill_(7)
        optimizer = plain_torch.adam([one for one in module.parameters() if one.requires_grad])
        config = {**small_engines.settings(train_micro_batch_size_per_gpu=4, **settings)}
        del config["optimizer"]
        engine, *_ = initialize(model=module, optimizer=optimizer, config=config, mpu=grid)
        if source is None:
            for step in range(4):
                engine.backward(engine(torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(step))))
                engine.step()
        else:
            checkpoint.load_torch(engine, source)
        dcp.save({"app": checkpoint.TorchState(engine)}, checkpoint_id=folder)
        loss = float(engine(torch.ones(4, 4, 3)))
        destroy_engine(engine)
        return loss


OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.thorough
def test_frozen_and_single_and_strided_parameters_are_restored(world: Worlds, tmp_path: Path) -> None:
    source = tmp_path / "0"
    loss = world(2).run(_uneven, {}, None, source)
    stages = [{"zero_optimization": {"stage": stage}} for stage in (1, 3)]
    for number, settings in enumerate([{}, *stages, OFFLOADED], 1):
        assert world(2).run(_uneven, settings, source, tmp_path / f"{number}") == pytest.approx(loss, rel=1e-6)
        assert_same_content(tmp_path / f"{number}", source)


class _AdamOfAnother(torch.optim.Optimizer):
    """An Adam whose groups lack options of torch's, as DeepSpeed's do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5, "betas": (0.5, 0.75), "eps": 1.0})

    def step(self, closure: Any = None) -> None:
        """Leave the parameters as they are."""


def _groups_of_another_adam() -> list[dict[str, Any]]:
    with mock.patch.object(torch_jobs, "adam", _AdamOfAnother), job(Layout("data=2", 0)) as rank:
        rank.train(BEFORE)
        groups: list[dict[str, Any]] = _state(rank).state_dict()["optim"]["param_groups"]
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def test_groups_of_another_adam_have_what_fsdp2_asks_for(world: Worlds) -> None:
    torchs = torch.optim.AdamW([torch.zeros(1)]).defaults
    for groups in world(2).run(_groups_of_another_adam):
        assert groups == [{**torchs, "lr": 0.5, "betas": (0.5, 0.75), "eps": 1.0}] * len(groups)


def _load_weights_alone(folder: Path) -> tuple[list[float], int]:
    with job(Layout("data=2", 1, settings={"gradient_accumulation_steps": 4}), has_own_start=False) as rank:
        checkpoint.load_torch(
            rank.engine, folder, model="app.model", optimizer="app.optim", load_optimizer_states=False
        )
        assert not rank.engine.optimizer.state
        first = rank.train(range(3, 4))
        checkpoint.load_torch(rank.engine, folder)
        return first, rank.engine.micro_steps


def test_loading_weights_alone_keeps_optimizer(world: Worlds, saved: Saved) -> None:
    folder, expected = saved(SLICED)
    first, micro_steps = world(2).run(_load_weights_alone, folder)[0]
    assert first == pytest.approx(expected[:1], rel=TOLERANCE)
    assert micro_steps == 12, "three steps of this engine's number of micro-batches"


def _load_with_scheduler(folder: Path, position: int) -> list[str]:
    with job(Layout("data=1"), has_own_start=False) as rank:
        scheduler = torch.optim.lr_scheduler.LambdaLR(rank.engine.optimizer, lambda _: 1.0)
        rank.engine.lr_scheduler = scheduler
        scheduler.last_epoch = position
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint.load_torch(rank.engine, folder)
        return [str(one.message) for one in caught if "LambdaLR begins again" in str(one.message)]


def test_loading_another_programs_states_warns_of_a_scheduler_at_its_start(
    world: Worlds, saved: Saved, tmp_path: Path
) -> None:
    content = _nested(saved(ZERO_3)[0])
    _write(content, tmp_path, without="app.deepspeed")
    [said] = world(1).run(_load_with_scheduler, tmp_path, 0)[0]
    assert "set engine.lr_scheduler.last_epoch to the number of steps" in said
    assert world(1).run(_load_with_scheduler, tmp_path, 3) == [[]]


def _continue_after_an_exception(folder: Path) -> None:
    layout = Layout("data=2", 2, reduced=True)
    with job(layout) as rank:
        rank.train(BEFORE)
        expected, hook = state_of(rank.engine), rank.engine.module.blocks[1].register_forward_hook(_fail)
        with pytest.raises(ArithmeticError):
            rank.train(AFTER)
        hook.remove()
        dcp.save({"app": _state(rank)}, checkpoint_id=folder)
        rank.train(AFTER)
        checkpoint.load_torch(rank.engine, folder)
        found = state_of(rank.engine)
        assert {**found, "step": ""} == {**expected, "step": ""}


def _fail(*_: Any) -> None:
    raise ArithmeticError


def test_load_after_exception_in_forward(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_continue_after_an_exception, tmp_path)


# -- errors ---------------------------------------------------------------------------------------------------------


def _write(content: Content, folder: Path, *, without: str = "", **values: Any) -> None:
    """Save with one process, with other values at some keys."""
    flat = {key.removeprefix("."): value for key, value in _flat(content).items()}
    flat.update((key.replace("__", "."), value) for key, value in values.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({key: value for key, value in flat.items() if key != without}, checkpoint_id=folder, no_dist=True)


def _refused(folders: list[Path]) -> tuple[list[tuple[str, str]], bool]:
    """Return the errors on this rank, and True if the engine is unchanged."""
    with job(ZERO_3) as rank:
        before, errors = state_of(rank.engine), []
        for folder in folders:
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load_torch(rank.engine, folder)
            errors.append((type(caught.value).__name__, str(caught.value)))
        after = state_of(rank.engine)
        return errors, before == {key: after[key] for key in before}


class Runs:
    """A value that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def test_other_model_is_refused_on_all_ranks(world: Worlds, saved: Saved, tmp_path: Path) -> None:
    content = _nested(saved(ZERO_3)[0])
    bias, state = "app.model.blocks.1.bias", "app.optim.state.blocks.1.bias"
    number = content["app"]["optim"]["state"]["blocks.1.bias"]["step"] + 1
    _write(content, tmp_path / "missing", without=bias)
    _write(content, tmp_path / "shape", **{bias: torch.zeros(11)})
    _write(content, tmp_path / "more", **{"app.model.blocks.3.bias": torch.zeros(10)})
    _write(content, tmp_path / "state", without=f"{state}.exp_avg")
    _write(content, tmp_path / "steps", **{f"{state}.step": number})
    _write(content, tmp_path / "damaged")
    (tmp_path / "damaged" / ".metadata").write_bytes(b"nothing")
    _write(content, tmp_path / "forged")
    (tmp_path / "forged" / ".metadata").write_bytes(pickle.dumps(Runs(f"touch {tmp_path}/metadata_ran")))
    _write(content, tmp_path / "code", **{"app.deepspeed": [Runs(f"touch {tmp_path}/value_ran")]})
    expected = {
        "absent": (MissingCheckpointError, "no checkpoint of torch.distributed.checkpoint in"),
        "missing": (CheckpointModelError, f"it has no '{bias}' [10]"),
        "shape": (CheckpointModelError, f"'{bias}' is [11] in the checkpoint and [10] in the model"),
        "more": (CheckpointModelError, "it has 'app.model.blocks.3.bias' [10], which the model does not have"),
        "state": (CheckpointModelError, f"no optimizer state '{state}.exp_avg'; its parameter has ['exp"),
        "steps": (CheckpointLayoutError, "'embedding.weight' and 'blocks.1.bias' have different values"),
        "damaged": (DamagedCheckpointError, "the metadata in"),
        "code": (UnsafeCheckpointError, "building it may run code"),
        "forged": (UnsafeCheckpointError, "posix.system, and building it may run code"),
    }  # fmt: skip
    (found, is_unchanged), other = world(2).run(_refused, [tmp_path / name for name in expected])
    assert other == (found, is_unchanged)
    assert is_unchanged
    assert not list(tmp_path.glob("*_ran")), "code of the checkpoint has run"
    for (kind, text), (error, message) in zip(expected.values(), found, strict=True):
        assert error == kind.__name__
        assert text in message


def _refused_in_slices(folder: Path) -> str:
    with job(Layout("model=2")) as rank, pytest.raises(CheckpointModelError) as caught:
        checkpoint.load_torch(rank.engine, folder)
    return str(caught.value)


def test_other_shape_is_refused_with_the_whole_one_and_that_of_slices(
    world: Worlds, saved: Saved, tmp_path: Path
) -> None:
    _write(_nested(saved(ZERO_3)[0]), tmp_path, **{"app.model.blocks.1.up": torch.zeros(20, 10)})
    for said in world(2).run(_refused_in_slices, tmp_path):
        assert "is [20, 10] in the checkpoint, which 2 slices hold as [10, 10] each, and [12, 10] in the model" in said


def _refused_on_one_rank() -> str:
    with job(Layout("data=2", 1)) as rank:
        state = checkpoint.TorchState(rank.engine, {"blocks.0.bias": ""} if rank.grid.global_rank else None)
        with pytest.raises(CheckpointError) as caught:
            state.state_dict()
        with pytest.raises(TypeError, match="Linear is not an engine"):
            checkpoint.TorchState(nn.Linear(1, 1))  # type: ignore[arg-type]
        return str(caught.value)


def test_failure_of_one_rank_is_raised_on_all(world: Worlds) -> None:
    first, second = world(2).run(_refused_on_one_rank)
    assert first == second
    assert "ranks [1]" in first
    assert "rename gives '' for 'blocks.0.bias'" in first


def _undeclared(layout: Layout) -> None:
    with job(layout) as rank:
        for parameter in rank.engine.module.parameters():
            parameter.partition_dim = -1  # type: ignore[attr-defined]
        with pytest.raises(CheckpointError, match=r"blocks\.0\.up.*set partition_dim"):
            _state(rank).state_dict()


def test_slices_without_dimension_are_refused(world: Worlds) -> None:
    world(2).run(_undeclared, Layout("model=2", 0))


class Unusual(torch.optim.SGD):
    """An optimizer that cannot be created from groups alone."""

    def __init__(self, groups: Any, what: str) -> None:
        super().__init__(groups, lr=0.1)


def test_optimizer_without_derivable_states_needs_a_step() -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(CheckpointError, match=r"Unusual has no states yet.*take a step before"):
        begin_states(Unusual([weight], "any"), [Held(weight, weight, 0, 3, 0, 0)])
