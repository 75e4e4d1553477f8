"""``python -m ds_topo.engine`` prints what is changed in DeepSpeed and torch, and the private names relied on."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import deepspeed
import torch

from ds_topo.engine import changes
from ds_topo.engine.releases import is_missing
from ds_topo.ledger import Change, Reliance
from ds_topo.measurement import torch_names as measurement_names
from ds_topo.process_groups import torch_names
from ds_topo.reducer import torch_names as reducer_names

ROWS: tuple[Change | Reliance, ...] = (
    *changes.ROWS,
    *torch_names.ROWS,
    *reducer_names.ROWS,
    *measurement_names.ROWS,
)


def page(rows: Sequence[Change | Reliance] = ROWS) -> str:
    """Every change, then every reliance, with what the installed releases lack marked."""
    bound = [row for row in rows if isinstance(row, Change)]
    relied_on = [row for row in rows if isinstance(row, Reliance)]
    parts = [f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}", "", "Changed for a while", ""]
    for change in bound:
        parts += [_title(change), _line("becomes", change.instead), _line("why", change.why)]
        parts += [_line("while", change.during), ""]
    parts += ["Relied on", ""]
    for reliance in relied_on:
        parts += [_title(reliance), _line("for", reliance.use)]
    missing = [str(row) for row in rows if is_missing(row)]
    parts += ["", f"{len(bound)} changes, {len(relied_on)} reliances; missing here: {', '.join(missing) or 'none'}"]
    return "\n".join(parts)


def _title(row: Change | Reliance) -> str:
    limits = "" if row.releases == "all" else f"  ({row.releases})"
    return f"{row}{limits}{'  MISSING' if is_missing(row) else ''}"


def _line(label: str, text: str) -> str:
    return fill(text, 100, initial_indent=f"    {label:9}", subsequent_indent=" " * 13)


if __name__ == "__main__":
    print(page())
