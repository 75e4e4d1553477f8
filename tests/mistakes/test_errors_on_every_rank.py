"""Mistakes with grids, engines, pipelines and reducers raise on every rank, and the next attempt works."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from ds_topo import (
    DualPipeVModule,
    GradientReducer,
    PipelineModule,
    PipelineParallelGrid,
    ProcessGrid,
    ProcessTopology,
    clip_grad_norm_,
    collectives,
    groups,
    initialize,
    use,
)
from ds_topo.base.ledger import is_absent
from ds_topo.base.patches import StockDualPipeVModule
from ds_topo.base.torch_names import default_store
from ds_topo.errors import (
    CoordinateError,
    DisagreementError,
    EndOfSamplesError,
    EngineOptionError,
    ExpertSizeError,
    MissingTopologyError,
    TopologyError,
    UnknownAxisError,
    WorldSizeError,
)
from ds_topo.layers import ParallelLinear
from tests.support.world import Worlds, names_threads

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
PIPELINE = {**CONFIG, "gradient_accumulation_steps": 2}


_made: list[Any] = []
"""The objects that a mistake has created; the test destroys them."""


def _grid(spec: Any = "data=2,model=2", **options: Any) -> PipelineParallelGrid:
    _made.append(PipelineParallelGrid(spec, **options))
    return _made[-1]


def _engine(model: nn.Module | None = None, **options: Any) -> Any:
    return deepspeed.initialize(model=model or nn.Linear(4, 4), **{"config": CONFIG, **options})[0]


def _pipeline(layers: Any = None, *args: Any, **options: Any) -> PipelineModule:
    module = PipelineModule([nn.Linear(4, 4) for _ in range(4)] if layers is None else layers, *args, **options)
    _made.append(module.mpu())
    return module


def _clip_before_finish() -> None:
    module = nn.Linear(4, 4)
    reducer = GradientReducer(module, overlap=True)
    module(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    reducer.finish()


def _clip(before_finish: bool = False, **options: Any) -> None:
    module, grid = nn.Linear(4, 4), _grid("data=2,model=2")
    if before_finish:
        with GradientReducer(module, grid=grid).no_sync():
            module(torch.ones(2, 4)).sum().backward()
    clip_grad_norm_(module.parameters(), **{"max_norm": 1.0, "grid": grid, **options})


def _clip_an_unknown_expert_on_one_rank() -> None:
    parameter, grid = nn.Parameter(torch.ones(4)), _grid("data=2,model=2")
    parameter.grad = torch.ones(4)
    if dist.get_rank() == 2:
        parameter.allreduce, parameter.group_name = False, "ep_size_7"  # type: ignore[attr-defined]
    clip_grad_norm_(parameter, 1.0, grid)


def _clip_on_a_part_of_an_axis() -> None:
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = nn.Parameter(distribute_tensor(torch.ones(4), pairs["inner"], [Shard(0)]))
    whole.sum().backward()
    clip_grad_norm_(whole, 1.0, _grid("data=4"))


def _clip_under_zero() -> None:
    config = {**CONFIG, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    engine = _engine(mpu=_grid(), config=config)
    clip_grad_norm_(engine.module.parameters(), 1.0, engine.mpu)


class _Broken:
    """A topology whose queries raise."""

    axes = ("data",)

    @property
    def dims(self) -> list[int]:
        return [1 // 0]


def _engine_in_another_order(kind: str) -> None:
    model = nn.Linear(4, 4)
    found = sorted(model.parameters(), key=lambda each: each.dim(), reverse=_on_rank(1, False, True))
    build = partial(torch.optim.SGD, found, lr=0.1)
    given = {"list": {"model_parameters": found}, "function": {"optimizer": lambda _: build()}}
    _engine(model, mpu=_grid("data=4"), **given.get(kind, {"optimizer": build()}))


def _sgd(model: nn.Module, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def _read(parameters: Iterator[nn.Parameter]) -> Iterator[nn.Parameter]:
    list(parameters)
    return parameters


def _engine_of_replaced_layers() -> None:
    model, grid = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), _grid()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0] = ParallelLinear.from_linear(model[0], -1, group=grid.get_group("model"))
    model[1] = ParallelLinear.from_linear(model[1], 0, group=grid.get_group("model"))
    _engine(model, optimizer=optimizer, mpu=grid)


def _scheduler_of(model: nn.Module) -> LambdaLR:
    return LambdaLR(torch.optim.SGD(model.parameters(), lr=0.1), lambda step: 0.5**step)


def _on_rank(rank: int, wrong: Any, right: Any) -> Any:
    return wrong if dist.get_rank() == rank else right


class _Marked(nn.Linear):
    """A slice of a layer with Megatron's marks."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.tensor_model_parallel = True


def _after(what: str) -> Any:
    grid = _grid()
    if what == "destroy":
        grid.destroy()
    return grid


def _train_on(samples: Any, spec: str = "pipe=4", **options: Any) -> None:
    """Train one step of a pipeline on the batches that this function returns."""
    module = _pipeline(topology=spec, **{"loss_fn": nn.MSELoss(), **options})
    engine = _engine(module, config={**PIPELINE, "train_micro_batch_size_per_gpu": 2})
    try:
        engine.train_batch(data_iter=samples())
    finally:
        engine.destroy()


def _stock_pipeline(layers: list[Any]) -> None:
    with use(_grid("pipe=2,data=2")):
        DeepSpeedPipelineModule(layers, num_stages=2)


_SAMPLE = (torch.ones(2, 4), torch.ones(2, 4))


