"""Fixtures and hooks of all tests: worlds of ranks, names of cases, and the order of the files."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.support", "tests.cluster")  # before they are imported

from tests.support.case_names import case_name  # noqa: E402
from tests.support.world import World, Worlds  # noqa: E402

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in jobs of a shell that run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else launchers that tests interrupt would ignore it

collect_ignore = ["support/fork_server.py"]
"""The search for doctests must not import it: importing it starts the work of the fork server."""


@pytest.fixture(scope="session")
def world() -> Iterator[Worlds]:
    """``world(4).run(function, *args)``: four ranks, started at first use and kept until the session ends."""
    with _worlds() as of_size:
        yield of_size


@pytest.fixture(scope="module")
def other_world() -> Iterator[Worlds]:
    """Ranks apart from those of ``world``, for a job that resumes from a checkpoint of another job."""
    with _worlds() as of_size:
        yield of_size


@contextmanager
def _worlds() -> Iterator[Worlds]:
    with ExitStack() as worlds:
        yield cache(lambda size: worlds.enter_context(World(size)))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name cases without ids of their own so that ``-k`` finds them."""
    return case_name(val)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests of virtual hosts: no worker of pytest-xdist is left with these long files at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/cluster/"))
