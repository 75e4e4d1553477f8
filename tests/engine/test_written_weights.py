"""Weights that a program writes after ``initialize`` or between steps train on, as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_topo import PipelineParallelGrid, initialize
from ds_topo.engine import written_weights
from ds_topo.engine.written_weights import WrittenWeights
from tests.support.exhaustive import mark_exhaustive
from tests.support.small_engines import settings, start
from tests.support.training import destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(each.shape, generator=generator) for name, each in _layers().state_dict().items()}


def _loaded(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(values)


def _copied(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])


def _copied_to_data(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        parameter.data.copy_(values[name])


def _replaced(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        parameter.data = values[name].to(parameter.dtype)


def _gathered(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        _copied(module, values)


def _trained(zero: int, more: dict[str, Any], write: Callable[..., None] | None, switch: bool = True) -> Any:
    """Write weights before the first and before the third step; return the largest difference, and the warnings."""
    start()
    warnings.simplefilter("always")
    alone = _layers()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}, "gradient_accumulation_steps": 1, **more}
    with PipelineParallelGrid("data=2") as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        grid.check_weights = switch
        engine, *_ = initialize(model=_layers(), mpu=grid, config=settings(zero_optimization={"stage": zero}, **config))
        dtype = next(engine.module.parameters()).dtype
        for step in range(4):
            if write is not None and step % 2 == 0:
                write(engine.module, _values(step))
                _loaded(alone, _values(step))
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(inputs.chunk(2)[dist.get_rank()].to(dtype)).float().square().mean())
            engine.step()
            optimizer.zero_grad()
            alone(inputs).square().mean().backward()
            optimizer.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=zero == 3):
            found = [each.detach().float().clone() for each in engine.module.parameters()]
        engine.destroy()
    difference = max(float((a - b).norm() / b.norm()) for a, b in zip(found, alone.parameters(), strict=True))
    return difference, [str(each.message) for each in said if "refresh_fp32_params" in str(each.message)]


_BF16 = {"bf16": {"enabled": True}}
_FP16 = {"fp16": {"enabled": True, "loss_scale": 8}}
_REDUCER = {"gradient_reducer": True}
_ENGINES = [
    (1, {}),
    (1, _BF16),
    (2, _BF16),
    (3, _BF16),
    (1, {**_BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    (0, _FP16),
    (1, {**_BF16, **_REDUCER}),
    (0, _BF16),
    (2, {}),
    (3, {}),
    (1, _FP16),
    (3, _FP16),
    (2, _REDUCER),
    (1, {**_BF16, "data_types": {"grad_accum_dtype": "fp32"}, **_REDUCER}),
]
_WAYS = [_loaded, _copied_to_data, _replaced]


@pytest.mark.parametrize("write", mark_exhaustive(_WAYS, lambda number, _: number == 0))
@pytest.mark.parametrize(("zero", "more"), mark_exhaustive(_ENGINES, lambda number, _: number < 7))
def test_written_weights_are_kept(world: Worlds, zero: int, more: dict[str, Any], write: Callable[..., None]) -> None:
    if zero == 3:
        write = _gathered
    for difference, said in world(2).run(_trained, zero, more, write):
        assert difference < (0.02 if more.keys() & {"bf16", "fp16"} else 1e-6)
        assert len(said) == 2
        assert "check_weights = False" in said[0]


@pytest.mark.parametrize("write", _WAYS[1:])
def test_weights_written_to_data_are_kept(world: Worlds, write: Callable[..., None]) -> None:
    for difference, said in world(2).run(_trained, 1, _BF16, write):
        assert difference < 0.02
        assert len(said) == 2


@pytest.mark.parametrize(("zero", "more"), mark_exhaustive(_ENGINES, lambda number, _: number in (1, 3)))
def test_nothing_is_said_if_nothing_was_written(world: Worlds, zero: int, more: dict[str, Any]) -> None:
    for difference, said in world(2).run(_trained, zero, more, None):
        assert difference < 0.02
        assert said == []


def test_the_switch_leaves_weights_as_deepspeed_does(world: Worlds) -> None:
    for difference, said in world(2).run(_trained, 1, _BF16, _loaded, False):
        assert difference > 0.5
        assert said == []


class _Optimizer:
    def __init__(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.parts = parts


def _search(monkeypatch: pytest.MonkeyPatch, numel: int = 4, parts: int = 1) -> tuple[WrittenWeights, _Optimizer]:
    """Return the search over partitions of zeros."""
    optimizer = _Optimizer([(torch.zeros(numel), torch.zeros(numel)) for _ in range(parts)])
    monkeypatch.setitem(written_weights._PARTS, _Optimizer, lambda optimizer: iter(optimizer.parts))
    grid: Any = SimpleNamespace(check_weights=True)
    return WrittenWeights(nn.Module(), optimizer, grid), optimizer


def test_a_sample_of_each_partition_is_compared_within_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for parts in (1, 4, 5, 8, 9):
        search, optimizer = _search(monkeypatch, parts=parts)
        for step in range(3):
            for number, (own, _) in enumerate(optimizer.parts):
                own[0] = 1.0
                search._steps = step
                is_compared = search._sample_differs(optimizer.parts)
                assert is_compared == (number % (-(-parts // 4)) == step % (-(-parts // 4)))
                own[0] = 0.0


@pytest.mark.parametrize(("numel", "period"), [(1, 1), (1024, 1), (1025, 2), (2048, 2), (2049, 3)])
def test_a_sample_is_of_every_kth_element(monkeypatch: pytest.MonkeyPatch, numel: int, period: int) -> None:
    search, optimizer = _search(monkeypatch, numel)
    own = optimizer.parts[0][0]
    for element in (0, 1, period, numel - 1):
        own[element % numel] = 1.0
        assert search._sample_differs(optimizer.parts) == (element % numel % period == 0)
        own[element % numel] = 0.0


def test_rounding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = _search(monkeypatch)
    master = torch.tensor([1.0, 3.0, 1e-30, 0.0])
    eps = torch.finfo(torch.bfloat16).eps
    for factor, differs in ((1 + eps / 2, False), (1 - eps, False), (1 + 4 * eps, True), (1 - 4 * eps, True)):
        assert search._sample_differs([((master * factor).bfloat16(), master)]) is differs
    assert not search._sample_differs([(master.bfloat16(), master)])


def test_only_changed_elements_are_copied() -> None:
    master = torch.tensor([1.001, 2.001, 3.001])
    own = master.bfloat16()
    assert not written_weights._copy_changed(own, master)
    own[1], own[2] = 5.0, torch.nan
    with mock.patch.object(written_weights, "_AT_A_TIME", 2):
        assert written_weights._copy_changed(own, master)
    assert torch.equal(master, torch.tensor([1.001, 5.0, 3.001])), "what is not a number is not a weight"


def test_on_an_accelerator_later_comparisons_are_read_when_they_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps wait; later ones warn a step late, and start a comparison when the last one has ended."""
    search, optimizer = _search(monkeypatch)
    events: list[Any] = []

    def record() -> Any:
        events.append(SimpleNamespace(query=lambda: is_ready))
        return events[-1]

    class Found:
        """The result of a comparison on a device."""

        def __init__(self, differs: bool) -> None:
            self.differs, self.device = differs, torch.device("cuda")

        def any(self) -> Found:
            return self

        def to(self, device: str, non_blocking: bool) -> torch.Tensor:
            return torch.tensor(self.differs)

        def __bool__(self) -> bool:
            return self.differs

    monkeypatch.setattr(written_weights, "_are_equal", lambda own, master: False)
    monkeypatch.setattr(torch, "stack", lambda flags: Found(bool(flags[0])))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: SimpleNamespace(record_event=record))
    own, is_ready = optimizer.parts[0][0], False
    said: list[str] = []
    monkeypatch.setattr(search, "_warn", lambda which, result: said.append(result))
    own[0] = 1.0
    for search._steps in (0, 1):
        assert search._sample_differs(optimizer.parts), "the first steps wait"
    search._steps = 2
    for _ in range(2):
        assert not search._sample_differs(optimizer.parts)
        assert (len(events), said) == (1, []), "the comparison is under way"
    own[0], is_ready = 0.0, True
    assert not search._sample_differs(optimizer.parts)
    assert (len(events), len(said)) == (2, 1)
    assert "they were lost" in said[0]
    assert not search._sample_differs(optimizer.parts)
    assert (len(events), len(said)) == (3, 1)


def _replaced_by_another_shape() -> None:
    start()
    config = settings(zero_optimization={"stage": 1}, gradient_accumulation_steps=1)
    with PipelineParallelGrid("data=2") as grid:
        engine, *_ = initialize(model=_layers(), mpu=grid, config=config)
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.module[0].weight.data = torch.zeros(16, 8)
        engine.step()


def test_weights_of_another_shape_are_refused(world: Worlds) -> None:
    for error in world(2).run(_replaced_by_another_shape, expect_failure=True):
        assert isinstance(error, ValueError)
        assert "0.weight.data was replaced by a tensor of shape (16, 8)" in str(error)


def _only_evaluates() -> None:
    start()
    with PipelineParallelGrid("data=1") as grid:
        config = settings(bf16={"enabled": True})
        del config["optimizer"]
        engine, *_ = initialize(model=nn.Linear(2, 1), mpu=grid, config=config)
        assert engine(torch.ones(1, 2, dtype=torch.bfloat16)).shape == (1, 1)
        destroy_engine(engine)


def test_an_engine_of_bf16_without_an_optimizer_evaluates(world: Worlds) -> None:
    world(1).run(_only_evaluates)
