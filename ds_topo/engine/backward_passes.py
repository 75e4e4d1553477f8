"""Keep the gradients of a step right: count its micro-batches, and let programs run backward passes as they like.

*Counting.* DeepSpeed ends a step where its count of all micro-batches is a multiple of ``gradient_accumulation_steps``.
If that number changes, by ``set_train_batch_size`` or by an assignment, the next step would be too short or too long.
So the count moves to a multiple of the new number. A change within a step is refused.

Programs may call ``loss.backward()``, call backward several times in a step, and call engines several times. Hooks of
an engine's outputs prepare a backward pass, and with ``loss.backward()`` divide gradients by the number of
micro-batches. DeepSpeed's hooks do this wrongly if a program does more than one pass through one output of one engine:

*Preparing.* DeepSpeed prepares once for each forward pass, and resets its counts in ``forward``. So it never prepares
for a second loss of one forward pass, prepares twice for a loss of two forward passes, and resets too late between two
losses. It then omits or overwrites gradients, or fails later without naming the cause. Here it prepares and resets once
for each backward pass that brings gradients to parameters; others, by ``torch.autograd.grad``, it leaves alone.

*Dividing.* DeepSpeed divides a gradient at each output that it passes: twice if it passes two outputs, such as logits
and the hidden states from which they are computed, or two engines. On a grid, several outputs are replaced by tensors
of the same memory, through which a gradient enters the engine once. It is multiplied again where it leaves through an
input to an earlier engine. None of these tensors is a view that a program may change in place, because torch then drops
its hooks.

*Reducing.* In the last micro-batch, ZeRO 1 and 2 keep the gradients of one backward pass, and ZeRO 3 adds those of a
second one even if the program has discarded the first. So a second one before the step is refused, except after a
``zero_grad`` that discards all gradients of the step.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import count_used_parameters_in_backward
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_topo.base.differences import is_functorch_transforming
from ds_topo.base.torch_names import current_backward, is_whole_backward
from ds_topo.errors import EngineOptionError, abridged, warn

# -- micro-batches ----------------------------------------------------------------------------------------------------


def _is_count(value: object) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) > 0  # type: ignore[arg-type]
    except TypeError:
        return False


class MicroBatches:
    """The number of micro-batches in a step of one engine.

    Args:
        number: the number now.
    """

    def __init__(self, number: int) -> None:
        self._number = number
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
        if engine._is_gradient_accumulation_boundary is not None or isinstance(engine, PipelineEngine):
            return 0  # the program says which micro-batch is the last; a pipeline takes whole steps
        return int(engine.micro_steps % self._number)

    def done_before(self, engine: DeepSpeedEngine) -> int:
        """Return how many micro-batches of the current step have gradients, in the backward pass of the next one."""
        return self._in_this_step(engine) if engine.managed_gradient_accumulation() else self.backwards - 1

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

    def warn_of_discarded(self, engine: DeepSpeedEngine, done: int) -> None:
        """Warn, before a backward pass, if the program has discarded gradients of ``done`` micro-batches of the step.

        Without ZeRO it may do so by functions of torch. ZeRO 2 does not discard gradients that it has reduced.
        """
        if not done or not self._finds_discarded or not engine.mpu.check_weights:
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
