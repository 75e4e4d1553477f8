"""Keep the buffers of a pipeline's activations and gradients in the shapes of its batches.

Stages exchange the shapes and types of activations with the first micro-batch, and allocate buffers for them once. If a
later batch has other shapes, a stage would use old rows of its buffer, or wait for more than is sent. So the ranks
agree before each step whether shapes have changed since the last one (:mod:`ds_topo.engine.pipelines.batches`), and
exchange them again. If they change within a step, its stages exchange them with each micro-batch, as with
``dynamic_shape=True``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.base.patches import DualPipeVEngine
from ds_topo.errors import EngineOptionError, abridged

Shapes: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shape and the type of each tensor."""


def shapes_of(tensors: Any) -> Shapes:
    """Return the shape and the type of a tensor, or of each tensor in a sequence."""
    found = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return tuple((tuple(each.shape), each.dtype) for each in found if isinstance(each, torch.Tensor))


@contextmanager
def buffers_for(
    engine: PipelineEngine, method: str, wanted: int, shapes: list[Shapes], changed: bool, uneven: bool
) -> Iterator[None]:
    """Let stages exchange the shapes of activations anew in one call, where that is necessary.

    DualPipeV also gets buffers for the micro-batches ``wanted`` in this call, as it addresses them by their number.

    Args:
        method: ``train_batch`` or ``eval_batch``; a module may have other outputs in evaluations.
        shapes: those of this rank's micro-batches; none on stages that read no inputs.
        changed: whether some rank's differ from those of the last call.
        uneven: whether some rank's differ from each other.
    """
    if uneven and isinstance(engine, DualPipeVEngine):
        raise EngineOptionError(
            f"the micro-batches of one {method}() have inputs of different shapes, but stages of DualPipeV exchange "
            "the shapes of activations once in a step: pad samples to one length and leave out incomplete batches "
            "(drop_last=True), or use PipelineModule"
        )
    if changed or engine.starts.last_call != method:
        engine.reset_activation_shape()
    names = ("dynamic_shape", "is_pipe_partitioned", "is_grad_partitioned", "micro_batches")
    before = {name: getattr(engine, name) for name in names}
    if isinstance(engine, DualPipeVEngine):
        engine.micro_batches = wanted
    engine.dynamic_shape = engine.dynamic_shape or uneven
    if engine.dynamic_shape:  # parts of activations come with their shapes, which DeepSpeed reads in the first one only
        engine.is_pipe_partitioned = engine.is_grad_partitioned = False
    engine.starts.last_call, engine.starts.shapes = method, None
    try:
        yield
    finally:
        vars(engine).update(before)
    if not uneven:
        engine.starts.shapes = shapes[:1]


def with_checked_sends(instructions: dict[type, Any]) -> dict[type, Any]:
    """Return the instructions of an engine, which refuse outputs and losses that the schedule cannot pass on.

    ``SendActivation`` refuses shapes that it has not announced: outputs may have other shapes than before although
    inputs have not, such as after a ``batch_fn`` of the program. ``ForwardPass`` looks at outputs as a stage returns
    them, before they are split over slices, and also at those that stay on a rank of DualPipeV.
    """
    send, forward = instructions[schedule.SendActivation], instructions[schedule.ForwardPass]

    @wraps(forward)
    def checked_forward(engine: PipelineEngine, buffer_id: int, **options: Any) -> None:
        own = vars(engine)
        if torch.is_grad_enabled() and engine.is_last_stage():
            own.pop("loss", None)
        hook = engine.module.register_forward_hook(partial(_require_sendable, engine))  # after that of placeholders
        try:
            forward(engine, buffer_id, **options)
        finally:  # DeepSpeed itself fails on some losses
            hook.remove()
            if torch.is_grad_enabled() and engine.is_last_stage() and "loss" in own:
                engine.require_scalar(engine.loss)

    @wraps(send)
    def checked(engine: PipelineEngine, buffer_id: int, phase: int = 0, **options: Any) -> None:
        outputs, announced = shapes_of(engine.pipe_buffers["outputs"][buffer_id]), engine.starts.announced
        if engine.dynamic_shape or phase not in announced:
            announced[phase] = outputs
        elif announced[phase] != outputs:
            raise EngineOptionError(
                f"stage {engine.stage_id} of a pipeline has activations {_text(outputs)}, but the next stage expects "
                f"{_text(announced[phase])}, as before: build the PipelineModule with dynamic_shape=True, call "
                "engine.reset_activation_shape() on all ranks before shapes change, or pad samples to one length"
            )
        send(engine, buffer_id, **({"phase": phase} if isinstance(engine, DualPipeVEngine) else {}), **options)

    return {**instructions, schedule.SendActivation: checked, schedule.ForwardPass: checked_forward}


def _require_sendable(engine: PipelineEngine, module: Any, _: Any, outputs: Any) -> None:
    """Refuse outputs of a stage that it cannot send, or for which the next one would return no gradient."""
    if module._local_stop == len(module._layer_specs):
        return
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    for place, each in enumerate(several):
        is_tensor = isinstance(each, torch.Tensor)
        if is_tensor and (each.requires_grad or not each.is_floating_point() or not torch.is_grad_enabled()):
            continue
        what, rule = abridged(each), "stages send a tensor or a tuple of tensors to the next one: return these alone"
        if is_tensor:
            what = f"{_text(shapes_of(each))} without a gradient"
            rule = (
                "the next stage returns a gradient of each floating-point tensor: give a constant, such as a mask, as "
                "integers, and compute others from trained parameters or inputs, without detach() or torch.no_grad()"
            )
        where = "" if each is outputs else f" as element {place} of {len(several)}"
        raise EngineOptionError(
            f"stage {engine.stage_id} of a pipeline: layers {[*range(module._local_start, module._local_stop)]} "
            f"return {what}{where}, but {rule}"
        )


def _text(shapes: Shapes) -> str:
    return " and ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in shapes) or "no tensors"
