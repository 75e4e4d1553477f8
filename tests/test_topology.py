"""Topologies against DeepSpeed's own classes, in every order of the axes, and what they add to them."""

import ast
import copy
import json
import pickle
import subprocess
import sys
from itertools import permutations, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepspeed.runtime.pipe import topology as deepspeed_topology
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ds_topo
from ds_topo import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from ds_topo.errors import CoordinateError, TopologyError, UnknownAxisError, WorldSizeError
from ds_topo.topology.rank_tables import _prime_factors, factorized_topology, fold_extra_axes

AXES = ("pipe", "data", "model", "seq")
ORDERS = [order for count in range(1, 5) for order in permutations(AXES, count)]
DEGREES = {"pipe": 2, "data": 3, "model": 4, "seq": 5}
MAX_RANKS = 512


@st.composite
def named_degrees(draw: st.DrawFn) -> tuple[list[str], list[int]]:
    """Axes in any order with degrees of at most 512 ranks."""
    axes = draw(st.sampled_from(ORDERS))
    degrees: list[int] = []
    for _ in axes:
        degrees.append(draw(st.integers(1, min(16, MAX_RANKS // prod(degrees)))))
    return list(axes), draw(st.permutations(degrees))


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal values of equal types, all the way down; a coordinate may be of our own named tuple type."""
    assert ours == theirs
    if hasattr(theirs, "_fields"):
        assert ours._fields == theirs._fields
        assert repr(ours) == repr(theirs)
    else:
        assert type(ours) is type(theirs)
    if isinstance(theirs, (list, tuple)):
        for our_item, their_item in zip(ours, theirs, strict=True):
            assert_same(our_item, their_item)


def assert_same_outcome(ours: Any, theirs: Any) -> None:
    """Equal results, or an exception that code which catches DeepSpeed's catches too."""
    try:
        expected = theirs()
    except Exception as error:
        with pytest.raises(type(error)):
            ours()
    else:
        assert_same(ours(), expected)


def assert_equal_to_deepspeed(axes: list[str], degrees: list[int]) -> None:
    ours = ProcessTopology(axes=axes, dims=degrees)
    theirs = deepspeed_topology.ProcessTopology(axes=axes, dims=degrees)
    assert_same(ours.get_axis_names(), theirs.get_axis_names())
    assert_same((ours.axes, ours.dims, ours.world_size()), (theirs.axes, theirs.dims, theirs.world_size()))
    assert list(ours.mapping.items()) == list(theirs.mapping.items())
    ranks = range(-1, ours.world_size() + 1)
    for axis in (*AXES, "absent"):
        assert_same(ours.get_dim(axis), theirs.get_dim(axis))
        assert_same(ours.get_axis_comm_lists(axis), theirs.get_axis_comm_lists(axis))
        for index in (-1, 0, 1, ours.get_dim(axis) - 1, ours.get_dim(axis)):
            assert_same_outcome(lambda: ours.get_axis_list(axis, index), lambda: theirs.get_axis_list(axis, index))  # noqa: B023
            match = {axis: index, axes[-1]: 0}
            assert_same_outcome(lambda: ours.filter_match(**match), lambda: theirs.filter_match(**match))  # noqa: B023
    for rank in ranks:
        assert_same_outcome(lambda: ours.get_coord(rank), lambda: theirs.get_coord(rank))  # noqa: B023
    for rank in {0, ours.world_size() // 3, ours.world_size() - 1}:
        coordinate = theirs.get_coord(rank)._asdict()
        assert_same(ours.get_rank(**coordinate), rank)
        assert_same(ours.filter_match(**coordinate), [rank])
        assert_same(ours.filter_match(), theirs.filter_match())
        assert_same(ours.get_rank_repr(rank), theirs.get_rank_repr(rank))
        assert_same(
            ours.get_rank_repr(rank=rank, omit_axes=["model"], inner_sep="+", outer_sep=""),
            theirs.get_rank_repr(rank=rank, omit_axes=["model"], inner_sep="+", outer_sep=""),
        )
        for axis in axes:
            for change in ({axis: -1}, {axis: ours.get_dim(axis)}, {"absent": 0}):
                moved = {**coordinate, **change}
                assert_same_outcome(lambda: ours.get_rank(**moved), lambda: theirs.get_rank(**moved))  # noqa: B023
            fewer = {name: index for name, index in coordinate.items() if name != axis}
            for wrong in (fewer, {**fewer, "absent": 0}):
                assert_same_outcome(lambda: ours.get_rank(**wrong), lambda: theirs.get_rank(**wrong))  # noqa: B023


@pytest.mark.parametrize("axes", ORDERS, ids="-".join)
def test_every_order_is_deepspeeds(axes: tuple[str, ...]) -> None:
    assert_equal_to_deepspeed(list(axes), [DEGREES[axis] for axis in axes])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(named_degrees())
def test_any_degrees_are_deepspeeds(topology: tuple[list[str], list[int]]) -> None:
    assert_equal_to_deepspeed(*topology)


@settings(deadline=None)
@given(named_degrees(), st.sets(st.sampled_from(AXES), min_size=1))
def test_several_axes_at_once_join_ranks_that_share_the_others(
    topology: tuple[list[str], list[int]], joined: set[str]
) -> None:
    ours = ProcessTopology(*topology)
    theirs = deepspeed_topology.ProcessTopology(*topology)
    others = [axis for axis in theirs.axes if axis not in joined]
    classes = [
        theirs.filter_match(**dict(zip(others, index, strict=True)))
        for index in product(*(range(theirs.get_dim(axis)) for axis in others))
    ]
    expected = [] if not joined & set(theirs.axes) else classes
    assert ours.get_axis_comm_lists(joined) == expected
    for ranks in classes:
        assert ours.get_axis_ranks(joined, ranks[-1]) == ranks


def test_deepspeeds_named_forms() -> None:
    for pipe, model, data in product((1, 2, 3), repeat=3):
        three = PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=data)
        assert three.mapping == deepspeed_topology.PipeModelDataParallelTopology(pipe, model, data).mapping
        two = PipeDataParallelTopology(num_pp=pipe, num_dp=data)
        assert two.mapping == deepspeed_topology.PipeDataParallelTopology(pipe, data).mapping
        assert str(two) == str(deepspeed_topology.PipeDataParallelTopology(pipe, data))
        assert two == ProcessTopology(["pipe", "data"], [pipe, data])


def test_the_default_topology_is_deepspeeds() -> None:
    for number in range(1, 200):
        assert_same(_prime_factors(number), deepspeed_topology._prime_factors(number))
    for number in (0, -4):
        with pytest.raises(ValueError, match="must be >= 1"):
            _prime_factors(number)
    assert factorized_topology(64) == PipeDataParallelTopology(num_pp=8, num_dp=8)


def test_a_million_ranks_cost_nothing_to_ask() -> None:
    topology = ProcessTopology(["pipe", "data", "model"], [1024, 512, 2048])
    assert topology.get_coord(topology.world_size() - 1) == (1023, 511, 2047)
    assert topology.get_rank(pipe=1023, data=511, model=2047) == 2**30 - 1
    assert topology.get_axis_ranks("pipe", 5)[:2] == [5, 5 + 512 * 2048]


# -- integers of other types ---------------------------------------------------------------------------------------


def test_integers_of_other_types_come_back_as_plain_ones() -> None:
    topology = ProcessTopology(["pipe", "data", "model"], [np.int64(2), 4, np.int32(2)])
    assert_same(topology.dims, [2, 4, 2])
    assert topology == PipeModelDataParallelTopology(2, 2, 4)
    assert repr(topology.get_coord(np.int64(13))) == "ProcessCoord(pipe=1, data=2, model=1)"
    assert_same(topology.get_rank(pipe=np.int64(1), data=2, model=True), 13)
    assert_same(topology.filter_match(pipe=np.int64(1), data=2), [12, 13])
    assert_same(topology.get_axis_ranks("model", np.int64(13)), [12, 13])


def test_what_lies_between_ranks_is_not_a_rank() -> None:
    topology = ProcessTopology(["pipe", "data"], [2, 4])
    for rank in (1.5, None, "1"):
        with pytest.raises(ValueError, match="rank"):
            topology.get_coord(rank)
    with pytest.raises(AssertionError, match=r"index 0\.5 of axis 'pipe'"):
        topology.get_rank(pipe=0.5, data=0)
    assert topology.filter_match(pipe=0.5) == []
    assert topology.filter_match(pipe=None) == []


# -- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_topologies_and_coordinates_are_values(protocol: int) -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    folded = ProcessTopology.from_spec("data=2,pipe=2,seq=2").fold({"pipe": ["pipe"], "data": ["data", "seq"]})
    for value in (topology, folded, topology.get_coord(7)):
        for other in (pickle.loads(pickle.dumps(value, protocol)), copy.copy(value), copy.deepcopy(value)):
            assert other == value
            assert type(other) is type(value)
            assert hash(other) == hash(value)
            assert repr(other) == repr(value)
    assert copy.deepcopy(folded).get_axis_comm_lists("data") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert folded != ProcessTopology(folded.axes, folded.dims), "equal names and degrees, other ranks"
    assert {topology: 1}[ProcessTopology.from_spec("pipe=2,data=3,model=2")] == 1
    assert topology != ProcessTopology.from_spec("pipe=2,model=2,data=3")
    assert topology != "pipe=2,data=3,model=2"


def test_coordinates_are_named_tuples() -> None:
    topology = ProcessTopology(["pipe", "data", "tensor"], [2, 2, 2])
    coordinate = topology.ProcessCoord(0, 1, 1)
    assert (coordinate.pipe, coordinate.data, coordinate.model, coordinate.tensor) == (0, 1, 1, 1)
    assert topology.mapping[coordinate] == 3
    assert coordinate._replace(pipe=1) == topology.get_coord(7) == topology.ProcessCoord(pipe=1, data=1, model=1)
    assert topology.get_rank(pipe=0, data=1, tensor=1) == 3
    assert topology.get_axis_comm_lists("tensor") == topology.get_axis_comm_lists("model")


def test_a_large_topology_prints_briefly() -> None:
    topology = ProcessTopology.from_spec("pipe=1024,data=1024")
    assert repr(topology) == "ProcessTopology('pipe=1024,data=1024')"
    assert len(str(topology)) < 100


# -- specs ---------------------------------------------------------------------------------------------------------


@given(named_degrees())
def test_every_form_of_a_spec_reads_back(topology: tuple[list[str], list[int]]) -> None:
    ours, pairs = ProcessTopology(*topology), list(zip(*topology, strict=True))
    config = {"train_batch_size": 1, "topology": dict(pairs)}
    for again in (ours.spec, f" {ours.spec} ".replace("=", " = "), pairs, dict(pairs)):
        assert ProcessTopology.from_spec(again) == ours
    assert ProcessTopology.from_config(config) == ProcessTopology.from_config({"topology": pairs}) == ours
    for axis in ours.axes:
        left_out = {**dict(pairs), axis: -1}
        assert ProcessTopology.from_spec(left_out, world_size=ours.world_size()) == ours


@st.composite
def folded_topologies(draw: st.DrawFn) -> ProcessTopology:
    """Any topology, some of whose axes are joined, under any order of names."""
    ours = ProcessTopology(*draw(named_degrees()))
    groups: dict[str, list[str]] = {}
    for axis in ours.axes:
        groups.setdefault(draw(st.sampled_from(("pipe", "data", "model", "seq"))), []).append(axis)
    return ours.fold({name: groups[name] for name in draw(st.permutations(list(groups)))})


@settings(deadline=None)
@given(folded_topologies())
def test_the_spec_of_any_topology_reads_back(topology: ProcessTopology) -> None:
    again = ProcessTopology.from_spec(topology.spec, world_size=topology.world_size())
    assert again == topology
    assert hash(again) == hash(topology)
    assert again.mapping == topology.mapping
    assert (":" in topology.spec) == (topology != ProcessTopology(topology.axes, topology.dims))


@settings(deadline=None)
@given(folded_topologies(), folded_topologies())
def test_topologies_are_equal_if_and_only_if_their_mappings_are(one: ProcessTopology, other: ProcessTopology) -> None:
    assert (one == other) == (one.axes == other.axes and one.mapping == other.mapping)


@settings(deadline=None)
@given(folded_topologies(), st.sets(st.sampled_from(AXES), min_size=1), st.integers(-20, 20))
def test_places_and_peers_are_those_of_the_list(topology: ProcessTopology, axes: set[str], index: int) -> None:
    for rank in range(0, topology.world_size(), 7):
        ranks = topology.get_axis_ranks(axes, rank)
        assert ranks == sorted(ranks)
        assert topology.get_axis_index(axes, rank) == ranks.index(rank)
        assert topology.get_axis_peer(axes, rank, index) == ranks[index % len(ranks)]


def test_a_folded_topology_equals_the_plain_one_of_the_same_mapping() -> None:
    plain = ProcessTopology.from_spec("pipe=2,data=4")
    folded = ProcessTopology.from_spec("pipe=2,data=2,seq=2").fold({"pipe": ["pipe"], "data": ["data", "seq"]})
    assert folded == plain
    assert hash(folded) == hash(plain)
    assert (folded.spec, repr(folded)) == (plain.spec, repr(plain))
    assert ProcessTopology.from_spec("data=4,model=1") != ProcessTopology.from_spec("data=4")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pipe=2:2,data=2", "every axis of a degree above 1 needs them"),
        ("pipe=2:2,data=2:x", "malformed topology"),
        ("pipe=2:2,data=2:2", "a factor has size 2 and stride 2, but the smaller factors cover 1 ranks"),
        ("pipe=2:2,data=2:1*2:4", "axis 'data': strides of .* must fall"),
        ("pipe=2:2,pipe=2:1", "axis 'pipe' is given twice"),
        ("pipe=0:1,data=2:1", "degree 0 must be >= 1"),
    ],
)
def test_malformed_strides_say_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        ProcessTopology.from_spec(spec)
    with pytest.raises(WorldSizeError, match="is for 8 ranks"):
        ProcessTopology.from_spec("pipe=2:2,data=2:4*2:1", world_size=16)


def test_a_config_file_names_the_topology(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"topology": {"data": -1, "pipe": 2}}))
    assert ProcessTopology.from_config(path, world_size=8) == ProcessTopology.from_spec("data=4,pipe=2")
    assert ProcessTopology.from_config(str(path), world_size=8).dims == [4, 2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pipe=2,pipe=2", "axis 'pipe' is given twice"),
        ("model=2,tensor=2", "'tensor' is a synonym of 'model'"),
        ("pipe=0", "axis 'pipe': degree 0 must be >= 1"),
        ("pipe=-2", "axis 'pipe': degree -2 must be >= 1"),
        ([("pipe", 2.0)], r"axis 'pipe': degree 2\.0 is not an integer"),
        ([("pipe", True)], "degree True is not an integer"),
        ([("pipe", "2")], "degree '2' is not an integer"),
        ("pipe=two", "malformed topology 'pipe=two' at 'pipe=two': expected \"axis=degree"),
        ("pipe", "malformed topology"),
        ("pipe=2,,data=2", "malformed topology"),
        ("", "malformed topology"),
        (7, "malformed topology 7"),
        ([("pipe", 2, 3)], "malformed topology"),
        ([], "at least one axis"),
        ([("a b", 2)], "must be a Python identifier"),
        ([("class", 2)], "must be a Python identifier"),
        ([("_pipe", 2)], "must be a Python identifier"),
        ([(3, 2)], "must be a Python identifier"),
        ("pipe=-1,data=-1", "at most one can be computed"),
        ("pipe=2,data=-1", "needs world_size="),
    ],
)
def test_a_malformed_spec_says_what_is_wrong(spec: Any, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        ProcessTopology.from_spec(spec)


def test_a_config_without_a_usable_topology_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for config, message in (
        ({"train_batch_size": 1}, 'has no "topology" section'),
        (tmp_path / "absent.json", "cannot be read"),
        (tmp_path / "broken.json", "is not JSON"),
    ):
        with pytest.raises(TopologyError, match=message):
            ProcessTopology.from_config(config)


@given(named_degrees(), st.integers(1, 4096))
def test_a_wrong_product_names_degrees_that_fit(topology: tuple[list[str], list[int]], world_size: int) -> None:
    ours = ProcessTopology(*topology)
    if ours.world_size() == world_size:
        assert ours.check_world_size(world_size) is None
        return
    with pytest.raises(WorldSizeError, match=r"Nearest that does: '(.+)'") as caught:
        ours.check_world_size(world_size)
    assert isinstance(caught.value, AssertionError), "DeepSpeed fails an assertion"
    nearest = ProcessTopology.from_spec(str(caught.value).split("'")[-2])
    assert nearest.axes == ours.axes
    assert nearest.world_size() == world_size


def test_errors_name_the_rule_and_the_choices() -> None:
    topology = ProcessTopology.from_spec("pipe=2,data=4")
    with pytest.raises(UnknownAxisError, match=r"axis 'sew' is not in the topology 'pipe=2,data=4'; its axes are"):
        topology.filter_match(sew=1)
    with pytest.raises(TopologyError, match=r"\['data'\] missing; filter_match\(\) takes some of them"):
        topology.get_rank(pipe=1)
    with pytest.raises(CoordinateError, match=r"index 4 of axis 'data' is out of range: .* has 0 to 3"):
        topology.get_rank(pipe=0, data=4)
    with pytest.raises(TopologyError, match=r"rank 8 is out of range: 'pipe=2,data=4' has ranks 0 to 7"):
        topology.get_coord(8)
    with pytest.raises(TopologyError, match=r"2 axes .* but 1 degrees"):
        ProcessTopology(["pipe", "data"], [2])
    with pytest.raises(TopologyError, match="names an axis twice"):
        ProcessTopology.from_spec("model=2").get_rank(model=0, tensor=0)
    with pytest.raises(TopologyError, match="exactly once"):
        topology.fold({"pipe": ["pipe"]})


@settings(deadline=None)
@given(named_degrees())
def test_folding_keeps_stage_and_slice_and_counts_all_replicas(topology: tuple[list[str], list[int]]) -> None:
    ours = ProcessTopology(*topology)
    folded = fold_extra_axes(ours)
    assert set(folded.axes) >= {"pipe", "data"}
    assert set(folded.axes) <= {"pipe", "data", "model"}
    replicas = [axis for axis in ours.axes if axis in ("data", "seq")]
    if replicas:
        assert sorted(folded.get_axis_comm_lists("data")) == sorted(ours.get_axis_comm_lists(replicas))
    assert folded.mapping == {folded.get_coord(rank): rank for rank in range(folded.world_size())}
    for rank in range(ours.world_size()):
        old, new = ours.get_coord(rank), folded.get_coord(rank)
        assert (new.pipe, getattr(new, "model", 0)) == (getattr(old, "pipe", 0), getattr(old, "model", 0))
        assert folded.get_rank(**new._asdict()) == rank
        assert folded.filter_match(**new._asdict()) == [rank]


def test_torchdistpackages_example() -> None:
    """Its README's placement and groups: pipeline across nodes, data inside, for 16 ranks (its order of printing aside,
    which is not DeepSpeed's)."""
    topology = ProcessTopology.from_spec([("pipe", 2), ("tensor", 2), ("data", 16 // (2 * 2))])
    groups = {"pipe": "pipe", "tensor": "tensor", "data": "data", "model": ("pipe", "tensor")}
    lines = [
        f"group {name}, ranks: {ranks}" for name, axes in groups.items() for ranks in topology.get_axis_comm_lists(axes)
    ]
    assert len(lines) == len(set(lines))
    assert set(lines) == {
        *(f"group pipe, ranks: [{rank}, {rank + 8}]" for rank in range(8)),
        *(f"group tensor, ranks: [{rank}, {rank + 4}]" for first in (0, 8) for rank in range(first, first + 4)),
        *(f"group data, ranks: [{rank}, {rank + 1}, {rank + 2}, {rank + 3}]" for rank in (0, 4, 8, 12)),
        *(f"group model, ranks: [{rank}, {rank + 4}, {rank + 8}, {rank + 12}]" for rank in range(4)),
    }


# -- layers --------------------------------------------------------------------------------------------------------

PACKAGE = Path(ds_topo.__file__).parent
LAYERS: dict[int, set[str]] = {
    0: {"errors", "ledger", "topology", "planner"},
    1: {"process_groups"},
    2: {"collectives", "reducer"},
    3: {"engine"},
    4: {"groups", "distributed"},
    5: {"cli", "__main__"},
}
"""DESIGN: imports point down, or sideways inside a layer."""


def imports_of(path: Path, *, of_types_too: bool = True) -> set[str]:
    """Absolute names of the modules that a file imports at any depth, ``if TYPE_CHECKING`` aside if so asked."""
    package = ["ds_topo", *path.relative_to(PACKAGE).parent.parts]
    tree = ast.parse(path.read_text())
    if not of_types_too:
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.update({f"{base}.{alias.name}" for alias in node.names} if base == "ds_topo" else {base})
    return found


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(PACKAGE.rglob("*.py"))


def test_imports_point_down() -> None:
    layer_of = {room: layer for layer, rooms in LAYERS.items() for room in rooms}
    for path in MODULES:
        room = room_of(path)
        if room == "__init__":
            continue
        assert room in layer_of, f"{path.name}: give the room a layer in LAYERS"
        for name in imports_of(path, of_types_too=False):
            if name.startswith("ds_topo."):
                target = name.split(".")[1]
                assert layer_of[target] <= layer_of[room], f"{path.name} (layer {layer_of[room]}) imports {name}"
            if layer_of[room] == 0:
                assert name.split(".")[0] in {*sys.stdlib_module_names, "ds_topo"}, f"{path.name} imports {name}"


def test_deepspeed_stays_in_its_rooms() -> None:
    importers = {
        room_of(path) for path in MODULES if any(name.split(".")[0] == "deepspeed" for name in imports_of(path))
    }
    assert "engine" in importers, "the search finds what there is to find"
    assert importers <= {"groups", "engine"}


def test_one_module_creates_process_groups() -> None:
    callers = {
        path.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1].startswith(("new_group", "new_subgroups"))
    }
    assert callers == {"creation.py"}


def test_topologies_do_not_import_torch() -> None:
    code = (
        "import sys, ds_topo; from ds_topo.topology.rank_tables import grid_groups\n"
        "topology = ds_topo.ProcessTopology.from_spec('pipe=2,data=2')\n"
        "topology.get_coord(1), topology.get_axis_comm_lists('pipe'), grid_groups(topology, 1), dir(ds_topo)\n"
        "print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_every_public_name_exists() -> None:
    for name in ds_topo.__all__:
        assert getattr(ds_topo, name).__name__.removeprefix("ds_topo.") == name
    assert set(ds_topo.__all__) <= set(dir(ds_topo))
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        ds_topo.Absent  # noqa: B018
