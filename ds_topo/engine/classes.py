"""Give one of DeepSpeed's objects a class of ours, and give it its own class back.

An engine on a grid gets a class that derives from a mixin of ours and from its own class, as torch's ``fully_shard``
gives a module a class that derives from ``FSDPModule``. So everything that differs from DeepSpeed is a method, calls
the original by ``super()``, and can be read in one place. Objects that no mixin was given to run DeepSpeed's own code.

Several mixins of one object are independent: each is taken away by itself. The order of their methods is that of
``outermost`` and not that of time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any


class Mixin:
    """The marker of mixins that :func:`adopt` gives to objects; they derive from a class of DeepSpeed, too."""

    outermost = 0
    """Methods of mixins with larger numbers run first, and call those of the others by ``super()``."""
    suffix = ""
    """What is appended to the name of the object's class."""


def stock_class(target: object) -> type:
    """Return the class that an object had before it got mixins."""
    kind = type(target)
    return kind.__bases__[-1] if _MADE in vars(kind) else kind


def mixins_of(target: object) -> tuple[type[Mixin], ...]:
    """Return the mixins of an object, outermost first."""
    kind = type(target)
    return kind.__bases__[:-1] if _MADE in vars(kind) else ()


def adopt(target: Any, mixin: type[Mixin]) -> Callable[[], None]:
    """Give an object a mixin; return the function that takes it away, which is idempotent and keeps no object alive.

    Raises:
        RuntimeError: the object has the mixin already.

    >>> class Stock:
    ...     def step(self): return "stock"
    >>> class OnGrid(Mixin, Stock):
    ...     suffix = "OnGrid"
    ...     def step(self): return f"before, {super().step()}, after"
    >>> target = Stock()
    >>> release = adopt(target, OnGrid)
    >>> target.step(), type(target).__name__, release(), target.step(), type(target).__name__
    ('before, stock, after', 'StockOnGrid', None, 'stock', 'Stock')
    """
    present = mixins_of(target)
    if mixin in present:
        raise RuntimeError(f"{type(target).__name__} has {mixin.__name__} already: release it first")
    _set(target, (*present, mixin))
    reference = weakref.ref(target)

    def release() -> None:
        living = reference()
        if living is not None and mixin in (present := mixins_of(living)):
            _set(living, tuple(each for each in present if each is not mixin))

    return release


def _set(target: Any, mixins: tuple[type[Mixin], ...]) -> None:
    stock = stock_class(target)
    in_order = tuple(sorted(mixins, key=lambda mixin: -mixin.outermost))
    target.__class__ = _made(stock, in_order) if in_order else stock


_MADE = "_ds_topo_made"
"""The attribute of classes that :func:`adopt` has made."""


@cache
def _made(stock: type, mixins: tuple[type[Mixin], ...]) -> type:
    name = stock.__name__ + "".join(mixin.suffix for mixin in reversed(mixins))
    return type(name, (*mixins, stock), {"__module__": stock.__module__, "__doc__": stock.__doc__, _MADE: True})
