"""Run ``ds-topo verify``: compare the first steps of a program in a layout with those of one process."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ds_topo.cli.shared import (
    cells,
    check_ending,
    counted,
    new_figure,
    progress_of,
    report,
    save_figure,
    say,
    table_of,
)
from ds_topo.errors import LaunchError, TopologyError
from ds_topo.launch.launchers import detect_launch
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import check_meanings, leaves_out_a_degree

if TYPE_CHECKING:
    from rich.console import Console

    from ds_topo.verification.comparison import Report

SUMMARY = "check that a layout trains the same model as one process"
DESCRIPTION = (
    "Run the first steps of a program in a layout, and again in a reference without tensor, pipeline and sequence "
    "parallelism, on this machine. Compare outputs of modules, losses, gradients, their norm, weights and optimizer "
    "states, and report the first difference in the order of computation, with likely causes."
)
EXAMPLES = """examples:
  ds-topo verify train.py --batch-size 16 --topology "pipe=2,data=2,model=2"
  ds-topo verify --topology "data=2,model=2" --steps 3 --png errors.png train.py

Words after PROGRAM are its own arguments, except --topology SPEC. Under a
launcher, rank 0 starts all ranks on its own host, and the other ranks end.

exit status: 0 equal, 1 different, 2 undecided, or arguments that are refused
"""
_SHOWN = 10
"""The number of differences in the table."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("program", metavar="PROGRAM", help="Python file that trains an engine of DeepSpeed")
    add("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="its arguments")
    add("--topology", metavar="SPEC", help='layout to verify: "pipe=2,data=2,model=2"')
    add("--steps", type=int, default=2, metavar="N", help="optimizer steps to compare; default: %(default)d")
    add("--no-dropout", action="store_true", help="disable dropout in all runs")
    add("--same-samples", action="store_true", help="allow replicas to train on the same samples")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for each run; default: %(default)g")
    add("--keep", metavar="FOLDER", help="keep the recordings in this folder; default: delete them")
    add("--json", metavar="FILE", help="write results as JSON; - for standard output")
    add("--png", metavar="FILE", help="draw the error of each tensor on each rank")


def run(arguments: argparse.Namespace) -> int:
    """Run the program in all layouts and report."""
    topology, words = _without_topology(arguments.arguments)
    topology = topology or arguments.topology
    if topology is None:
        raise TopologyError('--topology is missing: give the layout to verify, such as --topology "pipe=2,data=2"')
    if leaves_out_a_degree(topology):
        raise TopologyError(f"--topology {topology!r}: give all degrees, none is computed")
    layout = ProcessTopology.from_spec(topology)
    check_meanings(layout.axes, layout.extra_axes)
    check_ending("--png", arguments.png, (".png",))
    if not 0 < arguments.timeout < math.inf:
        raise TopologyError(f"--timeout {arguments.timeout}: give seconds above 0")

    with suppress(LaunchError):  # without a launcher
        if detect_launch().rank:
            return 0  # rank 0 starts all ranks on its own host
    from ds_topo.verification.runs import verify_program

    # the exception ends the ranks, and deletes their files
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with progress_of(shown=True, command="verify") as progress:
            found = verify_program(
                arguments.program,
                *words,
                topology=topology,
                steps=arguments.steps,
                has_dropout=not arguments.no_dropout,
                same_samples=arguments.same_samples,
                timeout=arguments.timeout,
                keep=arguments.keep,
                progress=progress,
            )
    finally:
        signal.signal(signal.SIGTERM, former)
    report(found.as_json(), arguments.json, lambda console: print_report(console, found))
    if arguments.png is not None:
        save_errors(found, Path(arguments.png))
    return found.status


def _without_topology(words: list[str]) -> tuple[str | None, list[str]]:
    """Take ``--topology SPEC`` out of a program's arguments.

    >>> _without_topology(["--size", "2", "--topology=data=2", "-v"])
    ('data=2', ['--size', '2', '-v'])
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--topology")
    known, others = parser.parse_known_args(words)
    return known.topology, others


def print_report(console: Console, found: Report) -> None:
    """Print the verdict, the first difference with its causes, a table of further ones, and what is not compared."""
    steps, tensors = counted(found.steps, "step"), counted(found.compared, "tensor")
    say(console, f"{found.topology} against {found.reference}: {steps}, {tensors}")
    if found.status == 0:
        console.print("Equal, as far as rounding allows.", style="bold green", highlight=False)
    if found.undecided:
        console.print("Undecided:", style="bold yellow", highlight=False)
        for why in found.undecided:
            say(console, f"  {why}")
    if found.findings:
        first = found.findings[0]
        console.print("The first difference:", style="bold red", highlight=False)
        say(console, f"  {first}")
        if first.axis is not None:
            say(console, f"  it follows the axis {first.axis!r}")
        for number, cause in enumerate(first.causes):
            say(console, f"  {'likely cause' if not number else 'or'}: {cause}")
    if len(found.findings) > 1:
        console.print()
        table = table_of("step", "what", "tensor", "where", ">error", ">allowed")
        for one in found.findings[:_SHOWN]:
            table.add_row(
                *cells("start" if one.step < 0 else str(one.step + 1), one.kind, one.name, one.where),
                f"{one.error:.2g}",
                f"{one.allowed:.1g}",
            )
        console.print(table)
        if len(found.findings) > _SHOWN:
            say(console, f"and {len(found.findings) - _SHOWN:,} further ones")
    for note in found.notes:
        say(console, f"note: {note}")


def save_errors(found: Report, path: Path) -> None:
    """Draw the errors of the last step that was compared, relative to what rounding allows, by tensor and rank.

    Raises:
        TopologyError: matplotlib is not installed, or the file cannot be written.
    """
    rows = [row for row in found.errors if row.step == found.errors[-1].step]
    values = [[math.log10(min(max(one / row.allowed, 1e-3), 1e6)) for one in row.errors] for row in rows]
    figure = new_figure(figsize=(4 + 0.25 * found.ranks, 1.5 + 0.16 * len(rows)), layout="constrained")
    axes = figure.add_subplot(xlabel="rank", title=f"{found.topology}, step {rows[0].step + 1}" if rows else "equal")
    if rows:
        from matplotlib.colors import TwoSlopeNorm

        image = axes.imshow(values, aspect="auto", cmap="RdBu_r", norm=TwoSlopeNorm(0, -3, 6), interpolation="nearest")
        axes.set_yticks(range(len(rows)), [f"{row.kind} {row.name}" for row in rows], fontsize=6)
        axes.set_xticks(range(found.ranks))
        figure.colorbar(image, label="error / allowed, powers of 10")
    save_figure(figure, path, dpi=120)
