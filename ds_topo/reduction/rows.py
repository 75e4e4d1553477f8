"""Reduce the gradients of ``nn.Embedding(sparse=True)``, which have only the rows that a batch has used.

Each has a bucket of its own, without memory: the gradient stays in ``parameter.grad``, and its sum has the rows of all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ds_topo.reduction.buckets import GradientBucket
from ds_topo.reduction.parameters import COPIED, ROWS, GradientPlace, ParameterState, Route


def places_of_rows(module: nn.Module) -> dict[torch.Tensor, GradientPlace]:
    """Return the places of the gradients of a module's sparse embeddings."""
    embeddings = (part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    return {part.weight: PlaceOfRows() for part in embeddings if part.sparse}


class PlaceOfRows(GradientPlace):
    """The place of one sparse gradient."""

    home = ROWS

    def check(self, module: nn.Module, name: str) -> None:
        """Refuse a weight that another layer uses, too: together their gradients are dense."""
        weight = module.get_parameter(name)
        for prefix, part in module.named_modules():
            is_sparse = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
            for own, parameter in part._parameters.items():
                if parameter is weight and not is_sparse:
                    other = f"{prefix}.{own}".lstrip(".")
                    raise ValueError(
                        f"parameter {name!r} is the weight of an nn.Embedding(sparse=True) and of another layer, "
                        f"as {other!r}, whose gradient is dense: give the embedding sparse=False"
                    )

    def check_wider(self) -> None:
        raise ValueError(
            "manager: sums over replicas do not have the sparse gradients of nn.Embedding(sparse=True): give it "
            "sparse=False"
        )

    def bucket(self, index: int, members: Sequence[ParameterState]) -> RowsBucket:
        return RowsBucket(index, members)


class RowsBucket(GradientBucket):
    """The bucket of one sparse gradient."""

    def _first_memory(self) -> torch.Tensor:
        first = self.members[0]
        return torch.empty(0, dtype=first.dtype, device=first.parameter.device)

    def set_views(self) -> None:
        """No-op: the view is set when the gradient has arrived."""

    def release(self) -> None:
        """No-op: the view is the gradient itself."""

    def accumulate(self, state: ParameterState) -> None:
        """No-op: autograd adds further rows to ``parameter.grad``."""

    def copy_in(self, members: Sequence[ParameterState], in_one_pass: bool = False) -> list[ParameterState]:
        """Scale the gradient; without one it has no rows."""
        for state in members:
            if state.contribution is not COPIED:
                state.contribution = COPIED
                state.view = self.late_gradient(state) * state.scale
                if state.repeats:
                    state.parameter.grad = None
        return []

    def late_gradient(self, state: ParameterState) -> torch.Tensor:
        """Return the gradient; raise if it is dense."""
        parameter, gradient = state.parameter, state.parameter.grad
        if gradient is None:
            indices = torch.zeros(1, 0, dtype=torch.long, device=parameter.device)
            rows = parameter.new_zeros(0, *parameter.shape[1:])
            return torch.sparse_coo_tensor(indices, rows, parameter.shape, check_invariants=False)
        if gradient.layout is torch.strided:
            raise ValueError(
                f"parameter {state.name!r} is the weight of an nn.Embedding(sparse=True), but got a dense gradient: "
                "use the weight in that embedding alone, or give it sparse=False"
            )
        return gradient.detach()

    def add_late(self, state: ParameterState, before: float, after: float) -> None:
        total = start_sum_of_rows(self.late_gradient(state) * before, self.route)()
        state.view = state.view.add_(total.mul_(after))

    def start(self) -> Callable[[], object]:
        """Start the sum of the rows."""
        (state,) = self.members
        summed = start_sum_of_rows(state.view, self.route)

        def wait() -> None:
            state.view = summed()

        return wait

    def take_sum(self, after: float) -> None:
        self.members[0].view = self.members[0].view * after


def unexpected_rows(name: str) -> ValueError:
    """Return the error for a sparse gradient of a parameter that has another place."""
    return ValueError(
        f"parameter {name!r} got a sparse gradient, but no nn.Embedding(sparse=True) holds it: use one, or a dense "
        "gradient"
    )


def start_sum_of_rows(gradient: torch.Tensor, route: Route) -> Callable[[], torch.Tensor]:
    """Start the sum of sparse gradients over a route's group; collective.

    NCCL does not sum sparse tensors. There the ranks gather each other's rows, padded to the longest, as DeepSpeed's
    ``sparse_allreduce`` does; the caller waits for their number.

    Returns:
        A function that waits for the sum and returns it, coalesced.
    """
    gradient = gradient.coalesce()
    if route.traits.sums_sparse:
        work = dist.all_reduce(gradient, group=route.group, async_op=True)

        def summed() -> torch.Tensor:
            work.wait()
            return gradient.coalesce()

        return summed
    indices, values = gradient.indices()[0], gradient.values()
    counts = indices.new_empty(route.size)
    dist.all_gather_into_tensor(counts, counts.new_tensor([len(indices)]), group=route.group)
    numbers: list[int] = counts.tolist()
    most = max(numbers)
    all_indices = indices.new_empty(route.size * most)
    all_values = values.new_empty(route.size * most, *values.shape[1:])
    works = []
    for everyone, own in ((all_indices, indices), (all_values, values)):
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        works.append(dist.all_gather_into_tensor(everyone, padded, group=route.group, async_op=True))

    def gathered() -> torch.Tensor:
        for work in works:
            work.wait()
        is_row = torch.arange(most, device=counts.device) < counts[:, None]
        rows = is_row.flatten().nonzero()[:, 0]
        indices, values = all_indices[rows][None], all_values[rows]
        return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False).coalesce()

    return gathered if most else lambda: gradient
