"""The size of a live ``torch.nn.Module``, layer by layer, from one forward pass on the meta device.

Nothing is allocated: the module's parameters must be on ``meta`` (build it under ``with torch.device("meta")``), so
that a model of any size is measured in seconds on a laptop. torch is imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds_topo.errors import TopologyError
from ds_topo.planner.layers import MeasuredLayer, MeasuredProduct
from ds_topo.planner.model import Model

if TYPE_CHECKING:
    import torch
    from torch import nn

BEFORE, AFTER = "before the layers", "after the layers"


@dataclass
class _Tally:
    """What is counted for one layer while it runs."""

    products: list[MeasuredProduct] = field(default_factory=list)
    core_flops: float = 0.0
    core_width: int = 1
    values: float = 0.0
    """Values that operators other than products read and write."""
    operators: int = 0
    kept: dict[int, float] = field(default_factory=dict)
    """Values kept for backward, by storage."""
    indices: float = 0.0
    """Bytes kept that are not floating point."""
    output: float = 0.0


def model_from_module(module: nn.Module, sample: Any, name: str = "") -> Model:
    """A model to plan for: parameters, products, attention, memory traffic and kept values of every layer.

    The layers are the items of the module's largest ``Sequential`` or ``ModuleList``; what comes before and after them
    are two more. Tensor parallelism is not planned for it: nothing tells how the module would be split.

    Args:
        module: on the meta device.
        sample: one sequence's input, ``[1, positions]`` token ids or ``[1, positions, width]`` values, or the
            positional arguments of ``forward`` as a tuple.
        name: for tables.

    Raises:
        TopologyError: parameters that are not on the meta device, or a sample whose first size is not 1.

    >>> import torch
    >>> with torch.device("meta"):
    ...     module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    ...     model = model_from_module(module, torch.zeros(1, 16, 8))
    >>> model.parameters, model.layers, model.flops_per_token(16) == 3 * 6 * 8 * 8
    (216, 3, True)
    """
    arguments = sample if isinstance(sample, tuple) else (sample,)
    positions = _positions(module, arguments)
    tallies, names = _run(module, arguments)
    layers = []
    seen: set[int] = set()
    for key, owner in names.items():
        tally = tallies.get(key, _Tally())
        parameters = [parameter for parameter in owner if id(parameter) not in seen]
        seen.update(id(parameter) for parameter in parameters)
        sizes = [parameter.numel() for parameter in parameters]
        layers.append(
            MeasuredLayer(
                name=key,
                weights=sum(sizes),
                largest_weight=max(sizes, default=0),
                products=tuple(tally.products),
                core_flops=tally.core_flops,
                core_width=tally.core_width,
                values=tally.values,
                operators=tally.operators,
                kept=sum(tally.kept.values()),
                kept_indices=tally.indices,
                output=tally.output,
                positions=positions,
            )
        )
    layers = [layer for layer in layers if layer.weights or layer.products or layer.values]
    width = max((layer.output for layer in layers), default=0) / positions
    return Model(
        name=name or type(module).__name__,
        hidden=max(1, round(width)),
        vocabulary=0,
        sequence=positions,
        blocks=tuple(layers),
    )


def _positions(module: nn.Module, arguments: tuple[Any, ...]) -> int:
    import torch

    away = [key for key, parameter in module.named_parameters() if parameter.device.type != "meta"]
    if away:
        raise TopologyError(
            f"module: parameter {away[0]!r} is not on the meta device; build the module under "
            '`with torch.device("meta"):`'
        )
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    if not tensors or tensors[0].dim() < 2 or tensors[0].shape[0] != 1:
        raise TopologyError("sample: give one sequence, a tensor of shape [1, positions] or [1, positions, width]")
    return int(tensors[0].shape[1])


def _layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The items of the list of modules that holds most parameters."""
    from torch import nn

    lists = [
        (sum(parameter.numel() for parameter in child.parameters()), -depth.count("."), depth, child)
        for depth, child in module.named_modules()
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1
    ]
    if not lists:
        return []
    _, _, path, chosen = max(lists, key=lambda item: item[:2])
    return [(f"{path}.{index}" if path else str(index), layer) for index, layer in enumerate(chosen)]


