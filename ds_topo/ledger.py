"""What is changed in torch and DeepSpeed while something of ours is at work, and how it is put back.

A *change* is a row: a name of another library that has another value for a while. A *reliance* is a private name that
is only read, called or overridden. ``ds_topo.process_groups.torch_names`` has the rows of torch,
``ds_topo.engine.changes`` those of DeepSpeed; ``python -m ds_topo.engine`` prints both. Whoever needs a change in force
binds it here and gets the function that takes it back. Changes of classes and modules are counted: the first holder
binds, the last one restores.
"""

from __future__ import annotations

import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

Make: TypeAlias = Callable[[Any], Any]
"""What stands there, from what stood there: ``original -> replacement``."""
Release: TypeAlias = Callable[[], None]
"""Takes a change back. Idempotent."""


@dataclass(frozen=True)
class Change:
    """A name of another library that has another value for a while."""

    owner: type | ModuleType
    """The class or module that it belongs to; or the class of the objects that get it one by one."""
    name: str
    instead: str
    """What stands there meanwhile."""
    why: str
    during: str
    """For how long."""
    releases: str = "all"
    """The library's releases that need it."""

    def __str__(self) -> str:
        return f"{name_of(self.owner)}.{self.name}"


@dataclass(frozen=True)
class Reliance:
    """A private name of another library that is read, called or overridden."""

    owner: type | ModuleType
    name: str
    use: str
    releases: str = "all"

    def __str__(self) -> str:
        return f"{name_of(self.owner)}.{self.name}"


def always(value: object) -> Make:
    """A replacement that does not depend on the original.

    >>> always(3)("original")
    3
    """
    return lambda _: value


def name_of(owner: type | ModuleType) -> str:
    """The import path of a class or module."""
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def exists(row: Change | Reliance) -> bool:
    """Whether the installed release has the name: as an attribute, or assigned somewhere in the class.

    >>> exists(Reliance(dict, "keys", "")), exists(Reliance(dict, "absent", ""))
    (True, False)
    """
    if hasattr(row.owner, row.name):
        return True
    kinds = inspect.getmro(row.owner) if isinstance(row.owner, type) else ()
    assigned = re.compile(rf"\.{row.name}\b\s*(:[^=\n]+)?=(?!=)|\.{row.name}\b\s*[,)].*=")
    return any(row.name in vars(kind).get("__annotations__", ()) or assigned.search(_source(kind)) for kind in kinds)


@dataclass(eq=False)
class _InForce:
    """A change of a class or module, and how many hold it."""

    change: Change
    make: Make
    put_back: Release
    holders: int = 0


class Ledger:
    """The one owner of what is changed in other libraries."""

    def __init__(self) -> None:
        self._in_force: dict[tuple[int, str], _InForce] = {}

    def bind(self, change: Change, make: Make, owner: object = None) -> Release:
        """Put a change in force; return what takes it back.

        Args:
            change: the row.
            make: the replacement from the original. Other holders must bring the same one.
            owner: the one object that gets it, in place of the row's class or module; it is not kept alive.

        Raises:
            RuntimeError: the name does not exist in the installed release, or has another replacement already.

        >>> class Clock:
        ...     def time(self): return 1
        >>> row = Change(Clock, "time", "twice as much", "an example", "an example")
        >>> release = ledger.bind(row, lambda time: lambda clock: 2 * time(clock))
        >>> Clock().time(), release(), release(), Clock().time()
        (2, None, None, 1)
        """
        if owner is not None:
            return _once(_replace(owner, change, make))
        key = (id(change.owner), change.name)
        entry = self._in_force.get(key)
        if entry is None:
            entry = self._in_force[key] = _InForce(change, make, _replace(change.owner, change, make))
        elif entry.make is not make:
            raise RuntimeError(
                f"{change} is replaced already, by {entry.change.instead}: it cannot be by two at a time"
            )
        entry.holders += 1

        def release() -> None:
            entry.holders -= 1
            if entry.holders == 0:
                del self._in_force[key]
                entry.put_back()

        return _once(release)

    @contextmanager
    def bound(self, change: Change, make: Make, owner: object = None) -> Iterator[None]:
        """A change in force inside a ``with`` statement."""
        release = self.bind(change, make, owner)
        try:
            yield
        finally:
            release()

    def in_force(self) -> list[Change]:
        """The changes of classes and modules that have holders now."""
        return [entry.change for entry in self._in_force.values()]


ledger = Ledger()


def _replace(owner: Any, change: Change, make: Make) -> Release:
    """Set the name; return what restores it exactly: its value, or its absence from the owner itself."""
    own = vars(owner)
    was_own = change.name in own
    is_there = was_own or hasattr(owner, change.name)
    if not is_there and (owner is change.owner or not exists(change)):  # an instance may get it later
        raise RuntimeError(
            f"{change} does not exist in the installed release, but ds_topo replaces it by {change.instead}: "
            f"{change.why}. Use the newest release that README.md names; python -m ds_topo.engine shows what else is "
            "missing"
        )
    original = own[change.name] if was_own else getattr(owner, change.name, None)
    replacement = make(original)
    setattr(owner, change.name, replacement)
    reference = _reference(owner)

    def put_back() -> None:
        target = reference()
        if target is None:
            return
        current = vars(target).get(change.name)
        if current is original:
            return
        if current is not replacement:
            warnings.warn(
                f"{change} was replaced by someone else, too, and stays as it is: take that back before ds_topo's "
                f"({change.during})",
                RuntimeWarning,
                stacklevel=3,
            )
        elif was_own:
            setattr(target, change.name, original)
        else:
            delattr(target, change.name)

    return put_back


def _reference(owner: Any) -> Callable[[], Any]:
    if isinstance(owner, (type, ModuleType)):
        return lambda: owner
    return weakref.ref(owner)


def _once(release: Release) -> Release:
    pending = [release]

    def release_once() -> None:
        if pending:
            pending.pop()()

    return release_once


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
