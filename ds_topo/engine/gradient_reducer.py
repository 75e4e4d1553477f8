"""``GradientReducer``: the reducer that people use, standalone or attached to a DeepSpeed engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import Self, Unpack

from ds_topo.reducer import BucketReducer
from ds_topo.reducer.options import ReductionArguments

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


class GradientReducer(BucketReducer):
    """Average a module's gradients over a data-parallel group while backward is still running.

    ::

        reducer = GradientReducer(module, grid=grid)
        for batches in loader:                      # micro-batches of one step
            with reducer.no_sync():
                for batch in batches[:-1]:
                    module(batch).sum().backward()
            module(batches[-1]).sum().backward()    # full buckets leave during this backward
            reducer.finish()                        # now every gradient is the average over the group
            optimizer.step()
            optimizer.zero_grad()

    Arguments, errors and sources are those of :class:`~ds_topo.reducer.reducer.BucketReducer`, options those of
    :class:`~ds_topo.reducer.options.ReductionOptions`.

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

    @classmethod
    def attach(cls, engine: DeepSpeedEngine, **options: Unpack[ReductionArguments]) -> Self:
        """Let a reducer average a DeepSpeed engine's gradients, overlapped with the last micro-batch's backward.

        Serves ``DeepSpeedEngine`` at ZeRO stages 0 to 2 and ``PipelineEngine`` at 0 and 1, fp32, fp16 and bf16, experts
        included. Groups, divisor, communication data type and pre-division are the engine's. At stages 1 and 2
        gradients go to the ranks that own them, and :mod:`~ds_topo.engine.partitioned_optimizer` gives the optimizer a
        layout for that; ``detach()``, which gives it back, is collective then. Collective over the data-parallel group.

        Args:
            engine: what ``deepspeed.initialize`` returned.
            options: see ``ReductionOptions``; they take precedence over the engine's. In a pipeline, by default, a
                stage does not overlap where its wait for other stages hides the whole reduction anyway.

        Raises:
            TypeError: not an engine.
            ValueError: an engine that cannot be served; the message says why and what to use.
            RuntimeError: the engine has a reducer already.

        In place of: ``DeepSpeedEngine.buffered_allreduce_fallback``, ``DeepSpeedZeroOptimizer.reduce_gradients``.
        """
        from ds_topo.engine.reducer_drivers import driver_of  # the standalone reducer does without DeepSpeed

        driver = driver_of(engine, options)
        reducer = cls(engine.module, process_group=driver.group, driver=driver, **options)
        try:
            driver.bind(reducer, reducer.options)
        except BaseException:
            reducer.detach()
            raise
        return reducer
