"""Train the example's GPT with DeepSpeed for a few steps, and count every byte of its tensors."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpt import VOCABULARY, GPTConfig, gpt_layers, next_byte_loss
from mixture import Mixture
from parallel_layers import Parallel
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_topo import PipelineModule, PipelineParallelGrid, initialize
from ds_topo.groups import create_expert_groups
from tests.plan.allocations import Allocations
from tests.support.gpt_training import PlainGPT
from tests.support.training import destroy_engine

STEPS_BEFORE = 2
MODEL = GPTConfig(context=64, width=128, heads=4, depth=4)


@dataclass(frozen=True)
class Case:
    """One training job of the example's model.

    ``experts`` are those of every block, distributed over all replicas; 0 for none. A topology with a ``pipe`` axis
    runs in DeepSpeed's pipeline engine, any other in its plain one.
    """

    topology: str
    zero: int
    recompute: bool = False
    precision: str = "fp32"
    experts: int = 0
    model: GPTConfig = MODEL
    micro_batch: int = 8
    micro_batches: int = 2

    def __str__(self) -> str:
        more = [self.precision, *(["recompute"] if self.recompute else []), *(["experts"] if self.experts else [])]
        return f"{self.topology}-zero{self.zero}-{'-'.join(more)}"


@dataclass(frozen=True)
class Counted:
    """The bytes of one rank.

    ``states``: live between steps, without what a pipeline has ``kept`` of its last micro-batches; ``peak``: of a step;
    ``load``: the fullest expert's share over the mean.
    """

    states: int
    kept: int
    peak: int
    load: float


def count_memory(case: Case, bucket: int) -> Counted:
    """Train, and count one step after the first ones; ``bucket`` is the size of ZeRO's buckets, in elements."""
    import deepspeed

    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with Allocations() as allocations:
        grid = PipelineParallelGrid(case.topology)
        engine, step = _pipeline(case, grid, bucket) if grid.pipe_parallel_size > 1 else _plain(case, grid, bucket)
        for _ in range(STEPS_BEFORE):
            step()
        allocations.restart_peak()
        step()
        gc.collect()
        between, peak = allocations.live_bytes, allocations.peak_bytes
        if grid.pipe_parallel_size > 1:
            _release_kept(engine)
        states = allocations.live_bytes
        counted = Counted(states, between - states, peak, _load(engine))
        destroy_engine(engine)
        grid.destroy()
        return counted


def config(case: Case, bucket: int) -> dict[str, Any]:
    """Return the config that a plan of this case writes."""
    zero = {"stage": case.zero, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    return {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": 0.0 if case.experts else 1.0,
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        **({"bf16": {"enabled": True}} if case.precision == "bf16" else {}),
    }


def _pipeline(case: Case, grid: PipelineParallelGrid, bucket: int) -> tuple[Any, Callable[[], None]]:
    parallel = Parallel(grid.get_group("model"))
    module = PipelineModule(
        gpt_layers(case.model, parallel, *_feed_forward(case, grid)),
        grid=grid,
        loss_fn=next_byte_loss(parallel),
        activation_checkpoint_interval=int(case.recompute),
        checkpointable_layers=["Block"],
    )
    engine, *_ = initialize(model=module, config=config(case, bucket))

    own = _of_replica(grid)

    def step() -> None:
        engine.train_batch(iter([_samples(case, own) for _ in range(case.micro_batches)]))

    return engine, step


def _release_kept(engine: Any) -> None:
    """Release the tensors that DeepSpeed's pipeline engine keeps between steps.

    They are its receive buffers, and on the last stage outputs, with the inputs and gradients of their graphs.
    """
    engine.reset_activation_shape()
    for kept in engine.pipe_buffers.values():
        kept[:] = [None] * len(kept)
    engine.loss = None


def _plain(case: Case, grid: PipelineParallelGrid, bucket: int) -> tuple[Any, Callable[[], None]]:
    parallel = Parallel(grid.get_group("model"))
    model = PlainGPT(parallel, case.model)
    for index, make in enumerate(_feed_forward(case, grid) * case.model.depth):
        model.blocks[index].feed_forward = make(case.model, parallel)
    if case.recompute:
        for block in model.blocks:
            block.forward = partial(_checkpointed, block.forward)  # type: ignore[method-assign]
    parameters = [{"params": list(model.parameters()), "name": "all"}]
    if case.experts:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        parameters = split_params_into_different_moe_groups_for_optimizer(parameters)
    engine, *_ = initialize(model=model, model_parameters=parameters, mpu=grid, config=config(case, bucket))

    own = _of_replica(grid)

    def step() -> None:
        for _ in range(case.micro_batches):
            loss = engine(*_samples(case, own))
            engine.backward(loss)
            del loss
            engine.step()

    return engine, step


def _feed_forward(case: Case, grid: PipelineParallelGrid) -> list[Callable[..., nn.Module]]:
    """Return what a block has in place of its feed-forward layer."""
    if not case.experts:
        return []
    groups = create_expert_groups(grid, grid.get_data_parallel_world_size())
    return [partial(Mixture, groups=groups, experts=case.experts, balance=0.01)]


def _checkpointed(forward: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(forward, hidden, use_reentrant=False)
    return result


def _samples(case: Case, own: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (case.micro_batch, case.model.context)
    return torch.randint(0, VOCABULARY, shape, generator=own), torch.randint(0, VOCABULARY, shape, generator=own)


def _of_replica(grid: PipelineParallelGrid) -> torch.Generator:
    """Return a generator that draws the same samples on all ranks of a replica."""
    return torch.Generator().manual_seed(grid.get_sample_rank())


def _load(engine: Any) -> float:
    """Return the tokens of the fullest expert over the mean, averaged over layers."""
    loads = [
        float(module.exp_counts.max() / module.exp_counts.float().mean())
        for module in engine.module.modules()
        if hasattr(module, "exp_counts") and module.exp_counts is not None
    ]
    return sum(loads) / len(loads) if loads else 1.0
