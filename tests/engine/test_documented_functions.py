"""What DeepSpeed documents for a program's own changes of weights, gradients and states gives stock's result on a grid.

Each use is a function of an engine and a moment of a job of three steps. The same job runs with stock DeepSpeed, on a
grid and with a reducer. All that the use returns, the norms and the parameters at the end are compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed import utils as ds
from deepspeed.pipe import PipelineModule as StockPipelineModule
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, ProcessTopology, initialize
from tests.support.exhaustive import mark_exhaustive
from tests.support.small_engines import settings, start
from tests.support.training import destroy_engine
from tests.support.world import Worlds

BUILT, REDUCED, STEPPED = "after initialize", "between backward and step", "after a step"
_STATE = "exp_avg"
Use = Callable[[Any, str], Any]


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _drawn(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the same random values on all ranks, of the shape that a parameter has as a whole."""
    return torch.randn(getattr(like, "ds_shape", like.shape), generator=torch.Generator().manual_seed(seed))


def _each(engine: Any, use: Callable[[nn.Parameter], Any]) -> list[Any]:
    return [use(parameter) for parameter in engine.module.parameters()]


@contextmanager
def _whole(engine: Any, writer: int | None = None) -> Iterator[None]:
    stage = engine.zero_optimization_stage()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=writer, enabled=stage == 3):
        yield


def _write(engine: Any) -> None:
    with _whole(engine, writer=0), torch.no_grad():
        _each(engine, lambda each: each.copy_(_drawn(each, 5)))


# -- the uses ---------------------------------------------------------------------------------------------------------


def sets_master_weights(engine: Any, moment: str) -> Any:
    if moment in (BUILT, STEPPED):
        _each(engine, lambda each: ds.safe_set_full_fp32_param(each, _drawn(each, 1)))
        return _each(engine, ds.safe_get_full_fp32_param)
    return None


def reads_master_weights(engine: Any, moment: str) -> Any:
    return _each(engine, ds.safe_get_full_fp32_param)


def sets_states(engine: Any, moment: str) -> Any:
    if moment == STEPPED:
        _each(engine, lambda each: ds.safe_set_full_optimizer_state(each, _drawn(each, 2), _STATE))
        return _each(engine, lambda each: ds.safe_get_full_optimizer_state(each, _STATE))
    return None


def sets_gradients(engine: Any, moment: str) -> Any:
    if moment != REDUCED:
        return None
    before = _each(engine, ds.safe_get_full_grad)
    _each(engine, lambda each: ds.safe_set_full_grad(each, _drawn(each, 3).to(before[0].dtype)))
    return before, _each(engine, ds.safe_get_full_grad)


def updates_gradients_at_once(engine: Any, moment: str) -> Any:
    if moment != REDUCED:
        return None
    ds.safe_update_full_grad_vectorized(list(engine.module.parameters()), lambda gradient, _: gradient * 0.5)
    return _each(engine, ds.safe_get_full_grad)


def sets_local_parts(engine: Any, moment: str) -> Any:
    """Change what this rank has of ZeRO 3; without it, DeepSpeed refuses."""
    found = []
    if moment == STEPPED:
        _each(engine, lambda each: ds.safe_set_local_fp32_param(each, ds.safe_get_local_fp32_param(each) * 2))
        scaled = [(each, ds.safe_get_local_optimizer_state(each, _STATE) * 3) for each in engine.module.parameters()]
        for each, value in scaled:
            ds.safe_set_local_optimizer_state(each, value, _STATE)
        found = _each(engine, lambda each: ds.safe_get_local_optimizer_state(each, _STATE))
    if moment == REDUCED:
        _each(engine, lambda each: ds.safe_set_local_grad(each, ds.safe_get_local_grad(each) * 2))
        found = _each(engine, ds.safe_get_local_grad)
    return found


def replaces_averaged_gradients(engine: Any, moment: str) -> Any:
    """Put other tensors into the lists of ZeRO 1 and 2 that the step reads."""
    if moment != REDUCED:
        return None
    lists = engine.optimizer.averaged_gradients
    for group in lists:
        lists[group] = [each.square() - each for each in lists[group]]
    return None


