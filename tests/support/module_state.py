"""Restore the data of a package's modules after a function, and report changes that cannot be restored."""

from __future__ import annotations

import re
import sys
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

Owner: TypeAlias = ModuleType | type
Change: TypeAlias = tuple[Owner, str, Any, Any]
"""The owner and name of a changed attribute, its former value and its present one."""
CONTAINERS = (dict, list, set)
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Addresses in representations would make equal reports of two ranks differ."""


class ModuleState:
    """The state of modules and their classes when they were first seen; :meth:`put_back` restores it.

    Args:
        packages: The packages whose modules are watched.
        strict: One of the packages. A function must not change the attributes of objects in its modules either.
    """

    def __init__(self, packages: tuple[str, ...], strict: str) -> None:
        self._packages, self._strict = packages, strict
        self._seen: set[str] = set()
        self._names: dict[Owner, dict[str, Any]] = {}
        self._containers: list[tuple[Any, Any]] = []
        """The containers among the values, each with a copy."""
        self._owned: list[tuple[str, Any]] = []
        """Each object of the strict package once, under its shortest path."""
        self._objects: list[tuple[str, Any, dict[str, Any]]] = []
        """The same, with the attributes at the last ``note()``."""

    def note(self) -> None:
        """Start to watch the modules that were imported since the last call."""
        new = sys.modules.keys() - self._seen
        for name in new:
            module = sys.modules[name]
            if name.partition(".")[0] in self._packages and isinstance(module, ModuleType):
                self._watch(module)
                for value in vars(module).values():
                    if isinstance(value, type) and value.__module__ == name:
                        self._watch(value)
        self._seen |= new
        if self._strict in map(_package_of, new):
            self._owned = self._strict_objects()
        self._objects = [(path, owned, _attributes_of(owned)) for path, owned in self._owned]

    def changes(self) -> list[Change]:
        """Find every name that has another value than at first."""
        return [
            (owner, name, before, vars(owner).get(name))
            for owner, names in self._names.items()
            if not all(map(is_, names.values(), map(vars(owner).get, names)))  # fast: few owners have a change
            for name, before in names.items()
            if vars(owner).get(name) is not before
        ]

    def put_back(self, changes: list[Change]) -> None:
        """Restore these names, and the content of every container."""
        for owner, name, before, _ in changes:
            setattr(owner, name, before)
        for container, before in self._containers:
            if _is_same(before, container):
                continue
            if isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                container.update(before)

    def left(self, changes: list[Change]) -> list[str]:
        """Describe the changes that a function must undo itself."""
        replaced = [
            f"{_path_of(owner)}.{name} is still replaced"
            for owner, name, before, now in changes
            if isinstance(before, (FunctionType, type)) or isinstance(now, FunctionType)
        ]
        held = [
            f"{path}.{name} is now {ADDRESS.sub('', repr(value)):.200}"
            for path, owned, before in self._objects
            for name, value in vars(owned).items()
            if not _is_same(before.get(name), value)
        ]
        return held + replaced

    def _watch(self, owner: Owner) -> None:
        names = {name: value for name, value in vars(owner).items() if not name.startswith("__")}
        self._names[owner] = names
        self._containers += [(value, value.copy()) for value in names.values() if isinstance(value, CONTAINERS)]

    def _strict_objects(self) -> list[tuple[str, Any]]:
        paths = {
            id(value): (f"{owner.__name__}.{name}", value)
            for owner in sorted(self._names, key=lambda owner: -len(owner.__name__))
            if isinstance(owner, ModuleType) and _package_of(owner.__name__) == self._strict
            for name, value in self._names[owner].items()
            if _package_of(type(value).__module__) == self._strict and hasattr(value, "__dict__")
        }
        return list(paths.values())


def _attributes_of(owned: Any) -> dict[str, Any]:
    """Return the attributes of an object, with copies of containers."""
    return {name: value.copy() if isinstance(value, CONTAINERS) else value for name, value in vars(owned).items()}


def _is_same(before: Any, now: Any) -> bool:
    """Check that two values are the same object, or containers of the same objects."""
    if type(before) is not type(now) or not isinstance(now, CONTAINERS):
        return before is now
    if isinstance(now, set):
        return bool(before == now)
    if isinstance(now, dict):
        return list(before) == list(now) and all(before[key] is value for key, value in now.items())
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))


def _package_of(module: str) -> str:
    return module.partition(".")[0]


def _path_of(owner: Owner) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
