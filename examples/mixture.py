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
    """Each token passes through the expert with the highest gate score, ``[b, s, h]`` -> ``[b, s, h]``.

    Args:
        config: The shape of the model; an expert has the shape of its feed-forward layer.
        parallel: How experts are split if they are tensor parallel; otherwise they are not split.
        groups: The expert groups; this rank holds its share of the ``experts``.
        experts: The number of experts in this layer.
        balance: The weight of the auxiliary loss that balances the load, per micro-batch. The gradient of
            ``balance * e * sum(share of tokens * mean score)`` is added to that of the gate.
    """

    def __init__(
        self, config: GPTConfig, parallel: Parallel, groups: ExpertGroups, experts: int, balance: float
    ) -> None:
        super().__init__()
        self.balance = balance
        if not groups.plan.expert_tensor_parallel:
            parallel = Parallel(groups.grid.get_group(()))  # a group of one
        every_expert = [Expert(config, parallel) for _ in range(experts)]
        with torch.random.fork_rng():  # the gate starts equal for any number of experts on this rank
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
    """A feed-forward layer, which DeepSpeed copies for each expert of this rank."""

    def __init__(self, config: GPTConfig, parallel: Parallel) -> None:
        super().__init__(config, parallel)
        self.arguments = (config, parallel)

    def __deepcopy__(self, memo: Any) -> Expert:
        return Expert(*self.arguments)  # a copied parameter would not be marked as tensor parallel


class WithLoss(torch.autograd.Function):
    """Return ``hidden``; the backward pass adds ``loss`` to the loss of the whole model.

    So each layer of a pipeline can have its own loss, independent of later stages. The model's loss must not be scaled,
    as in fp16.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], gradients[0].new_ones(())
