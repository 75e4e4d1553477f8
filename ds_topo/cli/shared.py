"""Read the options, and write the tables and sentences, that several commands share."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_topo.errors import HostError, TopologyError, printable, tell
from ds_topo.launch.hosts import HostMap, Hosts, expand_node_list, read_hostfile, slurm_map
from ds_topo.launch.launchers import in_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)")
"""Matches numbers, which are not names of hosts."""
UNBOUNDED = 1 << 16
"""More characters than a line has."""
_FILTERS = ("include", "exclude", "num_nodes", "num_gpus")


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add options for a hostfile, a number of hosts, a node list or Slurm, and filters of hosts."""
    title = "hosts (ranks are numbered host by host, one in each slot)"
    add = parser.add_argument_group(title).add_argument
    add("--hostfile", "-H", metavar="FILE", help='deepspeed hostfile with lines "NAME slots=N"')
    add("--hosts", metavar="N|NAMES", help='number of hosts, or names such as "n[01-16],gpu-a"')
    add("--slots", metavar="M", type=int, help="ranks on each host, with --hosts")
    add("--slurm", action="store_true", default=None, help="use the hosts of the Slurm job or step")
    add("--include", "-i", metavar="FILTER", help='use only these, "NAME[:SLOT,SLOT]@NAME..."; default: all')
    add("--exclude", "-e", metavar="FILTER", help="use all but these; default: all")
    add("--num-nodes", "--num_nodes", metavar="N", type=int, help="use only the first N hosts; default: all")
    slots = "use only the first N slots of each host; default: all"
    add("--num-gpus", "--num_gpus", metavar="N", type=int, help=slots)


def check_ending(option: str, path: str | Path | None, endings: Iterable[str]) -> None:
    """Refuse a file whose name does not end as its content."""
    if path is not None and Path(path).suffix.lower() not in endings:
        raise TopologyError(f"{option} {str(path)!r}: give a file name that ends in {' or '.join(endings)}")


def option_of(name: str) -> str:
    """Return the spelling of an option on the command line.

    >>> option_of("micro_batch")
    '--micro-batch'
    """
    return "--" + name.replace("_", "-")


