"""The example's tensor-parallel block sends exactly the bytes that the theory predicts."""

from __future__ import annotations

import pytest
import torch
from gpt import Block
from parallel_layers import Parallel

from ds_topo import PipelineParallelGrid
from tests.support.counted_collectives import forward_and_backward
from tests.support.gpt_training import TINY
from tests.support.world import Worlds


def _count_collectives(sequence: bool) -> None:
    b, s, h = 3, TINY.context, TINY.width
    with PipelineParallelGrid("model=2,data=2") as grid:
        block = Block(TINY, Parallel(grid.get_group("model"), sequence))
        length = s // 2 if sequence else s
        forward, backward = forward_and_backward(block, torch.randn(b, length, h, requires_grad=True))
    whole = 4 * b * s * h  # bytes of [b, s, h] in fp32
    if sequence:
        assert forward.calls == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
        assert forward.sent_bytes == {"all_gather_into_tensor": 2 * whole // 2, "reduce_scatter_tensor": 2 * whole}
        # the gradients of two norms and two row-parallel biases, each of h numbers, are summed too
        assert backward.calls == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_reduce": 6}
        assert backward.sent_bytes["all_reduce"] == 6 * 4 * h
    else:
        assert forward.calls == backward.calls == {"all_reduce": 2}
        assert forward.sent_bytes == backward.sent_bytes == {"all_reduce": 2 * whole}


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence_parallel"])
def test_collectives_of_a_block_match_the_theory(world: Worlds, sequence: bool) -> None:
    world(4).run(_count_collectives, sequence)
