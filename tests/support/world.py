"""Run one function after another on the same processes, each in a fresh ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks

names_threads = pytest.mark.skipif(torch.__version__ < "2.9", reason="this torch does not name gloo's threads")
"""For tests of what the package can do only where it finds gloo's threads."""
TIDY_SECONDS = 30.0
FUNCTIONS = 20
"""The number of functions per process: native code may fail after torch and DeepSpeed are torn down many times."""


class World:
    """Ranks that run many functions without new processes.

    Each call starts in the state of the first one: a new ``torch.distributed``, the same random seed, and the original
    environment, working directory, arguments and warning filters. The processes are replaced after some functions and
    after a failure. A function that leaves something behind is a failure, too.
    """

    def __init__(self, size: int) -> None:
        self.backend = "gloo"
        """The backend of calls that do not name one."""
        self._ranks = Ranks(size)
        self._functions = 0

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.end()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        deadline: float = 120.0,
        timeout: float = 60.0,
        expect_failure: bool = False,
        backend: str | None = None,
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank; see :func:`tests.support.ranks.run_ranks`."""
        __tracebackhide__ = True
        try:
            results = self._ranks.call(
                function,
                args,
                deadline=deadline,
                timeout=timeout,
                expect_failure=expect_failure,
                backend=backend or self.backend,
            )
            if not expect_failure:
                self._ranks.tidy(function, TIDY_SECONDS)
        except BaseException:
            self._ranks.end()
            raise
        self._functions += 1
        if expect_failure or self._functions % FUNCTIONS == 0:
            self._ranks.end()
        return results


class Worlds:
    """The fixture ``world``: ``world(4)`` returns four ranks, started at first use and kept until the end."""

    def __init__(self) -> None:
        self.backend = "gloo"
        """The backend of the present test."""
        self._worlds: dict[int, World] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def __call__(self, size: int) -> World:
        if size not in self._worlds:
            self._worlds[size] = self._stack.enter_context(World(size))
        world = self._worlds[size]
        world.backend = self.backend
        return world
