"""Drive a reducer by a pipeline engine, whose schedule knows the last micro-batch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from statistics import median
from typing import Any

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.base.patches import DualPipeVEngine
from ds_topo.engine.engine_driver import EngineDriver, ReducedEngine
from ds_topo.reduction.buckets import StepTiming
from ds_topo.reduction.options import ReductionArguments


class ReducedPipelineEngine(ReducedEngine, PipelineEngine):  # type: ignore[misc]
    """A pipeline engine with a reducer."""

    reducer_driver: PipelineDriver

    @property
    def _INSTRUCTION_MAP(self) -> dict[type, Any]:  # noqa: N802
        """Return the same map with ``BackwardPass`` and ``ReduceTiedGrads`` that also call the reducer.

        Only the schedule knows the last micro-batch, and the map holds functions, which cannot be overridden.
        """
        return self.reducer_driver.driving(super()._INSTRUCTION_MAP)

    def train_batch(self, *arguments: Any, **options: Any) -> Any:
        """Discard a step that an exception in backward has ended: training may go on with the same engine."""
        self.reducer_driver.give_up_unfinished()
        return super().train_batch(*arguments, **options)


class PipelineDriver(EngineDriver):
    """The driver of a pipeline engine, whose schedule knows the last micro-batch.

    Buckets are reduced while the last backward pass runs. The reducer finishes where the schedule reduces tied layers.
    With DualPipeV, the parameters of each phase are reduced from the last backward of that phase. Phase 1 ends earlier,
    which starts the step. Its reductions overlap with the rest of phase 0. Those passes are equally many in each step,
    so the reducer learns how many gradients a parameter gets in them (``static_graph``).
    """

    mixin = ReducedPipelineEngine

    def __init__(self, engine: PipelineEngine, options: ReductionArguments) -> None:
        super().__init__(engine, options)
        self._passes: Counter[int | None] = Counter()
        """The number of backward passes in this step so far, in each phase of the schedule."""
        self._phase: int | None = None
        """The phase of the last backward pass; None, except with DualPipeV."""
        self.backward_ns: int
        """The duration of the last backward pass."""
        self._instructions: dict[type, Any] | None = None

    def reduce(self, *_: object, **__: object) -> None:
        """Note that gradients are reduced: the reducer has completed where the schedule reduces tied layers."""
        self.gradients.mark_reduced()

    def give_up_unfinished(self) -> None:
        """Discard a step that an exception in backward has ended: training may go on with the same engine."""
        self._passes.clear()
        self.reducer.give_up_unfinished()

    def driving(self, instructions: dict[type, Any]) -> dict[type, Any]:
        """Return the instructions of a schedule, of which two also call the reducer."""
        if self._instructions is not None:
            return self._instructions
        backward, reduce_tied = instructions[schedule.BackwardPass], instructions[schedule.ReduceTiedGrads]

        def backward_pass(engine: PipelineEngine, **arguments: Any) -> None:
            self._phase = arguments.get("phase")
            self._passes[self._phase] += 1
            started = time.perf_counter_ns()
            backward(engine, **arguments)
            self.backward_ns = time.perf_counter_ns() - started
            self.reducer.launch_deferred()

        def reduce_tied_gradients(engine: PipelineEngine, **arguments: Any) -> None:
            self._passes.clear()
            self.reducer.complete()
            self.gradients.reduce_tied(partial(reduce_tied, engine, **arguments))

        ours = {schedule.BackwardPass: backward_pass, schedule.ReduceTiedGrads: reduce_tied_gradients}
        self._instructions = {**instructions, **ours}
        return self._instructions

    def is_last_backward(self) -> bool:
        """Tell whether this is the last backward pass of the schedule, or of a phase of it."""
        return bool(self._passes[self._phase] == self.engine.micro_batches)

    def prefers_to_defer(self, timings: Iterable[StepTiming]) -> bool:
        """Tell whether the wait for earlier stages is longer than the reduction, so that overlap gains nothing.

        After its last backward, stage s waits while the s stages before it run theirs, one after the other. Their
        reductions may share the link, so the wait must be long enough for them, too. With DualPipeV, no stage waits for
        the ends of all others.
        """
        if isinstance(self.engine, DualPipeVEngine):
            return False
        stage = self.engine.stage_id
        communication = [timing.communication_ns for timing in timings if timing.ended_ns]
        return bool(communication) and (stage + 1) * median(communication) < stage * self.backward_ns

    def _samples(self, replicas: int) -> int:
        return replicas
