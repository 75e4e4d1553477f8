"""What a function may change in the modules of a package: their data is put back, the rest is told."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

Owner: TypeAlias = ModuleType | type
Change: TypeAlias = tuple[Owner, str, Any, Any]
"""Owner and name of what is another value now, the former value and the one now."""
CONTAINERS = (dict, list, set)
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In a representation: it would make equal reports of ranks differ."""


class ModuleState:
    """Modules and their classes as they were when they were first seen; :meth:`put_back` keeps them so.

    Args:
        packages: whose modules are watched.
        told: one of them; the attributes of the objects in its modules must be what they were, too.
    """

    def __init__(self, packages: tuple[str, ...], told: str) -> None:
        self._packages, self._told = packages, told
        self._seen: set[str] = set()
        self._names: dict[Owner, dict[str, Any]] = {}
        self._containers: list[tuple[Any, Any]] = []
        """Those among the values, each with a copy."""
        self._objects: list[tuple[str, Any, dict[str, Any]]] = []
        """Import path of every object that is told, the object, and its attributes at the last ``note()``."""

    def note(self) -> None:
        """Watch the modules that were imported since the last time, too."""
        for name in sys.modules.keys() - self._seen:
            module = sys.modules[name]
            if name.partition(".")[0] in self._packages and isinstance(module, ModuleType):
                self._watch(module)
                for value in vars(module).values():
                    if isinstance(value, type) and value.__module__ == name:
                        self._watch(value)
        self._seen |= sys.modules.keys()
        self._objects = [(path, owned, _attributes_of(owned)) for path, owned in self._objects_to_tell()]

    def left(self) -> list[str]:
        """What a function left behind that only itself could have taken back."""
        replaced = [
            f"{_path_of(owner)}.{name} is still replaced"
            for owner, name, before, now in self._changes()
            if isinstance(before, (FunctionType, type)) or isinstance(now, FunctionType)
        ]
        held = [
            f"{path}.{name} is now {ADDRESS.sub('', repr(value)):.200}"
            for path, owned, before in self._objects
            for name, value in vars(owned).items()
            if not _is_same(before.get(name), value)
        ]
        return held + replaced

    def put_back(self) -> None:
        """Give every name its former value and every container its former content."""
        for owner, name, before, _ in self._changes():
            setattr(owner, name, before)
        for container, before in self._containers:
            if _is_same(before, container):
                continue
            if isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                container.update(before)

    def _watch(self, owner: Owner) -> None:
        names = {name: value for name, value in vars(owner).items() if not name.startswith("__")}
        self._names[owner] = names
        self._containers += [(value, value.copy()) for value in names.values() if isinstance(value, CONTAINERS)]

    def _changes(self) -> list[Change]:
        return [
            (owner, name, before, vars(owner).get(name))
            for owner, names in self._names.items()
            for name, before in names.items()
            if vars(owner).get(name) is not before
        ]

    def _objects_to_tell(self) -> Iterator[tuple[str, Any]]:
        """Each object once, under the shortest of its paths."""
        paths = {
            id(value): (f"{owner.__name__}.{name}", value)
            for owner in sorted(self._names, key=lambda owner: -len(owner.__name__))
            if isinstance(owner, ModuleType) and _package_of(owner.__name__) == self._told
            for name, value in self._names[owner].items()
            if _package_of(type(value).__module__) == self._told and hasattr(value, "__dict__")
        }
        yield from paths.values()


def _attributes_of(owned: Any) -> dict[str, Any]:
    """The attributes of an object, with copies of containers."""
    return {name: value.copy() if isinstance(value, CONTAINERS) else value for name, value in vars(owned).items()}


def _is_same(before: Any, now: Any) -> bool:
    """Whether two values are one, or containers with the same content."""
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
