"""Discard gradients of bf16 that are not finite, as DeepSpeed 0.19.8 does.

A program with ``BF16_Optimizer`` sees an AssertionError without a message in ``engine.step()``, because the norm of
such gradients is -1 there, and under ``python -O`` parameters that are not finite.

Releases: before 0.19.8.
Reports: deepspeedai/DeepSpeed#8614, an open pull request, describes the norm of -1 and the assertion.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from ds_topo.base.classes import Mixin
from ds_topo.base.patches import BF16_DISCARDS_INFINITIES
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.engine.optimizer_norms import bf16_gradient_norm
from ds_topo.mpu import MpuGrid


class WithoutInfinities(EngineOnGrid):
    """An engine in bf16, maybe with ``BF16_Optimizer``, which fails on gradients that are not finite."""

    def complete(self) -> None:
        """Look at the gradients of each step."""
        super().complete()
        if not BF16_DISCARDS_INFINITIES:
            self.give_optimizer(FiniteBF16)


class FiniteBF16(Mixin, BF16_Optimizer):  # type: ignore[misc]
    """``BF16_Optimizer``."""

    mpu: MpuGrid

    def step(self, closure: Any = None) -> None:
        """Skip a step with gradients that are not finite."""
        self.overflow = not torch.isfinite(bf16_gradient_norm(self, self.mpu)).item()
        if self.overflow:
            self._global_grad_norm = torch.inf
            self.clear_hp_grads()
            self.clear_lp_grads()
            return
        super().step(closure)
