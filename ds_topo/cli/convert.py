"""``ds-topo convert``: a checkpoint of one layout as one of another layout, or as one plain file of weights."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

from ds_topo.checkpoint_files import manifest as manifests
from ds_topo.checkpoint_files.folder import Checkpoint, candidates, check_tag, look_at, tags_in, why_passed_over
from ds_topo.cli.progress import progress_of
from ds_topo.errors import CheckpointError, MissingCheckpointError, listed

_EXAMPLES = """examples:
  ds-topo convert runs/gpt runs/gpt8 --topology "pipe=2,data=4"
  ds-topo convert runs/gpt/global_step100 runs/plain --topology "data=8" --zero 3
  ds-topo convert runs/moe runs/moe4 --topology "data=8" --experts 4
  ds-topo convert runs/gpt weights.pt --to torch
"""


def add_parser(subparsers: Any) -> None:
    """The options of the command."""
    parser = subparsers.add_parser(
        "convert",
        help="write a checkpoint for other degrees, another stage of ZeRO, or as one plain file",
        description="Write a checkpoint for another topology or stage of ZeRO, which DeepSpeed loads as its own; or "
        "all weights into one plain file. What is read stays as it is. A conversion that was killed goes on where it "
        "was when it is started again.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", metavar="FROM", type=Path, help="folder of checkpoints, of which the newest is read, or of one"
    )
    parser.add_argument("to", metavar="TO", type=Path, help="folder of checkpoints for the new one; a file with --to")
    parser.add_argument("--topology", help='the new one, with all degrees, such as "pipe=2,data=4"')
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="stage of ZeRO; as it was by default")
    parser.add_argument(
        "--experts", metavar="SIZE", type=int, help="ranks among which each layer deals its experts; as it was"
    )
    parser.add_argument("--tag", help="which checkpoint of FROM, if that is a folder of several")
    parser.add_argument("--new-tag", help="of the new one; the same by default")
    parser.add_argument("--partition-method", help="of the pipeline: parameters, uniform or type:...; as it was")
    parser.add_argument("--stages", metavar="0,3,6", help="the first layer of every stage, and the number of layers")
    parser.add_argument("--to", dest="kind", choices=("torch", "safetensors"), help="one file of weights instead")
    parser.set_defaults(run=run)


_STEPS = {
    "megabytes": "writing megabytes",
    "parameters": "putting parameters together",
    "files": "flushing files",
}


def run(arguments: argparse.Namespace) -> int:
    """Convert.

    Raises:
        CheckpointError, TopologyError: it cannot be done; says why, and nothing was written.
    """
    if (arguments.topology is None) == (arguments.kind is None):
        raise CheckpointError('give either --topology, such as --topology "data=4", or --to torch')
    bounds = _bounds(arguments.stages)
    _check_target(arguments.to, arguments.new_tag, is_file=arguments.kind is not None)
    found = _checkpoint(arguments.source, arguments.tag)
    warnings.filterwarnings("ignore", category=FutureWarning)
    with progress_of(True, "convert") as shown:
        shown.begin("planning")
        from ds_topo.conversion import convert, to_single_file

        step = ""

        def progress(name: str, done: int, of: int) -> None:
            nonlocal step
            if name != step:
                step = name
                shown.begin(_STEPS[name])
            shown.advance(done, of)

        if arguments.kind is not None:
            path = to_single_file(found, arguments.to, arguments.kind, progress)
        else:
            path = convert(
                found,
                arguments.to,
                arguments.topology,
                zero=arguments.zero,
                tag=arguments.new_tag,
                method=arguments.partition_method,
                bounds=bounds,
                experts=arguments.experts,
                progress=progress,
            )
    print(path)
    return 0


def _check_target(path: Path, tag: str | None, *, is_file: bool) -> None:
    """Before anything is written.

    Raises:
        CheckpointError: it is something else than what is to be written there, or the tag cannot be.
    """
    if is_file and path.is_dir():
        raise CheckpointError(f"{path} is a folder: give the file to write, such as {path / 'weights.pt'}")
    if not is_file and path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file: give a folder of checkpoints for the new one")
    if tag is not None:
        try:
            check_tag(tag)
        except ValueError as error:
            raise CheckpointError(f"--new-tag: {error}") from None


def _bounds(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise CheckpointError(f"--stages {text!r}: give numbers of layers, such as 0,3,6") from None


def _checkpoint(source: Path, tag: str | None) -> Checkpoint:
    """What is meant by a folder.

    Raises:
        MissingCheckpointError: there is none.
    """
    if (source / manifests.NAME).exists():
        path = source.resolve()
        if tag not in (None, path.name):
            raise CheckpointError(
                f"--tag {tag!r}: {source} is one checkpoint, {path.name!r}; give the folder around it"
            )
        return look_at(path.parent, path.name)
    known = tags_in(source)
    if tag is not None:
        if tag not in known:
            raise MissingCheckpointError(f"no checkpoint {tag!r} in {source}: there are {listed(known)}")
        return look_at(source, tag)
    damaged: list[Checkpoint] = []
    for found in candidates(source):
        if found.needs:
            return found
        if found.is_whole:
            if said := why_passed_over(source, found, damaged):
                print(f"ds-topo convert: {said}", file=sys.stderr)
            return found
        damaged.append(found)
    raise MissingCheckpointError(
        f"none of the checkpoints {listed(known)} in {source} is whole" if known else f"no checkpoint in {source}"
    )
