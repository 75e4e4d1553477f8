"""Run the command line, ``ds-topo``: one module per command, each with ``add_parser`` and ``run``.

``ds-topo --help`` imports every command's module, so torch, rich and other heavy packages are imported inside ``run``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_topo.cli import check_command, checkpoint_command, convert_command, plan_command, show_command
from ds_topo.errors import CheckpointError, LaunchError, TopologyError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0, 1 for a fault that was found, 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(prog="ds-topo", description="Show, check and plan layouts of distributed jobs.")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it to every program
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in (check_command, checkpoint_command, convert_command, plan_command, show_command):
        command.add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (TopologyError, CheckpointError, LaunchError, OSError) as error:
        print(f"ds-topo {parsed.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resume = ": run the same command again to resume it" if parsed.command == "convert" else ""
        print(f"ds-topo {parsed.command}: interrupted{resume}", file=sys.stderr)
        return 130
