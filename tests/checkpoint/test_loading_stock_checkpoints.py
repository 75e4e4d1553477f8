"""Load checkpoints that DeepSpeed alone saved, in the layout that saved them and in others."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe import PipelineModule as StockPipelineModule
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, checkpoint, cli, initialize
from ds_topo.checkpoint.stock_checkpoints import layout_of_files
from ds_topo.errors import CheckpointError, CheckpointLayoutError, DamagedCheckpointError
from tests.checkpoint.continued_jobs import train_pipeline
from tests.support.small_engines import start
from tests.support.training import destroy_engine, engine_config
from tests.support.world import Worlds

LAYERS = [(4, 16), (16, 4), (4, 4), (4, 4)]
ADAM = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}


def _module(*, is_larger: bool = False) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(*sizes) for sizes in LAYERS))
    module[2].requires_grad_(False)
    module[3].register_buffer("scale", torch.ones(2))
    if is_larger:
        module.append(nn.Linear(4, 4))
    return module


def _config(zero: int, **more: Any) -> dict[str, Any]:
    return engine_config(2, zero_optimization={"stage": zero}, optimizer=ADAM, **more)


def _train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        loss = F.mse_loss(engine(inputs.to(next(engine.module.parameters()).dtype)).float(), inputs.sin())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


CASES = [*(("fp32", zero) for zero in (0, 1, 2, 3)), ("bf16", 0), ("bf16", 1), ("fp16", 2)]


def _precision(name: str) -> dict[str, Any]:
    return {} if name == "fp32" else {name: {"enabled": True}}


def _save_stock(folder: Path) -> dict[str, list[float]]:
    start()
    found = {}
    for precision, zero in CASES:
        engine, *_ = deepspeed.initialize(model=_module(), config=_config(zero, **_precision(precision)))
        _train(engine, range(2))
        with torch.no_grad():
            engine.module[3].scale.fill_(0.5)
        engine.save_checkpoint(str(folder / f"{precision}{zero}"), "stock", client_state={"sample": 7})
        found[f"{precision}{zero}"] = _train(engine, range(2, 4))
        engine.destroy()
    return found


@contextmanager
def _engine(zero: int, *, is_larger: bool = False, **more: Any) -> Iterator[Any]:
    start()
    grid = PipelineParallelGrid(f"data={dist.get_world_size()}")
    engine, *_ = initialize(model=_module(is_larger=is_larger), config=_config(zero, **more), mpu=grid)
    yield engine
    destroy_engine(engine)
    grid.destroy()


def _load(folder: Path) -> list[tuple[str, int, str, list[float]]]:
    found = []
    for precision, zero in CASES:
        for to in (0, 1, 3) if precision == "fp32" else (zero, 3):
            with _engine(to, **_precision(precision)) as engine:
                path, said = folder / f"{precision}{zero}", ""
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        _, state = checkpoint.load(engine, path, convert=False)
                    except CheckpointLayoutError as error:
                        said = str(error)
                        _, state = checkpoint.load(engine, path)
                assert state == {"sample": 7}
                assert float(engine.module[3].scale.sum()) == 1.0
                found.append((f"{precision}{zero}", to, said, _train(engine, range(2, 4))))
    return found


@pytest.fixture(scope="module")
def stock(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Return a folder of checkpoints of two ranks, and the losses of the two steps after each."""
    folder = tmp_path_factory.mktemp("stock")
    return folder, world(2).run(_save_stock, folder)[0]


def test_stock_checkpoints_load_at_other_degrees_and_stages(
    world: Worlds, stock: tuple[Path, dict[str, list[float]]]
) -> None:
    folder, expected = stock
    [found] = world(1).run(_load, folder)
    for name, to, said, losses in found:
        if said:
            assert f"is of data=2 (2 ranks), ZeRO {name[-1]}, {name[:-1]}; this job is data=1 (1 rank)" in said
            assert "load by name (convert=True)" in said
        assert bool(said) == (not name.endswith("0") or to > 0), "without ZeRO, any number of replicas reads the files"
        assert losses == pytest.approx(expected[name], rel=1e-5 if name.startswith("fp32") else 1e-2), (name, to)


