"""Run ``ds-topo check``: find faults of a running cluster. Any launcher can start it, one process per rank."""

from __future__ import annotations

import argparse
import re
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from ds_topo.cli.shared import add_host_options, counted, host_map_of, progress_of, report, say, table_of
from ds_topo.errors import DisagreementError, LaunchError, StoreTimeoutError, TopologyError, bytes_text
from ds_topo.launch.placement import few_ranks

if TYPE_CHECKING:
    from rich.console import Console

    from ds_topo.health.faults import Summary

SUMMARY = "check hosts, groups and links of a running cluster"
DESCRIPTION = (
    "Check that versions, clocks, hosts and the topology agree, that every group gives right results, and that no "
    "link is slower than its neighbors. Start it with the launcher and the hosts of the real job."
)
EXAMPLES = """examples:
  srun -N 2 --ntasks-per-node 4 ds-topo check "pipe=2,data=-1" --json all.json
  torchrun --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr node1 \\
           -m ds_topo check "pipe=2,data=-1"
  deepspeed --hostfile hosts --module ds_topo check "pipe=2,data=-1" \\
            --hostfile hosts

exit status: 0 without faults, 1 with faults, 2 for arguments that are refused
"""
_RATE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<size>[kKmMgGtT]?)(?P<unit>bit/s|bit|bps|b/s|B/s|B)")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("spec", metavar="SPEC", help='axes, outermost first: "pipe=2,data=-1,model=2"')
    add("--json", metavar="FILE", help="write results as JSON; - for standard output")
    add("--backend", metavar="NAME", help="torch backend; default: torch's for the accelerator (GPU: nccl), else gloo")
    add("--timeout", type=float, default=60.0, metavar="S", help="seconds for each step; default: %(default)g")
    add("--seconds", type=float, default=120.0, metavar="S", help="seconds for pairs of hosts; default: %(default)g")
    slow = "share of the median below which a link is slow; default: %(default)g"
    add("--slow", type=float, default=0.5, metavar="X", help=slow)
    expect = 'expected rate of each host\'s link, "1gbit" or "25GB/s"; below 0.8 of it is slow; default: none'
    add("--expect", metavar="RATE", help=expect)
    clock = "allowed difference of clocks in seconds; default: %(default)g"
    add("--clock", type=float, default=1.0, metavar="S", help=clock)
    add_host_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the check as one rank of the job; rank 0 reports."""

    from ds_topo.base.backends import default_backend, device_served_by
    from ds_topo.health.session import Options, StepFailure, run_check
    from ds_topo.launch.joining import prepare

    expected = None if arguments.expect is None else rate(arguments.expect)
    if not 0 < arguments.slow < 1:
        raise TopologyError(f"--slow {arguments.slow}: give a share of the median, between 0 and 1")
    for name in ("timeout", "seconds", "clock"):
        if not 0 < getattr(arguments, name) < timedelta.max.total_seconds():
            raise TopologyError(f"--{name} {getattr(arguments, name)}: give seconds above 0")
    host_map = host_map_of(arguments)
    launch = prepare()
    backend = arguments.backend or default_backend()
    options = Options(
        spec=arguments.spec,
        backend=backend,
        timeout=timedelta(seconds=arguments.timeout),
        seconds=arguments.seconds,
        slow=arguments.slow,
        clock_tolerance=arguments.clock,
        expected=expected,
        expected_hosts=None if host_map is None else [host_map.host_of(rank).name for rank in range(host_map.size)],
        most_bytes=2**25 if device_served_by(backend, 0).type == "cpu" else 2**28,
    )
    with progress_of(launch.rank == 0) as progress:
        try:
            summary = run_check(launch, options, progress)
        except StepFailure:  # rank 0 reports the reason
            return 0
        except (LaunchError, StoreTimeoutError) as error:
            if launch.local_rank == 0:
                print(f"ds-topo check: {error}", file=sys.stderr)
            return 1
        except DisagreementError as error:  # all ranks raise the same
            if launch.rank == 0:
                print(f"ds-topo check: {error}", file=sys.stderr)
            return int(launch.rank == 0)
    if summary is None:  # rank 0 alone fails: launchers kill all ranks as soon as one fails
        return 0
    report(summary.as_json(), arguments.json, lambda console: print_summary(console, summary, arguments.slow))
    return 1 if summary.faults else 0


def rate(text: str) -> float:
    """Return a rate, as ``tc`` or a data sheet writes it, in bytes per second.

    >>> rate("1gbit"), rate("25 GB/s"), rate("200 Mb/s")
    (125000000.0, 25000000000.0, 25000000.0)
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise TopologyError(f'rate {text!r}: expected a number with a unit, such as "1gbit" or "25GB/s"')
    size = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[match["size"].lower()]
    return float(match["number"]) * size * (1.0 if match["unit"].startswith("B") else 1 / 8)


def print_summary(console: Console, summary: Summary, slow: float) -> None:
    """Print everything that was measured, then the faults, and what is slower than ``slow`` without being one."""
    from ds_topo.health.faults import seconds, slow_but_right, speed

    ranks, hosts = counted(summary.world_size, "rank"), counted(len(summary.hosts), "host")
    console.print(f"{summary.topology}: {ranks} on {hosts}, {summary.backend}", style="bold", highlight=False)
    console.print()
    if summary.versions:
        say(console, "versions  " + ", ".join(f"{name} {version}" for name, version in summary.versions.items()))
    if len(summary.clocks) > 1:
        spread = max(summary.clocks.values()) - min(summary.clocks.values())
        say(console, f"clocks    within {seconds(spread)} on all hosts")
    if summary.axes:
        console.print()
        columns = (">ranks", ">hosts", ">latency", ">size", ">bandwidth", ">slowest group", ">of median")
        table = table_of("group", *columns)
        for name, axis in summary.axes.items():
            fewest, most = axis.hosts
            table.add_row(
                name,
                f"{axis.ranks:,}",
                f"{fewest:,}" if fewest == most else f"{fewest:,}-{most:,}",
                seconds(axis.latency),
                bytes_text(axis.size, 1024),
                speed(axis.bandwidth),
                few_ranks(axis.slowest, 4),
                f"{axis.slowest_bandwidth / axis.bandwidth:.2f}",
            )
        console.print(table)
    if summary.inside or summary.across:
        console.print()
        table = table_of("links", ">latency", ">bandwidth", ">slowest", ">of median")
        for name, link in (
            ("inside hosts, rank to rank", summary.inside),
            ("between hosts, all ranks", summary.across),
        ):
            if link is not None:
                one, other, least = link.slowest[0]
                share = f"{least / link.bandwidth:.2f}"
                table.add_row(name, seconds(link.latency), speed(link.bandwidth), f"{one} -> {other}", share)
        console.print(table)
        played, every = summary.rounds
        if played < every:
            say(
                console, f"{played:,} of {every:,} rounds of pairs of hosts fitted into the time; --seconds gives more."
            )
    console.print()
    if summary.faults:
        console.print(f"{counted(len(summary.faults), 'fault')}:", style="bold red", highlight=False)
    for fault in summary.faults:
        say(console, f"  {fault.kind}: {fault.message}")
    remarks = slow_but_right(summary, slow)
    if not summary.faults:
        but = f" {counted(len(remarks), 'warning')}:" if remarks else ""
        console.print(f"No faults.{but}", style="bold yellow" if remarks else "bold green", highlight=False)
    for remark in remarks:
        console.print(f"  slow: {remark}", highlight=False, markup=False)
    if remarks:
        console.print("Run the check again: hosts that do other work are slow, too.", highlight=False)