def _ends_badly() -> Any:
    yield _SAMPLE
    raise OSError("disk on fire")


def _forward_another_type(dtype: torch.dtype, **config: Any) -> None:
    """Pass float32 to a model of another type."""
    engine = _engine(nn.Linear(4, 4).to(dtype), mpu=_grid(), config={**CONFIG, **config})
    try:
        engine(_SAMPLE[0])
    finally:
        engine.destroy()


def _load_whole_weights(of: str) -> None:
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if of == "stages":
        _pipeline(list(whole), topology="data=2,pipe=2").load_state_dict(whole.state_dict())
    elif of == "slices":
        layers = ParallelLinear.convert_parallel_linear(whole, -1, group=_grid().get_group("model"))
        layers.load_state_dict(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict())
    else:
        specs = [{"patterns": [r".*\.?0\.weight$"], "partition_type": "column"}]
        specs += [{"patterns": [r".*\.?1\.weight$"], "partition_type": "row"}]
        section = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
        weights = {name: value.clone() for name, value in whole.state_dict().items()}
        engine = _engine(whole, mpu=_grid(), config={**CONFIG, "tensor_parallel": section})
        try:
            engine.module.load_state_dict(weights)
        finally:
            engine.destroy()


def _reduce_late() -> None:
    layer = nn.Linear(4, 4)
    layer(torch.ones(2, 4)).sum().backward()
    reducer = GradientReducer(layer)
    try:
        reducer.finish()
    finally:
        reducer.detach()


