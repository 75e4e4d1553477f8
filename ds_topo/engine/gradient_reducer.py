"""Define ``GradientReducer``, which is standalone or attached to one of DeepSpeed's engines."""

from __future__ import annotations

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from typing_extensions import Self, Unpack

from ds_topo.engine.engine_driver import EngineDriver, OptimizerGradients, why_not_attachable
from ds_topo.errors import listed
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reduction.options import ReductionArguments
from ds_topo.reduction.parameters import HasDataParallelGroup
from ds_topo.reduction.reducer import StandaloneReducer, StepDriver


class GradientReducer(StandaloneReducer):
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

    Arguments, errors and sources are those of :class:`~ds_topo.reduction.reducer.StandaloneReducer`, options those of
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
        if isinstance(module, DeepSpeedEngine):
            raise TypeError(
                "GradientReducer(engine) would reduce beside the engine, which reduces its gradients itself: call "
                "GradientReducer.attach(engine)"
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
        kind = EngineDriver
        if isinstance(engine, PipelineEngine):
            from ds_topo.engine.pipelines.pipeline_driver import PipelineDriver  # which others do not need

            kind = PipelineDriver
        driver = kind(engine, options)
        if (reason := why_not_attachable(engine)) is not None:
            about = "" if driver.wider is None else ", for replicas below ZeRO 3"
            raise ValueError(f"GradientReducer.attach{about}: {reason}")
        if isinstance(engine.optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer)):
            from ds_topo.engine.optimizer_gradients import gradients_of_wrapper  # which others do not need

            driver.gradients = gradients_of_wrapper(engine, driver.bucket_sizes, driver.wider)
        else:
            driver.gradients = OptimizerGradients(engine)
        reducer = cls(engine.module, process_group=driver.group, driver=driver, **options)
        try:
            driver.bind(reducer, reducer.options)
        except BaseException:
            reducer.detach()
            raise
        return reducer
