"""Stock DeepSpeed has each defect that a file of ``ds_topo/engine/repairs`` repairs, in the releases that it names.

The same programs run on a grid, which has none of these defects: so it is the defect that makes the difference.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule as StockPipelineModule
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from packaging.version import Version
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid
from ds_topo.base.patches import DualPipeVEngine
from ds_topo.base.supported import ENGINES, number
from ds_topo.engine import parts, repairs
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

pytestmark = pytest.mark.thorough  # for those who change ds_topo

Grid: TypeAlias = PipelineParallelGrid | None
Losses: TypeAlias = Callable[[Any], Iterator[torch.Tensor]]
FOLDER = Path(str(repairs.__file__)).parent
FILES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
RELEASES = re.compile(r"^Releases: (?:all|before (?P<end>[\d.]+\d))\.$", re.MULTILINE)
REPORTS = re.compile(r"^Reports: (?:no public report found|.*\bdeepspeedai/DeepSpeed#\d+)", re.MULTILINE)
RATE = 0.1
WHOLE = {"gradient_accumulation_steps": 1}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


class Net(nn.Module):
    """Layers of which a call may use some, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in "ABC"})

    def forward(self, hidden: torch.Tensor, use: str = "AB") -> tuple[torch.Tensor, torch.Tensor]:
        for name in use:
            hidden = hidden + torch.tanh(self.layers[name](hidden))
        return hidden, self.layers["C"](hidden)


def sample(seed: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))


def build(grid: Grid, module: nn.Module, zero: int = 0, optimizer: Any = None, **config: Any) -> Any:
    """Return an engine with SGD by default: DeepSpeed's own without a grid."""
    given: dict[str, Any] = {"zero_optimization": {"stage": zero}, **config}
    if optimizer is None:
        given["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    config = settings(**given)
    if optimizer is not None:
        del config["optimizer"]
    return deepspeed.initialize(model=module, optimizer=optimizer, mpu=grid, config=config)[0]


def destroy(engine: Any) -> None:
    engine.destroy()
    FWD_MODULE_STACK.clear()  # see kept_modules


def differs(grid: Grid, steps: list[list[Losses]], zero: int, *, own: bool = True, **more: Any) -> bool:
    """Tell whether an engine fails, or has other parameters than torch's SGD after steps of two micro-batches.

    Args:
        grid: its grid, if any.
        steps: for each step and micro-batch a function that yields losses.
        zero: its stage of ZeRO.
        own: the program calls ``engine.backward(loss)`` and not ``loss.backward()``.
        more: further options of ZeRO.
    """
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
    engine = build(grid, Net(), zero_optimization={"stage": zero, **more})
    try:
        for micro_batches in steps:
            for losses in micro_batches:
                for loss in losses(engine):
                    engine.backward(loss, retain_graph=True) if own else loss.backward(retain_graph=True)
                engine.step()
                for loss in losses(alone):
                    (loss / len(micro_batches)).backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        found = [safe_get_full_fp32_param(each) for each in engine.module.parameters()]
    except KeyError:
        return True
    except RuntimeError as error:
        if "a second backward pass in the last micro-batch" in str(error):
            return False  # a refusal
        raise
    finally:
        destroy(engine)
    pairs = zip(found, alone.parameters(), strict=True)
    return not all(torch.allclose(ours, wanted, rtol=1e-4, atol=1e-5) for ours, wanted in pairs)


# -- the defects: a function for each file, which tells which ones an engine has ---------------------------------------


def adagrad_groups(grid: Grid) -> dict[str, bool]:
    found = {}
    for groups, lr, defect in ((2, RATE, "a step with two groups fails"), (1, 0.0, "the rate of a group is ignored")):
        module = nn.ParameterList(Net().parameters())
        given = [{"params": list(module)[part::groups], "lr": lr} for part in range(groups)]
        engine = build(grid, module, 1, torch.optim.Adagrad(given, lr=RATE), **WHOLE)
        before = module[0].detach().clone()
        try:
            engine.backward(torch.stack([each.square().sum() for each in module]).sum())
            engine.step()
            found[defect] = groups == 1 and not torch.equal(module[0], before)
        except IndexError:
            found[defect] = True
        destroy(engine)
    return found


def backward_passes(grid: Grid) -> dict[str, bool]:
    def of_two_outputs(net: Any) -> Iterator[torch.Tensor]:
        hidden, logits = net(sample(0))
        yield hidden.square().mean() + logits.abs().mean()

    def one_by_one(net: Any) -> Iterator[torch.Tensor]:
        hidden, logits = net(sample(0))
        yield hidden.square().mean()
        yield logits.abs().mean()

    def of_two_passes(net: Any) -> Iterator[torch.Tensor]:
        for seed in (0, 1):
            yield net(sample(seed))[1].square().mean()

    def with_penalty(net: Any) -> Iterator[torch.Tensor]:
        data = sample(0).requires_grad_()
        hidden, logits = net(data)
        (gradient,) = torch.autograd.grad(hidden.sum(), data, create_graph=True)
        yield gradient.square().mean() + logits.square().mean()

    return {
        "gradients by torch.autograd.grad() are divided": differs(grid, [[with_penalty] * 2], 1),
        "loss.backward() divides at each output": differs(grid, [[of_two_outputs] * 2], 1, own=False),
        "a second loss.backward() fails": differs(grid, [[one_by_one, of_two_outputs]], 1, own=False),
        "the last micro-batch keeps one pass": differs(grid, [[of_two_passes] * 2], 1),
    }


def bf16_infinities(grid: Grid) -> dict[str, bool]:
    bf16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    engine = build(grid, nn.Linear(8, 8), 1, **bf16, **WHOLE)
    assert isinstance(engine.optimizer, BF16_Optimizer)
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean() * math.inf)
    try:
        engine.step()
        fails = not bool(torch.isfinite(engine.module.weight).all())
    except AssertionError:
        fails = True
    destroy(engine)
    return {"a step with infinities fails": fails}


