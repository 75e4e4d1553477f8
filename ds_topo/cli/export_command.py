"""Run ``ds-topo export``: write the weights of a checkpoint into plain files."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.folder import (
    Checkpoint,
    candidates,
    check_folder,
    look_at,
    other_kind,
    tags_in,
    why_passed_over,
)
from ds_topo.cli.shared import counted, given_options, progress_of, refuse_without_effect
from ds_topo.errors import CheckpointError, MissingCheckpointError, listed, tell

SUMMARY = "write the weights of a checkpoint into plain files"
DESCRIPTION = (
    "Write all weights of a checkpoint into one file of safetensors or torch, or into a folder of Hugging Face. Slices "
    "are put together. The checkpoint is not changed. To load another layout, no command is needed: engines on a grid "
    "load any; for programs without ds_topo there is DeepSpeed's own python -m deepspeed.checkpoint.ds_to_universal."
)
EXAMPLES = """examples:
  ds-topo export runs/gpt weights.safetensors
  ds-topo export runs/gpt/global_step9 weights.pt
  ds-topo export runs/gpt weights --rename names.json
"""
_KINDS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", "": "huggingface"}
"""What is written, by the ending of TO."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="FROM", type=Path, help="folder of checkpoints, of which the newest is read, or of one")
    endings = "a file that ends in .safetensors, .pt, .pth or .bin; or a folder, for Hugging Face's files and an index"
    add("to", metavar="TO", type=Path, help=endings)
    add("--tag", metavar="TAG", help="tag of the checkpoint to read in FROM; default: the newest")
    add("--rename", metavar="FILE", type=Path, help="JSON of new names by names in FROM, if TO is a folder")
    largest = "bytes of weights in one file, if TO is a folder; default: 5e9"
    add("--overwrite", action="store_true", default=None, help="replace TO, if it is a file that exists")
    add("--largest", metavar="BYTES", type=int, help=largest)


def run(arguments: argparse.Namespace) -> int:
    to, kind = arguments.to, _KINDS.get(arguments.to.suffix)
    if kind is None:
        raise CheckpointError(
            f"TO {str(to)!r}: give a file that ends in .safetensors, .pt, .pth or .bin, or a folder without an ending"
        )
    if kind != "huggingface":
        refuse_without_effect(given_options(arguments, "rename", "largest"), "it needs a folder as TO")
        if to.is_file() and not arguments.overwrite:
            raise CheckpointError(f"TO {str(to)!r} exists: give another name, or --overwrite to replace it")
    else:
        refuse_without_effect(given_options(arguments, "overwrite"), "it needs a file as TO")
    rename = _names(arguments.rename) if arguments.rename is not None else None
    try:
        check_folder(arguments.source, "FROM")
        check_folder(to, "TO")
        found = _checkpoint(arguments.source, arguments.tag)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    warnings.filterwarnings("ignore", category=FutureWarning)
    with progress_of(True, "export") as show:
        show("planning", 0, 0)
        from ds_topo.checkpoint.plain_weights import tensors_in, to_hugging_face, to_single_file

        def progress(_: str, done: int, of: int) -> None:
            show("putting parameters together", done, of)

        if kind == "huggingface":
            options = {} if arguments.largest is None else {"largest": arguments.largest}
            path = to_hugging_face(found, to, rename=rename, progress=progress, **options)
        else:
            path = to_single_file(found, to, kind, progress)
    tensors = tensors_in(path)
    types = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in tensors.values()}))
    step = f"step {found.manifest.step:,} of " if found.manifest is not None else ""
    tell(f"ds-topo export: wrote {step}{found.path}: {counted(len(tensors), 'tensor')} in {types}")
    print(path)
    return 0


def _names(path: Path) -> dict[str, str]:
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--rename {path}: {error}") from None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f'--rename {path} must hold names by names, such as {{"1.weight": "blocks.0.weight"}}')
    return names


def _checkpoint(source: Path, tag: str | None) -> Checkpoint:
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
            print(f"ds-topo export: {said}", file=sys.stderr)
        if found.is_whole or found.needs:
            return found
        damaged.append(found)
    known, kind = tags_in(source), f": {kind}" if (kind := other_kind(source)) else ""
    raise MissingCheckpointError(
        f"none of the checkpoints {listed(known)} in {source} is whole" if known else f"no checkpoint in {source}{kind}"
    )
