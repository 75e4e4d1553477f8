"""The gradient reducer inside DeepSpeed's engines, beside DeepSpeed's own reduction and one process."""

from __future__ import annotations

import re
import warnings
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_topo import GradientReducer, PipelineModule, PipelineParallelGrid, initialize
from tests.support.gpt_training import Run, train_alone, train_pipeline
from tests.support.ranks import run_ranks

STEPS = 4
SMALL = {"bucket_bytes": 16_000, "first_bucket_bytes": 4_000, "last_bucket_bytes": 4_000}
"""So that a stage has several buckets."""
BF16 = {"bf16": {"enabled": True}}
CASES: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 0, "gas": 4, "checkpointed": True},
    {"zero": 1, "gas": 4, "checkpointed": True},
    {"zero": 1, **BF16},
    {"zero": 1, "gas": 4, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    {"zero": 0, "checkpointed": True, **BF16},
    {"zero": 0, "prescale_gradients": False, "gradient_predivide_factor": 2.0},
]


@pytest.fixture(scope="module")
def alone() -> Run:
    run: Run = run_ranks(1, train_alone, STEPS)[0]
    return run


def _both(topology: str, cases: list[dict[str, Any]]) -> list[tuple[Run, Run]]:
    return [
        (
            train_pipeline(topology, STEPS, **case),
            train_pipeline(topology, STEPS, **case, gradient_reducer=SMALL),
        )
        for case in cases
    ]


@pytest.mark.parametrize(
    ("topology", "cases"),
    [
        ("pipe=2,data=2", CASES),
        ("data=2,pipe=2", CASES),
        ("pipe=2,seq=2", CASES[:2]),
        ("data=4", CASES[:2]),
        ("pipe=4", CASES[1:2]),
        ("pipe=2,model=2,data=2", [*CASES[:2], {"zero": 1, "sequence": True}]),
    ],
)
def test_pipelines_train_as_one_process_and_as_with_deepspeeds_own_reduction(
    alone: Run, topology: str, cases: list[dict[str, Any]]
) -> None:
    ranks = 8 if "model" in topology else 4
    every_rank = run_ranks(ranks, _both, topology, cases, deadline=240)
    for runs in every_rank:
        for index, (case, (theirs, ours)) in enumerate(zip(cases, runs, strict=True)):
            if "model" not in topology:
                for _, other in (others[index] for others in every_rank):
                    for name in ours.parameters.keys() & other.parameters.keys():
                        assert torch.equal(ours.parameters[name], other.parameters[name]), "replicas are bit-equal"
            tolerance = 2e-3 if "bf16" in case else 1e-5
            torch.testing.assert_close(ours.losses, theirs.losses, rtol=tolerance, atol=0)
            torch.testing.assert_close(ours.norms, theirs.norms, rtol=tolerance, atol=0)
            for name, parameter in theirs.parameters.items():
                torch.testing.assert_close(
                    ours.parameters[name], parameter, rtol=4 * tolerance, atol=4 * tolerance, msg=name
                )
            if "bf16" not in case:
                torch.testing.assert_close(ours.losses, alone.losses, rtol=1e-5, atol=0)
                torch.testing.assert_close(ours.norms, alone.norms, rtol=1e-4, atol=0)
            assert ours.buckets > 1
            assert theirs.reductions == 0
            assert ours.reductions == STEPS * ours.buckets, "once per bucket and step, for any number of micro-batches"


# -- what cannot be served, and the way back ---------------------------------------------------------------------------


class TwoOutputs(nn.Linear):
    """Hands two tensors on, so that the engine calls backward twice per micro-batch."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, hidden: Any) -> Any:
        hidden = hidden[0] + hidden[1] if isinstance(hidden, tuple) else hidden
        return super().forward(hidden).tanh(), hidden


def _loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return (outputs[0] - labels).square().mean()


def _settings(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }


def _two_outputs(**more: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters after training with a reducer, and after training on without it."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    grid = PipelineParallelGrid("pipe=2,data=2")
    module = PipelineModule([LayerSpec(TwoOutputs)] * 4, grid=grid, loss_fn=_loss, seed_layers=True)
    engine, *_ = initialize(model=module, config=_settings(**more))
    snapshots = []
    for step in range(6):
        if step == 3:
            if engine.gradient_reducer is not None:
                before = dict(vars(engine))
                engine.gradient_reducer.detach()
                assert set(before) - set(vars(engine)) >= {"_INSTRUCTION_MAP", "buffered_allreduce_fallback"}
            snapshots.append([parameter.detach().clone() for parameter in module.parameters()])
        generator = torch.Generator().manual_seed(10 * step + grid.get_data_parallel_rank())
        data = [(torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)) for _ in range(2)]
        engine.train_batch(iter(data))
    snapshots.append([parameter.detach().clone() for parameter in module.parameters()])
    engine.destroy()
    grid.destroy()
    return snapshots[0], snapshots[1]


def _two_outputs_both_ways() -> None:
    expected = _two_outputs()
    for overlap in (None, True, False):
        for ours, theirs in zip(_two_outputs(gradient_reducer={"overlap": overlap}), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_several_backward_calls_per_micro_batch_and_detaching() -> None:
    run_ranks(4, _two_outputs_both_ways)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": 2}}, 'ZeRO stage 2 partitions gradients.*"overlap_comm": true'),
    ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3 partitions gradients"),
    ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation=false"),
    ({"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "bf16"}}, "second data type"),
    ({"gradient_reducer": {"bucket_byte": 1}}, 'config section "gradient_reducer".*bucket_byte'),
    ({"gradient_reducer": {"bucket_bytes": 0}}, "bucket_bytes=0"),
]


def _refuse() -> None:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=2") as grid:
        for settings, message in REFUSALS:
            settings = {"gradient_reducer": True, **settings}
            with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
                initialize(model=nn.Linear(4, 4), mpu=grid, config=_settings(**settings))
        with pytest.raises(TypeError, match=r"Linear is not what deepspeed\.initialize returns"):
            GradientReducer.attach(nn.Linear(4, 4))
        engine, *_ = initialize(model=nn.Linear(4, 4), mpu=grid, config=_settings())
        assert engine.gradient_reducer is None
        reducer = GradientReducer.attach(engine)
        with pytest.raises(RuntimeError, match="already have a GradientReducer"):
            GradientReducer.attach(engine)
        with pytest.raises(RuntimeError, match="detach"), engine.coalesce_grad_reduction():
            pass
        engine.destroy()
        assert reducer.state.name == "DETACHED"


def test_what_cannot_be_served_is_refused() -> None:
    run_ranks(2, _refuse)


def _reductions_of_a_step() -> tuple[int, int]:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=2") as grid:
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        config = _settings(gradient_reducer={"bucket_bytes": 500, "first_bucket_bytes": 100})
        engine, *_ = initialize(model=module, mpu=grid, config=config)
        for _ in range(2):
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
                for _ in range(2):
                    engine.backward(engine(torch.ones(2, 8)).sum())
                    engine.step()
        return all_reduce.call_count, len(engine.gradient_reducer.buckets)


def test_deepspeed_reduces_nothing_itself() -> None:
    for calls, buckets in run_ranks(2, _reductions_of_a_step):
        assert calls == buckets + 1, "and one small message in which the ranks compare notes"
