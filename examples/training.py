"""The training loop of the examples: samples, steps, validation, checkpoints, progress bar and loss curve."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from attempts import Attempt, describe_restarts, draw_attempts, read_attempts
from gpt import GPTConfig, next_byte_loss
from parallel_layers import Parallel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text import Text, windows
from torch.optim.lr_scheduler import LambdaLR

from ds_topo import PipelineModule, PipelineParallelGrid, checkpoint, init_distributed, initialize
from ds_topo.checkpoint.folder import replace_text
from ds_topo.errors import (
    CheckpointError,
    DisagreementError,
    LaunchError,
    MissingCheckpointError,
    TopologyError,
    WorldSizeError,
)

Batch = tuple[torch.Tensor, torch.Tensor]
DEFAULT_CONFIG = Path(__file__).with_name("train_gpt.json")
VALIDATION_STEPS = 8
HISTORY = "history.json"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Help with an unwrapped description and the default of every option."""


@contextmanager
def print_error_once() -> Iterator[None]:
    """Print a user's error once, on rank 0, instead of a traceback on every rank."""
    try:
        yield
    except (TopologyError, CheckpointError, DisagreementError, LaunchError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def argument_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """Create a parser with the options of every example; ``out`` is the default of ``--out``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=_HelpFormatter)
    parser.add_argument("--topology", help='axes, outermost first, such as "pipe=2,data=-1"; else from the config')
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="DeepSpeed config file")
    parser.add_argument("--steps", type=int, default=300, help="steps to train, including those before --resume")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per step, over all ranks")
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        help="the most sequences of a rank in a forward pass; a step has as many passes as that takes. By default it "
        "has the config's gradient_accumulation_steps",
    )
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--width", type=int, default=128, help="features of a token")
    parser.add_argument("--heads", type=int, default=4, help="attention heads; must divide --width")
    parser.add_argument("--depth", type=int, default=4, help="transformer blocks")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters and samples")
    parser.add_argument("--overlap", action="store_true", help="reduce gradients during backward, and show a report")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for checkpoints, loss curve and history")
    parser.add_argument(
        "--save-every",
        type=int,
        default=0,
        help="steps between checkpoints, which are written in the background; the last is always saved",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="always",
        choices=("auto", "always"),
        help="resume from the newest complete checkpoint in --out; with auto, start from scratch if there is none",
    )
    parser.add_argument("--keep-last", type=int, help="complete checkpoints to keep; all by default")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    return parser


def start(arguments: argparse.Namespace) -> tuple[dict[str, Any], PipelineParallelGrid]:
    """Join the job; return the DeepSpeed config and the grid of the topology."""
    deepspeed.utils.logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    init_distributed(watch=30)
    config = _read_config(arguments.config)
    if arguments.topology:
        config["topology"] = arguments.topology
    try:
        grid = PipelineParallelGrid(config.get("topology"))
    except WorldSizeError as error:
        raise TopologyError(
            f"{error}. With torchrun, --nnodes x --nproc-per-node must be such a number; further hosts that start the "
            "same command wait as spares until one is lost"
        ) from error
    arguments.joined = time.time()
    if grid.topology().get_dim("seq") > 1:
        raise TopologyError(
            f"--topology {grid.topology().spec}: this model does not split sequences; use model or data"
        )
    divide_batch(arguments, config, grid)
    return config, grid


def _read_config(path: Path) -> dict[str, Any]:
    """Return a config; what it leaves out of how to train comes from the default one."""
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TopologyError(f"--config {path}: {error}") from error
    default = json.loads(DEFAULT_CONFIG.read_text())
    training = {name: default[name] for name in ("optimizer", "gradient_clipping", "steps_per_print")}
    return {"gradient_accumulation_steps": 1, **training, **config}


def model_config(arguments: argparse.Namespace) -> GPTConfig:
    """Return the shape of the model from the arguments."""
    if arguments.width % arguments.heads:
        raise TopologyError(f"--heads {arguments.heads} must divide --width {arguments.width}")
    return GPTConfig(arguments.context, arguments.width, arguments.heads, arguments.depth)


def build_engine(
    arguments: argparse.Namespace,
    config: dict[str, Any],
    grid: PipelineParallelGrid,
    parallel: Parallel,
    layers: list[Any],
) -> Any:
    """Create DeepSpeed's pipeline engine for these layers."""
    module = PipelineModule(
        layers,
        grid=grid,
        loss_fn=next_byte_loss(parallel),
        seed_layers=True,
        base_seed=arguments.seed,
        partition_method="parameters",
    )
    config.setdefault("gradient_reducer", arguments.overlap)
    engine, *_ = initialize(
        model=module,
        config=config,
        model_parameters=list(module.parameters()),
        lr_scheduler=None if "scheduler" in config else cosine_schedule(arguments.steps),
    )
    return engine


def cosine_schedule(steps: int) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Warm up linearly over the first twentieth of the steps, then follow a half cosine down to a tenth."""
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        progress = (step - warmup) / max(1, steps - warmup)
        return (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    return lambda optimizer: LambdaLR(optimizer, factor)


def divide_batch(arguments: argparse.Namespace, config: dict[str, Any], grid: PipelineParallelGrid) -> None:
    """Divide the sequences of a step among the replicas that there are, and into micro-batches.

    A step has the same sequences at any number of replicas. With ``--micro-batch-size``, a rank of fewer replicas
    takes more micro-batches, and not more memory.
    """
    try:
        config |= grid.batch_sizes(
            arguments.batch_size, arguments.micro_batch_size, accumulation=config["gradient_accumulation_steps"]
        )
    except ValueError as error:
        raise TopologyError(f"--batch-size {arguments.batch_size}: {error}") from error


def micro_batches(
    text: torch.Tensor, engine: Any, grid: PipelineParallelGrid, arguments: argparse.Namespace, step: int, seed: int
) -> Iterator[Batch]:
    """Yield this rank's micro-batches of a step; ranks that differ only in pipe, model or seq get the same."""
    per_rank = arguments.batch_size // grid.get_sample_world_size()
    first = grid.get_sample_rank() * per_rank
    inputs, labels = windows(text, arguments.context, step, range(first, first + per_rank), seed)
    size = engine.train_micro_batch_size_per_gpu()
    yield from zip(inputs.split(size), labels.split(size), strict=True)


def train(
    engine: Any,
    grid: PipelineParallelGrid,
    text: Text,
    arguments: argparse.Namespace,
    earlier: list[dict[str, float]],
) -> list[dict[str, float]]:
    """Run the remaining steps; return step, loss and tokens per second of all steps, including the ``earlier`` ones."""
    history = list(earlier)
    first_step = int(history[-1]["step"]) if history else 0
    attempt = start_attempt(engine, grid, arguments, first_step)
    saving: checkpoint.BackgroundSave | None = None
    with progress_bar(grid) as bar, noticing_termination() as signals:
        known = f"loss {history[-1]['loss']:.3f}" if history else "first step"
        task = bar and bar.add_task("training", total=arguments.steps, completed=first_step, known=known)
        for step in range(first_step, arguments.steps):
            started = time.perf_counter()
            loss = engine.train_batch(micro_batches(text.train, engine, grid, arguments, step, arguments.seed))
            speed = arguments.batch_size * arguments.context / (time.perf_counter() - started)
            history.append({"step": step + 1, "loss": float(loss), "tokens_per_second": speed})
            attempt.add_step(step + 1, float(loss))
            if bar and task is not None:
                bar.update(task, advance=1, known=f"loss {float(loss):.3f}  {speed:,.0f} tokens/s")
            is_last = step + 1 == arguments.steps
            is_terminated, is_unwritten = on_any_rank(engine, bool(signals), saving is None or not saving.is_written)
            if saving is not None and not is_unwritten:
                saving.finish()
                saving = None
            if is_last or is_terminated:
                save(engine, arguments, history)
            elif arguments.save_every and (step + 1) % arguments.save_every == 0:
                saving = save(engine, arguments, history, in_background=True)
            if is_terminated:
                if grid.global_rank == 0:
                    print(f"SIGTERM: saved step {step + 1}; --resume continues from there", file=sys.stderr)
                raise SystemExit(128 + signal.SIGTERM)
    attempt.end()
    if grid.global_rank == 0 and (sentence := describe_restarts(arguments.out)):
        print(sentence)
    if engine.gradient_reducer is not None and grid.global_rank == 0:
        print(engine.gradient_reducer.report())
    return history


def validate(engine: Any, grid: PipelineParallelGrid, text: Text, arguments: argparse.Namespace) -> float:
    """Return the mean loss in nats per byte over windows of validation files."""
    losses = [
        float(engine.eval_batch(micro_batches(text.validation, engine, grid, arguments, step, seed=arguments.seed + 1)))
        for step in range(VALIDATION_STEPS)
    ]
    return sum(losses) / len(losses)


def start_attempt(engine: Any, grid: PipelineParallelGrid, arguments: argparse.Namespace, first_step: int) -> Attempt:
    """Begin the record of this attempt; after a restart, rank 0 says what remains and where it continues."""
    what = (
        f"{grid.topology().spec} on {grid.world_size} ranks, {engine.train_micro_batch_size_per_gpu()} sequences x "
        f"{engine.gradient_accumulation_steps()} micro-batches per rank"
    )
    if first_step and grid.global_rank == 0:
        print(f"continuing from step {first_step} with {what}", file=sys.stderr)
    return Attempt(
        arguments.out,
        joined=arguments.joined,
        step=first_step,
        what=what,
        continues=bool(arguments.resume),
        writes=grid.global_rank == 0,
    )


@contextmanager
def noticing_termination() -> Iterator[list[int]]:
    """Collect SIGTERM instead of ending at once, so that the step can end and be saved.

    Launchers send it before they take a host away, and torchrun when a host joins the job. They wait 30 seconds.
    """
    signals: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, former)
    if signals:  # it came after the last step had ended
        raise SystemExit(128 + signal.SIGTERM)


