"""Build frozen dataclasses from JSON: every entry has the type that its field declares, and none is unknown.

Ranges are checked by the dataclasses themselves, in ``__post_init__``. Together they make sure that code which gets a
value need not check it again, whoever wrote the JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeAlias, get_args, get_origin, get_type_hints

from ds_topo.errors import abridged, listed

_LARGEST = 1 << 63
"""Numbers are below it, as sizes of files and tensors are; larger ones would be slow to multiply and to print."""

Builder: TypeAlias = Callable[[Any], Any]
"""A function that returns what ``json.loads`` has returned as a value of one type, or raises ``ValueError``."""


def built_from(kind: Any, value: Any) -> Any:
    """Return JSON as a value of a type: a dataclass, a tuple, a mapping of names, a number, a name or None.

    >>> from ds_topo.checkpoint.manifest import SavedSplit
    >>> built_from(dict[str, SavedSplit], {"weight": {"dim": 0}})
    {'weight': SavedSplit(dim=0, stride=1, real=None, padded=None)}
    >>> built_from(dict[str, SavedSplit], {"weight": {"dim": "0"}})
    Traceback (most recent call last):
    ...
    ValueError: weight.dim: '0' is not an int

    Args:
        kind: the type.
        value: what ``json.loads`` has returned.

    Raises:
        ValueError: a value has another type, a number is too large, a text cannot be printed, an entry is missing or
            unknown, or a dataclass refuses its fields. The message begins with the place of the value.
    """
    try:
        return _builder_of(kind)(value)
    except _InsideError as error:
        raise ValueError(str(error)) from None


@cache
def _builder_of(kind: Any) -> Builder:
    """Return the builder of a type. It is made once, since a manifest may have a million entries."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record_builder(kind)
    if origin is UnionType:
        build = _builder_of(next(one for one in arguments if one is not NoneType))
        return lambda value: None if value is None else build(value)
    if origin is tuple:
        return _tuple_builder(_builder_of(arguments[0]))
    if origin is not None:
        return _mapping_builder(_builder_of(arguments[1]))
    return {int: _number, str: _text, bool: _flag}[kind]


def _record_builder(kind: Any) -> Builder:
    types = get_type_hints(kind)
    builders = {one.name: _builder_of(types[one.name]) for one in fields(kind)}
    required = [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]

    def build(value: Any) -> Any:
        _require_mapping(value)
        name = ""
        found = {}
        try:
            for name, one in value.items():
                found[name] = builders[name](one)
        except KeyError:
            raise ValueError(f"no entry {abridged(name)} is known: there are {listed([*builders], 20)}") from None
        except ValueError as error:
            _raise_at(name, error)
        for name in required:
            if name not in found:
                raise ValueError(f"{name} is missing")
        return kind(**found)

    return build


def _tuple_builder(build_one: Builder) -> Builder:
    def build(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{abridged(value)} is not a list")
        found: list[Any] = []
        try:
            found.extend(map(build_one, value))
        except ValueError as error:
            _raise_at(f"[{len(found)}]", error)
        return tuple(found)

    return build


def _mapping_builder(build_one: Builder) -> Builder:
    def build(value: Any) -> Any:
        _require_mapping(value)
        found, name = {}, ""
        try:
            for name, one in value.items():
                found[_text(name)] = build_one(one)
        except ValueError as error:
            _raise_at(name, error)
        return found

    return build


def _require_mapping(value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{abridged(value)} is not an object")


def _number(value: Any) -> int:
    if type(value) is not int:  # True is an int, and no size
        raise ValueError(f"{abridged(value)} is not an int")
    if not -_LARGEST < value < _LARGEST:
        raise ValueError(f"{abridged(value)} is too large")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{abridged(value)} is not a str")
    if not value.isprintable():
        raise ValueError(f"{abridged(value)} has characters that cannot be printed")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{abridged(value)} is not a bool")
    return value


class _InsideError(ValueError):
    """An error of a value inside another one, with its place."""

    def __init__(self, place: str, reason: str) -> None:
        self.place, self.reason = place, reason
        super().__init__(f"{place}: {reason}")


def _raise_at(name: str, error: ValueError) -> NoReturn:
    """Raise the error of a value with the name under which another value holds it."""
    if not isinstance(error, _InsideError):
        raise _InsideError(name, str(error)) from None
    place = error.place if error.place.startswith("[") else f".{error.place}"
    raise _InsideError(f"{name}{place}", error.reason) from None
