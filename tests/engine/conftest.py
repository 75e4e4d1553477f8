"""Fixtures of reference results: one process trains each model, once per session."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.gpt_training import train_layers_alone, train_module_alone
from tests.support.training import Reference
from tests.support.world import Worlds


@pytest.fixture(scope="session")
def layers_alone(world: Worlds) -> Reference:
    """``layers_alone(steps)``: the layers of the example's GPT, for pipelines."""
    return cache(lambda steps: world(1).run(train_layers_alone, steps)[0])


@pytest.fixture(scope="session")
def module_alone(world: Worlds) -> Reference:
    """``module_alone(steps)``: the example's GPT as one module, for engines without a pipeline."""
    return cache(lambda steps: world(1).run(train_module_alone, steps)[0])
