"""Keep the gradients of a step right, however a program runs backward passes.

Programs may call ``loss.backward()``, call backward several times in a step, and call engines several times. Hooks of
an engine's outputs prepare a backward pass, and with ``loss.backward()`` divide gradients by the number of
micro-batches. DeepSpeed's hooks do this wrongly if a program does more than one pass through one output of one engine:

*Preparing.* DeepSpeed prepares once for each forward pass, and resets its counts in ``forward``. So it never prepares
for a second loss of one forward pass, prepares twice for a loss of two forward passes, and resets too late between two
losses. A program that calls ``loss.backward()`` sees ``KeyError: 0`` or a mismatch of sizes, or steps without some
gradients. Here it prepares and resets once for each backward pass that brings gradients to parameters; others, by
``torch.autograd.grad``, it leaves alone.

*Dividing.* With ``loss.backward()`` DeepSpeed divides a gradient at each output that it passes: twice if it passes two
outputs, such as logits and the hidden states from which they are computed, or two engines. It also divides gradients by
``torch.autograd.grad``, such as those of a penalty, and without ZeRO it refuses them. On a grid, several outputs are
replaced by tensors of the same memory, through which a gradient enters the engine once. It is multiplied again where it
leaves through an input to an earlier engine. None of these tensors is a view that a program may change in place,
because torch then drops its hooks.

*Reducing.* In the last micro-batch, ZeRO 1 and 2 keep the gradients of one backward pass, and ZeRO 3 adds those of a
second one even if the program has discarded the first. So a second one before the step is refused, except after a
``zero_grad`` that discards all gradients of the step.

Releases: all.
Reports: deepspeedai/DeepSpeed#8135, an open pull request, describes two backward passes through one forward pass, and
deepspeedai/DeepSpeed#7665 has added ``loss.backward()``. No public report found of dividing twice.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import count_used_parameters_in_backward
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_topo.base.classes import Mixin
from ds_topo.base.patches import is_functorch_transforming
from ds_topo.base.torch_names import current_backward, is_whole_backward
from ds_topo.engine.current_mpu import current
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import abridged, warn


def check_loss(loss: Any = None, **_: object) -> None:
    """Refuse an argument of ``engine.backward`` that is no loss.

    Raises:
        ValueError: the message says what it is.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.grad_fn is not None:
        return
    if not isinstance(loss, torch.Tensor):
        problem = "is no tensor: leave out .item() and float(), which detach a loss"
    elif loss.numel() != 1:
        problem = f"has the shape {list(loss.shape)}: reduce it to one number, such as by .mean()"
    else:
        problem = "depends on no parameter: it was detached, computed under torch.no_grad(), or all are frozen"
    raise ValueError(f"engine.backward(loss): {abridged(loss)} {problem}")


