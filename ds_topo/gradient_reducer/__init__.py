"""Overlapped reduction of gradients that are views of contiguous buckets; see :class:`GradientReducer`."""

from .buckets import BucketSizes
from .options import ReductionOptions
from .reducer import GradientReducer
from .report import GradientReport

__all__ = ["BucketSizes", "GradientReducer", "GradientReport", "ReductionOptions"]
