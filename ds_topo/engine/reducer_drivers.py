"""Define ``GradientReducer``, which is standalone or attached to one of DeepSpeed's engines.

The driver of a reducer determines which backward pass is the last one of a step. An engine's driver also replaces the
engine's own reduction by a wait for the reducer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups as deepspeed_groups
from torch import nn
from typing_extensions import Self, Unpack

from ds_topo.engine.optimizer_gradients import gradients_of
from ds_topo.errors import listed, warn
from ds_topo.ledger import Patch, after, ledger
from ds_topo.mpu import patches
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer import BucketReducer
from ds_topo.reducer.options import BucketSizes, ReductionArguments, ReductionOptions
from ds_topo.reducer.parameters import is_held_by
from ds_topo.reducer.reducer import StepDriver
from ds_topo.reducer.reductions import suitable_bucket_bytes
from ds_topo.reducer.report import BucketTiming, StepTiming


class GradientReducer(BucketReducer):
    """Average a module's gradients over a data-parallel group while backward is still running.

    ::

        reducer = GradientReducer(module, grid=grid)
        for batches in loader:                      # micro-batches of one step
            with reducer.no_sync():
                for batch in batches[:-1]:
                    module(batch).sum().backward()
            module(batches[-1]).sum().backward()    # full buckets are reduced during this backward
            reducer.finish()                        # now every gradient is the average over the group
            optimizer.step()
            optimizer.zero_grad()

    Arguments, errors and sources are those of :class:`~ds_topo.reducer.reducer.BucketReducer`, options those of
    :class:`~ds_topo.reducer.options.ReductionOptions`.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> module = torch.nn.Linear(2, 1)
    >>> reducer = GradientReducer(module)
    >>> module(torch.ones(3, 2)).sum().backward()
    >>> reducer.finish()
    >>> module.weight.grad
    tensor([[3., 3.]])
    >>> dist.destroy_process_group()
    """

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        is_engine = isinstance(module, DeepSpeedEngine)
        is_standalone = arguments.get("driver") is None and isinstance(module, nn.Module)
        if is_engine or (is_standalone and is_held_by(module, DeepSpeedEngine, "micro_steps")):
            raise TypeError(
                f"GradientReducer({'engine' if is_engine else 'engine.module'}) would reduce beside the engine, which "
                "reduces its gradients itself: call GradientReducer.attach(engine)"
            )
        super().__init__(module, **arguments)

    @classmethod
    def attach(cls, engine: DeepSpeedEngine, **options: Unpack[ReductionArguments]) -> Self:
        """Average a DeepSpeed engine's gradients, overlapped with the backward pass of the last micro-batch.

        Supports ``DeepSpeedEngine`` at ZeRO stages 0 to 2 and ``PipelineEngine`` at 0 and 1, in fp32, fp16 and bf16,
        with or without experts. Groups, divisor, communication data type and pre-division are the engine's. At stages 1
        and 2 gradients go to the ranks that own them, and :mod:`~ds_topo.engine.optimizer_gradients` moves the
        optimizer to a layout for that. ``detach()`` moves it back and is collective then. Collective over the
        data-parallel group.

        Args:
            engine: the result of ``deepspeed.initialize``.
            options: see ``ReductionOptions``; they take precedence over the engine's. In a pipeline, by default, a
                stage does not overlap if its wait for other stages hides the whole reduction anyway.

        Raises:
            TypeError: ``engine`` is not an engine, or an option is something that the engine provides.
            ValueError: the engine is not supported; the message says why and what to use.
            RuntimeError: the engine has a reducer already.

        It replaces ``DeepSpeedEngine.buffered_allreduce_fallback``, ``DeepSpeedZeroOptimizer.reduce_gradients``.
        """
        if not isinstance(engine, DeepSpeedEngine):
            raise TypeError(f"GradientReducer.attach: {type(engine).__name__} is not what deepspeed.initialize returns")
        if given := [name for name in ("module", "grid", "process_group", "driver") if name in options]:
            raise TypeError(f"GradientReducer.attach: omit {listed(given)}, which the engine provides")
        driver = (PipelineDriver if isinstance(engine, PipelineEngine) else EngineDriver)(engine, options)
        reducer = cls(engine.module, process_group=driver.group, driver=driver, **options)
        try:
            driver.bind(reducer, reducer.options)
        except BaseException:
            reducer.detach()
            raise
        return reducer


class EngineDriver(StepDriver):
    """The driver of a plain engine; creating it is collective over the engine's replicas."""

    def __init__(self, engine: DeepSpeedEngine, options: ReductionArguments) -> None:
        self.engine = engine
        self._wanted = options
        self._gradients = gradients_of(engine, self._bucket_sizes)
        self._bindings = ExitStack()
        self._is_backward_of_output = False
        """True from the start of a ``loss.backward()`` through the engine's output to the engine's next call."""

    @property
    def group(self) -> ProcessGroup:
        """The group of the replicas of a dense parameter."""
        group: ProcessGroup = self.engine.seq_data_parallel_group
        return group

    def options(self) -> ReductionArguments:
        """Return the engine's own settings of the reduction."""
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

    def bind(self, reducer: BucketReducer, options: ReductionOptions) -> None:
        """Patch the engine so that it drives this reducer until it is detached."""
        self._gradients.bind(self._bindings)
        owner, reduction = self._gradients.reduction

        def end_with_engine() -> None:
            self._gradients.end_with_engine()
            reducer.detach()

        def require_reduced() -> None:
            if reducer.is_in_step:
                raise RuntimeError(
                    f"the engine would step on gradients that are not reduced: this release of DeepSpeed did not call "
                    f"{reduction}; detach() the reducer, or use a release that README.md names"
                )

        self._replace(reduction, lambda _: self._reduce_with(reducer), owner)
        self._replace(patches.DESTROY_ENGINE, after(end_with_engine))
        self._replace(patches.COALESCE, lambda _: _refuse_coalescing)
        self._replace(patches.TAKE_STEP, after(require_reduced))
        for row in patches.ZERO_GRADS:
            for thrower in (self.engine, self.engine.optimizer):
                if isinstance(row.owner, type) and isinstance(thrower, row.owner):
                    self._replace(row, after(reducer.forget_unreduced), thrower)
        self._watch_for_exceptions(reducer)
        if options.overlap_parameters and self._gradients.partitions:
            self._gradients.parameters.start_overlapping(self.engine.module)
            self._replace(patches.COMPILE, after(self._gather_in_step))

    # -- the reducer's questions

    def is_last_backward(self) -> bool:
        """Tell whether this is the last micro-batch of the step, by the engine's count.

        A backward pass of another engine's loss through this module is not: its gradients are added to the next ones.
        """
        engine = self.engine
        is_own = engine._running_engine_backward or self._is_backward_of_output
        if engine.inside_no_sync_ctxt or not is_own:
            return False
        return self._gradients.reduces_always or bool(engine.is_gradient_accumulation_boundary())

    def remedy_for_unfrozen(self) -> str:
        """Return what to do about unfrozen parameters: only an optimizer of torch itself can train them later."""
        engine = self.engine
        if engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled():
            return (
                f"DeepSpeed's {type(engine.optimizer).__name__} trains only what required gradients in "
                "deepspeed.initialize, with or without a reducer; unfreeze before that call, and give parameters that "
                "are to begin later a learning rate of 0"
            )
        return (
            "call detach() on the reducer and GradientReducer.attach(engine) on all ranks; the optimizer must hold them"
        )

    def steps_taken(self) -> int:
        """Return the engine's count of steps."""
        return int(self.engine.global_steps)

    def wait_for_parameters(self) -> None:
        """Wait for the gather of the last step."""
        self._gradients.parameters.wait()

    def gathers(self) -> list[BucketTiming]:
        """Return the timings of the gather of the last step."""
        return self._gradients.parameters.timings()

    def on_detach(self) -> None:
        """Restore the engine's own reduction of gradients."""
        self._bindings.close()

    # -- differences between plain engines and pipelines

    def _reduce_with(self, reducer: BucketReducer) -> Callable[..., None]:
        def reduce(*_: object, **__: object) -> None:
            """Replace the engine's own reduction, at the end of the last micro-batch's backward."""
            reducer.complete()
            self._gradients.mark_reduced()

        return reduce

    def _watch_for_exceptions(self, reducer: BucketReducer) -> None:
        """Discard an unfinished step before a forward pass, because an exception has ended it."""

        def begin_backward() -> None:
            self._is_backward_of_output = not self.engine._running_engine_backward

        def end_backward() -> None:
            self._is_backward_of_output = False

        def begin_forward() -> None:
            end_backward()
            reducer.give_up_unfinished()

        self._replace(patches.OWN_BACKWARD, after(begin_backward))
        self._replace(patches.OWN_STEP, after(end_backward))
        self._replace(patches.FORWARD, after(begin_forward))

    def _samples(self, replicas: int) -> int:
        """Return the number of replicas that work on different samples."""
        return int(replicas // self.engine.sequence_parallel_size)

    # -- shared

    def _bucket_sizes(self) -> BucketSizes:
        """Return the sizes of a partition's regions; collective.

        Invalid options are ignored here: the reducer raises for them later, on all ranks together.
        """
        device = next((parameter.device for parameter in self.engine.module.parameters()), torch.device("cpu"))
        suitable = suitable_bucket_bytes(self.group, device)
        try:
            return ReductionOptions(**self._wanted).bucket_sizes(suitable)
        except (TypeError, ValueError):
            return ReductionOptions().bucket_sizes(suitable)

    def _gather_in_step(self) -> None:
        warn("overlap_parameters: compiled code does not wait for parameters, so they arrive in the step from now on")
        self._gradients.parameters.stop_overlapping()

    def _replace(self, patch: Patch, make: Callable[[Any], Any], owner: object | None = None) -> None:
        self._bindings.callback(ledger.bind(patch, make, owner or self.engine))


class PipelineDriver(EngineDriver):
    """The driver of a pipeline engine, whose schedule knows the last micro-batch.

    Buckets are reduced while the last backward pass runs. The reducer finishes where the schedule reduces tied layers.
    With DualPipeV, the parameters of each phase are reduced from the last backward of that phase. Phase 1 ends earlier,
    which starts the step. Its reductions overlap with the rest of phase 0. Those passes are equally many in each step,
    so the reducer learns how many gradients a parameter gets in them (``static_graph``).
    """

    def __init__(self, engine: PipelineEngine, options: ReductionArguments) -> None:
        super().__init__(engine, options)
        self._passes = [0, 0]
        """The number of backward passes in this step so far, in each phase of the schedule."""
        self._phase = 0
        """The phase of the last backward pass; always 0, except with DualPipeV."""
        self.backward_ns = 0
        """The duration of the last backward pass."""

    @property
    def group(self) -> ProcessGroup:
        """The replicas of a stage."""
        group: ProcessGroup = self.engine.mpu.get_data_parallel_group()
        return group

    def bind(self, reducer: BucketReducer, options: ReductionOptions) -> None:
        """Patch the instructions of the schedule so that they drive this reducer, too."""
        super().bind(reducer, options)

        def with_ours(instructions: dict[type, Any]) -> dict[type, Any]:
            backward, reduce_tied = instructions[schedule.BackwardPass], instructions[schedule.ReduceTiedGrads]

            def backward_pass(engine: PipelineEngine, **arguments: Any) -> None:
                self._phase = arguments.get("phase", 0)
                self._passes[self._phase] += 1
                started = time.perf_counter_ns()
                backward(engine, **arguments)
                self.backward_ns = time.perf_counter_ns() - started
                reducer.launch_deferred()

            def reduce_tied_gradients(engine: PipelineEngine, **arguments: Any) -> None:
                self._passes = [0, 0]
                reducer.complete()
                self._gradients.reduce_tied(partial(reduce_tied, engine, **arguments))

            ours = {schedule.BackwardPass: backward_pass, schedule.ReduceTiedGrads: reduce_tied_gradients}
            return {**instructions, **ours}

        self._replace(patches.INSTRUCTIONS, with_ours)

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

    def _reduce_with(self, reducer: BucketReducer) -> Callable[..., None]:
        return lambda *_, **__: self._gradients.mark_reduced()

    def _watch_for_exceptions(self, reducer: BucketReducer) -> None:
        def start_anew() -> None:
            self._passes = [0, 0]
            reducer.give_up_unfinished()

        self._replace(patches.EXECUTE_SCHEDULE, after(start_anew))

    def _samples(self, replicas: int) -> int:
        return replicas


@contextmanager
def _refuse_coalescing() -> Iterator[None]:
    raise RuntimeError(
        "coalesce_grad_reduction() with a GradientReducer attached: detach() it first, or use gradient accumulation"
    )
    yield
