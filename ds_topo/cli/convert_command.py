"""Run ``ds-topo convert``: write a checkpoint for another layout, or as one plain file of weights."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.disk import check_folder
from ds_topo.checkpoint.folder import Checkpoint, candidates, check_tag, look_at, other_kind, tags_in, why_passed_over
from ds_topo.cli.shared import check_topology, given_options, progress_of, refuse_without_effect
from ds_topo.errors import CheckpointError, MissingCheckpointError, listed

SUMMARY = "write a checkpoint for other degrees, another ZeRO stage, or as one plain file"
DESCRIPTION = (
    "Write a checkpoint for another topology or ZeRO stage, which DeepSpeed loads as its own; or write all weights "
    "into one plain file. The checkpoint that is read is not changed. Start an interrupted conversion again to "
    "continue it."
)
EXAMPLES = """examples:
  ds-topo convert runs/gpt runs/gpt8 --topology "pipe=2,data=4"
  ds-topo convert runs/gpt/global_step9 runs/plain --topology "data=8" --zero 3
  ds-topo convert runs/moe runs/moe4 --topology "data=8" --experts 4
  ds-topo convert runs/gpt weights.pt --to torch
  ds-topo convert runs/gpt weights --to huggingface --rename names.json
"""
_STEPS = {"megabytes": "writing megabytes", "parameters": "putting parameters together", "files": "flushing files"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("source", metavar="FROM", type=Path, help="folder of checkpoints, of which the newest is read, or of one")
    add(
        "to",
        metavar="TO",
        type=Path,
        help="folder of checkpoints for the new one; with --to a file, or a folder (huggingface)",
    )
    add("--topology", metavar="SPEC", help='the new topology with all degrees, such as "pipe=2,data=4"')
    add("--zero", type=int, choices=(0, 1, 2, 3), help="ZeRO stage; default: the saved one")
    add(
        "--zero-options",
        metavar="JSON",
        help="options of \"zero_optimization\" in the new job's config that order its optimizer's files, such as "
        "'{\"round_robin_gradients\": true}'; default: the saved ones",
    )
    add("--experts", metavar="SIZE", type=int, help="expert parallel size of all layers; default: the saved ones")
    padding = (
        "rows of a parameter whose padding changes, such as a vocabulary's: with padding, or without and with it "
        "(NAME=50257:50304); may be given several times"
    )
    add("--padding", metavar="NAME=ROWS", action="append", help=padding)
    add("--tag", metavar="TAG", help="tag of the checkpoint to read in FROM; default: the newest")
    add("--new-tag", metavar="TAG", help="tag of the new checkpoint; default: the same")
    method = "of the pipeline: parameters, uniform or type:...; default: the saved one"
    add("--partition-method", metavar="METHOD", help=method)
    stages = "first layer of every stage, and the number of layers; default: by --partition-method"
    add("--stages", metavar="0,3,6", help=stages)
    kinds = "write weights instead: one file, or Hugging Face's files with an index (huggingface)"
    add("--to", dest="kind", choices=("torch", "safetensors", "huggingface"), help=kinds)
    add("--rename", metavar="FILE", type=Path, help="JSON of new names by names in FROM; with --to huggingface")
    add("--largest", metavar="BYTES", type=int, help="bytes of weights in one file of --to huggingface; default: 5e9")


def run(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint.

    Raises:
        CheckpointError, TopologyError: the conversion is not possible; the message says why, and nothing was written.
    """
    to, kind = arguments.to, arguments.kind
    if (arguments.topology is None) == (kind is None):
        raise CheckpointError('give either --topology, such as --topology "data=4", or --to torch')
    if arguments.topology is not None:
        check_topology("--topology", arguments.topology)
    else:
        layout = ("zero", "experts", "padding", "new_tag", "partition_method", "stages")
        refuse_without_effect(given_options(arguments, *layout), f"--to {kind} writes weights without a layout")
    if kind != "huggingface":
        refuse_without_effect(given_options(arguments, "rename", "largest"), "they need --to huggingface")
    try:
        bounds = tuple(int(number) for number in arguments.stages.split(",")) if arguments.stages else ()
    except ValueError:
        raise CheckpointError(
            f"--stages {arguments.stages!r} is not a list of numbers: give numbers of layers, such as 0,3,6"
        ) from None
    try:
        zero_options = json.loads(arguments.zero_options or "{}")
    except ValueError:
        zero_options = None
    if not isinstance(zero_options, dict):
        raise CheckpointError(
            f"--zero-options {arguments.zero_options!r} is not an object of JSON: give some entries of the config's "
            'section "zero_optimization", such as \'{"round_robin_gradients": true}\''
        )
    padding = dict(map(_rows, arguments.padding or ()))
    rename = _names(arguments.rename) if arguments.rename is not None else None
    try:
        check_folder(arguments.source, "FROM")
        check_folder(to, "TO")
        found = _checkpoint(arguments.source, arguments.tag)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    try:
        check_tag("new" if arguments.new_tag is None else arguments.new_tag)
    except ValueError as error:
        raise CheckpointError(f"--new-tag: {error}") from None
    warnings.filterwarnings("ignore", category=FutureWarning)
    with progress_of(True, "convert") as show:
        show("planning", 0, 0)
        from ds_topo.checkpoint.conversion import convert, to_hugging_face, to_single_file

        def progress(name: str, done: int, of: int) -> None:
            show(_STEPS[name], done, of)

        if kind == "huggingface":
            options = {} if arguments.largest is None else {"largest": arguments.largest}
            path = to_hugging_face(found, to, rename=rename, progress=progress, **options)
        elif kind is not None:
            path = to_single_file(found, to, kind, progress)
        else:
            path = convert(
                found,
                to,
                arguments.topology,
                zero=arguments.zero,
                tag=arguments.new_tag,
                method=arguments.partition_method,
                bounds=bounds,
                experts=arguments.experts,
                zero_options=zero_options,
                padding=padding,
                progress=progress,
            )
    print(path)
    return 0


