"""Overlapped reduction of gradients that are views of contiguous buckets; see :class:`GradientReducer`."""

from .options import ReductionOptions
from .planning import BucketSizes
from .reducer import GradientReducer
from .report import GradientReport

__all__ = ["BucketSizes", "GradientReducer", "GradientReport", "ReductionOptions"]
