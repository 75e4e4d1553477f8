"""The size of a live ``torch.nn.Module``, layer by layer, from one forward pass on the meta device.

Nothing is allocated: the module's parameters must be on ``meta`` (build it under ``with torch.device("meta")``), so
that a model of any size is measured in seconds on a laptop. torch is imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ds_topo.errors import TopologyError
from ds_topo.measurement.tallies import AFTER, BEFORE, Progress, Tally
from ds_topo.planner.layers import MeasuredLayer
from ds_topo.planner.model import Model

if TYPE_CHECKING:
    from torch import nn


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
        tally = tallies.get(key, Tally())
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


def _run(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[dict[str, Tally], dict[str, list[nn.Parameter]]]:
    """Forward once; what each layer did, and the parameters that are its own."""
    import torch

    from ds_topo.measurement.recording import recorded

    layers = _layers_of(module)
    inside = {id(parameter) for _, layer in layers for parameter in layer.parameters()}
    rest = [parameter for parameter in module.parameters() if id(parameter) not in inside]
    state = Progress()
    with ExitStack() as stack:
        for name, layer in layers:
            stack.callback(layer.register_forward_pre_hook(_entering(state, name)).remove)
            stack.callback(layer.register_forward_hook(_leaving(state), always_call=True).remove)
        stack.enter_context(recorded(state))
        arguments = tuple(value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments)
        module(*arguments)
    owners = _owners(module, layers, rest, state)
    return state.tallies, owners


def _owners(
    module: nn.Module, layers: list[tuple[str, nn.Module]], rest: list[nn.Parameter], state: Progress
) -> dict[str, list[nn.Parameter]]:
    """Parameters by layer; those of no layer belong to where they are used first."""
    before = [parameter for parameter in rest if id(parameter) in state.used_before]
    after = [parameter for parameter in rest if id(parameter) not in state.used_before]
    owners = {BEFORE: before}
    for name, layer in layers:
        owners[name] = list(layer.parameters())
    owners[AFTER] = after
    return owners


def _entering(state: Progress, name: str) -> Callable[..., None]:
    def hook(layer: nn.Module, inputs: Any) -> None:
        state.stack.append(name)

    return hook


def _leaving(state: Progress) -> Callable[..., None]:
    def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
        import torch

        first = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(first, torch.Tensor):
            state.current.output = float(first.numel())
        state.stack.pop()
        state.passed = True

    return hook