def on_any_rank(engine: Any, *flags: bool) -> list[bool]:
    """Tell which flags are set on any rank; collective over all of them."""
    numbers = torch.tensor(flags, dtype=torch.int32, device=engine.device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return [bool(number) for number in numbers.tolist()]


def save(
    engine: Any, arguments: argparse.Namespace, history: list[dict[str, float]], in_background: bool = False
) -> Any:
    """Save a checkpoint atomically, with the history of all steps so far."""
    step = int(history[-1]["step"])
    state = {"step": step, "history": list(history)}
    write = checkpoint.save_in_background if in_background else checkpoint.save
    return write(engine, arguments.out, f"global_step{step}", state, keep_last=arguments.keep_last)


def resume(engine: Any, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Load the newest complete checkpoint; return the history of its steps.

    With ``--resume auto`` and without a checkpoint the history is empty.
    """
    try:
        _, state = checkpoint.load(engine, arguments.out, verify="digests")
    except MissingCheckpointError:
        if arguments.resume == "auto":
            return []
        raise
    if state["step"] >= arguments.steps and engine.global_rank == 0:
        print(f"nothing to train: the checkpoint has {state['step']} steps, and --steps is {arguments.steps}")
    history: list[dict[str, float]] = state["history"]
    return history


def progress_bar(grid: PipelineParallelGrid) -> Any:
    """Create a progress bar on rank 0; other ranks have none."""
    if grid.global_rank != 0:
        return nullcontext()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[known]}"),
        TimeRemainingColumn(),
    )


def write_history(
    history: list[dict[str, float]], validation_loss: float, arguments: argparse.Namespace, **more: Any
) -> None:
    """Write losses and ``more`` as JSON and, if matplotlib is installed, a plot of the losses."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"validation_loss": validation_loss, "history": history, **more}
    replace_text(arguments.out / HISTORY, json.dumps(record))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('no loss curve: install matplotlib, with pip install -e ".[plot]" in a checkout')
        return
    has_restarts = len(read_attempts(arguments.out)) > 1
    figure = Figure(figsize=(7, 7 if has_restarts else 4), layout="constrained")
    axes = figure.add_subplot(2 if has_restarts else 1, 1, 1)
    axes.set(xlabel="step", ylabel="nats per byte", title="GPT on Python's standard library")
    axes.plot([row["step"] for row in history], [row["loss"] for row in history], label="training")
    axes.axhline(validation_loss, color="tab:orange", linestyle="--", label=f"validation {validation_loss:.3f}")
    axes.grid(alpha=0.3)
    axes.legend()
    if has_restarts:
        draw_attempts(figure.add_subplot(2, 1, 2), arguments.out)
    figure.savefig(arguments.out / "loss.png", dpi=120)
    print(f"loss curve: {arguments.out / 'loss.png'}")
