"""Print, as a Markdown table, how each name of the programs' parallel states is answered.

Run ``python -m tests.parallel_state.names``.
"""

from __future__ import annotations

import inspect
import signal

from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.parallel_state import PROGRAMS, GPTNeoXState, MegatronDeepSpeedState
from ds_topo.parallel_state.programs import ParallelState

TRANSLATED: dict[type[ParallelState], dict[str, str]] = {
    GPTNeoXState: {
        f"get_model_parallel_{question}": "tensor parallel; the grid's is pipe x model"
        for question in ("group", "world_size", "rank", "src_rank")
    },
    MegatronDeepSpeedState: {
        **dict.fromkeys(
            ("get_model_parallel_world_size", "get_model_parallel_rank"),
            "tensor parallel, without a pipeline only; the grid's is pipe x model",
        ),
        **{
            f"get_sequence_parallel_{name}": f"{answer} without an axis seq, where the grid does not have the name: "
            "DeepSpeed takes another path then"
            for name, answer in (("group", "1 rank"), ("world_size", "1"), ("rank", "0"))
        },
    },
}
"""The names that mean something else to the grid, each with the program's meaning."""


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
    if meaning := TRANSLATED.get(kind, {}).get(name):
        return f"translated: {meaning}"
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
