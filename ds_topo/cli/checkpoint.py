"""``ds-topo checkpoint``: what is in a folder of checkpoints, without torch, and without unpickling anything."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_topo.checkpoint_files import manifest as manifests
from ds_topo.checkpoint_files.folder import Checkpoint, checkpoints_in, look_at, named_latest
from ds_topo.errors import MissingCheckpointError

_EXAMPLES = """examples:
  ds-topo checkpoint runs/gpt
  ds-topo checkpoint runs/gpt --verify
  ds-topo checkpoint runs/gpt/global_step100
"""


def add_parser(subparsers: Any) -> None:
    """The options of the command."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="show what is in a folder of checkpoints, and whether it is whole",
        description="Show tags, steps, layouts and sizes of checkpoints, which are whole, and what 'latest' names. The "
        "exit status is 1 if one is damaged.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="of all checkpoints, or of one, to see what it holds"
    )
    parser.add_argument("--verify", action="store_true", help="read every file, and compare its digest")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show it.

    Raises:
        MissingCheckpointError: there is none.
    """
    folder: Path = arguments.folder
    is_one = (folder / manifests.NAME).exists()
    root = folder.resolve().parent if is_one else folder
    if is_one:
        found = [look_at(root, folder.resolve().name, digests=arguments.verify)]
    else:
        found = checkpoints_in(root, digests=arguments.verify)
    if not found:
        raise MissingCheckpointError(f"no checkpoint in {folder}" if folder.is_dir() else f"{folder} is not a folder")
    latest = named_latest(root)
    if arguments.json:
        content = {"folder": str(root), "latest": latest, "checkpoints": [as_json(one) for one in found]}
        json.dump(content, sys.stdout)
        print()
    else:
        from rich.console import Console

        from ds_topo.cli.checkpoint_text import print_checkpoint, print_checkpoints

        if is_one:
            print_checkpoint(Console(), found[0], is_latest=latest == found[0].tag, verified=arguments.verify)
        else:
            print_checkpoints(Console(), found, latest, verified=arguments.verify)
    return int(any(checkpoint.problems for checkpoint in found))


def as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that is known of one."""
    return {
        "tag": checkpoint.tag,
        "is_whole": checkpoint.is_whole,
        "problems": list(checkpoint.problems),
        "needs": checkpoint.needs,
        "bytes": checkpoint.bytes,
        "manifest": None if checkpoint.manifest is None else asdict(checkpoint.manifest),
    }
