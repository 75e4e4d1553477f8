"""Record which functions of DeepSpeed run, and which collectives start, between two points of a program."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist

import ds_topo

RUNTIME = Path(deepspeed.__file__).parent / "runtime"
ENGINES_AND_OPTIMIZERS = (
    "engine.py",
    "hybrid_engine.py",
    "base_optimizer.py",
    "bf16_optimizer.py",
    "fp16/*.py",
    "pipe/engine.py",
    "pipe/dualpipev.py",
    "zero/stage_1_and_2.py",
    "zero/stage3.py",
)
"""The files of DeepSpeed whose functions are recorded."""
LEFT_OUT = (
    *("get_", "is_", "_is_", "_get_", "_report", "report_", "print_", "see_memory", "_assert"),
    *("communication_data_type", "_EngineBackwardGraphTracker", "BackwardHookStateManager", "_phase"),
    *("_use_compact_grad_partition_buffer", "_autoep_expert_parallel_group", "_record_bucket_producer"),
    *("_maybe_reduce_autoep_folding_tp_gradient", "clear_backward_seen_flag"),
)
"""How names of functions and classes begin that change nothing, or that only count hooks."""
FEWEST_LINES = 4
"""The number of lines of code of the shortest functions that are recorded."""
COLLECTIVES = frozenset(
    [
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
        *("barrier", "broadcast", "broadcast_object_list", "gather", "irecv", "isend", "recv", "reduce"),
        *("reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
    ]
)
OURS = str(Path(ds_topo.__file__).parent)


class Called(NamedTuple):
    """The numbers of Python functions that a step calls."""

    of_ds_topo: int
    all: int


def called_by(step: Callable[[], object]) -> Called:
    """Take a step, and count the functions that it calls."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return Called(sum(file.startswith(OURS) for file in files), len(files))


@dataclass
class Calls:
    """The calls of a block, in order; ``x3`` follows a repeated ``[sequence of names]``."""

    functions: list[str] = field(default_factory=list)
    """The functions of DeepSpeed, such as ``DeepSpeedEngine.step``."""
    collectives: list[str] = field(default_factory=list)
    """The collectives, such as ``all_reduce float32[36] over 0 2``; those that ds_topo starts begin with ``our``."""


@contextmanager
def recorded_calls() -> Iterator[Calls]:
    """Record the calls of this thread in the block."""
    found, files, profiled = Calls(), _files(), sys.getprofile()
    functions: list[str] = []
    collectives: list[str] = []
    c10d = dist.distributed_c10d.__file__

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename in files:
            name = _functions_of(code.co_filename).get((code.co_firstlineno, code.co_name))
            if name is not None:
                functions.append(name)
        elif code.co_filename == c10d and code.co_name in COLLECTIVES:
            caller = _caller(frame, c10d)
            if caller is not None:
                ours = "our " if caller.startswith(OURS) else ""
                collectives.append(f"{ours}{_described(frame)}")

    was_enabled = gc.isenabled()
    gc.disable()  # which would call finalizers
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(profiled)
        if was_enabled:
            gc.enable()
    found.functions, found.collectives = collapsed(functions), collapsed(collectives)


def collapsed(names: Iterable[str]) -> list[str]:
    """Replace repeats of one name, then of a run of up to twelve, by one with the number of repeats.

    >>> collapsed("step average average norm step average average norm end".split())
    ['[step', 'average', 'norm] x2', 'end']
    """
    found: list[str] = []
    for name in names:
        if not found or found[-1] != name:
            found.append(name)
    for length in range(2, 13):
        found = _with_repeats_of(found, length)
    return found


def _with_repeats_of(names: list[str], length: int) -> list[str]:
    found, position = [], 0
    while position < len(names):
        unit = names[position : position + length]
        times = 1
        while names[position + times * length : position + (times + 1) * length] == unit:
            times += 1
        if times > 1 and not any("] x" in name for name in unit):
            found += [f"[{unit[0]}", *unit[1:-1], f"{unit[-1]}] x{times}"]
            position += times * length
        else:
            found.append(names[position])
            position += 1
    return found


@cache
def _files() -> frozenset[str]:
    return frozenset(str(file) for pattern in ENGINES_AND_OPTIMIZERS for file in RUNTIME.glob(pattern))


@cache
def _functions_of(file: str) -> dict[tuple[int, str], str]:
    """Return the recorded functions and methods of a file, by their first line (maybe of a decorator) and name."""
    found: dict[tuple[int, str], str] = {}
    for node in ast.parse(Path(file).read_text()).body:
        is_class = isinstance(node, ast.ClassDef)
        if is_class and node.name.startswith(LEFT_OUT):
            continue
        for function in node.body if is_class else [node]:
            if isinstance(function, ast.FunctionDef) and _is_recorded(function):
                first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
                found[first, function.name] = f"{node.name}.{function.name}" if is_class else function.name
    return found


def _is_recorded(function: ast.FunctionDef) -> bool:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    is_dunder = function.name.startswith("__") and function.name.endswith("__")
    if is_dunder or function.name.startswith(LEFT_OUT) or not body:
        return False
    lines = {child.lineno for statement in body for child in ast.walk(statement) if isinstance(child, ast.stmt)}
    return len(lines) >= FEWEST_LINES


def _described(frame: FrameType) -> str:
    values = frame.f_locals
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    lists = [value for value in values.values() if isinstance(value, list) and value]
    tensors = tensors or [tensor for tensor in (lists[0] if lists else ()) if isinstance(tensor, torch.Tensor)]
    what = "+".join(f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]" for tensor in tensors)
    ranks = " ".join(map(str, dist.get_process_group_ranks(values["group"] or dist.group.WORLD)))
    peer = next((f"peer {values[key]}" for key in ("dst", "src") if values.get(key) is not None), "")
    return " ".join(filter(None, (frame.f_code.co_name, what, "over", ranks, peer)))


def _caller(frame: FrameType, c10d: str) -> str | None:
    """Return the file outside of torch that calls a collective, or None if another collective calls this one."""
    torchs = str(Path(torch.__file__).parent)
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename.startswith(torchs):
        if caller.f_code.co_filename == c10d and caller.f_code.co_name in COLLECTIVES:
            return None
        caller = caller.f_back
    return caller.f_code.co_filename if caller is not None else ""
