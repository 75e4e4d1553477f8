"""Buckets of gradients: which parameter goes where (pure), and the contiguous storage behind the gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

MIB = 1 << 20


@dataclass(frozen=True)
class BucketSizes:
    """Capacities in bytes; a bucket is closed by the parameter that reaches its capacity.

    The first bucket is small so that communication starts early, the last one because nothing is left that
    could hide it.

    Raises:
        ValueError: a capacity below 1.
    """

    bucket_bytes: int = 8 * MIB
    first_bytes: int = MIB
    last_bytes: int = MIB

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value}: a capacity in bytes, at least 1; leave it out for the default")


def plan_buckets(
    nbytes: Sequence[int], kinds: Sequence[Hashable], order: Sequence[int], sizes: BucketSizes
) -> list[tuple[int, ...]]:
    """Distribute parameters over buckets; imitates torch's ``compute_bucket_assignment_by_size``.

    Args:
        nbytes: of every parameter's gradient.
        kinds: only parameters of the same kind (data type, device, process group) share a bucket.
        order: indices in the order in which gradients are expected to be ready.
        sizes: the capacities.

    Returns:
        Indices by bucket; buckets in the order in which they are expected to be full.

    >>> sizes = BucketSizes(bucket_bytes=100, first_bytes=10, last_bytes=30)
    >>> plan_buckets([20, 60, 60, 60, 20, 10], ["float32"] * 6, range(6), sizes)
    [(0,), (1, 2), (3,), (4, 5)]
    >>> plan_buckets([20, 60, 60, 60, 20, 10], ["float32", "bfloat16"] * 3, range(6), sizes)
    [(0,), (1, 3), (2, 4), (5,)]
    """
    last = _last_bucket(nbytes, kinds, order, sizes.last_bytes)
    buckets: list[tuple[int, ...]] = []
    open_members: dict[Hashable, list[int]] = defaultdict(list)
    open_bytes: dict[Hashable, int] = defaultdict(int)
    for index in order:
        kind = kinds[index]
        if index in last:
            continue
        open_members[kind].append(index)
        open_bytes[kind] += nbytes[index]
        if open_bytes[kind] >= (sizes.bucket_bytes if buckets else sizes.first_bytes):
            buckets.append(tuple(open_members.pop(kind)))
            del open_bytes[kind]
    buckets += [tuple(members) for members in open_members.values()]
    buckets += [last] if last else []
    position = {index: place for place, index in enumerate(order)}
    return sorted(buckets, key=lambda members: max(position[index] for index in members))


def _last_bucket(
    nbytes: Sequence[int], kinds: Sequence[Hashable], order: Sequence[int], capacity: int
) -> tuple[int, ...]:
    """The last parameter and those of its kind before it, as far as they fit."""
    members: list[int] = []
    for index in reversed(order):
        if kinds[index] == kinds[order[-1]]:
            if members and sum(nbytes[member] for member in members) + nbytes[index] > capacity:
                break
            members.append(index)
    return tuple(reversed(members))


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
    scale: float = 1.0
    """What its gradient is multiplied by before it is reduced."""
    view: torch.Tensor = field(init=False)
    """Its part of the bucket, in the parameter's shape and strides; the gradient itself, if that is sparse."""
    bucket: GradientBucket = field(init=False)
    is_ready: bool = False
    """Whether the gradient of the step's last micro-batch has arrived."""
    holds_gradient: bool = False
    """Whether a view wider than the parameter holds gradients of earlier micro-batches."""

    @property
    def is_wide(self) -> bool:
        """Whether gradients are accumulated in a wider data type than the parameter's."""
        return self.dtype != self.parameter.dtype

    @property
    def holds_live_view(self) -> bool:
        """Whether the view holds gradients that are still needed."""
        if self.is_wide:
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
        self.slots = list(slots)
        self.pending = len(self.slots)
        first = self.slots[0]
        self.is_sparse = first.is_sparse
        self.numel = sum(slot.parameter.numel() for slot in self.slots)
        self.nbytes = self.numel * first.dtype.itemsize
        padded = 0 if self.is_sparse else -(-self.numel // multiple_of) * multiple_of
        self.flat = torch.empty(padded, dtype=first.dtype, device=first.parameter.device)
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
            strides = torch.empty_like(parameter, device="meta").stride()  # dense ones, as autograd lays gradients out
            view = self.flat.as_strided(parameter.shape, strides, offset)
            offset += parameter.numel()
            if slot.holds_live_view:
                view.copy_(slot.view)
                parameter.grad = parameter.grad if slot.is_wide else view
            slot.view = view

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
            slot.is_ready = slot.holds_gradient = False


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
