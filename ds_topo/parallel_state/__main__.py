"""Print which names of the programs' parallel states are answered, and how, as a Markdown table."""

from __future__ import annotations

import inspect

from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.parallel_state.programs import PROGRAMS


def rows() -> list[list[str]]:
    """Names in alphabetic order, each with what every program's answer is."""
    names = {
        name
        for kind in PROGRAMS.values()
        for name in (*kind.refused, *(name for name, _ in inspect.getmembers(kind, inspect.isfunction)))
        if not name.startswith("_")
    }
    return [[f"`{name}`", *(_answer(kind, name) for kind in PROGRAMS.values())] for name in sorted(names)]


def _answer(kind: type, name: str) -> str:
    if name in getattr(kind, "refused", {}):
        return f"refused: {kind.refused[name]}"  # type: ignore[attr-defined]
    method = getattr(kind, name, None)
    if method is None:
        return ""
    if meaning := getattr(method, "meaning", None):
        return f"translated: {meaning}"
    return "as the grid" if hasattr(PipelineParallelGrid, name) else "answered"


def main() -> None:
    """Print it."""
    print("| Name | " + " | ".join(PROGRAMS) + " |")
    print("| --- |" + " --- |" * len(PROGRAMS))
    for row in rows():
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
