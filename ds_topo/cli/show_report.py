"""View a layout: a topology with the user's axis names, and its hosts if they are known.

It is printed as tables of any width, or drawn: hosts as boxes, ranks coloured by stage, and the links of one axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, pairwise
from math import ceil, hypot, log2, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_topo.cli.shared import UNBOUNDED, counted, new_figure, save_figure, say, table_of
from ds_topo.errors import MissingWorldSizeError, TopologyError, UnknownAxisError, fold_numbers
from ds_topo.launch import placement as placements
from ds_topo.launch.hosts import HostMap, check_size
from ds_topo.launch.placement import Placement
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import EXTRA_MARK, PIPE, SHARD, axis_in_spec, check_meanings, read_config
from ds_topo.topology.process_topology import index_along
from ds_topo.topology.rank_tables import copy_axes, created_groups, grid_groups, model_parallel_axes, neighbor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 8
"""Ranks in a row where hosts are not known."""
MOST_ROWS = 32
"""The most hosts that are listed one by one; more are summarised."""
MOST_RANKS = 128
"""The most ranks that are listed one by one."""
MOST_GROUPS = 128
"""The most groups that are listed one by one."""
STAGE_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")
"""Colours of stages, in turn, as names, so that the terminal's own theme applies."""


@dataclass(frozen=True)
class LayoutView:
    """A layout as ``ds-topo show`` displays it."""

    topology: ProcessTopology
    names: dict[str, str]
    """The user's own name of each axis, such as ``tensor`` for ``model``."""
    host_map: HostMap | None

    @classmethod
    def of(cls, text: str, host_map: HostMap | None) -> LayoutView:
        """Return the layout of a spec, or of a DeepSpeed config (``*.json``) with a ``"topology"`` section."""
        spec = read_config(text) if text.endswith(".json") else text
        if host_map is not None:
            topology = Placement.of(spec, host_map).topology
        else:
            try:
                topology = ProcessTopology.from_spec(spec)
                check_size(topology.world_size())
            except MissingWorldSizeError:
                raise TopologyError(
                    f"{text}: one degree is -1, what is left of the slots: give --hostfile FILE, "
                    "--hosts N --slots M, or --slurm"
                ) from None
        check_meanings(topology.axes, topology.extra_axes)
        given = [part.partition("=")[0] for part in spec.split(",")] if isinstance(spec, str) else list(dict(spec))
        unmarked = (name.strip().removeprefix(EXTRA_MARK).strip() for name in given)
        return cls(topology, {axis_in_spec(name): name for name in unmarked}, host_map)

    @property
    def spec(self) -> str:
        """The spec with the user's axis names."""
        if not self.topology.layout.is_row_major:
            return self.topology.spec
        sizes = zip(self.topology.axes, self.topology.dims, strict=True)
        extra = self.topology.extra_axes
        return ",".join(f"{EXTRA_MARK if axis in extra else ''}{self.names[axis]}={size}" for axis, size in sizes)

    @property
    def axis_names(self) -> list[str]:
        """The user's names of all axes, in order."""
        return [self.names[axis] for axis in self.topology.axes]

    @property
    def placement(self) -> Placement | None:
        """The topology on its hosts, if they are known."""
        return None if self.host_map is None else Placement(self.topology, self.host_map)

    @property
    def rows(self) -> list[tuple[str, Sequence[int]]]:
        """The name and the ranks of every host, or of every eight ranks where hosts are not known."""
        if self.host_map is not None:
            return list(zip(self.host_map.hosts.names, self.host_map.ranks_on_hosts, strict=True))
        world = self.topology.world_size()
        chunks = [range(first, min(first + ROW, world)) for first in range(0, world, ROW)]
        return [(f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else f"{chunk[0]}", chunk) for chunk in chunks]

    @property
    def is_large(self) -> bool:
        """Return whether there are too many ranks to list them one by one."""
        return self.topology.world_size() > MOST_RANKS or len(self.rows) > MOST_ROWS

    @property
    def stage_axis(self) -> int:
        """The position of the axis that has a colour for each index: ``pipe``, or the outermost one without it."""
        return self.topology.axes.index(PIPE) if PIPE in self.topology.axes else 0

    @property
    def stages(self) -> list[int]:
        """The index of every rank along ``stage_axis``."""
        factors = self.topology.layout.axes[self.stage_axis]
        return [index_along(rank, factors) for rank in range(self.topology.world_size())]

    def axis_to_draw(self, name: str | None) -> str:
        """Return the axis whose links a picture shows: the named one, or the first whose groups cross hosts."""
        if name is not None:
            axis = axis_in_spec(name)
            if axis not in self.topology.axes:
                raise UnknownAxisError(f"axis {name!r} is not in the topology {self.spec!r}: {self.axis_names}")
            return axis
        wide = [axis for axis, size in zip(self.topology.axes, self.topology.dims, strict=True) if size > 1]
        placement = self.placement
        if placement is not None:
            wide = [axis for axis in wide if placement.span(axis).groups_across_hosts] or wide
        return wide[0] if wide else self.topology.axes[0]

    def coordinate(self, rank: int) -> str:
        """Return a coordinate as ``1,0,3``."""
        return ",".join(map(str, self.topology.layout.coordinate_of(rank)))

    def label(self, axes: Iterable[str]) -> str:
        """Return axes by the user's names, as ``pipe x tensor``."""
        return " x ".join(self.names[axis] for axis in axes)

    def kinds(self, *, ranks: bool = False) -> list[dict[str, Any]]:
        """Return the facts about each kind of group, for tables and JSON; ``ranks`` adds those of each group."""
        placement, kinds = self.placement, []
        for axes, name in self.group_names():
            tables = self.topology.get_axis_comm_lists(axes)
            kind: dict[str, Any] = {
                "name": name,
                "axes": [self.names[axis] for axis in axes],
                "groups": len(tables),
                "ranks_per_group": len(tables[0]),
            }
            if placement is not None:
                kind |= asdict(placement.span(axes))
            kinds.append(kind | ({"ranks": tables} if ranks else {}))
        return kinds

    def group_names(self) -> list[tuple[tuple[str, ...], str]]:
        """Return the axes and the name of each kind of group that training creates.

        Where the user calls tensor parallelism ``tensor``, the group over it and ``pipe`` is called ``model``.
        """
        both = model_parallel_axes(self.topology) if "model" not in self.names.values() else ()
        kinds = placements.group_axes(self.topology)
        return [(axes, "model" if len(axes) > 1 and axes == both else self.label(axes)) for axes in kinds]


