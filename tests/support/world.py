"""Run one function after another on the same processes, each in a fresh ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tests.support.ranks import Ranks

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
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank; see :func:`tests.support.ranks.run_ranks`."""
        __tracebackhide__ = True
        try:
            results = self._ranks.call(
                function, args, deadline=deadline, timeout=timeout, expect_failure=expect_failure
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


Worlds: TypeAlias = Callable[[int], World]
"""The type of the fixture ``world``."""
