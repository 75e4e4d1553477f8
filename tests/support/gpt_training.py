"""Train the example's GPT in one process with plain PyTorch, and on every rank of a DeepSpeed engine.

Both use the same windows of the same text in every step, the same initial parameters, and torch's AdamW.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from gpt import VOCABULARY, Block, GPTConfig, PositionEmbedding, gpt_layers, next_byte_loss
from parallel_layers import LayerNorm, Parallel, VocabularyParallelEmbedding
from text import standard_library, windows
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, groups, initialize
from tests.support.training import (
    Batch,
    Run,
    destroy_engine,
    engine_config,
    own_samples,
    parameters_of,
    train_by_hand,
    train_engine,
)

TINY = GPTConfig(context=16, width=32, heads=4, depth=2)
BATCH = 8
MICRO_BATCHES = 2
CLIP = 0.1
"""A limit far below the norm of the gradients in every step."""
SMALL_BUCKETS = {"bucket_bytes": 16_000, "first_bucket_bytes": 4_000, "last_bucket_bytes": 4_000}
"""Bucket sizes with which each part of the model has several buckets."""
BF16 = {"bf16": {"enabled": True}}


@cache
def some_text() -> torch.Tensor:
    """Return the start of the training text."""
    return standard_library().train[:20_000]


def batch(step: int, indices: range = range(BATCH), model: GPTConfig = TINY) -> Batch:
    """Return the samples ``indices`` of a step."""
    return windows(some_text(), model.context, step, indices, seed=0)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Create AdamW with an eps far above the gradient of a key's bias, which is rounding noise."""
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)


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


def loss_of(module: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of a :class:`PlainGPT` or of its engine."""
    loss: torch.Tensor = module(inputs, labels)
    return loss


# -- one process -----------------------------------------------------------------------------------------------------


def train_layers_alone(steps: int) -> Run:
    """Train the reference of pipelines: all layers in one stage."""
    with PipelineParallelGrid("pipe=1") as grid:
        parallel = Parallel(grid.get_group("model"))
        module = PipelineModule(gpt_layers(TINY, parallel), grid=grid, seed_layers=True)
        of_logits = next_byte_loss(parallel)
        return train_by_hand(
            module,
            optimizer_of(module.parameters()),
            map(batch, range(steps)),
            lambda layers, inputs, labels: of_logits(layers(inputs), labels),
            CLIP,
        )


def train_module_alone(steps: int) -> Run:
    """Train the reference of engines without a pipeline."""
    module = PlainGPT(Parallel(dist.group.WORLD))
    return train_by_hand(module, optimizer_of(module.parameters()), map(batch, range(steps)), loss_of, CLIP)


# -- engines ---------------------------------------------------------------------------------------------------------


@contextmanager
def pipeline(
    topology: Any,
    zero: int = 0,
    gas: int = MICRO_BATCHES,
    sequence: bool = False,
    checkpointed: bool = False,
    kind: type[PipelineModule] = PipelineModule,
    **more: Any,
) -> Iterator[tuple[Any, PipelineParallelGrid]]:
    """Yield a DeepSpeed pipeline on our grid, and the grid. ``checkpointed`` recomputes all activations."""
    _join()
    with PipelineParallelGrid(topology) as grid:
        parallel = Parallel(grid.get_group("model"), sequence)
        module = kind(
            gpt_layers(TINY, parallel),
            grid=grid,
            seed_layers=True,
            loss_fn=next_byte_loss(parallel),
            activation_checkpoint_interval=int(checkpointed),
            checkpointable_layers=["Block"],
        )
        if sequence or kind is not PipelineModule:
            more["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
        yield from _engine(module, grid, gas, {"zero_optimization": {"stage": zero}, **more})


@contextmanager
def plain_engine(topology: str, settings: dict[str, Any]) -> Iterator[tuple[Any, PipelineParallelGrid]]:
    """Yield a DeepSpeed engine of a :class:`PlainGPT`, and its grid."""
    _join()
    with PipelineParallelGrid(topology) as grid:
        module = PlainGPT(Parallel(grid.get_group("model")))
        second_partition = settings["zero_optimization"].get("zero_hpz_partition_size")
        if second_partition is not None:
            groups.create_zero_partition_groups(grid, second_partition)
        yield from _engine(module, grid, MICRO_BATCHES, settings, mpu=grid)


def train(engine: Any, grid: PipelineParallelGrid, steps: Iterable[int]) -> Run:
    """Train one rank of any of these engines."""
    run = train_engine(engine, grid, (own_samples(batch(step), grid) for step in steps), loss_of)
    run.parameters = parameters_of(engine.module)
    return run


def train_pipeline(topology: Any, steps: int, **options: Any) -> Run:
    """Train one rank of a :func:`pipeline` with these options."""
    with pipeline(topology, **options) as (engine, grid):
        return train(engine, grid, range(steps))


def _join() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    deepspeed.init_distributed(verbose=False)


def _engine(
    module: nn.Module, grid: PipelineParallelGrid, gas: int, settings: dict[str, Any], **options: Any
) -> Iterator[tuple[Any, PipelineParallelGrid]]:
    """Yield an engine, and destroy it afterwards."""
    config = engine_config(BATCH // grid.get_sample_world_size() // gas, gas, CLIP, **settings)
    engine, *_ = initialize(model=module, config=config, optimizer=optimizer_of(module.parameters()), **options)
    yield engine, grid
    dist.barrier()
    destroy_engine(engine)
