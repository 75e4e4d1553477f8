"""Reduce gradients during backward, as views of contiguous buckets, and partition them as ZeRO does, over torch alone.

A module and a process group enter; averaged gradients leave. Open ``reducer.py`` first: its
:class:`~ds_topo.reduction.reducer.BucketReducer` has the states of a step. ``ds_topo.GradientReducer`` is the public
class; it adds ``attach()`` for DeepSpeed's engines.

For ZeRO 1 and 2 ``partitions.py`` says which rank owns which slice of a flat tensor: it is cut into regions, and each
region evenly over the ranks. ``exchange.py`` sums slices for their owners and gathers them into whole regions, and
``arrivals.py`` lets readers wait for parameters that are still in flight.
"""

from __future__ import annotations

from ds_topo.reduction.options import BucketSizes, ReductionOptions
from ds_topo.reduction.reducer import BucketReducer
from ds_topo.reduction.report import GradientReport

__all__ = ["BucketReducer", "BucketSizes", "GradientReport", "ReductionOptions"]