def kept_modules(grid: Grid) -> dict[str, bool]:
    engine = build(grid, Net(), 3)
    module = engine.module
    engine.destroy()
    keeps = any(each is module for each in FWD_MODULE_STACK)
    FWD_MODULE_STACK.clear()
    return {"a destroyed engine's module is kept": keeps}


def linked_states(grid: Grid) -> dict[str, bool]:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    groups = [{"params": list(each.parameters())} for each in module]
    engine = build(grid, module, 1, torch.optim.Adam(groups, lr=RATE), **WHOLE)
    engine.backward(engine(sample(0)).square().mean())
    engine.step()
    first, second = (_has_state(each.weight) for each in module)
    destroy(engine)
    assert first
    return {"the second group has no states": not second}


def _has_state(parameter: nn.Parameter) -> bool:
    try:
        return safe_get_full_optimizer_state(parameter, "exp_avg") is not None
    except ValueError:  # exp_avg not found in optimizer state fragment
        return False


def loss_scales(grid: Grid) -> dict[str, bool]:
    module = nn.Linear(8, 8).half()
    module.weight.data.fill_(0.0)
    module.bias.data.fill_(1.0)
    engine = build(grid, module, fp16={"enabled": True, "loss_scale": 256.0}, **WHOLE)
    engine.backward(engine(torch.ones(1, 8).half()).float().square().sum())  # each gradient is 2
    engine.step()
    updates = module.weight.float()
    destroy(engine)

    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}, **WHOLE}
    engine = build(grid, nn.Linear(8, 8), 1, gradient_clipping=1.0, **autocast)
    engine.backward(engine(sample(0)).float().square().mean())
    engine.step()
    norm = float(engine.get_global_grad_norm())
    destroy(engine)
    other = build(grid, nn.Linear(8, 8), 1, **WHOLE)
    scales = other.optimizer.torch_autocast_gradscaler is not None or other.optimizer.cur_scale != 1
    destroy(other)
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    return {
        "fp16 without ZeRO does not scale losses": not torch.allclose(updates, torch.tensor(-2 * RATE), rtol=0.01),
        "torch_autocast clips scaled gradients": norm > 1e3,
        "an engine after one with torch_autocast has a loss scale": scales,
    }


def micro_batches(grid: Grid) -> dict[str, bool]:
    engine, steps = build(grid, nn.Linear(8, 8)), []
    for number_of_passes in (2, 3):
        engine.set_train_batch_size(2 * number_of_passes)
        for _ in range(number_of_passes):
            engine.backward(engine(sample(0)).mean())
            engine.step()
            steps.append(engine.global_steps)
    destroy(engine)
    return {"a step ends too early": steps != [0, 1, 1, 1, 2]}


def pipeline_timers(grid: Grid) -> dict[str, bool]:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    kind: Any = partial(StockPipelineModule, num_stages=2) if grid is None else partial(PipelineModule, grid=grid)
    config = settings(**WHOLE, wall_clock_breakdown=True)
    engine, *_ = deepspeed.initialize(model=kind(layers, loss_fn=F.mse_loss), config=config)
    fails = False
    try:
        engine.train_batch(iter([(sample(0), sample(1))]))
    except AssertionError as error:
        fails = "timer has already been started" in str(error)
        engine._aggregate_total_loss()  # in which the last stage waits
    is_last = engine.is_last_stage()
    destroy(engine)
    return {} if is_last else {"all stages but the last fail": fails}