def print_layout(console: Console, view: LayoutView) -> None:
    """Print every rank's coordinate by host and slot, or a summary of neighboring hosts where there are many."""
    title = f"{view.spec}: {counted(view.topology.world_size(), 'rank')}"
    if view.host_map is not None:
        counts = sorted(set(view.host_map.hosts.counts))
        slots = counted(counts[0], "slot") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} slots"
        title += f" on {counted(len(view.host_map.hosts), 'host')} ({slots} each)"
    console.print(title, style="bold", highlight=False)
    console.print()
    if view.is_large:
        _print_runs(console, view)
    else:
        _print_ranks(console, view)
    console.print()


def print_axes(console: Console, view: LayoutView) -> None:
    """Print one line for each kind of group: how many there are, their size, and how much of them crosses hosts."""
    crossing = () if view.host_map is None else (">hosts", ">pairs across hosts", ">ring links across")
    table = table_of("group", ">groups", ">ranks", *crossing)
    for kind in view.kinds():
        table.add_row(kind["name"], f"{kind['groups']:,}", f"{kind['ranks_per_group']:,}", *_crossing_cells(kind))
    console.print(table)
    console.print()
    own = len(created_groups(view.topology, 0))
    say(console, f"Each rank creates {counted(own, 'process group')} besides the world's.")
    if view.placement is not None and SHARD in view.topology.axes:
        sums, exchanges = placements.gradients_across_hosts(view.placement)
        along = view.label(copy_axes(view.topology)) or "no axis"
        say(
            console,
            f"ZeRO: with P bytes of gradients on a rank, a host sends {sums:.3g} P along {along} in each step, and "
            f"{exchanges:.3g} P along {SHARD} in each reduction or gathering.",
        )
    if view.host_map is None:
        say(console, "Give --hostfile FILE, --hosts N --slots M or --slurm to see what crosses hosts.")


