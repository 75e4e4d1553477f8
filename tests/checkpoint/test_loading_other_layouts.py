"""Loading by name names what differs between models, and keeps stages of a pipeline, samples and random states.

``matrix`` compares every value in any precision, stage of ZeRO and groups of the optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, checkpoint, initialize
from ds_topo.errors import CheckpointLayoutError, CheckpointModelError, EngineOptionError
from tests.checkpoint.continued_jobs import engine_with_slices, train_pipeline
from tests.support.small_engines import start
from tests.support.training import destroy_engine, engine_config
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

Values = dict[str, torch.Tensor]


class Adapted(nn.Module):
    """A model with frozen layers, as with adapters, and a buffer."""

    def __init__(self, *, is_larger: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(4, 7)
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 4)
        self.register_buffer("scale", torch.ones(5))
        if is_larger:
            self.added = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.adapter(torch.tanh(self.base(hidden))))
        hidden = self.head(hidden * self.scale.to(hidden.dtype))
        return self.added(hidden) if hasattr(self, "added") else hidden


def _engine(zero: int, *, is_larger: bool = False) -> Any:
    return engine_with_slices("data=2", lambda grid: Adapted(is_larger=is_larger), zero)


def _train(engine: Any, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(step + 10 * engine.mpu.get_sample_rank()))
        loss = F.mse_loss(engine(inputs), inputs.sin())
        engine.backward(loss)
        engine.step()


def _values(engine: Any) -> Values:
    """Return master weights and states of trained parameters at ZeRO 1, as DeepSpeed's own functions read them."""
    engine.optimizer._hp_optimizer_states_linked = False  # DeepSpeed links states in the first step
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name] = safe_get_full_fp32_param(parameter).detach().clone()
            found[f"{name}.exp_avg"] = safe_get_full_optimizer_state(parameter, "exp_avg").detach().clone()
    return found


def _load_changed(folder: Path) -> tuple[list[str], list[str]]:
    said, warned = [], []
    with _engine(1) as engine:
        _train(engine, range(2))
        checkpoint.save(engine, folder, "small")
        expected = _values(engine)
    with _engine(1, is_larger=True) as engine:
        _train(engine, range(2))
        checkpoint.save(engine, folder, "large")
        before = _values(engine)
        with pytest.raises(CheckpointModelError) as caught:
            checkpoint.load(engine, folder, "small")
        said.append(str(caught.value))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            checkpoint.load(engine, folder, "small", load_module_strict=False)
        warned += [str(one.message) for one in seen if "was loaded although" in str(one.message)]
        values = _values(engine)
        assert all(torch.equal(values[name], expected[name]) for name in expected)
        assert torch.equal(values["added.weight"], before["added.weight"])
        assert not values["added.weight.exp_avg"].any()
    with _engine(3) as engine:
        with pytest.raises(CheckpointModelError) as caught:
            checkpoint.load(engine, folder, "large")
        said.append(str(caught.value))
    return said, warned


def test_added_and_removed_parameters_are_named(world: Worlds, tmp_path: Path) -> None:
    for rank, (said, warned) in enumerate(world(2).run(_load_changed, tmp_path)):
        assert "it has no parameter 'added.weight' [4, 4]" in said[0]
        assert "it has 'added.weight' [4, 4], which the model does not have" in said[1]
        assert len(warned) == (rank == 0)
        assert all("it has no parameter 'added.bias' [4]" in one for one in warned)


def _decayed(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    wide, narrow = ([one for one in parameters if (one.dim() > 1) == is_wide] for is_wide in (True, False))
    return torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}], lr=lr)


def _regroup(folder: Path) -> list[list[tuple[float, float]]]:
    """Save with one group and with two, and load each into the other; return rates and decays."""
    kinds: tuple[Any, ...] = (torch.optim.AdamW, _decayed)
    for number, kind in enumerate(kinds):
        with engine_with_slices("data=2", lambda grid: Adapted(), 1, optimizer=kind) as engine:
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.5
            _train(engine, range(1))
            checkpoint.save(engine, folder, f"from {number}")
    found = []
    for number, kind in enumerate(reversed(kinds)):
        with engine_with_slices("data=2", lambda grid: Adapted(), 1, optimizer=kind) as engine:
            checkpoint.load(engine, folder, f"from {number}")
            found.append([(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups])
    return found


def test_groups_keep_what_distinguishes_them(world: Worlds, tmp_path: Path) -> None:
    for found in world(2).run(_regroup, tmp_path):
        assert found == [[(0.5, 0.1), (0.5, 0.0)], [(0.5, 0.01)]]


# -- buffers -----------------------------------------------------------------------------------------------------------


def _load_with_other_buffers(folder: Path) -> list[tuple[str, bool]]:
    found = []
    for zero in (1, 3):
        with _engine(zero) as engine:
            _train(engine, range(1))
            checkpoint.save(engine, folder / str(zero), "saved")
    for zero, buffers in ((1, {"scale": 5, "shift": 5}), (3, {}), (1, {"scale": 1})):
        with _engine(zero) as engine:
            del engine.module.scale
            for name, size in buffers.items():
                engine.module.register_buffer(name, torch.ones(size))
            before = [one.detach().clone() for one in engine.module.parameters()]
            with pytest.raises(CheckpointModelError) as caught:
                checkpoint.load(engine, folder / str(zero), convert=False)
            same = all(map(torch.equal, before, engine.module.parameters())) and engine.global_steps == 0
            found.append((str(caught.value), same))
    return found


def test_other_buffers_are_refused_before_anything_changes(world: Worlds, tmp_path: Path) -> None:
    for found in world(2).run(_load_with_other_buffers, tmp_path):
        for (said, same), expected in zip(
            found,
            (
                "it has no buffer 'shift' [5]",
                "it has a buffer 'scale' [5] that the model does not have",
                "buffer 'scale' is [5] in the checkpoint and [1] in the model",
            ),
            strict=True,
        ):
            assert expected in said
            assert same


# -- stages of a pipeline ----------------------------------------------------------------------------------------------


@contextmanager
def _pipeline(method: str, zero: int, precision: str = "fp32") -> Iterator[Any]:
    start()
    grid, sizes = PipelineParallelGrid("pipe=2"), [(4, 16), (16, 4), (4, 4), (4, 4)]
    layers = [LayerSpec(nn.Linear, *size) for size in sizes]
    module = PipelineModule(layers, grid=grid, loss_fn=F.mse_loss, partition_method=method)
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.01}, {"params": [], "lr": 0.02}]
    for one in module.parameters():
        groups[16 in one.shape]["params"].append(one)
    half = {} if precision == "fp32" else {precision: {"enabled": True}}
    try:
        engine, *_ = initialize(
            model=module,
            config=engine_config(2, accumulation=2, clip=0.1, zero_optimization={"stage": zero}, **half),
            optimizer=torch.optim.AdamW(groups, lr=0.05),
        )
        yield engine
        destroy_engine(engine)
    finally:
        grid.destroy()


