"""Specs, pairs, mappings and config files are parsed and written; malformed ones raise with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo import ProcessTopology
from ds_topo.errors import TopologyError, UnknownAxisError, WorldSizeError
from ds_topo.topology.axes import check_meanings
from tests.support.topologies import folded_topologies, named_degrees


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


@settings(deadline=None)
@given(folded_topologies())
def test_the_spec_of_any_topology_reads_back(topology: ProcessTopology) -> None:
    again = ProcessTopology.from_spec(topology.spec, world_size=topology.world_size())
    assert again == topology
    assert hash(again) == hash(topology)
    assert again.mapping == topology.mapping
    assert (":" in topology.spec) == (topology != ProcessTopology(topology.axes, topology.dims))


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
def test_malformed_strides_are_refused(spec: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        ProcessTopology.from_spec(spec)


def test_strides_determine_the_world_size() -> None:
    with pytest.raises(WorldSizeError, match="is for 8 ranks"):
        ProcessTopology.from_spec("pipe=2:2,data=2:4*2:1", world_size=16)


def test_a_topology_is_read_from_a_config_file(tmp_path: Path) -> None:
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
        ([("pipe", 2.5)], r"axis 'pipe': degree 2\.5 is not an integer"),
        ([("pipe", float("inf")), ("data", 2)], r"axis 'pipe': degree inf is not an integer"),
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
def test_malformed_specs_are_refused(spec: Any, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        ProcessTopology.from_spec(spec)


def test_a_config_without_a_valid_topology_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for config, message in (
        ({"train_batch_size": 1}, 'has no "topology" section'),
        (tmp_path / "absent.json", "cannot be read"),
        (tmp_path / "broken.json", "is not JSON"),
    ):
        with pytest.raises(TopologyError, match=message):
            ProcessTopology.from_config(config)


@given(named_degrees(), st.integers(1, 4096))
def test_a_wrong_product_suggests_degrees_that_fit(topology: tuple[list[str], list[int]], world_size: int) -> None:
    ours = ProcessTopology(*topology)
    if ours.world_size() == world_size:
        assert ours.check_world_size(world_size) is None
        return
    with pytest.raises(WorldSizeError, match=r"Nearest that does: '(.+)'") as caught:
        ours.check_world_size(world_size)
    assert isinstance(caught.value, AssertionError), "DeepSpeed fails an assertion"
    nearest = ProcessTopology.from_spec(str(caught.value).split("'")[-2])
    assert [axis for axis in nearest.axes if axis in ours.axes] == ours.axes
    assert set(nearest.axes) <= {*ours.axes, "data"}
    assert nearest.world_size() == world_size
    if "data" in nearest.axes:  # the layers of a model still divide by the degree of `model`
        assert ours.get_dim("model") % max(1, nearest.get_dim("model")) == 0
    else:
        assert "model" not in ours.axes or ours.get_dim("model") % nearest.get_dim("model") == 0


@pytest.mark.parametrize(
    ("spec", "world_size", "message"),
    [
        ("data=-1,model=2", 7, r"the other degrees \(model=2\) make 2, .* world size 7. Start 6 or 8 ranks, or"),
        ("data=-1,model=2,pipe=2", 7, r"\(model=2 x pipe=2\) make 4, .* Start 4 or 8 ranks"),
        ("data=-1,model=2,pipe=2", 2, r"world size 2. Start 4 ranks, or"),
        ("data=-1,pipe=2,model=1", 3, r"\(pipe=2\) make 2, .* Start 2 or 4 ranks"),
        ("data=-1,shard=2", 5, r"\(shard=2\) make 2, .* Start 4 or 6 ranks"),
    ],
)
def test_ranks_that_do_not_make_whole_replicas_are_refused_with_numbers_that_do(
    spec: str, world_size: int, message: str
) -> None:
    with pytest.raises(WorldSizeError, match=message):
        ProcessTopology.from_spec(spec, world_size=world_size)


@pytest.mark.parametrize(
    ("spec", "world_size", "nearest"),
    [
        ("model=2", 3, "data=3,model=1"),
        ("model=4", 8, "data=2,model=4"),
        ("model=2,pipe=2", 6, "data=3,model=2,pipe=1"),
        ("model=8,data=-1", 12, "model=4,data=3"),
        ("+rows=2,data=2", 6, "+rows=2,data=3"),
        ("shard=2,model=2", 6, "shard=3,model=2"),
        ("pipe=8", 4, "pipe=4"),
    ],
)
def test_the_suggested_degrees_can_train_the_same_model(spec: str, world_size: int, nearest: str) -> None:
    with pytest.raises(WorldSizeError, match="Nearest that does: ") as caught:
        ProcessTopology.from_spec(spec, world_size)
    assert str(caught.value).split("'")[-2] == nearest
    assert ProcessTopology.from_spec(nearest, world_size).world_size() == world_size


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("tp_size", "model"),
        ("tensor_model_parallel_size", "model"),
        ("tensor_parallel", "model"),
        ("fsdp", "shard"),
        ("hsdp", "shard"),
        ("stages", "pipe"),
        ("pp_size", "pipe"),
        ("pipeline_model_parallel_size", "pipe"),
        ("sp_size", "seq"),
        ("cp_size", "seq"),
        ("ulysses", "seq"),
        ("ep_size", "expert"),
        ("dp_size", "data"),
    ],
)
def test_a_name_of_another_program_is_answered_with_the_axis_that_it_means(name: str, axis: str) -> None:
    message = f"axis '{name}' has no meaning here: did you mean '{axis}'"
    with pytest.raises(UnknownAxisError, match=message) as caught:
        check_meanings(["data", name], extra_axes=[])
    assert ("create_expert_groups" in str(caught.value)) == (axis == "expert")
    for spec in (f"{name}=2,rows=3", f"{name}=2,rows=3,rest=-1"):  # first, as the degrees may be right
        with pytest.raises(UnknownAxisError, match=message):
            ProcessTopology.from_spec(spec, world_size=8)
    assert ProcessTopology.from_spec(f"+{name}=2", world_size=2).axes == [name]
    with pytest.raises(WorldSizeError, match="is for 2 ranks"):
        ProcessTopology.from_spec(f"+{name}=2", world_size=8)
