"""Values of a wrong kind are refused on each rank by itself, before it communicates."""

from __future__ import annotations

import copy
from collections import UserList
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ds_topo import (
    GradientReducer,
    LayerSpec,
    PipelineModule,
    PipelineParallelGrid,
    ProcessGrid,
    ProcessTopology,
    TiedLayerSpec,
    groups,
    initialize,
)
from ds_topo.base.ledger import ledger
from ds_topo.checkpoint.safe_reading import check_client_state
from ds_topo.engine.checks import check_engine_without_grid, check_groups_of_layers
from ds_topo.engine.config import check_top_level
from ds_topo.engine.pipelines.batches import _check_batch, _read_ahead
from ds_topo.engine.repairs.backward_passes import check_loss
from ds_topo.errors import EngineOptionError, TopologyError, UnknownAxisError, WorldSizeError
from ds_topo.layers import ParallelLinear
from tests.support.fake_world import fake_world

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
SPEC = "data=2,model=2"
TOPOLOGY = ProcessTopology.from_spec(SPEC)


_made: list[ProcessGrid] = []
"""The grids of a case."""


def _grid(spec: str, kind: type[ProcessGrid] = PipelineParallelGrid) -> Any:
    _made.append(kind(spec))
    return _made[-1]


def _destroyed(spec: str) -> Any:
    grid = _grid(spec)
    grid.destroy()
    return grid


class _Layer(nn.Linear):
    """A layer that keeps a grid or a process group."""

    def __init__(self, kept: Any) -> None:
        super().__init__(4, 4)
        self.kept = kept


def _initialize(model: Any = None, **options: Any) -> Any:
    return initialize(model=nn.Linear(4, 4) if model is None else model, config=CONFIG, **options)


def _deepspeeds(mpu: Any) -> Any:
    return deepspeed.initialize(model=nn.Linear(4, 4), mpu=mpu, config=dict(CONFIG))


def _pipeline(**options: Any) -> PipelineModule:
    return PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], topology="pipe=2,data=2", **options)


def _pipeline_with_mpu() -> None:
    grid = _grid("pipe=2,data=2")
    _initialize(PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], grid=grid), mpu=grid)


def _split_twice(first: int, second: int, width: int = 4) -> None:
    group = _grid("model=2,data=2").get_group("model")
    nn.Sequential(ParallelLinear(4, 4, dim=first, group=group), ParallelLinear(width, 4, dim=second, group=group))(
        torch.ones(2, 4)
    )


