"""Run ``ds-topo show``: print a layout without starting a process and without importing torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_topo.cli.shared import (
    add_host_options,
    check_ending,
    given_options,
    host_map_of,
    new_console,
    refuse_both,
    refuse_without_effect,
)
from ds_topo.errors import TopologyError
from ds_topo.launch.placement import gradients_across_hosts
from ds_topo.topology.axes import SHARD

if TYPE_CHECKING:
    from ds_topo.cli.show_report import LayoutView

SUMMARY = "show a layout"
DESCRIPTION = "Show the coordinate and the host of every rank, its groups, and what crosses hosts."
EXAMPLES = """examples:
  ds-topo show "pipe=2,tensor=2,data=4" --groups
  ds-topo show "pipe=2,data=-1" --hostfile hosts --rank 5
  ds-topo show "pipe=16,data=128,model=8" \\
               --hosts "n[0001-2048]" --slots 8 --png layout.png
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    spec = 'axes, outermost first: "pipe=2,data=-1,model=2", or a DeepSpeed config with a topology'
    parser.add_argument("spec", metavar="SPEC", help=spec)
    add_host_options(parser)
    add = parser.add_argument_group("output").add_argument
    add("--groups", action="store_true", help="list the ranks of every group")
    add("--rank", metavar="R", type=int, help="show one rank's groups and neighbors; default: all")
    add("--replicas", metavar="AXIS", help="show which hosts are a replica, if each is a job of its own")
    add("--json", action="store_true", help="print everything as JSON; with --groups, groups too")
    add("--svg", metavar="FILE", type=Path, help="draw hosts and ranks into FILE.svg")
    add("--png", metavar="FILE", type=Path, help="draw hosts and ranks into FILE.png")
    links = "axis whose links --svg and --png draw; default: the first that crosses hosts"
    add("--links", metavar="AXIS", help=links)


def run(arguments: argparse.Namespace) -> int:
    from ds_topo.cli import show_report

    _check_output(arguments)
    view = show_report.LayoutView.of(arguments.spec, host_map_of(arguments))
    if arguments.rank is not None:
        view.topology.get_coord(arguments.rank)  # raises where it is out of range
    links = view.axis_to_draw(arguments.links)
    for path in (arguments.svg, arguments.png):
        if path is not None:
            show_report.save_picture(view, links, path, "svg" if path is arguments.svg else "png")
    console = new_console()
    if arguments.json:
        json.dump(layout_as_json(view, groups=arguments.groups), sys.stdout)
        print()
    elif arguments.replicas is not None:
        show_report.print_replicas(console, view, arguments.replicas)
    elif arguments.rank is not None:
        show_report.print_rank(console, view, arguments.rank)
    else:
        show_report.print_layout(console, view)
        show_report.print_axes(console, view)
        if arguments.groups:
            show_report.print_groups(console, view)
    return 0


def _check_output(arguments: argparse.Namespace) -> None:
    check_ending("--svg", arguments.svg, (".svg",))
    check_ending("--png", arguments.png, (".png",))
    if not given_options(arguments, "svg", "png"):
        refuse_without_effect(given_options(arguments, "links"), "it is for a picture: give --svg FILE or --png FILE")
    shown = {"rank": "one rank", "replicas": "replicas"}
    for name, what in shown.items():
        for option in ("json", "groups"):
            if getattr(arguments, name) is not None and getattr(arguments, option):
                raise TopologyError(f"--{name} shows {what}, --{option} all ranks: give one of them")
    refuse_both(given_options(arguments, *shown), "say what to show")


def layout_as_json(view: LayoutView, *, groups: bool) -> dict[str, Any]:
    """Return everything that is known of a layout; with ``groups``, also the ranks of every group."""
    topology, host_map, names = view.topology, view.host_map, view.axis_names
    ranks: list[dict[str, Any]] = []
    for rank in range(topology.world_size()):
        indices = topology.layout.coordinate_of(rank)
        entry: dict[str, Any] = {"rank": rank, "coordinate": dict(zip(names, indices, strict=True))}
        if host_map is not None:
            entry |= {"host": host_map.host_of(rank).name, "slot": host_map.slot_of(rank)}
        ranks.append(entry)
    hosts = None if host_map is None else [{"name": host.name, "slots": list(host.slots)} for host in host_map.hosts]
    content: dict[str, Any] = {
        "topology": view.spec,
        "world_size": topology.world_size(),
        "axes": [{"name": name, "degree": size} for name, size in zip(names, topology.dims, strict=True)],
        "hosts": hosts,
        "groups": view.kinds(ranks=groups),
        "ranks": ranks,
    }
    if view.placement is not None and SHARD in topology.axes:  # in units of the bytes of a rank's gradients
        per_step, per_exchange = gradients_across_hosts(view.placement)
        content["gradients_across_hosts"] = {"per_step": per_step, "per_exchange": per_exchange}
    return content
