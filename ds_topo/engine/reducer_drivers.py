"""The gradient reducer inside DeepSpeed's engines: attached to one, or switched on in its config file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest import mock

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine.optimizer_gradients import gradients_of
from ds_topo.reducer import GradientReducer
from ds_topo.reducer.misuse import ReducerState

CONFIG_SECTION = "gradient_reducer"


class EngineReducer(GradientReducer):
    """A :class:`GradientReducer` that a DeepSpeed engine drives; made by :func:`attach`.

    The engine decides which micro-batch is the last one; ``finish()`` and ``no_sync()`` are its business. What it would
    have called to reduce gradients only waits for the rest of the reduction.
    """

    def __init__(self, engine: DeepSpeedEngine, **options: Any) -> None:
        self._engine = engine
        self._bindings = ExitStack()
        self._gradients = gradients_of(engine)
        super().__init__(
            engine.module,
            process_group=_group_of(engine),
            storage=self._gradients.storage,
            **{**_options_of(engine), **options},
        )
        self._gradients.take_over(self._bindings)
        self._bind(engine, "destroy", self._destroy_engine)
        owner, name = self._gradients.seam
        self._bind(owner, name, self._reduce)
        if isinstance(engine, DeepSpeedEngine) and hasattr(engine, "coalesce_grad_reduction"):
            self._bind(engine, "coalesce_grad_reduction", self._refuse_coalescing)

    def detach(self) -> None:
        """Let the engine reduce its gradients by itself again. Twice is once."""
        super().detach()
        self._bindings.close()

    def _bind(self, owner: Any, name: str, value: Any) -> None:
        self._bindings.enter_context(mock.patch.object(owner, name, value))

    def _reduce(self, *_: Any, **__: Any) -> None:
        """In place of the engine's own reduction, at the end of the last micro-batch's backward."""
        self._complete()
        self._gradients.hand_over()

    def _complete(self) -> None:
        """Wait for the reduction."""
        if self._state is ReducerState.IDLE:  # no gradient arrived in the last micro-batch
            self._begin_step()
        self.finish()

    def _is_last_backward(self) -> bool:
        engine = self._engine
        return not engine.inside_no_sync_ctxt and bool(engine.is_gradient_accumulation_boundary())

    def _destroy_engine(self) -> None:
        self.detach()
        self._engine.destroy()

    @contextmanager
    def _refuse_coalescing(self) -> Iterator[None]:
        raise RuntimeError(
            "coalesce_grad_reduction() with a GradientReducer attached: detach() it first, or use gradient accumulation"
        )
        yield


class PipelineReducer(EngineReducer):
    """The same for a pipeline engine, whose schedule knows the last micro-batch.

    Gradients leave while its backward runs, and are waited for where the schedule reduces tied layers.
    """

    def __init__(self, engine: PipelineEngine, **options: Any) -> None:
        self._passes = 0
        """Backward passes of this step so far."""
        self.backward_ns = 0
        """How long the last one took."""
        super().__init__(engine, **options)
        instructions = engine._INSTRUCTION_MAP
        backward, reduce_tied = instructions[schedule.BackwardPass], instructions[schedule.ReduceTiedGrads]

        def backward_pass(engine: PipelineEngine, **arguments: Any) -> None:
            self._passes += 1
            started = time.perf_counter_ns()
            backward(engine, **arguments)
            self.backward_ns = time.perf_counter_ns() - started
            self.release()

        def reduce_tied_gradients(engine: PipelineEngine, **arguments: Any) -> None:
            self._passes = 0
            self._complete()
            reduce_tied(engine, **arguments)

        ours = {schedule.BackwardPass: backward_pass, schedule.ReduceTiedGrads: reduce_tied_gradients}
        self._bind(engine, "_INSTRUCTION_MAP", {**instructions, **ours})

    def _reduce(self, *_: Any, **__: Any) -> None:
        self._gradients.hand_over()

    def _is_last_backward(self) -> bool:
        return bool(self._passes == self._engine.micro_batches)

    def _wants_to_hold_back(self) -> bool:
        """Whether earlier stages are at work for longer than the reduction takes, so that it need not disturb backward.

        After its last backward, stage s waits while the s stages before it do theirs, one after the other. Their
        reductions may share the link, so room for theirs is wanted too.
        """
        stage = self._engine.stage_id
        times = [step.communication_ns for step in self._steps if step.ended_ns]
        return bool(times) and (stage + 1) * median(times) < stage * self.backward_ns


def attach(engine: DeepSpeedEngine, **options: Any) -> EngineReducer:
    """Let a reducer average a DeepSpeed engine's gradients, overlapped with the last micro-batch's backward.

    Serves ``DeepSpeedEngine`` and ``PipelineEngine`` at ZeRO stages 0 and 1, fp32, fp16 and bf16, experts included.
    Groups, divisor, communication data type and pre-division are the engine's. Collective over the data-parallel group.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        options: see ``ReductionOptions``; they take precedence over the engine's. In a pipeline, by default, a stage
            does not overlap where its wait for other stages hides the whole reduction anyway.

    Raises:
        TypeError: not an engine.
        ValueError: an engine that cannot be served; the message says why and what to use.
        RuntimeError: the engine has a reducer already.

    In place of: ``DeepSpeedEngine.buffered_allreduce_fallback``, ``DeepSpeedZeroOptimizer.reduce_gradients``.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"GradientReducer.attach: {type(engine).__name__} is not what deepspeed.initialize returns")
    kind = PipelineReducer if isinstance(engine, PipelineEngine) else EngineReducer
    return kind(engine, **options)


def initialize(*args: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, then a reducer if the config has a section ``"gradient_reducer"``.

    The section holds arguments of :func:`attach` that JSON can express, or ``true``; ``"enabled": false`` switches it
    off. The engine has it as ``engine.gradient_reducer`` (None without).

    Raises:
        ValueError: an argument that there is not, or one that cannot be.
    """
    engine, *others = deepspeed.initialize(*args, **options)
    section = engine._config._param_dict.get(CONFIG_SECTION, False)
    arguments = dict(section) if isinstance(section, Mapping) else {"enabled": bool(section)}
    engine.gradient_reducer = None
    if arguments.pop("enabled", True):
        try:
            engine.gradient_reducer = attach(engine, **arguments)
        except TypeError as error:
            raise ValueError(f'config section "{CONFIG_SECTION}": {error}') from error
    return (engine, *others)


def _group_of(engine: DeepSpeedEngine) -> Any:
    """All replicas of a dense parameter."""
    if engine.pipeline_parallelism:
        return engine.mpu.get_data_parallel_group()
    return deepspeed_groups._get_sequence_data_parallel_group()


def _options_of(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The engine's own settings of the reduction."""
    size = dist.get_world_size(_group_of(engine))
    samples = size if engine.pipeline_parallelism else size // engine.sequence_parallel_size
    options: dict[str, Any] = {
        "communication_dtype": engine.communication_data_type,
        "zero_unused_parameters": True,
        "static_graph": True,
        "broadcast_at_start": False,
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
