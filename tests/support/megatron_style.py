"""Programs in the style of Megatron: a parallel state, and a GPT whose layers use only that state.

Both programs have the same layers. What differs is what they ask, and what they mean by it: *model parallel* is tensor
parallel to the one that is named after GPT-NeoX, pipe x tensor to the one that is named after Megatron-DeepSpeed. Their
own parallel states can lay out one process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

PROGRAMS = ("gpt-neox", "megatron-deepspeed")

_OWN_GROUP = """
import torch.distributed as dist

_GROUP = None

def _group():
    assert _GROUP is not None, "model parallel group is not initialized"
    return _GROUP

def _start(size):
    global _GROUP
    assert size == 1, "this program can lay out one process only"
    _GROUP = dist.group.WORLD
"""
_STATES = {
    "gpt-neox": """
def initialize_model_parallel(model_parallel_size, topology=None, fp32_allreduce=False): _start(model_parallel_size)
def get_model_parallel_group(): return _group()
def get_model_parallel_world_size(): return _group().size()
def get_model_parallel_rank(): return _group().rank()
def get_model_parallel_src_rank(): return _group().rank()
def get_pipe_parallel_group(): return _group()
def get_pipe_parallel_world_size(): return _group().size()
def get_pipe_parallel_rank(): return _group().rank()
def get_data_parallel_world_size(): return _group().size()
def get_data_parallel_rank(): return _group().rank()
def get_io_parallel_group(): return _group()
""",
    "megatron-deepspeed": """
def initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1): _start(
    tensor_model_parallel_size * pipeline_model_parallel_size)
def get_tensor_model_parallel_group(): return _group()
def get_tensor_model_parallel_world_size(): return _group().size()
def get_tensor_model_parallel_rank(): return _group().rank()
def get_tensor_model_parallel_src_rank(): return _group().rank()
def get_model_parallel_group(): return _group()
def get_data_parallel_world_size(): return _group().size()
def get_data_parallel_rank(): return _group().rank()
def get_sequence_data_parallel_group(): return _group()
def is_pipeline_first_stage(): return True
def is_pipeline_last_stage(): return True
""",
}

_QUESTIONS = {
    "gpt-neox": """
from . import mpu
from .mpu import get_model_parallel_group as tensor_group
from .mpu import get_model_parallel_rank as tensor_rank
from .mpu import get_model_parallel_src_rank as tensor_source
from .mpu import get_model_parallel_world_size as tensor_size

MARK = "model_parallel"

def initialize(tensor, pipe): mpu.initialize_model_parallel(tensor)
def is_first(): return mpu.get_pipe_parallel_rank() == 0
def is_last(): return mpu.get_pipe_parallel_rank() == mpu.get_pipe_parallel_world_size() - 1
def groups_of_the_model(): return [mpu.get_model_parallel_group(), mpu.get_pipe_parallel_group()]
""",
    "megatron-deepspeed": """
from . import mpu
from .mpu import get_tensor_model_parallel_group as tensor_group
from .mpu import get_tensor_model_parallel_rank as tensor_rank
from .mpu import get_tensor_model_parallel_src_rank as tensor_source
from .mpu import get_tensor_model_parallel_world_size as tensor_size

MARK = "tensor_model_parallel"

