"""Connect a reducer to an engine's optimizer: define where gradients accumulate, and which call reduces them.

There is one class for each kind of optimizer; :func:`gradients_of` chooses the class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_topo.checkpoint.engine_facts import is_element_by_element
from ds_topo.engine import parameter_gathers
from ds_topo.engine.hybrid_sharding import copies_of, reduced_elsewhere
from ds_topo.engine.parameter_gathers import PartitionedParameters
from ds_topo.engine.zero_optimizer import PartitionedOptimizer, partitioned
from ds_topo.ledger import Patch, always, ledger
from ds_topo.mpu import patches
from ds_topo.mpu.releases import bind_methods
from ds_topo.reducer.options import BucketSizes
from ds_topo.zero.partitions import PartitionedGradients


class OptimizerGradients:
    """The connection at stage 0: every rank needs whole gradients, and the optimizer reads ``parameter.grad``."""

    partitions: Sequence[PartitionedGradients] = ()
    """The gradients of which each rank needs only its own part."""
    parameters: PartitionedParameters | None = None
    """The parameters that arrive from other ranks after a step."""
    reduces_always = False
    """True if the gradients of every micro-batch are reduced."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.grad_buffers: dict[nn.Parameter, torch.Tensor] = {}
        """The buffers in which gradients accumulate, if not in ``parameter.grad``."""
        self.reduction: tuple[object, Patch] = (engine, patches.REDUCE_FALLBACK)
        """The object that the engine calls to reduce gradients, and the row of the method."""

    def bind(self, bindings: ExitStack) -> None:
        """Disable the optimizer's own hooks until the bindings are closed. No-op here: it has no hooks."""

    def mark_reduced(self) -> None:
        """Mark gradients as reduced for the optimizer. No-op here: its step reads ``parameter.grad``."""

    def reduce_tied(self, reduce: Callable[[], None]) -> None:
        """Sum the gradients of tied layers over their stages; ``reduce`` is the pipeline engine's own function."""
        reduce()

    def end_with_engine(self) -> None:
        """Prepare for the end of the engine; the bindings are closed next."""


class BF16Gradients(OptimizerGradients):
    """``BF16_Optimizer`` with Muon: gradients accumulate in flat buffers, one for each group of parameters."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__(engine)
        buffers = zip(self.optimizer.bf16_groups, self.optimizer.fp32_groups_gradients, strict=True)
        for parameters, gradients in buffers:
            self.grad_buffers |= zip(parameters, gradients, strict=True)

    def bind(self, bindings: ExitStack) -> None:
        """Remove the optimizer's hooks, and set the gradients that the pipeline engine reads."""
        _keep_hooks_off(self.optimizer, bindings)
        for parameter, gradient in self.grad_buffers.items():
            bindings.callback(ledger.bind(patches.HP_GRADIENT, always(gradient), parameter))

    def mark_reduced(self) -> None:
        """Mark all buffers as filled."""
        for flags in self.optimizer.fp32_groups_has_gradients:
            flags[:] = [True] * len(flags)


def _keep_hooks_off(optimizer: BF16_Optimizer, bindings: ExitStack) -> None:
    """Disable its accumulation of gradients, in hooks (``immediate_grad_update``) and after backward."""
    bindings.callback(ledger.bind(patches.HP_GRADIENTS, always(lambda clear_lp_grads=False: None), optimizer))
    if optimizer._grad_acc_hooks:
        for hook in optimizer._grad_acc_hooks:
            hook.remove()
        bindings.callback(optimizer.create_grad_acc_hooks)


class Zero1Gradients(OptimizerGradients):
    """ZeRO stage 1 with Muon, which needs whole matrices: it takes its partition from reduced ``parameter.grad``."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__(engine)
        self.reduction = (self.optimizer, patches.REDUCE_ZERO)

    def bind(self, bindings: ExitStack) -> None:
        """Limit its hooks to counting backward passes, and its epilogue to collecting the partition."""
        _keep_sums(self.optimizer, bindings)
        for patch, value in (
            (patches.ZERO_OVERLAP, False),
            (patches.ZERO_PROCESS, lambda parameter, group: None),
            (patches.ZERO_REDUCE_REST, lambda comm_dtype=None: None),
        ):
            bindings.callback(ledger.bind(patch, always(value), self.optimizer))

    def mark_reduced(self) -> None:
        """Collect this rank's partition."""
        self.optimizer.overlapping_partition_gradients_reduce_epilogue()


