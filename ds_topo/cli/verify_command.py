"""Run ``ds-topo verify``: compare the first steps of a program in a layout with those of one process."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ds_topo.cli.shared import check_ending, counted, new_figure, progress_of, report, save_figure, say, say_rows
from ds_topo.errors import LaunchError, TopologyError
from ds_topo.launch.launchers import detect_launch
from ds_topo.topology.axes import leaves_out_a_degree

if TYPE_CHECKING:
    from matplotlib.figure import Figure
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
    add("--png", metavar="FILE", help="draw the errors of each layer, by kind")


def run(arguments: argparse.Namespace) -> int:
    """Run the program in all layouts and report."""
    topology, words = _without_topology(arguments.arguments)
    topology = topology or arguments.topology
    if topology is None:
        raise TopologyError('--topology is missing: give the layout to verify, such as --topology "pipe=2,data=2"')
    if leaves_out_a_degree(topology):
        raise TopologyError(f"--topology {topology!r}: give all degrees, none is computed")
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
        save_figure(draw_errors(found), arguments.png, dpi=120)
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
        say(console, "Equal, as far as rounding allows.", "bold green")
    if found.undecided:
        say(console, "Undecided:", "bold yellow")
        for why in found.undecided:
            say(console, f"  {why}")
    if found.findings:
        first = found.findings[0]
        say(console, "The first difference:", "bold red")
        say(console, f"  {first}")
        if first.axis is not None:
            say(console, f"  it follows the axis {first.axis!r}")
        for number, cause in enumerate(first.causes):
            say(console, f"  {'likely cause' if not number else 'or'}: {cause}")
    if len(found.findings) > 1:
        console.print()
        rows = [["step", "what", "error", "allowed", "where", "tensor"]]
        for one in found.findings[:_SHOWN]:
            step = "start" if one.step < 0 else str(one.step + 1)
            rows.append([step, one.kind, f"{one.error:.2g}", f"{one.allowed:.1g}", one.where, one.name])
        say_rows(console, rows, right={2, 3})
        if len(found.findings) > _SHOWN:
            say(console, f"and {len(found.findings) - _SHOWN:,} further ones")
    for note in found.notes:
        say(console, f"note: {note}")


def draw_errors(found: Report) -> Figure:
    """Draw the errors of the last step that was compared as a matrix of layers and kinds of values.

    A cell has the largest error of the layer's tensors on any rank, relative to what rounding allows. The first
    difference has a frame.
    """
    rows = [row for row in found.errors if row.step == found.errors[-1].step]
    layer_of = _module_of
    if len({layer_of(row.kind, row.name) for row in rows}) > _MOST_LAYERS:
        layer_of = _block_of
    layers = {layer: y for y, layer in enumerate(dict.fromkeys(layer_of(row.kind, row.name) for row in rows))}
    kinds = {kind: x for x, kind in enumerate(dict.fromkeys(row.kind for row in rows))}
    values = [[math.nan] * len(kinds) for _ in layers]
    for row in rows:
        y, x = layers[layer_of(row.kind, row.name)], kinds[row.kind]
        ratio = max((one / row.allowed for one in row.errors if not math.isnan(one)), default=math.nan)
        values[y][x] = ratio if math.isnan(values[y][x]) else max(values[y][x], ratio)
    first = found.findings[0] if found.findings else None
    figure = new_figure(figsize=(6 + 0.5 * len(kinds), 2.5 + 0.17 * len(layers)), layout="constrained")
    figure.suptitle(f"{found.topology} against {found.reference}", fontsize=9)
    axes = figure.add_subplot()
    axes.set_title("equal" if first is None else f"first difference: {str(first).partition(':')[0]}", fontsize=8)
    if rows:
        from matplotlib.colors import TwoSlopeNorm
        from matplotlib.patches import Patch, Rectangle

        powers = [[math.log10(min(max(ratio, 1e-3), 1e6)) for ratio in line] for line in values]
        image = axes.imshow(powers, aspect="auto", cmap="RdBu_r", norm=TwoSlopeNorm(0, -3, 6), interpolation="nearest")
        axes.set_facecolor("lightgray")  # such a layer has no tensor of this kind
        axes.set_yticks(range(len(layers)), list(layers), fontsize=6)
        axes.set_xticks(range(len(kinds)), list(kinds), fontsize=7, rotation=30, ha="right")
        figure.colorbar(image).set_label(f"error / allowed in step {rows[0].step + 1}, powers of 10", fontsize=7)
        legend = [
            Patch(color="#b2182b", label="a difference"),
            Patch(color="#2166ac", label="within what rounding allows"),
            Patch(color="lightgray", label="no such tensor"),
        ]
        if first is not None and first.step == rows[0].step and first.kind in kinds:
            corner = kinds[first.kind] - 0.5, layers[layer_of(first.kind, first.name)] - 0.5
            frame: dict[str, Any] = {"fill": False, "edgecolor": "black", "linewidth": 2}
            axes.add_patch(Rectangle(corner, 1, 1, clip_on=False, **frame))
            legend.append(Patch(label="the first difference", **frame))
        figure.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return figure


_MOST_LAYERS = 64
"""The most modules that have a row of their own; of larger models each block has one."""


def _module_of(kind: str, name: str) -> str:
    """Return the module of a tensor; an output has the module's name already.

    >>> _module_of("gradient", "h.3.attention.qkv.weight"), _module_of("output", "h.3.mlp"), _module_of("loss", "")
    ('h.3.attention.qkv', 'h.3.mlp', 'whole model')
    """
    return (name if kind == "output" else name.rpartition(".")[0]) or "whole model"


def _block_of(kind: str, name: str) -> str:
    """Return the block of a tensor: its path up to the first number, or the first name.

    >>> _block_of("gradient", "h.3.attention.qkv.weight"), _block_of("output", "head.norm")
    ('h.3', 'head')
    """
    parts = _module_of(kind, name).split(".")
    return ".".join(parts[: next((index for index, part in enumerate(parts) if part.isdecimal()), 0) + 1])
