"""The contiguous storage behind the gradients, and each parameter's place in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(eq=False, slots=True)
class GradientSlot:
    """One parameter's place in a bucket."""

    index: int
    """Its place in the module's list of parameters."""
    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    """What its gradient is accumulated in."""
    is_sparse: bool
    home: torch.Tensor | None = None
    """Where the user wants its gradient to accumulate: contiguous, ``numel`` elements."""
    scale: float = 1.0
    """What its gradient is multiplied by before it is reduced."""
    expected: int = 1
    """How many times its gradient arrives in the last micro-batch; 0 while that is unknown."""
    arrived: int = 0
    """How many times it has arrived in this one."""
    view: torch.Tensor = field(init=False)
    """Its part of the bucket, in the parameter's shape and strides; the gradient itself, if that is sparse."""
    bucket: GradientBucket = field(init=False)
    is_ready: bool = False
    """Whether this rank's contribution to the step is complete."""
    is_filled: bool = False
    """Whether the view holds it."""
    holds_gradient: bool = False
    """Whether a view apart from ``parameter.grad`` holds gradients of this step."""

    @property
    def is_expert(self) -> bool:
        """Whether it has replicas on its expert-data group alone: DeepSpeed marks experts ``allreduce = False``."""
        return not getattr(self.parameter, "allreduce", True)

    @property
    def is_apart(self) -> bool:
        """Whether the view cannot be ``parameter.grad``: it has another data type, or a place of the user's."""
        return self.home is not None or self.dtype != self.parameter.dtype

    @property
    def holds_live_view(self) -> bool:
        """Whether the view holds gradients that are still needed."""
        if self.is_apart:
            return self.holds_gradient
        return self.parameter.grad is not None and self.parameter.grad is getattr(self, "view", None)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient as it is accumulated."""
        return self.parameter.numel() * self.dtype.itemsize


class GradientBucket:
    """Contiguous storage of some parameters' gradients, reduced at once.

    Args:
        index: its place in the order of reduction.
        slots: parameters of one data type and device.
        multiple_of: the storage is padded with zeros to a multiple of so many elements.
    """

    def __init__(self, index: int, slots: Sequence[GradientSlot], multiple_of: int = 1) -> None:
        self.index = index
        self.slots = sorted(slots, key=lambda slot: 0 if slot.home is None else slot.home.data_ptr())
        self.pending = len(self.slots)
        first = self.slots[0]
        self.is_sparse = first.is_sparse
        self.numel = sum(slot.parameter.numel() for slot in self.slots)
        self.nbytes = self.numel * first.dtype.itemsize
        self.flat = self._storage(multiple_of)
        """The gradients, one after the other: ``[numel]``, then padding."""
        self.flat[self.numel :].zero_()

    def install(self) -> None:
        """Point the slots at this bucket, with the gradients that they hold."""
        offset = 0
        for slot in self.slots:
            slot.bucket = self
            if self.is_sparse:
                continue
            parameter = slot.parameter
            # Strides as autograd lays gradients out, but for a home, which is plain memory.
            like = torch.empty_like(parameter, device="meta") if slot.home is None else slot.home.view(parameter.shape)
            view = self.flat.as_strided(parameter.shape, like.stride(), self.flat.storage_offset() + offset)
            offset += parameter.numel()
            if slot.holds_live_view and slot.home is None:
                view.copy_(slot.view)
                parameter.grad = parameter.grad if slot.is_apart else view
            slot.view = view

    def _storage(self, multiple_of: int) -> torch.Tensor:
        """New storage, or the stretch of memory that the slots' homes make up."""
        first = self.slots[0]
        if first.home is not None:
            return first.home.as_strided((self.numel,), (1,))
        padded = 0 if self.is_sparse else -(-self.numel // multiple_of) * multiple_of
        return torch.empty(padded, dtype=first.dtype, device=first.parameter.device)

    def release(self) -> None:
        """Let go of the storage; gradients that are views of it keep it."""
        self.flat = self.flat.new_empty(0)
        for slot in self.slots:
            if not slot.holds_live_view:
                del slot.view

    def reset(self) -> None:
        """Expect every gradient anew."""
        self.pending = len(self.slots)
        for slot in self.slots:
            slot.is_ready = slot.is_filled = slot.holds_gradient = False
            slot.arrived = 0


class CommHookBucket:
    """What DDP communication hooks take for a ``torch.distributed.GradBucket``, which Python cannot construct."""

    def __init__(self, bucket: GradientBucket, is_last: bool) -> None:
        self._bucket, self._is_last = bucket, is_last
        self._buffer = bucket.flat[: bucket.numel]

    def index(self) -> int:
        """The bucket's place in the order of reduction."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """The gradients, one after the other: ``[numel]``."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace what ``buffer()`` returns."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients in their parameters' shapes, as views of ``buffer()``."""
        sizes = [slot.parameter.numel() for slot in self._bucket.slots]
        parts = self._buffer.split(sizes)
        return [
            part.as_strided(slot.view.shape, slot.view.stride())
            for part, slot in zip(parts, self._bucket.slots, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of ``gradients()``."""
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Whether no other bucket of this step comes after it."""
        return self._is_last
