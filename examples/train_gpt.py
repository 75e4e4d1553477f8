"""Train a byte-level GPT on the sources of Python's standard library, on any topology.

    torchrun --nproc-per-node 4 examples/train_gpt.py --topology "pipe=2,data=2"
    deepspeed --num_gpus 4 examples/train_gpt.py --topology "data=2,pipe=2"

Axes are named outermost first: with ``pipe=2,data=2`` the data-parallel peers are adjacent ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from gpt import GPTConfig, gpt_layers, next_byte_loss
from parallel_layers import Parallel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text import Text, standard_library, windows
from torch.optim.lr_scheduler import LambdaLR

from ds_topo import PipelineModule, PipelineParallelGrid
from ds_topo.collectives import gather

Batch = tuple[torch.Tensor, torch.Tensor]
DEFAULT_CONFIG = Path(__file__).with_name("train_gpt.json")
VALIDATION_STEPS = 8


def main() -> None:
    arguments = parse_arguments()
    deepspeed.utils.logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed.init_distributed(verbose=False)
    config: dict[str, Any] = json.loads(arguments.config.read_text())
    text = standard_library()

    grid = PipelineParallelGrid(arguments.topology or config.get("topology"))
    parallel = Parallel(grid.get_group("model"), arguments.sequence_parallel)
    module = PipelineModule(
        gpt_layers(GPTConfig(arguments.context, arguments.width, arguments.heads, arguments.depth), parallel),
        grid=grid,
        loss_fn=next_byte_loss(parallel),
        seed_layers=True,
        base_seed=arguments.seed,
        partition_method="parameters",
    )
    if arguments.sequence_parallel:  # DeepSpeed would split activations that are already split
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    config["train_micro_batch_size_per_gpu"] = micro_batch_size(arguments, config, grid)
    engine, *_ = deepspeed.initialize(
        model=module,
        config=config,
        model_parameters=module.parameters(),
        lr_scheduler=None if "scheduler" in config else cosine_schedule(arguments.steps),
    )

    first_step = resume(engine, arguments) if arguments.resume else 0
    history = train(engine, grid, text, arguments, first_step)
    loss = validate(engine, grid, text, arguments)
    sample = continuation(engine, grid, text, arguments)
    if dist.get_rank() == 0:
        print(f"validation loss {loss:.4f} nats per byte after {arguments.steps} steps on {grid.topology().spec}")
        print(f"--- continuation, the prompt ends at the bar ---\n{sample}\n---")
        write_history(history, loss, arguments)
    grid.destroy()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", help='axes, outermost first, such as "pipe=2,data=-1"; else from the config')
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="DeepSpeed config file")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per step, over all ranks")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--sequence-parallel", action="store_true", help="split activations along the sequence, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder of checkpoints, curve and history")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; the last is always saved")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    return parser.parse_args()


def cosine_schedule(steps: int) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Linear warm-up over the first twentieth of the steps, then a half cosine down to a tenth."""
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        progress = (step - warmup) / max(1, steps - warmup)
        return (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    return lambda optimizer: LambdaLR(optimizer, factor)


def micro_batch_size(arguments: argparse.Namespace, config: dict[str, Any], grid: PipelineParallelGrid) -> int:
    """Sequences that one rank takes at a time."""
    pieces = grid.get_sample_world_size() * config["gradient_accumulation_steps"]
    if arguments.batch_size % pieces:
        raise SystemExit(
            f"--batch-size {arguments.batch_size} must be a multiple of {pieces}: {grid.get_sample_world_size()} ranks "
            f"with samples of their own x {config['gradient_accumulation_steps']} micro-batches"
        )
    return int(arguments.batch_size // pieces)


def micro_batches(
    text: torch.Tensor, engine: Any, grid: PipelineParallelGrid, arguments: argparse.Namespace, step: int, seed: int
) -> Iterator[Batch]:
    """This rank's micro-batches of one step; ranks that differ in pipe, model or seq alone get the same."""
    per_rank = arguments.batch_size // grid.get_sample_world_size()
    first = grid.get_sample_rank() * per_rank
    inputs, labels = windows(text, arguments.context, step, range(first, first + per_rank), seed)
    size = engine.train_micro_batch_size_per_gpu()
    yield from zip(inputs.split(size), labels.split(size), strict=True)


def train(
    engine: Any, grid: PipelineParallelGrid, text: Text, arguments: argparse.Namespace, first_step: int
) -> list[dict[str, float]]:
    """Run the remaining steps; return step, loss and tokens per second of each."""
    history: list[dict[str, float]] = []
    with progress_bar(grid) as bar:
        task = bar and bar.add_task("training", total=arguments.steps, completed=first_step, loss=0.0, speed=0.0)
        for step in range(first_step, arguments.steps):
            started = time.perf_counter()
            loss = engine.train_batch(micro_batches(text.train, engine, grid, arguments, step, arguments.seed))
            speed = arguments.batch_size * arguments.context / (time.perf_counter() - started)
            history.append({"step": step + 1, "loss": float(loss), "tokens_per_second": speed})
            if bar and task is not None:
                bar.update(task, advance=1, loss=float(loss), speed=speed)
            is_last = step + 1 == arguments.steps
            if is_last or (arguments.save_every and (step + 1) % arguments.save_every == 0):
                engine.save_checkpoint(str(arguments.out), client_state={"step": step + 1})
    return history


def validate(engine: Any, grid: PipelineParallelGrid, text: Text, arguments: argparse.Namespace) -> float:
    """Mean loss, nats per byte, over windows of files that were not trained on."""
    losses = [
        float(engine.eval_batch(micro_batches(text.validation, engine, grid, arguments, step, seed=arguments.seed + 1)))
        for step in range(VALIDATION_STEPS)
    ]
    return sum(losses) / len(losses)


def continuation(
    engine: Any, grid: PipelineParallelGrid, text: Text, arguments: argparse.Namespace, length: int = 200
) -> str:
    """Let the model write on from a validation file; every rank takes part, and the last stage draws the bytes."""
    prompt = text.validation[: arguments.context // 2].long()
    written = prompt.expand(engine.train_micro_batch_size_per_gpu(), -1).to(engine.device)
    generator = torch.Generator(device=engine.device).manual_seed(arguments.seed)
    for _ in range(length):
        seen = written[:, -arguments.context :]
        padded = torch.nn.functional.pad(seen, (0, arguments.context - seen.shape[1]))
        _, logits = engine.eval_batch(iter([(padded, padded)]), return_logits=True, num_micro_batches=1)
        drawn = torch.zeros_like(written[:, :1])
        if grid.is_last_stage:
            scores = gather(logits[:, seen.shape[1] - 1].float(), grid.get_group("model")) / 0.7
            drawn = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        dist.broadcast(
            drawn, src=grid.get_pipeline_model_parallel_last_rank(), group=grid.get_pipeline_model_parallel_group()
        )
        written = torch.cat([written, drawn], dim=1)
    before, after = bytes(written[0, : len(prompt)].tolist()), bytes(written[0, len(prompt) :].tolist())
    return f"{before.decode(errors='replace')}|{after.decode(errors='replace')}"


def resume(engine: Any, arguments: argparse.Namespace) -> int:
    """Load the newest checkpoint; return the number of steps that it has behind it."""
    path, state = engine.load_checkpoint(str(arguments.out))
    if path is None:
        raise SystemExit(f"--resume: no checkpoint in {arguments.out}")
    return int(state["step"])


def progress_bar(grid: PipelineParallelGrid) -> Any:
    """A bar on rank 0, nothing elsewhere."""
    if grid.global_rank != 0:
        return nullcontext()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )


def write_history(history: list[dict[str, float]], validation_loss: float, arguments: argparse.Namespace) -> None:
    """Keep the losses as JSON and, where matplotlib is installed, as a picture."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"validation_loss": validation_loss, "history": history}
    (arguments.out / "history.json").write_text(json.dumps(record))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('no loss curve: install matplotlib with pip install "ds_topo[plot]"')
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="nats per byte", title="GPT on Python's standard library")
    axes.plot([row["step"] for row in history], [row["loss"] for row in history], label="training")
    axes.axhline(validation_loss, color="tab:orange", linestyle="--", label=f"validation {validation_loss:.3f}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(arguments.out / "loss.png", dpi=120)
    print(f"loss curve: {arguments.out / 'loss.png'}")


if __name__ == "__main__":
    main()
