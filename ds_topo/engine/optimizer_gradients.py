"""Where DeepSpeed's optimizers keep gradients, and where its engines call for their reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_topo.engine import changes, parameter_gathers
from ds_topo.engine.parameter_gathers import PartitionedParameters
from ds_topo.engine.partitioned_optimizer import PartitionedOptimizer, partitioned
from ds_topo.ledger import Change, always, ledger
from ds_topo.partition.gradients import PartitionedGradients
from ds_topo.reducer.planning import BucketSizes


class OptimizerGradients(Protocol):
    """What a reducer must know about one kind of optimizer."""

    grad_buffers: dict[nn.Parameter, torch.Tensor]
    """Where gradients accumulate, if not in ``parameter.grad``."""
    reduction: tuple[object, Change]
    """The object that the engine calls to have gradients reduced, and the row of its method."""

    partitions: Sequence[PartitionedGradients]
    """Gradients of which each rank needs its own part alone."""
    reduces_always: bool
    """Whether every micro-batch's gradients are reduced."""

    def bind(self, bindings: ExitStack) -> None:
        """Keep the optimizer's own hooks from gradients, until the bindings are closed."""

    parameters: PartitionedParameters | None
    """What arrives from other ranks after a step, if anything does."""

    def reduce_tied(self, engine: PipelineEngine, reduce: Callable[[], None]) -> None:
        """Sum the gradients of tied layers over their stages; ``reduce`` is the engine's way."""

    def end_with_engine(self) -> None:
        """The engine is destroyed: the bindings are closed next."""

    def mark_reduced(self) -> None:
        """Tell the optimizer that gradients are reduced."""


class WholeGradients:
    """What is common to those that need whole gradients on every rank."""

    partitions: Sequence[PartitionedGradients] = ()
    parameters: PartitionedParameters | None = None
    reduces_always = False

    def reduce_tied(self, engine: PipelineEngine, reduce: Callable[[], None]) -> None:
        """As the engine does."""
        reduce()

    def end_with_engine(self) -> None:
        """Nothing is to be put back."""


class ParameterGradients(WholeGradients):
    """Stage 0: the optimizer, wrapped or not, reads ``parameter.grad``."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.grad_buffers: dict[nn.Parameter, torch.Tensor] = {}
        self.reduction = (engine, changes.REDUCE_FALLBACK)

    def bind(self, bindings: ExitStack) -> None:
        """It has no hooks."""

    def mark_reduced(self) -> None:
        """It reads them in its step."""


class BF16Gradients(WholeGradients):
    """``BF16_Optimizer`` with Muon: gradients accumulate in flat buffers, one for each group of parameters."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._optimizer: BF16_Optimizer = engine.optimizer
        self.reduction = (engine, changes.REDUCE_FALLBACK)
        self.grad_buffers = {
            parameter: gradient
            for parameters, gradients in zip(
                self._optimizer.bf16_groups, self._optimizer.fp32_groups_gradients, strict=True
            )
            for parameter, gradient in zip(parameters, gradients, strict=True)
        }

    def bind(self, bindings: ExitStack) -> None:
        """Remove its hooks, and let the pipeline engine find gradients."""
        keep_hooks_off(self._optimizer, bindings)
        for parameter, gradient in self.grad_buffers.items():
            bindings.callback(ledger.bind(changes.HP_GRADIENT, always(gradient), parameter))

    def mark_reduced(self) -> None:
        """Mark all buffers as filled."""
        for flags in self._optimizer.fp32_groups_has_gradients:
            flags[:] = [True] * len(flags)


def keep_hooks_off(optimizer: BF16_Optimizer, bindings: ExitStack) -> None:
    """Let it take no gradients, neither by hooks (``immediate_grad_update``) nor after backward; until the end."""
    bindings.callback(ledger.bind(changes.HP_GRADIENTS, always(lambda clear_lp_grads=False: None), optimizer))
    if optimizer._grad_acc_hooks:
        for hook in optimizer._grad_acc_hooks:
            hook.remove()
        bindings.callback(optimizer.create_grad_acc_hooks)


class Zero1Gradients(WholeGradients):
    """Stage 1 with Muon, which needs whole matrices: it cuts its partition out of reduced ``parameter.grad``."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._optimizer: DeepSpeedZeroOptimizer = engine.optimizer
        self.grad_buffers: dict[nn.Parameter, torch.Tensor] = {}
        self.reduction = (self._optimizer, changes.REDUCE_ZERO)

    def bind(self, bindings: ExitStack) -> None:
        """Let its hooks count backward passes only, and its epilogue collect the partition only."""
        for change, value in (
            (changes.ZERO_OVERLAP, False),
            (changes.ZERO_PROCESS, lambda parameter, group: None),
            (changes.ZERO_REDUCE_REST, lambda comm_dtype=None: None),
        ):
            bindings.callback(ledger.bind(change, always(value), self._optimizer))

    def mark_reduced(self) -> None:
        """Collect this rank's partition."""
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()