def test_files_that_do_not_name_the_degrees_have_no_slices_on_one_model_rank(
    stock: tuple[Path, dict[str, list[float]]], tmp_path: Path
) -> None:
    (tag,) = (path for path in (stock[0] / "fp321").iterdir() if path.is_dir())
    expected = layout_of_files(tag, "AdamW")
    shutil.copytree(tag, tmp_path / "copy")
    file = tmp_path / "copy/mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    content.pop("checkpoint_parallel_dimensions", None)
    torch.save(content, file)
    assert layout_of_files(tmp_path / "copy", "AdamW") == expected
    content["mp_world_size"] = 2
    torch.save(content, file)
    found = layout_of_files(tmp_path / "copy", "AdamW")
    assert found is not None
    assert found.topology is None, "two model ranks may be stages or slices"


def test_command_exports_stock_checkpoints(stock: tuple[Path, dict[str, list[float]]], tmp_path: Path) -> None:
    for name in ("fp320", "fp321", "fp323"):
        assert cli.main(["export", str(stock[0] / name), f"{tmp_path / name}.pt"]) == 0
        assert torch.load(f"{tmp_path / name}.pt")["3.scale"].tolist() == [0.5, 0.5]


def _warnings_of_unscaled_states(folder: Path) -> list[bool]:
    start()
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
    engine, *_ = deepspeed.initialize(model=_module(), config=_config(0, **fp16))
    _train(engine, range(2))
    engine.save_checkpoint(str(folder), "stock")
    engine.destroy()
    found = []
    for zero, corrects, has_states in ((0, True, True), (2, True, True), (0, False, True), (0, True, False)):
        with PipelineParallelGrid("data=-1") as grid:
            grid.correct_norms = corrects
            engine, *_ = initialize(model=_module(), config=_config(zero, **fp16), mpu=grid)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                checkpoint.load(engine, folder, load_optimizer_states=has_states)
            found.append(any("does not multiply losses by it" in str(each.message) for each in caught))
            destroy_engine(engine)
    return found


def test_states_of_unscaled_gradients_are_warned_about_where_losses_are_scaled(world: Worlds, tmp_path: Path) -> None:
    """DeepSpeed's engine in fp16 without ZeRO divides gradients by a scale that its losses do not have."""
    assert world(2).run(_warnings_of_unscaled_states, tmp_path)[0] == [True, True, False, False]


