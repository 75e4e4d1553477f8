"""Build frozen dataclasses from JSON: every entry has the type that its field declares, and none is unknown.

Ranges are checked by the dataclasses themselves, in ``__post_init__``. Together they make sure that code which gets a
value need not check it again, whoever wrote the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ds_topo.errors import abridged, listed

_LARGEST = 1 << 63
"""Numbers are below it, as sizes of files and tensors are; larger ones would be slow to multiply and to print."""


def built_from(kind: Any, value: Any, where: str = "") -> Any:
    """Return JSON as a value of a type: a dataclass, a tuple, a mapping of names, a number, a name or None.

    >>> from ds_topo.checkpoint.manifest import SavedSplit
    >>> built_from(dict[str, SavedSplit], {"weight": {"dim": 0}})
    {'weight': SavedSplit(dim=0, stride=1)}
    >>> built_from(dict[str, SavedSplit], {"weight": {"dim": "0"}})
    Traceback (most recent call last):
    ...
    ValueError: weight.dim: '0' is not an int

    Args:
        kind: the type.
        value: what ``json.loads`` has returned.
        where: the place of the value in the JSON, for messages.

    Raises:
        ValueError: a value has another type, a number is too large, a text cannot be printed, an entry is missing or
            unknown, or a dataclass refuses its fields.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record(kind, _mapping(value, where), where)
    if origin is UnionType:
        other = next(one for one in arguments if one is not NoneType)
        return None if value is None else built_from(other, value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where}: {abridged(value)} is not a list")
        return tuple(built_from(arguments[0], one, f"{where}[{number}]") for number, one in enumerate(value))
    if origin is not None:
        known = _mapping(value, where).items()
        return {_text(key, where): built_from(arguments[1], one, _place(where, key)) for key, one in known}
    if type(value) is not kind:  # True is an int, and no size
        raise ValueError(f"{where}: {abridged(value)} is not {'an' if kind is int else 'a'} {kind.__name__}")
    if kind is int and abs(value) >= _LARGEST:
        raise ValueError(f"{where}: {abridged(value)} is too large")
    return _text(value, where) if kind is str else value


@cache
def _types_of(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field, and whether it must be given."""
    types = get_type_hints(kind)
    return {
        one.name: (types[one.name], one.default is MISSING and one.default_factory is MISSING) for one in fields(kind)
    }


def _record(kind: Any, value: Mapping[str, Any], where: str) -> Any:
    types = _types_of(kind)
    if unknown := [name for name in value if name not in types]:
        raise ValueError(
            f"{where or kind.__name__} has no entry {abridged(unknown[0])}: there are {listed([*types], 20)}"
        )
    if missing := [name for name, (_, is_required) in types.items() if is_required and name not in value]:
        raise ValueError(f"{_place(where, missing[0])} is missing")
    found = {name: built_from(types[name][0], one, _place(where, name)) for name, one in value.items()}
    try:
        return kind(**found)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {abridged(value)} is not an object")
    return value


def _text(value: str, where: str) -> str:
    if not value.isprintable():
        raise ValueError(f"{where}: {abridged(value)} has characters that cannot be printed")
    return value


def _place(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
