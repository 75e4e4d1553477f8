"""Overlapped reduction of gradients that are views of contiguous buckets, over torch alone.

:class:`~ds_topo.reducer.reducer.BucketReducer` does it. What people use is ``ds_topo.GradientReducer``, the same with
``attach()`` for DeepSpeed's engines.
"""

from ds_topo.reducer.options import ReductionOptions
from ds_topo.reducer.planning import BucketSizes
from ds_topo.reducer.reducer import BucketReducer
from ds_topo.reducer.report import GradientReport

__all__ = ["BucketReducer", "BucketSizes", "GradientReport", "ReductionOptions"]
