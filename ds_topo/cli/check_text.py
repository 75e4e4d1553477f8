"""What a check found, as text."""

from __future__ import annotations

from rich.console import Console

from ds_topo.check.faults import seconds, speed
from ds_topo.check.summary import LinkSummary, Summary
from ds_topo.cli.layout_text import say, table_of
from ds_topo.cli.layout_view import counted
from ds_topo.placement.summary import few_ranks


def print_summary(console: Console, summary: Summary) -> None:
    """Everything that was measured, then the faults."""
    ranks, hosts = counted(summary.world_size, "rank"), counted(len(summary.hosts), "host")
    console.print(f"{summary.topology}: {ranks} on {hosts}, {summary.backend}", style="bold", highlight=False)
    console.print()
    if summary.versions:
        say(console, "versions  " + ", ".join(f"{name} {version}" for name, version in summary.versions.items()))
    if summary.clocks:
        spread = max(summary.clocks.values()) - min(summary.clocks.values())
        say(console, f"clocks    within {seconds(spread)} on all hosts")
    if summary.axes:
        _print_axes(console, summary)
    if summary.inside or summary.across:
        _print_links(console, summary)
    console.print()
    if not summary.faults:
        console.print("No faults.", style="bold green", highlight=False)
        return
    console.print(f"{counted(len(summary.faults), 'fault')}:", style="bold red", highlight=False)
    for fault in summary.faults:
        say(console, f"  {fault.kind}: {fault.message}")


def _print_axes(console: Console, summary: Summary) -> None:
    console.print()
    table = table_of("group", right=("ranks", "hosts", "latency", "bandwidth", "slowest group"))
    for name, axis in summary.axes.items():
        fewest, most = axis.hosts
        table.add_row(
            name,
            f"{axis.ranks:,}",
            f"{fewest:,}" if fewest == most else f"{fewest:,}-{most:,}",
            seconds(axis.latency),
            speed(axis.bandwidth),
            f"{few_ranks(axis.slowest, 4)} {axis.slowest_bandwidth / axis.bandwidth:.2f}",
        )
    console.print(table)


def _print_links(console: Console, summary: Summary) -> None:
    console.print()
    table = table_of("links", right=("latency", "bandwidth", "slowest"))
    if summary.inside is not None:
        table.add_row("inside hosts, rank to rank", *_link_cells(summary.inside))
    if summary.across is not None:
        table.add_row("between hosts, all ranks", *_link_cells(summary.across))
    console.print(table)
    played, every = summary.rounds
    if played < every:
        say(console, f"{played:,} of {every:,} rounds of pairs of hosts fitted into the time; --seconds gives more.")


def _link_cells(link: LinkSummary) -> list[str]:
    one, other, rate = link.slowest[0]
    return [seconds(link.latency), speed(link.bandwidth), f"{one} -> {other} {rate / link.bandwidth:.2f}"]