def _run(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[dict[str, _Tally], dict[str, list[nn.Parameter]]]:
    """Forward once; what each layer did, and the parameters that are its own."""
    import torch

    layers = _layers_of(module)
    inside = {id(parameter) for _, layer in layers for parameter in layer.parameters()}
    rest = [parameter for parameter in module.parameters() if id(parameter) not in inside]
    state = _State()
    with ExitStack() as stack:
        for name, layer in layers:
            stack.callback(layer.register_forward_pre_hook(_entering(state, name)).remove)
            stack.callback(layer.register_forward_hook(_leaving(state), always_call=True).remove)
        stack.enter_context(_recorded(state))
        arguments = tuple(value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments)
        module(*arguments)
    owners = _owners(module, layers, rest, state)
    return state.tallies, owners


def _owners(
    module: nn.Module, layers: list[tuple[str, nn.Module]], rest: list[nn.Parameter], state: _State
) -> dict[str, list[nn.Parameter]]:
    """Parameters by layer; those of no layer belong to where they are used first."""
    before = [parameter for parameter in rest if id(parameter) in state.used_before]
    after = [parameter for parameter in rest if id(parameter) not in state.used_before]
    owners = {BEFORE: before}
    for name, layer in layers:
        owners[name] = list(layer.parameters())
    owners[AFTER] = after
    return owners


class _State:
    """Which layer runs, and what was counted so far."""

    def __init__(self) -> None:
        self.tallies: dict[str, _Tally] = {}
        self.stack: list[str] = []
        self.passed = False
        """Whether a layer has run."""
        self.used_before: set[int] = set()
        """Parameters that were used before the first layer."""

    @property
    def current(self) -> _Tally:
        """Of the layer that runs."""
        name = self.stack[-1] if self.stack else AFTER if self.passed else BEFORE
        return self.tallies.setdefault(name, _Tally())


def _entering(state: _State, name: str) -> Callable[..., None]:
    def hook(layer: nn.Module, inputs: Any) -> None:
        state.stack.append(name)

    return hook


def _leaving(state: _State) -> Callable[..., None]:
    def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
        import torch

        first = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(first, torch.Tensor):
            state.current.output = float(first.numel())
        state.stack.pop()
        state.passed = True

    return hook


@contextmanager
def _recorded(state: _State) -> Iterator[None]:
    """Count operators, attention and what autograd keeps."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten = torch.ops.aten
    quiet: list[bool] = []

    class Attention(torch.autograd.Function):
        """Attention without scores, as flash kernels do it: keeps queries, keys, values and the result."""

        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            result = query.new_empty((*query.shape[:-1], value.shape[-1]))
            ctx.save_for_backward(query, key, value, result)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])

    class Functions(TorchFunctionMode):
        """Puts that in place of torch's own, which has no flash kernel for meta tensors."""

        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            options = dict(kwargs or {})
            if function is not torch.nn.functional.scaled_dot_product_attention:
                return function(*args, **options)
            query, key, value = (args[index] if index < len(args) else options[name] for index, name in _QKV)
            causal = bool(options.get("is_causal", args[5] if len(args) > 5 else False))
            pairs = query.numel() // query.shape[-1] * key.shape[-2]
            tally = state.current
            tally.core_flops += 2.0 * pairs * (query.shape[-1] + value.shape[-1]) * (0.5 if causal else 1.0)
            tally.core_width = query.shape[-1]
            quiet.append(True)
            try:
                return Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
            finally:
                quiet.pop()

    class Operators(TorchDispatchMode):
        """Counts products by their sizes, everything else by the values that it moves."""

        def __torch_dispatch__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            if quiet:
                return result
            tally = state.current
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if not state.passed and not state.stack:
                state.used_before.update(id(leaf) for leaf in inputs if isinstance(leaf, torch.nn.Parameter))
            packet = function.overloadpacket
            if packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
                left, right = inputs[-2:]
                count = left.shape[0] if left.dim() == 3 else 1
                tally.products.append(
                    MeasuredProduct(left.shape[-2], right.shape[-1], left.shape[-1], count, batched=left.dim() == 3)
                )
            elif not function.is_view:
                outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                tally.values += sum(tensor.numel() for tensor in (*inputs, *outputs))
                tally.operators += 1
            return result

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tally = state.current
        if isinstance(tensor, torch.nn.Parameter) or (
            getattr(tensor, "_base", None) is not None and isinstance(tensor._base, torch.nn.Parameter)
        ):
            return tensor
        storage = tensor.untyped_storage()
        known = any(storage._cdata in other.kept for other in state.tallies.values())
        if tensor.is_floating_point() and not known:
            tally.kept[storage._cdata] = storage.nbytes() / tensor.element_size()
            kept_alive.append(storage)
        elif not tensor.is_floating_point():
            tally.indices += tensor.numel() * tensor.element_size()
        return tensor

    kept_alive: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Operators(), Functions():  # type: ignore[no-untyped-call]
        yield


_QKV = ((0, "query"), (1, "key"), (2, "value"))
