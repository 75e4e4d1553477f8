"""Patch names of other libraries, and restore them exactly.

A *patch* is a name of another library that has another value for a while. A *reliance* is a name that ds_topo reads,
calls or overrides without replacing it, and that may vanish: a private one, or one of an object's internals. A name
needs no row if all supported releases document it, as torch does the methods of its stores, or if ds_topo only forwards
a program's call to it, as ``ds_topo.groups`` does. ``ds_topo.base.torch_names`` lists the rows of torch,
``ds_topo.base.patches`` those of DeepSpeed; ``python -m tests.names`` prints both.

``ledger.bind`` puts a patch in force and returns the function that takes it back. A patch binds to one object wherever
that works. A patch of a class or module must state on its row why it is process-wide. Holders of a patch are counted:
the first one binds and the last one restores.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from pkgutil import resolve_name
from textwrap import dedent
from types import ModuleType
from typing import Any, TypeAlias

Make: TypeAlias = Callable[[Any], Any]
"""A function that builds the replacement from the original: ``original -> replacement``."""
Release: TypeAlias = Callable[[], None]
"""A function that takes a patch back. It is idempotent."""
ONE_CALL = "one call"
"""The start of ``Patch.during`` of every patch that is in force during a single call only."""


@dataclass(frozen=True)
class Row:
    """A name of another library on which ds_topo depends."""

    owner: type | ModuleType
    """The class or module that has the name, or the class of the objects that are patched one by one."""
    name: str
    releases: str = field(default="all", kw_only=True)
    """The releases of the library that need the row."""

    def __str__(self) -> str:
        return f"{name_of(self.owner)}.{self.name}"


@dataclass(frozen=True)
class Patch(Row):
    """A name of another library that has another value for a while."""

    instead: str
    """A sentence about the replacement."""
    why: str
    during: str
    """The time for which the patch is in force; starts with ``ONE_CALL`` if that is a single call."""
    process_wide: str = ""
    """Why the patch changes a class or module for longer than one call; empty if it changes single objects."""


@dataclass(frozen=True)
class Reliance(Row):
    """A private name of another library that ds_topo reads, calls or overrides."""

    use: str


class Absent:
    """The base of the classes that stand for what the installed release lacks."""


def find(path: str) -> Any:
    """Return a module, class or function by its import path, or an empty class if the installed release lacks it.

    No object is an instance of the empty class. It has the path as its name.

    >>> find("builtins.dict"), name_of(find("torch.absent.Class"))
    (<class 'dict'>, 'torch.absent.Class')
    """
    try:
        return resolve_name(path)
    except (ModuleNotFoundError, AttributeError):
        module, _, name = path.rpartition(".")
        return type(name, (Absent,), {"__module__": module})


def is_absent(value: object) -> bool:
    """Tell whether :func:`find` has returned an empty class.

    >>> is_absent(find("builtins.dict")), is_absent(find("builtins.absent"))
    (False, True)
    """
    return isinstance(value, type) and issubclass(value, Absent)


def read_table(table: str) -> Iterator[tuple[type | ModuleType, str, str, str]]:
    """Yield the owner, the name, the use and the releases of each row of a table of reliances.

    A line without indentation has the import path of a class or module, or of several that have the same names. The
    lines below it say ``name: its use``, or ``name >=1.2: its use`` if only these releases have the name.

    >>> [*read_table('''
    ...     builtins.dict
    ...       keys >=1.2: lists the keys
    ... ''')]
    [(<class 'dict'>, 'keys', 'lists the keys', '>=1.2')]
    """
    owners: list[type | ModuleType] = []
    for line in dedent(table).strip().splitlines():
        if line.startswith("  "):
            name, _, use = line.strip().partition(": ")
            name, _, releases = name.partition(" ")
            yield from ((owner, name, use, releases or "all") for owner in owners)
        else:
            owners = [find(path) for path in line.split()]


def always(value: object) -> Make:
    """Return a make function that ignores the original.

    >>> always(3)("original")
    3
    """
    return lambda _: value


def around(replacement: Callable[..., Any]) -> Make:
    """Return a make function of ``replacement(original, *arguments)``; use it as a decorator.

    >>> around(lambda length, text: 2 * length(text))(len)("ab")
    4
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def replaced(*args: Any, **options: Any) -> Any:
            return replacement(original, *args, **options)

        return replaced

    return make


