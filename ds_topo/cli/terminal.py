"""Write tables, sentences and progress of commands to a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ds_topo.errors import TopologyError, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "host"), counted(2048, "host")
    ('1 host', '2,048 hosts')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say(console: Console, text: str) -> None:
    """Print a line as it is, without colours and without breaking it; names in it cannot control the terminal."""
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def cells(*texts: str) -> list[Text]:
    """Return the cells of a row of a table as they are; names in them cannot control the terminal."""
    from rich.text import Text

    return [Text(printable(text)) for text in texts]


def table_of(*left: str, right: Iterable[str] = ()) -> Table:
    """Return an empty table with left-aligned and then right-aligned columns."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def write_file(option: str, path: str, text: str) -> None:
    """Write a line or more of text into the file that an option names.

    Raises:
        TopologyError: the file cannot be written.
    """
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"{option} {path!r} cannot be written: {error}") from error


@contextmanager
def progress_of(shown: bool, command: str = "check") -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function ``progress(step, done, of)`` that shows a bar in a terminal and a line per step elsewhere.

    Args:
        shown: False shows nothing, as on all ranks but one.
        command: the command's name, for the lines.
    """
    current = ""

    def write_step(step: str, done: int, of: int) -> None:
        nonlocal current
        if shown and step != current:
            current = step
            print(f"ds-topo {command}: {step}", file=sys.stderr, flush=True)

    if not shown or not sys.stderr.isatty():
        yield write_step
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda step, done, of: bar.update(task, description=step, completed=done, total=of or None)
