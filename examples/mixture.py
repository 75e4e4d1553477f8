"""A mixture of experts in place of a block's feed-forward layer (Switch Transformer, arXiv:2101.03961).

Shapes: b sequences, s positions, h width, t tokens, e experts.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.moe.layer import MoE
from gpt import FeedForward, GPTConfig
from parallel_layers import Parallel
from torch import nn

from ds_topo.groups import ExpertGroups


class Mixture(nn.Module):
    """Every token goes through the one expert that its gate prefers: ``[b, s, h]`` -> ``[b, s, h]``.

    Args:
        config: the shape of the model; an expert has the shape of its feed-forward layer.
        parallel: how experts are split if they are tensor parallel; else each is whole.
        groups: the expert groups; this rank holds its share of the ``experts``.
        experts: their number in this layer.
        balance: weight of the auxiliary loss that keeps the load even, per micro-batch: the gradient of
            ``balance * e * sum(share of tokens * mean score)`` is added to the gate's.
    """

    def __init__(
        self, config: GPTConfig, parallel: Parallel, groups: ExpertGroups, experts: int, balance: float
    ) -> None:
        super().__init__()
        self.balance = balance
        if not groups.plan.expert_tensor_parallel:
            parallel = Parallel(groups.grid.get_group(()))  # a group of one
        every_expert = [Expert(config, parallel) for _ in range(experts)]
        with torch.random.fork_rng():  # the gate starts the same however many experts this rank holds
            self.moe = MoE(
                config.width,
                every_expert[0],
                num_experts=experts,
                ep_size=groups.plan.expert_parallel_size,
                drop_tokens=False,
                use_rts=False,
                enable_expert_tensor_parallelism=groups.plan.expert_tensor_parallel,
            )
        self.moe.deepspeed_moe.gate.wg.reset_parameters()
        own = self.moe.deepspeed_moe.experts.deepspeed_experts
        first = groups.expert_ranks.index(groups.grid.global_rank) * len(own)
        for expert, initial in zip(own, every_expert[first:], strict=False):
            expert.load_state_dict(initial.state_dict())
        self.counts = torch.zeros(experts, dtype=torch.int64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor
        output, imbalance, counts = self.moe(hidden)
        if self.training:
            output = WithLoss.apply(output, self.balance * imbalance)  # type: ignore[no-untyped-call]
            return output
        self.counts += counts.cpu()
        return output


class Expert(FeedForward):
    """A feed-forward layer of which DeepSpeed makes as many as this rank holds."""

    def __init__(self, config: GPTConfig, parallel: Parallel) -> None:
        super().__init__(config, parallel)
        self.arguments = (config, parallel)

    def __deepcopy__(self, memo: Any) -> Expert:
        return Expert(*self.arguments)  # a copied parameter would not be marked as tensor parallel


class WithLoss(torch.autograd.Function):
    """``(hidden, loss) -> hidden``; backward as if ``loss`` were added to the loss of the whole model.

    So each layer of a pipeline can have a loss of its own, which no later stage needs to know. The model's loss must
    not be scaled (fp16).
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], gradients[0].new_ones(())
