"""The example's GPT, trained in the ways that the tests compare: one process by hand, and every rank of a layout.

Both sides see the same windows of the same text in every step, start from the same parameters and use torch's AdamW.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.utils import clip_grad_norm_ as deepspeed_clip_grad_norm_
from gpt import VOCABULARY, Block, GPTConfig, PositionEmbedding, gpt_layers, next_byte_loss
from parallel_layers import LayerNorm, Parallel, VocabularyParallelEmbedding
from text import standard_library, windows
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, initialize

TINY = GPTConfig(context=16, width=32, heads=4, depth=2)
BATCH = 8
MICRO_BATCHES = 2


@dataclass
class Run:
    """What a training run leaves behind on one rank: the loss of every step, and parameters by layer and name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    reductions: int = 0
    buckets: int = 0


@cache
def some_text() -> torch.Tensor:
    """A little of the training text."""
    return standard_library().train[:20_000]


def batch(step: int, indices: range = range(BATCH), model: GPTConfig = TINY) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples ``indices`` of a step."""
    return windows(some_text(), model.context, step, indices, seed=0)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """AdamW; its eps is far above the rounding noise that is all the gradient of a key's bias ever is."""
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)


def config(gas: int = MICRO_BATCHES, replicas: int = 1, clip: float = 0.1, **more: Any) -> dict[str, Any]:
    """A DeepSpeed config for ``BATCH`` samples per step, with clipping that is active in every step."""
    return {
        "train_micro_batch_size_per_gpu": BATCH // replicas // gas,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **more,
    }


class PlainGPT(nn.Module):
    """The example's layers as one module, with the embedding tied by reuse."""

    def __init__(self, parallel: Parallel, model: GPTConfig = TINY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = VocabularyParallelEmbedding(VOCABULARY, model.width, parallel)
        self.position = PositionEmbedding(model, parallel)
        self.blocks = nn.ModuleList(Block(model, parallel) for _ in range(model.depth))
        self.norm = LayerNorm(model.width, parallel)
        self.loss_of = next_byte_loss(parallel)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.position(self.embedding(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return self.loss_of(self.embedding.logits(self.norm(hidden)), labels)


def train_alone(steps: int, clip: float = 0.1, model: GPTConfig = TINY) -> Run:
    """The reference: the same layers in one process, plain PyTorch."""
    grid = PipelineParallelGrid("pipe=1")
    parallel = Parallel(grid.get_group("model"))
    module = PipelineModule(gpt_layers(model, parallel), grid=grid, seed_layers=True)
    optimizer, run, loss_of = optimizer_of(module.parameters()), Run(), next_byte_loss(parallel)
    for step in range(steps):
        inputs, labels = batch(step, model=model)
        optimizer.zero_grad()
        loss = loss_of(module(inputs), labels)
        loss.backward()
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), clip)))
        optimizer.step()
        run.losses.append(loss.item())
    run.parameters = parameters_of(module)
    return run


def train_pipeline(
    topology: Any,
    steps: int,
    zero: int = 0,
    clip: float = 0.1,
    sequence: bool = False,
    checkpointed: bool = False,
    **more: Any,
) -> Run:
    """One rank of a DeepSpeed pipeline over our grid, with all activations checkpointed if wished."""
    warnings.simplefilter("ignore", FutureWarning)
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid(topology)
    parallel = Parallel(grid.get_group("model"), sequence)
    module = PipelineModule(
        gpt_layers(TINY, parallel),
        grid=grid,
        seed_layers=True,
        loss_fn=next_byte_loss(parallel),
        activation_checkpoint_interval=int(checkpointed),
        checkpointable_layers=["Block"],
    )
    samples = grid.get_sample_world_size()
    if sequence:
        more["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    settings = config(replicas=samples, clip=clip, zero_optimization={"stage": zero}, **more)
    engine, *_ = initialize(model=module, config=settings, optimizer=optimizer_of(module.parameters()))
    run, share = Run(), BATCH // samples
    for step in range(steps):
        inputs, labels = batch(step, range(grid.get_sample_rank() * share, (grid.get_sample_rank() + 1) * share))
        size = engine.train_micro_batch_size_per_gpu()
        with clipped_norms() as clipped:
            run.losses.append(float(engine.train_batch(iter(zip(inputs.split(size), labels.split(size), strict=True)))))
        run.norms.append(float(clipped[0] if clipped else engine.get_global_grad_norm()))
    run.parameters = parameters_of(module)
    if engine.gradient_reducer is not None:
        run.reductions = engine.gradient_reducer.reduction_count
        run.buckets = len(engine.gradient_reducer.buckets)
    dist.barrier()
    engine.destroy()
    grid.destroy()
    return run


@contextmanager
def clipped_norms() -> Iterator[list[torch.Tensor]]:
    """The norms by which DeepSpeed clips in fp32 without ZeRO; it keeps none of them."""
    norms: list[torch.Tensor] = []

    def clip(*arguments: Any, **options: Any) -> torch.Tensor:
        norms.append(deepspeed_clip_grad_norm_(*arguments, **options))
        return norms[-1]

    with mock.patch.object(deepspeed_engine, "clip_grad_norm_", clip):
        yield norms


def parameters_of(module: PipelineModule) -> dict[str, torch.Tensor]:
    """Copies of a stage's parameters under names that every layout shares: the layer's index, or the tied key."""
    return {name: parameter.detach().float().clone() for name, parameter in module.named_parameters()}
