"""Measure the size of a live ``torch.nn.Module``, layer by layer, by one forward pass on the meta device.

Nothing is allocated: the module's parameters must be on ``meta`` (build it under ``with torch.device("meta")``). A
model of any size is measured in seconds on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_topo.errors import TopologyError
from ds_topo.plan.model import MeasuredLayer, MeasuredProduct, Model

BEFORE, AFTER = "before the layers", "after the layers"
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def model_from_module(module: nn.Module, sample: Any, name: str = "") -> Model:
    """Return a model to plan for: parameters, products, attention, memory traffic and kept values of every layer.

    The layers are the items of the module's largest ``Sequential`` or ``ModuleList``. The parts before and after them
    are two more. Tensor parallelism is not planned for it, since the module does not tell how it would be split.

    Args:
        module: a module on the meta device.
        sample: one sequence's input, ``[1, positions]`` token ids or ``[1, positions, width]`` values, or the
            positional arguments of ``forward`` as a tuple.

    >>> import torch
    >>> with torch.device("meta"):
    ...     module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    ...     model = model_from_module(module, torch.zeros(1, 16, 8))
    >>> model.parameters, model.layers, model.flops_per_token(16) == 3 * 6 * 8 * 8
    (216, 3, True)
    """
    arguments = sample if isinstance(sample, tuple) else (sample,)
    away = [key for key, parameter in module.named_parameters() if parameter.device.type != "meta"]
    if away:
        raise TopologyError(
            f"module: parameter {away[0]!r} is not on the meta device; build the module under "
            '`with torch.device("meta"):`'
        )
    first = next((argument for argument in arguments if isinstance(argument, torch.Tensor)), None)
    if first is None or first.dim() < 2 or first.shape[0] != 1:
        raise TopologyError("sample: give one sequence, a tensor of shape [1, positions] or [1, positions, width]")
    recorder = _Recorder(int(first.shape[1]))
    owners = _run(module, arguments, recorder)
    layers = []
    seen: set[int] = set()
    for key, parameters in owners.items():
        layer = recorder.layer(key)
        sizes = [parameter.numel() for parameter in parameters if id(parameter) not in seen]
        seen.update(id(parameter) for parameter in parameters)
        layer.weights, layer.largest_weight = sum(sizes), max(sizes, default=0)
        if layer.weights or layer.products or layer.values:
            layers.append(layer)
    width = max((layer.output for layer in layers), default=0) / recorder.positions
    return Model(
        name=name or type(module).__name__,
        hidden=max(1, round(width)),
        vocabulary=0,
        sequence=recorder.positions,
        blocks=tuple(layers),
    )


class _Recorder(TorchDispatchMode):
    """Counts a forward pass by the layer that runs: products by their sizes, other operators by what they move."""

    def __init__(self, positions: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.positions = positions
        self.layers: dict[str, MeasuredLayer] = {}
        self.stack: list[str] = []
        """The layers that run, the innermost last."""
        self.passed = False
        """True once a layer has run."""
        self.used_before: set[int] = set()
        """Parameters that were used before the first layer."""
        self._kept: dict[int, torch.UntypedStorage] = {}
        """The kept storages. They stay alive, so that no other one gets the identity of one of them."""

    def layer(self, name: str) -> MeasuredLayer:
        return self.layers.setdefault(name, MeasuredLayer(name, self.positions))

    @property
    def current(self) -> MeasuredLayer:
        """The counts of the layer that runs."""
        return self.layer(self.stack[-1] if self.stack else AFTER if self.passed else BEFORE)

    def enter(self, name: str) -> Callable[..., None]:
        return lambda layer, inputs: self.stack.append(name)

    def leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(first, torch.Tensor):
            self.current.output = float(first.numel())
        self.stack.pop()
        self.passed = True

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd keeps for backward, every storage once, parameters aside. Return it."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        storage = tensor.untyped_storage()
        if not tensor.is_floating_point():
            self.current.kept_indices += tensor.numel() * tensor.element_size()
        elif storage._cdata not in self._kept:
            self.current.kept += storage.nbytes() / tensor.element_size()
            self._kept[storage._cdata] = storage
        return tensor

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, layer = function(*args, **(kwargs or {})), self.current
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not self.passed and not self.stack:
            self.used_before.update(id(leaf) for leaf in inputs if isinstance(leaf, nn.Parameter))
        if function.overloadpacket in _PRODUCTS:
            left, right = inputs[-2:]
            count = left.shape[0] if left.dim() == 3 else 1
            product = MeasuredProduct(left.shape[-2], right.shape[-1], left.shape[-1], count, batched=left.dim() == 3)
            layer.products.append(product)
        elif not function.is_view and function.overloadpacket is not torch.ops.aten.new_empty:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            layer.values += sum(tensor.numel() for tensor in (*inputs, *outputs))
            layer.operators += 1
        return result


def _run(module: nn.Module, arguments: tuple[Any, ...], recorder: _Recorder) -> dict[str, list[nn.Parameter]]:
    """Run forward once, and count. Return each layer's parameters.

    Parameters of no layer belong to the part before or after the layers, by their first use.
    """
    layers = _layers_of(module)
    with ExitStack() as stack:
        for name, layer in layers:
            stack.callback(layer.register_forward_pre_hook(recorder.enter(name)).remove)
            stack.callback(layer.register_forward_hook(recorder.leave, always_call=True).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor))
        stack.enter_context(recorder)
        stack.enter_context(_WithoutScores(recorder))
        module(*(value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments))
    owners = {BEFORE: [], **{name: list(layer.parameters()) for name, layer in layers}, AFTER: []}
    inside = {id(parameter) for parameters in owners.values() for parameter in parameters}
    for parameter in module.parameters():
        if id(parameter) not in inside:
            owners[BEFORE if id(parameter) in recorder.used_before else AFTER].append(parameter)
    return owners


def _layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the items of the list of modules that holds most parameters; of equal lists, the outermost."""
    lists = [
        (sum(parameter.numel() for parameter in child.parameters()), -path.count("."), path, child)
        for path, child in module.named_modules()
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1
    ]
    if not lists:
        return []
    _, _, path, chosen = max(lists, key=lambda item: item[:2])
    return [(f"{path}.{index}" if path else str(index), layer) for index, layer in enumerate(chosen)]


class _Attention(torch.autograd.Function):
    """Attention without scores, as in flash kernels: keeps queries, keys, values and the result."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, result)
        return result


class _WithoutScores(TorchFunctionMode):
    """Replaces torch's attention by :class:`_Attention`, since torch has no flash kernel for meta tensors."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            function = self._attend
        return function(*args, **(kwargs or {}))

    def _attend(
        self, query: Any, key: Any, value: Any, mask: Any = None, dropout: float = 0, is_causal: bool = False, **_: Any
    ) -> Any:
        pairs = query.numel() // query.shape[-1] * key.shape[-2]
        layer = self._recorder.current
        layer.core_flops += 2.0 * pairs * (query.shape[-1] + value.shape[-1]) * (0.5 if is_causal else 1.0)
        layer.core_width = query.shape[-1]
        return _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
