"""List the parts that only some jobs need. The core of ``engine`` imports none of them itself.

A part is loaded when a job asks for it: by a section of its config, an axis of its grid, or a call. What a job does not
ask for is not imported. ``python -m tests.reach`` prints what each kind of job loads.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EnginePart:
    """A module that is imported on first use."""

    name: str
    where: str
    """The module."""
    when: str
    """When a job asks for it."""

    def load(self) -> Any:
        """Return the module; only the first call imports it."""
        return importlib.import_module(self.where)


SAVING = EnginePart("saving", "ds_topo.checkpoint.saving", "the first call that saves a checkpoint")
LOADING = EnginePart("loading", "ds_topo.checkpoint.loading", "the first call that loads a checkpoint")
REDUCER = EnginePart(
    "reducer", "ds_topo.engine.gradient_reducer", 'the section "gradient_reducer", or GradientReducer.attach'
)
PIPELINE_DRIVER = EnginePart("reducer of a pipeline", "ds_topo.engine.pipeline_driver", "the same, for a pipeline")
OPTIMIZER_GRADIENTS = EnginePart(
    "reducer of ZeRO", "ds_topo.engine.optimizer_gradients", "the same, for ZeRO 1 and 2 or BF16_Optimizer"
)
REDUCER_OPTIONS = EnginePart("options of a reducer", "ds_topo.reduction.options", "the same section")
GATHERS = EnginePart("gathers", "ds_topo.engine.gathers_in_slices", "ZeRO 1 and 2, which gather after a step")
REPLICAS = EnginePart("replicas", "ds_topo.engine.quorum", 'the section "replicas"')
OVER_SHARD = EnginePart("shard", "ds_topo.engine.hybrid_sharding", "an axis shard, or replicas at ZeRO 3")
COMPARISON = EnginePart("comparison", "ds_topo.engine.replica_comparison", "an axis model, or check_replicas")
PARTS = (
    *(SAVING, LOADING, REDUCER, PIPELINE_DRIVER, OPTIMIZER_GRADIENTS, REDUCER_OPTIONS),
    *(GATHERS, REPLICAS, OVER_SHARD, COMPARISON),
)
"""All of them, for what looks at every class of ours, such as the warning about a newer release."""
