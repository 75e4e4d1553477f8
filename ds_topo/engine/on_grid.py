"""Give an engine on a grid its parts, and take them away; hold what all engines on a grid share.

An engine whose mpu is a grid gets its class before its constructor runs (:mod:`ds_topo.base.classes`), and its own one
back when the grid is destroyed. The class is made of the mixins that :mod:`ds_topo.engine.parts` lists for its config
and its grid. Each derives from :class:`EngineOnGrid`, overrides methods of DeepSpeed, and keeps its own state.

A :class:`~ds_topo.GradientReducer` and ``ds-topo verify`` add classes of their own, also to engines without a grid.
Their methods run around those of the parts: those of ``ds-topo verify``, which records, outside, then those of the
reducer, then the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter

from ds_topo.base.classes import Mixin, adopt
from ds_topo.engine.config import Case
from ds_topo.engine.current_mpu import agreement, current
from ds_topo.errors import EngineOptionError, listed
from ds_topo.health import guard, job_watch
from ds_topo.mpu import MpuGrid
from ds_topo.topology.axes import MODEL, PIPE

STEPS_BETWEEN = 100
"""The number of steps between two comparisons of the ranks' progress, while a watch is on."""


def is_training_pass(engine: Any) -> bool:
    """Tell whether a forward pass that begins now is one of training.

    ``engine.training`` is always True: DeepSpeed's ``engine.eval()`` changes the module alone.
    """
    return bool(engine.module.training) and torch.is_grad_enabled()


class EngineOnGrid(Mixin, DeepSpeedEngine):  # type: ignore[misc]
    """The base of all parts of engines.

    Four methods are our own, where DeepSpeed has none. An override calls those of the other parts by ``super()``.
    """

    mpu: MpuGrid
    is_pipeline = False

    @property
    def reading_stages(self) -> set[int]:
        """Return the stages that read samples."""
        return {self.mpu.get_axis_rank(PIPE)}

    @classmethod
    def complete_config(cls, case: Case) -> None:
        """Complete the config before the ranks compare it; raise for what the engine could not follow."""

    def built_inside(self, undo: ExitStack, case: Case) -> None:
        """Enter contexts in which ``DeepSpeedEngine``'s constructor runs."""

    def complete(self) -> None:
        """Make the state of a part at the end of ``DeepSpeedEngine``'s constructor, and give the optimizer mixins."""

    def begin_training(self) -> None:
        """Prepare for a forward pass in training, or for all those of a pipeline's step."""

    def give_optimizer(self, *mixins: type[Mixin]) -> type[Mixin] | None:
        """Give the optimizer the first mixin that derives from its class, until the grid is destroyed; return it."""
        for mixin in mixins:
            if isinstance(self.optimizer, mixin.__bases__[-1]):
                self.mpu.on_destroy(adopt(self.optimizer, mixin))
                return mixin
        return None


# -- the guard of calls -----------------------------------------------------------------------------------------------


def _call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method a call of the program to an engine."""

    @wraps(method)
    def call(engine: EngineOnGrid, *arguments: Any, **options: Any) -> Any:
        before = current.set(engine.mpu, begins_call=True)
        try:
            guarded = guard.begin(method.__name__, engine.mpu.members, engine.global_steps)
            try:
                result = method(engine, *arguments, **options)
            except BaseException as error:
                guard.end(guarded, error)
                raise
            guard.end(guarded, None)
            return result
        finally:
            current.end_call(before)

    return call


_GATHERING = "gathering the whole weights (save_16bit_model, or the state dict of an engine)"


class GuardedCalls(EngineOnGrid):
    """The calls of a program to an engine.

    If one rank alone raises in one, all others raise, too. DeepSpeed's functions query the mpu of this engine in it;
    otherwise it is that of the engine that was built last. Checkpoints are saved and loaded as a whole.
    """

    def _take_model_step(self, *arguments: Any) -> None:
        """Count the step, for samplers."""
        super()._take_model_step(*arguments)
        self.mpu.progress.steps += 1

    @_call
    def save_checkpoint(self, save_dir: Any, *arguments: Any, **options: Any) -> Any:
        """Save by :func:`ds_topo.checkpoint.save`.

        DeepSpeed writes ``latest`` when rank 0 has written its own files; other ranks' files may be missing.
        """
        from ds_topo.checkpoint.saving import save_as_a_whole  # on the first call

        return save_as_a_whole(super().save_checkpoint, self, save_dir, *arguments, **options)

    @_call
    def load_checkpoint(self, load_dir: Any, *arguments: Any, **options: Any) -> Any:
        """Load by :func:`ds_topo.checkpoint.load`.

        DeepSpeed loads incomplete files, fails on some ranks only, and runs code that a file contains.
        """
        from ds_topo.checkpoint.loading import load_as_a_whole

        return load_as_a_whole(super().load_checkpoint, self, load_dir, *arguments, **options)

    @_call
    def save_16bit_model(self, *arguments: Any, **options: Any) -> Any:
        """Refuse parts of a model, which DeepSpeed would write as the whole one."""
        _require_whole_weights(self)
        return super().save_16bit_model(*arguments, **options)

    @_call
    def _zero3_consolidated_16bit_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Start on all ranks or on none: programs often gather weights on the rank alone that writes them."""
        with agreement(self.mpu.members, _GATHERING):
            _require_whole_weights(self)
        return super()._zero3_consolidated_16bit_state_dict(*arguments, **options)

    @_call
    def _replace_module_consolidated_state_dict(self) -> Any:
        """Start to gather on all ranks or on none, where AutoTP has split the weights."""
        with agreement(self.mpu.members, _GATHERING):
            pass
        return super()._replace_module_consolidated_state_dict()


