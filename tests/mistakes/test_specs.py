"""Mistakes in specs and configs raise errors that name the value, the rule and a valid choice."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_topo import ProcessTopology
from ds_topo.errors import TopologyError, WorldSizeError

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
    ("tp=2,model=2", TopologyError, "'tp' is a synonym of 'model'"),
    ("+tp=2,data=2", TopologyError, "'model': it means slices of every layer (tensor parallel) and needs no"),
    ("tp=2,+tp=2", TopologyError, "is given twice"),
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
    ("pipe:2,data:2", TopologyError, "at 'pipe:2': expected \"axis=degree"),
    ({("pipe", 2)}, TopologyError, "a set has no order"),
    (None, TopologyError, "malformed topology None"),
    (7, TopologyError, "malformed topology 7"),
    (2.5, TopologyError, "malformed topology 2.5"),
    ([], TopologyError, "at least one axis"),
    ({}, TopologyError, "at least one axis"),
    ([1, 2], TopologyError, "or pairs (axis, degree), or a mapping"),
    ([("pipe", 2, 3)], TopologyError, "malformed topology"),
    (["pipe", "data"], TopologyError, "malformed topology"),
    ([("pipe", 2.5)], TopologyError, "degree 2.5 is not an integer"),
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


@pytest.mark.parametrize(("spec", "kind", "message"), SPECS, ids=[f"{row[0]!r:.15}" for row in SPECS])
def test_invalid_spec_raises(spec: Any, kind: type[Exception], message: str) -> None:
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
def test_abbreviations_of_axes_are_accepted(spec: str, meant: str) -> None:
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
    (lambda folder: _written(folder, b'{"topology": {"pipe": 2, "pipe": 4}}'), "key 'pipe' is given twice"),
    (lambda folder: _written(folder, b'{"topology": {"pipe": 2, "pp": 4}}'), "'pp' is a synonym of 'pipe'"),
    (lambda folder: _written(folder, b'"pipe=2"'), 'has no "topology" section'),
    (lambda folder: _written(folder, b'{"topology": {"pipe": 2.5}}'), "degree 2.5 is not an integer"),
]


def _written(folder: Path, content: bytes) -> Path:
    path = folder / "config.json"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=[message for _, message in CONFIGS])
def test_invalid_config_raises(config: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError) as caught:
        ProcessTopology.from_config(config(tmp_path))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 700


def test_config_uses_the_world_size_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
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


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(ANYTHING | NEARLY | st.dictionaries(NEARLY, st.integers()), st.none() | st.integers(1, 10**6))
def test_any_spec_raises_only_documented_errors(spec: Any, world_size: int | None) -> None:
    start = time.process_time()
    with suppress(TopologyError), _with_short_message():
        topology = ProcessTopology.from_spec(spec, world_size)
        assert ProcessTopology.from_spec(topology.spec) == topology
    assert time.process_time() - start < 1.0, "not linear in what is written"


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(ANYTHING | st.dictionaries(st.just("topology"), ANYTHING | NEARLY))
def test_any_config_raises_only_documented_errors(config: Any) -> None:
    if not isinstance(config, (dict, str)) or config == "":
        return
    with suppress(TopologyError), _with_short_message():
        ProcessTopology.from_config(config)


@pytest.mark.parametrize("world_size", [-4, 0, True, "4", 2.5, 2**31, 2**61 - 1])
@pytest.mark.parametrize("spec", ["data=-1", "data=2"])
def test_impossible_world_size_is_refused_at_once(spec: str, world_size: Any) -> None:
    with pytest.raises(WorldSizeError, match="give the number of ranks, a whole number from 1 to 2147483647"):
        ProcessTopology.from_spec(spec, world_size)


def test_huge_degree_is_refused_quickly() -> None:
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(WorldSizeError, match="Nearest that does"):
        ProcessTopology.from_spec("data=3,pipe=30000001", world_size=4)
    assert time.process_time() - start < 0.5, "two seconds where it counts up to the degree"
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()
