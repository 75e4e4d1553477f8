"""Loading with ``convert=True`` keeps every value in any precision, stage of ZeRO and groups of the optimizer.

The values are read by DeepSpeed's own functions for debugging, and not by this package.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from ds_topo import PipelineParallelGrid, checkpoint, initialize
from ds_topo.checkpoint.engine_facts import inner_optimizer
from ds_topo.errors import CheckpointModelError
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


def _groups(module: nn.Module, kind: str) -> Any:
    some = [one for one in module.parameters() if one.requires_grad or kind == "all"]
    if kind != "decay":
        return some
    return [
        {"params": [one for one in some if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in some if one.dim() == 1], "weight_decay": 0.0},
    ]


@contextmanager
def _engine(precision: str, zero: int, groups: str, *, is_larger: bool = False) -> Iterator[Any]:
    start()
    grid, module = PipelineParallelGrid("data=2"), Adapted(is_larger=is_larger)
    half = {} if precision == "fp32" else {precision: {"enabled": True}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = initialize(
            model=module,
            config=engine_config(2, zero_optimization={"stage": zero}, **half),
            optimizer=torch.optim.AdamW(_groups(module, groups), lr=0.01),
            mpu=grid,
        )
    yield engine
    destroy_engine(engine)
    grid.destroy()


def _train(engine: Any, steps: range) -> None:
    dtype = next(engine.module.parameters()).dtype
    for step in steps:
        inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(step + 10 * engine.mpu.get_sample_rank()))
        loss = F.mse_loss(engine(inputs.to(dtype)).float(), inputs.sin())
        engine.backward(loss)
        engine.step()


def _values(engine: Any) -> Values:
    """Return the master weights and states of trained parameters by name, whole and in fp32."""
    optimizer, inner, found = engine.optimizer, inner_optimizer(engine), {}
    masters: dict[int, torch.Tensor] = {}
    for own, copies in zip(getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=False):
        masters.update((id(one), copy) for one, copy in zip(own, copies, strict=True))  # FP16_UnfusedOptimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # DeepSpeed does so in the first step
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        master = masters.get(id(parameter), parameter)
        is_whole = inner is optimizer or master is not parameter
        found[name] = (master if is_whole else safe_get_full_fp32_param(parameter)).detach().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            state = inner.state[master][key] if is_whole else safe_get_full_optimizer_state(parameter, key)
            found[f"{name}.{key}"] = state.detach().clone()
    steps = {float(state["step"]) for state in inner.state.values() if state}
    assert len(steps) == 1, steps
    return {**found, "step": torch.tensor([*steps])}


SOURCES = [
    *(("fp32", zero, "all") for zero in (0, 1, 3)),
    *(("bf16", zero, "trained") for zero in (0, 1, 3)),
    *(("fp16", zero, "trained") for zero in (0, 2)),
    ("fp32", 0, "decay"),
]
TARGETS = [
    *(("fp32", 0, groups) for groups in ("all", "trained", "decay")),
    *(("fp32", 2, "decay"), ("fp32", 3, "trained")),
    *(("bf16", zero, "trained") for zero in (0, 1, 3)),
    *(("fp16", zero, "decay") for zero in (0, 1)),
]


def _load_all(folder: Path) -> tuple[list[tuple[Any, Any, str, list[str]]], dict[int, Values]]:
    found, saved = [], {}
    for number, source in enumerate(SOURCES):
        with _engine(*source) as engine:
            _train(engine, range(3))
            with torch.no_grad():
                engine.module.scale.fill_(0.5)
            checkpoint.save(engine, folder, str(number))
            saved[number] = _values(engine)
    for target in TARGETS:
        for number, source in enumerate(SOURCES):
            with _engine(*target) as engine:
                checkpoint.load(engine, folder, str(number), convert=True)
                values, weights = _values(engine), saved[number]
                wrong = [name for name in weights if not torch.equal(values[name].float(), weights[name].float())]
                wrong += ["names"] if values.keys() != weights.keys() else []
                wrong += ["scale"] if float(engine.module.scale.sum()) != 2.5 else []
                for name, one in engine.module.named_parameters():
                    if one.requires_grad and target[1] < 3 and not torch.equal(one, weights[name].to(one.dtype)):
                        wrong.append(f"weight of {name}")
                decays = [group["weight_decay"] for group in inner_optimizer(engine).param_groups]
                if target[2] == "decay" and decays != [0.1, 0.0]:
                    wrong.append(f"weight_decay {decays}")
                wrong += ["steps"] if engine.global_steps != 3 else []
                _train(engine, range(3, 4))
                found.append((source, target, str(number), wrong))
    return found, saved


def test_load_keeps_every_value_in_any_precision_stage_and_groups(world: Worlds, tmp_path: Path) -> None:
    for rows, _ in (found := world(2).run(_load_all, tmp_path)):
        assert len(rows) == len(SOURCES) * len(TARGETS)
        assert [row for row in rows if row[3]] == []
    for number, (precision, zero, _) in enumerate(SOURCES):  # the command's conversion, read by zero_to_fp32
        if zero == 0 and precision != "fp32":
            checkpoint.convert(checkpoint.look_at(tmp_path, str(number)), tmp_path / "to", "data=3", zero=2)
            weights, expected = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "to"), str(number)), found[0][1]
            for name in ("adapter.weight", "norm.bias", "head.bias"):
                assert torch.equal(weights[name], expected[number][name])


def _load_changed(folder: Path) -> tuple[list[str], list[str]]:
    said, warned = [], []
    with _engine("fp32", 1, "trained") as engine:
        _train(engine, range(2))
        checkpoint.save(engine, folder, "small")
        expected = _values(engine)
    with _engine("fp32", 1, "trained", is_larger=True) as engine:
        _train(engine, range(2))
        checkpoint.save(engine, folder, "large")
        before = _values(engine)
        with pytest.raises(CheckpointModelError) as caught:
            checkpoint.load(engine, folder, "small", convert=True)
        said.append(str(caught.value))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            checkpoint.load(engine, folder, "small", convert=True, load_module_strict=False)
        warned += [str(one.message) for one in seen if "was loaded although" in str(one.message)]
        values = _values(engine)
        assert all(torch.equal(values[name], expected[name]) for name in expected)
        assert torch.equal(values["added.weight"], before["added.weight"])
        assert not values["added.weight.exp_avg"].any()
    with _engine("fp32", 3, "trained") as engine:
        with pytest.raises(CheckpointModelError) as caught:
            checkpoint.load(engine, folder, "large", convert=True)
        said.append(str(caught.value))
    return said, warned


def test_added_and_removed_parameters_are_named(world: Worlds, tmp_path: Path) -> None:
    for rank, (said, warned) in enumerate(world(2).run(_load_changed, tmp_path)):
        assert "it has no parameter 'added.weight' [4, 4]" in said[0]
        assert "it has 'added.weight' [4, 4], which the model does not have" in said[1]
        assert len(warned) == (rank == 0)
        assert all("it has no parameter 'added.bias' [4]" in one for one in warned)