class ZeroPartitions:
    """ZeRO 1 and 2: gradients go to their owners, who hand the optimizer its partition."""

    def __init__(self, engine: DeepSpeedEngine, optimizer: PartitionedOptimizer) -> None:
        self.optimizer, self._engine, self._engine_ends = optimizer, engine, False
        self.grad_buffers: dict[nn.Parameter, torch.Tensor] = {}
        self.partitions: Sequence[PartitionedGradients] = [group.gradients for group in optimizer.groups]
        self.parameters: PartitionedParameters | None = optimizer.parameters
        self.reduces_always = int(engine.zero_optimization_stage()) == 2
        if isinstance(engine.optimizer, BF16_Optimizer):
            self.reduction: tuple[object, Change] = (engine, changes.REDUCE_FALLBACK)
        elif self.reduces_always:
            self.reduction = (engine.optimizer, changes.ZERO_EPILOGUE)
        else:
            self.reduction = (engine.optimizer, changes.REDUCE_ZERO)

    def bind(self, bindings: ExitStack) -> None:
        """Move the optimizer to our layout, and keep its own hooks from gradients; collective, and so is its end."""
        for row, make in parameter_gathers.WHILE_A_GRID_EXISTS:
            bindings.callback(ledger.bind(row, make))
        optimizer = self._engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            keep_hooks_off(optimizer, bindings)
        else:
            rows = [(changes.ZERO_PROCESS, lambda parameter, group: None), (changes.OFFLOAD_STATES, _refuse_offload)]
            for row, value in rows:
                bindings.callback(ledger.bind(row, always(value), optimizer))
        self.optimizer.enter()
        bindings.callback(self._leave)

    def _leave(self) -> None:
        self.optimizer.parameters.rest()
        if self._engine_ends:
            self.optimizer.end()
        else:
            self.optimizer.leave()

    def end_with_engine(self) -> None:
        """Nobody needs DeepSpeed's layout any more."""
        self._engine_ends = True

    def mark_reduced(self) -> None:
        """Hand over the partition, after the last micro-batch."""
        if self._engine.is_gradient_accumulation_boundary():
            self.optimizer.hand_over()

    def reduce_tied(self, engine: PipelineEngine, reduce: Callable[[], None]) -> None:
        """Where they are; whole, since stages own other parts of them."""
        for weight, group in engine.module.get_tied_weights_and_groups():
            for partition in self.partitions:
                if weight in partition.regions:
                    dist.all_reduce(partition.place_of(weight), group=group)


def _refuse_offload(*_: object, **__: object) -> None:
    raise RuntimeError(
        "offload_states() with a GradientReducer attached: detach() it first; its layout of the partition differs"
    )


def gradients_of(engine: DeepSpeedEngine, sizes: Callable[[], BucketSizes]) -> OptimizerGradients:
    """How this engine's optimizer is served.

    Args:
        engine: the engine.
        sizes: of buckets, asked only where a layout depends on them.

    Raises:
        ValueError: it cannot be; the message says why, and what to use.
    """
    reason = _refusal(engine)
    if reason is not None:
        raise ValueError(f"GradientReducer.attach: {reason}")
    if isinstance(engine.optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer)):
        optimizer = partitioned(engine.optimizer, sizes, _needed_whole(engine))
        if optimizer is not None:
            return ZeroPartitions(engine, optimizer)
    if isinstance(engine.optimizer, BF16_Optimizer):
        return BF16Gradients(engine)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        return Zero1Gradients(engine)
    return ParameterGradients(engine)


def _needed_whole(engine: DeepSpeedEngine) -> set[nn.Parameter]:
    """Tied layers of a pipeline: their stages sum gradients, and own different parts of them."""
    if not isinstance(engine, PipelineEngine):
        return set()
    return {weight for weight, _ in engine.module.get_tied_weights_and_groups()}


def _refusal(engine: DeepSpeedEngine) -> str | None:
    """Why an engine cannot be served, or None."""
    stage = int(engine.zero_optimization_stage())
    if stage > 2:
        return (
            f"ZeRO stage {stage} partitions parameters, too, and reduces gradients as it gathers those: keep its own "
            'overlap ("overlap_comm": true), or use stage 0, 1 or 2'
        )
    if stage == 2 and isinstance(engine, PipelineEngine):
        return "DeepSpeed's pipelines work with ZeRO stage 0 and 1 alone: use one of them"
    if not getattr(engine.optimizer, "param_groups", None):
        return "the engine has no optimizer, so it never reduces gradients: give deepspeed.initialize one"
    if engine.zero_cpu_offload() or engine.zenflow:
        return "an offloaded optimizer (offload_optimizer, zenflow) moves gradients by itself: switch offload off"
    if not engine.managed_gradient_accumulation():
        return (
            "with managed_gradient_accumulation=false the last micro-batch is known only in step(), when backward is "
            "over: let DeepSpeed manage it"
        )
    if not engine.enable_backward_allreduce and not engine.pipeline_parallelism:
        return f"the optimizer {engine.optimizer_name()!r} communicates by itself: choose one that does not"
    if stage == 2 and engine.micro_steps % engine.gradient_accumulation_steps():
        return (
            "the micro-batches of a step are under way, and their gradients in DeepSpeed's partition: attach after it"
        )
    if engine.is_deepcompile_active():
        return "DeepCompile reduces gradients inside the compiled graph: switch it off"
    return None
