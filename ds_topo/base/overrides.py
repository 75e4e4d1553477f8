"""List what classes of ours override in DeepSpeed, for a release that is newer than all tested ones, and for tests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from ds_topo.base.classes import IS_MADE, Mixin
from ds_topo.base.ledger import Row, name_of


@dataclass(frozen=True)
class Override(Row):
    """A method or attribute of DeepSpeed's classes that mixins override."""

    by: str
    """The mixins."""
    why: str


def overridden_by(mixin: type[Mixin]) -> dict[str, type]:
    """Return what a mixin overrides: the names, each with DeepSpeed's class that defines it.

    A method that calls an original by ``super()`` which no class has any more is among them.
    """
    kinds = [kind for kind in mixin.__mro__ if issubclass(kind, Mixin) and kind is not Mixin]
    stock = [kind for kind in mixin.__mro__ if not issubclass(kind, Mixin) and kind is not object]
    found: dict[str, type] = {}
    for name in [name for kind in kinds for name in vars(kind) if not name.startswith("__")]:
        owner = next((kind for kind in stock if name in vars(kind)), None)
        if owner is not None:
            found[name] = owner
        elif stock and _calls_missing(mixin, name, stock[0]):
            found[name] = stock[0]
    return found


def _calls_missing(mixin: type[Mixin], name: str, stock: type[object]) -> bool:
    """Tell whether a method calls ``super().name()``, and no class has it, nor one that derives from ``stock``."""
    innermost = [vars(kind)[name] for kind in mixin.__mro__ if name in vars(kind)][-1]
    code = getattr(inspect.unwrap(innermost), "__code__", None)
    derived = (each for each in stock.__subclasses__() if not issubclass(each, Mixin))
    return code is not None and {"super", name} <= {*code.co_names} and not any(hasattr(each, name) for each in derived)


def overrides() -> tuple[Override, ...]:
    """Return all overrides of this package's mixins that are imported."""
    by_name: dict[tuple[type, str], dict[type, None]] = {}
    for mixin in (each for each in mixins() if each.__module__.startswith("ds_topo.")):
        for name, owner in overridden_by(mixin).items():
            kind = next(kind for kind in mixin.__mro__ if name in vars(kind))
            by_name.setdefault((owner, name), {})[kind] = None
    found = []
    for (owner, name), kinds in sorted(by_name.items(), key=lambda item: (name_of(item[0][0]), item[0][1])):
        by = ", ".join(f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}" for kind in kinds)
        text = inspect.getdoc(vars(next(iter(kinds)))[name]) or ""
        found.append(Override(owner, name, by=by, why=" ".join(text.split("\n\nArgs:")[0].split())))
    return tuple(found)


def mixins(kind: type[Mixin] = Mixin) -> Iterator[type[Mixin]]:
    """Yield the mixins that are imported."""
    for each in kind.__subclasses__():
        if IS_MADE not in vars(each):
            yield each
            yield from mixins(each)
