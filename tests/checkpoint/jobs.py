"""Train small jobs of several kinds that draw random numbers, and compute digests of their state."""

from __future__ import annotations

import hashlib
import pickle
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, initialize
from ds_topo.groups import create_expert_groups
from tests.support.small_engines import start
from tests.support.training import destroy_engine

WIDTH, SAMPLES = 8, 8
ADAM = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}


@dataclass(frozen=True)
class Kind:
    """The model, layout and settings of a job."""

    topology: str
    zero: int = 0
    is_pipeline: bool = False
    experts: int = 0
    """The expert parallel size; 0 for none."""
    bf16: bool = False
    width: int = WIDTH
    reduced: bool = False
    extra: str = ""
    """The name of a further layer."""
    saver: Kind | None = None
    """The kind of another job, which saved what this one converts while loading."""

    def __str__(self) -> str:
        words = [self.topology.replace("=", "").replace(",", "-"), f"zero{self.zero}"]
        words += [name for name in ("is_pipeline", "experts", "bf16", "reduced", "extra") if getattr(self, name)]
        return "-".join(words)


KINDS = {
    "zero1": Kind("data=2", zero=1),
    "zero3": Kind("data=2", zero=3),
    "pipeline": Kind("pipe=2", is_pipeline=True),
    "moe": Kind("data=2", zero=1, experts=2),
}
"""The kinds whose saves are interrupted, on two ranks."""


class Own:
    """A program's own type in its ``client_state``."""

    def __init__(self, value: int) -> None:
        self.value = value


class Layer(nn.Module):
    """A linear layer with dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.dropout(torch.tanh(self.linear(hidden)), 0.2, self.training)


class Mixture(nn.Module):
    """A mixture of four experts."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.moe = MoE(width, nn.Linear(width, width), num_experts=4, ep_size=size, use_rts=False, drop_tokens=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.moe(hidden)[0]
        return hidden + mixed


def batch(step: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of all samples of a step."""
    inputs = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.roll(1, dims=1).sin()


class Job:
    """One rank of a job."""

    def __init__(self, kind: Kind, **settings: Any) -> None:
        start()
        warnings.simplefilter("default")
        self.kind = kind
        self.grid = PipelineParallelGrid(kind.topology)
        share = SAMPLES // self.grid.get_sample_world_size()
        config = {
            "train_micro_batch_size_per_gpu": share // 2 if kind.is_pipeline else share,
            "gradient_accumulation_steps": 2 if kind.is_pipeline else 1,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": kind.zero},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": kind.bf16},
            "optimizer": ADAM,
            "gradient_reducer": kind.reduced,
            **settings,
        }
        if kind.is_pipeline:
            layers = [LayerSpec(Layer, kind.width)] * 4
            module: nn.Module = PipelineModule(
                layers, grid=self.grid, loss_fn=F.mse_loss, seed_layers=True, partition_method="uniform"
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.engine, *_ = initialize(model=module, config=config)
        else:
            if kind.experts:
                create_expert_groups(self.grid, kind.experts)
            layer = Mixture(kind.width, kind.experts) if kind.experts else Layer(kind.width)
            module = nn.Sequential(Layer(kind.width), layer, Layer(kind.width))
            if kind.extra:
                module.add_module(kind.extra, Layer(kind.width))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.engine, *_ = initialize(model=module, config=config, mpu=self.grid)
        own = 1000 + self.grid.global_rank
        torch.manual_seed(own)
        np.random.seed(own)
        random.seed(own)

    def train(self, steps: range) -> list[float]:
        """Return losses of this rank. Samples depend on the step, and dropout on random states."""
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        grid = self.grid
        dtype = torch.bfloat16 if self.kind.bf16 else torch.float32
        inputs, targets = (
            part.chunk(grid.get_sample_world_size())[grid.get_sample_rank()].to(self.engine.device, dtype)
            for part in batch(step, self.kind.width)
        )
        if self.kind.is_pipeline:
            return float(self.engine.train_batch(iter(zip(inputs.chunk(2), targets.chunk(2), strict=True))))
        loss = F.mse_loss(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach()) + random.random() + float(np.random.rand())

    def state(self) -> dict[str, str]:
        """Return a digest of every parameter, optimizer state and random state of this rank."""
        states = [_digest(torch.get_rng_state()), _digest(get_accelerator().get_rng_state())]
        states.append(hashlib.sha1(pickle.dumps(random.getstate())).hexdigest())
        return {**state_of(self.engine), "random": " ".join(states)}

    def destroy(self) -> None:
        destroy_engine(self.engine)
        self.grid.destroy()


def state_of(engine: Any) -> dict[str, str]:
    """Return a digest of every parameter and optimizer state of this rank."""
    module, optimizer = engine.module, engine.optimizer
    found = {f"parameter {name}": _digest(_own(value)) for name, value in module.named_parameters()}
    while getattr(optimizer, "optimizer", optimizer) is not optimizer:
        optimizer = optimizer.optimizer
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            found[f"weight {number}.{index}"] = _digest(_own(parameter))
            for key, value in optimizer.state[parameter].items():
                found[f"{key} {number}.{index}"] = _digest(torch.as_tensor(value))
    found["step"] = str(engine.global_steps)
    return found


def _own(parameter: torch.Tensor) -> torch.Tensor:
    own: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
    return own


def _digest(tensor: torch.Tensor) -> str:
    whole = tensor.detach().contiguous().flatten().view(torch.uint8) if tensor.dim() else tensor.reshape(1)
    return f"{list(tensor.shape)} {hashlib.sha1(whole.cpu().numpy().tobytes()).hexdigest()}"


@contextmanager
def job(kind: Kind, **settings: Any) -> Iterator[Job]:
    """Provide a job until the caller is done with it."""
    made = Job(kind, **settings)
    yield made
    made.destroy()
