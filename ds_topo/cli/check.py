"""``ds-topo check``: run by any launcher on the real cluster, it finds what would cost a day later."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_topo.cli.host_options import add_host_options, host_map_of
from ds_topo.errors import DisagreementError, LaunchError, TopologyError

if TYPE_CHECKING:
    from ds_topo.check.session import Options
    from ds_topo.check.summary import Summary
    from ds_topo.launch.launchers import Launch

_EXAMPLES = """examples:
  srun -N 2 --ntasks-per-node 4 ds-topo check "pipe=2,data=-1" --json links.json
  torchrun --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr node1 -m ds_topo check "pipe=2,data=-1"
  deepspeed --hostfile hosts --module ds_topo check "pipe=2,data=-1" --hostfile hosts

exit status: 0 if all is well, 1 if something is wrong, 2 for arguments that cannot be used
"""
_RATE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<size>[kKmMgGtT]?)(?P<unit>bit/s|bit|bps|b/s|B/s|B)")


def add_parser(subparsers: Any) -> None:
    """The options of the command."""
    parser = subparsers.add_parser(
        "check",
        help="check hosts, groups and links of a running cluster",
        description="Check that versions, clocks, hosts and the topology agree, that every group gives right results, "
        "and that no link is slower than its neighbors. Start it with the launcher and the hosts of the real job.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spec", metavar="SPEC", help='axes, outermost first: "pipe=2,data=-1,model=2"')
    parser.add_argument(
        "--json", metavar="FILE", help="what was found and measured, for programs; - for standard output"
    )
    parser.add_argument("--backend", help="of torch; nccl where there is a GPU, else gloo")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds for each step (60)")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="for the pairs of hosts (120)")
    parser.add_argument("--slow", type=float, default=0.5, metavar="X", help="share of the median that is slow (0.5)")
    parser.add_argument(
        "--expect", metavar="RATE", help='of each host\'s link, "1gbit" or "25GB/s"; less than 0.8 is slow'
    )
    parser.add_argument("--clock", type=float, default=1.0, metavar="S", help="seconds that clocks may differ by (1)")
    add_host_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, as one rank of the job; rank 0 reports."""
    from ds_topo.launch.joining import prepare

    try:
        expected = None if arguments.expect is None else rate(arguments.expect)
        host_map = host_map_of(arguments)
        launch = prepare()
    except LaunchError as error:
        print(f"ds-topo check: {error}", file=sys.stderr)
        return 2
    if not 0 < arguments.slow < 1:
        raise TopologyError(f"--slow {arguments.slow}: give a share between 0 and 1")
    if min(arguments.timeout, arguments.seconds, arguments.clock) <= 0:
        raise TopologyError("--timeout, --seconds and --clock are seconds above 0")

    from ds_topo.check.meeting import StepFailure
    from ds_topo.check.session import run_check
    from ds_topo.cli.progress import progress_of

    hosts = None if host_map is None else [host_map.host_of(rank).name for rank in range(host_map.size)]
    options = _options(arguments, expected, hosts)
    with progress_of(launch.rank == 0) as progress:
        try:
            summary = run_check(launch, options, progress)
        except StepFailure:  # rank 0 says why
            return 0
        except DisagreementError as error:
            return _said_by_rank_0(launch, error)
        except LaunchError as error:
            if launch.local_rank == 0:
                print(f"ds-topo check: {error}", file=sys.stderr)
            return 1
    # Rank 0 alone reports, and fails: launchers kill the others, and it, when the first rank fails.
    return 0 if summary is None else _report(summary, arguments)


def _said_by_rank_0(launch: Launch, error: DisagreementError) -> int:
    if launch.rank:
        return 0
    print(f"ds-topo check: {error}", file=sys.stderr)
    return 1


def rate(text: str) -> float:
    """Bytes per second of a rate as ``tc`` or a data sheet writes it.

    >>> rate("1gbit"), rate("25 GB/s"), rate("200 Mb/s")
    (125000000.0, 25000000000.0, 25000000.0)

    Raises:
        TopologyError: anything else.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise TopologyError(f'rate {text!r}: expected a number with a unit, such as "1gbit" or "25GB/s"')
    size = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[match["size"].lower()]
    return float(match["number"]) * size * (1.0 if match["unit"].startswith("B") else 1 / 8)


def _options(arguments: argparse.Namespace, expected: float | None, hosts: list[str] | None) -> Options:
    from datetime import timedelta

    import torch

    from ds_topo.check.session import Options

    backend = arguments.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    return Options(
        spec=arguments.spec,
        backend=backend,
        timeout=timedelta(seconds=arguments.timeout),
        seconds=arguments.seconds,
        slow=arguments.slow,
        clock_tolerance=arguments.clock,
        expected=expected,
        expected_hosts=hosts,
        most_bytes=2**28 if "nccl" in backend else 2**25,
    )


def _report(summary: Summary, arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ds_topo.cli.check_text import print_summary

    if arguments.json is not None:
        text = json.dumps(summary.as_json())
        if arguments.json == "-":
            print(text)
        else:
            try:
                Path(arguments.json).write_text(text + "\n", encoding="utf-8")
            except OSError as error:
                raise TopologyError(f"--json {arguments.json!r} cannot be written: {error}") from error
    if arguments.json != "-":
        print_summary(Console(), summary)
    return 1 if summary.faults else 0
