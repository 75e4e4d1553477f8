"""What people get wrong: every mistake has an error that holds the value, the rule and what would do, on every rank."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo import (
    DisagreementError,
    EngineOptionError,
    GradientReducer,
    PipelineModule,
    PipelineParallelGrid,
    ProcessGrid,
    ProcessTopology,
    TopologyError,
    UnknownAxisError,
    WorldSizeError,
    groups,
    initialize,
)
from ds_topo.errors import CoordinateError, ExpertSizeError, MissingTopologyError
from ds_topo.reducer import ReductionOptions
from ds_topo.reducer.options import arguments_from_config
from tests.support.world import Worlds

# -- specs: no rank needed -------------------------------------------------------------------------------------------

SPECS: list[tuple[Any, type[Exception], str]] = [
    ("", TopologyError, 'expected "axis=degree'),
    (" ", TopologyError, "malformed topology"),
    (",", TopologyError, "malformed topology"),
    ("pipe", TopologyError, "malformed topology 'pipe'"),
    ("pipe:2", TopologyError, "malformed topology"),
    ("pipe=", TopologyError, "at 'pipe='"),
    ("=2", TopologyError, "at '=2'"),
    ("pipe=2;data=2", TopologyError, "malformed topology"),
    ("pipe=2 data=2", TopologyError, "malformed topology"),
    ("pipe=2,", TopologyError, "at ''"),
    ("pipe=2,,data=2", TopologyError, "at ''"),
    ("pipe=two", TopologyError, "at 'pipe=two'"),
    ("pipe=2.0", TopologyError, "at 'pipe=2.0'"),
    ("pipe=1e3", TopologyError, "malformed topology"),
    ("pipe=0", TopologyError, "degree 0 must be >= 1"),
    ("pipe=-2", TopologyError, "degree -2 must be >= 1"),
    ("pipe=-1,data=-1", TopologyError, "at most one can be computed"),
    ("pipe=-1", TopologyError, "needs world_size="),
    (f"pipe={2**31}", TopologyError, "must be at most 2147483647"),
    ("pipe=" + "9" * 4000, TopologyError, "with so many digits must be at most"),
    ("pipe=" + "9" * 40_000, TopologyError, "malformed topology"),
    ("pipe=2,pipe=2", TopologyError, "'pipe' is given twice"),
    ("pipe=2,pp=2", TopologyError, "'pp' is a synonym of 'pipe'"),
    ("PIPE=2,pipe=2", TopologyError, "is given twice"),
    ("model=2,tensor=2", TopologyError, "'tensor' is a synonym of 'model'"),
    ("tp=2,mp=2", TopologyError, "'mp' is a synonym of 'model'"),
    ("sp=2,cp=2", TopologyError, "'cp' is a synonym of 'seq'"),
    ("a b=2", TopologyError, "must be a Python identifier"),
    ("class=2", TopologyError, "must be a Python identifier"),
    ("_pipe=2", TopologyError, "begin with an underscore"),
    ("2pipe=2", TopologyError, "must be a Python identifier"),
    ("pi-pe=2", TopologyError, "must be a Python identifier"),
    ("ﬁle=2,file=2", TopologyError, "given twice"),
    ("+pipe=2,data=2", TopologyError, "'pipe': it means pipeline stages and needs no declaration"),
    ("+=2", TopologyError, "must be a Python identifier"),
    ("x" * 40_000 + "=2", TopologyError, "..."),
    (",".join(f"a{number}=1" for number in range(70)), TopologyError, "at most 64"),
    ("pipe=2:2,data=2", TopologyError, "every axis of a degree above 1 needs them"),
    ("pipe=2:2,data=2:2", TopologyError, "smaller factors cover 1 ranks"),
    (None, TopologyError, "malformed topology None"),
    (7, TopologyError, "malformed topology 7"),
    (2.5, TopologyError, "malformed topology 2.5"),
    ([], TopologyError, "at least one axis"),
    ({}, TopologyError, "at least one axis"),
    ([1, 2], TopologyError, "or pairs (axis, degree), or a mapping"),
    ([("pipe", 2, 3)], TopologyError, "malformed topology"),
    (["pipe", "data"], TopologyError, "malformed topology"),
    ([("pipe", 2.0)], TopologyError, "degree 2.0 is not an integer"),
    ([("pipe", "2")], TopologyError, "degree '2' is not an integer"),
    ([("pipe", True)], TopologyError, "degree True is not an integer"),
    ([("pipe", None)], TopologyError, "degree None is not an integer"),
    ([(3, 2)], TopologyError, "axis 3"),
    ([(None, 2)], TopologyError, "axis None"),
    ({"pipe": [2]}, TopologyError, "degree [2] is not an integer"),
    ({"pipe": {"size": 2}}, TopologyError, "is not an integer"),
    (b"pipe=2", TopologyError, "malformed topology"),
    (object(), TopologyError, "malformed topology"),
]


@pytest.mark.parametrize(("spec", "kind", "message"), SPECS, ids=[f"{row[0]!r:.30}" for row in SPECS])
def test_a_spec(spec: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        ProcessTopology.from_spec(spec)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("pp=2,tp=2", "pipe=2,model=2"),
        ("PP=2,dp=2", "pipe=2,data=2"),
        ("Data=2,Pipe=2", "data=2,pipe=2"),
        ("mp=2,cp=2", "model=2,seq=2"),
        ("sequence=2,ep=2", "seq=2,expert=2"),
        ("tensor=4", "model=4"),
    ],
)
def test_what_the_field_writes_is_understood(spec: str, meant: str) -> None:
    assert ProcessTopology.from_spec(spec) == ProcessTopology.from_spec(meant)
    pairs = [(part.split("=")[0], int(part.split("=")[1])) for part in spec.split(",")]
    assert ProcessTopology.from_config({"topology": dict(pairs)}) == ProcessTopology.from_spec(meant)


CONFIGS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: {}, 'has no "topology" section'),
    (lambda folder: [], "give a path, or the loaded mapping"),
    (lambda folder: {"topology": None}, "malformed topology None"),
    (lambda folder: {"topology": 8}, "malformed topology 8"),
    (lambda folder: {"topology": ""}, "malformed topology ''"),
    (lambda folder: {"topology": {"pipe": "2"}}, "degree '2' is not an integer"),
    (lambda folder: folder / "absent.json", "cannot be read"),
    (lambda folder: folder, "cannot be read"),
    (lambda folder: _written(folder, b"{"), "is not JSON"),
    (lambda folder: _written(folder, b""), "is not JSON"),
    (lambda folder: _written(folder, b"\xff\xfe{}"), "is not JSON"),
    (lambda folder: _written(folder, b"[" * 100_000), "is not JSON"),
    (lambda folder: _written(folder, b'{"topology": ' + b"9" * 5000 + b"}"), "is not JSON"),
    (lambda folder: _written(folder, b'"pipe=2"'), 'has no "topology" section'),
    (lambda folder: _written(folder, b'{"topology": {"pipe": 2.5}}'), "degree 2.5 is not an integer"),
]


def _written(folder: Path, content: bytes) -> Path:
    path = folder / "config.json"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=[message for _, message in CONFIGS])
def test_a_config(config: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError) as caught:
        ProcessTopology.from_config(config(tmp_path))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_config_is_for_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ProcessTopology.from_config({"topology": "pipe=2,data=-1"}).dims == [2, 4]


@contextmanager
def _with_short_message() -> Iterator[None]:
    try:
        yield
    except TopologyError as error:
        if len(str(error)) > 1000:
            raise AssertionError(f"{len(str(error))} characters") from error
        raise


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=8,
)
NEARLY = st.text(alphabet="pipedatamodl=,+:*-0123456789 ﬁ²_", max_size=60)


@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(ANYTHING | NEARLY | st.dictionaries(NEARLY, st.integers()), st.none() | st.integers(1, 10**6))
def test_any_spec_has_a_documented_error(spec: Any, world_size: int | None) -> None:
    start = time.process_time()
    with suppress(TopologyError), _with_short_message():
        topology = ProcessTopology.from_spec(spec, world_size)
        assert ProcessTopology.from_spec(topology.spec) == topology
    assert time.process_time() - start < 1.0, "not linear in what is written"


@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(ANYTHING | st.dictionaries(st.just("topology"), ANYTHING | NEARLY))
def test_any_config_has_a_documented_error(config: Any) -> None:
    if not isinstance(config, (dict, str)) or config == "":
        return
    with suppress(TopologyError), _with_short_message():
        ProcessTopology.from_config(config)


def test_a_degree_that_is_far_off_is_refused_at_once() -> None:
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(WorldSizeError, match="Nearest that does"):
        ProcessTopology.from_spec("data=3,pipe=30000001", world_size=4)
    assert time.process_time() - start < 0.5, "two seconds where it counts up to the degree"
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


# -- options of the reducer ------------------------------------------------------------------------------------------

OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bucket_bytes": 0}, ValueError, "at least 1"),
    ({"bucket_bytes": -4}, ValueError, "bucket_bytes=-4"),
    ({"bucket_bytes": 1.5}, TypeError, "bucket_bytes=1.5: give a whole number of bytes"),
    ({"bucket_bytes": "25MB"}, TypeError, "bucket_bytes='25MB'"),
    ({"bucket_bytes": True}, TypeError, "bucket_bytes=True"),
    ({"first_bucket_bytes": None}, TypeError, "first_bucket_bytes=None: give a whole number"),
    ({"last_bucket_bytes": 0}, ValueError, "at least 1"),
    ({"op": "mean"}, ValueError, "choose 'average' or 'sum'"),
    ({"op": None}, ValueError, "choose 'average' or 'sum'"),
    ({"op": "sum", "divisor": 2.0}, ValueError, "a sum is not divided"),
    ({"divisor": 0}, ValueError, "must be positive"),
    ({"divisor": -1.0}, ValueError, "must be positive"),
    ({"divisor": "4"}, TypeError, "divisor='4': give a number, or None"),
    ({"predivide_factor": 0.0}, ValueError, "must be positive"),
    ({"predivide_factor": float("nan")}, ValueError, "must be positive"),
    ({"communication_dtype": "bf16"}, ValueError, "choose a floating-point type such as"),
    ({"communication_dtype": torch.int32}, ValueError, "choose a floating-point type such as"),
    ({"accumulation_dtype": torch.bool}, ValueError, "choose a floating-point type such as"),
    ({"overlap": "false"}, TypeError, "overlap='false': give True, False or None"),
    ({"overlap": 0}, TypeError, "overlap=0"),
    ({"two_level": "auto"}, TypeError, "two_level='auto'"),
    ({"find_unused_parameters": "yes"}, TypeError, "give True or False"),
    ({"find_unused_parameters": True, "zero_unused_parameters": True}, ValueError, "choose one of them"),
    ({"allow_late_gradients": True}, ValueError, "set static_graph"),
    ({"static_graph": 1}, TypeError, "static_graph=1"),
    ({"broadcast_at_start": None}, TypeError, "broadcast_at_start=None"),
    ({"keep_steps": 0}, ValueError, "at least 1 step"),
    ({"keep_steps": 2.5}, TypeError, "keep_steps=2.5"),
    ({"ignored_parameters": "weight"}, TypeError, "give a collection of names or parameters"),
    ({"expert_groups": []}, TypeError, "give a mapping"),
    ({"grad_buffers": 4}, TypeError, "give a mapping"),
    ({"bucket_byte": 4}, TypeError, "bucket_byte"),
]


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS)
def test_options_of_the_reducer(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        ReductionOptions(**options)
    assert message in str(caught.value)


SECTIONS: list[tuple[Any, str]] = [
    ("false", "is neither true, false nor a mapping of options"),
    (4194304, "is neither true, false nor a mapping"),
    ([1], "is neither true, false nor a mapping"),
    (None, "is neither true, false nor a mapping"),
    ({"enabled": "false"}, "\"enabled\" is 'false', neither true nor false"),
    ({"enabled": 0}, "neither true nor false"),
    ({"bucket_byte": 4}, "did you mean 'bucket_bytes'? Options are bucket_bytes"),
    ({"nonsense": 4}, "is no option. Options are bucket_bytes"),
    ({"grad_buffers": {}}, "'grad_buffers' is no option"),
    ({"bucket_bytes": "4 MB"}, "bucket_bytes='4 MB'"),
    ({"communication_dtype": "int8"}, "choose one of fp32"),
    ({"communication_dtype": 16}, "choose one of fp32"),
    ({"overlap": "false"}, "give True, False or None"),
    ({"op": "max"}, "choose 'average' or 'sum'"),
]


@pytest.mark.parametrize(("section", "message"), SECTIONS)
def test_a_section_of_the_config(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match='config section "gradient_reducer"') as caught:
        initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "gradient_reducer": section})
    assert message in str(caught.value)


def test_types_have_names_in_json() -> None:
    assert arguments_from_config({"communication_dtype": "bf16", "accumulation_dtype": None}) == {
        "communication_dtype": torch.bfloat16,
        "accumulation_dtype": None,
    }


@pytest.mark.parametrize("name", ["gradient_reducers", "Gradient_Reducer", "gradientreducer", "topolgy", "Topology"])
def test_a_section_that_is_nearly_ours(name: str) -> None:
    with pytest.raises(ValueError, match=f"config section '{name}': did you mean"):
        initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, name: "pipe=2"})


def test_a_config_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"config 'absent\.json' cannot be read"):
        initialize(model=nn.Linear(2, 2), config="absent.json")


# -- on every rank, within seconds, and the next one works -----------------------------------------------------------

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
PIPELINE = {**CONFIG, "gradient_accumulation_steps": 2}


_made: list[Any] = []
"""Whatever a mistake leaves, to be destroyed."""


def _grid(spec: Any = "data=2,model=2", **options: Any) -> PipelineParallelGrid:
    _made.append(PipelineParallelGrid(spec, **options))
    return _made[-1]


def _engine(model: nn.Module | None = None, **options: Any) -> Any:
    return deepspeed.initialize(model=model or nn.Linear(4, 4), **{"config": CONFIG, **options})[0]


def _pipeline(layers: Any = None, *args: Any, **options: Any) -> PipelineModule:
    module = PipelineModule([nn.Linear(4, 4)] * 4 if layers is None else layers, *args, **options)
    _made.append(module.mpu())
    return module


def _reduce_inside_ddp() -> None:
    whole = DistributedDataParallel(nn.Linear(4, 4))
    GradientReducer(whole.module)


def _on_rank(rank: int, wrong: Any, right: Any) -> Any:
    return wrong if dist.get_rank() == rank else right


class _Marked(nn.Linear):
    """A slice of a layer, as Megatron marks it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.tensor_model_parallel = True


