"""Print the modules of ds_topo that one step of a job loads: ``python -m tests.reach [kind ...]``.

Each kind of job runs from the import of ``ds_topo`` to the end of its first step, on one rank or ``--ranks 2``, each of
which is a process of its own; rank 0 reports. ``--files`` also lists the modules, and ``--trace`` those of which a
function runs from ``initialize`` to the all-reduce of the first gradients, without what the engine's parts call.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
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
    "Trainer": ("data=1", {"zero_optimization": {"stage": 1}}),
}
"""The layout and the config of each kind of job. With more ranks, ``data`` is their number."""


class Refused(MetaPathFinder):
    """Refuses to import modules, as if their files were deleted."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)

    def find_spec(self, fullname: str, *_: object) -> None:
        if any(fullname == each or fullname.startswith(f"{each}.") for each in self._modules):
            raise ModuleNotFoundError(f"{fullname} is refused")


def train(kind: str, refused: Sequence[str] = ()) -> None:
    """Train one step in this process, and write the modules that are loaded as JSON.

    Args:
        kind: the kind of job.
        refused: modules and packages that cannot be imported.
    """
    sys.meta_path.insert(0, Refused(refused))
    import torch
    from torch import nn

    import ds_topo

    spec, more = KINDS[kind]
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    launch = ds_topo.init_distributed(verbose=False)
    grid = ds_topo.PipelineParallelGrid(spec.replace("data=1", f"data={launch.world_size}"))
    called: set[tuple[str, ...]] = set()
    initialize = ds_topo.initialize
    if kind == "Trainer":
        _train_by_transformers(grid, config)
    elif kind == "pipeline":
        layers = ds_topo.PipelineModule([nn.Linear(4, 4)], grid=grid, loss_fn=nn.functional.mse_loss)
        engine, *_ = initialize(model=layers, config=config)
        engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))]))
    else:
        model: Any = nn.Sequential(nn.Linear(4, 4))
        if kind == "experts":
            from deepspeed.moe.layer import MoE

            ds_topo.groups.create_expert_groups(grid, 1)
            model = _Mixture(MoE(4, nn.Linear(4, 4), num_experts=1, min_capacity=0))
        sys.setprofile(partial(_note, called))
        engine, *_ = initialize(model=model, mpu=grid, config=config)
        engine.backward(engine(torch.ones(2, 4)).sum())
        sys.setprofile(None)
        engine.step()
    from ds_topo.engine.parts import PARTS

    modules = {name: str(each.__file__) for name, each in sys.modules.items() if name.split(".")[0] == "ds_topo"}
    of_parts = {modules[part.where] for part in PARTS if part.where in modules} - {modules["ds_topo.engine.on_grid"]}
    ran = {files[0] for files in called if not of_parts.intersection(files)}
    json.dump({"modules": modules, "called": sorted(ran & set(modules.values()))}, sys.stdout)


def _note(called: set[tuple[str, ...]], frame: Any, event: str, _: Any) -> None:
    """Note the file of a function that runs, and those of its callers up to one of another package.

    Importing a module is no call.
    """
    if event == "call" and frame.f_code.co_name != "<module>" and "ds_topo" in frame.f_code.co_filename:
        files = []
        while frame is not None and "ds_topo" in frame.f_code.co_filename:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        called.add(tuple(files))


def _train_by_transformers(grid: Any, config: dict[str, Any]) -> None:
    from tempfile import TemporaryDirectory

    import torch
    from torch import nn
    from transformers import Trainer, TrainingArguments

    import ds_topo

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(inputs).sum()}

    samples = [{"inputs": torch.full((4,), float(number))} for number in range(2 * grid.world_size)]
    with ds_topo.use(grid), TemporaryDirectory() as folder:
        more: Any = {
            "deepspeed": config,
            "per_device_train_batch_size": 2,
            "learning_rate": 0.1,
            "max_steps": 1,
            "report_to": "none",
        }
        arguments = TrainingArguments(folder, save_strategy="no", use_cpu=True, disable_tqdm=True, **more)
        Trainer(Model(), arguments, train_dataset=samples).train()  # type: ignore[arg-type]


def _Mixture(experts: Any) -> Any:
    from torch import nn

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, hidden: Any) -> Any:
            return self.experts(hidden)[0]

    return Mixture()


def reach_of(kind: str, ranks: int = 1, refused: Sequence[str] = ()) -> tuple[dict[str, int], list[str]]:
    """Return the modules that a kind of job loads, each with its lines, and the files that run without parts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-c", f"from tests.reach import train; train({kind!r}, {refused!r})"]
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
        print(f"{kind}: {len(modules)} files, {sum(modules.values())} lines; {len(called)} without parts run")
        for name, lines in sorted(modules.items()) if given.files else ():
            print(f"  {lines:5} {name}")
        for file in called if given.trace else ():
            print(f"  {file}")


if __name__ == "__main__":
    main()
