"""Count the micro-batches of a step from its start.

DeepSpeed ends a step where its count of all micro-batches is a multiple of ``gradient_accumulation_steps``. If that
number changes, by ``set_train_batch_size`` or by an assignment, the next step would be too short or too long. So the
count moves to a multiple of the new number. A change within a step is refused.
"""

from __future__ import annotations

import operator

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.errors import EngineOptionError, abridged


def _is_count(value: object) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) > 0  # type: ignore[arg-type]
    except TypeError:
        return False


class MicroBatches:
    """The number of micro-batches in a step of one engine.

    Args:
        number: the number now.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.backwards = 0
        """The number of calls of ``engine.backward`` since the last one of ``engine.step``."""

    def _in_this_step(self, engine: DeepSpeedEngine) -> int:
        """Return how many micro-batches of the current step have gradients already."""
        if not engine.managed_gradient_accumulation():
            return self.backwards  # micro_steps counts steps
        if engine._is_gradient_accumulation_boundary is not None or isinstance(engine, PipelineEngine):
            return 0  # the program says which micro-batch is the last; a pipeline takes whole steps
        return int(engine.micro_steps % self._number)

    def settle(self, engine: DeepSpeedEngine) -> None:
        """Move the engine's count of micro-batches if their number in a step has changed since the last call."""
        number, former = engine.gradient_accumulation_steps(), self._number
        if number == former:
            return
        done = self._in_this_step(engine)
        if done:
            raise EngineOptionError(
                f"gradient_accumulation_steps has become {number} after {done} of the {former} micro-batches of a "
                f"step, whose gradients are divided by {former}: change it after "
                "engine.is_gradient_accumulation_boundary() was True and engine.step() has returned"
            )
        if engine.managed_gradient_accumulation():
            engine.micro_steps = engine.micro_steps // former * number
        self._number = number

    def check_batch_size(self, engine: DeepSpeedEngine, train_batch_size: int) -> None:
        """Refuse an argument of ``set_train_batch_size``, or a call within a step."""
        micro, samples, number = engine.train_micro_batch_size_per_gpu(), engine.dp_world_size, self._number
        if not _is_count(train_batch_size) or train_batch_size % (micro * samples):
            raise EngineOptionError(
                f"set_train_batch_size({abridged(train_batch_size)}): each of {samples} replicas reads {micro} samples "
                f"in a micro-batch, so give a multiple of {micro * samples}, such as {micro * samples * number}"
            )
        done = self._in_this_step(engine)
        if done and train_batch_size != engine.train_batch_size():
            raise EngineOptionError(
                f"set_train_batch_size({train_batch_size}) after {done} of the {number} micro-batches of a step, whose "
                f"gradients are divided by {number}: call it after engine.step() has ended the step"
            )


def check_micro_batch_size(engine: DeepSpeedEngine, micro_batch_size: int) -> None:
    """Refuse an argument of ``set_train_micro_batch_size`` that the loader of ``training_data`` does not follow."""
    if not _is_count(micro_batch_size):
        raise EngineOptionError(
            f"set_train_micro_batch_size({abridged(micro_batch_size)}): give a number of samples, at least 1"
        )
    has_loader = engine.training_data is not None  # training_dataloader is None on some stages of a pipeline
    if has_loader and micro_batch_size != engine.train_micro_batch_size_per_gpu():
        raise EngineOptionError(
            f"set_train_micro_batch_size({micro_batch_size}): the data loader of training_data= goes on with batches "
            f"of {engine.train_micro_batch_size_per_gpu()} samples. Omit training_data= and read batches of the new "
            f"size from a loader of your own, such as engine.deepspeed_io(dataset, batch_size={micro_batch_size})"
        )


def check_number(engine: PipelineEngine) -> None:
    """Refuse a step of a pipeline whose numbers of micro-batches to run and to divide by differ."""
    if engine.micro_batches != engine.gradient_accumulation_steps():
        raise EngineOptionError(
            f"the pipeline runs {engine.micro_batches} micro-batches in a step, but gradient_accumulation_steps is "
            f"{engine.gradient_accumulation_steps()}, by which gradients are divided: call "
            "engine.set_train_batch_size(samples), which sets both"
        )
