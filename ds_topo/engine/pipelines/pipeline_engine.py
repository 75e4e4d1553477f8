"""Run a pipeline engine on a grid: a step starts on all ranks or on none, and stages send what others expect."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_topo.base.classes import stock_class
from ds_topo.base.marks import inner_optimizer, is_element_by_element
from ds_topo.base.patches import DualPipeVEngine
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.engine.pipelines import activation_shapes
from ds_topo.engine.pipelines.batches import Starts, run_with_enough
from ds_topo.engine.samples import counting_shares
from ds_topo.errors import EngineOptionError, warn
from ds_topo.topology.axes import PIPE


class PipelineOnGrid(EngineOnGrid, PipelineEngine):  # type: ignore[misc]
    """A pipeline engine, whose steps start on all ranks or on none, and whose stages send what others expect."""

    mixin_state = "starts"
    starts: Starts
    """Notices that all steps begin with the same batch."""

    def complete(self) -> None:
        """Let steps after the end of the grid raise."""
        super().complete()
        self.starts = Starts()
        self.mpu.on_destroy(partial(_end_pipeline, weakref.ref(self)))

    @property
    def reading_stages(self) -> set[int]:
        """Return the stages that read samples: the first and the last one, of DualPipeV the first."""
        return {0} if isinstance(self, DualPipeVEngine) else {0, self.mpu.get_axis_size(PIPE) - 1}

    @property
    def using_bf16_optimizer(self) -> bool:
        """True if gradients accumulate in ``BF16_Optimizer``: DeepSpeed compares its class, which is ours on a grid."""
        return isinstance(self.optimizer, BF16_Optimizer)

    @using_bf16_optimizer.setter
    def using_bf16_optimizer(self, value: bool) -> None:
        own: Any = self  # for when the grid is gone
        vars(own)["using_bf16_optimizer"] = isinstance(self.optimizer, BF16_Optimizer)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Warn that the copies of a tied weight may drift apart.

        The stages sum the gradients of a tied weight, and each updates its own copy. That keeps the copies equal if the
        optimizer updates each element by itself. Others compute norms of vectors, which differ between stages.
        """
        super()._configure_optimizer(client_optimizer, model_parameters)
        if not (tied := self.module.get_tied_weights_and_groups()):
            return
        if not isinstance(self.optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer, FP16_Optimizer)):
            return  # the optimizer has a tensor for each parameter
        inner, (_, group) = inner_optimizer(self), tied[0]
        if inner is None or is_element_by_element(inner) or torch.distributed.get_rank(group):
            return
        kind, wrapper = type(inner).__name__, stock_class(self.optimizer).__name__
        warn(
            f"{kind} is not known to update each element by itself, and {wrapper} gives it vectors of many parameters, "
            "which differ between stages: copies of tied weights may drift apart. Use another optimizer, or ZeRO 0 in "
            "fp32. ds_topo.check_replicas(engine) compares the copies. If the optimizer does update each "
            "element by itself, set is_element_by_element = True on its class"
        )

    def _build_data_iter(self, dataset: Any) -> None:
        """Read this rank's share of samples, on stages that read samples.

        The mpu of a pipeline counts peers along ``seq``, which would read different samples.
        """
        if self.mpu.get_axis_rank(PIPE) in self.reading_stages:  # others must not join the sampler's collectives
            with counting_shares(self):
                super()._build_data_iter(dataset)

    def train_batch(self, *arguments: Any, **options: Any) -> Any:
        """Start on all ranks or on none."""
        return run_with_enough(super().train_batch, self, *arguments, **options)

    def eval_batch(self, *arguments: Any, **options: Any) -> Any:
        """Start on all ranks or on none."""
        return run_with_enough(super().eval_batch, self, *arguments, **options)

    def _bcast_pipe_scalar(self, data: Any, *arguments: Any, **options: Any) -> Any:
        """Refuse a result that is no scalar: other stages would receive it in memory for one number, and crash."""
        if torch.is_tensor(data):
            self.require_scalar(data)
        return super()._bcast_pipe_scalar(data, *arguments, **options)

    def require_scalar(self, loss: Any) -> None:
        """Refuse a loss of the last stage that is no tensor of one value."""
        if not torch.is_tensor(loss) or loss.numel() != 1:
            cause = "The module has no loss_fn: give PipelineModule(..., loss_fn=), or let"
            what = f"{list(loss.shape)} values" if torch.is_tensor(loss) else f"a {type(loss).__name__}"
            raise EngineOptionError(
                f"the last stage returns {what} instead of a loss. "
                f"{cause if self.module.loss_fn is None else 'Let'} the last layer or loss_fn return a scalar. For "
                "outputs without a loss, call engine.eval_batch(data_iter, compute_loss=False, reduce_output=None)"
            )

    def reset_activation_shape(self) -> None:
        """Forget which shapes of activations were announced to the next stage."""
        self.starts.announced.clear()
        super().reset_activation_shape()

    @property
    def _INSTRUCTION_MAP(self) -> dict[type, Any]:  # noqa: N802
        """Return the same map, with checks of what a stage sends and of the loss."""
        if self.starts.instructions is None:
            self.starts.instructions = activation_shapes.with_checked_sends(super()._INSTRUCTION_MAP)
        return self.starts.instructions

    def _allocate_or_extend_buffers(self, idx: int, shape: Any, dtype: torch.dtype) -> Any:
        """Return a new buffer in place of one of another type: DeepSpeed returns any that is large enough."""
        buffer = super()._allocate_or_extend_buffers(idx, shape, dtype)
        return buffer if buffer.dtype == dtype else torch.empty(shape, dtype=dtype, device=self.device)


def _end_pipeline(engine: weakref.ref[Any]) -> None:
    """Let later steps raise on every rank: otherwise one stage fails, and the others wait for it without end."""
    living = engine()
    if living is not None and "mpu" in vars(living):  # it was not destroyed
        grid = living.mpu
        vars(living)["_exec_schedule"] = lambda _: grid.get_group(PIPE)
