"""Train a byte-level GPT on the sources of Python's standard library, on any topology.

    torchrun --nproc-per-node 4 examples/train_gpt.py --topology "pipe=2,data=2"
    deepspeed --num_gpus 4 examples/train_gpt.py --topology "data=2,pipe=2"

Axes are named outermost first: with ``pipe=2,data=2`` the data-parallel peers are adjacent ranks.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from gpt import gpt_layers
from parallel_layers import Parallel
from text import Text, standard_library
from training import (
    argument_parser,
    build_engine,
    model_config,
    print_error_once,
    resume,
    start,
    train,
    validate,
    write_history,
)

from ds_topo import PipelineParallelGrid
from ds_topo.collectives import gather


def main() -> None:
    parser = argument_parser(__doc__, out="runs/gpt")
    parser.add_argument("--sequence-parallel", action="store_true", help="also split activations along the sequence")
    parser.add_argument("--continuation", type=int, default=200, help="bytes that the model generates at the end")
    arguments = parser.parse_args()
    config, grid = start(arguments)
    text = standard_library()
    parallel = Parallel(grid.get_group("model"), arguments.sequence_parallel)
    if arguments.sequence_parallel:  # DeepSpeed would split activations that are already split
        config.setdefault("pipeline", {}).update(pipe_partitioned=False, grad_partitioned=False)
    engine = build_engine(arguments, config, grid, parallel, gpt_layers(model_config(arguments), parallel))

    earlier = resume(engine, arguments) if arguments.resume else []
    history = train(engine, grid, text, arguments, earlier)
    loss = validate(engine, grid, text, arguments)
    sample = continuation(engine, grid, text, arguments)
    if dist.get_rank() == 0:
        print(f"validation loss {loss:.4f} nats per byte after {len(history)} steps on {grid.topology().spec}")
        print(f"--- continuation, the prompt ends at the bar ---\n{sample}\n---")
        write_history(history, loss, arguments)
    grid.destroy()
    dist.destroy_process_group()


def continuation(engine: Any, grid: PipelineParallelGrid, text: Text, arguments: argparse.Namespace) -> str:
    """Continue a validation file with the model. Every rank calls this; the last stage draws the bytes."""
    prompt = text.validation[: arguments.context // 2].long()
    written = prompt.expand(engine.train_micro_batch_size_per_gpu(), -1).to(engine.device)
    generator = torch.Generator(device=engine.device).manual_seed(arguments.seed)
    for _ in range(arguments.continuation):
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


if __name__ == "__main__":
    with print_error_once():
        main()
