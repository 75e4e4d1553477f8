"""How one parameter's gradient gets into its bucket."""

from __future__ import annotations

import torch
from torch import nn

from .buckets import GradientSlot


def keep(slot: GradientSlot) -> None:
    """Move a gradient that is not to be reduced yet into its bucket."""
    gradient = slot.parameter.grad
    if slot.is_sparse or gradient is None or gradient is slot.view:
        return
    if slot.is_apart and slot.holds_gradient:
        slot.view.add_(gradient)
    else:
        slot.view.copy_(dense_gradient(gradient, slot))
    slot.holds_gradient = slot.is_apart
    slot.parameter.grad = None if slot.is_apart else slot.view


def fill(slot: GradientSlot) -> None:
    """Make the view hold this rank's scaled contribution, zeros if there is none."""
    gradient = slot.parameter.grad
    if slot.is_sparse:
        slot.view = _empty_rows(slot.parameter) if gradient is None else gradient * slot.scale
        return
    if gradient is None and not slot.holds_gradient:
        slot.view.zero_()
        return
    keep(slot)
    slot.view.mul_(slot.scale)


def _empty_rows(parameter: nn.Parameter) -> torch.Tensor:
    indices = torch.zeros(1, 0, dtype=torch.long, device=parameter.device)
    return torch.sparse_coo_tensor(indices, parameter.new_zeros(0, *parameter.shape[1:]), parameter.shape)


def dense_gradient(gradient: torch.Tensor | None, slot: GradientSlot) -> torch.Tensor:
    """The gradient, unless it is sparse unexpectedly."""
    if gradient is None or gradient.layout != torch.strided:
        raise ValueError(
            f"parameter {slot.name!r} got a sparse gradient, but no nn.Embedding(sparse=True) holds it: use one, or a "
            "dense gradient"
        )
    return gradient


def is_replaced(slot: GradientSlot) -> bool:
    """Whether the user has replaced or removed a gradient since its bucket was filled."""
    if slot.is_sparse:
        return slot.parameter.grad is None
    return slot.parameter.grad is not (None if slot.is_apart else slot.view)