def _require_whole_weights(engine: EngineOnGrid) -> None:
    """Refuse to save the weights of stages, or of slices that the program made itself, as those of the whole model."""
    grid = engine.mpu
    slices = [name for name, each in engine.module.named_parameters() if is_model_parallel_parameter(each)]
    if grid.get_axis_size(PIPE) > 1:
        part = f"the stages of {grid.topology().spec!r}"
    elif grid.get_axis_size(MODEL) > 1 and engine.autotp_size() <= 1 and slices:
        part = f"the slices {listed(slices)}"
    else:
        return
    raise EngineOptionError(
        f"save_16bit_model with {part}: DeepSpeed would write those of rank 0 as the whole model. Only slices "
        'of AutoTP and partitions of ZeRO 3 are put together. Call ds_topo.checkpoint.save(engine, "checkpoints") on '
        "every rank, and then ds-topo export checkpoints weights.safetensors, which writes all weights into one file"
    )


class GuardedCallsOfPlain(GuardedCalls):
    """The calls of a program to an engine that is no pipeline."""

    @_call
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Guard the call."""
        if is_training_pass(self):
            self.begin_training()
        return super().forward(*inputs, **named)

    @_call
    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Guard the call."""
        return super().backward(*arguments, **options)

    @_call
    def step(self, *arguments: Any, **options: Any) -> Any:
        """Guard the call. Compare the steps of replicas now and then while a watch is on."""
        before = self.global_steps
        result = super().step(*arguments, **options)
        taken = self.global_steps
        is_due = taken != before and not taken % STEPS_BETWEEN
        if is_due and getattr(self, "gradient_reducer", None) is None:  # which compares steps itself
            job_watch.compare_steps(self.mpu.get_data_parallel_group(), taken)
        return result

    def __getattr__(self, name: str) -> Any:
        """Say what an engine without a pipeline has in place of the methods of one."""
        if name in ("train_batch", "eval_batch"):
            raise AttributeError(
                f"{name}() of an engine without a pipeline: call loss = engine(inputs), engine.backward(loss) and "
                f"engine.step(), or build a PipelineModule(layers, grid=grid) for {name}()"
            )
        return super().__getattr__(name)


class GuardedCallsOfPipeline(GuardedCalls, PipelineEngine):  # type: ignore[misc]
    """The calls of a program to a pipeline engine."""

    is_pipeline = True

    @_call
    def train_batch(self, *arguments: Any, **options: Any) -> Any:
        """Guard the call."""
        self.begin_training()
        return super().train_batch(*arguments, **options)

    @_call
    def eval_batch(self, *arguments: Any, **options: Any) -> Any:
        """Guard the call."""
        return super().eval_batch(*arguments, **options)

    def _refuse(self, *_: object, **__: object) -> Any:
        """Say what a pipeline has in place of the methods of other engines."""
        raise RuntimeError(
            "a pipeline engine runs the forward and backward passes and the step of all its micro-batches itself: call "
            "loss = engine.train_batch(data_iter) or engine.eval_batch(data_iter), with an iterator of (inputs, labels)"
        )

    forward = backward = step = _refuse
