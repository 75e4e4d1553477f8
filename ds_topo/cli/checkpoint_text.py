"""What is in a folder of checkpoints, as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ds_topo.checkpoint_files.folder import Checkpoint
from ds_topo.checkpoint_files.manifest import SavedParameter
from ds_topo.checkpoint_files.wholeness import told
from ds_topo.cli.layout_text import say, table_of
from ds_topo.cli.layout_view import counted
from ds_topo.placement.summary import fold_numbers

_STEPS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def size_text(size: int) -> str:
    """Bytes for people.

    >>> size_text(999), size_text(1_234_567), size_text(20_000_000_000)
    ('999 bytes', '1.2 MB', '20.0 GB')
    """
    power = min(max(0, (len(str(size)) - 1) // 3), len(_STEPS) - 1)
    return f"{size:,} bytes" if not power else f"{size / 1000**power:.1f} {_STEPS[power]}"


def print_checkpoints(console: Console, found: Sequence[Checkpoint], latest: str | None, *, verified: bool) -> None:
    """A line for each, newest first; then what is wrong, and what ``latest`` names."""
    table = table_of("tag", "layout", "state", right=("step", "parameters", "size"))
    for checkpoint in found:
        manifest = checkpoint.manifest
        known = ("?", "no manifest", "?")
        if manifest is not None:
            layout = manifest.layout
            where = layout.topology or f"{layout.model_ranks} x {layout.replicas}"
            known = (
                f"{manifest.step:,}",
                f"{where}, ZeRO {layout.zero_stage}, {layout.precision}",
                f"{manifest.numel():,}",
            )
        step, layout_text, numel = known
        table.add_row(
            checkpoint.tag, layout_text, _state(checkpoint, verified), step, numel, size_text(checkpoint.bytes)
        )
    console.print(table)
    console.print()
    for checkpoint in found:
        if checkpoint.problems:
            say(console, f"{checkpoint.tag}: {told(checkpoint.problems)}")
        elif checkpoint.needs:
            say(console, f"{checkpoint.tag}: {checkpoint.needs}")
    tags = {checkpoint.tag for checkpoint in found}
    if latest is None:
        say(console, "There is no file 'latest'.")
    else:
        say(console, f"latest: {latest}" + ("" if latest in tags else ", which is not there"))


def print_checkpoint(console: Console, checkpoint: Checkpoint, *, is_latest: bool, verified: bool) -> None:
    """One of them: its layout, its parameters and its files."""
    title = f"{checkpoint.tag}: {_state(checkpoint, verified)}{', latest' if is_latest else ''}"
    console.print(title, style="bold", highlight=False)
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
    say(console, f"files       {len(manifest.files):,}, {size_text(manifest.bytes)}")
    say(console, f"parameters  {manifest.numel():,} in {counted(len(manifest.parameters), 'tensor')}")
    say(console, "releases    " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    console.print()
    table = table_of("parameter", "shape", "type", "model ranks", "split")
    for row in manifest.parameters:
        shape = f"{list(row.shape)}" + (f" x {row.experts} experts" if row.experts else "")
        ranks = fold_numbers(list(row.model_ranks))
        table.add_row(row.name, shape, row.dtype, ranks, _split(row) + ("" if row.is_trained else " frozen"))
    console.print(table)


def _split(row: SavedParameter) -> str:
    if row.split_dim is None:
        return ""
    return "yes" if row.split_dim < 0 else f"dimension {row.split_dim}"


def _state(checkpoint: Checkpoint, verified: bool) -> str:
    if checkpoint.needs:
        return "of a later release"
    if checkpoint.problems:
        return "DAMAGED"
    if checkpoint.manifest is None:
        return "seems whole"
    return "whole, digests agree" if verified else "whole"
