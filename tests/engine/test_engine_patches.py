"""Patches of a grid apply to its own engines; every other engine keeps DeepSpeed's methods."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from ds_topo import GradientReducer, PipelineModule, PipelineParallelGrid, groups
from ds_topo.base import patches
from ds_topo.base.classes import mixins_of
from ds_topo.base.ledger import Patch, ledger
from ds_topo.base.overrides import overridden_by
from ds_topo.engine import parts
from ds_topo.errors import EngineOptionError
from tests.support.ranks import run_ranks
from tests.support.small_engines import settings, start
from tests.support.world import Worlds

METHODS = {row.name for row in patches.ROWS if isinstance(row, Patch) and callable(getattr(row.owner, row.name, None))}
STAGE_1 = {"zero_optimization": {"stage": 1}}


class Recording(nn.Linear):
    """A layer that records which mpu DeepSpeed's functions would ask during its forward pass."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[Any] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append(deepspeed_groups.mpu)
        return super().forward(inputs)


def engine_of(mpu: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    return deepspeed.initialize(model=Recording(), mpu=mpu, config=settings(gradient_accumulation_steps=1, **more))[0]


def train(engine: Any) -> torch.Tensor:
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    return engine.module.weight.detach().clone()


def ours(*objects: Any) -> set[str]:
    """Return the names that classes of ours override in objects, and of patches and attributes of single objects."""
    overridden = {name for item in objects for mixin in mixins_of(item) for name in overridden_by(mixin)}
    own = {*(part.load().mixin_state for part in parts.PARTS), *METHODS} - {""}
    return overridden | {name for item in objects for name in vars(item) if name in own or "ds_topo" in name}


def process_wide() -> list[str]:
    return sorted(str(patch).removeprefix("deepspeed.") for patch in ledger.in_force())


def _stock_engine_beside_patched_one() -> None:
    start()
    stock_methods = {name: getattr(DeepSpeedEngine, name) for name in METHODS if hasattr(DeepSpeedEngine, name)}
    alone = train(engine_of())
    grid = PipelineParallelGrid("data=2")
    assert process_wide() == ["runtime.config.DeepSpeedConfig.__init__", "runtime.engine.DeepSpeedEngine.__init__"]
    stock, patched = engine_of(**STAGE_1), engine_of(grid, **STAGE_1)
    assert ours(stock, stock.optimizer) == set()
    for name, method in stock_methods.items():
        if name != "__init__":
            assert getattr(stock, name).__func__ is method
    assert {"forward", "backward", "step", "save_checkpoint"} <= ours(patched)
    assert {"step", "update_lp_params"} <= ours(patched.optimizer)
    for _ in range(2):
        torch.testing.assert_close(train(patched), train(stock))
    assert set(patched.module.seen) == {grid}
    assert set(stock.module.seen) == {None}
    grid.destroy()
    assert process_wide() == []
    assert DeepSpeedEngine.__init__ is stock_methods["__init__"]
    assert ours(stock, stock.optimizer, patched, patched.optimizer) == set()
    assert torch.equal(train(engine_of()), alone)


def test_stock_engine_keeps_deepspeeds_methods_while_a_grid_exists(world: Worlds) -> None:
    world(2).run(_stock_engine_beside_patched_one)


def _processwide_patches_of_everything() -> list[str]:
    start()
    with PipelineParallelGrid("data=2,model=2") as grid:
        groups.create_expert_groups(grid, 2)
        groups.create_zero_partition_groups(grid, 2)
        reducer = GradientReducer(nn.Linear(2, 2), grid=grid)
        found = process_wide()
        assert all(patch.process_wide for patch in ledger.in_force())
        reducer.detach()
    assert process_wide() == []
    return found


def test_grid_expert_groups_and_reducer_need_few_process_wide_patches(world: Worlds) -> None:
    assert world(4).run(_processwide_patches_of_everything)[0] == [
        "moe.mappings._gather_tokens",
        "runtime.config.DeepSpeedConfig.__init__",
        "runtime.engine.DeepSpeedEngine.__init__",
        "torch.nn.modules.module.Module.zero_grad",
        "torch.optim.optimizer.Optimizer.zero_grad",
        "utils.groups.get_tensor_model_parallel_src_rank",
    ]


def _two_grids() -> None:
    start()
    first, second = PipelineParallelGrid("data=2"), PipelineParallelGrid("seq=2")
    one, other = engine_of(first), engine_of(second)
    assert deepspeed_groups.mpu is second
    for engine in (one, other, one):
        train(engine)
    loss = one(torch.ones(2, 4)).sum()
    other(torch.ones(2, 4))
    one.backward(loss)
    assert (set(one.module.seen), set(other.module.seen)) == ({first}, {second})
    assert deepspeed_groups.mpu is second
    first.destroy()
    assert (ours(one), "forward" in ours(other)) == (set(), True)
    second.destroy()
    assert (ours(other), deepspeed_groups.mpu) == (set(), None)


def test_engines_of_two_grids_each_use_their_own(world: Worlds) -> None:
    world(2).run(_two_grids)


def _backward_of_the_program() -> None:
    start()
    asked: list[Any] = []
    with PipelineParallelGrid("data=2") as grid:
        engine, _ = engine_of(grid, **STAGE_1), engine_of()
        loss = engine(torch.ones(2, 4)).sum()
        engine.module.weight.register_hook(lambda _: asked.append(deepspeed_groups.mpu))
        assert deepspeed_groups.mpu is None, "the mpu of the engine that was built last"
        loss.backward()
        assert (asked, deepspeed_groups.mpu) == ([grid], None)


def test_backward_that_the_program_starts_uses_the_engines_mpu(world: Worlds) -> None:
    world(2).run(_backward_of_the_program)


def _interrupted_backward() -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        _, without_zero, engine = engine_of(), engine_of(grid), engine_of(grid, **STAGE_1)
        loss = without_zero(torch.ones(2, 4)).sum()
        with pytest.raises(RuntimeError, match="Please use engine"):
            loss.backward()
        assert deepspeed_groups.mpu is None
        for backward in (engine.backward, torch.Tensor.backward):
            hook = engine.module.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                backward(engine(torch.ones(2, 4)).sum())
            hook.remove()
            engine(torch.ones(2, 4))
            assert deepspeed_groups.mpu is None
        without_zero.backward(without_zero(torch.ones(2, 4)).sum())
        assert deepspeed_groups.mpu is None


def test_interrupted_backward_leaves_no_mpu_behind(world: Worlds) -> None:
    world(2).run(_interrupted_backward)


def _backward_through_two_engines() -> None:
    start()
    with PipelineParallelGrid("data=2") as first, PipelineParallelGrid("seq=2") as second:
        _, one, other = engine_of(), engine_of(first, **STAGE_1), engine_of(second, **STAGE_1)
        asked: list[Any] = []
        for engine in (one, other):
            engine.module.weight.register_hook(lambda _: asked.append(deepspeed_groups.mpu))
        for chained in (True, False):
            inputs = torch.ones(2, 4)
            outputs = other(one(inputs)) if chained else one(inputs) + other(inputs)
            outputs.sum().backward()
            assert deepspeed_groups.mpu is None
            one.zero_grad()
            other.zero_grad()
        assert asked[:2] == [second, first]


def test_backward_through_engines_of_two_grids_uses_each_ones_mpu(world: Worlds) -> None:
    world(2).run(_backward_through_two_engines)


def _trained(engine: Any) -> float:
    """Take a step with a gradient that is this rank's number; return by how much the parameters have decreased."""
    before = engine.module.weight.detach().clone()
    engine.backward(engine(torch.full((1, 4), float(dist.get_rank()))).sum())
    engine.step()
    return float((before - engine.module.weight).mean()) * 10


def _averages_beside_a_grid() -> list[float]:
    start()
    options = {"gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    older = engine_of(**options)
    with PipelineParallelGrid("data=2,model=2") as grid:
        grid.check_samples = False
        on_grid = engine_of(grid, **options)
        found = [_trained(older), _trained(on_grid)]
        younger, reduced = engine_of(**options), engine_of(grid, **options)
        reducer = GradientReducer.attach(reduced)
        found += [_trained(younger), _trained(reduced)]
        reducer.detach()
    return found


def _engine_dropped_on_one_rank() -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        kept = [engine_of()]
        if dist.get_rank() == 0:
            kept.clear()
            gc.collect()
        kept.append(engine_of(grid))
        assert deepspeed_groups.mpu is None


def test_garbage_collection_of_a_rank_does_not_change_the_current_mpu(world: Worlds) -> None:
    world(2).run(_engine_dropped_on_one_rank)


def test_engines_average_over_their_own_ranks_whichever_was_built_first(world: Worlds) -> None:
    for rank, found in enumerate(world(4).run(_averages_beside_a_grid)):
        replicas = 1.0 + rank % 2
        assert found == pytest.approx([1.5, replicas, 1.5, replicas], abs=1e-5)


def _failing_constructor() -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        before = process_wide()
        made: list[Any] = []
        construct = DeepSpeedEngine._configure_optimizer

        def fail(engine: Any, *_: Any) -> None:
            made.append(engine)
            raise ValueError("in the constructor")

        DeepSpeedEngine._configure_optimizer = fail
        try:
            for mpu in (grid, None):
                with pytest.raises(ValueError, match="in the constructor"):
                    engine_of(mpu)
        finally:
            DeepSpeedEngine._configure_optimizer = construct
        with pytest.raises(EngineOptionError, match="autotp_size"):
            engine_of(grid, tensor_parallel={"autotp_size": 2})
        assert ours(*made) == set()
        assert (process_wide(), deepspeed_groups.mpu) == (before, None)
        train(engine_of(grid))


def test_exception_in_an_engines_constructor_leaves_no_patch(world: Worlds) -> None:
    world(2).run(_failing_constructor)


def _dropped_engines() -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        engines = [engine_of(grid, **STAGE_1) for _ in range(3)]
        optimizers = [engine.optimizer for engine in engines]
        references = [weakref.ref(item) for item in (*engines, *optimizers)]
        for engine in engines:
            engine.destroy()
        del engine, engines, optimizers
        gc.collect()
        kept = [reference() is not None for reference in references]
        assert kept == [False] * 6


def test_grid_keeps_no_engine_alive(world: Worlds) -> None:
    world(2).run(_dropped_engines)


def _outlived_grid() -> None:
    start()
    grid = PipelineParallelGrid("data=2")
    engine = engine_of(grid, bf16={"enabled": True}, **STAGE_1)
    reducer = GradientReducer.attach(engine)
    grid.destroy()
    assert "forward" in ours(engine), "the reducer's, on top of the grid's"
    reducer.detach()
    assert ours(engine, engine.optimizer) == set()


def test_grid_may_be_destroyed_before_a_reducer_is_detached(world: Worlds) -> None:
    world(2).run(_outlived_grid)


def _copies() -> None:
    start()
    states, refusals = [], list[list[type]]()
    for spec in (None, "data=2"):
        grid = None if spec is None else PipelineParallelGrid(spec)
        torch.manual_seed(1)
        engine = engine_of(grid)
        train(engine)
        engine.module.seen.clear()
        file = io.BytesIO()
        torch.save((engine.state_dict(), engine.module.state_dict(), engine.optimizer.state_dict()), file)
        states.append(torch.load(io.BytesIO(file.getvalue())))
        assert not ours(copy.deepcopy(engine.optimizer))
        assert pickle.loads(pickle.dumps(engine.optimizer)).state_dict().keys() == engine.optimizer.state_dict().keys()
        partitioned = engine_of(grid, **STAGE_1)
        refusals.append([])
        for target in (engine, partitioned, partitioned.optimizer):
            with pytest.raises((AttributeError, TypeError)) as caught:  # of a hook, or of a group
                torch.save(target, io.BytesIO())
            refusals[-1].append(caught.type)
        twin = copy.deepcopy(engine.module)
        assert torch.equal(twin(torch.ones(1, 4)), engine.module(torch.ones(1, 4)))
        if grid is not None:
            grid.destroy()
    assert [set(state) for state in states[0]] == [set(state) for state in states[1]]
    assert refusals[0] == refusals[1]


def test_states_modules_and_optimizers_can_be_copied(world: Worlds) -> None:
    world(2).run(_copies)


def _pipeline() -> None:
    start()
    with PipelineParallelGrid("pipe=2,data=1") as grid:
        module = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, grid=grid, loss_fn=nn.MSELoss())
        engine, *_ = deepspeed.initialize(model=module, config=settings())
        assert ours(engine) >= {"train_batch", "eval_batch", "_next_batch", "save_checkpoint", "load_checkpoint"}
        with pytest.raises(RuntimeError, match=r"call loss = engine\.train_batch"):
            engine.step()
        engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 2))
    assert ours(engine) == set()


