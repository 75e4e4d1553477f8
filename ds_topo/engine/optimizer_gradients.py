"""Where DeepSpeed's optimizers keep gradients, and where its engines call for their reduction."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_topo.engine import changes
from ds_topo.ledger import Change, always, ledger


class OptimizerGradients(Protocol):
    """What a reducer must know about one kind of optimizer."""

    grad_buffers: dict[nn.Parameter, torch.Tensor]
    """Where gradients accumulate, if not in ``parameter.grad``."""
    reduction: tuple[object, Change]
    """The object that the engine calls to have gradients reduced, and the row of its method."""

    def bind(self, bindings: ExitStack) -> None:
        """Keep the optimizer's own hooks from gradients, until the bindings are closed."""

    def mark_reduced(self) -> None:
        """Tell the optimizer that gradients are reduced."""


class ParameterGradients:
    """Stage 0: the optimizer, wrapped or not, reads ``parameter.grad``."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.grad_buffers: dict[nn.Parameter, torch.Tensor] = {}
        self.reduction = (engine, changes.REDUCE_FALLBACK)

    def bind(self, bindings: ExitStack) -> None:
        """It has no hooks."""

    def mark_reduced(self) -> None:
        """It reads them in its step."""


class BF16Gradients:
    """``BF16_Optimizer``: gradients accumulate in flat buffers, one for each group of parameters."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._optimizer: BF16_Optimizer = engine.optimizer
        self.reduction = (engine, changes.REDUCE_FALLBACK)
        self.grad_buffers = {
            parameter: gradient
            for parameters, gradients in zip(
                self._optimizer.bf16_groups, self._optimizer.fp32_groups_gradients, strict=True
            )
            for parameter, gradient in zip(parameters, gradients, strict=True)
        }

    def bind(self, bindings: ExitStack) -> None:
        """Remove its hooks (there are some with ``immediate_grad_update``)."""
        if self._optimizer._grad_acc_hooks:
            for hook in self._optimizer._grad_acc_hooks:
                hook.remove()
            bindings.callback(self._optimizer.create_grad_acc_hooks)
        for parameter, gradient in self.grad_buffers.items():
            bindings.callback(ledger.bind(changes.HP_GRADIENT, always(gradient), parameter))

    def mark_reduced(self) -> None:
        """Mark all buffers as filled."""
        for flags in self._optimizer.fp32_groups_has_gradients:
            flags[:] = [True] * len(flags)


class Zero1Gradients:
    """``DeepSpeedZeroOptimizer`` at stage 1: it cuts its partition out of reduced ``parameter.grad``."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._optimizer: DeepSpeedZeroOptimizer = engine.optimizer
        self.grad_buffers: dict[nn.Parameter, torch.Tensor] = {}
        self.reduction = (self._optimizer, changes.REDUCE_ZERO)

    def bind(self, bindings: ExitStack) -> None:
        """Let its hooks count backward passes only, and its epilogue collect the partition only."""
        for change, value in (
            (changes.ZERO_OVERLAP, False),
            (changes.ZERO_PROCESS, lambda parameter, group: None),
            (changes.ZERO_REDUCE_REST, lambda comm_dtype=None: None),
        ):
            bindings.callback(ledger.bind(change, always(value), self._optimizer))

    def mark_reduced(self) -> None:
        """Collect this rank's partition."""
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()


def gradients_of(engine: DeepSpeedEngine) -> OptimizerGradients:
    """How this engine's optimizer is served.

    Raises:
        ValueError: it cannot be; the message says why, and what to use.
    """
    reason = _refusal(engine)
    if reason is not None:
        raise ValueError(f"GradientReducer.attach: {reason}")
    if isinstance(engine.optimizer, BF16_Optimizer):
        return BF16Gradients(engine)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        return Zero1Gradients(engine)
    return ParameterGradients(engine)


def _refusal(engine: DeepSpeedEngine) -> str | None:
    """Why an engine cannot be served, or None."""
    stage = int(engine.zero_optimization_stage())
    if stage > 1:
        return (
            f"ZeRO stage {stage} partitions gradients while it reduces them, so there is nothing left to reduce: keep "
            'its own overlap ("overlap_comm": true), or use stage 0 or 1'
        )
    if not getattr(engine.optimizer, "param_groups", None):
        return "the engine has no optimizer, so it never reduces gradients: give deepspeed.initialize one"
    if engine.zero_cpu_offload() or engine.zenflow:
        return "an offloaded optimizer (offload_optimizer, zenflow) moves gradients by itself: switch offload off"
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) and engine.optimizer.use_separate_grad_accum:
        return (
            "ZeRO stage 1 accumulates gradients in a second data type (data_types.grad_accum_dtype): leave it out, or "
            "use bf16, whose optimizer for stage 1 accumulates in fp32"
        )
    if not engine.managed_gradient_accumulation():
        return (
            "with managed_gradient_accumulation=false the last micro-batch is known only in step(), when backward is "
            "over: let DeepSpeed manage it"
        )
    if not engine.enable_backward_allreduce and not engine.pipeline_parallelism:
        return f"the optimizer {engine.optimizer_name()!r} communicates by itself: choose one that does not"
    if engine.is_deepcompile_active():
        return "DeepCompile reduces gradients inside the compiled graph: switch it off"
    return None