def print_groups(console: Console, view: LayoutView) -> None:
    """Print every group's ranks by kind, or the first and the last groups of each kind where there are many."""
    placement = view.placement
    console.print()
    kinds = [(axes, name, view.topology.get_axis_comm_lists(axes)) for axes, name in view.group_names()]
    are_few = sum(len(groups) for _, _, groups in kinds) <= MOST_GROUPS
    for axes, name, groups in kinds:
        left_out = 0 if are_few else max(0, len(groups) - 3)
        for number, ranks in enumerate([*groups[:2], *groups[2 + left_out :]]):
            if left_out and number == 2:
                say(console, f"  ... {left_out:,} more over {view.label(axes)}")
            hosts = [] if placement is None else placement.hosts_of(ranks)
            across = f"  across {_few_names(hosts)}" if len(hosts) > 1 else ""
            say(console, f"group {name}, ranks: {placements.few_ranks(ranks)}{across}")


def print_rank(console: Console, view: LayoutView, rank: int) -> None:
    """Print one rank's coordinate, host, groups and neighbors."""
    topology, placement, host_map = view.topology, view.placement, view.host_map
    indices = topology.layout.coordinate_of(rank)
    coordinate = ", ".join(f"{name}={index}" for name, index in zip(view.axis_names, indices, strict=True))
    where = "" if host_map is None else f" on {host_map.host_of(rank).name}, slot {host_map.slot_of(rank)}"
    console.print(f"rank {rank}: {coordinate}{where}", style="bold", highlight=False)
    console.print()
    table = table_of("group", "ranks", *(["hosts"] if placement is not None else []), ">group rank")
    names = dict(view.group_names())
    for group in grid_groups(topology, rank):
        if group.axes in names:
            hosts = [] if placement is None else [_few_names(placement.hosts_of(group.ranks))]
            table.add_row(names[group.axes], placements.few_ranks(group.ranks, 8), *hosts, str(group.ranks.index(rank)))
    console.print(table)
    console.print()
    for axis, size in zip(topology.axes, topology.dims, strict=True):
        if size > 1:
            before, after = (neighbor(topology, axis, rank, step) for step in (-1, 1))
            say(console, f"along {view.names[axis]}: previous rank {before}, next rank {after}")
    created = created_groups(topology, rank)  # each distinct set of ranks once, without the world's own group
    listed = f": {', '.join(view.label(group.axes) for group in created)}" if created else ""
    say(console, f"It creates {counted(len(created), 'process group')} besides the world's{listed}.")


def print_replicas(console: Console, view: LayoutView, axis: str) -> None:
    """Print which ranks and hosts are a replica, if each replica along the outermost axis is a job of its own."""
    topology = view.topology
    if axis not in topology.axes:
        raise TopologyError(f"--replicas {axis!r} is no axis of {view.spec}: choose {topology.axes[0]!r}")
    if topology.axes[0] != axis:
        crossing = ", ".join(topology.axes[: topology.axes.index(axis)])
        raise TopologyError(
            f"--replicas {axis}: in {view.spec} groups along {crossing} join ranks of several replicas, which cannot "
            f"be jobs of their own: name {axis!r} first, so that the ranks of a replica are adjacent"
        )
    inside = ",".join(f"{name}={topology.get_dim(name)}" for name in topology.axes[1:]) or f"{axis}=1"
    size = topology.world_size() // topology.get_dim(axis)
    say(console, f"{topology.get_dim(axis)} replicas of {counted(size, 'rank')}, each a job with {inside!r}")
    table = table_of(">replica", "ranks", *(["hosts"] if view.host_map is not None else []))
    for number in range(topology.get_dim(axis)):
        ranks = topology.get_axis_list(axis, number)
        where = [] if view.placement is None else [_few_names(view.placement.hosts_of(ranks))]
        table.add_row(str(number), placements.few_ranks(ranks, 8), *where)
    console.print(table)