def step_of_zeros(grid: Grid) -> dict[str, bool]:
    module = nn.Linear(8, 8)
    own = torch.optim.AdamW(module.parameters(), lr=RATE)
    engine = build(grid, module, 0, own, bf16={"enabled": True})
    counts = [float(state["step"]) for state in own.state.values()]
    destroy(engine)
    return {"Adam has counted a step": any(counts)}


def unused_parameters(grid: Grid) -> dict[str, bool]:
    def using(layers: str) -> Losses:
        return lambda net: iter([net(sample(len(layers)), layers)[1].square().mean()])

    first, last, both = ("A", "AB"), ("AB", "A"), ("A", "A")
    found = {}
    for zero, more, unused_in, uses in (
        *((3, {}, "the first", first), (3, {}, "all", both)),
        *((3, OFFLOAD, "the first", first), (3, OFFLOAD, "the last", last), (3, OFFLOAD, "all", both)),
        *((2, OFFLOAD, "the first", first), (2, OFFLOAD, "the last", last), (2, OFFLOAD, "all", both)),
        (1, OFFLOAD, "all", both),
    ):
        steps = [[using("AB")] * 2, [using(layers) for layers in uses]]
        found[f"unused in {unused_in}, ZeRO {zero} {[*more]}"] = differs(grid, steps, zero, **more)
    return found


# -- the tests ---------------------------------------------------------------------------------------------------------


def _found(file: str, on_grid: bool) -> dict[str, bool]:
    start()
    if not on_grid:
        return dict(globals()[file](None))
    with PipelineParallelGrid("pipe=2" if file == "pipeline_timers" else "data=1") as grid:
        return dict(globals()[file](grid))


def _run(world: Worlds, file: str, on_grid: bool) -> dict[str, bool]:
    by_rank = world(2 if file == "pipeline_timers" else 1).run(_found, file, on_grid)
    return {defect: is_there for found in by_rank for defect, is_there in found.items()}


def _docstring(file: str) -> str:
    return ast.get_docstring(ast.parse((FOLDER / f"{file}.py").read_text())) or ""


@pytest.mark.parametrize("file", FILES)
def test_each_file_says_its_releases_and_reports_and_has_a_row_and_a_test(file: str) -> None:
    text = _docstring(file)
    assert RELEASES.search(text)
    assert REPORTS.search(text)
    assert f"ds_topo.engine.repairs.{file}" in {part.where for part in parts.PARTS}
    assert file in globals(), "write a function of this name, which tells whether an engine has the defect"


@pytest.mark.parametrize("file", FILES)
def test_stock_deepspeed_has_the_defect(world: Worlds, file: str) -> None:
    found = _run(world, file, on_grid=False)
    said = RELEASES.search(_docstring(file))
    delete = f"DeepSpeed has mended this: delete ds_topo/engine/repairs/{file}.py and its row in parts.py. {found}"
    if said and said["end"] and number(deepspeed.__version__) >= Version(said["end"]):
        assert not any(found.values())
        assert ENGINES.oldest < Version(said["end"]), delete
    else:
        assert all(found.values()), delete


@pytest.mark.parametrize("file", FILES)
def test_engine_on_a_grid_does_not_have_it(world: Worlds, file: str) -> None:
    assert not any(_run(world, file, on_grid=True).values())


@pytest.mark.parametrize(
    ("kind", "is_last", "are_cleared"),
    [
        (PipelineEngine, False, True),
        (PipelineEngine, True, False),
        pytest.param(
            DualPipeVEngine,
            False,
            False,
            marks=pytest.mark.skipif(not issubclass(DualPipeVEngine, DeepSpeedEngine), reason="it has no DualPipeV"),
        ),
    ],
)
def test_stages_without_the_loss_leave_timers_of_backward_to_the_pipeline(
    kind: type, is_last: bool, are_cleared: bool
) -> None:
    from ds_topo.engine.repairs import pipeline_timers  # deleting it leaves the other tests

    class Stage(pipeline_timers.TimedOnce, kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.engine_timers = SimpleNamespace(backward_timers=["a"], backward_inner_timers=["b"])

        def is_last_stage(self) -> bool:
            return is_last

    engine = Stage.__new__(Stage)
    nn.Module.__init__(engine)
    Stage.__init__(engine)
    engine.complete()
    assert [*map(bool, vars(engine.engine_timers).values())] == [not are_cleared] * 2
