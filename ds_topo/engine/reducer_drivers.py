"""DeepSpeed's engines as drivers of a reducer: they know the last micro-batch, and when gradients must be there."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine import changes
from ds_topo.engine.optimizer_gradients import gradients_of
from ds_topo.ledger import Change, ledger
from ds_topo.partition.exchange import hosts_in_order
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.options import ReductionArguments, ReductionOptions
from ds_topo.reducer.planning import BucketSizes
from ds_topo.reducer.probes import suitable_bucket_bytes
from ds_topo.reducer.report import BucketTiming


class Driven(Protocol):
    """What a driver asks of its reducer."""

    def complete(self) -> None:
        """Wait until every gradient is reduced."""

    def launch_deferred(self) -> None:
        """Backward is over: launch what waited for its end."""

    def give_up_unfinished(self) -> None:
        """Forget a step that an exception ended."""

    def forget_unreduced(self) -> None:
        """Gradients of earlier micro-batches are thrown away."""

    @property
    def is_in_step(self) -> bool:
        """Whether gradients of a step have arrived, and are not reduced yet."""

    def detach(self) -> None:
        """Take the reducer off."""


class EngineDriver:
    """A plain engine. What it would have called to reduce gradients only waits for the rest of the reduction."""

    def __init__(self, engine: DeepSpeedEngine, options: ReductionArguments) -> None:
        self.engine = engine
        self._wanted = options
        self._gradients = gradients_of(engine, self._bucket_sizes)
        self._bindings = ExitStack()

    @property
    def group(self) -> ProcessGroup:
        """All replicas of a dense parameter."""
        group: ProcessGroup = deepspeed_groups._get_sequence_data_parallel_group()
        return group

    def options(self) -> ReductionArguments:
        """The engine's own settings of the reduction."""
        engine, size = self.engine, dist.get_world_size(self.group)
        samples = self._samples(size)
        options: ReductionArguments = {
            "communication_dtype": engine.communication_data_type,
            "zero_unused_parameters": True,
            "static_graph": True,
            "allow_late_gradients": True,
            "broadcast_at_start": False,
            "grad_buffers": self._gradients.grad_buffers,
            "partitions": self._gradients.partitions,
        }
        if not engine.gradient_average:
            options["op"] = "sum"
        elif samples != size:
            options["divisor"] = samples
        if engine.gradient_average and engine.postscale_gradients() and engine.gradient_predivide_factor() != 1.0:
            options["predivide_factor"] = engine.gradient_predivide_factor()
        if engine.has_moe_layers:
            options["expert_groups"] = dict(deepspeed_groups._get_expert_data_parallel_group_dict())
        return options

    def bind(self, reducer: Driven, options: ReductionOptions) -> None:
        """Let the engine drive this reducer, until it is detached."""
        self._gradients.bind(self._bindings)
        owner, reduction = self._gradients.reduction
        self._replace(reduction, lambda _: self._reduce_with(reducer), owner)
        self._replace(changes.DESTROY_ENGINE, lambda destroy: _after(partial(self._end, reducer), destroy))
        self._replace(changes.COALESCE, lambda _: _refuse_coalescing)
        self._replace(changes.TAKE_STEP, lambda step: _after(partial(_require_reduced, reducer, reduction), step))
        for row in changes.ZERO_GRADS:
            for thrower in (self.engine, self.engine.optimizer):
                if isinstance(row.owner, type) and isinstance(thrower, row.owner):
                    self._replace(row, lambda zero_grad: _after(reducer.forget_unreduced, zero_grad), thrower)
        self._watch_for_exceptions(reducer)
        if options.overlap_parameters and self._gradients.parameters is not None:
            self._gradients.parameters.start_overlapping(self.engine.module)
            self._replace(changes.COMPILE, lambda compile_engine: _after(self._gather_in_step, compile_engine))

    # -- what the reducer asks

    def is_last_backward(self) -> bool:
        """By the engine's count of micro-batches."""
        engine = self.engine
        if engine.inside_no_sync_ctxt:
            return False
        return self._gradients.reduces_always or bool(engine.is_gradient_accumulation_boundary())

    def prefers_to_defer(self, communication_ns: Sequence[int]) -> bool:
        """Never: nothing else runs beside the end of backward."""
        return False

    def steps_taken(self) -> int:
        """By the engine's count."""
        return int(self.engine.global_steps)

    def wait_for_parameters(self) -> None:
        """Those of the last step's gather."""
        if self._gradients.parameters is not None:
            self._gradients.parameters.wait()

    def gathers(self) -> list[BucketTiming]:
        """The last step's."""
        return self._gradients.parameters.timings() if self._gradients.parameters is not None else []

    def on_detach(self) -> None:
        """Let the engine reduce its gradients by itself again."""
        self._bindings.close()

    # -- what the engine calls

    def _end(self, reducer: Driven) -> None:
        self._gradients.end_with_engine()
        reducer.detach()

    def _reduce_with(self, reducer: Driven) -> Callable[..., None]:
        def reduce(*_: object, **__: object) -> None:
            """In place of the engine's own reduction, at the end of the last micro-batch's backward."""
            reducer.complete()
            self._gradients.mark_reduced()

        return reduce

    def _bucket_sizes(self) -> BucketSizes:
        """Of the regions of a partition; collective. All ranks together refuse options that cannot be, later."""
        device = next((parameter.device for parameter in self.engine.module.parameters()), torch.device("cpu"))
        suitable = suitable_bucket_bytes(self.group, device)
        try:
            return ReductionOptions(**self._wanted).bucket_sizes(suitable)
        except (TypeError, ValueError):
            return ReductionOptions().bucket_sizes(suitable)

    def _watch_for_exceptions(self, reducer: Driven) -> None:
        """Before a forward pass no step is under way, unless an exception ended it."""
        self._replace(changes.FORWARD, lambda forward: self._using(_after(reducer.give_up_unfinished, forward)))

    def _using(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A pass that uses parameters, which may still be on their way."""
        parameters = self._gradients.parameters
        return forward if parameters is None else parameters.before_forward(forward)

    def _gather_in_step(self) -> None:
        assert self._gradients.parameters is not None
        warnings.warn(
            "overlap_parameters: compiled code does not wait for parameters, so they arrive in the step from now on",
            RuntimeWarning,
            stacklevel=3,
        )
        self._gradients.parameters.stop_overlapping()

    def _samples(self, replicas: int) -> int:
        """How many of the replicas work on samples of their own."""
        return int(replicas // self.engine.sequence_parallel_size)

    def _replace(self, change: Change, make: Callable[[Any], Any], owner: object | None = None) -> None:
        self._bindings.callback(ledger.bind(change, make, owner or self.engine))


class PipelineDriver(EngineDriver):
    """A pipeline engine, whose schedule knows the last micro-batch.

    Gradients leave while its backward runs, and are waited for where the schedule reduces tied layers.
    """

    def __init__(self, engine: PipelineEngine, options: ReductionArguments) -> None:
        super().__init__(engine, options)
        self._passes = 0
        """Backward passes of this step so far."""
        self.backward_ns = 0
        """How long the last one took."""

    @property
    def group(self) -> ProcessGroup:
        """All replicas of a stage."""
        group: ProcessGroup = self.engine.mpu.get_data_parallel_group()
        return group

    def bind(self, reducer: Driven, options: ReductionOptions) -> None:
        """Let the schedule's instructions drive this reducer, too."""
        super().bind(reducer, options)
        if options.overlap_parameters and self._gradients.parameters is not None:
            self._gradients.parameters.waits_for_use = self._shares_link_with_stage_before()

        def with_ours(instructions: dict[type, Any]) -> dict[type, Any]:
            backward, reduce_tied = instructions[schedule.BackwardPass], instructions[schedule.ReduceTiedGrads]

            def backward_pass(engine: PipelineEngine, **arguments: Any) -> None:
                self._passes += 1
                started = time.perf_counter_ns()
                backward(engine, **arguments)
                self.backward_ns = time.perf_counter_ns() - started
                reducer.launch_deferred()

            def reduce_tied_gradients(engine: PipelineEngine, **arguments: Any) -> None:
                self._passes = 0
                reducer.complete()
                self._gradients.reduce_tied(engine, partial(reduce_tied, engine, **arguments))

            ours = {schedule.BackwardPass: backward_pass, schedule.ReduceTiedGrads: reduce_tied_gradients}
            return {**instructions, **ours}

        self._replace(changes.INSTRUCTIONS, with_ours)

    def _shares_link_with_stage_before(self) -> bool:
        """Whether the stage before, whose parameters are needed first, is on this host; collective over stages."""
        stage, group = self.engine.stage_id, self.engine.grid.get_pipe_parallel_group()
        hosts = hosts_in_order(group) if self.engine.num_stages > 1 else [""]
        return bool(stage > 0 and hosts[stage] == hosts[stage - 1])

    def is_last_backward(self) -> bool:
        """By the schedule."""
        return bool(self._passes == self.engine.micro_batches)

    def prefers_to_defer(self, communication_ns: Sequence[int]) -> bool:
        """Whether earlier stages are at work for longer than the reduction takes, so that it need not disturb backward.

        After its last backward, stage s waits while the s stages before it do theirs, one after the other. Their
        reductions may share the link, so room for theirs is wanted too.
        """
        stage = self.engine.stage_id
        return bool(communication_ns) and (stage + 1) * median(communication_ns) < stage * self.backward_ns

    def _watch_for_exceptions(self, reducer: Driven) -> None:
        def start_anew() -> None:
            self._passes = 0
            reducer.give_up_unfinished()

        self._replace(changes.EXECUTE_SCHEDULE, lambda execute: self._using(_after(start_anew, execute)))

    def _reduce_with(self, reducer: Driven) -> Callable[..., None]:
        return lambda *_, **__: self._gradients.mark_reduced()

    def _samples(self, replicas: int) -> int:
        return replicas


def driver_of(engine: DeepSpeedEngine, options: ReductionArguments) -> EngineDriver:
    """The driver for an engine; collective over its replicas.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        options: the user's.

    Raises:
        TypeError: not an engine.
        ValueError: an engine that cannot be served; the message says why and what to use.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"GradientReducer.attach: {type(engine).__name__} is not what deepspeed.initialize returns")
    return PipelineDriver(engine, options) if isinstance(engine, PipelineEngine) else EngineDriver(engine, options)


def _require_reduced(reducer: Driven, reduction: Change) -> None:
    if reducer.is_in_step:
        raise RuntimeError(
            f"the engine is about to step on gradients that are not reduced: this release of DeepSpeed did not call "
            f"{reduction} after the last backward; detach() the reducer, or use a release that README.md names"
        )


def _after(before: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called_after(*args: Any, **options: Any) -> Any:
        before()
        return method(*args, **options)

    return called_after


@contextmanager
def _refuse_coalescing() -> Iterator[None]:
    raise RuntimeError(
        "coalesce_grad_reduction() with a GradientReducer attached: detach() it first, or use gradient accumulation"
    )
    yield