def _cast_after_reducer() -> None:
    module = nn.Linear(4, 4)
    reducer = GradientReducer(module)
    try:
        module.to(torch.bfloat16)(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        reducer.finish()
    finally:
        reducer.detach()


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(4, 4)


def _without_mpu(**sections: Any) -> None:
    config: Any = SimpleNamespace(_param_dict=sections)
    check_engine_without_grid(nn.Linear(4, 4), None, config)


def _mesh() -> Any:
    return _grid(SPEC).device_mesh()


SAMPLE = torch.ones(2, 4)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # mpus and models
    "a mesh as mpu": (
        lambda: _initialize(mpu=init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))),
        TypeError,
        "mpu=DeviceMesh",
    ),
    "a group as mpu": (lambda: _initialize(mpu=_grid(SPEC).get_group("data")), TypeError, "live grid"),
    "a torch grid as mpu": (lambda: _initialize(mpu=_grid(SPEC, ProcessGrid)), TypeError, "needs a live grid"),
    "a number as mpu": (lambda: _initialize(mpu=2), TypeError, "mpu=2: DeepSpeed needs a live grid"),
    "a topology as DeepSpeed's mpu": (
        lambda: _deepspeeds(TOPOLOGY),
        TypeError,
        "needs a live grid, such as PipelineParallelGrid('data=2,model=2')",
    ),
    "a torch grid as DeepSpeed's mpu": (
        lambda: _deepspeeds(_grid(SPEC, ProcessGrid)),
        TypeError,
        "lacks DeepSpeed's methods; build PipelineParallelGrid('data=2,model=2')",
    ),
    "a grid as model": (lambda: _initialize(_grid(SPEC)), TypeError, "give a torch.nn.Module, or a PipelineModule"),
    "an mpu of a pipeline": (_pipeline_with_mpu, EngineOptionError, "which has its own grid: omit mpu="),
    "a module in a LayerSpec": (
        lambda: LayerSpec(nn.Linear(4, 4)),  # type: ignore[arg-type]
        TypeError,
        "LayerSpec(Linear(in_features=4, out_features=4, bias=True)): give a class and its arguments",
    ),
    "a module in a TiedLayerSpec": (
        lambda: TiedLayerSpec("tied", nn.Linear(4, 4)),  # type: ignore[arg-type]
        TypeError,
        "give a class and its arguments",
    ),
    "one layer on two stages": (
        lambda: PipelineModule([nn.Linear(4, 4)] * 2, topology="pipe=2,data=2"),
        ValueError,
        "'weight' of layer 1 is 'weight' of layer 0, but they are on stages 1 and 0, each of which would train a copy",
    ),
    "a column-parallel layer after another": (
        lambda: _split_twice(-1, -1),
        ValueError,
        "ParallelLinear(4, 4, bias=True, dim=-1): an input of shape [2, 2] is not [..., 4]: after a layer with dim=-1",
    ),
    "a row-parallel layer of another width": (
        lambda: _split_twice(-1, 0, 8),
        ValueError,
        "ParallelLinear(8, 4, bias=True, dim=0): an input of shape [2, 2] is not [..., 8]",
    ),
    # experts
    "experts of a spec": (
        lambda: groups.create_expert_groups("data=2", 2),
        TypeError,
        "grid='data=2': pass a live grid",
    ),
    "experts of a torch grid": (
        lambda: groups.create_expert_groups(_grid(SPEC, ProcessGrid), 2),
        TypeError,
        "grid=ProcessGrid",
    ),
    "partitions of a topology": (
        lambda: groups.create_zero_partition_groups(TOPOLOGY, 2),
        TypeError,
        "pass a live grid",
    ),
    "a word as expert_tensor_parallel": (
        lambda: groups.create_expert_groups(_grid(SPEC), 2, "no"),  # type: ignore[arg-type]
        TypeError,
        "expert_tensor_parallel='no': give True or False",
    ),
    "experts of a destroyed grid": (
        lambda: groups.create_expert_groups(_destroyed("data=4"), 2),
        RuntimeError,
        "grid='data=4': the grid was destroyed; create another one",
    ),
    # grids
    "degrees as arguments": (
        lambda: PipelineParallelGrid(2, 2),  # type: ignore[arg-type]
        TypeError,
        "process_group=2: give a group of torch.distributed",
    ),
    "ranks as a group": (
        lambda: PipelineParallelGrid("data=2", [0, 1]),  # type: ignore[arg-type]
        TypeError,
        "process_group=[0, 1]: give a group",
    ),
    "an infinite timeout": (lambda: PipelineParallelGrid("data=4", timeout=float("inf")), ValueError, "timeout=inf"),
    "a word as shuffle": (
        lambda: _grid(SPEC).data_loader([1, 2], shuffle="no"),
        TypeError,
        "shuffle='no': give True or False",
    ),
    "a word as check_samples": (
        lambda: setattr(_grid(SPEC), "check_samples", "no"),
        TypeError,
        "check_samples='no': give True or False",
    ),
    "degrees as keywords": (
        lambda: PipelineParallelGrid(data=2, model=2),  # type: ignore[call-arg]
        TypeError,
        "PipelineParallelGrid(): data: axes and degrees are one argument, such as 'data=2,model=2'",
    ),
    "a mesh as topology": (
        lambda: PipelineParallelGrid(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))),  # type: ignore[arg-type]
        TypeError,
        "give a topology or a spec",
    ),
    "too few processes": (
        lambda: PipelineParallelGrid("data=8"),
        WorldSizeError,
        "Start 8 (per host: torchrun --nproc-per-node, deepspeed --num_gpus, srun --ntasks-per-node), or write -1",
    ),
    # the habits of other libraries
    "a query of sequences": (
        lambda: _grid(SPEC).get_sequence_parallel_rank(),
        AttributeError,
        "'data=2,model=2': a grid without an axis 'seq' has no get_sequence_parallel_rank()",
    ),
    "a misspelt axis": (lambda: _grid(SPEC).get_group("modle"), UnknownAxisError, "Did you mean 'model'?"),
    "a mesh along no axis": (lambda: _grid("data=4")["pipe"], UnknownAxisError, "'data=4' has the axes ['data'] alone"),
    "a number as a mesh": (lambda: list(_grid(SPEC)), UnknownAxisError, "axes=0: give the name"),
    "a copy of a grid": (lambda: copy.deepcopy(_Layer(_grid(SPEC))), TypeError, "cannot be pickled or copied, because"),
    "a batch size in words": (
        lambda: _grid(SPEC).data_loader([1, 2], batch_size="2"),  # type: ignore[arg-type]
        TypeError,
        "batch_size='2': give a number",
    ),
    "no samples in a batch": (
        lambda: _grid(SPEC).data_loader([1, 2], batch_size=0),
        ValueError,
        "batch_size=0: give a number of samples, at least 1",
    ),
    "a dataset in place of a batch size": (
        lambda: _grid(SPEC).data_loader(2, [1, 2]),  # type: ignore[arg-type]
        TypeError,
        r"batch_size=[1, 2]: give a number of samples",
    ),
    "no config": (
        lambda: initialize(model=nn.Linear(4, 4), args=SimpleNamespace(deepspeed_config=None)),
        ValueError,
        "initialize() got no config: pass config=",
    ),
    "a model by position": (lambda: initialize(nn.Linear(4, 4), CONFIG), TypeError, "write model="),
    "a grid of an engine": (
        lambda: initialize(model=nn.Linear(4, 4), grid=_grid(SPEC), config=CONFIG),  # type: ignore[arg-type]
        TypeError,
        "initialize(): grid: write mpu=grid",
    ),
    "a misspelt argument of a reducer": (
        lambda: GradientReducer(nn.Linear(4, 4), gird=_grid(SPEC)),  # type: ignore[call-arg]
        TypeError,
        "'gird' is not an option: did you mean 'grid'?",
    ),
    "a text as loss": (lambda: check_loss("0.5"), ValueError, "is no tensor: leave out .item()"),
    "a loss of several values": (
        lambda: check_loss(torch.ones(2, requires_grad=True) * 1),
        ValueError,
        "the shape [2]",
    ),
    "a detached loss": (lambda: check_loss(torch.ones(())), ValueError, "depends on no parameter"),
    # meshes and axes
    "names as a list": (
        lambda: _grid(SPEC).device_mesh(names=["dp", "tp"]),
        TypeError,
        "give a mapping of axes to names",
    ),
    "one name twice": (
        lambda: _grid(SPEC).device_mesh(names={"data": "x", "model": "x"}),
        ValueError,
        "('x', 'x'): give each another text",
    ),
    "a device of no type": (
        lambda: _grid(SPEC).device_mesh("gpu"),
        ValueError,
        "device_type='gpu': give a type of device",
    ),
    "a number as axis": (lambda: _grid(SPEC, ProcessGrid).get_group(0), UnknownAxisError, "axes=0: give the name"),
    "a name as extra axes": (lambda: ProcessGrid("rows=2,data=2", extra_axes="row"), TopologyError, "extra axis 'row'"),
    "a negative world size": (
        lambda: ProcessTopology.from_spec("data=-1", world_size=-4),
        WorldSizeError,
        "world_size=-4: give the number of ranks",
    ),
    "a world size in words": (
        lambda: ProcessTopology.from_spec("data=4", world_size="4"),  # type: ignore[arg-type]
        WorldSizeError,
        "world_size='4': give the number of ranks",
    ),
    "a rank in words": (lambda: TOPOLOGY.get_coord("1"), TopologyError, "rank '1' is not a whole number"),  # type: ignore[arg-type]
    "an index in words": (
        lambda: TOPOLOGY.get_rank(data="1", model=0),  # type: ignore[arg-type]
        TopologyError,
        "index '1' of axis 'data' is not a whole number",
    ),
    # reducers
    "a module without values": (
        lambda: GradientReducer(_on_meta()),
        ValueError,
        "['weight', 'bias'] are on the meta device",
    ),
    "a cast module": (_cast_after_reducer, RuntimeError, "['weight', 'bias'] were moved or cast after construction"),
    # checkpoints
    "a function in the client state": (
        lambda: check_client_state({"lr": 0.1, "f": lambda: 1}),
        TypeError,
        "client_state['f'] cannot be pickled (Can't ",
    ),
    # pipelines
    "a destroyed grid": (
        lambda: PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], grid=_destroyed("pipe=2,data=2")),
        RuntimeError,
        "grid='pipe=2,data=2': the grid was destroyed",
    ),
    "a word as loss": (lambda: _pipeline(loss_fn="mse"), TypeError, "loss_fn='mse': give a function"),
    "a class as loss": (lambda: _pipeline(loss_fn=nn.MSELoss), TypeError, "give an instance, MSELoss()"),
    "a list of batches": (
        lambda: _read_ahead([(SAMPLE, SAMPLE)], 1),  # type: ignore[arg-type]
        TypeError,
        "data_iter=[(<a tensor of shape [2, 4]>, <a tensor of shape [2, 4]>)] is not an iterator: pass iter(...)",
    ),
    "a tensor as batch": (lambda: _check_batch(SAMPLE, True), TypeError, "is a Tensor: it must be (inputs, labels)"),
    "a dictionary as batch": (lambda: _check_batch({"x": SAMPLE}, False), TypeError, "is a dict: it must be"),
    "a batch of one": (lambda: _check_batch((SAMPLE,), False), TypeError, "has 1 elements: it must be"),
    "words as inputs": (lambda: _check_batch(("x", SAMPLE), True), TypeError, "has inputs of type ['str']"),
    # sections of a config
    "a switch of another name": (
        lambda: check_top_level({"flops_profiler": {"enable": True}}),
        EngineOptionError,
        '"flops_profiler": \'enable\' switches nothing on: write "enabled"',
    ),
    "a switch inside": (
        lambda: check_top_level({"data_efficiency": {"data_sampling": {"Enabled": True}}}),
        EngineOptionError,
        "\"data_efficiency.data_sampling\": 'Enabled'",
    ),
    "a topology without an mpu": (
        lambda: (_grid("data=4"), _without_mpu(topology=SPEC)),
        EngineOptionError,
        '"topology" is ignored by deepspeed.initialize, which got no mpu',
    ),
    "a reducer without an mpu": (
        lambda: _without_mpu(gradient_reducer=True),
        EngineOptionError,
        '"gradient_reducer" is ignored by deepspeed.initialize',
    ),
    # parts of two grids
    "a layer with another grid": (
        lambda: check_groups_of_layers(_Layer(_grid("model=2,data=2")), _grid(SPEC)),
        TopologyError,
        "kept of _Layer '' is the grid 'model=2,data=2', but the engine's is 'data=2,model=2'",
    ),
    "a layer with a group of another grid": (
        lambda: check_groups_of_layers(nn.Sequential(_Layer(_grid("model=2,data=2").get_group("model"))), _grid(SPEC)),
        TopologyError,
        "kept of _Layer '0' joins ranks [0, 2] along model, but 'data=2,model=2' joins [0, 1]",
    ),
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Destroy the grids that a case has created, and let DeepSpeed forget its world."""
    before = ledger.in_force()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", None)
    with fake_world(0, 4):
        yield
        while _made:
            _made.pop().destroy()
    assert ledger.in_force() == before


@pytest.mark.parametrize("name", CASES)
def test_value_of_a_wrong_kind_is_refused(name: str) -> None:
    call, kind, message = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "batch",
    [
        (SAMPLE, SAMPLE),
        [SAMPLE, {"y": 1}],
        ((SAMPLE, SAMPLE), (SAMPLE,)),
        ((SAMPLE, SAMPLE), SAMPLE),
        (SAMPLE, "text"),
        UserList((SAMPLE, SAMPLE, 1)),
    ],
    ids=["a pair", "a list", "tuples", "a tuple of inputs", "text", "a sequence of the program"],
)
def test_batches_of_inputs_and_labels_are_accepted(batch: Any, recwarn: pytest.WarningsRecorder) -> None:
    _check_batch(batch, is_first_stage=True)
    assert not [each.message for each in recwarn]


def test_last_stage_accepts_a_batch_without_inputs() -> None:
    _check_batch((None, SAMPLE), is_first_stage=False)


def test_batch_of_three_warns_that_the_third_is_not_used() -> None:
    with pytest.warns(RuntimeWarning, match="has 3 elements, but DeepSpeed uses the first two alone"):
        _check_batch((SAMPLE, SAMPLE, SAMPLE), is_first_stage=True)


def test_grid_of_a_job_that_was_not_joined_names_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_initialized", lambda: False)
        with pytest.raises(RuntimeError, match=r"call ds_topo\.init_distributed\(\) first"):
            PipelineParallelGrid("data=2")


def test_grid_answers_as_a_mesh_does() -> None:
    with _grid("pipe=2,data=2") as grid:
        assert grid["data"].size() == grid.get_axis_size("dp") == 2
        assert grid["pipe", "data"].mesh_dim_names == ("pipe", "data")
        assert (grid.get_group("dp"), grid.get_next_rank("pp")) == (grid.get_group("data"), 2)


def test_dir_has_no_names_of_other_libraries() -> None:
    with _grid(SPEC) as grid:
        listed = [name for name in dir(grid) if not name.startswith("_")]
        assert {"get_group", "data_loader", "correct_norms"} < set(listed)
        assert not {"get_slice_parallel_rank", "dp_group", "get_tensor_model_parallel_group"} & set(listed)
        assert len(listed) < 35, "it is what users type"


def test_layer_may_keep_the_engines_grid_and_groups() -> None:
    with _grid(SPEC) as grid:
        check_groups_of_layers(nn.Sequential(_Layer(grid), _Layer(grid.get_group("model")), _Layer(None)), grid)
