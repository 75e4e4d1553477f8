"""Draw a layout: hosts as boxes, ranks coloured by stage, and the links of one axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil, log2, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

from ds_topo.cli.layout_view import LayoutView
from ds_topo.cli.shared import counted
from ds_topo.errors import TopologyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LABELLED = 128
"""The most ranks whose boxes have labels, with the links of all groups; beyond it, only rank 0's group is drawn."""
INK, PAPER, FRAME, INSIDE, ACROSS = "#222222", "#ffffff", "#9a9a9a", "#8c8c8c", "#d62728"
Point = tuple[float, float]


@dataclass(frozen=True)
class _Sheet:
    """The positions of all boxes, in units of one rank's box; y grows downwards."""

    columns: int
    """The number of hosts in a row."""
    inner: int
    """The number of ranks in a row of one host."""
    inner_rows: int
    labelled: bool

    @property
    def host_size(self) -> Point:
        """The width and height of a host's box; a labelled one has a line for its name."""
        rows = 1 + (self.inner_rows - 1) * self.row_pitch
        return self.inner + 0.3, rows + (0.95 if self.labelled else 0.3)

    @property
    def row_pitch(self) -> float:
        """The distance between rows of ranks; links run in between where ranks are labelled."""
        return 1.35 if self.labelled else 1.0

    def host_corner(self, host: int) -> Point:
        """Return the upper left corner of a host."""
        width, height = self.host_size
        gap = 0.9 if self.labelled else 0.35
        return (host % self.columns) * (width + gap), (host // self.columns) * (height + gap)

    def rank_corner(self, host: int, position: int) -> Point:
        """Return the upper left corner of the box at this position of a host."""
        x, y = self.host_corner(host)
        top = y + (0.8 if self.labelled else 0.15)
        return x + 0.15 + position % self.inner, top + position // self.inner * self.row_pitch


def save_picture(view: LayoutView, axis: str, path: Path, kind: str) -> None:
    """Draw a layout and the links along ``axis`` into an SVG or PNG file.

    Raises:
        TopologyError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        figure = draw(view, axis)
    except ImportError as error:
        raise TopologyError("pictures need matplotlib: pip install matplotlib") from error
    from matplotlib import rc_context

    try:
        # keep text as text in an SVG, and leave out the date, so that equal layouts give equal files
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_topo"}):
            figure.savefig(path, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    except OSError as error:
        raise TopologyError(f"picture {str(path)!r} cannot be written: {error}") from error


def draw(view: LayoutView, axis: str) -> Figure:
    """Return the figure that ``save_picture`` writes."""
    from matplotlib.figure import Figure

    sheet = _sheet(view.rows)
    corners = [sheet.host_corner(host) for host in (min(len(view.rows), sheet.columns) - 1, len(view.rows) - 1)]
    width, height = (max(ends) + size for ends, size in zip(zip(*corners, strict=True), sheet.host_size, strict=True))
    scale = min(0.62, 9.0 / width) if sheet.labelled else 9.0 / width
    figure = Figure(figsize=(max(3.6, width * scale) + 0.3, height * scale + 1.25), facecolor=PAPER)
    plot = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    plot.set_axis_off()
    plot.set_aspect("equal")
    margin = 1.1 / scale
    plot.set_xlim(-0.3, max(width, 3.6 / scale) + 0.3)
    plot.set_ylim(height + 0.3, -margin)
    _draw_ranks(plot, view, sheet, scale)
    drawn = _draw_links(plot, view, sheet, axis)
    _draw_title(plot, view, axis, margin, scale, drawn)
    return figure


def _sheet(rows: Sequence[tuple[str, Sequence[int]]]) -> _Sheet:
    slots = max(len(ranks) for _, ranks in rows)
    labelled = sum(len(ranks) for _, ranks in rows) <= MOST_LABELLED
    inner = slots if slots <= 4 else ceil(slots / 2) if slots <= 16 else ceil(sqrt(slots))
    inner_rows = ceil(slots / inner)
    # wider than high, as a page is
    columns = max(1, min(len(rows), round(sqrt(len(rows) * 3 * (inner_rows + 1) / (inner + 1)))))
    if columns > 4:  # stages, whose hosts are mostly a power of two, then start at the left edge
        columns = 2 ** round(log2(columns))
    return _Sheet(columns, inner, inner_rows, labelled)


def stage_colors(stages: int) -> list[tuple[float, float, float, float]]:
    """Return a colour for each stage: distinct colours for a few stages, a scale for many."""
    from matplotlib import colormaps

    if stages <= 8:
        return [colormaps["Set2"](stage) for stage in range(stages)]
    return [colormaps["viridis"](0.08 + 0.92 * stage / (stages - 1)) for stage in range(stages)]


def _draw_ranks(plot: Axes, view: LayoutView, sheet: _Sheet, scale: float) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import FancyBboxPatch

    stages, write = view.stages, partial(plot.text, color=INK, va="center")
    colors = stage_colors(max(stages) + 1)
    boxes: list[list[Point]] = []
    fills: list[tuple[float, float, float, float]] = []
    hosts: list[list[Point]] = []
    for host, (name, ranks) in enumerate(view.rows):
        x, y = sheet.host_corner(host)
        width, height = sheet.host_size
        for first, last, stage in _runs(ranks, stages, sheet):
            left, top = sheet.rank_corner(host, first)
            boxes.append(_box(left, top, last - first + 1, 1, 0.05 if sheet.labelled else 0.0))
            fills.append(colors[stage])
        if not sheet.labelled:
            hosts.append(_box(x, y, width, height))
            continue
        style = "round,pad=0,rounding_size=0.12"
        plot.add_patch(FancyBboxPatch((x, y), width, height, style, fc="#f4f4f4", ec=FRAME, lw=0.8))
        write(x + 0.2, y + 0.27, name, fontsize=72 * 0.22 * scale, zorder=5)
        for position, rank in enumerate(ranks):
            left, top = sheet.rank_corner(host, position)
            coordinate = view.coordinate(rank)
            size = 72 * scale * min(0.2, 1.45 / max(len(coordinate), 5))
            write(left + 0.5, top + 0.36, str(rank), fontsize=72 * 0.27 * scale, ha="center", zorder=6)
            write(left + 0.5, top + 0.73, coordinate, fontsize=size, ha="center", zorder=6)
    plot.add_collection(PolyCollection(hosts, facecolors="none", edgecolors=FRAME, linewidths=0.25, zorder=1))
    plot.add_collection(PolyCollection(boxes, facecolors=fills, edgecolors="none", zorder=2))


def _runs(ranks: Sequence[int], stages: Sequence[int], sheet: _Sheet) -> Iterator[tuple[int, int, int]]:
    """Yield the first position, last position and stage of boxes drawn as one; a labelled rank has its own box."""
    start = 0
    for position in range(1, len(ranks) + 1):
        ends = position == len(ranks) or position % sheet.inner == 0
        if ends or sheet.labelled or stages[ranks[position]] != stages[ranks[start]]:
            yield start, position - 1, stages[ranks[start]]
            start = position


def _draw_links(plot: Axes, view: LayoutView, sheet: _Sheet, axis: str) -> bool:
    """Draw the links of all groups, or of rank 0's group if there are many ranks; return whether all are drawn."""
    from matplotlib.collections import LineCollection

    groups = view.topology.get_axis_comm_lists(axis)
    if not sheet.labelled:
        groups = groups[:1]
    place = {rank: (host, position) for host, (_, ranks) in enumerate(view.rows) for position, rank in enumerate(ranks)}
    lines: dict[str, list[list[Point]]] = {INSIDE: [], ACROSS: []}
    for ranks in groups:
        for here, there in pairwise(ranks):
            (host, position), (other, other_position) = place[here], place[there]
            start, end = sheet.rank_corner(host, position), sheet.rank_corner(other, other_position)
            color = ACROSS if host != other and view.host_map is not None else INSIDE
            lines[color].append(_link(start, end, 0.45 if sheet.labelled else 0.0))
    for color, curves in lines.items():
        width = (1.3 if color == ACROSS else 1.0) if sheet.labelled else 0.7
        plot.add_collection(LineCollection(curves, colors=color, linewidths=width, alpha=0.75, zorder=4))
    if not sheet.labelled:
        corners = (sheet.rank_corner(*place[rank]) for rank in groups[0])
        x, y = zip(*((left + 0.5, top + 0.5) for left, top in corners), strict=True)
        plot.scatter(x, y, s=5, color=INK, linewidths=0, zorder=5)
    return sheet.labelled


def _draw_title(plot: Axes, view: LayoutView, axis: str, margin: float, scale: float, everything: bool) -> None:
    """Write the spec, the meaning of the lines and a legend of stages above the hosts."""
    from matplotlib.patches import Rectangle

    name = view.names[axis]
    lines = f"lines: {name} groups" if everything else f"lines: the {name} group of rank 0"
    if view.host_map is not None and len(view.rows) > 1:
        lines += ", red between hosts"
    title = view.spec if view.host_map is None else f"{view.spec} on {counted(len(view.rows), 'host')}"
    write = partial(plot.text, fontsize=7, color=INK, va="center")
    write(0, -margin + 0.2 / scale, title, fontsize=9, weight="bold")
    write(0, -margin + 0.42 / scale, f"each rank: {', '.join(view.axis_names)}; {lines}")
    write(0, -margin + 0.71 / scale, view.stage_axis)
    stages = max(view.stages) + 1
    colors = stage_colors(stages)
    size = 0.14 / scale
    shown = list(range(stages)) if stages <= 8 else [0, stages // 4, stages // 2, 3 * stages // 4, stages - 1]
    x = (0.09 * len(view.stage_axis) + 0.08) / scale
    for stage in shown:
        top = -margin + 0.71 / scale - size / 2
        plot.add_patch(Rectangle((x, top), size, size, fc=colors[stage], ec="none"))
        write(x + size * 1.35, top + size / 2, str(stage))
        x += size + (0.17 + 0.06 * len(str(stage))) / scale


def _box(x: float, y: float, width: float, height: float, inset: float = 0.0) -> list[Point]:
    left, top, right, bottom = x + inset, y + inset, x + width - inset, y + height - inset
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _link(start: Point, end: Point, half: float) -> list[Point]:
    """Return a bent line between two boxes, given by their upper left corners and half their height.

    Boxes in one row are joined above their upper edges, all others at their opposite edges.
    """
    (x0, y0), (x1, y1) = ((x + 0.5, y + 0.5) for x, y in (start, end))
    if abs(y1 - y0) < 0.45:
        reach = min(0.2 + 0.06 * abs(x1 - x0), 0.6)  # half of it rises above the edges, below the host's name
        return _curve((x0, y0 - half), ((x0 + x1) / 2, y0 - half - reach), (x1, y1 - half))
    down = half if y1 > y0 else -half
    y0, y1 = y0 + down, y1 - down
    across, up = 0.06 * (y1 - y0), 0.06 * (x0 - x1)
    up = max(-0.15 * abs(y1 - y0), min(up, 0.15 * abs(y1 - y0)))  # a flat link avoids the boxes that it passes
    return _curve((x0, y0), ((x0 + x1) / 2 + across, (y0 + y1) / 2 + up), (x1, y1))


def _curve(start: Point, control: Point, end: Point, steps: int = 12) -> list[Point]:
    """Return a quadratic Bezier curve."""
    weights = [((1 - t) ** 2, 2 * t * (1 - t), t * t) for t in (step / steps for step in range(steps + 1))]
    return [
        (a * start[0] + b * control[0] + c * end[0], a * start[1] + b * control[1] + c * end[1]) for a, b, c in weights
    ]
