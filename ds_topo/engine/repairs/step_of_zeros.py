"""Undo the first step of an optimizer of fp16 or bf16 without ZeRO, which DeepSpeed takes with gradients of zero.

DeepSpeed allocates the optimizer's states by this step. Adam counts it, so that its first updates of training are a
quarter too small, and weight decay changes the master weights. A program sees other losses than at ZeRO 1.

Releases: all.
Reports: deepspeedai/DeepSpeed#5104, which has removed this step from ZeRO's optimizers.
"""

from __future__ import annotations

from itertools import chain

import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from ds_topo.engine.on_grid import EngineOnGrid


class WithoutStepOfZeros(EngineOnGrid):
    """An engine in fp16 or bf16 without ZeRO, whose optimizer has taken a step of zeros."""

    def complete(self) -> None:
        """Undo the step, unless the program asks for DeepSpeed's own results.

        The optimizer must be known to start again without states: torch's, and DeepSpeed's Adam.
        """
        super().complete()
        optimizer = self.optimizer
        if not self.mpu.settle_norms():
            return
        if isinstance(optimizer, FP16_Optimizer):
            pairs = zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True)
        elif isinstance(optimizer, FP16_UnfusedOptimizer):
            pairs = zip(chain(*optimizer.fp32_groups), chain(*optimizer.fp16_groups), strict=True)
        else:
            return
        inner = optimizer.optimizer
        if type(inner).__module__.startswith(("torch.optim.", "deepspeed.ops.adam.")):
            with torch.no_grad():
                for master, parameter in pairs:
                    master.copy_(parameter)
            inner.state.clear()
