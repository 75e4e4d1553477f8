"""List the modules of an engine that the first call of a function imports.

``python -m tests.reach`` prints what each kind of job loads.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OnCall:
    """A module that is imported on first use."""

    name: str
    where: str
    """The module."""
    when: str
    """When a job asks for it."""

    def load(self) -> Any:
        """Return the module; only the first call imports it."""
        return importlib.import_module(self.where)


SAVING = OnCall("saving", "ds_topo.checkpoint.saving", "the first call that saves a checkpoint")
LOADING = OnCall("loading", "ds_topo.checkpoint.loading", "the first call that loads a checkpoint")
REDUCER = OnCall(
    "reducer", "ds_topo.engine.gradient_reducer", 'the section "gradient_reducer", or GradientReducer.attach'
)
REDUCER_OPTIONS = OnCall("options of a reducer", "ds_topo.reduction.options", "the same section")
REPLICAS = OnCall("replicas", "ds_topo.engine.quorum", 'the section "replicas"')
COMPARISON = OnCall("comparison", "ds_topo.engine.replica_comparison", "an axis model, or check_replicas")
LAYOUT_IN_USE = OnCall("layout in use", "ds_topo.engine.one_layout", "ds_topo.use(grid)")
ON_CALL = (SAVING, LOADING, REDUCER, REDUCER_OPTIONS, REPLICAS, COMPARISON, LAYOUT_IN_USE)
"""All of them, for what looks at every class of ours, such as the warning about a newer release."""
