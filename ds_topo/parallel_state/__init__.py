"""Answer the parallel state of Megatron-like programs from a grid.

GPT-NeoX, Megatron-DeepSpeed and Megatron-LM ask a module (``megatron.mpu``, ``megatron.core.parallel_state``) for their
groups and ranks. Its names do not always mean what DeepSpeed's mpu means by them: the ``get_model_parallel_group`` of
GPT-NeoX is tensor parallel alone. ``of(grid, program)`` returns an object that answers as that program's module would,
for any order of axes. ``install(grid, module)`` makes the module itself answer so until the grid is destroyed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, Literal, NoReturn, overload

from ds_topo.base.ledger import Patch, always, ledger
from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.errors import abridged
from ds_topo.mpu import require_grid
from ds_topo.parallel_state.programs import GPTNeoXState, MegatronDeepSpeedState, MegatronState, ParallelState

__all__ = [
    "PROGRAMS",
    "GPTNeoXState",
    "MegatronDeepSpeedState",
    "MegatronState",
    "install",
    "of",
    "program_of",
]

PROGRAMS: dict[str, type[ParallelState]] = {
    "gpt-neox": GPTNeoXState,
    "megatron-deepspeed": MegatronDeepSpeedState,
    "megatron-lm": MegatronState,
}
"""The programs whose parallel state a grid can answer."""
_MARKS = {
    "megatron-lm": "get_context_parallel_group",
    "megatron-deepspeed": "get_sequence_data_parallel_group",
    "gpt-neox": "get_io_parallel_group",
}
"""A function that only that program's parallel state has."""
_QUESTIONS = ("get_", "set_", "is_", "initialize_model_parallel", "destroy_", "model_parallel_is_", "sequence_")
"""The beginnings of the names that ``install`` replaces."""


@overload
def of(grid: PipelineParallelGrid, program: Literal["megatron-lm"] = ...) -> MegatronState: ...
@overload
def of(grid: PipelineParallelGrid, program: Literal["megatron-deepspeed"]) -> MegatronDeepSpeedState: ...
@overload
def of(grid: PipelineParallelGrid, program: Literal["gpt-neox"]) -> GPTNeoXState: ...
@overload
def of(grid: PipelineParallelGrid, program: str) -> ParallelState: ...
def of(grid: PipelineParallelGrid, program: str = "megatron-lm") -> ParallelState:
    """Return an object with the functions of a program's parallel state and with that program's meanings.

    Args:
        grid: the grid whose layout is the answer.
        program: ``"gpt-neox"``, ``"megatron-deepspeed"`` or ``"megatron-lm"``.

    Raises:
        ValueError: the program is not one of these.
        TypeError: ``grid`` is not a grid.

    >>> import torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    >>> with PipelineParallelGrid("model=2,pipe=2,data=2") as grid:
    ...     neox, megatron = of(grid, "gpt-neox"), of(grid)
    ...     neox.get_model_parallel_world_size(), dist.get_process_group_ranks(megatron.get_model_parallel_group())
    ...     neox.get_model_parallel_src_rank(), megatron.get_context_parallel_world_size()
    (2, [1, 3, 5, 7])
    (1, 1)
    >>> dist.destroy_process_group()
    """
    require_grid(grid)
    if program not in PROGRAMS:
        raise ValueError(f"program={abridged(program)}: choose one of {list(PROGRAMS)}")
    return PROGRAMS[program](grid)


def program_of(module: ModuleType) -> str:
    """Return the program that a module of parallel state belongs to, recognised by the module's functions."""
    for program, name in _MARKS.items():
        if hasattr(module, name):
            return program
    raise ValueError(
        f"module {abridged(getattr(module, '__name__', module))} has none of {sorted(_MARKS.values())}: pass the "
        f"program's parallel state, such as megatron.mpu or megatron.core.parallel_state, or program= one of "
        f"{list(PROGRAMS)}"
    )


def install(grid: PipelineParallelGrid, module: ModuleType, program: str | None = None) -> ParallelState:
    """Replace the functions of a program's own module by the answers of :func:`of`, until ``grid.destroy()``.

    Other modules of the program's package that have imported the functions by name get the new ones, too. Functions
    that a grid cannot answer raise, with the reason, when they are called. The module's ``initialize_model_parallel``
    then checks that the program asks for the grid's degrees; all groups it creates are the grid's. Until the program
    has called it, ``model_parallel_is_initialized()`` is False, because programs call it only then. Return the answers.

    Args:
        grid: the grid that answers.
        module: ``megatron.mpu``, ``megatron.core.parallel_state``, ...
        program: the program whose meanings apply; by default it is recognised by the module's functions.

    Raises:
        ValueError: the module or the program is not known.
        RuntimeError: the module answers from another grid.
    """
    states = [getattr(function, "__self__", None) for function in vars(module).values()]
    installed = [other for other in states if isinstance(other, ParallelState)]
    for other in installed:
        if not other.grid.shares_groups_with(grid):
            raise RuntimeError(
                f"{module.__name__} answers from another grid, {other.grid.topology().spec!r}: destroy that one "
                "before install()"
            )
    state = of(grid, program_of(module) if program is None else program)
    state.is_awaited = all(other.is_awaited for other in installed)
    answers: dict[int, tuple[FunctionType, Callable[..., Any]]] = {}
    for name, function in list(vars(module).items()):
        if not isinstance(function, FunctionType):
            continue
        if name in state.refused:
            answers[id(function)] = (function, _refusal(name, state.refused[name]))
        elif name.startswith(_QUESTIONS) and hasattr(state, name):
            answers[id(function)] = (function, getattr(state, name))
    package = module.__name__.split(".")[0]

    def put_back_in_later_modules() -> None:
        """Restore modules that were imported after ``install``: they have the answers, unknown to the ledger."""
        originals = {id(answer): function for function, answer in answers.values()}
        for later, name, value in _names_in(package):
            if id(value) in originals:
                setattr(later, name, originals[id(value)])

    grid.on_destroy(put_back_in_later_modules)
    for owner, name, value in _names_in(package):
        if id(value) in answers:
            instead, why = "The grid's answer.", "install() asks for it."
            patch = Patch(owner, name, instead, why, "the grid exists", process_wide="The module answers all callers.")
            grid.on_destroy(ledger.bind(patch, always(answers[id(value)][1])))
    return state


def _refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"{name}(): {reason}")

    refuse.__name__ = name
    return refuse


def _names_in(package: str) -> list[tuple[ModuleType, str, Any]]:
    """Return every name in the modules of a package: the module, the name and its value."""
    modules = [module for key, module in list(sys.modules.items()) if key.split(".")[0] == package]
    return [(module, name, value) for module in modules for name, value in list(vars(module).items())]