def _rows(text: str) -> tuple[str, int | tuple[int, int]]:
    """Return the name and the numbers of rows that an option gives.

    Raises:
        CheckpointError: it does not.
    """
    name, _, rows = text.rpartition("=")
    numbers = rows.split(":")
    if not name or len(numbers) > 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise CheckpointError(f"--padding {text!r}: give a name and rows, such as embedding.weight=50257:50304")
    return name, int(numbers[0]) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1]))


def _names(path: Path) -> dict[str, str]:
    """Return the new names that a file of JSON holds.

    Raises:
        CheckpointError: it does not.
    """
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--rename {path}: {error}") from None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f'--rename {path} must hold names by names, such as {{"1.weight": "blocks.0.weight"}}')
    return names


def _checkpoint(source: Path, tag: str | None) -> Checkpoint:
    """Return the checkpoint that a folder and a tag mean.

    Raises:
        MissingCheckpointError: there is none.
    """
    if os.path.lexists(source / manifests.NAME):
        path = source.resolve()
        if tag not in (None, path.name):
            raise CheckpointError(
                f"--tag {tag!r}: {source} is one checkpoint, {path.name!r}. Give the folder around it, or no --tag"
            )
        return look_at(path.parent, path.name)
    if tag is not None:
        return look_at(source, tag)
    damaged: list[Checkpoint] = []
    for found in candidates(source):
        if found.is_whole and (said := why_passed_over(source, found, damaged)):
            print(f"ds-topo convert: {said}", file=sys.stderr)
        if found.is_whole or found.needs:
            return found
        damaged.append(found)
    known, kind = tags_in(source), f": {kind}" if (kind := other_kind(source)) else ""
    raise MissingCheckpointError(
        f"none of the checkpoints {listed(known)} in {source} is whole" if known else f"no checkpoint in {source}{kind}"
    )