def _step_after_destroy(call: str, reduced: bool) -> None:
    """Call a method that a program has kept, of an engine whose grid was destroyed."""
    config = {**CONFIG, "zero_optimization": {"stage": 1}, "gradient_reducer": reduced}
    config["zero_allow_untested_optimizer"] = True
    engine = initialize(model=_pipeline(topology="pipe=2,data=2", loss_fn=nn.MSELoss()), config=config)[0]
    kept = getattr(engine, call)
    engine.train_batch(iter([_SAMPLE]))
    engine.mpu.destroy()
    try:
        kept(iter([_SAMPLE]))
    finally:
        engine.destroy()


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception] | tuple[type[Exception], ...], str]] = {
    # grids
    "pip": (lambda: _grid("pip=2,data=2"), UnknownAxisError, "did you mean 'pipe'?"),
    "modle": (lambda: _grid("modle=2,data=2"), UnknownAxisError, "did you mean 'model'?"),
    "tp_size": (lambda: _grid("tp_size=2,data=8"), UnknownAxisError, "did you mean 'model'?"),
    "dat": (lambda: _grid("dat=4"), UnknownAxisError, "did you mean 'data'?"),
    "rows": (lambda: _grid("rows=2,data=2"), UnknownAxisError, "extra_axes=['rows'], or '+rows=...'"),
    "axes of a topology": (lambda: _grid(ProcessTopology(["hosts", "data"], [2, 2])), UnknownAxisError, "'hosts'"),
    "extra axis with a meaning": (lambda: _grid("data=4", extra_axes=["data"]), TopologyError, "needs no declaration"),
    "extra axis that is absent": (lambda: _grid("data=4", extra_axes=["row"]), TopologyError, "not in the topology"),
    "too many ranks": (lambda: _grid("data=8"), WorldSizeError, "Nearest that does: 'data=4'"),
    "too few ranks": (lambda: _grid("data=2"), WorldSizeError, "Nearest that does: 'data=4'"),
    "no divisor": (lambda: _grid("pipe=3,data=-1"), WorldSizeError, "does not divide the world size 4"),
    "far off": (lambda: _grid("data=3,pipe=30000001"), WorldSizeError, "Nearest that does"),
    "a spec without degrees": (lambda: _grid("data"), TopologyError, "expected"),
    "another order on rank 2": (
        lambda: _grid(_on_rank(2, "model=2,data=2", "data=2,model=2")),
        DisagreementError,
        "ranks [2] on",
    ),
    "a wrong product on rank 3": (lambda: _grid(_on_rank(3, "data=3", "data=4")), RuntimeError, "is for 3 ranks"),
    "a timeout of words": (lambda: _grid("data=4", timeout="60"), TypeError, "give seconds, or a datetime.timedelta"),
    "a timeout of words on rank 2": (
        lambda: _grid("data=4", timeout=_on_rank(2, "60", 60)),
        TypeError,
        "give seconds, or a datetime.timedelta",
    ),
    "a topology of a class of one's own on rank 1": (
        lambda: _grid(_on_rank(1, _Broken(), "data=4")),
        ZeroDivisionError,
        "by zero",
    ),
    "experts in words on rank 3": (
        lambda: groups.create_expert_groups(_grid("data=4"), _on_rank(3, "2", 2)),
        Exception,
        "'2'",
    ),
    "a timeout of nothing": (lambda: _grid("data=4", timeout=0), ValueError, "above 0"),
    "a grid of a grid": (lambda: _grid(_grid()), TypeError, "give a topology or a spec"),
    "a class": (lambda: _grid(ProcessTopology), TypeError, "give a topology or a spec"),
    "a list of ranks": (lambda: _grid([0, 1, 2, 3]), TopologyError, "malformed topology"),
    "no such axis": (lambda: _grid().get_group("pip"), UnknownAxisError, "its axes are|is not in the topology"),
    "no such index": (lambda: _grid().stage_to_global(3), CoordinateError, "out of range"),
    "after destroy": (lambda: _after("destroy").get_group("data"), RuntimeError, "build a new grid"),
    "float32 for bf16": (
        lambda: _forward_another_type(torch.float32, bf16={"enabled": True}),
        EngineOptionError,
        "convert inputs by .to(torch.bfloat16), or have",
    ),
    "float32 for a converted model": (
        lambda: _forward_another_type(torch.bfloat16),
        EngineOptionError,
        'leave .half() or .bfloat16() out and enable "bf16"',
    ),
    "whole weights for slices": (lambda: _load_whole_weights("slices"), RuntimeError, "is a slice of a weight, [2, 4]"),
    "whole weights for AutoTP": (lambda: _load_whole_weights("AutoTP"), RuntimeError, "is a slice of a weight, [2, 4]"),
    "whole weights for stages": (lambda: _load_whole_weights("stages"), RuntimeError, "strict=False, by which each"),
    "a layer without a group": (
        lambda: (_grid(), ParallelLinear(4, 4, dim=-1)),
        RuntimeError,
        "pass group=grid.get_group('model') to the layer",
    ),
    "a reducer after the backward pass": (_reduce_late, RuntimeError, "build it before the forward pass"),
    "a step after destroy": (lambda: _step_after_destroy("train_batch", False), RuntimeError, "build a new grid"),
    "a step with a reducer after destroy": (
        lambda: _step_after_destroy("train_batch", True),
        RuntimeError,
        "build a new grid",
    ),
    "a kept method of a pipeline": (lambda: _step_after_destroy("step", True), Exception, "Only train_batch"),
    "a torch grid of nonsense": (lambda: ProcessGrid("nope=4"), UnknownAxisError, "has no meaning here"),
    # experts
    "experts that do not divide": (lambda: groups.create_expert_groups(_grid("data=4"), 3), ExpertSizeError, "3"),
    "experts of none": (lambda: groups.create_expert_groups(_grid("data=4"), 0), ExpertSizeError, "0"),
    "no size of experts": (lambda: groups.create_expert_groups(_grid("data=4")), ExpertSizeError, "no axis 'expert'"),
    "a size on rank 1 alone": (
        lambda: groups.create_expert_groups(_grid("data=4"), _on_rank(1, 2, 4)),
        DisagreementError,
        "ranks [1] on",
    ),
    # engines
    "a topology as mpu": (
        lambda: initialize(model=nn.Linear(4, 4), mpu=ProcessTopology(["data"], [4]), config=CONFIG),
        TypeError,
        "needs a live grid",
    ),
    "a spec as mpu": (
        lambda: initialize(model=nn.Linear(4, 4), mpu="data=4", config=CONFIG),
        TypeError,
        "needs a live",
    ),
    "a class as mpu": (
        lambda: initialize(model=nn.Linear(4, 4), mpu=PipelineParallelGrid, config=CONFIG),
        TypeError,
        "needs a live grid",
    ),
    "a plain model on stages": (lambda: _engine(mpu=_grid("pipe=2,data=2")), EngineOptionError, "PipelineModule"),
    "slices without an mpu": (lambda: (_grid(), _engine(_Marked())), EngineOptionError, "pass mpu=grid"),
    "weights of slices as the whole model": (
        lambda: _engine(_Marked(), mpu=_grid()).save_16bit_model("/dev/null/folder"),
        EngineOptionError,
        "save_16bit_model with the slices ['weight']",
    ),
    "weights of a stage as the whole model": (
        lambda: _engine(_pipeline(topology="pipe=4", loss_fn=nn.MSELoss())).save_16bit_model("/dev/null/folder"),
        EngineOptionError,
        "save_16bit_model with the stages of 'pipe=4'",
    ),
    "a section that is not read": (
        lambda: (_grid(), _engine(config={**CONFIG, "topology": "data=2,model=2"})),
        EngineOptionError,
        "ds_topo.initialize reads the section",
    ),
    "a reducer that deepspeed.initialize does not read": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "gradient_reducer": {"bucket_bytes": 4096}}),
        EngineOptionError,
        '"gradient_reducer" is not read by deepspeed.initialize itself: call ds_topo.initialize',
    ),
    "another section than the mpu": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "topology": "model=2,data=2"}),
        TopologyError,
        "give only one of them, or make them equal",
    ),
    "a reducer of an engine": (
        lambda: GradientReducer(_engine(mpu=_grid())),
        TypeError,
        "call GradientReducer.attach(engine)",
    ),
    "half a micro-batch": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "train_micro_batch_size_per_gpu": 2.5}),
        EngineOptionError,
        "train_micro_batch_size_per_gpu is 2.5: give a whole number",
    ),
    "an optimizer of another model": (
        lambda: _engine(mpu=_grid(), optimizer=torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)),
        EngineOptionError,
        "optimizer=SGD has no parameter of the model",
    ),
    "an optimizer of replaced layers": (
        lambda: _engine_of_replaced_layers(),
        EngineOptionError,
        "it lacks ['0.weight'",
    ),
    "a scheduler of another optimizer": (
        lambda: _engine((model := nn.Linear(4, 4)), mpu=_grid(), lr_scheduler=_scheduler_of(model)),
        EngineOptionError,
        "lr_scheduler=LambdaLR was built for another optimizer (SGD) than the engine's (SGD)",
    ),
    "a misspelt key": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "gradient_cliping": 1.0}),
        EngineOptionError,
        "did you mean 'gradient_clipping'?",
    ),
    "a misspelt key of ZeRO": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "zero_optimization": {"stage": 1, "overlap_com": True}}),
        EngineOptionError,
        """config section "zero_optimization" has no key 'overlap_com': did you mean 'overlap_comm'?""",
    ),
    "a section of nonsense": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "topology": "modle=2,data=2"}),
        TopologyError,
        "is 'modle=2,data=2'",
    ),
    "ours with a section of nonsense": (
        lambda: initialize(model=nn.Linear(4, 4), config={**CONFIG, "topology": "modle=2,data=2"}),
        UnknownAxisError,
        "did you mean 'model'?",
    ),
    "one layer more": (
        lambda: _engine(
            nn.Sequential(*[nn.Linear(4, 4)] * _on_rank(3, 1, 1), *_on_rank(3, [nn.Linear(4, 4)], [])),
            mpu=_grid("data=4"),
        ),
        DisagreementError,
        "the parameters of replicas",
    ),
    "another width": (
        lambda: _engine(nn.Linear(4, _on_rank(1, 5, 4)), mpu=_grid("data=4")),
        DisagreementError,
        "weight [5, 4]",
    ),
    "another data type": (
        lambda: _engine(_on_rank(1, nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)), mpu=_grid("data=4")),
        DisagreementError,
        "bfloat16",
    ),
    "frozen on one rank": (
        lambda: _engine(nn.Linear(4, 4).requires_grad_(_on_rank(2, False, True)), mpu=_grid("data=4")),
        DisagreementError,
        "frozen",
    ),
    "another accumulation": (
        lambda: _engine(mpu=_grid("data=4"), config={**CONFIG, "gradient_accumulation_steps": _on_rank(1, 2, 1)}),
        DisagreementError,
        "gradient_accumulation_steps=2",
    ),
    "another micro-batch": (
        lambda: _engine(mpu=_grid("data=4"), config={**CONFIG, "train_micro_batch_size_per_gpu": _on_rank(0, 4, 2)}),
        DisagreementError,
        "train_micro_batch_size_per_gpu=4",
    ),
    "another optimizer": (
        lambda: _engine(
            mpu=_grid("data=4"),
            config={**CONFIG, "optimizer": {"type": _on_rank(1, "Adam", "SGD"), "params": {"lr": 0.1}}},
        ),
        DisagreementError,
        "optimizer=",
    ),
    "another learning rate": (
        lambda: _engine(
            mpu=_grid("data=4"),
            config={**CONFIG, "optimizer": {"type": "SGD", "params": {"lr": _on_rank(1, 0.2, 0.1)}}},
        ),
        DisagreementError,
        "'lr': 0.2",
    ),
    "an optimizer with parameters in another order": (
        lambda: _engine_in_another_order("client"),
        DisagreementError,
        "optimizer group 0[0]: bias",
    ),
    "a list of parameters in another order": (
        lambda: _engine_in_another_order("list"),
        DisagreementError,
        "sort what comes from it",
    ),
    "a function that builds an optimizer in another order": (
        lambda: _engine_in_another_order("function"),
        DisagreementError,
        "optimizer group 0[0]: bias",
    ),
    "an optimizer with another learning rate": (
        lambda: _engine((model := nn.Linear(4, 4)), mpu=_grid(), optimizer=_sgd(model, _on_rank(1, 0.2, 0.1))),
        DisagreementError,
        "'lr': 0.2",
    ),
    "a generator that was read before": (
        lambda: _engine((model := nn.Linear(4, 4)), mpu=_grid(), model_parameters=_read(model.parameters())),
        EngineOptionError,
        "A generator such as model.parameters() can be read only once",
    ),
    "parameters of two data types at ZeRO 3": (
        lambda: _engine(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()),
            mpu=_grid("data=4"),
            config={**CONFIG, "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True},
        ),
        (EngineOptionError, RuntimeError),
        "which keeps its parts of all parameters in one vector: convert the model to one of them|needs DeepSpeed >= ",
    ),
    "Muon in bf16 with sums in fp32 over slices": (
        lambda: _engine(
            mpu=_grid(),
            config={
                **CONFIG,
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "Muon", "params": {"lr": 0.1, "torch_adam": True}},
            },
        ),
        (EngineOptionError, ZeRORuntimeException),  # DeepSpeed 0.19.7 refuses it without slices, too
        "here 2 ranks share one. Use ZeRO 2|Muon cannot be used with the BF16_Optimizer",
    ),
    "another clipping": (
        lambda: _engine(mpu=_grid("data=4"), config={**CONFIG, "gradient_clipping": _on_rank(1, 1.0, 0.5)}),
        DisagreementError,
        "gradient_clipping",
    ),
    "another stage of ZeRO": (
        lambda: _engine(mpu=_grid("data=4"), config={**CONFIG, "zero_optimization": {"stage": _on_rank(3, 1, 0)}}),
        DisagreementError,
        "zero stage=1",
    ),
    # pipelines
    "no topology": (lambda: _pipeline(), MissingTopologyError, "needs a topology"),
    "a topology and a grid": (
        lambda: _pipeline(topology="pipe=4", grid=_grid("pipe=4")),
        TopologyError,
        "pass one of them",
    ),
    "a spec as grid": (lambda: _pipeline(grid="pipe=4"), TypeError, "pass a live grid"),
    "a module as grid": (lambda: _pipeline(grid=_pipeline(topology="pipe=4")), TypeError, "pass its grid"),
    "other stages than the topology's": (
        lambda: _pipeline(num_stages=2, topology="pipe=4"),
        TopologyError,
        "num_stages=2, but 'pipe=4' has 4",
    ),
    "fewer layers than stages": (
        lambda: _pipeline([nn.Linear(4, 4)], topology="pipe=4"),
        TopologyError,
        "1 layers for the 4",
    ),
    "no layers": (lambda: _pipeline([], topology="pipe=4"), ValueError, "layers is empty"),
    "a class as layer": (
        lambda: _pipeline([nn.Linear] * 4, topology="pipe=4"),
        TypeError,
        "give LayerSpec(Linear, ...)",
    ),
    "a name as layer": (lambda: _pipeline(["linear"] * 4, topology="pipe=4"), TypeError, "layer 0 is 'linear'"),
    "a number as layer": (lambda: _pipeline([4] * 4, topology="pipe=4"), TypeError, "layer 0 is 4"),
    "None as layer": (
        lambda: _pipeline([nn.Linear(4, 4), None], topology="pipe=2,data=2"),
        TypeError,
        "layer 1 is None",
    ),
    "a word as layers": (lambda: _pipeline("linear", topology="pipe=4"), TypeError, "give a list of modules"),
    "a class as layers": (lambda: _pipeline(nn.Linear, topology="pipe=4"), TypeError, "give a list of modules"),
    "stages that do not divide": (lambda: _pipeline(num_stages=3), WorldSizeError, "does not divide the world size 4"),
    "a topology without stages' ranks": (lambda: _pipeline(topology="pipe=8"), WorldSizeError, "Nearest that does"),
    "a mistyped stage axis": (lambda: _pipeline(topology="pip=2,data=2"), UnknownAxisError, "did you mean 'pipe'?"),
    "a config that is absent": (lambda: _pipeline(config="absent.json"), TopologyError, "cannot be read"),
    "a config without a topology": (lambda: _pipeline(config={"a": 1}), TopologyError, 'no "topology" section'),
    "an iterator that is too short": (
        lambda: _train_on(lambda: iter([_SAMPLE])),
        EndOfSamplesError,
        "rank 0 (pipe=0) has 1 of the 2 micro-batches",
    ),
    "a generator that is too short on the last stage": (
        lambda: _train_on(lambda: (_SAMPLE for _ in range(_on_rank(3, 1, 2)))),
        EndOfSamplesError,
        "rank 3 (pipe=3) has 1 of the 2 micro-batches",
    ),
    "an iterator that is too short along data": (
        lambda: _train_on(lambda: iter([_SAMPLE] * _on_rank(2, 1, 2)), "data=4"),
        EndOfSamplesError,
        "rank 2 (data=2) has 1 of the 2 micro-batches",
    ),
    "no iterator on the last stage": (
        lambda: _train_on(lambda: _on_rank(3, None, iter([_SAMPLE] * 2))),
        EndOfSamplesError,
        "rank 3 (pipe=3) has no data iterator",
    ),
    "a list as iterator on the first stage": (
        lambda: _train_on(lambda: _on_rank(0, [_SAMPLE] * 2, iter([_SAMPLE] * 2))),
        Exception,
        "pass iter(...) of it|rank 0 (pipe=0) failed to read samples",
    ),
    "samples that cannot be read on the first stage": (
        lambda: _train_on(lambda: _on_rank(0, _ends_badly(), iter([_SAMPLE] * 2))),
        Exception,
        "disk on fire|rank 0 (pipe=0) failed to read samples",
    ),
    "a dictionary as batch": (
        lambda: _train_on(lambda: iter([{"inputs": _SAMPLE[0], "labels": _SAMPLE[1]}] * 2), "pipe=2,data=2"),
        TypeError,
        "a batch of this pipeline is a dict: it must be (inputs, labels)",
    ),
    "rows as batch on the last stage": (
        lambda: _train_on(lambda: iter([_on_rank(3, torch.ones(2, 4), _SAMPLE)] * 2)),
        Exception,
        "a batch of this pipeline is a Tensor|rank 3 (pipe=3) failed to read samples",
    ),
    "another number of layers on rank 2": (
        lambda: _pipeline([nn.Linear(4, 4) for _ in range(_on_rank(2, 6, 4))], topology="pipe=2,data=2"),
        DisagreementError,
        "only rank 2: ['layer 4: Linear', 'layer 5: Linear']",
    ),
    "another layer on rank 3 of DeepSpeed's own module": (
        lambda: _stock_pipeline([_on_rank(3, torch.relu, LayerSpec(nn.Linear, 4, 4)), nn.Linear(4, 4)]),
        DisagreementError,
        "only rank 0: ['layer 0: Linear']; only rank 3: ['layer 0: relu']",
    ),
    "a tied layer of another key on rank 1": (
        lambda: _stock_pipeline([TiedLayerSpec(_on_rank(1, "a", "b"), nn.Linear, 4, 4) for _ in range(2)]),
        DisagreementError,
        "only rank 1: [\"layer 0: Linear tied by 'a'\"",
    ),
    "tied layers of two widths": (
        lambda: _stock_pipeline([TiedLayerSpec("tied", nn.Linear, 4, width) for width in (8, 4)]),
        DisagreementError,
        "the layers tied by 'tied'",
    ),
    "tied layers of two types": (
        lambda: _pipeline(
            [TiedLayerSpec("tied", nn.Linear, 4, 4, dtype=each) for each in (torch.bfloat16, torch.float32)],
            topology="pipe=2,data=2",
        ),
        DisagreementError,
        "['weight: bfloat16 [4, 4]']",
    ),
    "no loss function on one last stage": (
        lambda: _train_on(lambda: iter([_SAMPLE] * 2), "pipe=2,data=2", loss_fn=_on_rank(3, None, nn.MSELoss())),
        DisagreementError,
        "loss function=none",
    ),
    "no loss function": (
        lambda: _train_on(lambda: iter([_SAMPLE] * 2), "data=4", loss_fn=None),
        EngineOptionError,
        "values instead of a loss. The module has no loss_fn",
    ),
    "a forward pass of a pipeline": (
        lambda: _engine(_pipeline(topology="pipe=2,data=2", loss_fn=nn.MSELoss()), config=PIPELINE)(_SAMPLE[0]),
        RuntimeError,
        "call loss = engine.train_batch(data_iter)",
    ),
    # engines
    "a step without a backward pass": (lambda: _engine(mpu=_grid()).step(), RuntimeError, "without a backward pass"),
    "a pipeline's method": (
        lambda: _engine(mpu=_grid()).train_batch(iter([_SAMPLE])),
        AttributeError,
        "train_batch() of an engine without a pipeline",
    ),
    "sizes that are no product": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "train_batch_size": 8, "gradient_accumulation_steps": 1}),
        EngineOptionError,
        "In 'data=2,model=2' they are along ['data=2']",
    ),
    "a precision without a section": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "bf16": True}),
        EngineOptionError,
        'config section "bf16" is True: give a mapping, such as {"enabled": true}',
    ),
    "a fourth stage": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "zero_optimization": {"stage": 4}}),
        EngineOptionError,
        '"stage" is 4: ZeRO has the stages',
    ),
    "clipping as text": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "gradient_clipping": "auto"}),
        EngineOptionError,
        "gradient_clipping is 'auto': give a number; Trainer and accelerate",
    ),
    "an unknown optimizer": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "optimizer": {"type": "AdamWW"}}),
        EngineOptionError,
        "has the type 'AdamWW': choose a class of torch.optim",
    ),
    "parameters as optimizer": (
        lambda: _engine(mpu=_grid(), optimizer=iter([])),
        TypeError,
        "give one such as torch.optim.AdamW(model.parameters())",
    ),
    "a model of FSDP2": (
        lambda: _engine(fully_shard(nn.Linear(4, 4), mesh=(grid := _grid())["data"]), mpu=grid),
        EngineOptionError,
        "is sharded by FSDP (fully_shard)",
    ),
    "a model of DTensors": (
        lambda: _engine(distribute_module(nn.Linear(4, 4), (grid := _grid())["model"]), mpu=grid),
        EngineOptionError,
        "parameter 'weight' is a DTensor",
    ),
    "AutoTP of a model that it does not know": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "tensor_parallel": {"autotp_size": 2}}),
        EngineOptionError,
        'name its parameters, such as "tensor_parallel": {"partition_config"',
    ),
    # reducers
    "a spec as the reducer's grid": (lambda: GradientReducer(nn.Linear(4, 4), grid="data=4"), TypeError, "give a grid"),
    "a topology as the reducer's grid": (
        lambda: GradientReducer(nn.Linear(4, 4), grid=ProcessTopology(["data"], [4])),
        TypeError,
        "get_data_parallel_group()",
    ),
    "ranks as a group": (lambda: GradientReducer(nn.Linear(4, 4), process_group=[0, 1]), TypeError, "process group"),
    "a grid and a group": (
        lambda: GradientReducer(nn.Linear(4, 4), grid=_grid(), process_group=dist.group.WORLD),
        ValueError,
        "give one of them",
    ),
    "DDP": (
        lambda: GradientReducer(DistributedDataParallel(nn.Linear(4, 4))),
        ValueError,
        "reduces its gradients already",
    ),
    "a reducer of DTensors": (
        lambda: GradientReducer(distribute_module(nn.Linear(4, 4), (grid := _grid())["model"]), grid=grid),
        ValueError,
        "parameter 'weight' is a DTensor",
    ),
    "no module": (lambda: GradientReducer([nn.Linear(4, 4)]), TypeError, "give a torch.nn.Module"),
    "parameters": (lambda: GradientReducer(nn.Linear(4, 4).parameters()), TypeError, "give a torch.nn.Module"),
    "nothing to train": (
        lambda: GradientReducer(nn.Linear(4, 4).requires_grad_(False)),
        ValueError,
        "no parameter requires a gradient",
    ),
    "an engine to the constructor": (
        lambda: GradientReducer.attach(nn.Linear(4, 4)),
        TypeError,
        "what deepspeed.initialize returns",
    ),
    "a group for an engine's reducer": (
        lambda: GradientReducer.attach(_engine(mpu=_grid()), process_group=dist.group.WORLD),
        TypeError,
        "omit ['process_group'], which the engine provides",
    ),
    "clipping before finish()": (
        _clip_before_finish,
        RuntimeError,
        "changed between backward and finish(), while they were being reduced: call clip_grad_norm_()",
    ),
    "a norm before finish()": (
        lambda: _clip(before_finish=True),
        RuntimeError,
        "clip_grad_norm_() on parameter 'weight' and others, whose gradients are not reduced",
    ),
    "a norm without a grid": (lambda: _clip(grid="data=4"), TypeError, "grid='data=4': pass a live grid"),
    "a norm of a negative order": (
        lambda: _clip(norm_type=-2),
        ValueError,
        "norm_type=-2: give a positive number, or inf",
    ),
    "a norm of an unknown expert on rank 2": (
        _clip_an_unknown_expert_on_one_rank,
        Exception,
        "an expert of group 'ep_size_7', which does not exist|clip_grad_norm_() failed on other ranks",
    ),
    "a norm over a part of an axis": (
        _clip_on_a_part_of_an_axis,
        ValueError,
        "they are not all ranks of this rank along any axes of 'data=4'",
    ),
    "a norm of ZeRO's gradients": (_clip_under_zero, RuntimeError, 'set "gradient_clipping" in the config'),
    "another option on rank 1": (
        lambda: GradientReducer(nn.Linear(4, 4), bucket_bytes=_on_rank(1, 8, 4)),
        DisagreementError,
        "bucket_bytes=8",
    ),
    "an option of words on rank 1": (
        lambda: GradientReducer(nn.Linear(4, 4), overlap=_on_rank(1, "false", None)),
        Exception,
        "overlap='false'",
    ),
    "ignored names that are not there": (
        lambda: GradientReducer(nn.Linear(4, 4), ignored_parameters=["wight"]),
        ValueError,
        "wight",
    ),
}


