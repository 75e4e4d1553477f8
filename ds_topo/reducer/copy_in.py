"""How gradients get into their buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ds_topo.reducer.hooks import detached
from ds_topo.reducer.parameter_state import COPIED_IN, ParameterState

_STRIDED = torch.strided
_LARGE_NUMEL = 1 << 14
"""From here on a gradient is better scaled into its bucket at once, while caches hold it, than together with others."""


def is_copied_at_once(state: ParameterState) -> bool:
    """Whether :func:`copy_in_at_once` is for this parameter."""
    if state.is_apart and (state.grad_buffer is not None or state.region is None or not state.accumulates):
        return False
    return state.parameter.numel() >= _LARGE_NUMEL and not state.is_sparse


def copy_in_at_once(state: ParameterState) -> None:
    """Make a large view hold this rank's scaled contribution."""
    parameter, view = state.parameter, state.view
    gradient = parameter.grad
    state.contribution = COPIED_IN
    if state.is_apart:
        _copy_apart(state)
        return
    if gradient is view:
        if state.scale != 1.0:
            view.mul_(state.scale)
    elif gradient is None:
        view.zero_()
    else:
        torch.mul(_dense(gradient, state), state.scale, out=view)
    parameter.grad = None if state.repeats else view


def _copy_apart(state: ParameterState) -> None:
    """The same where the view cannot be the gradient itself."""
    if not state.bucket.is_open:
        state.bucket.open()
    view, gradient = state.view, state.parameter.grad
    if not state.holds_sum and gradient is not None and gradient.dtype == view.dtype:
        torch.mul(_dense(gradient, state), state.scale, out=view)
    else:
        accumulate(state)
        if state.holds_sum:
            view.mul_(state.scale)
        else:
            view.zero_()
    state.holds_sum = True
    state.parameter.grad = None


def accumulate(state: ParameterState) -> None:
    """Move a gradient that is not to be reduced yet into its bucket."""
    gradient = state.parameter.grad
    if state.is_sparse or gradient is None or gradient is state.view:
        return
    if not state.bucket.is_open:
        state.bucket.open()
    if state.is_apart and state.holds_sum:
        state.view.add_(_dense(gradient, state))
    else:
        state.view.copy_(_dense(gradient, state))
    state.holds_sum = state.is_apart
    state.parameter.grad = None if state.is_apart else state.view


def copy_in(members: Sequence[ParameterState]) -> list[ParameterState]:
    """Make the views of a bucket hold this rank's scaled contributions; return the members that have none: zeros."""
    views: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    in_place: list[torch.Tensor] = []
    without: list[ParameterState] = []
    for state in members:
        if state.contribution is COPIED_IN:
            continue
        state.contribution = COPIED_IN
        parameter = state.parameter
        gradient = parameter.grad
        if state.is_sparse:
            state.view = _no_rows(parameter) if gradient is None else _rows(gradient, state) * state.scale
        elif state.is_apart:
            accumulate(state)
            if not state.bucket.is_open:
                state.bucket.open()
            in_place.append(state.view if state.holds_sum else state.view.zero_())
        elif gradient is None:
            state.view.zero_()
            without.append(state)
        elif gradient is state.view:
            in_place.append(gradient)
        else:
            if gradient.requires_grad or gradient.layout is not _STRIDED:
                gradient = _dense(gradient, state)
            views.append(state.view)
            gradients.append(gradient)
            parameter.grad = state.view
        if state.repeats:
            parameter.grad = None  # a further gradient must not be added to what is in flight
    if views:
        torch._foreach_copy_(views, gradients)
    if members[0].scale != 1.0 and (views or in_place):
        torch._foreach_mul_(views + in_place, members[0].scale)
    return without


def is_replaced(state: ParameterState) -> bool:
    """Whether the user has replaced or removed a gradient since it was copied in."""
    gradient = state.parameter.grad
    if state.repeats:
        return gradient is not None and state.arrived <= state.expected
    if gradient is state.view:
        return False
    return gradient is None if state.is_sparse else gradient is not None or not state.is_apart


def _no_rows(parameter: nn.Parameter) -> torch.Tensor:
    indices = torch.zeros(1, 0, dtype=torch.long, device=parameter.device)
    rows = parameter.new_zeros(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(indices, rows, parameter.shape, check_invariants=False)


def late_gradient(state: ParameterState) -> torch.Tensor:
    """What has arrived since the contribution was copied in, in the type and layout of the view; zeros for nothing."""
    gradient = state.parameter.grad
    if state.is_sparse:
        return _no_rows(state.parameter) if gradient is None else _rows(gradient, state)
    if gradient is None:
        return torch.zeros_like(state.parameter, dtype=state.dtype)
    return torch.empty_like(state.parameter, dtype=state.dtype).copy_(_dense(gradient, state))


def _rows(gradient: torch.Tensor, state: ParameterState) -> torch.Tensor:
    """The gradient of a sparse embedding, unless it is dense unexpectedly."""
    if gradient.layout == torch.strided:
        raise ValueError(
            f"parameter {state.name!r} is the weight of an nn.Embedding(sparse=True), but got a dense gradient: use "
            "the weight in that embedding alone, or give it sparse=False"
        )
    return detached(gradient)


def _dense(gradient: torch.Tensor, state: ParameterState) -> torch.Tensor:
    """The gradient without a graph of its own, unless it is sparse unexpectedly."""
    if gradient.layout != torch.strided and state.region is not None:
        return detached(gradient).to_dense()
    if gradient.layout != torch.strided:
        raise ValueError(
            f"parameter {state.name!r} got a sparse gradient, but no nn.Embedding(sparse=True) holds it: use one, or a "
            "dense gradient"
        )
    return detached(gradient)
