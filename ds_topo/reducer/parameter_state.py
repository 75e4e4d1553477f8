"""What the reducer knows of one parameter: what is fixed, and what changes in a step."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from ds_topo.partition.gradients import RegionOfGradients


class Contribution(enum.Enum):
    """This rank's share in the step's gradient of one parameter."""

    PENDING = enum.auto()
    """More gradients of the last micro-batch are to come."""
    READY = enum.auto()
    """It is complete, in ``parameter.grad``."""
    COPIED_IN = enum.auto()
    """It is in the bucket, scaled."""


PENDING, READY, COPIED_IN = Contribution.PENDING, Contribution.READY, Contribution.COPIED_IN


class Bucket(Protocol):
    """What a parameter's hook must know of its bucket."""

    index: int
    members: list[ParameterState]
    pending: int
    accumulates: bool
    is_open: bool

    def open(self) -> None:
        """Get memory."""


@dataclass(eq=False, slots=True)
class ParameterState:
    """One parameter (FSDP2's ``FSDPParam``)."""

    # -- fixed at construction
    index: int
    """Its place in the module's list of parameters."""
    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    """What its gradient is accumulated in."""
    is_sparse: bool
    repeats: bool = False
    """Whether it may get further gradients once it is copied in (a static graph that turns out not to be one)."""
    grad_buffer: torch.Tensor | None = None
    """Where the user wants its gradient to accumulate: contiguous, ``numel`` elements."""
    region: RegionOfGradients | None = None
    """With which neighbors its gradient goes to the ranks that own it, if it is partitioned."""

    is_apart: bool = field(init=False)
    """Whether the view cannot be ``parameter.grad``: it has another data type, a buffer of the user's, or a region."""

    # -- set by its route, and by the first step
    scale: float = 1.0
    """What its gradient is multiplied by before it is reduced."""
    expected: int = 1
    """How many gradients it gets in the last micro-batch; 0 while that is unknown."""

    # -- set by each layout of buckets
    view: torch.Tensor = field(init=False)
    """Its part of the bucket, in the parameter's shape and strides; the gradient itself, if that is sparse."""
    bucket: Bucket = field(init=False)

    # -- the step: written by hooks and copies, reset by its bucket at the end
    arrived: int = 0
    """How many gradients it has got in the last micro-batch."""
    contribution: Contribution = PENDING
    holds_sum: bool = False
    """Whether a view apart from ``parameter.grad`` holds the sum of earlier micro-batches."""

    def __post_init__(self) -> None:
        self.note_type()

    def note_type(self) -> None:
        """Look at the parameter's type, which a cast changes."""
        self.is_apart = not self.leaves_gradient or self.dtype != self.parameter.dtype

    @property
    def leaves_gradient(self) -> bool:
        """Whether its gradient is in ``parameter.grad`` in the end, not in a buffer of the user's or a partition."""
        return self.grad_buffer is None and self.region is None

    @property
    def accumulates(self) -> bool:
        """Whether gradients of all micro-batches come together in its view."""
        return self.region is None or self.region.gradients.keeps

    @property
    def address(self) -> int:
        """Where its gradient is beside those of its bucket."""
        if self.region is not None:
            return self.region.gradients.offsets[self.parameter]
        return 0 if self.grad_buffer is None else self.grad_buffer.data_ptr()

    @property
    def is_expert(self) -> bool:
        """Whether it has replicas on its expert-data group alone: DeepSpeed marks experts ``allreduce = False``."""
        return not getattr(self.parameter, "allreduce", True)

    @property
    def expert_group_name(self) -> str | None:
        """The ``group_name`` of an expert, None for any other parameter."""
        return expert_group_name(self.parameter)

    @property
    def holds_live_view(self) -> bool:
        """Whether the view holds gradients that are still needed."""
        if self.is_apart:
            return self.holds_sum
        return self.parameter.grad is not None and self.parameter.grad is getattr(self, "view", None)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient as it is accumulated."""
        return self.parameter.numel() * self.dtype.itemsize

    def discard_sum(self) -> None:
        """Forget gradients that are not in ``parameter.grad``."""
        self.holds_sum = False
        if self.is_apart and hasattr(self.parameter, "main_grad"):
            del self.parameter.main_grad


def expert_group_name(parameter: torch.Tensor) -> str | None:
    """The ``group_name`` of an expert's parameter (``allreduce = False``), None for any other."""
    return str(getattr(parameter, "group_name", "")) if not getattr(parameter, "allreduce", True) else None