def _make(name: str) -> tuple[type[Exception] | None, str, float]:
    warnings.simplefilter("ignore")
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(verbose=False)
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    mistake, _, _ = MISTAKES[name]
    start = time.monotonic()
    try:
        mistake()
    except Exception as error:
        found = (type(error), str(error), time.monotonic() - start)
    else:
        found = (None, "no error", time.monotonic() - start)
    dist.barrier()  # gloo reports a group that ends while another rank still connects
    while _made:
        _made.pop().destroy()
    with _grid("data=2,pipe=2") as grid:  # a valid grid works after any refused input
        total = torch.ones(1)
        dist.all_reduce(total, group=grid.get_group("data"))
        assert total.item() == 2
        dist.barrier()
    return found


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_raises_on_every_rank_and_leaves_nothing_behind(world: Worlds, name: str) -> None:
    _, kind, message = MISTAKES[name]
    for raised, text, seconds in world(4).run(_make, name):
        assert raised is not None, "accepted in silence"
        assert issubclass(raised, kind) or issubclass(raised, DisagreementError), (raised, text)
        assert any(part in text for part in message.split("|")), text
        assert seconds < 10, "before any timeout"


class _Ends(nn.Linear):
    """A layer with a function of its outputs."""

    end: Any = staticmethod(lambda hidden: hidden)

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.end(super().forward(hidden))


