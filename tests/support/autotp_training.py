"""Train models that AutoTP splits, in one process and on a grid, and return what is equal in both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from torch import nn

from ds_topo import PipelineParallelGrid, initialize
from tests.support.training import Batch, Run, engine_config, own_samples, train_by_hand, train_engine

SAMPLES, WIDTH, VOCABULARY = 8, 8, 64
CLIP = 0.1
LAYERS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.?gate\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
        {"patterns": [r".*\.?down\.weight$"], "partition_type": "row"},
    ],
}
"""How AutoTP splits :class:`Gated`: a fused weight of two parts, and the layer after it."""
CUSTOM: dict[str, Any] = {"tensor_parallel": {"partition_config": LAYERS}}


class Gated(nn.Module):
    """A gate of two fused parts between whole layers, as in Phi-3."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, 16), nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(self.first(inputs).relu()).chunk(2, dim=-1)
        output: torch.Tensor = self.down(torch.tanh(gate) * up)
        return output


def gated() -> nn.Module:
    torch.manual_seed(0)
    return Gated()


def llama(**options: Any) -> nn.Module:
    """Return a small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, attn_implementation="sdpa", **shape, **heads, **options)
    )
    return model


def mixtral() -> nn.Module:
    """Return a small Mixtral of transformers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    model: nn.Module = MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCABULARY, attn_implementation="sdpa", **shape, **heads)
    )
    return model


def batches_of(model: nn.Module, steps: int) -> list[Batch]:
    """Return the whole batch of each step."""
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, Gated):
        return [
            (torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, WIDTH, generator=generator))
            for _ in range(steps)
        ]
    tokens = [torch.randint(VOCABULARY, (SAMPLES, 12), generator=generator) for _ in range(steps)]
    return [(each, each) for each in tokens]


def loss_of(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if inputs.is_floating_point():
        loss: torch.Tensor = nn.functional.mse_loss(model(inputs.to(next(model.parameters()).dtype)).float(), targets)
    else:
        loss = model(input_ids=inputs, labels=targets).loss
    return loss


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)  # a larger eps keeps rounding of tiny gradients small


def train_alone(make: Callable[[], nn.Module], steps: int, clip: float = CLIP) -> Run:
    """Train in one process without parallelism."""
    model = make()
    return train_by_hand(model, optimizer_of(model.parameters()), batches_of(model, steps), loss_of, clip)


def engine_on(grid: PipelineParallelGrid | None, make: Callable[[], nn.Module], samples: int, **options: Any) -> Any:
    """Return an engine that splits the model by AutoTP; without a grid, DeepSpeed's own."""
    model = make()
    config = engine_config(SAMPLES // samples, clip=CLIP, **options)
    if config.get("tensor_parallel") is None:
        config.pop("tensor_parallel", None)
    if grid is None:
        return deepspeed.initialize(model=model, optimizer=optimizer_of, config=config)[0]
    return initialize(model=model, optimizer=optimizer_of, mpu=grid, config=config)[0]


def train_on(grid: PipelineParallelGrid, engine: Any, batches: Sequence[Batch], gather: bool = True) -> Run:
    """Train on this rank's samples; return the run with whole parameters."""
    run = train_engine(engine, grid, [own_samples(batch, grid) for batch in batches], loss_of)
    if gather:
        run.parameters = whole_parameters(engine)
    return run


def whole_parameters(engine: Any) -> dict[str, torch.Tensor]:
    """Return the parameters as they are without parallelism; collective."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()  # tied parameters have the first of their names alone
    is_partitioned = engine.zero_optimization_stage() == 3
    for prefix, module in engine.module.named_modules():
        own = list(module.parameters(recurse=False))
        if not own or seen.issuperset(map(id, own)):
            continue
        seen.update(map(id, own))
        with (
            deepspeed.zero.GatheredParameters(own) if is_partitioned else nullcontext(),
            GatherReplacedLayerParams(own, module, enabled=engine.autotp_size() > 1),
        ):
            for name, parameter in module.named_parameters(recurse=False):
                found[f"{prefix}.{name}" if prefix else name] = parameter.detach().float().clone()
    return found


def start() -> None:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
