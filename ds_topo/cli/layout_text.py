"""Layouts as text: tables for a terminal of any width, with and without colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_topo.cli.layout_view import LayoutView, counted
from ds_topo.placement.placement import AxisSpan
from ds_topo.placement.summary import (
    HostRun,
    few_ranks,
    fold_numbers,
    host_patterns,
    host_runs,
    moves,
    named_coordinate,
)
from ds_topo.topology.rank_tables import RankGroup, created_groups, grid_groups, neighbor

MOST_ROWS = 32
"""Hosts that are shown one by one; more are summarised."""
MOST_RANKS = 128
"""Ranks that are shown one by one."""
MOST_GROUPS = 128
"""Groups that are listed one by one."""
STAGE_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")
"""Colours of stages, in turn; names, so that the terminal's own theme decides."""


def is_large(view: LayoutView) -> bool:
    """Whether ranks are too many to be shown one by one."""
    return view.topology.world_size() > MOST_RANKS or len(view.rows) > MOST_ROWS


def print_layout(console: Console, view: LayoutView) -> None:
    """Hosts x slots with every rank's coordinate; runs of hosts where there are many."""
    console.print(_title(view), style="bold", highlight=False)
    console.print()
    if is_large(view):
        _print_runs(console, view)
    else:
        _print_ranks(console, view)
    console.print()


def print_axes(console: Console, view: LayoutView) -> None:
    """One line for each kind of group: how many, how large, and what of them crosses hosts."""
    crossing = () if view.host_map is None else ("hosts", "pairs across hosts", "ring links across")
    table = table_of("group", right=("groups", "ranks", *crossing))
    placement = view.placement
    for axes, name in view.group_names():
        groups = len(view.topology.get_axis_comm_lists(axes))
        cells = [name, f"{groups:,}", f"{view.topology.world_size() // groups:,}"]
        if placement is not None:
            span = placement.span(axes)
            cells += [_range(span), _share(span.crossing_pairs, span.pairs), _share(span.crossing_links, span.links)]
        table.add_row(*cells)
    console.print(table)
    console.print()
    own = len(created_groups(view.topology, 0))
    say(console, f"Each rank creates {counted(own, 'process group')} besides the world's.")
    if view.host_map is None:
        say(console, "Give --hostfile FILE, --hosts N --slots M or --slurm to see what crosses hosts.")


def print_groups(console: Console, view: LayoutView) -> None:
    """Every group's ranks, kind by kind; the first and the last of each kind where there are many."""
    console.print()
    kinds = [(axes, name, view.topology.get_axis_comm_lists(axes)) for axes, name in view.group_names()]
    all_of_them = sum(len(groups) for _, _, groups in kinds) <= MOST_GROUPS
    for axes, name, groups in kinds:
        if all_of_them or len(groups) <= 3:
            for ranks in groups:
                say(console, _group_line(view, name, ranks))
            continue
        say(console, _group_line(view, name, groups[0]))
        say(console, _group_line(view, name, groups[1]))
        say(console, f"  ... {len(groups) - 3:,} more over {view.label(axes)}")
        say(console, _group_line(view, name, groups[-1]))


def print_rank(console: Console, view: LayoutView, rank: int) -> None:
    """One rank: its coordinate, its host, its groups, its neighbors."""
    topology, placement = view.topology, view.placement
    where = (
        "" if view.host_map is None else f" on {view.host_map.host_of(rank).name}, slot {view.host_map.slot_of(rank)}"
    )
    console.print(f"rank {rank}: {view.named_coordinate(rank)}{where}", style="bold", highlight=False)
    console.print()
    table = table_of("group", "ranks", right=("group rank",)) if placement is None else None
    table = table or table_of("group", "ranks", "hosts", right=("group rank",))
    names = dict(view.group_names())
    for group in grid_groups(topology, rank):
        if group.axes not in names:
            continue
        cells = [names[group.axes], few_ranks(group.ranks, 8)]
        if placement is not None:
            cells.append(few_names(placement.hosts_of(group.ranks)))
        table.add_row(*cells, str(group.ranks.index(rank)))
    console.print(table)
    console.print()
    for axis, size in zip(topology.axes, topology.dims, strict=True):
        if size > 1:
            before, after = (neighbor(topology, axis, rank, step) for step in (-1, 1))
            say(console, f"along {view.names[axis]}: previous rank {before}, next rank {after}")
    say(console, _communicators(view, created_groups(topology, rank)))


