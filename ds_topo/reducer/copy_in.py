"""How gradients get into their buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ds_topo.reducer.buckets import GradientSlot

_LARGE_NUMEL = 1 << 14
"""From here on a gradient is better scaled into its bucket at once, while caches hold it, than together with others."""


def fills_at_once(slot: GradientSlot) -> bool:
    """Whether :func:`fill_at_once` is for this slot."""
    return slot.parameter.numel() >= _LARGE_NUMEL and not slot.is_sparse and not slot.is_apart


def fill_at_once(slot: GradientSlot) -> None:
    """Make a large view hold this rank's scaled contribution."""
    parameter, view = slot.parameter, slot.view
    gradient = parameter.grad
    slot.is_filled = True
    if gradient is view:
        if slot.scale != 1.0:
            view.mul_(slot.scale)
    elif gradient is None:
        view.zero_()
    else:
        torch.mul(_dense(gradient, slot), slot.scale, out=view)
        parameter.grad = view


def keep(slot: GradientSlot) -> None:
    """Move a gradient that is not to be reduced yet into its bucket."""
    gradient = slot.parameter.grad
    if slot.is_sparse or gradient is None or gradient is slot.view:
        return
    if slot.is_apart and slot.holds_gradient:
        slot.view.add_(gradient)
    else:
        slot.view.copy_(_dense(gradient, slot))
    slot.holds_gradient = slot.is_apart
    slot.parameter.grad = None if slot.is_apart else slot.view


def fill(slots: Sequence[GradientSlot]) -> None:
    """Make the views of a bucket hold this rank's scaled contributions, zeros where there is none."""
    views: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    unscaled: list[torch.Tensor] = []
    for slot in slots:
        if slot.is_filled:
            continue
        slot.is_filled = True
        parameter, view = slot.parameter, slot.view if not slot.is_sparse else None
        gradient = parameter.grad
        if view is None:
            slot.view = _empty_rows(parameter) if gradient is None else gradient * slot.scale
        elif slot.is_apart:
            keep(slot)
            unscaled.append(view if slot.holds_gradient else view.zero_())
        elif gradient is None:
            view.zero_()
        elif gradient is view:
            unscaled.append(view)
        else:
            views.append(view)
            gradients.append(_dense(gradient, slot))
            parameter.grad = view
    if views:
        torch._foreach_copy_(views, gradients)
    if slots[0].scale != 1.0 and (views or unscaled):
        torch._foreach_mul_(views + unscaled, slots[0].scale)


def is_replaced(slot: GradientSlot) -> bool:
    """Whether the user has replaced or removed a gradient since its bucket was filled."""
    gradient = slot.parameter.grad
    if gradient is slot.view:
        return False
    return gradient is None if slot.is_sparse else gradient is not None or not slot.is_apart


def _empty_rows(parameter: nn.Parameter) -> torch.Tensor:
    indices = torch.zeros(1, 0, dtype=torch.long, device=parameter.device)
    return torch.sparse_coo_tensor(indices, parameter.new_zeros(0, *parameter.shape[1:]), parameter.shape)


def _dense(gradient: torch.Tensor, slot: GradientSlot) -> torch.Tensor:
    """The gradient, unless it is sparse unexpectedly."""
    if gradient.layout != torch.strided:
        raise ValueError(
            f"parameter {slot.name!r} got a sparse gradient, but no nn.Embedding(sparse=True) holds it: use one, or a "
            "dense gradient"
        )
    return gradient
