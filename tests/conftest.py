"""Fixtures of all tests, and the names of their cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import pytest

pytest.register_assert_rewrite("tests.support", "tests.cluster")  # before they are imported

from tests.support.case_names import case_name  # noqa: E402
from tests.support.world import World, Worlds  # noqa: E402

collect_ignore = ["support/fork_server.py"]
"""Importing it, as the search for doctests would, does the fork server's work."""


@pytest.fixture(scope="session")
def world() -> Iterator[Worlds]:
    """``world(4).run(function, *args)``: four ranks that stay for the session, started when first asked for."""
    with _worlds() as of_size:
        yield of_size


@pytest.fixture(scope="module")
def other_world() -> Iterator[Worlds]:
    """Ranks that have seen nothing of what those of ``world`` did, as in a job that goes on from a checkpoint."""
    with _worlds() as of_size:
        yield of_size


@contextmanager
def _worlds() -> Iterator[Worlds]:
    with ExitStack() as worlds:
        yield cache(lambda size: worlds.enter_context(World(size)))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name cases without ids of their own so that ``-k`` finds them."""
    return case_name(val)
