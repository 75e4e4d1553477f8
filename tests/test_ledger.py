"""Changes are counted, restored exactly, and refused where the name does not exist."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from ds_topo.ledger import Change, Ledger, Reliance, always, exists


class Clock:
    """What is changed here."""

    def __init__(self) -> None:
        self.offset = 0

    def time(self) -> int:
        return 1 + self.offset

    @staticmethod
    def zone() -> str:
        return "UTC"


class Watch(Clock):
    """It has its methods from its parent."""


def row(owner: Any, name: str) -> Change:
    return Change(owner, name, instead="ours", why="a test", during="a test")


def twice(time: Any) -> Any:
    return lambda clock: 2 * time(clock)


def test_the_first_holder_binds_and_the_last_restores() -> None:
    ledger, before = Ledger(), dict(vars(Clock))
    change = row(Clock, "time")
    first, second = ledger.bind(change, twice), ledger.bind(change, twice)
    assert (Clock().time(), ledger.in_force()) == (2, [change])
    first()
    first()
    assert Clock().time() == 2, "released twice by one holder, held by the other"
    second()
    assert (dict(vars(Clock)), ledger.in_force()) == (before, [])


def test_an_inherited_name_is_taken_away_again() -> None:
    with Ledger().bound(row(Watch, "time"), twice):
        assert (Watch().time(), Clock().time()) == (2, 1)
    assert "time" not in vars(Watch)


def test_a_static_method_stays_one() -> None:
    before = vars(Clock)["zone"]
    with Ledger().bound(row(Clock, "zone"), always(staticmethod(lambda: "CET"))):
        assert Clock().zone() == "CET"
    assert vars(Clock)["zone"] is before


def test_one_object_alone_gets_it_and_is_not_kept_alive() -> None:
    clock, other = Clock(), Clock()
    release = Ledger().bind(row(Clock, "time"), always(lambda: 7), clock)
    assert (clock.time(), other.time()) == (7, 1)
    release()
    assert "time" not in vars(clock)
    late = Ledger().bind(row(Clock, "offset"), always(5), clock)
    reference = weakref.ref(clock)
    del clock
    gc.collect()
    assert reference() is None
    late()


def test_two_replacements_of_one_name_are_refused() -> None:
    ledger = Ledger()
    with ledger.bound(row(Clock, "time"), twice), pytest.raises(RuntimeError, match="is replaced already, by ours"):
        ledger.bind(row(Clock, "time"), always(None))
    assert Clock().time() == 1


def test_a_name_that_the_release_lacks_is_named() -> None:
    for owner, target in ((Clock, None), (Clock, Clock())):
        with pytest.raises(RuntimeError, match=r"Clock\.tick does not exist in the installed release.*a test"):
            Ledger().bind(row(owner, "tick"), twice, target)
    assert not exists(row(Clock, "tick"))
    assert exists(Reliance(Clock, "offset", "set in __init__"))


def test_what_someone_else_replaced_meanwhile_stays() -> None:
    class Sundial(Clock):
        def time(self) -> int:
            return 3

    release = Ledger().bind(row(Sundial, "time"), twice)
    Sundial.time = theirs = lambda clock: 9  # type: ignore[method-assign, assignment]
    with pytest.warns(RuntimeWarning, match=r"Sundial\.time was replaced by someone else, too"):
        release()
    assert vars(Sundial)["time"] is theirs


def test_an_exception_inside_restores_too() -> None:
    before = dict(vars(Clock))
    with pytest.raises(ValueError, match="inside"), Ledger().bound(row(Clock, "time"), twice):
        raise ValueError("inside")
    assert dict(vars(Clock)) == before
