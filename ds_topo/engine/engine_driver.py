"""Drive a reducer by one of DeepSpeed's engines.

:class:`EngineDriver` tells the reducer which backward pass is the last one of a step, and replaces the engine's own
reduction by a wait for the reducer. :class:`OptimizerGradients` connects the reducer to the engine's optimizer. The one
here serves optimizers that read whole gradients in ``parameter.grad``; :mod:`ds_topo.engine.optimizer_gradients` has
those of ZeRO 1 and 2 and of ``BF16_Optimizer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.base.classes import REDUCED, Mixin, adopt, stock_class
from ds_topo.base.marks import is_element_by_element
from ds_topo.engine.config import may_have_options
from ds_topo.errors import warn
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reduction.buckets import BucketTiming
from ds_topo.reduction.options import BucketSizes, ReductionArguments, ReductionOptions
from ds_topo.reduction.reducer import StandaloneReducer, StepDriver, wider_sums
from ds_topo.reduction.reductions import LARGE_BUCKET_BYTES, suitable_bucket_bytes


class OptimizerGradients:
    """The connection at stage 0: every rank needs whole gradients, and the optimizer reads ``parameter.grad``."""

    partitions: Sequence[Any] = ()
    """The gradients of which each rank needs only its own part."""
    reduces_always = False
    """True if the gradients of every micro-batch are reduced."""
    reduced_by = "DeepSpeedEngine.buffered_allreduce_fallback"
    """The method that DeepSpeed calls to reduce gradients."""
    parameters: Any = None
    """The ``PartitionedParameters`` that arrive from other ranks after a step; None if there are none."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer

    def bind(self, driver: EngineDriver, bindings: ExitStack, overlaps: bool) -> None:
        """Let the engine and its optimizer use the driver's reducer until the bindings are closed.

        With ``overlaps``, parameters may arrive from other ranks during the next forward pass.
        """

    def mark_reduced(self) -> None:
        """Mark gradients as reduced for the optimizer. No-op here: its step reads ``parameter.grad``."""

    def reduce_tied(self, reduce: Callable[[], None]) -> None:
        """Sum the gradients of tied layers over their stages; ``reduce`` is the pipeline engine's own function."""
        reduce()

    def end_with_engine(self) -> None:
        """Prepare for the end of the engine; the bindings are closed next."""


def why_not_attachable(engine: DeepSpeedEngine) -> str | None:
    """Return the reason why no reducer can be attached to an engine, or None."""
    if may_have_options(engine._config):
        from ds_topo.engine.config_options import refusal_of_reducer  # a table that others do not need

        if (reason := refusal_of_reducer(engine._config)) is not None:
            return reason
    if not getattr(engine.optimizer, "param_groups", None):
        return "the engine has no optimizer, so it never reduces gradients: give deepspeed.initialize one"
    if not engine.enable_backward_allreduce and not engine.pipeline_parallelism:
        return f"the optimizer {engine.optimizer_name()!r} communicates by itself: choose one that does not"
    is_stage_2 = int(engine.zero_optimization_stage()) == 2
    moves = is_stage_2 or isinstance(engine.optimizer, BF16_Optimizer)
    if moves and not is_element_by_element(engine.optimizer.optimizer):
        return (
            f"{type(engine.optimizer.optimizer).__name__} is not known to update each element by itself, so its "
            "partition cannot move to another layout, as stage 2 and sums of bf16 in fp32 require: use stage 0 or 1 "
            'without "grad_accum_dtype": "fp32", or DeepSpeed\'s reduction'
        )
    if is_stage_2 and engine.micro_steps % engine.gradient_accumulation_steps():
        return "a step has begun, and its gradients are in DeepSpeed's partition: attach the reducer after the step"
    if engine.is_deepcompile_active():
        return "DeepCompile reduces gradients inside the compiled graph: switch it off"
    return None


# -- the engine's methods ---------------------------------------------------------------------------------------------


