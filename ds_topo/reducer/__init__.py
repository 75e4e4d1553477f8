"""Overlapped reduction of gradients that are views of contiguous buckets; see :class:`GradientReducer`."""

from ds_topo.reducer.options import ReductionOptions
from ds_topo.reducer.planning import BucketSizes
from ds_topo.reducer.reducer import GradientReducer
from ds_topo.reducer.report import GradientReport

__all__ = ["BucketSizes", "GradientReducer", "GradientReport", "ReductionOptions"]
