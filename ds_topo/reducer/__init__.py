"""Reduce gradients during backward, as views of contiguous buckets, over torch alone.

A module and a process group enter; averaged gradients leave. Open ``reducer.py`` first: its
:class:`~ds_topo.reducer.reducer.BucketReducer` has the states of a step. ``ds_topo.GradientReducer`` is the public
class; it adds ``attach()`` for DeepSpeed's engines.
"""

from __future__ import annotations

from ds_topo.reducer.options import BucketSizes, ReductionOptions
from ds_topo.reducer.reducer import BucketReducer
from ds_topo.reducer.report import GradientReport

__all__ = ["BucketReducer", "BucketSizes", "GradientReport", "ReductionOptions"]
