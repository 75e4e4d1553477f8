"""Define ``GradientReducer``, which is standalone or attached to one of DeepSpeed's engines.

The driver of a reducer determines which backward pass is the last one of a step. An engine's driver also replaces the
engine's own reduction by a wait for the reducer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups
from torch import nn
from typing_extensions import Self, Unpack

from ds_topo.base.classes import REDUCED, Mixin, adopt, stock_class
from ds_topo.base.patches import DualPipeVEngine
from ds_topo.engine.optimizer_gradients import gradients_of
from ds_topo.errors import listed, warn
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reduction import BucketReducer
from ds_topo.reduction.managed import ReplicaSums
from ds_topo.reduction.options import BucketSizes, ReductionArguments, ReductionOptions
from ds_topo.reduction.parameters import HasDataParallelGroup, is_held_by
from ds_topo.reduction.reducer import StepDriver
from ds_topo.reduction.reductions import LARGE_BUCKET_BYTES, suitable_bucket_bytes
from ds_topo.reduction.report import BucketTiming, StepTiming


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

    Arguments, errors and sources are those of :class:`~ds_topo.reduction.reducer.BucketReducer`, options those of
    :class:`~ds_topo.reduction.options.ReductionOptions`.

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

    def __init__(
        self,
        module: nn.Module,
        grid: HasDataParallelGroup | None = None,
        *,
        process_group: ProcessGroup | None = None,
        driver: StepDriver | None = None,
        **options: Unpack[ReductionArguments],
    ) -> None:
        is_engine = isinstance(module, DeepSpeedEngine)
        is_standalone = driver is None and isinstance(module, nn.Module)
        if is_engine or (is_standalone and is_held_by(module, DeepSpeedEngine, "micro_steps")):
            raise TypeError(
                f"GradientReducer({'engine' if is_engine else 'engine.module'}) would reduce beside the engine, which "
                "reduces its gradients itself: call GradientReducer.attach(engine)"
            )
        super().__init__(module, grid=grid, process_group=process_group, driver=driver, **options)

    @classmethod
    def attach(cls, engine: DeepSpeedEngine, **options: Unpack[ReductionArguments]) -> Self:
        """Average a DeepSpeed engine's gradients, overlapped with the backward pass of the last micro-batch.

        The reducer is ``engine.gradient_reducer`` until it is detached, and that is None then.

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
        manager = options.get("manager")
        self.sums = None if manager is None else ReplicaSums(manager)
        self._gradients = gradients_of(engine, self._bucket_sizes, self.sums)
        self._bindings = ExitStack()
        self._is_backward_of_output = False
        """True from the start of a ``loss.backward()`` through the engine's output to the engine's next call."""
        self._is_backward_of_engine = False
        """True while ``engine.backward`` runs."""
        self.reducer: BucketReducer
        """The reducer that the engine drives; set in :meth:`bind`."""

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
            options["expert_groups"] = dict(deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP)
        return options

    def bind(self, reducer: BucketReducer, options: ReductionOptions) -> None:
        """Give the engine the class of engines that drive a reducer, until it is detached."""
        self.reducer = self.engine.gradient_reducer = reducer
        self._bindings.callback(setattr, self.engine, "gradient_reducer", None)
        self._gradients.bind(self.reduce, reducer.forget_unreduced, self._bindings)
        self.engine.reducer_driver = self
        self._bindings.callback(adopt(self.engine, self.mixin))
        if options.overlap_parameters and self._gradients.partitions:
            self._gradients.parameters.start_overlapping(self.engine.module)

    # -- the engine's calls

    @property
    def mixin(self) -> type[Mixin]:
        """The class with the engine's methods that drive the reducer."""
        return ReducedPlainEngine

    @property
    def reduces_in_engine(self) -> bool:
        """True if the engine, and not its optimizer, reduces gradients at the end of a backward pass."""
        return not isinstance(self.engine.optimizer, DeepSpeedZeroOptimizer)

    def reduce(self, *_: object, **__: object) -> None:
        """Wait for the reducer, in place of the engine's own reduction at the end of the last micro-batch."""
        self.reducer.complete()
        self._gradients.mark_reduced()

    def require_reduced(self) -> None:
        """Refuse a step on gradients of this rank alone."""
        if self.reducer.is_in_step:
            raise RuntimeError(
                "the engine would step on gradients that are not reduced: this release of DeepSpeed did not call "
                f"{self._gradients.reduced_by}; detach() the reducer, or use a release that README.md names"
            )

    def begin_backward(self) -> None:
        """Note that the gradients that follow are of this engine's output."""
        self._is_backward_of_output = not self._is_backward_of_engine

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Note that ``engine.backward`` runs."""
        outer, self._is_backward_of_engine = self._is_backward_of_engine, True
        try:
            yield
        finally:
            self._is_backward_of_engine = outer

    def end_backward(self) -> None:
        """Note that this engine's backward pass is over."""
        self._is_backward_of_output = False

    def give_up_unfinished(self) -> None:
        """Discard a step that an exception in backward has ended: training may go on with the same engine."""
        self.end_backward()
        self.reducer.give_up_unfinished()

    def end_with_engine(self) -> None:
        """Detach the reducer before the engine is destroyed."""
        self._gradients.end_with_engine()
        self.reducer.detach()

    def gather_in_step(self) -> None:
        """Let parameters arrive in the step from now on, because compiled code does not wait for them."""
        if self._gradients.parameters.overlaps:
            warn(
                "overlap_parameters: compiled code does not wait for parameters, so they arrive in the step from now on"
            )
            self._gradients.parameters.stop_overlapping()

    # -- the reducer's questions

    def is_last_backward(self) -> bool:
        """Tell whether this is the last micro-batch of the step, by the engine's count.

        A backward pass of another engine's loss through this module is not: its gradients are added to the next ones.
        """
        engine = self.engine
        is_own = self._is_backward_of_engine or self._is_backward_of_output
        if engine.inside_no_sync_ctxt or not is_own:
            return False
        return self._gradients.reduces_always or bool(engine.is_gradient_accumulation_boundary())

    def owns_hook(self, hook: Callable[..., object]) -> bool:
        """Return True for hooks of DeepSpeed's optimizers: their methods do nothing while the reducer is attached."""
        return str(getattr(hook, "__module__", None)).startswith("deepspeed.")

    def remedy_for_unfrozen(self) -> str:
        """Return what to do about unfrozen parameters: only an optimizer of torch itself can train them later."""
        engine = self.engine
        if engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled():
            return (
                f"DeepSpeed's {stock_class(engine.optimizer).__name__} trains only what required gradients in "
                "deepspeed.initialize, with or without a reducer; unfreeze before that call, and give parameters that "
                "are to begin later a learning rate of 0"
            )
        return (
            "call detach() on the reducer and GradientReducer.attach(engine) on all ranks; the optimizer must hold them"
        )

    def steps_taken(self) -> int:
        """Return the engine's count of steps; replicas of a ``Manager`` compare it themselves."""
        return int(self.engine.global_steps) if self.sums is None else 0

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

    def _samples(self, replicas: int) -> int:
        """Return the number of replicas that work on different samples."""
        return int(replicas // self.engine.sequence_parallel_size)

    # -- shared

    def _bucket_sizes(self) -> BucketSizes:
        """Return the sizes of a partition's regions; collective.

        Invalid options are ignored here: the reducer raises for them later, on all ranks together.
        """
        device = next((parameter.device for parameter in self.engine.module.parameters()), torch.device("cpu"))
        suitable = suitable_bucket_bytes(self.group, device) if self.sums is None else LARGE_BUCKET_BYTES
        try:
            return ReductionOptions(**self._wanted).bucket_sizes(suitable)
        except (TypeError, ValueError):
            return ReductionOptions().bucket_sizes(suitable)


class PipelineDriver(EngineDriver):
    """The driver of a pipeline engine, whose schedule knows the last micro-batch.

    Buckets are reduced while the last backward pass runs. The reducer finishes where the schedule reduces tied layers.
    With DualPipeV, the parameters of each phase are reduced from the last backward of that phase. Phase 1 ends earlier,
    which starts the step. Its reductions overlap with the rest of phase 0. Those passes are equally many in each step,
    so the reducer learns how many gradients a parameter gets in them (``static_graph``).
    """

    def __init__(self, engine: PipelineEngine, options: ReductionArguments) -> None:
        super().__init__(engine, options)
        self._passes: Counter[int | None] = Counter()
        """The number of backward passes in this step so far, in each phase of the schedule."""
        self._phase: int | None = None
        """The phase of the last backward pass; None, except with DualPipeV."""
        self.backward_ns: int
        """The duration of the last backward pass."""
        self._instructions: dict[type, Any] | None = None

    @property
    def group(self) -> ProcessGroup:
        """The replicas of a stage."""
        group: ProcessGroup = self.engine.mpu.get_data_parallel_group()
        return group

    @property
    def mixin(self) -> type[Mixin]:
        """The class with the engine's methods that drive the reducer."""
        return ReducedPipelineEngine

    def reduce(self, *_: object, **__: object) -> None:
        """Note that gradients are reduced: the reducer has completed where the schedule reduces tied layers."""
        self._gradients.mark_reduced()

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
            self._gradients.reduce_tied(partial(reduce_tied, engine, **arguments))

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


# -- the engine's methods ---------------------------------------------------------------------------------------------


class ReducedEngine(Mixin, DeepSpeedEngine):  # type: ignore[misc]
    """The methods that all engines with a reducer share, on a grid or without one."""

    mixin_order, mixin_suffix, mixin_state = REDUCED, "Reduced", "reducer_driver"
    reducer_driver: EngineDriver

    def buffered_allreduce_fallback(self, *arguments: Any, **options: Any) -> None:
        """Wait for the reducer.

        At stage 0 and with ``BF16_Optimizer`` DeepSpeed reduces gradients here, after the last backward pass.
        """
        if self.reducer_driver.reduces_in_engine:
            self.reducer_driver.reduce()
        else:
            super().buffered_allreduce_fallback(*arguments, **options)

    def _take_model_step(self, *arguments: Any) -> None:
        """Require that the reducer has finished.

        A release whose engine no longer calls what the reducer replaces would step on this rank's own gradients.
        """
        self.reducer_driver.require_reduced()
        super()._take_model_step(*arguments)

    def zero_grad(self) -> None:
        """Discard also what the reducer has accumulated."""
        self.reducer_driver.reducer.forget_unreduced()
        super().zero_grad()

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Refuse it: DeepSpeed would reduce again what the reducer has reduced."""
        raise RuntimeError(
            "coalesce_grad_reduction() with a GradientReducer attached: detach() it first, or use gradient accumulation"
        )
        yield

    def compile(self, *arguments: Any, **options: Any) -> Any:
        """Let parameters arrive in the step: compiled code reads memory without asking whether they have arrived."""
        self.reducer_driver.gather_in_step()
        return super().compile(*arguments, **options)

    def destroy(self) -> None:
        """Detach the reducer first, which ends with its engine."""
        self.reducer_driver.end_with_engine()
        self.destroy()  # of the class that detach() has given back


class ReducedPlainEngine(ReducedEngine):
    """An engine with a reducer that is no pipeline."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Discard a step that an exception in backward has ended: training may go on with the same engine."""
        self.reducer_driver.give_up_unfinished()
        return super().forward(*inputs, **named)

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Note that it is this engine's own backward pass."""
        with self.reducer_driver.in_backward():
            return super().backward(*arguments, **options)

    def _backward_prologue(self) -> None:
        """Note that the gradients that follow are of this engine's output.

        Gradients of another engine's loss through this module belong to no step of this engine.
        """
        self.reducer_driver.begin_backward()
        super()._backward_prologue()

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Note that this engine's backward pass is over."""
        self.reducer_driver.end_backward()
        return super().step(*arguments, **options)


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
