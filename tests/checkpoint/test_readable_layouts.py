"""A layout can read another's files without a conversion only if the files hold the same slices and experts."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from ds_topo.checkpoint.manifest import SavedExperts, SavedLayout, why_unreachable
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import ExpertPlan

ZERO_1 = SavedLayout("pipe=2,data=2,model=2", 8, 4, 2, 1, "DeepSpeedZeroOptimizer", "fp32", is_pipeline=True)
ORDERS = [",".join(f"{axis}=2" for axis in order) for order in permutations(("pipe", "data", "model"))]


@pytest.mark.parametrize("before", ORDERS)
@pytest.mark.parametrize("after", ORDERS)
def test_every_order_of_axes_reads_every_other(before: str, after: str) -> None:
    assert why_unreachable(replace(ZERO_1, topology=before), replace(ZERO_1, topology=after)) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"topology": "pipe=4,data=2"}, "model=2 became model=1|pipe=2 became pipe=4"),
        ({"topology": None, "model_ranks": 2}, "4 model ranks"),
        ({"world_size": 16, "replicas": 4, "topology": "pipe=2,data=4,model=2"}, "2 replicas became 4"),
        ({"zero_stage": 0, "optimizer": "Adam"}, "DeepSpeedZeroOptimizer at ZeRO 1 became Adam at ZeRO 0"),
        ({"zero_stage": 3, "optimizer": "DeepSpeedZeroOptimizer_Stage3"}, "at ZeRO 3"),
        ({"is_pipeline": False}, "a PipelineModule became a plain engine"),
        ({"precision": "bf16"}, "fp32 became bf16: weights must be rounded anew"),
        ({"experts": (SavedExperts(2),)}, r"became \[\(2, False\)\]"),
    ],
    ids=str,
)
def test_other_degrees_are_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    assert re.search(reason, why_unreachable(ZERO_1, replace(ZERO_1, **change)))


def test_experts_that_a_topology_cannot_hold_are_refused() -> None:
    right = SavedLayout("data=4", 4, 1, 4, 1, "DeepSpeedZeroOptimizer", "fp32", experts=(SavedExperts(2),))
    wrong = replace(right, topology="data=3")
    assert "must divide the 3 ranks" in why_unreachable(right, wrong)
    assert "must divide the 3 ranks" in why_unreachable(wrong, right)


def test_without_zero_other_numbers_of_replicas_can_read() -> None:
    whole = replace(ZERO_1, zero_stage=0, optimizer="Adam")
    assert why_unreachable(whole, replace(whole, world_size=16, replicas=4, topology="pipe=2,data=4,model=2")) == ""


def test_other_numbers_of_replicas_can_read_parameters_alone() -> None:
    more = replace(ZERO_1, world_size=16, replicas=4, topology="pipe=2,data=4,model=2", zero_stage=0, optimizer="Adam")
    assert why_unreachable(ZERO_1, more, optimizer_states=False) == ""
    assert "ZeRO 3" in why_unreachable(ZERO_1, replace(more, zero_stage=3), optimizer_states=False)


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize("before", ORDERS)
@pytest.mark.parametrize("after", ORDERS)
def test_orders_read_each_other_if_experts_are_placed_alike(before: str, after: str, tensor_parallel: bool) -> None:
    """Compare with a slow model: every rank's file names must name files of ranks with the same experts."""
    experts = (SavedExperts(2, tensor_parallel),)
    layouts = [replace(ZERO_1, topology=spec, experts=experts) for spec in (before, after)]
    assert (why_unreachable(*layouts) == "") == (_by_names(before, experts) == _by_names(after, experts))


def _by_names(spec: str, experts: tuple[SavedExperts, ...]) -> dict[str, set[tuple[int, int]]]:
    """Return the experts, and their partition, in each file of optimizer states."""
    topology, found = ProcessTopology.from_spec(spec), {}
    for rank in range(topology.world_size()):
        place = topology.get_coord(rank)
        plan = ExpertPlan(topology, experts[0].size, experts[0].tensor_parallel, experts[0].data_first)
        name = f"zero_pp_rank_{place.data}_mp_rank_{place.pipe * 2 + place.model}"
        own, copies = plan.expert_ranks(rank), plan.expert_data_ranks(rank)
        found[name] = {(own.index(rank), copies.index(rank))}
    return found
