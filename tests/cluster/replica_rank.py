"""Run a rank of one replica: train a small model, and record each committed step.

    torchrun --standalone --nproc-per-node 2 tests/cluster/replica_rank.py --out FOLDER --spec shard=2 --zero 1

A replica's name is that of its host. A file ``die-<phase>-<host>`` in ``--out`` makes the last rank there kill itself
in that phase of a step, so that a test can break a replica at any time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ds_topo
from ds_topo import PipelineParallelGrid
from ds_topo.errors import MissingCheckpointError

WIDTH, SAMPLES, CHUNK = 16, 96, 8
"""The width of the model, the number of samples, and those of a replica in each step."""
ADAM = {"lr": 3e-3, "eps": 1e-2, "weight_decay": 0.1}
"""With a small eps, rounding in one step would be a thousand times larger some thousand steps later."""
PHASES = ("forward", "backward", "sum", "commit", "committed", "step", "state", "healing", "save")


def samples() -> torch.Tensor:
    """Return all samples."""
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))


def layers() -> list[nn.Module]:
    """Return the layers of the model, always with the same values."""
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, WIDTH)]


def loss_of(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the loss of some samples."""
    return (outputs - inputs.roll(1, -1)).square().mean()


def config_of(arguments: argparse.Namespace, shares: int) -> dict[str, Any]:
    """Return the config; ``shares`` is the number of ranks of a replica that read different samples."""
    return {
        "train_micro_batch_size_per_gpu": CHUNK // shares // arguments.accumulate,
        "gradient_accumulation_steps": arguments.accumulate,
        "optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": arguments.zero, "stage3_param_persistence_threshold": 0},
        "replicas": {"min_replica_size": arguments.least, "timeout": arguments.timeout, "quorum_timeout": 60},
        **json.loads(arguments.config),
    }


def digest_of(engine: Any) -> str:
    """Return a digest of this rank's weights, master weights, optimizer states and buffers."""
    if engine.gradient_reducer is not None:
        engine.gradient_reducer.driver.wait_for_parameters()
    found = hashlib.sha256()
    for name, tensor in sorted(engine.replicas.tensors().items()):
        bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
        found.update(name.encode() + bits.numpy().tobytes())
    return found.hexdigest()[:16]


def is_last(out: Path, step: int) -> bool:
    """Tell whether a step is the last: the test writes its number into the file ``stop``."""
    file = out / "stop"
    return file.exists() and step >= int(file.read_text() or "0")


class Killer:
    """Kills this rank in a phase of a step that a test has asked for."""

    def __init__(self, out: Path, rank: int) -> None:
        self._files = {phase: out / f"die-{phase}-{socket.gethostname()}" for phase in PHASES}
        self._is_last = rank == 1

    def __call__(self, phase: str, *_: object) -> None:
        """Die, if this is the phase."""
        if self._is_last and self._files[phase].exists():
            self._files[phase].unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, target: Any, name: str, before: str = "", after: str = "") -> None:
        """Let a method of an object be phases."""
        method: Callable[..., Any] = getattr(target, name)

        def called(*arguments: Any, **options: Any) -> Any:
            if before:
                self(before)
            result = method(*arguments, **options)
            if after:
                self(after)
            return result

        setattr(target, name, called)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--spec", default="shard=2")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=4.0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of each step")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--config", default="{}", help="more sections of the config")
    arguments = parser.parse_args()
    launch = ds_topo.init_distributed(verbose=False)
    grid = PipelineParallelGrid(arguments.spec)
    config = config_of(arguments, grid.get_sample_world_size())
    is_pipeline = "pipe" in arguments.spec
    if is_pipeline:
        model: Any = ds_topo.PipelineModule(layers(), grid=grid, loss_fn=loss_of, partition_method="uniform")
        engine, *_ = ds_topo.initialize(model=model, config=config)
    else:
        engine, *_ = ds_topo.initialize(model=nn.Sequential(*layers()), mpu=grid, config=config)
    replicas, die = engine.replicas, Killer(arguments.out, launch.rank)
    engine.module.register_forward_pre_hook(lambda *_: die("forward"))
    die.around(replicas.manager, "allreduce", after="sum")
    die.around(replicas.manager, "should_commit", before="commit", after="committed")
    die.around(engine.optimizer, "step", before="step")
    die.around(replicas.manager, "_apply_pending_state_dict", before="healing")
    die.around(replicas.manager, "_manager_state_dict", before="state")
    saved = arguments.out / "checkpoints"
    if arguments.save_every:
        with suppress(MissingCheckpointError):
            ds_topo.checkpoint.load(engine, saved)
    loader = replicas.data_loader(samples(), seed=7)
    record = arguments.out / f"{socket.gethostname()}-rank{launch.rank}.jsonl"
    batches = iter((batch, batch) for batch in loader) if is_pipeline else iter(loader)
    while not is_last(arguments.out, engine.global_steps):
        if is_pipeline:
            loss = engine.train_batch(batches)
        else:
            loss = torch.zeros(())
            for _ in range(arguments.accumulate):
                batch = next(batches)
                part = loss_of(engine(batch), batch)
                part.register_hook(lambda _: die("backward"))
                engine.backward(part)
                engine.step()
                loss += part.detach() / arguments.accumulate
        if engine.was_step_applied() or replicas.has_committed:
            row = {
                "step": engine.global_steps,
                "process": f"{socket.gethostname()}-{os.getpid()}",
                "batches": replicas.manager.batches_committed(),
                "place": replicas.rank,
                "whole": grid.get_sample_world_size() == 1,
                "loss": float(loss),
                "norm": float(engine.get_global_grad_norm() or 0),
                "digest": digest_of(engine),
                "time": time.time(),
            }
            with record.open("a") as file:
                file.write(json.dumps(row) + "\n")
            is_due = arguments.save_every and engine.global_steps % arguments.save_every == 0
            if is_due and replicas.writes_checkpoints:
                die("save")
                ds_topo.checkpoint.save(engine, saved, keep_last=2)
        time.sleep(arguments.pace)
    engine.destroy()


if __name__ == "__main__":
    main()
