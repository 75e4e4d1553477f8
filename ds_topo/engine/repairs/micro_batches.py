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
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import EngineOptionError, abridged, warn


@dataclass
class MicroBatches:
    """The number of micro-batches in a step of one engine, and what has run in this step."""

    number: int
    backwards: int = 0
    """The number of calls of ``engine.backward`` since the last one of ``engine.step``."""
    forwards: int = 0
    """The number of forward passes in training since then."""
    has_stepped: bool = False


class CountedMicroBatches(EngineOnGrid):
    """An engine whose number of micro-batches in a step may change between steps."""

    mixin_state = "micro_batch_count"
    micro_batch_count: MicroBatches
    micro_steps: int

    def complete(self) -> None:
        """Count from here."""
        super().complete()
        self.micro_batch_count = MicroBatches(self.gradient_accumulation_steps())

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refuse sizes that do not fit, and a call within a step; count anew from the next step."""
        micro, samples = self.train_micro_batch_size_per_gpu(), self.dp_world_size
        number, done = self.micro_batch_count.number, self._done_in_this_step()
        if not _is_count(train_batch_size) or train_batch_size % (micro * samples):
            raise EngineOptionError(
                f"set_train_batch_size({abridged(train_batch_size)}): each of {samples} replicas reads {micro} samples "
                f"in a micro-batch, so give a multiple of {micro * samples}, such as {micro * samples * number}"
            )
        if done and train_batch_size != self.train_batch_size():
            raise EngineOptionError(
                f"set_train_batch_size({train_batch_size}) after {done} of the {number} micro-batches of a step, whose "
                f"gradients are divided by {number}: call it after engine.step() has ended the step"
            )
        super().set_train_batch_size(train_batch_size)
        self._settle_number()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Refuse it with a loader of ``training_data``, which keeps its size."""
        if not _is_count(micro_batch_size):
            raise EngineOptionError(
                f"set_train_micro_batch_size({abridged(micro_batch_size)}): give a number of samples, at least 1"
            )
        has_loader = self.training_data is not None  # training_dataloader is None on some stages of a pipeline
        if has_loader and micro_batch_size != self.train_micro_batch_size_per_gpu():
            raise EngineOptionError(
                f"set_train_micro_batch_size({micro_batch_size}): the data loader of training_data= goes on with "
                f"batches of {self.train_micro_batch_size_per_gpu()} samples. Omit training_data= and read batches of "
                "the new size from a loader of your own, such as engine.deepspeed_io(dataset, "
                f"batch_size={micro_batch_size})"
            )
        super().set_train_micro_batch_size(micro_batch_size)

    def _done_in_this_step(self) -> int:
        """Return how many micro-batches of the current step have gradients already."""
        if not self.managed_gradient_accumulation():
            return self.micro_batch_count.backwards  # micro_steps counts steps
        if self._is_gradient_accumulation_boundary is not None or self.is_pipeline:
            return 0  # the program, or the pipeline, says which micro-batch is the last
        return int(self.micro_steps % self.micro_batch_count.number)

    def _settle_number(self) -> None:
        """Move the engine's count of micro-batches if their number in a step has changed since the last call."""
        number, former = self.gradient_accumulation_steps(), self.micro_batch_count.number
        if number == former:
            return
        done = self._done_in_this_step()
        if done:
            raise EngineOptionError(
                f"gradient_accumulation_steps has become {number} after {done} of the {former} micro-batches of a "
                f"step, whose gradients are divided by {former}: change it after "
                "engine.is_gradient_accumulation_boundary() was True and engine.step() has returned"
            )
        if self.managed_gradient_accumulation():
            self.micro_steps = self.micro_steps // former * number
        self.micro_batch_count.number = number


class CountedMicroBatchesOfPlain(CountedMicroBatches):
    """A plain engine, whose program runs each micro-batch."""

    def begin_training(self) -> None:
        """Count the forward pass."""
        self._settle_number()
        self.micro_batch_count.forwards += 1
        super().begin_training()

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Count the backward pass."""
        self._settle_number()
        self.micro_batch_count.backwards += 1
        return super().backward(*arguments, **options)

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Begin to count again. Warn at the first call if it seems to come once in a step only."""
        result = super().step(*arguments, **options)
        count, number = self.micro_batch_count, self.gradient_accumulation_steps()
        seems_once = not count.has_stepped and count.forwards == count.backwards == number > 1
        if seems_once and self._is_gradient_accumulation_boundary is None and self.managed_gradient_accumulation():
            warn(
                f"engine.step() after {number} forward and backward passes, with gradient_accumulation_steps {number}: "
                f"it counts one micro-batch, so the optimizer steps after {number * number} passes. Call it after the "
                "backward pass of each micro-batch; if these passes are of one micro-batch, ignore this"
            )
        self.micro_batch_count = MicroBatches(count.number, has_stepped=True)
        return result


class CountedMicroBatchesOfPipeline(CountedMicroBatches, PipelineEngine):  # type: ignore[misc]
    """A pipeline engine, which runs all micro-batches of a step."""

    def begin_training(self) -> None:
        """Refuse a step whose numbers of micro-batches to run and to divide by differ."""
        if self.micro_batches != self.gradient_accumulation_steps():
            raise EngineOptionError(
                f"the pipeline runs {self.micro_batches} micro-batches in a step, but gradient_accumulation_steps is "
                f"{self.gradient_accumulation_steps()}, by which gradients are divided: call "
                "engine.set_train_batch_size(samples), which sets both"
            )
        super().begin_training()


def _is_count(value: object) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) > 0  # type: ignore[arg-type]
    except TypeError:
        return False
