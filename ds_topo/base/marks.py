"""Tell what parameters and optimizers are, by what DeepSpeed, a program or ds_topo has noted on them.

These are the facts that the core, the reducer and checkpoints ask for alike.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import MutableMapping
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

PLACEHOLDERS = "idle_stage_placeholders"
"""The attribute of a module, and the start of the names, of parameters that stand for none on a stage of a pipeline
without trainable parameters of a group."""

owners: MutableMapping[nn.Parameter, weakref.ref[object]] = WeakIdKeyDictionary()
"""The reducer of each parameter; an entry ends with either of them, or with ``detach()``."""


def expert_group_name(parameter: torch.Tensor) -> str | None:
    """Return the ``group_name`` of an expert's parameter, None for any other.

    DeepSpeed marks experts with ``allreduce = False``: their replicas are on the expert-data group alone.
    """
    return str(getattr(parameter, "group_name", "")) if not getattr(parameter, "allreduce", True) else None


def inner_optimizer(engine: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that steps, inside DeepSpeed's wrappers; None if the engine has none."""
    from deepspeed.runtime.utils import DummyOptim  # the topology's own tools do without DeepSpeed

    optimizer: Any = engine.optimizer
    while getattr(optimizer, "optimizer", optimizer) is not optimizer:
        optimizer = optimizer.optimizer
    return optimizer if hasattr(optimizer, "param_groups") and not isinstance(optimizer, DummyOptim) else None


def is_element_by_element(inner: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer is known to update each element by its own gradient and states alone.

    Others compute norms, or keep one state for a block of elements, so elements must stay in DeepSpeed's order. A
    subclass with a ``step()`` of its own is not known, unless its attribute ``is_element_by_element`` is True.
    """
    step = inspect.unwrap(type(inner).step)
    declared = getattr(type(inner), "is_element_by_element", None) is True
    return declared or any(step is inspect.unwrap(known.step) for known in element_by_element())


@cache
def element_by_element() -> tuple[type[torch.optim.Optimizer], ...]:
    """Return the optimizers that update each element by its own gradient and states alone."""
    from deepspeed.ops import adagrad, adam, lion

    return (
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW),
        *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
        *(torch.optim.SGD, adam.FusedAdam, adam.DeepSpeedCPUAdam, lion.FusedLion, lion.DeepSpeedCPULion),
        adagrad.DeepSpeedCPUAdagrad,
    )


def offsets_in_flat_groups(optimizer: Any) -> list[list[int]]:
    """Return the offsets of the parameters in each flat tensor of ``DeepSpeedZeroOptimizer``, in its own order.

    Before DeepSpeed 0.19.7 parameters are adjacent, and the optimizer does not store their offsets.
    """
    stored: list[list[int]] | None = getattr(optimizer, "round_robin_bit16_offsets", None)
    if stored is not None:
        return stored
    sizes = [[parameter.numel() for parameter in parameters] for parameters in optimizer.round_robin_bit16_groups]
    return [list(accumulate(each, initial=0))[:-1] for each in sizes]
