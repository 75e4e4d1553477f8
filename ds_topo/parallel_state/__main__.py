"""Print, as a Markdown table, how each name of the programs' parallel states is answered."""

from __future__ import annotations

import inspect
import signal

from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.parallel_state import PROGRAMS
from ds_topo.parallel_state.programs import ParallelState


def rows() -> list[list[str]]:
    """Return one row per name, in alphabetical order: the name, then how each program's state answers it."""
    names = {
        name
        for kind in PROGRAMS.values()
        for name in (*kind.refused, *(name for name, _ in inspect.getmembers(kind, inspect.isfunction)))
        if not name.startswith("_")
    }
    return [[f"`{name}`", *(_answer(kind, name) for kind in PROGRAMS.values())] for name in sorted(names)]


def _answer(kind: type[ParallelState], name: str) -> str:
    if name in kind.refused:
        return f"refused: {kind.refused[name]}"
    if not hasattr(kind, name):
        return ""
    if name in kind.translated:
        return f"translated: {kind.translated[name]}"
    return "as the grid" if hasattr(PipelineParallelGrid, name) else "answered"


def main() -> None:
    """Print the table."""
    print("| Name | " + " | ".join(PROGRAMS) + " |")
    print("| --- |" + " --- |" * len(PROGRAMS))
    for row in rows():
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    main()
