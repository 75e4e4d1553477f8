"""Print the modules of ds_topo that one step of a job loads: ``python -m tests.reach [kind ...]``.

Each kind of job runs from the import of ``ds_topo`` to the end of its first step, on one rank or ``--ranks 2``, each of
which is a process of its own; rank 0 reports. ``--files`` also lists the modules, and ``--trace`` those of which a
function runs between ``initialize`` and the step.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("data=1", {}),
    "reducer": ("data=1", {"gradient_reducer": True}),
    "pipeline": ("pipe=1,data=1", {}),
    "ZeRO 1 with reducer": ("data=1", {"zero_optimization": {"stage": 1}, "gradient_reducer": True}),
    "ZeRO 3": ("data=1", {"zero_optimization": {"stage": 3}}),
    "experts": ("data=1", {}),
    "shard": ("data=1,shard=1", {"zero_optimization": {"stage": 1}}),
    "AutoTP": ("data=1,model=1", {"tensor_parallel": {"autotp_size": 1}}),
}
"""The layout and the config of each kind of job. With more ranks, ``data`` is their number."""


def train(kind: str) -> None:
    """Train one step in this process, and write the modules that are loaded as JSON."""
    import torch
    from torch import nn

    import ds_topo

    spec, more = KINDS[kind]
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    launch = ds_topo.init_distributed(verbose=False)
    grid = ds_topo.PipelineParallelGrid(spec.replace("data=1", f"data={launch.world_size}"))
    called: set[str] = set()
    if kind == "pipeline":
        layers = ds_topo.PipelineModule([nn.Linear(4, 4)], grid=grid, loss_fn=nn.functional.mse_loss)
        engine, *_ = ds_topo.initialize(model=layers, config=config)
        engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))]))
    else:
        model: Any = nn.Sequential(nn.Linear(4, 4))
        if kind == "experts":
            from deepspeed.moe.layer import MoE

            ds_topo.groups.create_expert_groups(grid, 1)
            model = _Mixture(MoE(4, nn.Linear(4, 4), num_experts=1, min_capacity=0))
        sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_filename) if event == "call" else None)
        engine, *_ = ds_topo.initialize(model=model, mpu=grid, config=config)
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        sys.setprofile(None)
    modules = {name: str(each.__file__) for name, each in sys.modules.items() if name.split(".")[0] == "ds_topo"}
    json.dump({"modules": modules, "called": sorted(called & set(modules.values()))}, sys.stdout)


def _Mixture(experts: Any) -> Any:
    from torch import nn

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, hidden: Any) -> Any:
            return self.experts(hidden)[0]

    return Mixture()


def reach_of(kind: str, ranks: int = 1) -> tuple[dict[str, int], list[str]]:
    """Return the modules that a kind of job loads, each with its lines, and the files of which a function ran."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-c", f"from tests.reach import train; train({kind!r})"]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if rank else subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    output, errors = started[0].communicate()
    others = [each.communicate()[0] for each in started[1:]]
    if any(each.returncode for each in started):
        raise RuntimeError(f"{kind}: {errors[-2000:]} {''.join(others)[-2000:]}")
    found = json.loads(output[output.rindex('{"modules"') :])
    lines = {name: Path(file).read_text(encoding="utf-8").count("\n") for name, file in found["modules"].items()}
    return lines, found["called"]


def main() -> None:
    """Print a row for each kind of job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help=", ".join(KINDS))
    parser.add_argument("--ranks", type=int, default=1, help="the number of ranks")
    parser.add_argument("--files", action="store_true", help="list the modules")
    parser.add_argument("--trace", action="store_true", help="list the files that run")
    given = parser.parse_args()
    for kind in given.kinds or KINDS:
        modules, called = reach_of(kind, given.ranks)
        print(f"{kind}: {len(modules)} files, {sum(modules.values())} lines; {len(called)} run in the first step")
        for name, lines in sorted(modules.items()) if given.files else ():
            print(f"  {lines:5} {name}")
        for file in called if given.trace else ():
            print(f"  {file}")


if __name__ == "__main__":
    main()
