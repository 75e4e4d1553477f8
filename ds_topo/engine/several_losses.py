"""Let a program call backward several times before ``engine.step()``, or an engine several times for one loss.

DeepSpeed prepares for a backward pass in a hook of the outputs, which runs once for each forward pass, and resets its
counts in ``forward``. So it never prepares for a second loss of one forward pass, prepares twice for a loss of two
forward passes, and resets too late between two losses. It then omits or overwrites gradients, or fails later without
naming the cause. Here it prepares and resets once for each backward pass that brings gradients to parameters; others,
by ``torch.autograd.grad``, it leaves alone.

What has been reduced cannot always take further gradients: ZeRO 1 and 2 keep the result of one backward pass of the
last micro-batch. There a second one before the step is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import count_used_parameters_in_backward
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.torch import is_functorch_transforming

from ds_topo.ledger import Make, Patch, after, around
from ds_topo.mpu import patches


def _is_prepared(optimizer: ZeROOptimizer) -> bool:
    """Tell whether the running backward pass has been prepared already."""
    state = optimizer._backward_hook_state
    is_current = state.post_backward_callback_graph_task_id == torch._C._current_graph_task_id()
    return bool(state.backward_active_depth and state.post_backward_callback_queued and is_current)


def _reaches_parameters(engine: DeepSpeedEngine) -> bool:
    """Tell whether the running backward pass brings gradients to the engine, unlike ``torch.autograd.grad``."""
    trained = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
    return engine._running_engine_backward or any(count_used_parameters_in_backward([each]) for each in trained)


class _Passes:
    """The backward passes of an engine's step."""

    def __init__(self) -> None:
        self._are_reduced = False
        """True if the gradients of the step are reduced, and cannot take others."""
        self._is_penalized = False
        """True if a loss may depend on gradients that ``torch.autograd.grad`` has returned."""

    def forget(self) -> None:
        """Start a step."""
        self._are_reduced = self._is_penalized = False

    def scale_output(self, scale: Any, engine: DeepSpeedEngine, gradient: Any) -> Any:
        """Replace ``_backward_prologue_per_tensor``, which divides by the number of micro-batches."""
        optimizer = engine.optimizer
        if is_functorch_transforming():
            return scale(engine, gradient)
        if not _reaches_parameters(engine):
            if torch.is_grad_enabled():
                self._note_penalty(engine)
            return gradient
        if isinstance(optimizer, ZeROOptimizer) and not optimizer._backward_active_depth:
            engine._backward_prologue()
        return scale(engine, gradient)

    def _note_penalty(self, engine: DeepSpeedEngine) -> None:
        if engine.zero_optimization_partition_weights():
            raise RuntimeError(
                "torch.autograd.grad(create_graph=True) of an engine's output at ZeRO stage 3: its backward pass needs "
                "parameters a second time, which are partitioned again by then; use ZeRO stage 0, 1 or 2"
            )
        self._is_penalized = engine.gradient_accumulation_steps() > 1

    def end_backward(self, end_backward: Any, engine: DeepSpeedEngine) -> None:
        """Replace ``_backward_epilogue``, which reduces gradients."""
        end_backward(engine)
        self._is_penalized = False
        if not engine.inside_no_sync_ctxt and engine.is_gradient_accumulation_boundary():
            self._are_reduced = not _takes_further_gradients(engine)

    def backward(self, backward: Any, engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
        """Replace ``engine.backward``."""
        self._require_none(engine)
        return backward(engine, *args, **options)

    def prepare(self, prepare: Any, engine: DeepSpeedEngine) -> None:
        """Replace ``_backward_prologue``."""
        optimizer = engine.optimizer
        if is_functorch_transforming() or not _reaches_parameters(engine):
            return
        if not isinstance(optimizer, ZeROOptimizer):
            prepare(engine)
        elif not _is_prepared(optimizer):
            if not engine._running_engine_backward:
                self._require_none(engine)
                self._require_scaled()
            if not optimizer._backward_active_depth and optimizer._backward_seen_this_step:
                optimizer.clear_backward_seen_flag()  # as a forward pass does
            prepare(engine)

    def _require_none(self, engine: DeepSpeedEngine) -> None:
        if self._are_reduced:
            raise RuntimeError(
                "a second backward pass in the last micro-batch of a step, whose gradients are reduced already (ZeRO "
                f"stage {int(engine.zero_optimization_stage())}): their sum would be wrong. Call "
                "engine.backward(first_loss + second_loss), or both inside `with engine.coalesce_grad_reduction():` at "
                "ZeRO 1 and 2, or engine.step() after each; to discard the first gradients, call engine.zero_grad()"
            )

    def _require_scaled(self) -> None:
        if self._is_penalized:
            raise RuntimeError(
                "loss.backward() after torch.autograd.grad(create_graph=True) of an engine's output, with "
                "gradient_accumulation_steps above 1: a gradient in the loss is divided by that number in engine."
                "backward(loss) only; call that"
            )


def _takes_further_gradients(engine: DeepSpeedEngine) -> bool:
    """Tell whether gradients of another backward pass can be added to those that have been reduced.

    Whole gradients are averages then, of which the average is the same. Sums are not, nor are averages of experts.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return False
    if isinstance(optimizer, BF16_Optimizer) and not optimizer.fp32_groups_gradients_flat:
        return False  # a GradientReducer has sent them to their owners
    if engine.zero_optimization_partition_weights():
        return True
    return bool(engine.gradient_average and engine.sequence_parallel_size == 1 and not engine.has_moe_layers)


def rows_of_engines(engine: DeepSpeedEngine) -> list[tuple[Patch, Make]]:
    """Return the patches of a plain engine."""
    passes = _Passes()
    return [
        (patches.PROLOGUE_OF_EACH_LOSS, around(passes.prepare)),
        (patches.GRADIENT_OF_OUTPUT, around(passes.scale_output)),
        (patches.BACKWARD_OF_EACH_LOSS, around(passes.backward)),
        (patches.EPILOGUE_OF_EACH_LOSS, around(passes.end_backward)),
        *((row, after(passes.forget)) for row in patches.ENDS_OF_REDUCTION),
    ]