def print_moves(console: Console, before: LayoutView, after: LayoutView) -> None:
    """Two layouts of the same ranks: their axes side by side, and which ranks change their coordinate."""
    console.print(f"{before.spec}  ->  {after.spec}", style="bold", highlight=False)
    console.print()
    _print_axes_side_by_side(console, before, after)
    console.print()
    _print_changes(console, before, after)


# -- parts -----------------------------------------------------------------------------------------------------------


def _title(view: LayoutView) -> str:
    ranks = counted(view.topology.world_size(), "rank")
    if view.host_map is None:
        return f"{view.spec}: {ranks}"
    counts = sorted(set(view.host_map.hosts.counts))
    slots = counted(counts[0], "slot") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} slots"
    return f"{view.spec}: {ranks} on {counted(len(view.host_map.hosts), 'host')} ({slots} each)"


def _print_ranks(console: Console, view: LayoutView) -> None:
    rows, stages = view.rows, view.stages
    label = "host" if view.host_map is not None else "ranks"
    widest_row = max(len(ranks) for _, ranks in rows)
    name_width = max(len(label), *(len(name) for name, _ in rows))
    longest = max(range(view.topology.world_size()), key=lambda rank: len(view.coordinate(rank)))
    rank_width = len(str(view.topology.world_size() - 1))
    cell = rank_width + 1 + len(view.coordinate(longest))
    fitting = max(1, (console.width - name_width) // (cell + 2))
    per_line = ceil(widest_row / ceil(widest_row / fitting))
    headed = max(cell, len(f"slot {widest_row - 1}"))
    with_slots = view.host_map is not None and name_width + widest_row * (headed + 2) <= console.width
    table = table_of(label, *(f"slot {slot}" if with_slots else "" for slot in range(per_line)))
    for name, ranks in rows:
        for first in range(0, len(ranks), per_line):
            cells = [
                Text(f"{rank:{rank_width}d} {view.coordinate(rank)}", style=_stage_style(stages[rank]))
                for rank in ranks[first : first + per_line]
            ]
            table.add_row(name if first == 0 else "", *cells)
    console.print(table)
    axes = ",".join(view.axis_names)
    in_colour = console.color_system is not None and not console.no_color
    say(console, f"Each rank with its {axes}{f'; a colour for each {view.stage_axis}' if in_colour else ''}.")


def _print_runs(console: Console, view: LayoutView) -> None:
    names, ranks = zip(*view.rows, strict=True)
    runs = host_runs(view.topology, names, ranks)
    known = view.host_map is not None
    outermost = next(
        (n for n, size in zip(view.axis_names, view.topology.dims, strict=True) if size > 1), view.axis_names[0]
    )
    table = table_of("hosts" if known else "rows", *view.axis_names, right=(*(["number"] if known else []), "ranks"))
    for index, run in _first_and_last(runs):
        if run is None:
            table.add_row(f"... {index:,} more", *("" for _ in table.columns[1:]))
            continue
        number = [f"{run.count:,}"] if known else []
        first, last = run.ranks
        style = _stage_style(index)
        table.add_row(
            Text(_shorten(run.hosts, 24), style=style),
            *(_shorten(text, 16) for text in run.indices),
            *number,
            f"{first}-{last}",
        )
    console.print(table)
    say(
        console,
        f"Each line: neighboring {'hosts' if known else 'rows of ranks'} with one index of {outermost}.",
    )
    if known:
        for count, pattern in host_patterns(view.topology, ranks)[:4]:
            held = ", ".join(
                f"{number} of {size} {name}"
                for number, size, name in zip(pattern, view.topology.dims, view.axis_names, strict=True)
            )
            say(console, f"{counted(count, 'host')} hold{'s' if count == 1 else ''}, each: {held}.")


def _first_and_last(runs: Sequence[HostRun]) -> Iterator[tuple[int, HostRun | None]]:
    """Number and run; number of those left out and None in between."""
    if len(runs) <= MOST_ROWS:
        yield from enumerate(runs)
        return
    yield from enumerate(runs[:4])
    yield len(runs) - 6, None
    yield from enumerate(runs[-2:], start=len(runs) - 2)


def _print_axes_side_by_side(console: Console, before: LayoutView, after: LayoutView) -> None:
    known = before.host_map is not None
    columns = ("ranks", "hosts", "pairs across hosts") if known else ("ranks",)
    table = table_of("group", right=columns)
    spans = [{name: axes for axes, name in view.group_names()} for view in (before, after)]
    for name in dict.fromkeys([*spans[0], *spans[1]]):
        cells = []
        for view, axes_of in zip((before, after), spans, strict=True):
            axes = axes_of.get(name)
            if axes is None:
                cells.append(["-"] * len(columns))
                continue
            placement = view.placement
            ranks = str(len(view.topology.get_axis_comm_lists(axes)[0]))
            span = None if placement is None else placement.span(axes)
            cells.append([ranks] if span is None else [ranks, _range(span), _share(span.crossing_pairs, span.pairs)])
        table.add_row(name, *(old if old == new else f"{old} -> {new}" for old, new in zip(*cells, strict=True)))
    console.print(table)


def _print_changes(console: Console, before: LayoutView, after: LayoutView) -> None:
    world = before.topology.world_size()
    if before.placement is not None and after.placement is not None:
        change = moves(before.placement, after.placement)
        changed = change.ranks
        shards = change.shards_to_other_hosts
    else:
        changed = tuple(
            rank
            for rank in range(world)
            if named_coordinate(before.topology, rank) != named_coordinate(after.topology, rank)
        )
        shards = None
    if not changed:
        say(console, f"Nothing moves: all {world:,} ranks keep their coordinates.")
        return
    kept = world - len(changed)
    say(console, f"{len(changed):,} of {world:,} ranks change their coordinate, {kept:,} keep it.")
    if shards is not None:
        say(console, f"{shards:,} of {world:,} coordinates, and the shards stored there, move to another host.")
    if world > MOST_RANKS:
        say(console, f"Ranks that change: {_shorten(fold_numbers(changed), 120)}")
        return
    console.print()
    table = table_of("rank", *(["host"] if before.host_map is not None else []), before.spec, after.spec)
    for rank in changed:
        host = [before.host_map.host_of(rank).name] if before.host_map is not None else []
        old = Text(before.coordinate(rank), style=_stage_style(before.stages[rank]))
        table.add_row(str(rank), *host, old, Text(after.coordinate(rank), style=_stage_style(after.stages[rank])))
    console.print(table)


def _group_line(view: LayoutView, name: str, ranks: Sequence[int]) -> str:
    line = f"group {name}, ranks: {few_ranks(ranks)}"
    placement = view.placement
    if placement is None:
        return line
    hosts = placement.hosts_of(ranks)
    return line if len(hosts) == 1 else f"{line}  across {few_names(hosts)}"


def _communicators(view: LayoutView, groups: Sequence[RankGroup]) -> str:
    """What this rank creates: each distinct set of ranks once, the world's own group not again."""
    listed = f": {', '.join(view.label(group.axes) for group in groups)}" if groups else ""
    return f"It creates {counted(len(groups), 'process group')} besides the world's{listed}."


def table_of(*left: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def _stage_style(stage: int) -> str:
    return STAGE_COLORS[stage % len(STAGE_COLORS)]


def _range(span: AxisSpan) -> str:
    fewest, most = span.hosts_per_group
    return f"{most:,}" if fewest == most else f"{fewest:,}-{most:,}"


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}" if part else "none"


def few_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:2])}, ..., {names[-1]} ({len(names):,} hosts)"


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
