"""How far a long command is: a bar in a terminal, a line for each step elsewhere, nothing on other ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Quiet:
    """Shows nothing."""

    def begin(self, step: str) -> None:
        """A step begins."""

    def advance(self, done: int, of: int) -> None:
        """So much of it is done."""


class Lines(Quiet):
    """A line for each step, for logs."""

    def __init__(self, command: str) -> None:
        self._command = command

    def begin(self, step: str) -> None:
        """A step begins."""
        print(f"ds-topo {self._command}: {step}", file=sys.stderr, flush=True)


class Bar(Quiet):
    """A bar that shows the step and how much of it is done."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def begin(self, step: str) -> None:
        """A step begins."""
        self._progress.update(self._task, description=step, completed=0, total=None)

    def advance(self, done: int, of: int) -> None:
        """So much of it is done."""
        self._progress.update(self._task, completed=done, total=of)


@contextmanager
def progress_of(shown: bool, command: str = "check") -> Iterator[Quiet]:
    """The right one of these for standard error."""
    if not shown:
        yield Quiet()
    elif not sys.stderr.isatty():
        yield Lines(command)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield Bar(progress, progress.add_task("starting", total=None))
