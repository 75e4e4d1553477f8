"""Operators, attention and what autograd keeps, of a module that runs on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_topo.measurement.tallies import Progress
from ds_topo.planner.layers import MeasuredProduct

_QKV = ((0, "query"), (1, "key"), (2, "value"))
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


@contextmanager
def recorded(state: Progress) -> Iterator[None]:
    """Count operators, attention and what autograd keeps."""
    kept, operators = _Kept(state), _Operators(state)
    saved = torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor)
    with saved, operators, _Functions(state, operators):
        yield


class _Attention(torch.autograd.Function):
    """Attention without scores, as flash kernels do it: keeps queries, keys, values and the result."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _Operators(TorchDispatchMode):
    """Counts products by their sizes, everything else by the values that it moves."""

    def __init__(self, state: Progress) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state
        self.is_counted_apart = False
        """Whether what runs now is counted by somebody else."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.is_counted_apart:
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self._count(function, inputs, result)
        return result

    def _count(self, function: Any, inputs: list[torch.Tensor], result: Any) -> None:
        state, tally = self._state, self._state.current
        if not state.passed and not state.stack:
            state.used_before.update(id(leaf) for leaf in inputs if isinstance(leaf, torch.nn.Parameter))
        if function.overloadpacket in _PRODUCTS:
            left, right = inputs[-2:]
            count = left.shape[0] if left.dim() == 3 else 1
            tally.products.append(
                MeasuredProduct(left.shape[-2], right.shape[-1], left.shape[-1], count, batched=left.dim() == 3)
            )
        elif not function.is_view:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            tally.values += sum(tensor.numel() for tensor in (*inputs, *outputs))
            tally.operators += 1


class _Functions(TorchFunctionMode):
    """Puts :class:`_Attention` in place of torch's own, which has no flash kernel for meta tensors."""

    def __init__(self, state: Progress, operators: _Operators) -> None:
        super().__init__()
        self._state, self._operators = state, operators

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **options)
        query, key, value = (args[index] if index < len(args) else options[name] for index, name in _QKV)
        causal = bool(options.get("is_causal", args[5] if len(args) > 5 else False))
        pairs = query.numel() // query.shape[-1] * key.shape[-2]
        tally = self._state.current
        tally.core_flops += 2.0 * pairs * (query.shape[-1] + value.shape[-1]) * (0.5 if causal else 1.0)
        tally.core_width = query.shape[-1]
        self._operators.is_counted_apart = True
        try:
            return _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
        finally:
            self._operators.is_counted_apart = False


class _Kept:
    """Counts what autograd keeps for backward, every storage once, parameters aside."""

    def __init__(self, state: Progress) -> None:
        self._state = state
        self._storages: list[torch.UntypedStorage] = []
        """Kept alive, so that no other one gets the identity of one of them."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that autograd keeps."""
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return tensor
        tally, storage = self._state.current, tensor.untyped_storage()
        known = any(storage._cdata in other.kept for other in self._state.tallies.values())
        if tensor.is_floating_point() and not known:
            tally.kept[storage._cdata] = storage.nbytes() / tensor.element_size()
            self._storages.append(storage)
        elif not tensor.is_floating_point():
            tally.indices += tensor.numel() * tensor.element_size()
        return tensor