def _print_ranks(console: Console, view: LayoutView) -> None:
    """Print a line for each host if they fit with the number of every rank, or without; else several lines each."""
    most, hosts = max(len(ranks) for _, ranks in view.rows), () if view.host_map is None else view.host_map.hosts
    # columns are named after slots if hosts use their first ones
    headed = bool(hosts) and all(host.slots == tuple(range(len(host.slots))) for host in hosts)
    tables = [partial(_ranks_table, view, most, headed=headed), partial(_ranks_table, view, most)]
    if not any("," in fold_numbers(ranks) for _, ranks in view.rows):
        tables += [partial(_ranks_table, view, most, headed=headed, ranges=True, gap=gap) for gap in (2, 1)]
    tables += [partial(_ranks_table, view, ceil(most / lines)) for lines in range(2, most + 1)]
    unbounded = console.options.update(width=UNBOUNDED)
    for make_table in tables:
        table = make_table()
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    console.print(table)
    in_colour = console.color_system is not None and not console.no_color
    colours = f"; a colour for each {view.axis_names[view.stage_axis]}" if in_colour else ""
    say(console, f"Each rank with its {','.join(view.axis_names)}{colours}.")


def _ranks_table(view: LayoutView, per_line: int, *, headed: bool = False, ranges: bool = False, gap: int = 2) -> Table:
    """Return a table of the ranks of every row, with their numbers or, with ``ranges``, with the range of a row's."""
    known, stages, number = view.host_map is not None, view.stages, len(str(view.topology.world_size() - 1))
    columns = ["host" if known else "ranks", *(["ranks"] if ranges and known else [])]
    table = table_of(*columns, *(f"slot {slot}" if headed else "" for slot in range(per_line)))
    table.padding = (0, gap, 0, 0)
    for name, ranks in view.rows:
        names = [name, fold_numbers(ranks)][: len(columns)]
        for first in range(0, len(ranks), per_line):
            cells = [
                _coloured(("" if ranges else f"{rank:{number}d} ") + view.coordinate(rank), stages[rank])
                for rank in ranks[first : first + per_line]
            ]
            table.add_row(*(names if first == 0 else [""]), *cells)
    return table


def _print_runs(console: Console, view: LayoutView) -> None:
    names, ranks = zip(*view.rows, strict=True)
    runs = list(enumerate(placements.host_runs(view.topology, names, ranks)))
    left_out = len(runs) - 6 if len(runs) > MOST_ROWS else 0
    shown = [*runs[:4], *runs[-2:]] if left_out else runs
    known = view.host_map is not None
    degrees = dict(zip(view.axis_names, view.topology.dims, strict=True))
    table = table_of("hosts" if known else "rows", *view.axis_names, *([">number"] if known else []), ">ranks")
    for index, run in shown:
        if left_out and index == len(runs) - 2:
            table.add_row(f"... {left_out:,} more", *("" for _ in table.columns[1:]))
        table.add_row(
            _coloured(_shorten(run.hosts, 24), index),
            *(_shorten(text, 16) for text in run.indices),
            *([f"{run.count:,}"] if known else []),
            f"{run.ranks[0]}-{run.ranks[1]}",
        )
    console.print(table)
    outermost = next((name for name, size in degrees.items() if size > 1), view.axis_names[0])
    say(console, f"Each line: neighboring {'hosts' if known else 'rows of ranks'} with one index of {outermost}.")
    if known:
        for count, pattern in placements.host_patterns(view.topology, ranks)[:4]:
            held = ", ".join(
                f"{number} of {size} {name}" for number, (name, size) in zip(pattern, degrees.items(), strict=True)
            )
            say(console, f"{counted(count, 'host')} hold{'s' if count == 1 else ''}, each: {held}.")


def _coloured(text: str, stage: int) -> Text:
    return Text(text, style=STAGE_COLORS[stage % len(STAGE_COLORS)])


def _crossing_cells(kind: dict[str, Any]) -> list[str]:
    """Return the hosts of a group, and how many of its pairs and ring links cross hosts; none without hosts."""
    if "pairs" not in kind:
        return []
    fewest, most = kind["hosts_per_group"]
    crossing = ((kind[f"{what}_across_hosts"], kind[what]) for what in ("pairs", "ring_links"))
    hosts = f"{most:,}" if fewest == most else f"{fewest:,}-{most:,}"
    return [hosts, *(f"{part:,} of {whole:,}" if part else "none" for part, whole in crossing)]


def _few_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:2])}, ..., {names[-1]} ({len(names):,} hosts)"


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


# -- the picture -------------------------------------------------------------------------------------------------------


