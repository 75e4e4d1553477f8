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


@dataclasses.dataclass(eq=False)
class BackwardPasses:
    """The backward passes of an engine's step."""

    are_reduced: bool = False
    """True if a backward pass has reduced the gradients of the step, until the end of the step."""
    are_discarded: bool = False
    """True if the program has discarded gradients since the last backward pass."""
    is_penalized: bool = False
    """True if a loss may depend on gradients that ``torch.autograd.grad`` has returned in this micro-batch."""
    is_of_engine: bool = False
    """True while ``engine.backward`` runs."""
    have_run: bool = False
    """True after a backward pass, until the end of the step."""
    number: int = 0
    """The number of backward passes since the last call of ``engine.step``."""
    is_local: bool = False
    """True if gradients of the last backward pass were not reduced, because it was inside ``no_sync()``."""
    finds_discarded: bool = True
    """False after a warning, or if zero_grad() discards nothing."""
    finds_local: bool = True
    """False after a warning."""
    witness: torch.nn.Parameter | None = None
    """A parameter with a gradient after a backward pass that is not the last one of a step."""
    kept: tuple[torch.Tensor, int] | None = None
    """That gradient and its version after the last pass; None if there is none."""
    has_sums: bool = False
    """True if a reducer had gradients of earlier micro-batches after the last pass."""


