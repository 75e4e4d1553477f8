"""The fixture that starts virtual hosts, and skips a test if this machine cannot run them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.cluster import Cluster, missing_requirement

REQUIRE = "DS_TOPO_REQUIRE_CLUSTER"
"""An environment variable: if it is 1, a missing requirement is a failure instead of a skip."""


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., Cluster]]:
    """``start_cluster(hosts=2, rate="1gbit", tools=["srun"])`` starts a cluster that ends with the test."""
    with ExitStack() as stack:

        def start(hosts: int = 2, rate: str | None = None, tools: tuple[str, ...] = ("pdsh",)) -> Cluster:
            reason = missing_requirement(tools)
            if reason and os.environ.get(REQUIRE) == "1":
                pytest.fail(f"{REQUIRE}=1, but {reason}")
            if reason:
                pytest.skip(reason)
            return stack.enter_context(Cluster(hosts, rate))

        yield start