def writes_and_refreshes(engine: Any, moment: str) -> Any:
    if moment in (BUILT, STEPPED):
        _write(engine)
        engine.optimizer.refresh_fp32_params()
        return _each(engine, ds.safe_get_full_fp32_param)
    return None


def writes_only(engine: Any, moment: str) -> Any:
    """Write parameters without a refresh: engines with master weights overwrite them."""
    if moment in (BUILT, STEPPED):
        _write(engine)


def writes_data_only(engine: Any, moment: str) -> Any:
    if moment in (BUILT, STEPPED):
        with _whole(engine, writer=0):
            _each(engine, lambda each: each.data.copy_(_drawn(each, 6)))


def writes_and_sets_master_weights(engine: Any, moment: str) -> Any:
    if moment in (BUILT, STEPPED):
        _write(engine)
        _each(engine, lambda each: ds.safe_set_full_fp32_param(each, _drawn(each, 5)))


def offloads_and_reloads(engine: Any, moment: str) -> Any:
    if moment == STEPPED:
        engine.offload_states()
        engine.reload_states()


def loads_module_states(engine: Any, moment: str) -> Any:
    if moment in (BUILT, STEPPED) and engine.zero_optimization_stage() < 3:
        states = engine.module_state_dict()
        engine.load_module_state_dict({"module": {name: value * 1.5 for name, value in states.items()}})
        engine.optimizer.refresh_fp32_params()
        return [*engine.module_state_dict().values()]
    return None


def sets_the_rate(engine: Any, moment: str) -> Any:
    if moment == STEPPED:
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.5
        engine.set_lr(engine.get_lr()[0] * 0.5)
    return engine.get_lr()


def discards_gradients(engine: Any, moment: str) -> Any:
    if moment == STEPPED:
        engine.zero_grad()
        engine.optimizer.zero_grad()


USES: list[Use] = [
    sets_master_weights,
    reads_master_weights,
    sets_states,
    sets_gradients,
    updates_gradients_at_once,
    sets_local_parts,
    replaces_averaged_gradients,
    writes_and_refreshes,
    writes_only,
    writes_data_only,
    writes_and_sets_master_weights,
    offloads_and_reloads,
    loads_module_states,
    sets_the_rate,
    discards_gradients,
]
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 8}},
    "bf16 with fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}


# -- the jobs ---------------------------------------------------------------------------------------------------------


