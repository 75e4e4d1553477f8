"""Count the micro-batches of a step from its start, and scale their gradients once.

*Boundaries.* DeepSpeed ends a step where its count of all micro-batches is a multiple of
``gradient_accumulation_steps``. If that number changes, by ``set_train_batch_size`` or by an assignment, the next step
would be too short or too long. So the count moves to a multiple of the new number, and a change within a step is refused.

*Scale.* With ``loss.backward()``, DeepSpeed divides gradients by that number at the outputs of an engine. A gradient that
passes the outputs of two engines, or of one engine twice, would be divided twice. So it is multiplied again where it
leaves the later engine through an input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.errors import EngineOptionError, abridged
from ds_topo.ledger import Make, Patch, around
from ds_topo.mpu import patches

# -- boundaries -------------------------------------------------------------------------------------------------------


def _is_within_step(engine: DeepSpeedEngine, steps: int) -> bool:
    """Tell whether gradients of the current step have been accumulated already, of which each has ``steps`` parts."""
    if engine._is_gradient_accumulation_boundary is not None or isinstance(engine, PipelineEngine):
        return False  # the program says which micro-batch is the last; a pipeline takes whole steps
    return bool(engine.micro_steps % steps)


def _settle(known: list[int], engine: DeepSpeedEngine) -> None:
    """Move the count of micro-batches if their number in a step has changed since the last call."""
    steps = engine.gradient_accumulation_steps()
    if steps == known[0]:
        return
    if _is_within_step(engine, known[0]):
        raise EngineOptionError(
            f"gradient_accumulation_steps has become {steps} after {engine.micro_steps % known[0]} of the {known[0]} "
            f"micro-batches of a step, whose gradients are divided by {known[0]}: change it after "
            "engine.is_gradient_accumulation_boundary() was True and engine.step() has returned"
        )
    engine.micro_steps = engine.micro_steps // known[0] * steps
    known[0] = steps


def _with_settled_number(known: list[int], method: Any, engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
    if engine.training:
        _settle(known, engine)
    return method(engine, *args, **options)


def _is_count(value: object) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) > 0  # type: ignore[arg-type]
    except TypeError:
        return False


def _set_batch_size(known: list[int], set_size: Any, engine: DeepSpeedEngine, train_batch_size: int) -> None:
    micro, samples = engine.train_micro_batch_size_per_gpu(), engine.dp_world_size
    if not _is_count(train_batch_size) or train_batch_size % (micro * samples):
        raise EngineOptionError(
            f"set_train_batch_size({abridged(train_batch_size)}): each of {samples} replicas reads {micro} samples in a "
            f"micro-batch, so give a multiple of {micro * samples}, such as {micro * samples * known[0]}"
        )
    if train_batch_size != engine.train_batch_size() and _is_within_step(engine, known[0]):
        raise EngineOptionError(
            f"set_train_batch_size({train_batch_size}) after {engine.micro_steps % known[0]} of the {known[0]} "
            f"micro-batches of a step, whose gradients are divided by {known[0]}: call it after engine.step() has ended "
            "the step"
        )
    set_size(engine, train_batch_size)
    _settle(known, engine)


@around
def _set_micro_batch_size(set_size: Any, engine: DeepSpeedEngine, micro_batch_size: int) -> None:
    if not _is_count(micro_batch_size):
        raise EngineOptionError(
            f"set_train_micro_batch_size({abridged(micro_batch_size)}): give a number of samples, at least 1"
        )
    loader = engine.training_dataloader
    if loader is not None and micro_batch_size != engine.train_micro_batch_size_per_gpu():
        raise EngineOptionError(
            f"set_train_micro_batch_size({micro_batch_size}): the data loader of training_data= goes on with batches of "
            f"{engine.train_micro_batch_size_per_gpu()} samples. Omit training_data= and read batches of the new size "
            f"from a loader of your own, such as engine.deepspeed_io(dataset, batch_size={micro_batch_size})"
        )
    set_size(engine, micro_batch_size)


@around
def with_own_number(train_batch: Any, engine: PipelineEngine, *args: Any, **options: Any) -> Any:
    """Refuse ``train_batch`` of a pipeline whose numbers of micro-batches to run and to divide by differ."""
    if engine.micro_batches != engine.gradient_accumulation_steps():
        raise EngineOptionError(
            f"the pipeline runs {engine.micro_batches} micro-batches in a step, but gradient_accumulation_steps is "
            f"{engine.gradient_accumulation_steps()}, by which gradients are divided: call "
            "engine.set_train_batch_size(samples), which sets both"
        )
    return train_batch(engine, *args, **options)


# -- scale ------------------------------------------------------------------------------------------------------------

_OUTPUT = "ds_topo: output of an engine"
"""The key in the metadata of the autograd nodes of outputs."""


def _scaled_once(forward: Any, engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
    if engine.gradient_accumulation_steps() == 1 or not torch.is_grad_enabled():
        return forward(engine, *args, **options)
    restored = partial(_restored, engine)
    outputs = forward(engine, *_changed(args, restored), **_changed(options, restored))
    for output in _tensors(outputs):
        if output.grad_fn is not None:
            output.grad_fn.metadata[_OUTPUT] = True
    return outputs


def _restored(engine: DeepSpeedEngine, value: torch.Tensor) -> torch.Tensor:
    """Return a view of an input that depends on an engine's output; its gradient is not divided by this engine."""
    if value.grad_fn is None or not _depends_on_engine(value.grad_fn):
        return value
    view = value.view_as(value)

    def multiply(gradient: torch.Tensor) -> torch.Tensor:
        one = gradient.new_ones(())
        factor = engine._backward_prologue_per_tensor(one)  # which also knows whether it divides in this backward pass
        return gradient if factor is one else gradient / factor

    view.register_hook(multiply)
    return view


def _depends_on_engine(node: Any) -> bool:
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if _OUTPUT in node.metadata:
            return True
        new = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= new
        waiting += new
    return False


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_changed(each, change) for each in value)
    if type(value) is dict:
        return {key: _changed(each, change) for key, each in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


# -- patches ----------------------------------------------------------------------------------------------------------


def rows_of_engines(engine: DeepSpeedEngine) -> list[tuple[Patch, Make]]:
    """Return the patches of an engine."""
    known = [engine.gradient_accumulation_steps()]
    settled, of_batches = around(partial(_with_settled_number, known)), around(partial(_set_batch_size, known))
    rows: list[tuple[Patch, Make]] = [
        (patches.SET_BATCH_SIZE, of_batches),
        (patches.SET_MICRO_BATCH_SIZE, _set_micro_batch_size),
    ]
    if isinstance(engine, PipelineEngine):
        return rows
    scaled_once = around(_scaled_once)
    return [
        *rows,
        (patches.FORWARD_OF_STEP, lambda forward: settled(scaled_once(forward))),
        (patches.BACKWARD_OF_STEP, settled),
    ]