def initialize(tensor, pipe): mpu.initialize_model_parallel(tensor, pipe)
def is_first(): return mpu.is_pipeline_first_stage()
def is_last(): return mpu.is_pipeline_last_stage()
def groups_of_the_model(): return [mpu.get_model_parallel_group()]
""",
}

_LAYERS = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn

VOCABULARY, WIDTH, HEADS, CONTEXT, BATCH = 32, 16, 4, 8, 8

class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=tensor_group())
        return gradient

class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        total = partial.clone()
        dist.all_reduce(total, group=tensor_group())
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient

def master(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2

def own(full, dim):
    parameter = nn.Parameter(full.chunk(tensor_size(), dim)[tensor_rank()].clone())
    setattr(parameter, MARK, True)
    return parameter

class Column(nn.Module):
    def __init__(self, seed, inputs, outputs):
        super().__init__()
        self.weight, self.bias = own(master(seed, outputs, inputs), 0), own(master(seed + 1, outputs), 0)

    def forward(self, hidden):
        return F.linear(Enter.apply(hidden), self.weight, self.bias)

class Row(nn.Module):
    def __init__(self, seed, inputs, outputs):
        super().__init__()
        self.weight, self.bias = own(master(seed, outputs, inputs), 1), nn.Parameter(master(seed + 1, outputs))

    def forward(self, hidden):
        return Leave.apply(F.linear(hidden, self.weight)) + self.bias

class Embedding(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.weight, self.position = own(master(seed, VOCABULARY, WIDTH), 0), nn.Parameter(master(1, CONTEXT, WIDTH))
        self.first = tensor_rank() * len(self.weight)

    def forward(self, tokens):
        rows = tokens - self.first
        is_elsewhere = (rows < 0) | (rows >= len(self.weight))
        found = F.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return Leave.apply(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)) + self.position

class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.dense = Column(seed, WIDTH, 3 * WIDTH), Row(seed + 2, WIDTH, WIDTH)
        self.up, self.down = Column(seed + 4, WIDTH, 4 * WIDTH), Row(seed + 6, 4 * WIDTH, WIDTH)

    def forward(self, hidden):
        heads = self.query_key_value(self.before(hidden)).unflatten(-1, (HEADS // tensor_size(), -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True)
        hidden = hidden + self.dense(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.between(hidden))))

class Head(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), Column(seed, WIDTH, VOCABULARY)

    def forward(self, hidden):
        return self.logits(self.norm(hidden))

def specs():
    return [LayerSpec(Embedding, 100), LayerSpec(Block, 200), LayerSpec(Block, 300), LayerSpec(Head, 400)]

def loss_of(logits, labels):
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tensor_group())
    logits = logits - largest.unsqueeze(-1)
    rows = labels - tensor_rank() * logits.shape[-1]
    is_elsewhere = (rows < 0) | (rows >= logits.shape[-1])
    of_label = logits.gather(-1, rows.masked_fill(is_elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    total, of_label = Leave.apply(torch.stack([logits.exp().sum(-1), of_label.masked_fill(is_elsewhere, 0.0)]))
    return (total.log() - of_label).mean()

def batch(step):
    tokens = torch.zeros(BATCH, CONTEXT + 1, dtype=torch.long)
    if tensor_rank() == 0:
        tokens = torch.randint(VOCABULARY, tokens.shape, generator=torch.Generator().manual_seed(step))
    dist.broadcast(tokens, tensor_source(), group=tensor_group())
    tokens = tokens.chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
    return tokens[:, :-1] * is_first(), tokens[:, 1:] * is_last()

def norm_of(parameters):
    counted = [parameter for parameter in parameters if getattr(parameter, MARK, False) or tensor_rank() == 0]
    total = sum(parameter.detach().square().sum() for parameter in counted)
    for group in groups_of_the_model():
        dist.all_reduce(total, group=group)
    return float(total.sqrt())
"""
"""Every parameter starts as this rank's part of a whole one that depends on its seed alone. A batch goes from the first
slice to the others; stages that have no use for inputs or labels get zeros."""


@contextmanager
def program_of(name: str) -> Iterator[Any]:
    """Add the package of one of the programs, with its ``mpu`` and ``layers``, to ``sys.modules`` temporarily."""
    package = f"like_{name.replace('-', '_')}"
    sources = {
        package: "",
        f"{package}.mpu": _OWN_GROUP + _STATES[name],
        f"{package}.layers": _QUESTIONS[name] + _LAYERS,
    }
    try:
        for path, source in sources.items():
            module = sys.modules[path] = ModuleType(path)
            module.__package__ = package
            exec(compile(source, f"<{path}>", "exec"), vars(module))
            if path != package:
                setattr(sys.modules[package], path.removeprefix(f"{package}."), module)
        sys.modules[package].__path__ = []
        yield sys.modules[package]
    finally:
        for path in sources:
            sys.modules.pop(path, None)