_SENDABLE = "but stages send a tensor or a tuple of tensors to the next one: return these alone"
_WITHOUT_GRADIENT = "but the next stage returns a gradient of each floating-point tensor: give a constant"
_UNSENT: list[tuple[Any, str, str]] = [  # the end of a stage, and the errors while it trains and while it evaluates
    (lambda hidden: hidden, "", ""),
    (lambda hidden: (hidden, hidden.argmax(-1), hidden > 0), "", ""),
    (lambda hidden: {"x": hidden}, *[f"return {{'x': <a tensor of shape [2, 4]>}}, {_SENDABLE}"] * 2),
    (lambda hidden: [hidden], *[f"return [<a tensor of shape [2, 4]>], {_SENDABLE}"] * 2),
    (lambda hidden: (hidden, None), *[f"return None as element 1 of 2, {_SENDABLE}"] * 2),
    (lambda hidden: hidden.detach(), f"return float32 [2, 4] without a gradient, {_WITHOUT_GRADIENT}", ""),
    (
        lambda hidden: (hidden, torch.ones(2, 1)),
        f"return float32 [2, 1] without a gradient as element 1 of 2, {_WITHOUT_GRADIENT}",
        "",
    ),
]
_LOSSES: list[tuple[Any, str]] = [
    (lambda outputs: outputs.sum(), ""),
    (lambda outputs: (outputs.sum(), outputs), "returns a tuple instead of a loss. Let the last layer or loss_fn"),
    (lambda outputs: outputs.sum().item(), "returns a float instead of a loss"),
    (lambda _: None, "returns a NoneType instead of a loss"),
    (lambda outputs: outputs.sum(0), "returns [4] values instead of a loss"),
]


