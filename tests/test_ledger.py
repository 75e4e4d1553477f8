"""Patches are counted, restored exactly, and refused if the name does not exist."""

from __future__ import annotations

from typing import Any

import pytest

from ds_topo.base.ledger import ONE_CALL, Ledger, Patch, Reliance, always, exists


class Clock:
    """A class to patch."""

    def __init__(self) -> None:
        self.offset = 0

    def time(self) -> int:
        return 1 + self.offset

    @staticmethod
    def zone() -> str:
        return "UTC"


class Watch(Clock):
    """A class that inherits all of its methods."""


def row(owner: Any, name: str) -> Patch:
    return Patch(owner, name, instead="ours", why="a test", during="a test", process_wide="a test")


def twice(time: Any) -> Any:
    return lambda clock: 2 * time(clock)


def test_first_holder_binds_and_last_restores() -> None:
    ledger, before = Ledger(), dict(vars(Clock))
    patch = row(Clock, "time")
    first, second = ledger.bind(patch, twice), ledger.bind(patch, twice)
    assert (Clock().time(), ledger.in_force()) == (2, [patch])
    first()
    first()
    assert Clock().time() == 2, "released twice by one holder, held by the other"
    second()
    assert (dict(vars(Clock)), ledger.in_force()) == (before, [])


def test_inherited_name_is_removed_again() -> None:
    with Ledger().bound(row(Watch, "time"), twice):
        assert (Watch().time(), Clock().time()) == (2, 1)
    assert "time" not in vars(Watch)


def test_static_method_stays_static() -> None:
    before = vars(Clock)["zone"]
    with Ledger().bound(row(Clock, "zone"), always(staticmethod(lambda: "CET"))):
        assert Clock().zone() == "CET"
    assert vars(Clock)["zone"] is before


def test_patch_of_one_object_leaves_others_alone() -> None:
    clock, other = Clock(), Clock()
    release = Ledger().bind(row(Clock, "time"), always(lambda: 7), clock)
    assert (clock.time(), other.time()) == (7, 1)
    release()
    assert "time" not in vars(clock)


def test_second_replacement_of_a_shared_name_is_refused() -> None:
    ledger = Ledger()
    with ledger.bound(row(Clock, "time"), twice), pytest.raises(RuntimeError, match="has a replacement already"):
        ledger.bind(row(Clock, "time"), always(None))
    assert Clock().time() == 1


def test_missing_name_is_refused() -> None:
    for owner, target in ((Clock, None), (Clock, Clock())):
        with pytest.raises(RuntimeError, match=r"Clock\.tick does not exist in the installed release.*a test"):
            Ledger().bind(row(owner, "tick"), twice, target)
    assert not exists(row(Clock, "tick"))
    assert exists(Reliance(Clock, "offset", "set in __init__"))


def test_replacement_by_another_library_stays() -> None:
    class Sundial(Clock):
        def time(self) -> int:
            return 3

    release = Ledger().bind(row(Sundial, "time"), twice)
    Sundial.time = theirs = lambda clock: 9  # type: ignore[method-assign, assignment]
    with pytest.warns(RuntimeWarning, match=r"Sundial\.time was replaced by another library while"):
        release()
    assert vars(Sundial)["time"] is theirs


def test_exception_inside_bound_restores() -> None:
    before = dict(vars(Clock))
    with pytest.raises(ValueError, match="inside"), Ledger().bound(row(Clock, "time"), twice):
        raise ValueError("inside")
    assert dict(vars(Clock)) == before


def test_process_wide_patch_must_say_why() -> None:
    silent = Patch(Clock, "time", "ours", "a test", "a test")
    with pytest.raises(ValueError, match=r"Clock\.time is patched for the whole process: say why"):
        Ledger().bind(silent, twice)
    Ledger().bind(silent, always(lambda: 7), Clock())()
    with Ledger().bound(Patch(Clock, "time", "ours", "a test", f"{ONE_CALL} of time()"), twice):
        assert Clock().time() == 2
