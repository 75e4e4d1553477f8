"""Run ``ds-topo checkpoint``: show the checkpoints of a folder, without torch and without unpickling anything."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.folder import Checkpoint, check_folder
from ds_topo.checkpoint.manifest import SavedParameter
from ds_topo.cli.shared import counted, new_console, say, say_rows
from ds_topo.errors import CheckpointError, MissingCheckpointError, bytes_text, fold_numbers

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "show the checkpoints of a folder, and check that they are complete"
DESCRIPTION = (
    "Show tags, steps, layouts and sizes of checkpoints, which are complete, and the one that 'latest' names. The "
    "exit status is 1 if one is damaged."
)
EXAMPLES = """examples:
  ds-topo checkpoint runs/gpt
  ds-topo checkpoint runs/gpt --verify
  ds-topo checkpoint runs/gpt/global_step100
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    folder = "the folder of all checkpoints, or of one, to show its content"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=folder)
    parser.add_argument("--verify", action="store_true", help="read every file, and compare its digest too")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Show the checkpoints; return 1 if one is damaged."""
    try:
        folder = check_folder(arguments.folder, "FOLDER")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    is_one = os.path.lexists(folder / manifests.NAME)
    root = folder.resolve().parent if is_one else folder
    if is_one:
        found = [folders.look_at(root, folder.resolve().name, digests=arguments.verify)]
    else:
        found = folders.checkpoints_in(root, digests=arguments.verify)
    if not found:
        kind = f": {kind}" if (kind := folders.other_kind(folder)) else ""
        reason = f"no checkpoint in {folder}" if folder.is_dir() else f"{folder} is not a folder"
        raise MissingCheckpointError(reason + kind)
    latest = folders.named_latest(root)
    if arguments.json:
        content = {"folder": str(root), "latest": latest, "checkpoints": [_as_json(one) for one in found]}
        json.dump(content, sys.stdout)
        print()
    elif is_one:
        _print_checkpoint(new_console(), found[0], is_latest=latest == found[0].tag, verified=arguments.verify)
    else:
        _print_checkpoints(new_console(), found, latest, verified=arguments.verify)
    return int(any(checkpoint.problems for checkpoint in found))


def _as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "tag": checkpoint.tag,
        "is_whole": checkpoint.is_whole,
        "problems": list(checkpoint.problems),
        "needs": checkpoint.needs,
        "bytes": checkpoint.bytes,
        "manifest": None if checkpoint.manifest is None else asdict(checkpoint.manifest),
    }


def _print_checkpoints(console: Console, found: Sequence[Checkpoint], latest: str | None, *, verified: bool) -> None:
    """Print a line for each checkpoint, newest first; then the problems, and the tag in ``latest``."""
    rows = [["tag", "state", "step", "size", "layout"]]
    for checkpoint in found:
        manifest, layout_text, step = checkpoint.manifest, "no manifest", "?"
        if manifest is not None:
            layout, step = manifest.layout, f"{manifest.step:,}"
            where = layout.topology or f"{layout.model_ranks} x {layout.replicas}"
            experts = "".join(f", experts over {groups.size}" for groups in layout.experts)
            layout_text = f"{where}, ZeRO {layout.zero_stage}, {layout.precision}{experts}"
        state = _state(checkpoint, "verified" if verified else "complete")
        rows.append([checkpoint.tag, state, step, bytes_text(checkpoint.bytes), layout_text])
    say_rows(console, rows, right={2, 3})
    console.print()
    for checkpoint in found:
        if problem := folders.told(checkpoint.problems) or checkpoint.needs:
            say(console, f"{checkpoint.tag}: {problem}")
    if problem := folders.problem_of_latest(found[0].path.parent):
        say(console, f"{problem}.")
    else:
        say(console, f"latest: {latest}")


def _print_checkpoint(console: Console, checkpoint: Checkpoint, *, is_latest: bool, verified: bool) -> None:
    state = _state(checkpoint, "complete, digests agree" if verified else "complete")
    title = f"{checkpoint.tag}: {state}{', latest' if is_latest else ''}"
    say(console, title, "bold")
    for problem in checkpoint.problems:
        say(console, f"  {problem}")
    manifest = checkpoint.manifest
    if manifest is None:
        say(console, checkpoint.needs)
        return
    console.print()
    say(console, f"step        {manifest.step:,}, saved {manifest.time}")
    say(console, f"layout      {manifest.layout}")
    say(console, f"optimizer   {manifest.layout.optimizer}")
    say(console, f"files       {len(manifest.files):,} and the manifest, {bytes_text(checkpoint.bytes)}")
    say(console, f"parameters  {manifest.numel():,} in {counted(len(manifest.parameters), 'tensor')}")
    say(console, "releases    " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    console.print()
    rows = [["type", "shape", "model ranks", "split", "parameter"]]
    for row in manifest.parameters:
        shape = f"{list(row.shape)}" + (f" x {row.experts} experts" if row.experts else "")
        ranks = fold_numbers(list(row.model_ranks))
        split = " ".join(text for text in (_split(row), "" if row.is_trained else "frozen") if text)
        rows.append([row.dtype, shape, ranks, split, row.name])
    say_rows(console, rows)


def _split(row: SavedParameter) -> str:
    if row.split_dim is None:
        return ""
    return "yes" if row.split_dim < 0 else f"dimension {row.split_dim}"


def _state(checkpoint: Checkpoint, complete: str) -> str:
    if checkpoint.needs:
        return "of a later release"
    if checkpoint.problems:
        return "DAMAGED"
    return "seems complete" if checkpoint.manifest is None else complete
