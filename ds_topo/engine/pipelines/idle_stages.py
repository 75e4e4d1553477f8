"""Let a stage of a pipeline train although it has no trainable parameter, or none in a group of the optimizer.

torch and DeepSpeed refuse an optimizer without parameters, also one that the program builds itself. They drop empty
groups (a learning-rate scheduler of the program still counts them), and start the backward pass of the first stage at
outputs that need no gradient. All this fails on that stage alone. A stage without trainable parameters, or without
those of a group that such a scheduler counts, therefore gets a *placeholder* in each empty group: one element, zero,
with a gradient of zero. The first is added when the stage is built. So groups, schedulers and collectives are the same
on all stages. The outputs of the stage are connected to its placeholders without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ds_topo.base.marks import PLACEHOLDERS
from ds_topo.engine.on_grid import EngineOnGrid


class EngineWithPlaceholders(EngineOnGrid):
    """An engine of a pipeline with several stages, of which one without trainable parameters fails alone."""

    def _configure_distributed_model(self, model: Any) -> None:
        """Remove a placeholder that is not needed."""
        if hasattr(model, PLACEHOLDERS) and not (self.client_optimizer or self.optimizer_name()):
            delattr(model, PLACEHOLDERS)  # with which the stage was built
        super()._configure_distributed_model(model)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Add a placeholder to each group of a pipeline without a trainable parameter."""
        are_counted = self.client_lr_scheduler is not None
        model_parameters = fill_groups(self.module, client_optimizer, model_parameters, self.device, some=are_counted)
        made: Iterable[nn.Parameter] = getattr(self.module, PLACEHOLDERS, ())
        if made:
            self.mpu.on_destroy(self.module.register_forward_hook(_connect).remove)
        self.param_names.update({each: f"{PLACEHOLDERS}.{number}" for number, each in enumerate(made)})
        super()._configure_optimizer(client_optimizer, model_parameters)


class Connected(torch.autograd.Function):
    """Return a tensor as it is, as if it were computed from placeholders, whose gradients are zero.

    >>> placeholder = torch.zeros(1, requires_grad=True)
    >>> Connected.apply(torch.ones(2), placeholder).sum().backward()
    >>> placeholder.grad
    tensor([0.])
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *placeholders: torch.Tensor) -> torch.Tensor:
        """Return the tensor, ``[...] -> [...]``."""
        ctx.save_for_backward(*placeholders)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient as it is, and zeros."""
        return gradients[0], *map(torch.zeros_like, ctx.saved_tensors)


def add_placeholders(module: nn.Module, number: int, device: Any = None) -> list[nn.Parameter]:
    """Add placeholders to a stage, and return them."""
    some = next((each for each in module.parameters() if each.is_floating_point()), torch.zeros(1))
    made = [nn.Parameter(torch.zeros(1, dtype=some.dtype, device=device or some.device)) for _ in range(number)]
    every = nn.ParameterList([*getattr(module, PLACEHOLDERS, ()), *made])
    every.register_load_state_dict_post_hook(_ignore_missing)
    setattr(module, PLACEHOLDERS, every)
    return made


def _ignore_missing(_: nn.Module, keys: Any) -> None:
    """Let a stage load weights that a program saved without placeholders."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if PLACEHOLDERS not in key]


def fill_groups(module: nn.Module, optimizer: Any, parameters: list[Any], device: Any, *, some: bool) -> list[Any]:
    """Add a placeholder to each group without a trainable parameter; return the parameters or groups to optimize.

    With ``some``, this is also done if other groups have trainable parameters. An optimizer of the program may have the
    placeholder with which its stage was built.
    """
    known = {id(each) for each in getattr(module, PLACEHOLDERS, ())}
    groups: list[dict[str, Any]]
    is_built = isinstance(optimizer, torch.optim.Optimizer)
    if is_built:
        groups = optimizer.param_groups
    elif parameters and isinstance(parameters[0], dict):
        groups = [{**group, "params": _as_list(group["params"])} for group in parameters]
    else:
        groups = [{"params": list(parameters)}]
    trained = [{id(each) for each in group["params"] if each.requires_grad} for group in groups]
    idle = [group for group, own in zip(groups, trained, strict=True) if not own - known]
    if idle and (some or len(idle) == len(groups)):
        idle = [group for group, own in zip(groups, trained, strict=True) if not own]
        for group, placeholder in zip(idle, add_placeholders(module, len(idle), device), strict=True):
            group["params"] = [*group["params"], placeholder]
    if is_built or not hasattr(module, PLACEHOLDERS):
        return parameters
    return groups if parameters and isinstance(parameters[0], dict) else groups[0]["params"]


def _as_list(parameters: Any) -> list[Any]:
    return [parameters] if torch.is_tensor(parameters) else list(parameters)


def _connect(module: nn.Module, _: Any, outputs: Any) -> Any:
    """Connect the first output of a stage that can have a gradient to the placeholders."""
    placeholders: Iterable[torch.Tensor] = getattr(module, PLACEHOLDERS)
    several = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    place = next((n for n, each in enumerate(several) if torch.is_tensor(each) and each.is_floating_point()), None)
    if place is None or not torch.is_grad_enabled():
        return outputs
    several[place] = Connected.apply(several[place], *placeholders)  # type: ignore[no-untyped-call]
    return type(outputs)(several) if isinstance(outputs, (tuple, list)) else several[0]