class ReducedEngine(Mixin, DeepSpeedEngine):  # type: ignore[misc]
    """The methods that all engines with a reducer share, on a grid or without one."""

    mixin_order, mixin_state = REDUCED, "reducer_driver"
    reducer_driver: EngineDriver

    def buffered_allreduce_fallback(self, *arguments: Any, **options: Any) -> None:
        """Wait for the reducer.

        At stage 0 and with ``BF16_Optimizer`` DeepSpeed reduces gradients here, after the last backward pass.
        """
        if isinstance(self.optimizer, DeepSpeedZeroOptimizer):  # which reduces them itself
            super().buffered_allreduce_fallback(*arguments, **options)
        else:
            self.reducer_driver.reduce()

    def _take_model_step(self, *arguments: Any) -> None:
        """Require that the reducer has finished.

        A release whose engine no longer calls what the reducer replaces would step on this rank's own gradients.
        """
        if self.reducer_driver.reducer.is_in_step:
            raise RuntimeError(
                "the engine would step on gradients that are not reduced: this release of DeepSpeed did not call "
                f"{self.reducer_driver.gradients.reduced_by}; detach() the reducer, or use a release that README.md "
                "names"
            )
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
        parameters = self.reducer_driver.gradients.parameters
        if parameters is not None and parameters.overlaps:
            warn(
                "overlap_parameters: compiled code does not wait for parameters, so they arrive in the step from now on"
            )
            parameters.stop_overlapping()
        return super().compile(*arguments, **options)

    def destroy(self) -> None:
        """Detach the reducer first, which ends with its engine."""
        self.reducer_driver.gradients.end_with_engine()
        self.reducer_driver.reducer.detach()
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


# -- the driver -------------------------------------------------------------------------------------------------------


class EngineDriver(StepDriver):
    """The driver of a plain engine; creating it is collective over the engine's replicas."""

    mixin: type[Mixin] = ReducedPlainEngine
    """The class with the engine's methods that drive the reducer."""

    def __init__(self, engine: DeepSpeedEngine, options: ReductionArguments) -> None:
        self.engine = engine
        self._wanted = options
        self.wider = wider_sums(options.get("manager"))
        self.gradients: OptimizerGradients
        """The connection to the engine's optimizer; set by ``GradientReducer.attach``."""
        self._bindings = ExitStack()
        self._is_backward_of_output = False
        """True from the start of a ``loss.backward()`` through the engine's output to the engine's next call."""
        self._is_backward_of_engine = False
        """True while ``engine.backward`` runs."""
        self.reducer: StandaloneReducer
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
            "partitions": self.gradients.partitions,
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

    def bind(self, reducer: StandaloneReducer, options: ReductionOptions) -> None:
        """Give the engine the class of engines that drive a reducer, until it is detached."""
        self.reducer = self.engine.gradient_reducer = reducer
        self._bindings.callback(setattr, self.engine, "gradient_reducer", None)
        self.gradients.bind(self, self._bindings, options.overlap_parameters)
        self.engine.reducer_driver = self
        self._bindings.callback(adopt(self.engine, self.mixin))

    # -- the engine's calls

    def reduce(self, *_: object, **__: object) -> None:
        """Wait for the reducer, in place of the engine's own reduction at the end of the last micro-batch."""
        self.reducer.complete()
        self.gradients.mark_reduced()

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

    # -- the reducer's questions

    def is_last_backward(self) -> bool:
        """Tell whether this is the last micro-batch of the step, by the engine's count.

        A backward pass of another engine's loss through this module is not: its gradients are added to the next ones.
        """
        engine = self.engine
        is_own = self._is_backward_of_engine or self._is_backward_of_output
        if engine.inside_no_sync_ctxt or not is_own:
            return False
        return self.gradients.reduces_always or bool(engine.is_gradient_accumulation_boundary())

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
        """Return the engine's count of steps; replicas compare it themselves."""
        return int(self.engine.global_steps) if self.wider is None else 0

    def wait_for_parameters(self) -> None:
        """Wait for the gather of the last step."""
        if self.gradients.parameters is not None:
            self.gradients.parameters.wait()

    def gathers(self) -> list[BucketTiming]:
        """Return the timings of the gather of the last step."""
        return [] if self.gradients.parameters is None else list(self.gradients.parameters.timings())

    def on_detach(self) -> None:
        """Restore the engine's own reduction of gradients."""
        self._bindings.close()

    def _samples(self, replicas: int) -> int:
        """Return the number of replicas that work on different samples."""
        return int(replicas // self.engine.sequence_parallel_size)

    def bucket_sizes(self) -> BucketSizes:
        """Return the sizes of a partition's regions; collective.

        Invalid options are ignored here: the reducer raises for them later, on all ranks together.
        """
        device = next((parameter.device for parameter in self.engine.module.parameters()), torch.device("cpu"))
        suitable = suitable_bucket_bytes(self.group, device) if self.wider is None else LARGE_BUCKET_BYTES
        try:
            return ReductionOptions(**self._wanted).bucket_sizes(suitable)
        except (TypeError, ValueError):
            return ReductionOptions().bucket_sizes(suitable)