def _change_stages(folder: Path) -> list[tuple[str, list[float]]]:
    found = []
    for zero in (0, 1):  # the second stage has no parameter of the group of large ones
        with _pipeline("uniform", zero) as engine:
            assert len(engine.optimizer.param_groups) == 2 - engine.mpu.get_stage_id()
            train_pipeline(engine, range(2))
            checkpoint.save(engine, folder / str(zero), "saved")
            found.append(("", train_pipeline(engine, range(2, 4))))
    with _pipeline("parameters", 1) as engine:
        with pytest.raises(CheckpointLayoutError) as caught:
            checkpoint.load(engine, folder / "1", convert=False)
        checkpoint.load(engine, folder / "1")
        found.append((str(caught.value), train_pipeline(engine, range(2, 4))))
    return found


def test_pipeline_continues_with_another_partition_method_and_unequal_groups(world: Worlds, tmp_path: Path) -> None:
    found = world(2).run(_change_stages, tmp_path)
    for (_, expected), *others in found:
        assert [losses for _, losses in others] == [pytest.approx(expected, rel=1e-5)] * 2
        assert "stages that begin with layers [0, 2] became stages that begin with [0, 1]" in others[1][0]


def _build_half_pipeline() -> str:
    with pytest.raises(EngineOptionError) as caught, _pipeline("uniform", 0, "fp16"):
        pass
    return str(caught.value)


def test_half_precision_refuses_stages_of_unequal_groups_that_would_hang(world: Worlds) -> None:
    for said in world(2).run(_build_half_pipeline):
        assert "parameters in [2, 1] groups" in said
        assert "use ZeRO stage 1" in said


# -- samples and random states -----------------------------------------------------------------------------------------


def _train_on_next_samples(engine: Any, position: int, steps: int) -> tuple[int, list[float]]:
    """Train on samples that follow the program's position, four in a step, whatever the number of ranks."""
    losses = []
    for _ in range(steps):
        generators = (torch.Generator().manual_seed(position + number) for number in range(4))
        samples = torch.stack([torch.randn(4, generator=one) for one in generators])
        own = samples.chunk(dist.get_world_size())[engine.mpu.get_sample_rank()]
        loss = F.mse_loss(engine(own), own.sin())
        engine.backward(loss)
        engine.step()
        dist.all_reduce(loss := loss.detach())
        losses.append(float(loss) / dist.get_world_size())
        position += 4
    return position, losses


def _sampling_engine() -> Any:
    ranks = dist.get_world_size()
    return engine_with_slices(f"data={ranks}", lambda grid: Adapted(), 1, micro_batch=4 // ranks)


def _save_with_position(folder: Path) -> tuple[list[float], float]:
    with _sampling_engine() as engine:
        position, _ = _train_on_next_samples(engine, 100, 2)
        torch.manual_seed(40 + dist.get_rank())
        checkpoint.save(engine, folder, "saved", {"position": position})
        return _train_on_next_samples(engine, position, 2)[1], float(torch.rand(()))


def _load_with_position(folder: Path) -> tuple[list[float], float, tuple[int, int]]:
    with _sampling_engine() as engine:
        torch.manual_seed(7)
        _, state = checkpoint.load(engine, folder)
        counts = engine.global_steps, engine.global_samples
        return _train_on_next_samples(engine, state["position"], 2)[1], float(torch.rand(())), counts


def test_samples_continue_on_other_ranks_and_random_states_on_the_same(world: Worlds, tmp_path: Path) -> None:
    saved = world(2).run(_save_with_position, tmp_path)
    for size in (1, 2):
        for rank, (losses, drawn, counts) in enumerate(world(size).run(_load_with_position, tmp_path)):
            assert losses == pytest.approx(saved[0][0], rel=1e-5)
            assert counts == (2, 8)
            own = float(torch.rand((), generator=torch.Generator().manual_seed(7)))
            assert drawn == (saved[rank][1] if size == 2 else own), "other degrees leave random states alone"
