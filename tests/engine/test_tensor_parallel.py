"""GPT with tied, vocabulary-parallel embedding over pipe x data x model, in every order, equals one process."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from gpt import Block
from parallel_layers import Parallel

from ds_topo import PipelineParallelGrid
from tests.support.counted_collectives import forward_and_backward
from tests.support.gpt_training import TINY, Run, train_alone, train_pipeline
from tests.support.ranks import run_ranks

STEPS = 20
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
CASES: list[tuple[int, bool, dict[str, Any]]] = [
    (zero, sequence, more) for zero, more in ((0, {}), (1, {}), (0, BF16)) for sequence in (False, True)
]
ORDERS = [",".join(f"{axis}=2" for axis in order) for order in permutations(("pipe", "data", "model"))]


@pytest.fixture(scope="module")
def alone() -> Run:
    return run_ranks(1, train_alone, STEPS)[0]


def _train_cases(topology: str) -> list[Run]:
    return [train_pipeline(topology, STEPS, zero, sequence=sequence, **more) for zero, sequence, more in CASES]


@pytest.mark.parametrize("topology", ORDERS)
def test_training_equals_one_process(alone: Run, topology: str) -> None:
    for runs in run_ranks(8, _train_cases, topology, deadline=300):
        for (zero, sequence, more), run in zip(CASES, runs, strict=True):
            case = partial("ZeRO {}, sequence parallel {}, {}: {}".format, zero, sequence, more)
            torch.testing.assert_close(run.losses, alone.losses, rtol=1e-3 if more else 1e-4, atol=0, msg=case)
            torch.testing.assert_close(run.norms, alone.norms, rtol=1e-2 if more else 1e-4, atol=0, msg=case)


def _count_collectives() -> None:
    grid = PipelineParallelGrid("model=2,data=2")
    b, s, h = 3, TINY.context, TINY.width
    for sequence in (False, True):
        block = Block(TINY, Parallel(grid.get_group("model"), sequence))
        length = s // 2 if sequence else s
        forward, backward = forward_and_backward(block, torch.randn(b, length, h, requires_grad=True))
        whole = 4 * b * s * h  # bytes of [b, s, h] in fp32
        if sequence:
            assert forward.calls == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
            assert forward.sent_bytes == {"all_gather_into_tensor": 2 * whole // 2, "reduce_scatter_tensor": 2 * whole}
            # the gradients of two norms and two row-parallel biases are summed besides, each of h numbers
            assert backward.calls == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_reduce": 6}
            assert backward.sent_bytes["all_reduce"] == 6 * 4 * h
        else:
            assert forward.calls == backward.calls == {"all_reduce": 2}
            assert forward.sent_bytes == backward.sent_bytes == {"all_reduce": 2 * whole}


def test_collectives_of_a_block_are_those_of_the_theory() -> None:
    run_ranks(4, _count_collectives)
