"""What becomes of gradients once they are reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.copy_in import late_gradient
from ds_topo.reducer.options import ReductionOptions
from ds_topo.reducer.parameter_state import ParameterState


def add_late_gradients(
    late: Sequence[ParameterState], groups: Sequence[ProcessGroup], scales: tuple[float, float]
) -> None:
    """Reduce what came after parameters were copied in, and add it to their views; collective over each one's group.

    Args:
        late: the same on all ranks.
        groups: of each.
        scales: what gradients are multiplied by before and after the sum.
    """
    before, after = scales
    for state, group in sorted(zip(late, groups, strict=True), key=lambda pair: pair[0].index):
        gradient = late_gradient(state)
        gradient = gradient.coalesce() if state.is_sparse else gradient
        gradient.mul_(before)
        dist.all_reduce(gradient, group=group)
        gradient.mul_(after)
        if state.region is None:
            state.view = state.view.add_(gradient)
        else:
            state.region.gradients.add(state.parameter, gradient)


def hand_out(
    states: Sequence[ParameterState],
    options: ReductionOptions,
    without: Sequence[ParameterState],
    unused: Sequence[ParameterState],
) -> None:
    """Give parameters gradients that are not yet theirs; those that no rank used keep what they have.

    Args:
        states: all.
        options: of the reducer.
        without: those that had no gradient here.
        unused: those that no rank used.
    """
    keep = {state.index for state in unused}
    for state in states if options.allow_late_gradients else without:
        if state.index not in keep and not state.is_apart and state.parameter.requires_grad:
            state.parameter.grad = state.view
    for state in states:
        if not (state.is_apart or state.is_sparse):
            continue
        parameter = state.parameter
        if not state.leaves_gradient:
            parameter.grad = None
        elif state.index in keep:
            continue
        elif state.is_sparse:
            parameter.grad = state.view
        else:
            setattr(parameter, "main_grad", state.view)  # noqa: B010
            parameter.grad = state.view.to(parameter.dtype)
