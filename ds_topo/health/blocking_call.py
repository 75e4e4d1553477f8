"""Tell what the innermost function on a stack calls: a call that waits in C++ has no frame of its own.

The instructions of the function name the object whose method it calls, such as ``self.handle.wait``. The object itself
is looked up without running code of it, since this happens in another thread.
"""

from __future__ import annotations

import dis
from functools import lru_cache, partial
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from torch.futures import Future

_WAITS = (dist.Work, dist.Store, dist.ProcessGroup, Future)
"""Classes whose methods wait for other ranks."""
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""The namespaces of torch's operators that communicate."""
_UNKNOWN = ""
ANY_WAIT = "wait() for a collective"
_METHODS, _NAMES = ("LOAD_METHOD", "LOAD_ATTR"), ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")


def wait_called_by(frame: FrameType) -> str | None:
    """Return the name of a call that waits for other ranks, if the innermost frame is in one; None otherwise."""
    *owners, method = path_called(frame.f_code, frame.f_lasti) or (_UNKNOWN,)
    owner = _found(frame, owners) if owners and owners[0] else None
    if isinstance(owner, _WAITS):
        return ANY_WAIT if isinstance(owner, (dist.Work, Future)) else f"{method}()"
    if operator := communicating_operator(owner):
        return operator
    if (
        owners and owner is None and method in ("wait", "monitored_barrier")
    ):  # of an element of a list, or of a property
        return ANY_WAIT if method == "wait" else f"{method}()"
    if owners:
        return None
    given = frame.f_locals.get(method)  # a function that is an argument of a wrapper
    given = given.func if isinstance(given, partial) else given
    if isinstance(getattr(given, "__self__", None), _WAITS):
        name = str(getattr(given, "__name__", "wait"))
        return ANY_WAIT if name == "wait" else f"{name}()"
    return communicating_operator(given) or None


def communicating_operator(value: object) -> str:
    """Return the name of an operator of torch that communicates; empty for anything else."""
    space, _, name = str(getattr(value, "_qualified_op_name", "") or getattr(value, "_name", "")).partition("::")
    return name.partition(".")[0] if space in _NAMESPACES else ""


@lru_cache(4096)
def path_called(code: CodeType, instruction: int) -> tuple[str, ...]:
    """Return the name that is called at an instruction, with the objects that it is looked up in.

    ``("self", "handle", "wait")`` for ``self.handle.wait(...)``. The first word is empty if the object has no name, as
    in ``handles[0].wait()``. The result is empty if the instruction is no call, or its arguments contain branches.
    """
    each = [one for one in dis.get_instructions(code) if one.offset <= instruction]
    if not each or not each[-1].opname.startswith(("CALL", "PRECALL")):
        return ()
    name, given = each[-1].opname, each[-1].arg or 0
    inputs = 1 + (given & 1) if name == "CALL_FUNCTION_EX" else given + name.endswith("KW")
    at, depth = len(each) - 2, 0
    if at >= 0 and each[at].opname == "PRECALL":
        at -= 1
    # the first instruction, backwards, after which only the arguments have not been pushed has pushed what is called
    while at >= 0 and (depth != -inputs or each[at].opname == "PUSH_NULL"):
        inputs += depth == -inputs
        try:
            depth -= dis.stack_effect(each[at].opcode, each[at].arg)
        except ValueError:
            return ()
        at -= 1
    path: list[str] = []
    while at >= 0 and each[at].opname in _METHODS:
        path.append(str(each[at].argval))
        at -= 1
    is_named = at >= 0 and each[at].opname.startswith(_NAMES) and isinstance(each[at].argval, str)
    if not path and not is_named:
        return ()
    return (each[at].argval if is_named else _UNKNOWN, *reversed(path))


def _found(frame: FrameType, path: list[str]) -> Any:
    """Look an object up as ``path`` says; None if it cannot be found without running code of its class."""
    values = frame.f_locals
    found = values[path[0]] if path[0] in values else frame.f_globals.get(path[0])
    for name in path[1:]:
        found = getattr(found, "__dict__", {}).get(name)
    return found