def _copied(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().float().clone()
    if isinstance(value, (list, tuple)):
        return [_copied(each) for each in value]
    return 0 if value is None else value


def _engine(config: dict[str, Any], side: str, spec: str) -> Any:
    """Build an engine of two layers, which are two stages where the layout has an axis ``pipe``."""
    config = {**config, "gradient_reducer": side == "reducer"}
    layers = _layers()
    if side == "stock":
        if "pipe" in spec:
            layers = StockPipelineModule(list(layers), num_stages=2, loss_fn=F.mse_loss)
        return deepspeed.initialize(model=layers, config=config)[0]
    grid = PipelineParallelGrid(spec)
    if not config["zero_optimization"]["stage"]:
        grid.correct_norms = False  # it also corrects stock's loss scale, and its first step on gradients of zero
    if "pipe" in spec:
        return initialize(model=PipelineModule(list(layers), grid=grid, loss_fn=F.mse_loss), config=config)[0]
    return initialize(model=layers, mpu=grid, config=config)[0]


def _job(use: Use, config: dict[str, Any], side: str, spec: str) -> list[Any]:
    """Return what a use gave, the norms and the parameters; or the type of the error that it raised."""
    engine = _engine(config, side, spec)
    dtype = next(engine.module.parameters()).dtype
    size = dist.get_world_size(engine.data_parallel_group)
    rank = dist.get_rank(engine.data_parallel_group)
    found: list[Any] = []
    try:
        found.append(_copied(use(engine, BUILT)))
        for step in range(3):
            whole = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
            inputs = whole.chunk(size)[rank]
            if "pipe" in spec:
                engine.train_batch(iter([(inputs, inputs.sin())]))
            else:
                engine.backward(engine(inputs).float().square().mean())
                found.append(_copied(use(engine, REDUCED)))
                engine.step()
            if engine.zero_optimization():  # stock keeps no norm at stage 0
                found.append(float(engine.get_global_grad_norm()))
            found.append(_copied(use(engine, STEPPED)))
        with _whole(engine):
            found.append(_copied(list(engine.module.parameters())))
    except Exception as error:
        found = [type(error)]
    grid = None if side == "stock" else engine.mpu
    destroy_engine(engine)
    if grid is not None:
        grid.destroy()
    return found


def _jobs(stage: int, precision: str, sides: tuple[str, ...], spec: str, replicas: int) -> dict[str, dict[str, Any]]:
    start()
    config = settings(
        train_micro_batch_size_per_gpu=4 // replicas,
        gradient_accumulation_steps=1,
        gradient_clipping=1.0,
        zero_optimization={"stage": stage},
        optimizer={"type": "Adam", "params": {"lr": 0.1, "eps": 0.01, "torch_adam": True}},
        **PRECISIONS[precision],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {use.__name__: {side: _job(use, config, side, spec) for side in sides} for use in USES}


_CASES = [(stage, precision) for precision in PRECISIONS for stage in range(4)]
_CASES.remove((0, "bf16 with fp32 sums"))  # DeepSpeed has no such engine
_DEFAULT = [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "bf16"), (1, "bf16 with fp32 sums")]
KNOWN = {
    ("offloads_and_reloads", "reducer"): "offload_states() cuts flat tensors anew, which a reducer refuses",
    ("sets_gradients", "reducer"): "BF16_Optimizer of stock ignores what safe_set_full_grad has set",
    ("updates_gradients_at_once", "reducer"): "the same",
}
"""What differs from stock at some stage, with the reason."""


def _compare(world: Worlds, case: tuple[int, str], spec: str, tolerance: float, ranks: int = 2) -> set[str]:
    """Compare all uses on all ranks with stock on ``ranks`` ranks; return those that are known to differ.

    Rank ``i`` of a grid with more ranks has the samples of rank ``i % ranks`` of stock.
    """
    sides = ("grid", "reducer") if case[0] < 3 else ("grid",)
    replicas = 1 if "pipe" in spec else ranks
    stock = world(ranks).run(_jobs, *case, ("stock",), spec, replicas)
    ours = world(ProcessTopology.from_spec(spec).world_size()).run(_jobs, *case, sides, spec, replicas)
    known = set()
    for rank, uses in enumerate(ours):
        different = {}
        for use, found in uses.items():
            for side in sides:
                limit = max(tolerance, 1e-6) if side == "reducer" else tolerance
                difference = _difference(found[side], stock[rank % ranks][use]["stock"], limit)
                if difference:
                    different[use, side] = difference
        if "shard" in spec and case[0] == 3:
            different.pop(("sets_local_parts", "grid"), None)  # ZeRO 3 over fewer ranks has larger parts
        assert {key: each for key, each in different.items() if key not in KNOWN} == {}
        known |= {use for use, _ in different}
    return known


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("stage", "precision"), mark_exhaustive(_CASES, default=lambda _, case: case in _DEFAULT))
def test_documented_functions_do_what_they_do_in_stock(world: Worlds, stage: int, precision: str) -> None:
    assert "sets_gradients" not in _compare(world, (stage, precision), "data=2", 0.0) or "sums" in precision


_OTHERS = [
    *(("data=2,shard=2", stage, 4) for stage in range(4)),
    *(("model=2,data=2", stage, 2) for stage in range(4)),
    *(("pipe=2", stage, 2) for stage in range(2)),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("spec", "stage", "ranks"), mark_exhaustive(_OTHERS, default=lambda _, case: case[:2] == ("data=2,shard=2", 2))
)
def test_documented_functions_do_what_they_do_in_stock_over_other_axes(
    world: Worlds, spec: str, stage: int, ranks: int
) -> None:
    _compare(world, (stage, "fp32"), spec, 1e-5, ranks)


def _difference(found: list[Any], stock: list[Any], tolerance: float) -> str:
    """Return where two jobs differ, or an empty string."""
    if isinstance(found[0], type) or isinstance(stock[0], type):
        return "" if found[0] == stock[0] else f"{found[0]} instead of {stock[0]}"
    try:
        torch.testing.assert_close(found, stock, rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        return str(error)
    return ""
