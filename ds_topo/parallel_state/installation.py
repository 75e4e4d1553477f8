"""Let a program's own parallel state answer from a grid, until the grid is destroyed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.errors import abridged
from ds_topo.ledger import Change, always, ledger
from ds_topo.parallel_state.programs import PROGRAMS, of
from ds_topo.parallel_state.questions import ParallelState, is_of, refuse

_MARKS = {
    "megatron-lm": "get_context_parallel_group",
    "megatron-deepspeed": "get_sequence_data_parallel_group",
    "gpt-neox": "get_io_parallel_group",
}
"""A function that only that program's parallel state has."""
_ASKING = ("get_", "set_", "is_", "initialize_model_parallel", "destroy_", "model_parallel_is_", "sequence_")


def program_of(module: ModuleType) -> str:
    """Which program a module of parallel state is of, by the functions that it has.

    Raises:
        ValueError: none that is known.
    """
    for program, name in _MARKS.items():
        if hasattr(module, name):
            return program
    raise ValueError(
        f"module {abridged(getattr(module, '__name__', module))} has none of {sorted(_MARKS.values())}: pass the "
        f"program's parallel state, such as megatron.mpu or megatron.core.parallel_state, or program= one of "
        f"{list(PROGRAMS)}"
    )


def install(grid: PipelineParallelGrid, module: ModuleType, program: str | None = None) -> ParallelState:
    """Bind what :func:`of` answers in a program's own module, until ``grid.destroy()``.

    Other modules of the program's package that have imported the functions by name get the new ones, too. Functions
    that a grid cannot answer say why when they are called. ``initialize_model_parallel`` of the module then checks
    that the program wants the grid's degrees, and creates at most more groups of the grid's.

    Args:
        grid: whose layout the program shall use.
        module: ``megatron.mpu``, ``megatron.core.parallel_state``, ...
        program: which one's meanings; told by the module's functions unless given.

    Returns:
        The answers, as an object.

    Raises:
        ValueError: a module or program that is not known.
        RuntimeError: the module answers from another grid.
    """
    _check_free(module, grid)
    state = of(grid, program_of(module) if program is None else program)
    answers: dict[int, tuple[Any, Callable[..., Any]]] = {}
    for name, function in list(vars(module).items()):
        is_asking = name.startswith(_ASKING) or name in state.refused
        if not isinstance(function, FunctionType) or not is_asking:
            continue
        answer = getattr(state, name, None)
        if answer is None and name in state.refused:
            answer = refuse(name, state.refused[name])
        if answer is not None:
            answers[id(function)] = (function, answer)
    package = module.__name__.split(".")[0]
    grid.on_destroy(
        partial(_put_back_in_later_modules, package, {id(new): (new, old) for old, new in answers.values()})
    )
    for other, name, value in _names_in(package):
        if id(value) in answers:
            change = Change(other, name, "what the grid answers", "asked for by install()", "the grid exists")
            grid.on_destroy(ledger.bind(change, always(answers[id(value)][1])))
    return state


def _check_free(module: ModuleType, grid: PipelineParallelGrid) -> None:
    """Refuse a second grid: its answers would mix with the first one's."""
    for function in vars(module).values():
        state = getattr(function, "__self__", None)
        if isinstance(state, ParallelState) and not is_of(state, grid):
            raise RuntimeError(f"{module.__name__} answers from another grid: destroy that one before install()")


def _put_back_in_later_modules(package: str, originals: dict[int, tuple[Any, Any]]) -> None:
    """Modules that were imported meanwhile have the answers by name, which nobody has bound there."""
    for other, name, value in _names_in(package):
        if id(value) in originals:
            setattr(other, name, originals[id(value)][1])


def _names_in(package: str) -> list[tuple[ModuleType, str, Any]]:
    """Every name in the modules of a package, and its value."""
    modules = [module for key, module in list(sys.modules.items()) if key.split(".")[0] == package]
    return [(module, name, value) for module in modules for name, value in list(vars(module).items())]
