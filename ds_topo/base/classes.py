"""Give one of DeepSpeed's objects a class of ours, and give it its own class back.

An engine on a grid gets a class that derives from a mixin of ours and from its own class, as torch's ``fully_shard``
gives a module a class that derives from ``FSDPModule``. So everything that differs from DeepSpeed is a method, calls
the original by ``super()``, and can be read in one place. Objects that no mixin was given to run DeepSpeed's own code.

Several mixins of one object are independent: each is taken away by itself. The order of their methods is that of
``mixin_order`` and not that of time.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any

CALLED_BY_PROGRAMS = frozenset(
    [
        *("allreduce_gradients", "backward", "clip_fp32_gradients", "coalesce_grad_reduction", "compile"),
        *("deepspeed_io", "destroy", "eval_batch", "forward", "has_overflow"),
        *("load_checkpoint", "load_state_dict", "offload_states", "reset_activation_shape", "save_16bit_model"),
        *("save_checkpoint", "set_train_batch_size", "set_train_micro_batch_size", "state_dict", "step"),
        *("train_batch", "zero_grad"),
    ]
)
"""The methods of engines and optimizers that programs call. DeepSpeed itself calls all others."""
_SUFFIXES = ("OnGrid", "Reduced", "Recorded", "Replicated")
ON_GRID, REDUCED, RECORDED, REPLICATED = range(len(_SUFFIXES))
"""Orders of the methods of mixins, from the innermost on: of a grid, a reducer, a recorder, and replicas that
are jobs of their own. The name of an object's class gets a suffix for each.
"""


class Mixin:
    """The marker of mixins that :func:`adopt` gives to objects; they derive from a class of DeepSpeed, too."""

    mixin_order = ON_GRID
    """Methods of mixins with larger numbers run first, and call those of the others by ``super()``."""
    mixin_state = ""
    """The name of the object's attribute that these methods use; it goes with the mixin."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the object as one without mixins: what these use belongs to one object of one process."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, content, *others = reduced
        make = _new if make is copyreg.__newobj__ else make  # type: ignore[attr-defined]
        states = {mixin.mixin_state for mixin in mixins_of(self)}
        arguments = tuple(stock_class(self) if each is type(self) else each for each in arguments)
        if isinstance(content, dict):
            content = {name: value for name, value in content.items() if name not in states}
        return make, arguments, content, *others


def _new(kind: type, *arguments: Any) -> Any:
    """Do what ``copyreg.__newobj__`` does, which pickle refuses for another class than the object's."""
    return kind.__new__(kind, *arguments)


def stock_class(target: object) -> type:
    """Return the class that an object had before it got mixins."""
    kind = type(target)
    return kind.__bases__[-1] if IS_MADE in vars(kind) else kind


def mixins_of(target: object) -> tuple[type[Mixin], ...]:
    """Return the mixins of an object, outermost first."""
    kind = type(target)
    return kind.__bases__[:-1] if IS_MADE in vars(kind) else ()


def adopt(target: Any, *mixins: type[Mixin]) -> Callable[[], None]:
    """Give an object mixins; return the function that takes them away, which is idempotent and keeps no object alive.

    Of mixins of the same order, the methods of the first one given run first, and those of earlier calls last.

    Raises:
        RuntimeError: the object has one of them already.

    >>> class Stock:
    ...     def step(self): return "stock"
    >>> class OnGrid(Mixin, Stock):
    ...     def step(self): return f"before, {super().step()}, after"
    >>> target = Stock()
    >>> release = adopt(target, OnGrid)
    >>> target.step(), type(target).__name__, release(), target.step(), type(target).__name__
    ('before, stock, after', 'StockOnGrid', None, 'stock', 'Stock')
    """
    present = mixins_of(target)
    for mixin in mixins:
        if mixin in present:
            raise RuntimeError(f"{type(target).__name__} has {mixin.__name__} already: release it first")
    _set(target, (*mixins, *present))
    reference = weakref.ref(target)

    def release() -> None:
        living = reference()
        if living is not None and not set(mixins).isdisjoint(present := mixins_of(living)):
            _set(living, tuple(each for each in present if each not in mixins))
            for mixin in mixins:
                vars(living).pop(mixin.mixin_state, None)

    return release


def _set(target: Any, mixins: tuple[type[Mixin], ...]) -> None:
    stock = stock_class(target)
    in_order = tuple(sorted(mixins, key=lambda mixin: -mixin.mixin_order))
    target.__class__ = _made(stock, in_order) if in_order else stock


IS_MADE = "ds_topo_is_made"
"""An attribute of the classes that :func:`adopt` makes."""


@cache
def _made(stock: type, mixins: tuple[type[Mixin], ...]) -> type:
    name = stock.__name__ + "".join(_SUFFIXES[order] for order in sorted({mixin.mixin_order for mixin in mixins}))
    content = {"__module__": stock.__module__, "__doc__": stock.__doc__, IS_MADE: True}
    made = type(name, (*mixins, stock), content)
    for method in CALLED_BY_PROGRAMS:
        owner = next((kind for kind in made.__mro__[1:] if method in vars(kind)), object)
        if issubclass(owner, Mixin) and isinstance(vars(owner)[method], FunctionType):
            setattr(made, method, _while_made(made, method, vars(owner)[method]))
    return made


def _while_made(made: type, name: str, method: FunctionType) -> Any:
    """Return a method that works after its mixins were taken away: a program may have kept it, to wrap it."""

    @wraps(method)
    def called(self: Any, *arguments: Any, **options: Any) -> Any:
        if type(self) is made:
            return method(self, *arguments, **options)
        return getattr(type(self), name)(self, *arguments, **options)

    return called
