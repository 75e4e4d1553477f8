"""Whether a layout can read the files of another one as they are.

DeepSpeed's names have model ranks and replicas in them and no ranks, so that the order of axes does not matter; but for
experts, which two orders may deal to the same place differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ds_topo.checkpoint_files.manifest import SavedLayout
from ds_topo.topology.expert_tables import ExpertPlan
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import gradient_axes


class Wanted(NamedTuple):
    """What is to be loaded beside the module."""

    optimizer_states: bool = True


def why_unreachable(saved: SavedLayout, now: SavedLayout, wanted: Wanted) -> str:
    """Why ``now`` cannot read what ``saved`` wrote; empty if it can.

    >>> layouts = [SavedLayout(spec, 4, 2, 2, 1, "DeepSpeedZeroOptimizer", "fp32") for spec in
    ...            ("pipe=2,data=2", "data=2,pipe=2", "pipe=2,data=2")]
    >>> why_unreachable(layouts[0], layouts[1], Wanted())
    ''
    """
    for problem in _differences(saved, now, wanted):
        return problem
    return ""


def _differences(saved: SavedLayout, now: SavedLayout, wanted: Wanted) -> Iterator[str]:
    for axis in ("pipe", "model"):
        before, after = (layout.degrees().get(axis, 1) for layout in (saved, now))
        if saved.topology is not None and now.topology is not None and before != after:
            yield f"{axis}={before} became {axis}={after}: other parameters are in each file"
    if saved.model_ranks != now.model_ranks:
        yield f"{saved.model_ranks} model ranks (stages x slices) became {now.model_ranks}"
    if saved.is_pipeline != now.is_pipeline:
        kinds = {True: "a PipelineModule", False: "a plain engine"}
        yield f"{kinds[saved.is_pipeline]} became {kinds[now.is_pipeline]}: pipelines save layer by layer"
    partitions_parameters = 3 in (saved.zero_stage, now.zero_stage)
    if wanted.optimizer_states and saved.optimizer != now.optimizer:
        yield f"{saved.optimizer} at ZeRO {saved.zero_stage} became {now.optimizer} at ZeRO {now.zero_stage}"
    if partitions_parameters and saved.zero_stage != now.zero_stage:
        yield f"ZeRO {saved.zero_stage} became ZeRO {now.zero_stage}: stage 3 partitions parameters, too"
    has_partitions = wanted.optimizer_states and saved.has_partitions
    if has_partitions and saved.precision != now.precision:
        yield f"{saved.precision} became {now.precision}: the optimizer's files have other names and contents"
    if saved.replicas != now.replicas and (has_partitions or partitions_parameters):
        yield f"{saved.replicas} replicas became {now.replicas}: ZeRO's partitions are one for each replica"
    yield from _differences_of_experts(saved, now, wanted)


def _differences_of_experts(saved: SavedLayout, now: SavedLayout, wanted: Wanted) -> Iterator[str]:
    sizes = [sorted((groups.size, groups.tensor_parallel) for groups in layout.experts) for layout in (saved, now)]
    if sizes[0] != sizes[1]:
        yield f"experts over (ranks, tensor parallel) {sizes[0]} became {sizes[1]}"
    elif saved.experts and saved.topology is not None and now.topology is not None:
        whole_places = wanted.optimizer_states and bool(saved.zero_stage)
        before, after = (_places_of_experts(layout, whole_places) for layout in (saved, now))
        if before != after:
            yield (
                f"{now.topology} deals experts to other places than {saved.topology} did: a file with a replica's part "
                "of experts and of everything else would be read by another replica"
            )


def _places_of_experts(layout: SavedLayout, whole_places: bool) -> frozenset[tuple[object, ...]]:
    """For every rank: its model rank, which experts it has and, where files are a replica's, which one it is."""
    assert layout.topology is not None
    topology = ProcessTopology.from_spec(layout.topology)
    found = set()
    for groups in sorted(layout.experts, key=lambda groups: groups.size):
        plan = ExpertPlan(topology, groups.size, groups.tensor_parallel, groups.data_first)
        experts = {rank: place for ranks in plan.expert_tables() for place, rank in enumerate(ranks)}
        copies = {rank: place for ranks in plan.expert_data_tables() for place, rank in enumerate(ranks)}
        for rank in range(topology.world_size()):
            place = topology.get_coord(rank)._asdict()
            model = place.get("pipe", 0) * max(1, topology.get_dim("model")) + place.get("model", 0)
            replica = (topology.get_axis_index(gradient_axes(topology), rank), copies[rank]) if whole_places else ()
            found.add((groups.size, model, experts[rank], replica))
    return frozenset(found)