class BackwardPassesOfProgram(EngineOnGrid):
    """A plain engine, whose program may run backward passes as it likes."""

    mixin_state = "backward_passes"
    backward_passes: BackwardPasses

    def complete(self) -> None:
        """Note when the program discards gradients by the optimizer."""
        super().complete()
        self.backward_passes = BackwardPasses(finds_discarded=self.zero_optimization_stage() != 2)
        if self.give_optimizer(NotedDiscards):
            self.optimizer.engines_passes = self.backward_passes

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return outputs by which gradients enter the engine once and are divided.

        Outputs of other engines among the inputs are not divided again; with one micro-batch in a step nothing is.
        Without ZeRO, DeepSpeed refuses ``loss.backward()``, and ``engine.backward`` divides the loss.
        """
        if not isinstance(self.optimizer, ZeROOptimizer) or not torch.is_grad_enabled() or is_functorch_transforming():
            return super().forward(*inputs, **named)
        if self.gradient_accumulation_steps() > 1:
            inputs, named = _changed((inputs, named), self._restored)
        outputs, enter = super().forward(*inputs, **named), partial(self._enter, [])
        if isinstance(outputs, torch.Tensor) and outputs.grad_fn is not None and outputs._base is None:
            node: Any = outputs.grad_fn
            if _OUTPUT not in node.metadata:  # no second hook of an output that another forward pass has returned too
                node.metadata[_OUTPUT] = True
                outputs.register_hook(enter)
                return outputs
        return _with_entries(outputs, enter)

    def _enter(self, used_by: list[int], gradient: torch.Tensor) -> torch.Tensor:
        if is_functorch_transforming():
            return gradient
        if not isinstance(self, BackwardPassesOfProgram):  # the grid was destroyed since the forward pass
            return _divided(self, gradient)
        is_partitioned = self.zero_optimization_partition_weights()
        if not self._brings_gradients():
            if torch.is_grad_enabled():
                if is_partitioned:
                    raise RuntimeError(
                        "torch.autograd.grad(create_graph=True) of an engine's output at ZeRO stage 3: its backward "
                        "pass needs parameters a second time, which are partitioned again by then; use ZeRO stage 0, "
                        "1 or 2"
                    )
                self.backward_passes.is_penalized = self.gradient_accumulation_steps() > 1
            return gradient
        current = current_backward()
        if used_by and used_by[0] != current and is_partitioned:
            raise RuntimeError(
                "a second backward pass through one forward pass at ZeRO stage 3, whose parameters are partitioned "
                "again after the first one: call engine.backward(first_loss + second_loss), or engine() for each loss"
            )
        used_by[:] = [current]
        if not _is_prepared(self.optimizer):
            self._backward_prologue()
        return _divided(self, gradient)

    def _restored(self, value: torch.Tensor) -> torch.Tensor:
        """Return an input that depends on an engine's output so that this engine does not divide its gradient."""
        if value.grad_fn is None or not _depends_on_engine(value.grad_fn):
            return value
        of_engine: Any = _InputOfEngine
        view: torch.Tensor = of_engine.apply(value)

        def multiply(gradient: torch.Tensor) -> torch.Tensor:
            is_on_grid = isinstance(self, BackwardPassesOfProgram)
            if is_functorch_transforming() or (is_on_grid and not self._brings_gradients()):
                return gradient
            one = gradient.new_ones(())
            factor = _divided(self, one)
            return gradient if factor is one else gradient / factor

        view.register_hook(multiply)
        return view

    def _brings_gradients(self) -> bool:
        """Tell whether the running backward pass brings gradients, unlike one of ``torch.autograd.grad``."""
        if self.backward_passes.is_of_engine:
            return True
        trained = (parameter for parameter in self.module.parameters() if parameter.requires_grad)
        if is_whole_backward():  # also if checkpointed layers run a pass of their own
            return any(True for _ in trained)
        return any(count_used_parameters_in_backward([each]) for each in trained)

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Refuse what is no loss, and gradients that the step cannot take any more."""
        check_loss(*arguments[:1], **options)
        passes, outer = self.backward_passes, self.backward_passes.is_of_engine
        self._require_unreduced()
        passes.is_of_engine = True
        try:
            return super().backward(*arguments, **options)
        finally:
            passes.is_of_engine = outer

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Refuse a step without gradients: it would count a micro-batch, and move the schedule.

        Refuse, or warn of, an optimizer step with gradients that no backward pass has reduced. ZeRO has none then.
        """
        passes, is_last = self.backward_passes, self.is_gradient_accumulation_boundary()
        if not passes.have_run:
            raise RuntimeError(
                "engine.step() without a backward pass since the last step: call loss = engine(inputs), "
                "engine.backward(loss) and engine.step() once each for every micro-batch (gradient_accumulation_steps "
                f"is {self.gradient_accumulation_steps()})"
            )
        if is_last and passes.is_local and not passes.are_reduced:
            said = (
                "the last backward pass of this step was inside engine.no_sync(), so gradients were not averaged over "
                f"the {self.dp_world_size} replicas"
            )
            remedy = "leave no_sync() before the forward pass of the last micro-batch of a step"
            if self.zero_optimization():
                raise RuntimeError(f"{said}, and ZeRO has none to step with: {remedy}")
            if passes.finds_local and self.dp_world_size > 1 and self.mpu.check_weights and self.mpu.grid_rank == 0:
                passes.finds_local = False
                warn(
                    f"{said}, which have different parameters from now on: {remedy}; set grid.check_weights = False if "
                    "they are meant to train apart"
                )
        result = super().step(*arguments, **options)
        passes.is_penalized, passes.are_reduced = False, passes.are_reduced and not is_last
        passes.have_run, passes.number = not is_last, 0
        return result

    def zero_grad(self) -> None:
        """Discard the partitions of ZeRO 3, too. The step may then have another backward pass."""
        super().zero_grad()
        if self.zero_optimization_partition_weights():
            self.optimizer.zero_grad()
        if not isinstance(self.optimizer, BF16_Optimizer):  # it keeps its sums
            self.backward_passes.are_discarded = True

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Refuse a second one in a step: ZeRO 1 and 2 would keep the gradients of the last one alone."""
        self._require_unreduced()
        try:
            with super().coalesce_grad_reduction():
                yield
        finally:  # gradients are reduced at its end, in any micro-batch
            self.backward_passes.are_reduced, self.backward_passes.are_discarded = True, False

    # A program may call loss.backward() itself, for several losses, or a loss of several forward passes.

    def _backward_prologue(self) -> None:
        """Prepare once in each backward pass that brings gradients; the engine's own mpu is current from here."""
        passes, optimizer = self.backward_passes, self.optimizer
        if is_functorch_transforming() or not self._brings_gradients():
            return
        if isinstance(optimizer, ZeROOptimizer):
            if _is_prepared(optimizer):
                return
            if not passes.is_of_engine:
                self._require_unreduced()
                if passes.is_penalized:
                    raise RuntimeError(
                        "loss.backward() of a loss that contains a gradient (torch.autograd.grad(create_graph=True) of "
                        "an engine's output), with gradient_accumulation_steps above 1: only engine.backward(loss) "
                        "divides that part by this number. Call it instead"
                    )
            state = optimizer._backward_hook_state
            if not state.backward_active_depth and state.backward_seen_this_step:
                optimizer.clear_backward_seen_flag()  # as a forward pass does
        self._warn_of_discarded()
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
        passes = self.backward_passes
        passes.is_penalized, passes.have_run, passes.are_discarded = False, True, False
        passes.is_local, passes.kept = self.inside_no_sync_ctxt, None
        passes.number += 1
        if self.is_gradient_accumulation_boundary():
            passes.are_reduced |= not self.inside_no_sync_ctxt
            return
        if passes.witness is None and passes.finds_discarded and not isinstance(self.optimizer, BF16_Optimizer):
            passes.witness = next((each for each in self.module.parameters() if each.grad is not None), None)
        if passes.witness is not None and passes.witness.grad is not None:
            passes.kept = passes.witness.grad, passes.witness.grad._version
        passes.has_sums = _has_sums(self)

    def allreduce_gradients(self, *arguments: Any, **options: Any) -> None:
        """Note it: a program may call it after the backward passes of ``no_sync()``."""
        super().allreduce_gradients(*arguments, **options)
        self.backward_passes.is_local = False

    def _backward_prologue_per_tensor(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient itself: hooks of the outputs divide it.

        An output that depends on another output, or on one of another engine, would be divided twice.
        """
        return grad

    def _warn_of_discarded(self) -> None:
        """Warn, before a backward pass, if the program has discarded gradients of earlier micro-batches of the step.

        Without ZeRO it may do so by functions of torch. ZeRO 2 does not discard gradients that it has reduced.
        """
        passes = self.backward_passes
        if not passes.finds_discarded or not self.mpu.check_weights:
            return
        done = passes.number
        if self.managed_gradient_accumulation():
            is_stated = self._is_gradient_accumulation_boundary is not None  # the program says which one is the last
            done = 0 if is_stated else int(self.micro_steps % self.gradient_accumulation_steps())
        if not done:
            return
        is_discarded = passes.are_discarded or (passes.has_sums and not _has_sums(self))
        if passes.witness is not None and passes.kept is not None:
            kept, version = passes.kept
            gradient = passes.witness.grad
            is_discarded |= gradient is None or (gradient is kept and kept._version != version and not kept.any())
        if is_discarded:
            passes.finds_discarded = False
            if self.mpu.grid_rank == 0:
                warn(
                    f"zero_grad() has discarded the gradients of the first {done} of "
                    f"{self.gradient_accumulation_steps()} micro-batches of a step, which the step would have "
                    "averaged: leave it out, because engine.step() clears gradients after each optimizer step, or call "
                    "it only if engine.is_gradient_accumulation_boundary() was True before engine.step(); set "
                    "grid.check_weights = False if it is intended"
                )

    def _require_unreduced(self) -> None:
        """Refuse a backward pass after gradients were reduced, unless it can add to them or may replace them."""
        passes = self.backward_passes
        if not passes.are_reduced or _takes_further_gradients(self):
            return
        replaces = self.gradient_accumulation_steps() == 1 and _replaces_gradients(self)
        if passes.are_discarded and replaces:
            return
        discarding = "; to discard the first gradients, call engine.zero_grad()"
        raise RuntimeError(
            "a second backward pass in the last micro-batch of a step, whose gradients are reduced already (ZeRO "
            f"stage {int(self.zero_optimization_stage())}): their sum would be wrong. Call "
            "engine.backward(first_loss + second_loss), or both inside one `with engine.coalesce_grad_reduction():`"
            f" at ZeRO 1 and 2, or engine.step() after each{discarding if replaces else ''}"
        )


class NotedDiscards(Mixin, ZeROOptimizer):  # type: ignore[misc]
    """An optimizer of ZeRO, or of bf16, of such an engine."""

    mixin_state = "engines_passes"
    engines_passes: BackwardPasses

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Note that the step may have another backward pass: programs discard gradients by this method, too."""
        super().zero_grad(*arguments, **options)
        self.engines_passes.are_discarded = True


def check_loss(loss: Any = None, **_: object) -> None:
    """Refuse an argument of ``engine.backward`` that is no loss."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.grad_fn is not None:
        return
    if not isinstance(loss, torch.Tensor):
        problem = "is no tensor: leave out .item() and float(), which detach a loss"
    elif loss.numel() != 1:
        problem = f"has the shape {list(loss.shape)}: reduce it to one number, such as by .mean()"
    else:
        problem = "depends on no parameter: it was detached, computed under torch.no_grad(), or all are frozen"
    raise ValueError(f"engine.backward(loss): {abridged(loss)} {problem}")


def _is_prepared(optimizer: ZeROOptimizer) -> bool:
    """Tell whether the running backward pass has been prepared already."""
    state = optimizer._backward_hook_state
    is_current = state.post_backward_callback_graph_task_id == current_backward()
    return bool(state.backward_active_depth and state.post_backward_callback_queued and is_current)


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