def _refuse_in_forward_passes(kind: type[PipelineModule]) -> None:
    """Run single forward passes of stages: an error within a step would close the connections of this world."""
    losses = [lambda outputs: outputs.sum()]
    grid = PipelineParallelGrid("pipe=2,data=2")
    module = kind([_Ends(4, 4) for _ in range(4)], grid=grid, loss_fn=lambda outputs, _: losses[0](outputs))
    engine = _engine(module, config={**CONFIG, "gradient_accumulation_steps": 4})
    has_phases = kind is not PipelineModule

    def error_of_forward_pass(phase: int, trains: bool = True) -> str:
        engine._reserve_pipe_buffers(8)
        engine.fwd_outputs, engine.total_loss, engine._compute_loss = [], None, True
        engine.pipe_buffers["inputs"][0] = engine.pipe_buffers["labels"][0] = torch.ones(2, 4)
        forward = engine._INSTRUCTION_MAP[schedule.ForwardPass]
        try:
            with torch.set_grad_enabled(trains):
                forward(engine, 0, **({"phase": phase} if has_phases else {}))
        except EngineOptionError as error:
            return str(error)
        return ""

    if has_phases or engine.is_first_stage():
        start, stop = module._local_start, module._local_stop
        for module.forward_funcs[-1].end, in_training, in_evaluation in _UNSENT:
            for trains, expected in ((True, in_training), (False, in_evaluation)):
                found, where = error_of_forward_pass(0, trains), f"layers {[*range(start, stop)]}"
                assert found.startswith(
                    f"stage {engine.stage_id} of a pipeline: {where} {expected}" if expected else ""
                ), found
                assert bool(found) == bool(expected), found
        module.forward_funcs[-1].end = _Ends.end
    if engine.is_last_stage():
        for losses[0], expected in _LOSSES:
            found = error_of_forward_pass(1)
            assert expected in found, found
            assert bool(found) == bool(expected), found
    losses[0] = _LOSSES[0][0]
    engine.fwd_outputs, engine.total_loss = [], None
    assert engine.train_batch(iter([_SAMPLE] * 4)).isfinite()
    engine.destroy()
    grid.destroy()


