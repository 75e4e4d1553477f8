"""Warn of parameters that a program writes, replaces or freezes after ``deepspeed.initialize``.

Engines with bf16, fp16 or ZeRO train a copy of the parameters, the master weights, and overwrite the parameters with
the result. What a program has written to the parameters is lost at the next step unless it calls
``engine.optimizer.refresh_fp32_params()``. DeepSpeed documents this and says nothing. The first step looks for such
writes by the version counters and the addresses of the parameters, which do not see a copy to ``parameter.data``.
Nothing is changed, and nothing is communicated. Each step also looks for parameters that were frozen since.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from ds_topo.base.marks import inner_optimizer
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import listed, warn

_is_trained = attrgetter("requires_grad")
_AT_A_TIME = 1 << 24
"""The number of elements that are compared at once, which limits the memory of a comparison."""
_SWITCH = "set grid.check_weights = False if that is intended"


class NoticedWrites(EngineOnGrid):
    """An engine with master weights, which overwrite what a program writes."""

    mixin_state = "written_weights"
    written_weights: WrittenWeights | None
    """The search; None if the engine only evaluates in bf16."""

    def complete(self) -> None:
        """Look from here."""
        super().complete()
        self.written_weights = None if inner_optimizer(self) is None else WrittenWeights(self)

    def _take_model_step(self, *arguments: Any) -> None:
        """Warn of parameters that the program has changed: the optimizer overwrites them by its own copy."""
        if self.written_weights is not None and self.mpu.check_weights:
            self.written_weights.look()
        super()._take_model_step(*arguments)


class WrittenWeights:
    """The search for parameters of one engine that a program has changed since the engine was built."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._optimizer = engine.optimizer
        self._named = [(name, each) for name, each in engine.module.named_parameters() if each.requires_grad]
        self._parameters = [each for _, each in self._named]
        self._before: list[tuple[int, int]] | None = [*map(_marks_of, self._parameters)]
        """The version counters and addresses at construction; None after the first step."""
        self._has_frozen = False
        """True once the program was warned that it has frozen parameters."""

    def look(self) -> None:
        """Warn of what has changed, at the beginning of a step; local to this rank."""
        if not self._has_frozen and not all(map(_is_trained, self._parameters)):
            self._has_frozen = True
            names = [name for name, parameter in self._named if not parameter.requires_grad]
            warn(
                f"parameters {listed(names)} were frozen after deepspeed.initialize, but an optimizer with master "
                "weights (ZeRO, bf16, fp16) steps on zeros in place of their gradients, so momentum and weight decay "
                "go on moving them. Freeze them before deepspeed.initialize, or give them a parameter group of their "
                f"own and set its lr to 0; {_SWITCH}"
            )
        if self._before is not None:
            self._look_for_writes(self._before)
            self._before = None

    def _look_for_writes(self, before: list[tuple[int, int]]) -> None:
        masters = _masters_of(self._optimizer)
        written, replaced = [], []
        for (name, parameter), old in zip(self._named, before, strict=True):
            if _marks_of(parameter) == old or (place := masters(parameter)) is None:
                continue
            own, master = place
            is_whole = not hasattr(parameter, "ds_id")
            if is_whole and own.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                replaced.append(f"{name}.data")
            elif _differ(own.detach().view(-1), master.detach().view(-1)):
                written.append(name)
        if replaced:
            warn(
                f"{listed(replaced)} were replaced by other tensors after deepspeed.initialize, but the engine trains "
                "the memory that they had before, so these parameters do not change any more. Copy values by "
                "parameter.data.copy_(values) instead, and then call engine.optimizer.refresh_fp32_params(); "
                f"{_SWITCH}"
            )
        if written:
            warn(
                f"parameters {listed(written)} were written after deepspeed.initialize, but this step overwrites them "
                "by the master weights, so what was written is lost. Call engine.optimizer.refresh_fp32_params() "
                f"after you write parameters, as DeepSpeed documents; {_SWITCH}"
            )


def _marks_of(parameter: Any) -> tuple[int, int]:
    """Return the version counter and the address of a parameter; at ZeRO 3 its memory comes and goes."""
    return parameter._version, 0 if hasattr(parameter, "ds_id") else parameter.data_ptr()


_Place: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The elements of a parameter that this rank trains, and their master weights."""


def _masters_of(optimizer: Any) -> Callable[[Any], _Place | None]:
    """Return a function from a parameter to its place; None if this rank does not train it."""
    places: dict[Any, _Place] = {}
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        for each, master in zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True):
            places[each] = each, master
    elif isinstance(optimizer, FP16_Optimizer):
        groups = zip(optimizer.fp16_groups, optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True)
        for members, flat, masters in groups:
            sizes = [each.numel() for each in members]
            places |= zip(members, zip(flat.split(sizes), masters.split(sizes), strict=True), strict=True)
    else:
        return _linked
    return places.get


def _linked(parameter: Any) -> _Place | None:
    """Return the place of a parameter of ZeRO or of ``BF16_Optimizer``."""
    if hasattr(parameter, "ds_id"):
        master = parameter._z3_optimizer.get_local_fp32_param(parameter)
        return parameter.ds_tensor.view(-1)[: master.numel()], master
    linked = getattr(parameter, "_hp_mapping", None)
    return None if linked is None else (linked.lp_fragment, linked.get_hp_fragment())


def _differ(own: torch.Tensor, master: torch.Tensor) -> bool:
    """Tell whether elements are not those of the master weights, to within the rounding."""
    limits = torch.finfo(own.dtype)
    for ours, theirs in zip(own.split(_AT_A_TIME), master.split(_AT_A_TIME), strict=True):
        expected = theirs.to(ours.device).float()
        if bool(((ours.float() - expected).abs() > 2 * limits.eps * (expected.abs() + limits.tiny)).any()):
            return True
    return False