def name_of(owner: type | ModuleType) -> str:
    """Return the import path of a class or module."""
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def exists(row: Row) -> bool:
    """Tell whether the installed release has the name, as an attribute or assigned somewhere in the class.

    >>> exists(Reliance(dict, "keys", "")), exists(Reliance(dict, "absent", ""))
    (True, False)
    """
    if hasattr(row.owner, row.name):
        return True
    kinds = inspect.getmro(row.owner) if isinstance(row.owner, type) else ()
    name = re.sub(r"^_[A-Z]\w*?(?=__)", "", row.name)  # as the class itself writes it
    assigned = re.compile(rf"\.{name}\b\s*(:[^=\n]+)?=(?!=)|\.{name}\b\s*[,)].*=")
    return any(row.name in vars(kind).get("__annotations__", ()) or assigned.search(_source(kind)) for kind in kinds)


@dataclass(eq=False)
class _Binding:
    """A patch in force."""

    patch: Patch
    make: Make
    owner: Any
    found: Any
    """The owner's own value before, or ``_ABSENT`` if it had none."""
    replacement: Any
    holders: int = 1


class Ledger:
    """The one owner of what is patched in other libraries."""

    def __init__(self) -> None:
        self._bindings: dict[tuple[int, str], _Binding] = {}

    def bind(self, patch: Patch, make: Make, owner: object = None) -> Release:
        """Put a patch in force; return the function that takes it back.

        Args:
            patch: the row.
            make: builds the replacement from the original. Other holders of the same patch must pass the same.
            owner: the object to patch, which lives until the release. By default the row's class or module is patched,
                for the whole process.

        Raises:
            ValueError: the row does not say why the patch is process-wide.
            RuntimeError: the name does not exist in the installed release, or has another replacement already.

        >>> class Clock:
        ...     def time(self): return 1
        >>> row = Patch(Clock, "time", "Twice the time.", "It is an example.", "an example", process_wide="an example")
        >>> release = ledger.bind(row, lambda time: lambda clock: 2 * time(clock))
        >>> Clock().time(), release(), release(), Clock().time()
        (2, None, None, 1)
        """
        if owner is None and not patch.process_wide and not patch.during.startswith(ONE_CALL):
            raise ValueError(f"{patch} is patched for the whole process: say why in process_wide=, or pass owner=")
        target = patch.owner if owner is None else owner
        key = (id(target), patch.name)
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = _Binding(patch, make, target, *_replace(target, patch, make))
        elif binding.make is make:
            binding.holders += 1
        else:
            raise RuntimeError(
                f"{patch} has a replacement already ({binding.patch.instead}) and cannot have two at a time"
            )
        pending = [binding]

        def release() -> None:
            if pending:
                pending.pop().holders -= 1
                if not binding.holders:
                    del self._bindings[key]
                    _restore(binding)

        return release

    @contextmanager
    def bound(self, patch: Patch, make: Make, owner: object = None) -> Iterator[None]:
        """Put a patch in force inside a ``with`` statement."""
        release = self.bind(patch, make, owner)
        try:
            yield
        finally:
            release()

    def in_force(self) -> list[Patch]:
        """Return the patches that are in force now."""
        return [binding.patch for binding in self._bindings.values()]


ledger = Ledger()
_ABSENT = object()


def _replace(owner: Any, patch: Patch, make: Make) -> tuple[Any, Any]:
    """Set the name to its replacement; return the owner's own value before, and the replacement."""
    found = vars(owner).get(patch.name, _ABSENT)
    is_there = found is not _ABSENT or hasattr(owner, patch.name)
    if not is_there and (owner is patch.owner or not exists(patch)):  # an instance may get it later
        raise RuntimeError(
            f"{patch} does not exist in the installed release, but ds_topo patches it. Replacement: {patch.instead} "
            f"Reason: {patch.why} Use the newest release that README.md names"
        )
    replacement = make(getattr(owner, patch.name, None) if found is _ABSENT else found)
    setattr(owner, patch.name, replacement)
    return found, replacement


def _restore(binding: _Binding) -> None:
    """Put back what was found, unless another library has replaced the name since."""
    owner, patch = binding.owner, binding.patch
    current = vars(owner).get(patch.name, _ABSENT)
    if current is binding.replacement and binding.found is _ABSENT:
        delattr(owner, patch.name)
    elif current is binding.replacement:
        setattr(owner, patch.name, binding.found)
    elif current is not binding.found:
        warnings.warn(
            f"{patch} was replaced by another library while ds_topo patched it ({patch.during}), and stays as it is: "
            "restore that replacement first",
            RuntimeWarning,
            stacklevel=3,
        )


@cache
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