def given_options(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Return those of the named options that were given, as they are written; one that is None was not."""
    return [option_of(name) for name in names if getattr(arguments, name) is not None]


def refuse_without_effect(given: list[str], reason: str) -> None:
    """Refuse options that would be ignored."""
    if given:
        raise TopologyError(f"{given[0]} has no effect: {reason}")


def refuse_both(given: list[str], what: str, error: type[TopologyError] = TopologyError) -> None:
    """Refuse two options, or sources of facts, that both do one thing."""
    if len(given) > 1:
        raise error(f"{given[0]} and {given[1]} both {what}: give one of them")


def host_map_of(arguments: argparse.Namespace) -> HostMap | None:
    """Return the host of every rank according to the options, or None if no hosts are given."""
    given = given_options(arguments, "hostfile", "hosts", "slurm")
    filters = given_options(arguments, *_FILTERS)
    refuse_both(given, "say which hosts there are", HostError)
    if not given:
        extra = filters + given_options(arguments, "slots")
        if extra:
            raise HostError(f"{extra[0]} needs hosts: give --hostfile FILE, --hosts N --slots M, or --slurm")
        return None
    if arguments.slots is not None and arguments.hosts is None:
        raise HostError(f"--slots goes with --hosts only: {given[0]} gives the number of slots itself")
    if arguments.slurm:
        if filters:
            raise HostError(f"{filters[0]} does not go with --slurm: choose nodes with srun's own options")
        host_map = slurm_map(os.environ, of_step=in_step(os.environ))
    else:
        host_map = HostMap.block(_filtered(_named_hosts(arguments), arguments))
    return host_map


def _named_hosts(arguments: argparse.Namespace) -> Hosts:
    if arguments.hostfile is not None:
        return read_hostfile(arguments.hostfile)
    if arguments.slots is None:
        raise HostError(f"--hosts {arguments.hosts} needs --slots M, the number of ranks on each host")
    if arguments.hosts.isdecimal():
        return Hosts.uniform(int(arguments.hosts), arguments.slots)
    if _NUMBER.fullmatch(arguments.hosts.strip()):
        raise HostError(f"--hosts {arguments.hosts}: give a whole number from 1 on, or names of hosts")
    return Hosts.named(expand_node_list(arguments.hosts), arguments.slots)


def _filtered(hosts: Hosts, arguments: argparse.Namespace) -> Hosts:
    by_name = given_options(arguments, "include", "exclude")
    by_number = given_options(arguments, "num_nodes", "num_gpus")
    refuse_both(by_name, "filter hosts", HostError)
    if by_name and by_number:
        raise HostError("--num-nodes and --num-gpus do not go with --include or --exclude: give one kind of filter")
    if arguments.include is not None:
        return hosts.including(arguments.include)
    if arguments.exclude is not None:
        return hosts.excluding(arguments.exclude)
    return hosts.first(arguments.num_nodes, arguments.num_gpus) if by_number else hosts


# -- output to a terminal ----------------------------------------------------------------------------------------------


def new_console() -> Console:
    """Return a console for standard output: as wide as the terminal, or as COLUMNS says.

    In a pipe or a file without COLUMNS, no line is broken. With NO_COLOR nothing is styled, not even in bold.
    """
    from rich.console import Console

    console = Console(highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()):
        console.width = UNBOUNDED
    return console


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "host"), counted(2048, "host")
    ('1 host', '2,048 hosts')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line as it is, without breaking it; names in it cannot control the terminal."""
    console.print(printable(text), style=style, highlight=False, markup=False, soft_wrap=True)


def say_rows(console: Console, rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print a header and rows, aligned, without breaking a cell."""
    for number, line in enumerate(aligned([[printable(text) for text in row] for row in rows], right)):
        say(console, line, None if number else "bold")


def table_of(*columns: str) -> Table:
    """Return an empty table. The names of columns that are aligned to the right begin with ``>``."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        is_right = name.startswith(">")
        table.add_column(name.removeprefix(">"), justify="right" if is_right else "left", overflow="fold")
    return table


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return a line for each row, in columns that are two spaces apart; those in ``right`` are aligned to the right.

    Put names that may be long into the last column: a terminal breaks them without spaces in between.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def write_file(option: str, path: str, text: str) -> None:
    """Write a line or more of text into the file that an option names."""
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"{option} {path!r} cannot be written: {error}") from error


def report(results: dict[str, Any], path: str | None, show: Callable[[Console], None]) -> None:
    """Show results, and write them as JSON into the file of ``--json`` if given; ``-`` prints the JSON instead."""
    if path == "-":
        print(json.dumps(results))
        return
    show(new_console())
    if path is not None:
        write_file("--json", path, json.dumps(results))


def new_figure(**options: Any) -> Figure:
    """Return an empty figure of matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TopologyError("pictures need matplotlib: pip install matplotlib") from error
    return Figure(**options)


def save_figure(figure: Figure, path: str | Path, **options: Any) -> None:
    """Write a figure into a file, and print its path to standard error."""
    try:
        figure.savefig(path, **options)
    except (OSError, ValueError) as error:
        raise TopologyError(f"picture {str(path)!r} cannot be written: {error}") from error
    print(f"picture: {path}", file=sys.stderr)


@contextmanager
def progress_of(shown: bool, command: str = "check") -> Iterator[Callable[[str, int, int], None]]:
    """Yield ``progress(step, done, of)``: a bar in a terminal, else a line per step; nothing if not ``shown``."""
    current = ""

    def write_step(step: str, done: int, of: int) -> None:
        nonlocal current
        if shown and step != current:
            current = step
            tell(f"ds-topo {command}: {step}")

    if not shown or not sys.stderr.isatty():
        yield write_step
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda step, done, of: bar.update(task, description=step, completed=done, total=of or None)
