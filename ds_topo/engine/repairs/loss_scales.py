"""Scale the losses of engines in fp16, alike on all ranks of a grid.

*Without ZeRO.* DeepSpeed's optimizers divide gradients by the loss scale, but ``engine.backward`` never multiplies the
loss by it: updates are too small by up to that factor, and nothing is clipped. On a grid, ``engine.backward``
multiplies the loss by the loss scale.

*torch_autocast.* DeepSpeed gives each rank a ``GradScaler`` of torch's. It fails on stages of a pipeline that have no
loss, decides on each rank alone whether a step overflowed, and with ZeRO it divides gradients only after they were
clipped: a norm of 1.1 counts as 72,000. Here ZeRO's optimizers use their own loss scale instead, as in fp16 without
autocast. An engine without ZeRO gets a scaler that decides with all ranks, and reports a step that it skips as ZeRO
does. DeepSpeed also keeps for the whole process that an engine has used ``torch_autocast``, so that later engines get a
loss scale, and communicate in other data types: that is hidden from them.

But for that stage, a program sees no error: a loss that hardly falls, a norm that is too large by the loss scale, or a
loss scale of an engine in fp32.

Releases: all.
Reports: deepspeedai/DeepSpeed#8393, an open pull request, is about fp16 without ZeRO, and deepspeedai/DeepSpeed#7946
about what ``torch_autocast`` keeps for the process. No public report found of the norm that is clipped.
"""

from __future__ import annotations

import logging
import math
import weakref
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import log_dist

from ds_topo.base.classes import Mixin
from ds_topo.engine.config import Case
from ds_topo.engine.norms import largest, sum_over_grid
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.mpu import MpuGrid


class LossScales(EngineOnGrid):
    """An engine in fp16 or with ``torch_autocast``, or in a process where another engine has used that."""

    torch_autocast_z0_gradscaler: Any

    def built_inside(self, undo: ExitStack, case: Case) -> None:
        """Use ``torch_autocast`` only if the engine's own config says so."""
        super().built_inside(undo, case)
        for name in ("TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE"):
            undo.callback(setattr, torch_autocast, name, getattr(torch_autocast, name))
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False

    def complete(self) -> None:
        """Replace the scaler of ``torch_autocast`` by one with a decision of all ranks.

        In fp16 without ZeRO let losses be scaled, and log that DeepSpeed's own engine does not.
        """
        super().complete()
        before, optimizer = self.torch_autocast_z0_gradscaler, self.optimizer
        if before is not None:
            self.torch_autocast_z0_gradscaler = AutocastScaler(self.mpu, optimizer)
        elif getattr(optimizer, "torch_autocast_gradscaler", None) is not None:  # of ZeRO
            optimizer.torch_autocast_gradscaler = None
            optimizer.loss_scaler = _dynamic_scale()
            optimizer.dynamic_loss_scale = optimizer.check_grad_overflow = True
        is_of_fp16 = self.fp16_enabled() and isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer))
        if self.mpu.settle_norms() and is_of_fp16:
            log_dist(
                "ds_topo: losses are multiplied by the loss scale, which DeepSpeed's own engine omits in fp16 without "
                "ZeRO: its updates are smaller, and it clips nothing. To compare runs, set grid.correct_norms = False",
                ranks=[0],
                level=logging.WARNING,
            )
            self.torch_autocast_z0_gradscaler = LossScaler(optimizer.loss_scale_config)
        self.mpu.on_destroy(partial(_restore_scaler, weakref.ref(self), before))
        if self.torch_autocast_enabled():
            self.give_optimizer(Autocast)

    def clip_fp32_gradients(self) -> None:
        """Let a step that ``torch_autocast`` skips have the norm inf, as in ZeRO."""
        scaler = self.torch_autocast_z0_gradscaler
        if isinstance(scaler, AutocastScaler) and scaler.has_overflow:
            self._global_grad_norm = torch.tensor(math.inf)
        else:
            super().clip_fp32_gradients()

    def destroy(self) -> None:
        """Take back what the loss scaler has set on the program's optimizer."""
        _release_scaler(vars(self).get("torch_autocast_z0_gradscaler"))
        super().destroy()


