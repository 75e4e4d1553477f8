"""Tables of ranks: DeepSpeed's default topology, extra axes folded into data, another project's groups."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe import topology as deepspeed_topology
from hypothesis import given, settings

from ds_topo import PipeDataParallelTopology, ProcessTopology
from ds_topo.topology.rank_tables import _prime_factors, factorized_topology, fold_extra_axes
from tests.support.topologies import topologies


def test_the_default_topology_is_deepspeeds() -> None:
    for number in range(1, 200):
        found, expected = _prime_factors(number), deepspeed_topology._prime_factors(number)
        assert found == expected
        assert [type(found), *map(type, found)] == [type(expected), *map(type, expected)]
    for number in (0, -4):
        with pytest.raises(ValueError, match="must be >= 1"):
            _prime_factors(number)
    assert factorized_topology(64) == PipeDataParallelTopology(num_pp=8, num_dp=8)


@settings(deadline=None)
@given(topologies())
def test_folding_keeps_stage_and_slice_and_counts_all_replicas(ours: ProcessTopology) -> None:
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