class ZeroPartitions(OptimizerGradients):
    """The connection to ZeRO 1 and 2: gradients go to their owners, and each rank passes its partition on."""

    def __init__(self, engine: DeepSpeedEngine, in_our_layout: PartitionedOptimizer) -> None:
        super().__init__(engine)
        self._layout, self._engine_ends = in_our_layout, False
        self.partitions = [group.gradients for group in in_our_layout.groups]
        self.parameters = in_our_layout.parameters
        self.reduces_always = int(engine.zero_optimization_stage()) == 2
        if not isinstance(self.optimizer, BF16_Optimizer):
            self.reduction = (self.optimizer, patches.ZERO_EPILOGUE if self.reduces_always else patches.REDUCE_ZERO)

    def bind(self, bindings: ExitStack) -> None:
        """Move the optimizer to our layout and keep its own hooks from gradients; collective, and so is its end."""
        bindings.push(bind_methods(parameter_gathers.OF_OPTIMIZERS, self.optimizer))
        if isinstance(self.optimizer, BF16_Optimizer):
            _keep_hooks_off(self.optimizer, bindings)
        else:
            _keep_sums(self.optimizer, bindings)
            rows = [(patches.ZERO_PROCESS, lambda parameter, group: None), (patches.OFFLOAD_STATES, _refuse_offload)]
            for row, value in rows:
                bindings.callback(ledger.bind(row, always(value), self.optimizer))
        self._layout.enter()
        bindings.callback(self._leave)

    def _leave(self) -> None:
        self._layout.parameters.rest()
        if self._engine_ends:
            self._layout.end()
        else:
            self._layout.leave()

    def end_with_engine(self) -> None:
        """Skip the move back to DeepSpeed's layout, which is no longer needed."""
        self._engine_ends = True

    def mark_reduced(self) -> None:
        """Pass the optimizer its partition after the last micro-batch."""
        if self.engine.is_gradient_accumulation_boundary():
            self._layout.hand_over()

    def reduce_tied(self, reduce: Callable[[], None]) -> None:
        """Sum the whole gradients in the partitions' memory, since stages own different parts of them."""
        for weight, group in self.engine.module.get_tied_weights_and_groups():
            for partition in self.partitions:
                if weight in partition.regions:
                    dist.all_reduce(partition.place_of(weight), group=group)


def _keep_sums(optimizer: DeepSpeedZeroOptimizer, bindings: ExitStack) -> None:
    """Keep the optimizer's step from summing gradients over the copies of its partition a second time."""
    reduced_elsewhere.add(optimizer)
    bindings.callback(reduced_elsewhere.discard, optimizer)


def _refuse_offload(*_: object, **__: object) -> None:
    raise RuntimeError(
        "offload_states() with a GradientReducer attached: detach() it first; its layout of the partition differs"
    )


def gradients_of(engine: DeepSpeedEngine, sizes: Callable[[], BucketSizes]) -> OptimizerGradients:
    """Return the connection to this engine's optimizer.

    Args:
        engine: the engine.
        sizes: returns the sizes of buckets; called only if a layout depends on them.

    Raises:
        ValueError: no reducer can be attached to the engine; the message says why, and what to use.
    """
    if (reason := _refusal(engine)) is not None:
        raise ValueError(f"GradientReducer.attach: {reason}")
    optimizer = engine.optimizer
    if not isinstance(optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer)):
        return OptimizerGradients(engine)
    tied: set[nn.Parameter] = set()  # their stages sum gradients, and own different parts of them
    if isinstance(engine, PipelineEngine):
        tied = {weight for weight, _ in engine.module.get_tied_weights_and_groups()}
    in_our_layout = partitioned(optimizer, sizes, tied, copies_of(engine.mpu), engine.is_gradient_accumulation_boundary)
    if in_our_layout is not None:
        return ZeroPartitions(engine, in_our_layout)
    return BF16Gradients(engine) if isinstance(optimizer, BF16_Optimizer) else Zero1Gradients(engine)


def _refusal(engine: DeepSpeedEngine) -> str | None:
    """Return the reason why no reducer can be attached to an engine, or None."""
    stage = int(engine.zero_optimization_stage())
    if stage > 2:
        return (
            f"ZeRO stage {stage} partitions parameters, too, and reduces gradients as it gathers those: keep its own "
            'overlap ("overlap_comm": true), or use stage 0, 1 or 2'
        )
    if stage == 2 and isinstance(engine, PipelineEngine):
        return "DeepSpeed's pipelines support only ZeRO stages 0 and 1: use one of them"
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
    if stage == 2 and not is_element_by_element(engine.optimizer.optimizer):
        return (
            f"{type(engine.optimizer.optimizer).__name__} is not known to update each element by itself, so its "
            "partition cannot move to another layout, as stage 2 requires: use stage 0 or 1, or DeepSpeed's reduction"
        )
    if stage == 2 and engine.micro_steps % engine.gradient_accumulation_steps():
        return "a step has begun, and its gradients are in DeepSpeed's partition: attach the reducer after the step"
    if engine.is_deepcompile_active():
        return "DeepCompile reduces gradients inside the compiled graph: switch it off"
    return None
