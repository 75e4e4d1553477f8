"""``ds-topo show``: a layout before it starts, without a process and without torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_topo.cli.host_options import add_host_options, host_map_of
from ds_topo.errors import TopologyError

if TYPE_CHECKING:
    from ds_topo.cli.layout_view import LayoutView

_EXAMPLES = """examples:
  ds-topo show "pipe=2,tensor=2,data=4" --groups
  ds-topo show "pipe=2,data=-1" --hostfile hosts --rank 5
  ds-topo show "pipe=16,data=128,model=8" --hosts "n[0001-2048]" --slots 8 --png layout.png
  ds-topo show "pipe=2,data=4" "data=4,pipe=2" --hosts 2 --slots 4
"""


def add_parser(subparsers: Any) -> None:
    """The options of the command."""
    parser = subparsers.add_parser(
        "show",
        help="show a layout, or what moves between two",
        description="Show which rank has which coordinate on which host, its groups, and what crosses hosts.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "specs",
        metavar="SPEC",
        nargs="+",
        help='axes, outermost first: "pipe=2,data=-1,model=2", or a DeepSpeed config with one; two: what moves',
    )
    add_host_options(parser)
    output = parser.add_argument_group("what to show")
    output.add_argument("--groups", action="store_true", help="the ranks of every group")
    output.add_argument("--rank", metavar="R", type=int, help="one rank's groups and neighbors")
    output.add_argument("--json", action="store_true", help="everything, for programs")
    output.add_argument("--svg", metavar="FILE", type=Path, help="draw hosts and ranks into a file")
    output.add_argument("--png", metavar="FILE", type=Path, help="the same as pixels")
    output.add_argument("--links", metavar="AXIS", help="draw the links of this axis; the first that crosses hosts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    from ds_topo.cli.layout_view import LayoutView

    if len(arguments.specs) > 2:
        raise TopologyError(f"{len(arguments.specs)} specs: one is shown, two are compared")
    host_map = host_map_of(arguments)
    views = [LayoutView.of(spec, host_map) for spec in arguments.specs]
    if len({view.topology.world_size() for view in views}) > 1:
        sizes = ", ".join(f"{view.spec} has {view.topology.world_size()}" for view in views)
        raise TopologyError(f"only layouts of as many ranks can be compared: {sizes}")
    if arguments.rank is not None:
        views[0].topology.get_coord(arguments.rank)  # raises where it is out of range
    links = views[-1].axis_to_draw(arguments.links)
    for path in (arguments.svg, arguments.png):
        if path is not None:
            from ds_topo.cli.layout_picture import save_picture

            save_picture(views[-1], links, path, "svg" if path is arguments.svg else "png")
            print(f"picture: {path}", file=sys.stderr)
    if arguments.json:
        from ds_topo.cli.layout_json import comparison_as_json, layout_as_json

        content = [layout_as_json(view, groups=arguments.groups) for view in views]
        json.dump(content[0] if len(views) == 1 else comparison_as_json(views, content), sys.stdout)
        print()
    else:
        _print(views, arguments)
    return 0


def _print(views: list[LayoutView], arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from ds_topo.cli import layout_text

    console = Console()
    if arguments.rank is not None:
        for view in views:
            layout_text.print_rank(console, view, arguments.rank)
        return
    if len(views) == 2:
        layout_text.print_moves(console, *views)
    else:
        layout_text.print_layout(console, views[0])
        layout_text.print_axes(console, views[0])
    if arguments.groups:
        for view in views:
            layout_text.print_groups(console, view)
