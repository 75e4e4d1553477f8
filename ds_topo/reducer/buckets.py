"""The contiguous memory behind the gradients, and each parameter's place in it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch

from ds_topo.reducer.copy_in import copy_in
from ds_topo.reducer.parameter_state import PENDING, ParameterState


class GradientBucket:
    """Contiguous memory of some parameters' gradients, reduced at once.

    Args:
        index: its place in the order of reduction.
        members: parameters of one data type, device and route.
        multiple_of: the memory is padded with zeros to a multiple of so many elements.
    """

    def __init__(self, index: int, members: Sequence[ParameterState], multiple_of: int = 1) -> None:
        self.index = index
        self.members = sorted(members, key=operator.attrgetter("address"))
        self.pending = len(self.members)
        """Members whose contribution is not complete."""
        first = self.members[0]
        self.is_sparse = first.is_sparse
        self.region = first.region
        self.accumulates = first.accumulates
        """Whether gradients of all micro-batches come together here."""
        self._lasts = first.region is None or first.region.gradients.lasts
        """Whether its memory lasts from step to step; if not, it has some from :meth:`open` to :meth:`give_back`."""
        self.is_open = self._lasts
        """Whether it has memory."""
        self.offsets = self._offsets()
        """Where each member starts in the memory; in a region there may be gaps, for parameters that are frozen."""
        ends = [start + member.parameter.numel() for start, member in zip(self.offsets, self.members, strict=True)]
        self._gaps = [slice(end, start) for end, start in zip([0, *ends], self.offsets, strict=False) if end < start]
        self._gaps.append(slice(ends[-1], None))
        self.numel = ends[-1]
        self.nbytes = self.numel * first.dtype.itemsize
        self.flat = self._memory(multiple_of)
        """The gradients, one after the other: ``[numel]``, then padding."""
        if self.region is None:
            self.flat[self.numel :].zero_()

    def install(self) -> None:
        """Point the members at this bucket, with the gradients that they hold."""
        for member in self.members:
            member.bucket = self
        if self.is_sparse:
            return
        if self._lasts:
            self._set_views()
        elif any(member.holds_sum for member in self.members):
            self.open()
        else:
            self.give_back()

    def open(self) -> None:
        """Borrow memory."""
        assert self.region is not None
        self.flat, self.is_open = self.region.gradients.place(self.region.region), True
        self._set_views()

    def fill(self) -> None:
        """Collect its members' gradients, if that had to wait for memory."""
        if self.region is None:
            return
        if not self.accumulates:
            self.open()
            copy_in(self.members)
        for gap in self._gaps:
            self.flat[gap].zero_()

    def give_back(self) -> None:
        """Let go of borrowed memory."""
        if not self._lasts:
            self.flat, self.is_open = self.flat.new_empty(0), False
            for member in self.members:
                member.view, member.holds_sum = self.flat, False

    def _offsets(self) -> list[int]:
        if self.region is not None:
            return [member.address - self.region.region.start for member in self.members]
        numels = [member.parameter.numel() for member in self.members]
        return [end - numel for end, numel in zip(accumulate(numels), numels, strict=True)]

    def _set_views(self) -> None:
        for member, offset in zip(self.members, self.offsets, strict=True):
            parameter, buffer = member.parameter, member.grad_buffer
            # Strides as autograd lays gradients out, but for a user's buffer, which is plain memory.
            if buffer is not None or self.region is not None:
                stride = torch.empty(parameter.shape, device="meta").stride()
            elif parameter.is_contiguous():
                stride = parameter.stride()
            else:
                stride = torch.empty_like(parameter, device="meta").stride()
            view = self.flat.as_strided(parameter.shape, stride, self.flat.storage_offset() + offset)
            if member.holds_live_view and buffer is None:
                view.copy_(member.view)
                parameter.grad = parameter.grad if member.is_apart else view
            member.view = view

    def release(self) -> None:
        """Let go of the memory; gradients that are views of it keep it."""
        self.flat = self.flat.new_empty(0)
        for member in self.members:
            if not member.holds_live_view:
                del member.view

    def reset(self) -> None:
        """Expect every gradient anew."""
        self.pending = len(self.members)
        for member in self.members:  # each of them at each step: no calls
            member.contribution = PENDING
            member.holds_sum = False
            member.arrived = 0

    def _memory(self, multiple_of: int) -> torch.Tensor:
        """New memory, or what the members' buffers make up together."""
        first = self.members[0]
        if self.region is not None:
            return self.region.gradients.place(self.region.region) if self._lasts else torch.empty(0)
        if first.grad_buffer is not None:
            return first.grad_buffer.as_strided((self.numel,), (1,))
        padded = 0 if self.is_sparse else -(-self.numel // multiple_of) * multiple_of
        return torch.empty(padded, dtype=first.dtype, device=first.parameter.device)


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
        members = self._bucket.members
        return [
            self._buffer[offset:].as_strided(member.view.shape, member.view.stride())
            for offset, member in zip(self._bucket.offsets, members, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of ``gradients()``."""
        return [member.parameter for member in self._bucket.members]

    def is_last(self) -> bool:
        """Whether no other bucket of this step comes after it."""
        return self._is_last