@pytest.mark.parametrize("kind", [PipelineModule, DualPipeVModule])
def test_forward_pass_refuses_what_the_schedule_cannot_pass_on(world: Worlds, kind: type[PipelineModule]) -> None:
    if kind is DualPipeVModule and is_absent(StockDualPipeVModule):
        pytest.skip("DualPipeV needs DeepSpeed >= 0.19.8")
    world(4).run(_refuse_in_forward_passes, kind)


def _accepted() -> list[str]:
    """Check inputs that must be accepted."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    done = []
    with _grid("+copies=2,data=2") as grid:
        done.append(grid.topology().spec)
    with _grid("rows=2,data=2", extra_axes=["rows"], timeout=30) as grid:
        done.append(f"{grid.get_data_parallel_group_ranks()}")
    with _grid("pipe=2,data=2") as grid:
        model = nn.Linear(4, 4)
        model.is_pipeline_stage = True
        engine = _engine(model, mpu=grid)
        done.append(type(engine).__name__)
        engine.destroy()
    engine, *_ = initialize(model=nn.Linear(4, 4), config={**CONFIG, "topology": "data=2,model=-1"})
    done.append(engine.mpu.topology().spec)
    grid = engine.mpu
    engine.destroy()
    grid.destroy()
    module = _pipeline([LayerSpec(nn.Linear, 4, 4), torch.relu, nn.Linear(4, 4)], "pipe=2,data=2", loss_fn=nn.MSELoss())
    done.append(module.topology().spec)
    module.mpu().destroy()
    module = _pipeline(num_stages=2, topology="pipe=2,data=2")
    module.mpu().destroy()
    return done


def test_valid_inputs_are_accepted(world: Worlds) -> None:
    assert world(4).run(_accepted)[0] == [
        "+copies=2,data=2",
        "[0, 1, 2, 3]",
        "DeepSpeedEngineOnGrid",
        "data=2,model=2",
        "pipe=2,data=2",
    ]


def _after_the_world() -> str:
    grid = _grid("data=2,model=2")
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"torch\.distributed was destroyed after this grid was built") as caught:
        grid.get_group("data")
    grid.destroy()
    return str(caught.value)


def test_grid_of_a_destroyed_world_raises(world: Worlds) -> None:
    assert "build a new grid" in world(4).run(_after_the_world)[0]


def _reduce_on_one_rank() -> None:
    with _grid("data=1,model=2") as grid:
        group = grid.get_group("model")
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"ds_topo\.collectives\.debug\(\) names"):
                collectives.reduce(torch.ones(4), group)
            default_store().set("raised", "")
        default_store().wait(["raised"], timedelta(seconds=30))


def test_error_of_different_collectives_names_the_debug_mode(world: Worlds) -> None:
    world(2).run(_reduce_on_one_rank, timeout=3.0)


def _save_on_one_rank(folder: str) -> None:
    deepspeed.init_distributed(verbose=False)
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    with _grid("data=2") as grid:
        config = {**CONFIG, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
        engine = _engine(mpu=grid, config=config)
        if dist.get_rank() == 0:
            with pytest.raises(DisagreementError, match=r"(?s)gathering the whole weights.*ranks \[1\] did not come"):
                engine.save_16bit_model(folder)
            default_store().set("raised", "")
        default_store().wait(["raised"], timedelta(seconds=30))
        engine.destroy()


def test_saving_whole_weights_on_one_rank_names_the_others(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_save_on_one_rank, str(tmp_path), timeout=3.0)


def _forgotten_expert_groups() -> list[float]:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    losses = []
    with _grid("model=2,data=2") as grid:
        model = nn.Sequential(nn.Linear(4, 4), _Mixture())
        engine = _engine(model, mpu=grid)
        for _ in range(2):
            loss = engine(torch.ones(2, 8, 4)).sum()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        engine.destroy()
    return losses


class _Mixture(nn.Module):
    """A mixture of two experts, each on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2, k=1, min_capacity=0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts(hidden)[0]


def test_engine_creates_missing_expert_groups(world: Worlds) -> None:
    losses = world(4).run(_forgotten_expert_groups)
    assert all(len(own) == 2 and own[0] != own[1] for own in losses)


def _second_engine_warns() -> None:
    deepspeed.init_distributed(verbose=False)
    with _grid(), pytest.warns(RuntimeWarning, match=r"mpu=PipelineParallelGrid\('data=-1'\)"):
        _engine().destroy()


def test_engine_without_an_mpu_warns_while_a_grid_splits_models(world: Worlds) -> None:
    world(4).run(_second_engine_warns)


def _train_on_float32() -> None:
    module = _pipeline(topology="pipe=2", loss_fn=nn.MSELoss())
    engine = _engine(module, config={**PIPELINE, "fp16": {"enabled": True}, "zero_allow_untested_optimizer": True})
    engine.train_batch(iter([_SAMPLE] * 2))


@names_threads
def test_all_stages_name_a_type_of_inputs_that_the_first_one_cannot_use(world: Worlds) -> None:
    for error in world(2).run(_train_on_float32, expect_failure=True):
        assert "inputs of type ['torch.float32'], but parameters of the engine have the type torch.float16" in str(
            error
        )
