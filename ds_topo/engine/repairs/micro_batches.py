"""Count the micro-batches of a step anew if their number changes.

DeepSpeed ends a step where its count of all micro-batches is a multiple of ``gradient_accumulation_steps``. If that
number changes, by ``set_train_batch_size`` or by an assignment, the next step would be too short or too long. A program
sees no error, but a step of fewer samples than it has asked for. So the count moves to a multiple of the new number. A
change within a step is refused.

Releases: all.
Reports: no public report found; deepspeedai/DeepSpeed#2798 names ``set_train_batch_size`` for this.
"""

from __future__ import annotations

import operator
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import EngineOptionError, abridged, warn


class CountedMicroBatches(EngineOnGrid):
    """An engine whose number of micro-batches in a step may change between steps."""

    mixin_state = "micro_batch_count"
    micro_batch_count: MicroBatches

    def complete(self) -> None:
        """Count from here."""
        super().complete()
        number = self.gradient_accumulation_steps()
        self.micro_batch_count = MicroBatches(number, takes_whole_steps=self.is_pipeline)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refuse sizes that do not fit; the count of micro-batches starts with the next step.

        In DeepSpeed a step ends where the count of all micro-batches is a multiple of the new number.
        """
        self.micro_batch_count.check_batch_size(self, train_batch_size)
        super().set_train_batch_size(train_batch_size)
        self.micro_batch_count.settle(self)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Refuse it with a loader of ``training_data``, which keeps its size."""
        check_micro_batch_size(self, micro_batch_size)
        super().set_train_micro_batch_size(micro_batch_size)


class CountedMicroBatchesOfPlain(CountedMicroBatches):
    """A plain engine, whose program runs each micro-batch."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Count the forward pass."""
        if self.training:
            self.micro_batch_count.settle(self)
            self.micro_batch_count.forwards += 1
        return super().forward(*inputs, **named)

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Count the backward pass."""
        if self.training:
            self.micro_batch_count.settle(self)
        self.micro_batch_count.backwards += 1
        return super().backward(*arguments, **options)

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Begin to count again."""
        result = super().step(*arguments, **options)
        self.micro_batch_count.note_step(self)
        return result


class CountedMicroBatchesOfPipeline(CountedMicroBatches, PipelineEngine):  # type: ignore[misc]
    """A pipeline engine, which runs all micro-batches of a step."""

    def train_batch(self, *arguments: Any, **options: Any) -> Any:
        """Refuse a step whose numbers of micro-batches to run and to divide by differ."""
        check_number(self)
        return super().train_batch(*arguments, **options)


def _is_count(value: object) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) > 0  # type: ignore[arg-type]
    except TypeError:
        return False


class MicroBatches:
    """The number of micro-batches in a step of one engine.

    Args:
        number: the number now.
        takes_whole_steps: the engine is a pipeline, which runs all micro-batches of a step itself.
    """

    def __init__(self, number: int, *, takes_whole_steps: bool) -> None:
        self._number, self.takes_whole_steps = number, takes_whole_steps
        self.backwards = 0
        """The number of calls of ``engine.backward`` since the last one of ``engine.step``."""
        self.forwards = 0
        """The number of forward passes in training since then."""
        self._has_stepped = False

    def note_step(self, engine: DeepSpeedEngine) -> None:
        """Begin to count again. Warn at the first call of ``engine.step`` if it seems to come once in a step only."""
        number = engine.gradient_accumulation_steps()
        seems_once = not self._has_stepped and self.forwards == self.backwards == number > 1
        if seems_once and engine._is_gradient_accumulation_boundary is None and engine.managed_gradient_accumulation():
            warn(
                f"engine.step() after {number} forward and backward passes, with gradient_accumulation_steps {number}: "
                f"it counts one micro-batch, so the optimizer steps after {number * number} passes. Call it after the "
                "backward pass of each micro-batch; if these passes are of one micro-batch, ignore this"
            )
        self._has_stepped, self.backwards, self.forwards = True, 0, 0

    def _in_this_step(self, engine: DeepSpeedEngine) -> int:
        """Return how many micro-batches of the current step have gradients already."""
        if not engine.managed_gradient_accumulation():
            return self.backwards  # micro_steps counts steps
        if engine._is_gradient_accumulation_boundary is not None or self.takes_whole_steps:
            return 0  # the program says which micro-batch is the last
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
