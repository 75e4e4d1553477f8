"""The command line, ``ds-topo``: one module per command, each with ``add_parser`` and ``run``.

A command's module is imported for its options alone (``ds-topo --help`` is instant), so torch and other heavy packages
are imported inside ``run``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_topo.cli import check, checkpoint, convert, plan, show
from ds_topo.errors import CheckpointError, TopologyError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0, 1 for a fault that was found, 2 for unusable arguments."""
    parser = argparse.ArgumentParser(prog="ds-topo", description="Show, check and plan layouts of distributed jobs.")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher gives it to every program
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    check.add_parser(subparsers)
    checkpoint.add_parser(subparsers)
    convert.add_parser(subparsers)
    plan.add_parser(subparsers)
    show.add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (TopologyError, CheckpointError, OSError) as error:
        print(f"ds-topo {parsed.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = ": the same command goes on where it was" if parsed.command == "convert" else ""
        print(f"ds-topo {parsed.command}: interrupted{goes_on}", file=sys.stderr)
        return 130
