"""Reduce gradients during backward, as views of contiguous buckets, and partition them as ZeRO does, over torch alone.

A module and a process group enter; averaged gradients leave. Open ``reducer.py`` first: its
:class:`~ds_topo.reduction.reducer.StandaloneReducer` has the states of a step. ``ds_topo.GradientReducer`` is the
public class; it adds ``attach()`` for DeepSpeed's engines.

For ZeRO 1 and 2 ``partitions.py`` says which rank owns which slice of a flat tensor: it is cut into regions, and each
region evenly over the ranks. ``exchange.py`` sums slices for their owners and gathers them into whole regions, and
``arrivals.py`` lets readers wait for parameters that are still in flight. Whoever wants this imports it; a reducer
itself imports what this table lists, on first use.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from ds_topo.base import lazy_attributes


@dataclass(frozen=True)
class OnDemand:
    """A module that some reducers need."""

    where: str
    when: str

    def load(self) -> Any:
        """Return the module; only the first call imports it."""
        return importlib.import_module(self.where)


EXCHANGE = OnDemand("ds_topo.reduction.exchange", "a group over hosts with several ranks each")
MANAGED = OnDemand("ds_topo.reduction.managed", "the option manager, or replicas of an engine's job")
REPORT = OnDemand("ds_topo.reduction.report", "a call of report()")

_MODULES = {
    "StandaloneReducer": "reducer",
    "BucketSizes": "options",
    "GradientReport": "report",
    "ReductionOptions": "options",
}
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