def _after(what: str) -> Any:
    grid = _grid()
    if what == "destroy":
        grid.destroy()
    return grid


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # grids
    "pip": (lambda: _grid("pip=2,data=2"), UnknownAxisError, "did you mean 'pipe'?"),
    "modle": (lambda: _grid("modle=2,data=2"), UnknownAxisError, "did you mean 'model'?"),
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
    "a timeout of nothing": (lambda: _grid("data=4", timeout=0), ValueError, "above 0"),
    "a grid of a grid": (lambda: _grid(_grid()), TypeError, "use that grid itself"),
    "a class": (lambda: _grid(ProcessTopology), TypeError, "give a topology or a spec"),
    "a list of ranks": (lambda: _grid([0, 1, 2, 3]), TopologyError, "malformed topology"),
    "no such axis": (lambda: _grid().get_group("pip"), UnknownAxisError, "its axes are|is not in the topology"),
    "no such index": (lambda: _grid().stage_to_global(3), CoordinateError, "out of range"),
    "after destroy": (lambda: _after("destroy").get_group("data"), RuntimeError, "build a new grid"),
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
        "takes a live grid",
    ),
    "a spec as mpu": (
        lambda: initialize(model=nn.Linear(4, 4), mpu="data=4", config=CONFIG),
        TypeError,
        "takes a live",
    ),
    "a class as mpu": (
        lambda: initialize(model=nn.Linear(4, 4), mpu=PipelineParallelGrid, config=CONFIG),
        TypeError,
        "takes a live grid",
    ),
    "a plain model on stages": (lambda: _engine(mpu=_grid("pipe=2,data=2")), EngineOptionError, "PipelineModule"),
    "slices without an mpu": (lambda: (_grid(), _engine(_Marked())), EngineOptionError, "pass mpu=grid"),
    "a section that is not read": (
        lambda: (_grid(), _engine(config={**CONFIG, "topology": "data=2,model=2"})),
        EngineOptionError,
        "ds_topo.initialize reads it",
    ),
    "another section than the mpu": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "topology": "model=2,data=2"}),
        TopologyError,
        "give one of them, or equal ones",
    ),
    "a section of nonsense": (
        lambda: _engine(mpu=_grid(), config={**CONFIG, "topology": "modle=2,data=2"}),
        TopologyError,
        "says 'modle=2,data=2'",
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
    "inside DDP": (
        _reduce_inside_ddp,
        ValueError,
        "reduces its gradients already",
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
    "another option on rank 1": (
        lambda: GradientReducer(nn.Linear(4, 4), keep_steps=4, bucket_bytes=_on_rank(1, 8, 4)),
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
    while _made:
        _made.pop().destroy()
    with _grid("data=2,pipe=2") as grid:  # and whatever was refused, the next one works
        total = torch.ones(1)
        dist.all_reduce(total, group=grid.get_group("data"))
        assert total.item() == 2
        dist.barrier()
    return found


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_on_every_rank_and_the_next_attempt_works(world: Worlds, name: str) -> None:
    _, kind, message = MISTAKES[name]
    for raised, text, seconds in world(4).run(_make, name):
        assert raised is not None, "accepted in silence"
        assert issubclass(raised, kind) or issubclass(raised, DisagreementError), (raised, text)
        assert any(part in text for part in message.split("|")), text
        assert seconds < 50, "before any timeout"


def _accepted() -> list[str]:
    """What must not be refused."""
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


def test_what_is_right_is_not_refused(world: Worlds) -> None:
    assert world(4).run(_accepted)[0] == [
        "+copies=2,data=2",
        "[0, 1, 2, 3]",
        "DeepSpeedEngine",
        "data=2,model=2",
        "pipe=2,data=2",
    ]


def _second_engine_warns() -> None:
    deepspeed.init_distributed(verbose=False)
    with _grid(), pytest.warns(RuntimeWarning, match=r"mpu=PipelineParallelGrid\('data=-1'\)"):
        _engine().destroy()


def test_an_engine_without_an_mpu_beside_a_grid_that_splits_models_is_noticed(world: Worlds) -> None:
    world(4).run(_second_engine_warns)


def test_there_are_rows_enough() -> None:
    assert len(SPECS) + len(CONFIGS) + len(OPTIONS) + len(SECTIONS) + len(MISTAKES) >= 150
    assert json.dumps(CONFIG)
