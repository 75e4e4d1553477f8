"""Train a GPT with mixtures of experts on the sources of Python's standard library, on any topology.

    torchrun --nproc-per-node 4 examples/train_moe.py --topology "pipe=2,data=2" --experts 4 --expert-parallel 2

Every block has a mixture in place of its feed-forward layer. The experts of a layer are distributed over
``--expert-parallel`` ranks. At the end the program prints the share of the validation tokens for each expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpt import FIRST_BLOCK, Block, gpt_layers
from mixture import Mixture
from parallel_layers import Parallel
from text import standard_library
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
from ds_topo.groups import create_expert_groups


def main() -> None:
    parser = argument_parser(__doc__, out="runs/moe")
    parser.add_argument("--experts", type=int, default=4, help="experts in each block")
    parser.add_argument(
        "--expert-parallel", type=int, default=2, help="ranks over which the experts of a block are distributed"
    )
    parser.add_argument("--expert-tensor-parallel", action="store_true", help="split each expert along the model axis")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the loss that balances the load")
    arguments = parser.parse_args()
    config, grid = start(arguments)
    if config.get("fp16", {}).get("enabled"):
        raise SystemExit("fp16 would scale the loss but not the experts' own loss: use bf16 or fp32")
    text = standard_library()
    parallel = Parallel(grid.get_group("model"))
    groups = create_expert_groups(grid, arguments.expert_parallel, arguments.expert_tensor_parallel)
    balance = arguments.balance / config["gradient_accumulation_steps"]
    mixture = partial(Mixture, groups=groups, experts=arguments.experts, balance=balance)
    engine = build_engine(arguments, config, grid, parallel, gpt_layers(model_config(arguments), parallel, mixture))

    earlier = resume(engine, arguments) if arguments.resume else []
    history = train(engine, grid, text, arguments, earlier)
    loss = validate(engine, grid, text, arguments)
    load = expert_load(engine, grid, arguments.depth, arguments.experts)
    if dist.get_rank() == 0:
        print(f"validation loss {loss:.4f} nats per byte after {len(history)} steps on {grid.topology().spec}")
        print(load_table(load))
        write_history(history, loss, arguments, expert_load=load)
    grid.destroy()
    dist.destroy_process_group()


def expert_load(engine: Any, grid: PipelineParallelGrid, depth: int, experts: int) -> list[list[float]]:
    """Return the share of validation tokens that went to each expert, for each block.

    Counts are summed over data-parallel replicas, which have different tokens, and over stages, which have different
    blocks. Tensor-parallel peers route the same tokens.
    """
    counts = torch.zeros(depth, experts, device=engine.device)
    for name, layer in engine.module.named_children():  # a pipeline's layers go by their number
        if isinstance(layer, Block) and isinstance(layer.feed_forward, Mixture):
            counts[int(name) - FIRST_BLOCK] = layer.feed_forward.counts
    dist.all_reduce(counts, group=grid.get_data_parallel_group())
    dist.all_reduce(counts, group=grid.get_pipe_parallel_group())
    shares: list[list[float]] = (counts / counts.sum(1, keepdim=True)).tolist()
    return shares


def load_table(load: list[list[float]]) -> str:
    """Format the load as a table with a row for each block."""
    experts = range(len(load[0]))
    lines = ["share of validation tokens", "block   " + "".join(f"  expert {expert}" for expert in experts)]
    for block, shares in enumerate(load):
        lines.append(f"{block:<8}" + "".join(f"{share:>9.1%}" for share in shares))
    return "\n".join(lines)


if __name__ == "__main__":
    with print_error_once():
        main()