def test_pipeline_engine_gets_the_methods_of_pipelines(world: Worlds) -> None:
    world(2).run(_pipeline)


class UpAndDown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(torch.relu(self.up(inputs)))
        return output


def _auto_tensor_parallelism() -> list[list[float]]:
    start()
    layers = [
        {"patterns": [rf".*{name}\.weight$"], "partition_type": kind}
        for name, kind in (("up", "column"), ("down", "row"))
    ]
    tensor_parallel = {
        "autotp_size": 2,
        "partition_config": {"use_default_specs": False, "layer_specs": layers},
    }
    config = settings(gradient_accumulation_steps=1, tensor_parallel=tensor_parallel)
    losses: list[list[float]] = []
    with PipelineParallelGrid("data=1,model=2") as grid:
        for mpu in (None, grid):
            torch.manual_seed(0)
            engine, *_ = deepspeed.initialize(model=UpAndDown(), mpu=mpu, config=config)
            losses.append([])
            for _ in range(2):
                loss = engine(torch.ones(2, 8)).square().sum()
                engine.backward(loss)
                engine.step()
                losses[-1].append(loss.item())
            assert engine.module.up.weight.shape == (8, 8)
            assert (engine.mpu is grid, bool(ours(engine))) == (mpu is grid,) * 2
    return losses


def test_auto_tensor_parallelism_trains_on_a_grid_as_without_one() -> None:
    for without, with_grid in run_ranks(2, _auto_tensor_parallelism, deadline=120):
        assert with_grid == without