def refuse_step(engine: DeepSpeedEngine) -> None:
    """Refuse ``engine.step()`` without gradients: it would count a micro-batch, and move the schedule.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "engine.step() without a backward pass since the last step: call loss = engine(inputs), engine.backward(loss) "
        f"and engine.step() once each for every micro-batch (gradient_accumulation_steps is "
        f"{engine.gradient_accumulation_steps()})"
    )


# -- backward passes --------------------------------------------------------------------------------------------------


def _is_prepared(optimizer: ZeROOptimizer) -> bool:
    """Tell whether the running backward pass has been prepared already."""
    state = optimizer._backward_hook_state
    is_current = state.post_backward_callback_graph_task_id == current_backward()
    return bool(state.backward_active_depth and state.post_backward_callback_queued and is_current)


def _reaches_parameters(engine: DeepSpeedEngine) -> bool:
    """Tell whether a backward pass that the program runs brings gradients, unlike ``torch.autograd.grad``."""
    trained = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
    if is_whole_backward():  # also if checkpointed layers run a pass of their own
        return any(True for _ in trained)
    return any(count_used_parameters_in_backward([each]) for each in trained)


class BackwardPassesOfProgram(EngineOnGrid):
    """A plain engine, whose program may run backward passes as it likes."""

    mixin_state = "backward_passes"
    backward_passes: BackwardPasses

    def complete(self) -> None:
        """Note when the program discards gradients by the optimizer."""
        super().complete()
        self.backward_passes = BackwardPasses()
        if self.give_optimizer(NotedDiscards):
            self.optimizer.engines_passes = self.backward_passes

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return outputs by which gradients enter the engine once."""
        if self.gradient_accumulation_steps() > 1:
            inputs, named = self.backward_passes.of_inputs(self, (inputs, named))
        return self.backward_passes.of_outputs(self, super().forward(*inputs, **named))

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Refuse what is no loss, and gradients that the step cannot take any more."""
        check_loss(*arguments[:1], **options)
        passes, outer = self.backward_passes, self.backward_passes.is_of_engine
        if passes.are_reduced:
            passes.require_unreduced(self)
        passes.number += 1
        passes.is_of_engine = True
        try:
            return super().backward(*arguments, **options)
        finally:
            passes.is_of_engine = outer

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Refuse a step without gradients."""
        passes = self.backward_passes
        if not passes.have_run:
            refuse_step(self)
        is_last = self.is_gradient_accumulation_boundary()
        if is_last and passes.is_local and not passes.are_reduced:
            passes.check_reduced(self)
        result = super().step(*arguments, **options)
        passes.is_penalized, passes.are_reduced = False, passes.are_reduced and not is_last
        passes.have_run, passes.number = not is_last, 0
        return result

    def zero_grad(self) -> None:
        """Discard the partitions of ZeRO 3, too. The step may then have another backward pass.

        ZeRO keeps the gradients of a second backward pass alone, or adds them to discarded ones, which is refused.
        """
        super().zero_grad()
        if self.zero_optimization_partition_weights():
            self.optimizer.zero_grad()
        if not isinstance(self.optimizer, BF16_Optimizer):  # it keeps its sums
            self.backward_passes.are_discarded = True

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Refuse a second one in a step: ZeRO 1 and 2 would keep the gradients of the last one alone."""
        with self.backward_passes.coalesced(self), super().coalesce_grad_reduction():
            yield

    # A program may call loss.backward() itself, for several losses, or a loss of several forward passes.

    def _backward_prologue(self) -> None:
        """Prepare once in each backward pass; the engine's own mpu is current from here."""
        passes = self.backward_passes
        if not passes.must_be_prepared(self):
            return
        passes.warn_of_discarded(self)
        current.begin_backward(self)
        try:
            super()._backward_prologue()
        except BaseException:
            current.end_backward(self)
            raise

    def _backward_epilogue(self) -> None:
        """Note that gradients are reduced; the engine's own mpu is current until here."""
        current.set(self.mpu)
        try:
            super()._backward_epilogue()
        finally:
            current.end_backward(self)
        self.backward_passes.end_backward(self)

    def allreduce_gradients(self, *arguments: Any, **options: Any) -> None:
        """Note it: a program may call it after the backward passes of ``no_sync()``."""
        super().allreduce_gradients(*arguments, **options)
        self.backward_passes.is_local = False

    def _backward_prologue_per_tensor(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient itself: hooks of the outputs divide it.

        An output that depends on another output, or on one of another engine, would be divided twice.
        """
        return grad


class NotedDiscards(Mixin, ZeROOptimizer):  # type: ignore[misc]
    """An optimizer of ZeRO, or of bf16, of such an engine."""

    mixin_suffix, mixin_state = "OnGrid", "engines_passes"
    engines_passes: BackwardPasses

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Note that the step may have another backward pass: programs discard gradients by this method, too."""
        super().zero_grad(*arguments, **options)
        self.engines_passes.are_discarded = True


class BackwardPasses:
    """The backward passes of an engine's step."""

    def __init__(self) -> None:
        self.are_reduced = False
        """True if a backward pass has reduced the gradients of the step, until the end of the step."""
        self.are_discarded = False
        """True if the program has discarded gradients since the last backward pass."""
        self.is_penalized = False
        """True if a loss may depend on gradients that ``torch.autograd.grad`` has returned in this micro-batch."""
        self.is_of_engine = False
        """True while ``engine.backward`` runs."""
        self.have_run = False
        """True after a backward pass, until the end of the step."""
        self.number = 0
        """The number of calls of ``engine.backward`` since the last one of ``engine.step``."""
        self.is_local = False
        """True if gradients of the last backward pass were not reduced, because it was inside ``no_sync()``."""
        self._finds_discarded = True
        """False after a warning, or if zero_grad() discards nothing."""
        self._finds_local = True
        """False after a warning."""
        self._witness: torch.nn.Parameter | None = None
        """A parameter with a gradient after a backward pass that is not the last one of a step."""
        self._kept: tuple[torch.Tensor, int] | None = None
        """That gradient and its version after the last pass; None if there is none."""
        self._has_sums = False
        """True if a reducer had gradients of earlier micro-batches after the last pass."""

    # -- forward

    def of_inputs(self, engine: DeepSpeedEngine, inputs: Any) -> Any:
        """Return the inputs of a forward pass so that outputs of other engines among them are not divided again.

        With one micro-batch in a step nothing is divided.
        """
        if not torch.is_grad_enabled() or is_functorch_transforming():
            return inputs
        return _changed(inputs, partial(_restored, engine, self))

    def of_outputs(self, engine: DeepSpeedEngine, outputs: Any) -> Any:
        """Return the outputs of a forward pass, by which gradients enter the engine and are divided."""
        if not torch.is_grad_enabled() or is_functorch_transforming():
            return outputs
        enter = partial(self._enter, engine, [])
        if isinstance(outputs, torch.Tensor) and outputs.grad_fn is not None and outputs._base is None:
            node: Any = outputs.grad_fn
            if _OUTPUT not in node.metadata:  # no second hook of an output that another forward pass has returned too
                node.metadata[_OUTPUT] = True
                outputs.register_hook(enter)
                return outputs
        return _with_entries(outputs, enter)

    def _enter(self, engine: DeepSpeedEngine, used_by: list[int], gradient: torch.Tensor) -> torch.Tensor:
        if is_functorch_transforming():
            return gradient
        if not (self.is_of_engine or _reaches_parameters(engine)):
            if torch.is_grad_enabled():
                self._note_penalty(engine)
            return gradient
        current = current_backward()
        if used_by and used_by[0] != current and engine.zero_optimization_partition_weights():
            raise RuntimeError(
                "a second backward pass through one forward pass at ZeRO stage 3, whose parameters are partitioned "
                "again after the first one: call engine.backward(first_loss + second_loss), or engine() for each loss"
            )
        used_by[:] = [current]
        optimizer = engine.optimizer
        if isinstance(optimizer, ZeROOptimizer):
            if not _is_prepared(optimizer):
                engine._backward_prologue()
        elif not self.is_of_engine:
            engine._backward_prologue()  # it refuses loss.backward() without ZeRO
        return _divided(engine, gradient)

    def _note_penalty(self, engine: DeepSpeedEngine) -> None:
        if engine.zero_optimization_partition_weights():
            raise RuntimeError(
                "torch.autograd.grad(create_graph=True) of an engine's output at ZeRO stage 3: its backward pass needs "
                "parameters a second time, which are partitioned again by then; use ZeRO stage 0, 1 or 2"
            )
        self.is_penalized = engine.gradient_accumulation_steps() > 1

    # -- backward

    def must_be_prepared(self, engine: DeepSpeedEngine) -> bool:
        """Tell whether the running backward pass brings gradients to the engine and has not been prepared yet.

        Raises:
            RuntimeError: the step cannot take its gradients.
        """
        optimizer = engine.optimizer
        if is_functorch_transforming() or not (self.is_of_engine or _reaches_parameters(engine)):
            return False
        if not isinstance(optimizer, ZeROOptimizer):
            return True
        if _is_prepared(optimizer):
            return False
        if not self.is_of_engine:
            if self.are_reduced:
                self.require_unreduced(engine)
            self._require_scaled()
        state = optimizer._backward_hook_state
        if not state.backward_active_depth and state.backward_seen_this_step:
            optimizer.clear_backward_seen_flag()  # as a forward pass does
        return True

    def end_backward(self, engine: DeepSpeedEngine) -> None:
        """Note whether the gradients of the step are reduced now."""
        self.is_penalized, self.have_run, self.are_discarded = False, True, False
        self.is_local, self._kept = engine.inside_no_sync_ctxt, None
        if not engine.is_gradient_accumulation_boundary():
            self._look_at_kept(engine)
        elif not engine.inside_no_sync_ctxt:
            self.are_reduced = True

    def _look_at_kept(self, engine: DeepSpeedEngine) -> None:
        if self._witness is None and self._finds_discarded:
            self._finds_discarded = engine.zero_optimization_stage() != 2 and engine.mpu.check_weights
            if not isinstance(engine.optimizer, BF16_Optimizer):
                self._witness = next((each for each in engine.module.parameters() if each.grad is not None), None)
        if self._witness is not None and self._witness.grad is not None:
            self._kept = self._witness.grad, self._witness.grad._version
        self._has_sums = _has_sums(engine)

    def warn_of_discarded(self, engine: DeepSpeedEngine) -> None:
        """Warn, before a backward pass, if the program has discarded gradients of earlier micro-batches of the step.

        Without ZeRO it may do so by functions of torch. ZeRO 2 does not discard gradients that it has reduced.
        """
        if not self._finds_discarded or not engine.mpu.check_weights:
            return
        done = self.number - 1
        if engine.managed_gradient_accumulation():
            is_stated = engine._is_gradient_accumulation_boundary is not None  # the program says which one is the last
            done = 0 if is_stated else int(engine.micro_steps % engine.gradient_accumulation_steps())
        if not done:
            return
        is_discarded = self.are_discarded or (self._has_sums and not _has_sums(engine))
        if self._witness is not None and self._kept is not None:
            kept, version = self._kept
            gradient = self._witness.grad
            is_discarded |= gradient is None or (gradient is kept and kept._version != version and not kept.any())
        if is_discarded:
            self._finds_discarded = False
            if engine.mpu.grid_rank == 0:
                warn(
                    f"zero_grad() has discarded the gradients of the first {done} of "
                    f"{engine.gradient_accumulation_steps()} micro-batches of a step, which the step would have "
                    "averaged: leave it out, because engine.step() clears gradients after each optimizer step, or call "
                    "it only if engine.is_gradient_accumulation_boundary() was True before engine.step(); set "
                    "grid.check_weights = False if it is intended"
                )

    def check_reduced(self, engine: DeepSpeedEngine) -> None:
        """Refuse or warn of an optimizer step with gradients that no backward pass has reduced.

        Raises:
            RuntimeError: ZeRO has no gradients then.
        """
        said = (
            "the last backward pass of this step was inside engine.no_sync(), so gradients were not averaged over the "
            f"{engine.dp_world_size} replicas"
        )
        remedy = "leave no_sync() before the forward pass of the last micro-batch of a step"
        if engine.zero_optimization():
            raise RuntimeError(f"{said}, and ZeRO has none to step with: {remedy}")
        if self._finds_local and engine.dp_world_size > 1 and engine.mpu.check_weights and engine.mpu.grid_rank == 0:
            self._finds_local = False
            warn(
                f"{said}, which have different parameters from now on: {remedy}; set grid.check_weights = False if "
                "they are meant to train apart"
            )

    @contextmanager
    def coalesced(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """Note that gradients are reduced at the end of ``coalesce_grad_reduction``, in any micro-batch."""
        if self.are_reduced:
            self.require_unreduced(engine)
        try:
            yield
        finally:
            self.are_reduced, self.are_discarded = True, False

    def require_unreduced(self, engine: DeepSpeedEngine) -> None:
        """Refuse a backward pass after gradients were reduced, unless it can add to them or may replace them."""
        replaces = engine.gradient_accumulation_steps() == 1 and _replaces_gradients(engine)
        if _takes_further_gradients(engine) or (self.are_discarded and replaces):
            return
        discarding = "; to discard the first gradients, call engine.zero_grad()"
        raise RuntimeError(
            "a second backward pass in the last micro-batch of a step, whose gradients are reduced already (ZeRO "
            f"stage {int(engine.zero_optimization_stage())}): their sum would be wrong. Call "
            "engine.backward(first_loss + second_loss), or both inside one `with engine.coalesce_grad_reduction():`"
            f" at ZeRO 1 and 2, or engine.step() after each{discarding if replaces else ''}"
        )

    def _require_scaled(self) -> None:
        if self.is_penalized:
            raise RuntimeError(
                "loss.backward() of a loss that contains a gradient (torch.autograd.grad(create_graph=True) of an "
                "engine's output), with gradient_accumulation_steps above 1: only engine.backward(loss) "
                "divides that part by this number. Call it instead"
            )


def _has_sums(engine: DeepSpeedEngine) -> bool:
    """Tell whether a reducer has gradients of earlier micro-batches."""
    driver = getattr(engine, "reducer_driver", None)
    return driver is not None and driver.reducer.is_unreduced


def _takes_further_gradients(engine: DeepSpeedEngine) -> bool:
    """Tell whether gradients of another backward pass can be added to those that have been reduced.

    Whole gradients are averages then, of which the average is the same. Sums are not, nor are averages of experts.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer) or engine.zero_optimization_partition_weights():
        return False  # ZeRO 3 could, but does not notice that a program sets parameter.grad to None
    if getattr(optimizer, "has_sent_to_owners", False):
        return False  # a GradientReducer has sent them to their owners
    return bool(engine.gradient_average and engine.sequence_parallel_size == 1 and not engine.has_moe_layers)


def _replaces_gradients(engine: DeepSpeedEngine) -> bool:
    """Tell whether the optimizer keeps no other gradients than those of the last backward pass."""
    optimizer = engine.optimizer
    accumulates = getattr(optimizer, "gradient_accumulation_dtype", None) not in (
        None,
        getattr(optimizer, "dtype", None),
    )
    return not (engine.zero_use_cpu_optimizer() or isinstance(optimizer, BF16_Optimizer) or accumulates)


# -- outputs and inputs that may change in place ----------------------------------------------------------------------


class _OutputOfEngine(torch.autograd.Function):
    """Return a tensor with the same memory that is no view, so that torch keeps its hooks if it is changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _OverlappingOutputOfEngine(_OutputOfEngine):
    """Return a view, which torch refuses to change in place, of a tensor whose memory another output has, too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)


class _InputOfEngine(_OverlappingOutputOfEngine):
    """Return a view of an input, which torch refuses to change in place: the program has its memory, too."""


def _with_entries(outputs: Any, enter: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the outputs of a forward pass as tensors that call ``enter`` with their gradients."""
    found: dict[int, torch.Tensor] = {}

    def note(output: torch.Tensor) -> torch.Tensor:
        if output.grad_fn is not None:
            found[id(output)] = output
        return output

    _changed(outputs, note)
    strided = {key: output for key, output in found.items() if output.layout is torch.strided}
    memory = {key: output.untyped_storage()._cdata for key, output in strided.items()}
    users = Counter(memory.values())
    entries = {}
    for key, output in found.items():
        if key in strided:
            kind: Any = _OutputOfEngine if users[memory[key]] == 1 else _OverlappingOutputOfEngine
            entry = kind.apply(output)
        else:
            entry = output
        entry.grad_fn.metadata[_OUTPUT] = True
        entry.register_hook(enter)
        entries[key] = entry
    return _changed(outputs, lambda output: entries.get(id(output), output))


# -- dividing by the number of micro-batches --------------------------------------------------------------------------

_OUTPUT = "ds_topo: output of an engine"
"""The key in the metadata of the autograd nodes of outputs."""


_divided: Callable[[DeepSpeedEngine, torch.Tensor], torch.Tensor] = DeepSpeedEngine._backward_prologue_per_tensor
"""Return the gradient divided by the number of micro-batches, unless ``engine.backward`` has divided the loss."""


def _restored(engine: DeepSpeedEngine, passes: BackwardPasses, value: torch.Tensor) -> torch.Tensor:
    """Return an input that depends on an engine's output so that this engine does not divide its gradient."""
    if value.grad_fn is None or not _depends_on_engine(value.grad_fn):
        return value
    of_engine: Any = _InputOfEngine
    view: torch.Tensor = of_engine.apply(value)

    def multiply(gradient: torch.Tensor) -> torch.Tensor:
        if is_functorch_transforming() or not (passes.is_of_engine or _reaches_parameters(engine)):
            return gradient
        one = gradient.new_ones(())
        factor = _divided(engine, one)
        return gradient if factor is one else gradient / factor

    view.register_hook(multiply)
    return view


def _depends_on_engine(node: Any) -> bool:
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if _OUTPUT in node.metadata:
            return True
        new = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= new
        waiting += new
    return False


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the value with changed tensors, in containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        return change(value)
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, (type, dict))
    if not isinstance(value, (tuple, list, dict)) and not is_dataclass:
        return value
    items = vars(value) if is_dataclass else value if isinstance(value, dict) else dict(enumerate(value))
    changed = {key: _changed(each, change) for key, each in items.items()}
    if all(changed[key] is each for key, each in items.items()):
        return value
    if isinstance(value, tuple):
        parts = changed.values()
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    copied = copy.copy(value)
    for key, each in changed.items():
        if is_dataclass:
            object.__setattr__(copied, str(key), each)  # also of a frozen one
        else:
            copied[key] = each
    return copied
