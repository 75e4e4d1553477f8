"""Topologies give DeepSpeed's results in every order of axes, and more."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import numpy as np
import pytest
from deepspeed.runtime.pipe import topology as deepspeed_topology
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_topo import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from ds_topo.errors import CoordinateError, TopologyError, UnknownAxisError
from tests.support.topologies import AXES, ORDERS, folded_topologies, named_degrees

DEGREES = {"pipe": 2, "data": 3, "model": 4, "seq": 5}


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
def test_every_axis_order_gives_deepspeeds_results(axes: tuple[str, ...]) -> None:
    assert_equal_to_deepspeed(list(axes), [DEGREES[axis] for axis in axes])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(named_degrees())
def test_any_degrees_give_deepspeeds_results(topology: tuple[list[str], list[int]]) -> None:
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


def test_deepspeeds_named_topologies_are_equal() -> None:
    for pipe, model, data in product((1, 2, 3), repeat=3):
        three = PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=data)
        assert three.mapping == deepspeed_topology.PipeModelDataParallelTopology(pipe, model, data).mapping
        two = PipeDataParallelTopology(num_pp=pipe, num_dp=data)
        assert two.mapping == deepspeed_topology.PipeDataParallelTopology(pipe, data).mapping
        assert str(two) == str(deepspeed_topology.PipeDataParallelTopology(pipe, data))
        assert two == ProcessTopology(["pipe", "data"], [pipe, data])


def test_queries_are_fast_for_a_million_ranks() -> None:
    topology = ProcessTopology(["pipe", "data", "model"], [1024, 512, 2048])
    assert topology.get_coord(topology.world_size() - 1) == (1023, 511, 2047)
    assert topology.get_rank(pipe=1023, data=511, model=2047) == 2**30 - 1
    assert topology.get_axis_ranks("pipe", 5)[:2] == [5, 5 + 512 * 2048]


@settings(deadline=None)
@given(folded_topologies(), st.sets(st.sampled_from(AXES), min_size=1), st.integers(-20, 20))
def test_indices_and_peers_match_the_list_of_ranks(topology: ProcessTopology, axes: set[str], index: int) -> None:
    for rank in range(0, topology.world_size(), 7):
        ranks = topology.get_axis_ranks(axes, rank)
        assert ranks == sorted(ranks)
        assert topology.get_axis_index(axes, rank) == ranks.index(rank)
        assert topology.get_axis_peer(axes, rank, index) == ranks[index % len(ranks)]


# -- integers of other types ---------------------------------------------------------------------------------------


def test_integers_of_other_types_are_converted() -> None:
    topology = ProcessTopology(["pipe", "data", "model"], [np.int64(2), 4, np.int32(2)])
    assert_same(topology.dims, [2, 4, 2])
    assert topology == PipeModelDataParallelTopology(2, 2, 4)
    assert repr(topology.get_coord(np.int64(13))) == "ProcessCoord(pipe=1, data=2, model=1)"
    assert_same(topology.get_rank(pipe=np.int64(1), data=2, model=True), 13)
    assert_same(topology.filter_match(pipe=np.int64(1), data=2), [12, 13])
    assert_same(topology.get_axis_ranks("model", np.int64(13)), [12, 13])


def test_fractional_ranks_and_indices_are_refused() -> None:
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


@settings(deadline=None)
@given(folded_topologies(), folded_topologies())
def test_topologies_are_equal_if_and_only_if_their_mappings_are(one: ProcessTopology, other: ProcessTopology) -> None:
    assert (one == other) == (one.axes == other.axes and one.mapping == other.mapping)


def test_a_folded_topology_equals_the_plain_one_of_the_same_mapping() -> None:
    plain = ProcessTopology.from_spec("pipe=2,data=4")
    folded = ProcessTopology.from_spec("pipe=2,data=2,seq=2").fold({"pipe": ["pipe"], "data": ["data", "seq"]})
    assert folded == plain
    assert hash(folded) == hash(plain)
    assert (folded.spec, repr(folded)) == (plain.spec, repr(plain))
    assert ProcessTopology.from_spec("data=4,model=1") != ProcessTopology.from_spec("data=4")


def test_coordinates_are_named_tuples() -> None:
    topology = ProcessTopology(["pipe", "data", "tensor"], [2, 2, 2])
    coordinate = topology.ProcessCoord(0, 1, 1)
    assert (coordinate.pipe, coordinate.data, coordinate.model, coordinate.tensor) == (0, 1, 1, 1)
    assert topology.mapping[coordinate] == 3
    assert coordinate._replace(pipe=1) == topology.get_coord(7) == topology.ProcessCoord(pipe=1, data=1, model=1)
    assert topology.get_rank(pipe=0, data=1, tensor=1) == 3
    assert topology.get_axis_comm_lists("tensor") == topology.get_axis_comm_lists("model")


def test_a_large_topology_prints_abridged() -> None:
    topology = ProcessTopology.from_spec("pipe=1024,data=1024")
    assert repr(topology) == "ProcessTopology('pipe=1024,data=1024')"
    assert len(str(topology)) < 100


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
