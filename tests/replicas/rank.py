"""A rank of one replica: train a small model, and record each committed step and the weights at the end.

    python -m tests.replicas.rank --out FOLDER --spec shard=2 --zero 1 --steps 20

The launcher's variables, ``TORCHFT_LIGHTHOUSE`` and ``REPLICA`` come from the environment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ds_topo
from ds_topo import PipelineParallelGrid

WIDTH, SAMPLES, CHUNK = 16, 96, 4
"""The width of the model, the number of samples, and those of a replica in each step."""


def samples() -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, WIDTH)]


def loss_of(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return (outputs - inputs.roll(1, -1)).square().mean()


def config_of(arguments: argparse.Namespace, replicas: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": CHUNK // replicas // arguments.accumulate,
        "gradient_accumulation_steps": arguments.accumulate,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": arguments.zero, "stage3_param_persistence_threshold": 0},
        "replicas": {"min_replica_size": arguments.least, "timeout": arguments.timeout, "quorum_timeout": 60},
        **json.loads(arguments.config),
    }


def digest_of(engine: Any) -> str:
    """Return a digest of this rank's weights, master weights and optimizer states."""
    if engine.gradient_reducer is not None:
        engine.gradient_reducer.driver.wait_for_parameters()
    found = hashlib.sha256()
    for name, tensor in sorted(engine.replicas._tensors().items()):
        found.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--spec", default="shard=2")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of each step")
    parser.add_argument("--config", default="{}", help="more sections of the config")
    arguments = parser.parse_args()
    launch = ds_topo.init_distributed(verbose=False)
    grid = PipelineParallelGrid(arguments.spec)
    config = config_of(arguments, grid.get_sample_world_size())
    is_pipeline = "pipe" in arguments.spec
    model: Any = nn.Sequential(*layers())
    if is_pipeline:
        model = ds_topo.PipelineModule(layers(), grid=grid, loss_fn=loss_of, partition_method="uniform")
        engine, *_ = ds_topo.initialize(model=model, config=config)
    else:
        engine, *_ = ds_topo.initialize(model=model, mpu=grid, config=config)
    data = samples()
    loader = engine.replicas.data_loader(data, seed=7)
    record = arguments.out / f"replica{os.environ['REPLICA']}-rank{launch.rank}.jsonl"
    batches = iter((batch, batch) for batch in loader) if is_pipeline else iter(loader)
    while engine.global_steps < arguments.steps:
        if is_pipeline:
            loss = engine.train_batch(batches)
        else:
            for _ in range(arguments.accumulate):
                batch = next(batches)
                loss = loss_of(engine(batch), batch)
                engine.backward(loss)
                engine.step()
        replicas = engine.replicas
        if replicas.has_committed:
            row = {
                "step": engine.global_steps,
                "batches": replicas.manager.batches_committed(),
                "size": replicas.size,
                "place": replicas.rank,
                "loss": float(loss),
                "norm": float(engine.get_global_grad_norm() or 0),
                "digest": digest_of(engine),
                "time": time.time(),
            }
            with record.open("a") as file:
                file.write(json.dumps(row) + "\n")
        time.sleep(arguments.pace)
    engine.destroy()


if __name__ == "__main__":
    main()
