"""Objects get mixins and lose them again, in any order; their own class comes back, and nothing keeps them alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import nn

from ds_topo.base.classes import Mixin, adopt, mixins_of, stock_class
from ds_topo.base.overrides import overridden_by


class Stock:
    """The class of another library, whose methods call each other."""

    def __init__(self) -> None:
        self.name = "stock"

    def train(self) -> list[str]:
        return [*self.step(), "train"]

    def step(self) -> list[str]:
        return ["step"]


class Outer(Mixin, Stock):
    mixin_order = 2

    def step(self) -> list[str]:
        return ["outer", *super().step()]


class Middle(Mixin, Stock):
    mixin_order = 1

    def step(self) -> list[str]:
        return ["middle", *super().step()]


class Inner(Mixin, Stock):
    def step(self) -> list[str]:
        return ["inner", *super().step()]


class Renamed(Mixin, Stock):
    def step(self) -> list[str]:
        return super().step()

    def own(self) -> list[str]:
        return self.step()

    def gone(self) -> list[str]:
        return super().gone()  # type: ignore[misc]


class Derived(Stock):
    """A program's own subclass."""

    def step(self) -> list[str]:
        return ["derived", *super().step()]


ORDER = (Outer, Middle, Inner)


@pytest.mark.parametrize("adopted", list(permutations(ORDER)))
def test_methods_run_outermost_first_whenever_adopted(adopted: tuple[type[Mixin], ...]) -> None:
    target = Stock()
    for mixin in adopted:
        adopt(target, mixin)
    assert target.train() == ["outer", "middle", "inner", "step", "train"]
    assert mixins_of(target) == ORDER
    assert type(target).__name__ == "StockOnGridReducedRecorded"


@pytest.mark.parametrize("released", list(permutations(ORDER)))
def test_mixins_are_taken_away_in_any_order(released: tuple[type[Mixin], ...]) -> None:
    target = Stock()
    releases = {mixin: adopt(target, mixin) for mixin in ORDER}
    left = list(ORDER)
    for mixin in released:
        releases[mixin]()
        left.remove(mixin)
        assert mixins_of(target) == tuple(left)
        assert target.step() == [*(each.__name__.lower() for each in left), "step"]
    assert type(target) is Stock


class Refusing(Mixin, Stock):
    mixin_order = 1

    def _refuse(self) -> list[str]:
        return ["refused"]

    train = step = _refuse


@pytest.mark.parametrize("mixin", [Outer, Refusing])
def test_a_method_that_was_kept_is_that_of_the_stock_class_after_the_release(mixin: type[Mixin]) -> None:
    target = Stock()
    adopt(target, Inner)
    release = adopt(target, mixin)
    kept = target.step  # one of the names that programs call
    assert kept() == (["refused"] if mixin is Refusing else ["outer", "inner", "step"])
    release()
    assert kept() == ["inner", "step"]


def test_second_release_changes_nothing() -> None:
    target = Stock()
    release = adopt(target, Outer)
    adopt(target, Inner)
    release()
    release()
    assert mixins_of(target) == (Inner,)


def test_release_after_another_adoption_of_the_same_mixin_takes_it_away() -> None:
    target = Stock()
    release = adopt(target, Outer)
    release()
    again = adopt(target, Outer)
    again()
    assert type(target) is Stock


def test_adopting_twice_is_refused() -> None:
    target = Stock()
    adopt(target, Outer)
    adopt(target, Inner)
    with pytest.raises(RuntimeError, match="StockOnGridRecorded has Outer already: release it first"):
        adopt(target, Outer)
    assert mixins_of(target) == (Outer, Inner)


def test_object_keeps_its_attributes_and_other_objects_their_class() -> None:
    target, other = Stock(), Stock()
    target.name = "mine"
    release = adopt(target, Outer)
    assert (target.name, other.step(), type(other)) == ("mine", ["step"], Stock)
    release()
    assert target.name == "mine"


@pytest.mark.parametrize("kind", [Stock, Derived])
def test_stock_class_is_that_before_all_mixins(kind: type[Stock]) -> None:
    target = kind()
    assert (stock_class(target), mixins_of(target)) == (kind, ())
    releases = [adopt(target, mixin) for mixin in ORDER]
    assert stock_class(target) is kind
    assert (type(target).__module__, type(target).__doc__) == (kind.__module__, kind.__doc__)
    assert target.step() == ["outer", "middle", "inner", *kind().step()]
    other = kind()
    for mixin in reversed(ORDER):
        adopt(other, mixin)
    assert type(target) is type(other), "objects of equal class and mixins share a class"
    assert all(isinstance(target, each) for each in (kind, Stock, *ORDER))
    for release in releases:
        release()
    assert (type(target), isinstance(target, Mixin)) == (kind, False)


def test_release_keeps_no_object_alive_and_works_without_it() -> None:
    target = Stock()
    release, reference = adopt(target, Outer), weakref.ref(target)
    del target
    gc.collect()
    assert reference() is None
    release()


class Doubled(Mixin, nn.Linear):
    """A layer that doubles its result."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


def test_module_keeps_parameters_hooks_and_children() -> None:
    module, inputs, called = nn.Linear(2, 2), torch.ones(1, 2), []
    plain = module(inputs)
    module.register_forward_hook(lambda *_: called.append(type(module)))
    names = [name for name, _ in module.named_parameters()]
    release: Callable[[], None] = adopt(module, Doubled)
    assert torch.equal(module(inputs), 2 * plain)
    assert [name for name, _ in module.named_parameters()] == names
    assert nn.Sequential(module)(inputs).equal(2 * plain)
    release()
    assert torch.equal(module(inputs), plain)
    assert called[-1] is nn.Linear
    assert len(called) == 3


def test_method_that_calls_a_missing_original_is_listed() -> None:
    assert overridden_by(Renamed) == {"step": Stock, "gone": Stock}