class Autocast(Mixin, ZeROOptimizer):  # type: ignore[misc]
    """An optimizer of ZeRO with ``torch_autocast``."""

    def get_param_comm_dtype(self, param: torch.nn.Parameter) -> torch.dtype:
        """Return the type in which gradients travel: DeepSpeed asks for the last engine of the process."""
        dtype: torch.dtype = torch_autocast.get_comm_dtype(param)
        return dtype


def _restore_scaler(engine: weakref.ref[LossScales], scaler: Any) -> None:
    living = engine()
    ours = None if living is None else vars(living).get("torch_autocast_z0_gradscaler")
    if living is not None and isinstance(ours, (LossScaler, AutocastScaler)):  # it was not destroyed
        _release_scaler(ours)
        living.torch_autocast_z0_gradscaler = scaler


def _release_scaler(scaler: Any) -> None:
    if isinstance(scaler, AutocastScaler):
        scaler.release()


# -- fp16 without ZeRO -----------------------------------------------------------------------------------------------


class LossScaler:
    """Scales the losses of an engine in fp16 without ZeRO; it has the methods of torch's ``GradScaler``.

    DeepSpeed's optimizers of fp16 divide gradients by the loss scale themselves.
    """

    def __init__(self, state: LossScaleConfig) -> None:
        self._state = state

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = loss.float() * self._state.cur_scale
        return scaled

    def unscale_(self, optimizer: object) -> None:
        """No-op: the optimizer does this in its step."""

    def step(self, optimizer: Any) -> None:
        """Take a step, and let an optimizer that reports the norm of scaled gradients report that of gradients."""
        scale = self._state.cur_scale
        optimizer.step()
        if isinstance(optimizer, FP16_UnfusedOptimizer) and not optimizer.overflow:  # a skipped step may keep the norm
            optimizer._global_grad_norm /= scale

    def update(self) -> None:
        """No-op: the optimizer does this in its step."""


# -- torch_autocast ---------------------------------------------------------------------------------------------------

FIRST_SCALE, STEPS_TO_GROW, LOWEST_SCALE = 2.0**16, 2000, 2.0**-14
"""The scale of the first step and the steps without overflow before it grows, as in torch's ``GradScaler``; and the
lowest scale."""


def _dynamic_scale() -> DynamicLossScaler:
    """Return a scale that is halved after an overflow, and doubled after many steps without one."""
    return DynamicLossScaler(
        FIRST_SCALE, STEPS_TO_GROW, LOWEST_SCALE, 1, consecutive_hysteresis=False, raise_error_at_min_scale=False
    )


class AutocastScaler:
    """A scaler with the methods of torch's ``GradScaler``, with one scale and one decision of all ranks of a grid.

    The optimizer gets the attribute ``overflow``, by which DeepSpeed and accelerate notice a step that was skipped.
    """

    def __init__(self, grid: MpuGrid, optimizer: Any) -> None:
        self._grid, self._optimizer = grid, optimizer
        self._scale = _dynamic_scale()
        self.has_overflow: bool | None = None
        """None until the gradients of this step have been divided."""
        optimizer.overflow = False

    def release(self) -> None:
        """Take the attribute of the optimizer back, which the program may give to another engine."""
        vars(self._optimizer).pop("overflow", None)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale."""
        scaled: torch.Tensor = self._scale.scale_loss(loss)
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the scale, and find out whether any rank has one that is not finite; collective."""
        if self.has_overflow is not None:
            return
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        gradients = [each.grad for each in parameters if each.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / self._scale.loss_scale)
        own = largest(gradients).to(get_accelerator().current_device_name())
        self.has_overflow = not sum_over_grid(own, self._grid, is_largest=True)[0].isfinite()

    def step(self, optimizer: Any) -> None:
        """Take a step, unless a gradient of any rank is not finite."""
        self.unscale_(optimizer)
        self._optimizer.overflow = self.has_overflow
        if not self.has_overflow:
            optimizer.step()

    def update(self) -> None:
        """Halve or double the scale if this step calls for it."""
        self._scale.update_scale(self.has_overflow)
        self.has_overflow = None
