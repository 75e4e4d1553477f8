"""Run a rank of a small training with a broken rank.

``python tests/faults/job.py ENGINE FAULT PHASE VICTIM LIMIT TIMEOUT``: the limit of the watch, or 0 for none, and the
timeout of the job. Further arguments tell this job from others.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ds_topo import GradientReducer, PipelineModule, PipelineParallelGrid, init_distributed, initialize
from tests.support.small_engines import settings

STEPS, BROKEN_STEP = 8, 3
WIDTH = 16
HAPPENED = "fault happened"
FLAP_SECONDS = 5
_BEFORE_STEPS = ("start", "grid", "construction")


class Fault:
    """The fault that happens to the victim once, in a phase of a step."""

    def __init__(self, kind: str, phase: str, is_victim: bool) -> None:
        self._kind, self._phase, self._is_due = kind, phase, is_victim
        self.step = 0

    def may_happen(self, phase: str) -> None:
        """Cause the fault if the rank is the victim and this is the phase."""
        if self._is_due and phase == self._phase and (self.step == BROKEN_STEP or phase in _BEFORE_STEPS):
            self._is_due = False
            self._happen()

    def skips(self, kind: str) -> bool:
        """Check that the victim must skip this call."""
        skips = self._is_due and self._kind == kind and self.step == BROKEN_STEP
        if skips:
            self._is_due = False
            print(f"{HAPPENED} at {time.monotonic()}", flush=True)
        return skips

    def _happen(self) -> None:
        if self._kind.startswith("skip"):
            self._is_due = True
            return
        print(f"{HAPPENED} at {time.monotonic()}", flush=True)
        if self._kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._kind == "flap":
            subprocess.Popen(["sh", "-c", f"sleep {FLAP_SECONDS}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._kind == "exception":
            raise ValueError("a sample that cannot be read")
        elif self._kind in ("exit", "leave"):
            sys.exit(int(self._kind == "exit"))
        elif self._kind == "handler":
            try:
                raise ValueError("a sample that cannot be read")
            except ValueError:
                time.sleep(1000)
        elif self._kind in ("cut", "gone"):
            time.sleep(1 if self._kind == "cut" else 1000)  # the process that starts the ranks cuts the link


class Model(nn.Module):
    """A model of two layers, or of one layer and a mixture of experts."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=2) if experts else None
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss of a forward pass."""
        hidden = self.first(inputs)
        if self.experts is not None:
            hidden = self.experts(hidden)[0]
        loss: torch.Tensor = self.last(hidden).square().mean()
        return loss


Loop = tuple[Callable[[], object], Callable[[], object], Callable[[str], object]]
"""A job: functions that train a step, evaluate, and save to a folder."""


def plain(engine_kind: str, fault: Fault) -> Loop:
    """Create the engines ``plain0`` to ``plain3``, ``plain1-reducer`` and ``moe``."""
    grid = PipelineParallelGrid("data=4" if engine_kind == "moe" else "data=2,model=2")
    model = watched(Model(engine_kind == "moe"), fault)
    stage = int(engine_kind[5]) if engine_kind != "moe" else 0
    config = settings(zero_optimization={"stage": stage}, gradient_accumulation_steps=1)
    if engine_kind.endswith("reducer"):
        config["gradient_reducer"] = {}
    fault.may_happen("grid")
    engine, *_ = initialize(model=model, config=config, mpu=grid, optimizer=failing_optimizer(fault))
    inputs = torch.full((8, WIDTH), 1.0 + grid.get_data_parallel_rank())

    def step() -> None:
        loss = engine(inputs)
        engine.backward(loss)
        engine.step()

    def evaluate() -> None:
        engine.eval()
        with torch.no_grad():
            dist.all_reduce(engine(inputs), group=grid.get_data_parallel_group())
        engine.train()

    return step, evaluate, engine.save_checkpoint


def pipeline(engine_kind: str, fault: Fault) -> Loop:
    """Create the engines ``pipe0``, ``pipe1`` and ``pipe1-reducer``."""
    grid = PipelineParallelGrid("pipe=2,data=2")
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    module = PipelineModule(layers, grid=grid, loss_fn=lambda outputs, _: outputs.square().mean())
    watched(module, fault)
    config = settings(zero_optimization={"stage": int(engine_kind[4])})
    if engine_kind.endswith("reducer"):
        config["gradient_reducer"] = {}
    fault.may_happen("grid")
    engine, *_ = initialize(model=module, config=config, optimizer=failing_optimizer(fault))

    def samples() -> Any:
        while True:
            yield torch.full((2, WIDTH), 1.0 + grid.get_data_parallel_rank()), torch.zeros(2)

    each = samples()
    return lambda: engine.train_batch(each), lambda: engine.eval_batch(each), engine.save_checkpoint


def alone(engine_kind: str, fault: Fault) -> Loop:
    """Create the jobs ``reducer`` and ``reducer-two-level``, which have no engine."""
    grid = PipelineParallelGrid("data=4")
    model = watched(Model(False), fault)
    reducer = GradientReducer(model, grid=grid, two_level=engine_kind.endswith("two-level"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(2, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).backward()
        reducer.finish()
        optimizer.step()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            dist.all_reduce(model(inputs))
        model.train()

    def save(folder: str) -> None:
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), Path(folder, "model.pt"))
        fault.may_happen("save")
        dist.barrier()

    return step, evaluate, save


def watched(model: Any, fault: Fault) -> Any:
    """Add hooks that cause the fault in forward and backward."""
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    layer.register_forward_pre_hook(lambda module, _: fault.may_happen("forward" if module.training else "evaluation"))
    layer.weight.register_hook(lambda _: fault.may_happen("backward"))
    return model


def failing_optimizer(fault: Fault) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function for ``initialize`` that builds the optimizer, or causes the fault in the construction."""

    def build(parameters: Any) -> torch.optim.Optimizer:
        fault.may_happen("construction")
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    return build


def main() -> None:
    """Train until the fault or the end of the job."""
    engine_kind, kind, phase, victim, limit, timeout = sys.argv[1:7]
    warnings.simplefilter("ignore")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    init_distributed(timeout=float(timeout), watch=float(limit) or None, verbose=False)

    fault = Fault(kind, phase, dist.get_rank() == int(victim))
    fault.may_happen("start")
    build = alone if engine_kind.startswith("reducer") else pipeline if engine_kind.startswith("pipe") else plain
    step, evaluate, save = build(engine_kind, fault)
    register_optimizer_step_pre_hook(lambda *_: fault.may_happen("step"))
    save_file = torch.save

    def failing_save(*arguments: Any, **options: Any) -> None:
        fault.may_happen("save")
        save_file(*arguments, **options)

    torch.save = failing_save
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        folder = folders[0]
        for fault.step in range(STEPS):
            fault.may_happen("between")
            if not fault.skips("skip-step"):
                step()
            if not fault.skips("skip-collective"):
                dist.all_reduce(torch.ones(1))
            if fault.step == BROKEN_STEP:
                evaluate()
                save(folder)
                fault.may_happen("save")  # also on ranks that write no file
    print("trained", flush=True)


if __name__ == "__main__":
    main()
