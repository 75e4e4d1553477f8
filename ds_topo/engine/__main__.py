"""Print every change to DeepSpeed and torch, and every private name of them that is relied on: ``python -m ds_topo.engine``."""

import deepspeed
import torch
from rich.console import Console
from rich.table import Table

from ds_topo.engine import changes
from ds_topo.ledger import Change, Reliance, exists
from ds_topo.process_groups import torch_names
from ds_topo.reducer import torch_names as reducer_names


def page() -> Table:
    """One row for each change and each reliance; ``no`` where the installed release lacks the name."""
    table = Table(title=f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}", show_lines=True)
    for column in ("name", "there", "instead / used for", "why", "while", "releases"):
        table.add_column(column, overflow="fold")
    rows: list[Change | Reliance] = [*changes.ROWS, *torch_names.ROWS, *reducer_names.ROWS]
    for row in rows:
        there = "yes" if exists(row) else "[red]no[/]"
        if isinstance(row, Change):
            table.add_row(str(row), there, row.instead, row.why, row.during, row.releases)
        else:
            table.add_row(str(row), there, row.use, "", "", row.releases)
    return table


if __name__ == "__main__":
    Console().print(page())