def _refuse(folder: Path) -> list[str]:
    said = []
    for zero, name, more in ((0, "fp32", {}), (1, "fp32", {}), (1, "fp32", {"is_larger": True})):
        with _engine(zero, **more) as engine:
            before = [one.detach().clone() for one in engine.module.parameters()]
            options = {"tag": "stock", "convert": zero == 1}
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load(engine, folder / f"{name}{3 if more else 2}", **options)
            said.append(str(caught.value))
            assert all(map(torch.equal, before, engine.module.parameters()))
            (folder / "fp322/stock/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(missing_ok=True)
    return said


def test_stock_checkpoints_that_cannot_be_loaded_are_refused(
    world: Worlds, stock: tuple[Path, dict[str, list[float]]]
) -> None:
    layout, missing, model = world(1).run(_refuse, stock[0])[0]
    assert "DeepSpeedZeroOptimizer at ZeRO 2 became" in layout
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing" in missing
    assert "is of another model: it has no parameter '4.weight' [4, 4]" in model


# -- pipelines ---------------------------------------------------------------------------------------------------------


class _Counted(nn.Linear):
    """A layer whose outputs depend on a buffer that each pass changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("passes", torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        self.passes += 1
        return cast("torch.Tensor", super().forward(inputs) * self.passes.sqrt().to(inputs.dtype))


def _specs(*, are_tied: bool = False) -> list[LayerSpec]:
    specs = [LayerSpec(_Counted, *sizes) for sizes in LAYERS]
    if are_tied:
        tied = TiedLayerSpec("end", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"])
        return [tied, *specs[:2], torch.tanh, specs[3], tied]
    return specs


def _optimizer(module: nn.Module, has_groups: bool) -> Any:
    if not has_groups:
        return torch.optim.AdamW(module.parameters(), lr=0.01)
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.01}, {"params": [], "lr": 0.02}]
    for one in module.parameters():
        groups[one.dim() == 1]["params"].append(one)
    return torch.optim.AdamW(groups)


PIPELINES = {
    "zero1": (1, False, False, {}),
    "round robin": (1, False, False, {}),
    "zero0": (0, False, False, {}),
    "tied": (0, True, False, {}),
    "groups": (0, True, True, {}),
    "bf16": (0, True, True, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}),
}
"""The stage of ZeRO, whether layers are tied, whether the optimizer has groups, and further options."""


def _engine_of_pipeline(kind: str, grid: PipelineParallelGrid | None, method: str, zero: int | None = None) -> Any:
    start()
    saved_zero, are_tied, has_groups, more = PIPELINES[kind]
    torch.manual_seed(0)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "partition_method": method}
    specs = _specs(are_tied=are_tied)
    if grid is None:
        module: Any = StockPipelineModule(specs, num_stages=2, **options)
    else:
        module = PipelineModule(specs, grid=grid, **options)
    options = {"stage": saved_zero if zero is None else zero}
    options["round_robin_gradients"] = grid is None and kind == "round robin"
    config = engine_config(2, accumulation=2, zero_optimization=options, **more)
    make = deepspeed.initialize if grid is None else initialize
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(model=module, config=config, optimizer=_optimizer(module, has_groups))[0]


def _save_pipelines(folder: Path) -> dict[str, list[float]]:
    found = {}
    for kind in PIPELINES:
        engine = _engine_of_pipeline(kind, None, "uniform")
        train_pipeline(engine, range(2))
        engine.save_checkpoint(str(folder / kind), "stock")
        found[kind] = train_pipeline(engine, range(2, 4))
        engine.destroy()
    return found


def _load_pipelines(folder: Path, topology: str, method: str) -> dict[str, tuple[str, list[float]]]:
    found = {}
    for kind in PIPELINES:
        for zero in (0, 1):
            start()
            grid = PipelineParallelGrid(topology)
            engine, said = _engine_of_pipeline(kind, grid, method, zero), ""
            train_pipeline(engine, range(7, 8))
            try:
                checkpoint.load(engine, folder / kind, convert=False)
            except CheckpointLayoutError as error:
                said = str(error)
                checkpoint.load(engine, folder / kind)
            found[f"{kind} to {zero}"] = said, train_pipeline(engine, range(2, 4))
            destroy_engine(engine)
            grid.destroy()
    return found


@pytest.mark.thorough
def test_stock_pipelines_load_with_other_stages(world: Worlds, tmp_path: Path) -> None:
    expected = world(2).run(_save_pipelines, tmp_path)[0]
    for topology, method in (("pipe=2", "uniform"), ("pipe=2", "parameters"), ("pipe=1", "uniform")):
        for found in world(int(topology[-1])).run(_load_pipelines, tmp_path, topology, method):
            for name, (said, losses) in found.items():
                kind, zero = name.split(" to ")
                is_same = (method, topology, PIPELINES[kind][0]) == ("uniform", "pipe=2", int(zero))
                is_same = is_same and kind not in ("bf16", "round robin")
                assert bool(said) != is_same, (name, topology, method, said)
                assert "by name (convert=True)" in said or is_same
                close = 2e-2 if kind == "bf16" else 1e-5
                assert losses == pytest.approx(expected[kind], rel=close), (name, topology, method)
    for kind in ("zero0", "zero1"):
        with pytest.raises(CheckpointLayoutError, match=r"do not say which layers are tied\. Load it into an engine"):
            checkpoint.to_single_file(checkpoint.look_at(tmp_path / kind, "stock"), tmp_path / "to.pt")
    (tmp_path / "zero1/stock/zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"mp_rank_01_optim_states\.pt is missing"):
        checkpoint.to_single_file(checkpoint.look_at(tmp_path / "zero1", "stock"), tmp_path / "to.pt")
