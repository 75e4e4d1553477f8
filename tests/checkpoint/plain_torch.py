"""Train without DeepSpeed and without ds_topo: FSDP2 on any number of processes, or one process alone.

The program reads and writes by ``torch.distributed.checkpoint`` as torch's guides do, and prints its losses as JSON.
Tests import its model, too. It is started by ``python plain_torch.py FOLDER FORM FIRST LAST`` with the
variables of ``torchrun``, or without them.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

TOKENS, WIDTH, HIDDEN, DEPTH, SAMPLES, LENGTH = 14, 10, 12, 3, 12, 5
Same = Callable[[torch.Tensor], torch.Tensor]


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged, because a single process has no peers."""
    return tensor


class Block(nn.Module):
    """A gated layer whose two halves, gate and values, are each split over slices."""

    def __init__(self, slices: int = 1, copy: Same = same, total: Same = same) -> None:
        super().__init__()
        self.copy, self.total = copy, total
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(torch.randn(2 * HIDDEN // slices, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN // slices) * 0.3)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, values = (self.copy(self.norm(hidden)) @ self.up.t()).chunk(2, -1)
        return hidden + self.scale * self.total((F.silu(gate) * values) @ self.down.t()) + self.bias


class Model(nn.Module):
    """Blocks between an embedding and a last layer that shares its weight, and a buffer."""

    def __init__(self, slices: int = 1, copy: Same = same, total: Same = same) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(slices, copy, total) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("temperature", torch.tensor([1.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden) / self.temperature
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def batch(step: int) -> torch.Tensor:
    """Return all samples of a step, ``[SAMPLES, LENGTH]``."""
    return torch.randint(TOKENS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every program here."""
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)


class App:
    """A ``Stateful`` with a model and an optimizer, as in torch's guide."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, is_flat: bool) -> None:
        self.model, self.optimizer = model, optimizer
        self.options = StateDictOptions(flatten_optimizer_state_dict=is_flat)

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=self.options,
        )


class Program:
    """The program's training; it uses FSDP2 if there are several processes."""

    def __init__(self) -> None:
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.model = Model()
        if self.ranks > 1:
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = adam(self.model.parameters())

    def train(self, steps: range) -> list[float]:
        """Return losses over all samples."""
        losses = []
        for step in steps:
            place = dist.get_rank() if self.ranks > 1 else 0
            loss = self.model(batch(step).chunk(self.ranks)[place])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach().clone()
            if self.ranks > 1:
                dist.all_reduce(mean)
            losses.append(float(mean) / self.ranks)
        return losses

    def state(self, form: str) -> dict[str, Any]:
        """Return the state to save or load: under ``"app"``, or as torchtitan has it, with weights at the top."""
        app = App(self.model, self.optimizer, is_flat=form == "titan")
        if form == "app":
            return {"app": app}
        state = app.state_dict()
        return {**state["model"], "optimizer": state["optim"]}

    def load(self, folder: str, form: str) -> None:
        """Load in place, by torch alone."""
        state = self.state(form)
        dcp.load(state, checkpoint_id=folder)
        if form != "app":
            optim = state.pop("optimizer")
            App(self.model, self.optimizer, is_flat=True).load_state_dict({"model": state, "optim": optim})

    def save(self, folder: str, form: str) -> None:
        """Save by torch alone."""
        dcp.save(self.state(form), checkpoint_id=folder)


def main(folder: str, form: str, first: str, last: str) -> None:
    """Load and train; print the losses."""
    warnings.simplefilter("ignore")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    program = Program()
    program.load(folder, form)
    losses = program.train(range(int(first), int(last)))
    others = [name for name in ("deepspeed", "ds_topo") if name in sys.modules]
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps({"losses": losses, "others": others}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
