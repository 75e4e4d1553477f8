"""Fine-tune a causal language model of Hugging Face on the sources of Python's standard library, on any topology.

    torchrun --nproc-per-node 4 examples/finetune_hugging_face.py --topology "data=2,model=2"
    torchrun --nproc-per-node 4 examples/finetune_hugging_face.py --topology "pipe=2,data=2" --zero 0

``--model`` is a name or a folder of the Llama family; without it, a small Llama with random weights and a tokenizer
trained on the same text, so nothing is downloaded. Trainer trains: ``ds_topo.use(grid)`` gives its engine the grid, and
deals the samples. Along ``model`` the blocks are split in place. With ``pipe`` the blocks become a ``PipelineModule``,
which Trainer cannot train: a loop of six lines does. Needs ``pip install transformers accelerate``.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import standard_library
from tokenizers import ByteLevelBPETokenizer
from torch import nn
from training import print_error_once
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Trainer, TrainingArguments

from ds_topo import PipelineModule, PipelineParallelGrid, init_distributed, use
from ds_topo.errors import TopologyError
from ds_topo.layers import ParallelLinear

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""The layers of every model of the Llama family whose outputs are split over the slices."""
ROWS = ("o_proj", "down_proj")
"""The layers whose inputs are split."""
TRAINED_ON = 400_000
"""The number of bytes for the tokenizer, and for training."""


def split_blocks(model: Any, grid: PipelineParallelGrid) -> None:
    """Keep this rank's slice of every block, in place."""
    heads, slices = model.config.num_key_value_heads, grid.get_axis_size("model")
    if heads % slices:
        raise TopologyError(f"model={slices}: it must divide the model's {heads} key and value heads")
    group = grid.get_group("model")
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if name in COLUMNS:
                setattr(module, name, ParallelLinear.from_linear(layer, -1, group=group))
            elif name in ROWS:
                setattr(module, name, ParallelLinear.from_linear(layer, 0, group=group))


class Block(nn.Module):
    """A decoder layer that computes the positions itself, ``[b, s, h]`` -> ``[b, s, h]``."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        found: torch.Tensor = self.layer(hidden, position_embeddings=self.rotary(hidden, positions))
        return found


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss in nats per token, as the model itself computes it from ``labels``."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The tokens of the text in sequences of one length, shuffled by a seed."""

    def __init__(self, tokens: list[int], length: int, seed: int) -> None:
        count = len(tokens) // length
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        self.rows = torch.tensor(tokens[: count * length]).view(count, length)[order]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class InOrder(Trainer):  # type: ignore[misc]
    """A Trainer that does not shuffle the samples again."""

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="data=-1", help='axes, outermost first, such as "data=2,model=2"')
    parser.add_argument("--model", help="name or folder of a pretrained model of the Llama family; else a small one")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--zero", type=int, default=1, help="stage; 0 or 1 with pipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/hugging_face"), help="folder of the record")
    arguments = parser.parse_args()
    deepspeed.utils.logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    init_distributed(watch=30)
    grid = PipelineParallelGrid(arguments.topology)
    if grid.topology().get_dim("seq") > 1:
        raise TopologyError(
            f"--topology {grid.topology().spec}: see the guide on Hugging Face for seq; use model or data"
        )
    if arguments.batch_size % (2 * grid.get_sample_world_size()):
        pieces = 2 * grid.get_sample_world_size()
        raise TopologyError(
            f"--batch-size {arguments.batch_size} must be a multiple of {pieces}: 2 micro-batches a rank"
        )
    torch.manual_seed(arguments.seed)  # the same weights everywhere
    with use(grid):
        model, tokens = model_and_tokens(arguments)
        split_blocks(model, grid)
        data = Sequences(tokens, arguments.context, arguments.seed)
        train = train_pipeline if grid.pipe_parallel_size > 1 else train_with_trainer
        losses = train(model, data, grid, arguments)
    if dist.get_rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        record = {"topology": grid.topology().spec, "losses": losses}
        (arguments.out / "history.json").write_text(json.dumps(record))
        print(
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per token in {len(losses)} steps on {grid.topology().spec}"
        )
    grid.destroy()
    dist.destroy_process_group()


def model_and_tokens(arguments: argparse.Namespace) -> tuple[Any, list[int]]:
    """Return the complete model and the tokens of the text."""
    text = bytes(standard_library().train[:TRAINED_ON].tolist()).decode("utf-8", errors="replace")
    if arguments.model:
        tokens = AutoTokenizer.from_pretrained(arguments.model)(text)["input_ids"]
        return AutoModelForCausalLM.from_pretrained(arguments.model), tokens
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text.splitlines(keepends=True), vocab_size=512, show_progress=False)
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=arguments.context, **shape, **heads)
    return AutoModelForCausalLM.from_config(config), tokenizer.encode(text).ids


def deepspeed_config(arguments: argparse.Namespace, grid: PipelineParallelGrid) -> dict[str, Any]:
    """Return a config of two micro-batches per step, with our reducer for the ZeRO stages that it supports."""
    return {
        "train_micro_batch_size_per_gpu": arguments.batch_size // grid.get_sample_world_size() // 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": arguments.zero},
        "optimizer": {"type": "Adam", "params": {"lr": arguments.learning_rate, "torch_adam": True}},
        "gradient_reducer": arguments.zero < 2,
        "steps_per_print": 10**9,
    }


def train_with_trainer(
    model: Any, data: Sequences, grid: PipelineParallelGrid, arguments: argparse.Namespace
) -> list[float]:
    """Return the loss of each step. Only the size of a micro-batch depends on the topology."""
    config = deepspeed_config(arguments, grid)
    options = TrainingArguments(
        output_dir=str(arguments.out),
        deepspeed=config,
        max_steps=arguments.steps,
        per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        log_level="error",
    )
    trainer = InOrder(model=model, args=options, train_dataset=data)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def train_pipeline(
    model: Any, data: Sequences, grid: PipelineParallelGrid, arguments: argparse.Namespace
) -> list[float]:
    """Return the loss of each step."""
    if model.config.tie_word_embeddings:
        raise TopologyError(
            "pipe: this model ties its embeddings, which stages of this example do not; use model or data"
        )
    decoder = model.model
    blocks = [Block(layer, decoder.rotary_emb) for layer in decoder.layers]
    layers = [decoder.embed_tokens, *blocks, decoder.norm, model.lm_head]
    module = PipelineModule(layers, loss_fn=next_token_loss, partition_method="parameters")
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=deepspeed_config(arguments, grid)
    )
    loader = grid.data_loader(data, engine.train_micro_batch_size_per_gpu(), drop_last=True)
    batches = ((batch["input_ids"], batch["labels"]) for batch in deepspeed.utils.RepeatingLoader(loader))
    return [float(engine.train_batch(batches)) for _ in range(arguments.steps)]


if __name__ == "__main__":
    with print_error_once():
        main()
