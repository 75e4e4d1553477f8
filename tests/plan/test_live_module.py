"""Compare the measured size of a live module with the same model by formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ds_topo.errors import TopologyError
from ds_topo.plan.live_module import model_from_module
from ds_topo.plan.model import MeasuredLayer, transformer
from ds_topo.plan.search import Wanted, evaluate, search
from tests.plan.jobs import job

HIDDEN, HEADS, POSITIONS, VOCABULARY, DEPTH = 64, 4, 32, 96, 3


class Block(nn.Module):
    """GPT-2's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.expand, self.contract = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        fed_forward: torch.Tensor = self.contract(functional.gelu(self.expand(self.norms[1](hidden))))
        return hidden + fed_forward


class GPT(nn.Module):
    """A GPT whose output is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(self.norm(hidden), self.tokens.weight)


def gpt() -> nn.Module:
    with torch.device("meta"):
        return GPT()


def test_measured_gpt_has_the_size_of_its_formula() -> None:
    measured = model_from_module(gpt(), torch.zeros(1, POSITIONS, dtype=torch.int64))
    formula = transformer(layers=DEPTH, hidden=HIDDEN, heads=HEADS, vocabulary=VOCABULARY, sequence=POSITIONS)
    assert measured.parameters == formula.parameters
    assert measured.flops_per_token(POSITIONS) == pytest.approx(formula.flops_per_token(POSITIONS))
    assert [layer.weights for layer in measured.blocks if isinstance(layer, MeasuredLayer)][1:-1] == [
        block.parameters() for block in formula.blocks
    ]


def test_measured_gpt_is_planned_like_its_formula() -> None:
    formula = job(layers=DEPTH, hidden=HIDDEN, heads=HEADS, vocabulary=VOCABULARY, sequence=POSITIONS)
    measured = type(formula)(
        **{**vars(formula), "model": model_from_module(gpt(), torch.zeros(1, POSITIONS, dtype=torch.int64))}
    )
    layout = search(measured, Wanted(degrees=(("pipe", 1), ("model", 1)))).best.layout
    theirs, ours = evaluate(formula, layout), evaluate(measured, layout)
    assert ours.memory.weights == theirs.memory.weights
    assert ours.seconds == pytest.approx(theirs.seconds, rel=0.4)


@pytest.mark.parametrize(
    ("module", "sample", "text"),
    [
        (nn.Sequential(nn.Linear(2, 2)), torch.zeros(1, 4, 2), "parameter '0.weight' is not on the meta device"),
        (nn.Sequential(nn.Linear(2, 2, device="meta")), torch.zeros(3, 4, 2), "give one sequence"),
        (nn.Sequential(nn.Linear(2, 2, device="meta")), torch.zeros(1), "give one sequence"),
    ],
)
def test_model_from_module_refuses_bad_input(module: nn.Module, sample: torch.Tensor, text: str) -> None:
    with pytest.raises(TopologyError, match=text):
        model_from_module(module, sample)
