"""Run a rank of an elastic job: the example, with steps of a known length, and with a plain engine at ZeRO 2 and 3.

``torchrun ... tests/cluster/elastic_rank.py --pace 0.1 ...`` takes the options of the example. A file ``slow-load`` or
``slow-save`` in ``--out`` makes the next rank that loads or writes there wait for 1.5 seconds, so that a test can break
it meanwhile; the rank renames the file to ``slow-load.begun``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import training
from gpt import FIRST_BLOCK, gpt_layers, next_byte_loss
from parallel_layers import Parallel
from text import standard_library
from torch import nn

from ds_topo import initialize

SLOW_SECONDS = 1.5


class PlainModel(nn.Module):
    """The layers of the example without its pipeline, and with an output layer of its own; returns the loss."""

    def __init__(self, layers: list[Any], parallel: Parallel) -> None:
        super().__init__()
        self.first = nn.Sequential(*(layer.build() for layer in layers[:-1]))
        self.last = nn.Linear(self.first[FIRST_BLOCK - 1].weight.shape[1], 256, bias=False)
        self.loss = next_byte_loss(parallel)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a micro-batch."""
        return self.loss(self.last(self.first(inputs)), labels)


def build_plain_engine(arguments: Any, config: dict[str, Any], grid: Any, parallel: Parallel, layers: list[Any]) -> Any:
    """Build an engine without a pipeline, and give it a method ``train_batch``."""
    torch.manual_seed(arguments.seed)
    engine, *_ = initialize(
        model=PlainModel(layers, parallel),
        mpu=grid,
        config=config,
        lr_scheduler=training.cosine_schedule(arguments.steps),
    )

    def train_batch(batches: Iterator[training.Batch]) -> torch.Tensor:
        total = torch.zeros(())
        for inputs, labels in batches:
            loss = engine(inputs, labels)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / engine.gradient_accumulation_steps()
        dist.all_reduce(total, group=grid.get_data_parallel_group())
        return total / grid.get_data_parallel_world_size()

    engine.train_batch = train_batch
    return engine


def slowly(name: str, out: Path, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that waits before it works, once, if there is a file ``slow-<name>``."""

    def waiting(*arguments: Any, **options: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            (out / f"slow-{name}").rename(out / f"slow-{name}.begun")
            time.sleep(SLOW_SECONDS)
        return work(*arguments, **options)

    return waiting


def main() -> None:
    parser = training.argument_parser(__doc__, out="runs/elastic")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that each step waits")
    parser.add_argument("--zero", type=int, default=1, help="stage of ZeRO")
    parser.add_argument("--plain", action="store_true", help="use no pipeline")
    arguments = parser.parse_args()
    step = training.windows

    def paced(*given: Any) -> Any:
        time.sleep(arguments.pace)
        return step(*given)

    training.windows = paced
    torch.save = slowly("save", arguments.out, torch.save)
    training.checkpoint.load = slowly("load", arguments.out, training.checkpoint.load)
    config, grid = training.start(arguments)
    config["zero_optimization"] = {"stage": arguments.zero}
    parallel = Parallel(grid.get_group("model"))
    build = build_plain_engine if arguments.plain else training.build_engine
    engine = build(arguments, config, grid, parallel, gpt_layers(training.model_config(arguments), parallel))
    earlier = training.resume(engine, arguments) if arguments.resume else []
    history = training.train(engine, grid, standard_library(), arguments, earlier)
    if dist.get_rank() == 0:
        training.write_history(history, 0.0, arguments)
    grid.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    with training.print_error_once():
        main()
