"""Layouts for programs."""

from __future__ import annotations

from typing import Any

from ds_topo.cli.layout_view import LayoutView
from ds_topo.placement.summary import moves, named_coordinate


def layout_as_json(view: LayoutView, *, groups: bool) -> dict[str, Any]:
    """All that is known of a layout; the ranks of every group if ``groups``."""
    topology, host_map, placement = view.topology, view.host_map, view.placement
    names = view.axis_names
    ranks: list[dict[str, Any]] = []
    for rank in range(topology.world_size()):
        indices = topology.layout.coordinate_of(rank)
        entry: dict[str, Any] = {"rank": rank, "coordinate": dict(zip(names, indices, strict=True))}
        if host_map is not None:
            entry |= {"host": host_map.host_of(rank).name, "slot": host_map.slot_of(rank)}
        ranks.append(entry)
    kinds = []
    for axes, name in view.group_names():
        tables = topology.get_axis_comm_lists(axes)
        kind: dict[str, Any] = {
            "name": name,
            "axes": [view.names[axis] for axis in axes],
            "groups": len(tables),
            "ranks_per_group": len(tables[0]),
        }
        if placement is not None:
            span = placement.span(axes)
            kind |= {
                "hosts_per_group": list(span.hosts_per_group),
                "groups_across_hosts": span.crossing_groups,
                "pairs": span.pairs,
                "pairs_across_hosts": span.crossing_pairs,
                "ring_links": span.links,
                "ring_links_across_hosts": span.crossing_links,
            }
        if groups:
            kind["ranks"] = tables
        kinds.append(kind)
    return {
        "topology": view.spec,
        "world_size": topology.world_size(),
        "axes": [{"name": name, "degree": size} for name, size in zip(names, topology.dims, strict=True)],
        "hosts": None
        if host_map is None
        else [{"name": host.name, "slots": list(host.slots)} for host in host_map.hosts],
        "groups": kinds,
        "ranks": ranks,
    }


def comparison_as_json(views: list[LayoutView], content: list[dict[str, Any]]) -> dict[str, Any]:
    """Two layouts and what moves between them."""
    before, after = views
    changed = [
        rank
        for rank in range(before.topology.world_size())
        if named_coordinate(before.topology, rank) != named_coordinate(after.topology, rank)
    ]
    result: dict[str, Any] = {"before": content[0], "after": content[1], "ranks_that_change": changed}
    if before.placement is not None and after.placement is not None:
        result["shards_to_other_hosts"] = moves(before.placement, after.placement).shards_to_other_hosts
    return result
