"""DeepSpeed's types and rules that its checkpoint files follow, for those who write such files without an engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from deepspeed import __version__ as DEEPSPEED_VERSION
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

__all__ = ["DEEPSPEED_VERSION", "fragment", "no_loss_scale", "stage_bounds", "zero_stage"]


def fragment(numel: int, start: int) -> Any:
    """Where a parameter's part is in a partition."""
    return fragment_address(numel=numel, start=start)


def zero_stage(stage: int) -> Any:
    """The stage as files of optimizers name it."""
    return ZeroStageEnum(stage)


def no_loss_scale() -> Any:
    """What scales losses of fp32 and bf16: by 1."""
    return LossScaler(scale=1.0)


def stage_bounds(method: str, weights: Sequence[int], kinds: Sequence[str], stages: int) -> tuple[int, ...]:
    """The first layer of every stage, and the number of layers, as a pipeline of DeepSpeed finds them.

    >>> stage_bounds("parameters", [9, 1, 1, 9], "ABBA", 2), stage_bounds("type:a", [9, 1, 1, 9], "ABAB", 2)
    ((0, 2, 4), (0, 2, 4))

    Args:
        method: the pipeline's ``partition_method``.
        weights: elements that are trained, of each layer.
        kinds: names of the classes of layers.
        stages: how many.

    Raises:
        ValueError: another method.

    Source: ``PipelineModule._partition_layers``.
    """
    name, _, pattern = method.lower().partition(":")
    if name == "uniform":
        bounds = partition_uniform(num_items=len(kinds), num_parts=stages)
    elif name == "parameters":
        bounds = partition_balanced(weights=list(weights), num_parts=stages)
    elif name == "type" and pattern:
        of_kind = [int(re.search(pattern, kind, re.IGNORECASE) is not None) for kind in kinds]
        bounds = partition_balanced(weights=of_kind, num_parts=stages)
    else:
        raise ValueError(f"{method!r} is no way to share out layers: 'parameters', 'uniform' or 'type:...'")
    return tuple(map(int, bounds))