MOST_LABELLED = 128
"""The most ranks whose boxes have labels, with the links of all groups; beyond it, only rank 0's group is drawn."""
INK, FRAME, HOST, INSIDE, ACROSS = "#222222", "#9a9a9a", "#f4f4f4", "#8c8c8c", "#d62728"
Point = tuple[float, float]


class _Sheet:
    """The positions of all boxes, in units of one rank's box; y grows downwards.

    A labelled host has a line for its name, and links run between its rows of ranks.
    """

    def __init__(self, rows: Sequence[tuple[str, Sequence[int]]]) -> None:
        slots = max(len(ranks) for _, ranks in rows)
        self.labelled = sum(len(ranks) for _, ranks in rows) <= MOST_LABELLED
        inner = slots if slots <= 4 else ceil(slots / 2) if slots <= 16 else ceil(sqrt(slots))  # ranks in a row
        inner_rows = ceil(slots / inner)
        # wider than high, as a page is
        columns = max(1, min(len(rows), round(sqrt(len(rows) * 3 * (inner_rows + 1) / (inner + 1)))))
        # stages, whose hosts are mostly a power of two, then start at the left edge
        columns = 2 ** round(log2(columns)) if columns > 4 else columns
        header, gap, pitch = (0.8, 0.9, 1.35) if self.labelled else (0.15, 0.35, 1.0)
        width, height = self.host_size = inner + 0.3, header + (inner_rows - 1) * pitch + 1.15
        places = (divmod(host, columns) for host in range(len(rows)))
        self.hosts: list[Point] = [(column * (width + gap), row * (height + gap)) for row, column in places]
        """The upper left corner of each host."""
        self.ranks: dict[int, Point] = {}
        """The upper left corner of each rank's box."""
        for (x, y), (_, ranks) in zip(self.hosts, rows, strict=True):
            for position, rank in enumerate(ranks):
                self.ranks[rank] = x + 0.15 + position % inner, y + header + position // inner * pitch


def save_picture(view: LayoutView, axis: str, path: Path, kind: str) -> None:
    """Draw a layout and the links along ``axis`` into an SVG or PNG file."""
    figure = draw(view, axis)
    from matplotlib import rc_context

    # keep text as text in an SVG, and leave out the date, so that equal layouts give equal files
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_topo"}):
        metadata = {"Date": None} if kind == "svg" else None
        save_figure(figure, path, format=kind, dpi=200, bbox_inches="tight", metadata=metadata)


def draw(view: LayoutView, axis: str) -> Figure:
    """Return the figure that ``save_picture`` writes: hosts, ranks and links below a title, and a legend of stages."""
    sheet = _Sheet(view.rows)
    ends = zip(*sheet.hosts, strict=True)
    width, height = (max(corners) + size for corners, size in zip(ends, sheet.host_size, strict=True))
    scale = min(0.62, 9.0 / width) if sheet.labelled else 9.0 / width
    figure = new_figure(figsize=(width * scale, height * scale))
    from matplotlib.patches import Patch

    plot = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    plot.set_axis_off()
    stages = max(view.stages) + 1
    colors = stage_colors(stages)
    _draw_ranks(plot, view, sheet, colors, 72 * scale)
    _draw_links(plot, view, sheet, axis)
    title = view.spec if view.host_map is None else f"{view.spec} on {counted(len(view.rows), 'host')}"
    name = view.names[axis]
    lines = f"lines: {name} groups" if sheet.labelled else f"lines: the {name} group of rank 0"
    if view.host_map is not None and len(view.rows) > 1:
        lines += ", red between hosts"
    plot.set_title(f"{title}\neach rank: {', '.join(view.axis_names)}; {lines}", loc="left", fontsize=8, color=INK)
    shown = range(stages) if stages <= 8 else [0, stages // 4, stages // 2, 3 * stages // 4, stages - 1]
    patches = [Patch(color=colors[stage], label=f"{view.axis_names[view.stage_axis]} {stage}") for stage in shown]
    plot.legend(handles=patches, loc="upper left", bbox_to_anchor=(0, 0), ncols=5, frameon=False, fontsize=7)
    return figure


def stage_colors(stages: int) -> list[tuple[float, float, float, float]]:
    """Return a colour for each stage: distinct colours for a few stages, a scale for many."""
    from matplotlib import colormaps

    if stages <= 8:
        return [colormaps["Set2"](stage) for stage in range(stages)]
    return [colormaps["viridis"](0.08 + 0.92 * stage / (stages - 1)) for stage in range(stages)]


def _draw_ranks(plot: Axes, view: LayoutView, sheet: _Sheet, colors: Sequence[Any], points: float) -> None:
    """Draw hosts and ranks, in ``points`` per unit. Unlabelled neighbors in a row of one stage are drawn as one box."""
    from matplotlib.collections import PolyCollection

    stages, hosts, boxes, fills = view.stages, [], [], []
    inset = 0.05 if sheet.labelled else 0.0

    def box_of(rank: int) -> tuple[float, int, int]:
        return sheet.ranks[rank][1], stages[rank], rank if sheet.labelled else 0

    for (x, y), (name, ranks) in zip(sheet.hosts, view.rows, strict=True):
        hosts.append(_box(x, y, *sheet.host_size))
        for (_, stage, _), run in groupby(ranks, key=box_of):
            first, *others = run
            boxes.append(_box(*sheet.ranks[first], 1 + len(others), 1, inset))
            fills.append(colors[stage])
        if sheet.labelled:
            plot.text(x + 0.2, y + 0.27, name, fontsize=0.22 * points, color=INK, va="center")
            for rank in ranks:
                left, top = sheet.ranks[rank]
                coordinate = view.coordinate(rank)
                size = points * min(0.22, 1.45 / max(len(coordinate), 5))
                text = f"{rank}\n{coordinate}"
                plot.text(left + 0.5, top + 0.5, text, fontsize=size, color=INK, ha="center", va="center")
    fill, width = (HOST, 0.8) if sheet.labelled else ("none", 0.25)
    frames = PolyCollection(hosts, facecolors=fill, edgecolors=FRAME, linewidths=width, zorder=1, clip_on=False)
    plot.add_collection(frames)
    plot.add_collection(PolyCollection(boxes, facecolors=fills, edgecolors="none", zorder=2))


def _draw_links(plot: Axes, view: LayoutView, sheet: _Sheet, axis: str) -> None:
    """Draw the links of all groups, or of rank 0's group if there are many ranks. Labelled boxes cover their ends."""
    from matplotlib.collections import LineCollection

    groups, placement = view.topology.get_axis_comm_lists(axis), view.placement
    if not sheet.labelled:
        groups = groups[:1]
    lines: dict[str, list[Any]] = {INSIDE: [], ACROSS: []}
    for ranks in groups:
        for pair in pairwise(ranks):
            crosses = placement is not None and len(placement.hosts_of(pair)) > 1
            lines[ACROSS if crosses else INSIDE].append(_link(*(sheet.ranks[rank] for rank in pair)))
    zorder = 1.5 if sheet.labelled else 3
    for color, curves in lines.items():
        plot.add_collection(LineCollection(curves, colors=color, linewidths=1.2, alpha=0.75, zorder=zorder))
    if not sheet.labelled:
        x, y = zip(*(sheet.ranks[rank] for rank in groups[0]), strict=True)
        plot.scatter([left + 0.5 for left in x], [top + 0.5 for top in y], s=5, color=INK, linewidths=0, zorder=4)


def _box(x: float, y: float, width: float, height: float, inset: float = 0.0) -> list[Point]:
    left, top, right, bottom = x + inset, y + inset, x + width - inset, y + height - inset
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _link(start: Point, end: Point) -> Any:
    """Return the points of a bent line between the centers of two boxes, given by their upper left corners.

    A line between boxes of one row rises above their upper edges, but not to the host's name.
    """
    from matplotlib.bezier import BezierSegment

    (x0, y0), (x1, y1) = ((x + 0.5, y + 0.5) for x, y in (start, end))
    length = hypot(x1 - x0, y1 - y0)
    bend = (min(1.2 + 0.08 * length, 1.8) if y0 == y1 else min(0.1 * length, 0.4)) / length
    control = (x0 + x1) / 2 + bend * (y1 - y0), (y0 + y1) / 2 - bend * (x1 - x0)
    return BezierSegment([(x0, y0), control, (x1, y1)])([step / 40 for step in range(41)])
