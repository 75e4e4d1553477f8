"""Test the bytes of a rank: states, micro-batches in flight, activations, and monotony."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo.plan.job import (
    BF16,
    DEEPSPEED,
    FP16,
    FP32,
    MEGATRON,
    MEGATRON_2021,
    MEGATRON_2022,
    Job,
    JobLayout,
    Recompute,
    layout_problem,
)
from ds_topo.plan.memory import chunks_in_flight, memory_use, state_bytes
from ds_topo.plan.model import Block
from ds_topo.plan.stages import Costs, StageParameters
from ds_topo.topology.process_topology import ProcessTopology
from tests.plan.jobs import job, jobs_and_layouts


@pytest.mark.parametrize(
    ("zero", "gigabytes"),
    # Rajbhandari et al., figure 1: 7.5 B parameters over 64 ranks in mixed precision, K = 12
    [(0, 120.0), (1, 31.40625), (2, 16.640625), (3, 1.875)],
)
def test_states_match_the_zero_paper(zero: int, gigabytes: float) -> None:
    layout = JobLayout(ProcessTopology.from_spec("data=64"), 1, zero)
    states = state_bytes(StageParameters(7_500_000_000, 0), layout, BF16, DEEPSPEED)
    assert states.total == pytest.approx(gigabytes * 1e9, rel=1e-6)


@given(st.integers(1, 10**12), st.integers(0, 3), st.sampled_from([1, 2, 8, 64]))
def test_states_of_megatron_are_divided_without_padding(parameters: int, zero: int, ranks: int) -> None:
    layout = JobLayout(ProcessTopology.from_spec(f"data={ranks}"), 1, zero)
    states = state_bytes(StageParameters(parameters, 0), layout, FP16, MEGATRON_2022)
    assert states.optimizer == 12 * parameters / (ranks if zero else 1)
    assert states.gradients == 4 * parameters / (ranks if zero >= 2 else 1)
    assert states.weights == 2 * (parameters // ranks if zero == 3 else parameters)


def test_states_of_experts_are_divided_by_their_own_replicas() -> None:
    layout = JobLayout(ProcessTopology.from_spec("data=8"), 1, 1, expert_parallel=4)
    states = state_bytes(StageParameters(0, 1024), layout, BF16, DEEPSPEED)
    assert states.optimizer == 12 * 1024 / 2


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 12), st.data())
def test_micro_batches_in_flight_match_deepspeeds_schedule(stages: int, count: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    alive = most = 0
    for instructions in TrainSchedule(micro_batches=count, stages=stages, stage_id=stage).steps():
        for instruction in instructions:
            alive += isinstance(instruction, ForwardPass) - isinstance(instruction, BackwardPass)
            most = max(most, alive)
    assert chunks_in_flight(stage, stages, 1, count) == most


def interleaved(stage: int, pipe: int, virtual: int, micro_batches: int) -> int:
    """Count the most forward passes of chunks without backward in Megatron's interleaved schedule, step by step."""
    total = micro_batches * virtual
    warmup = min(total, 2 * (pipe - stage - 1) + (virtual - 1) * pipe)
    alive = most = 0
    for step in range(total + warmup):
        alive += step < total
        most = max(most, alive)
        alive -= step >= warmup
    return most


@given(st.integers(2, 8), st.integers(2, 5), st.integers(1, 6), st.data())
def test_chunks_in_flight_match_the_interleaved_schedule(
    pipe: int, virtual: int, times: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, pipe - 1))
    assert chunks_in_flight(stage, pipe, virtual, times * pipe) == interleaved(stage, pipe, virtual, times * pipe)


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 8),
    st.sampled_from([128, 1024]),
    st.sampled_from([(8, 64), (16, 64), (32, 128)]),
)
def test_kept_activations_match_korthikanti_et_al(
    tensor: int, micro_batch: int, sequence: int, heads: tuple[int, int]
) -> None:
    """Equations 1, 2, 4 and 6 hold, and full recomputation keeps 2 s b h."""
    count, width = heads
    hidden = count * width
    made = job(layers=1, hidden=hidden, heads=count, vocabulary=8, sequence=sequence, precision=FP16)
    [block] = made.model.blocks
    assert isinstance(block, Block)
    unit, scores = sequence * micro_batch * hidden, 5 * count * sequence / hidden
    for spread in (False, True):
        layout = JobLayout(ProcessTopology.from_spec(f"model={tensor}"), micro_batch, sequence_parallel=spread)
        software = MEGATRON_2022 if spread else MEGATRON_2021
        kept = Costs(replace(made, software=software)).piece(block, layout).kept
        whole = 34 / tensor if spread else 10 + 24 / tensor  # times s b h
        assert kept[Recompute.NONE] == pytest.approx(unit * (whole + scores / tensor))
        assert kept[Recompute.FULL] == pytest.approx(2 * unit / (tensor if spread else 1))
        if spread:
            assert kept[Recompute.SELECTIVE] == pytest.approx(unit * whole)


@settings(deadline=None, max_examples=60)
@given(jobs_and_layouts())
def test_memory_falls_with_sharding_and_recomputation(made: tuple[Job, JobLayout]) -> None:
    task, layout = made
    costs = Costs(task)
    use = memory_use(costs, layout)
    assert all(size >= 0 for size in use.parts().values())
    again = memory_use(costs, replace(layout, recompute=Recompute.FULL))
    assert again.total <= use.total
    if layout.zero == 1:
        sharded = replace(layout, zero=2)
        if layout_problem(task, sharded) is None:
            assert memory_use(costs, sharded).total <= use.total
    if layout.zero == 0:
        whole = costs.parameters(costs.stage_kinds(layout)[0], layout)
        assert use.optimizer >= 12 * whole.dense / 2


def test_longer_pipelines_hold_less_per_rank() -> None:
    made = job(hosts=1, slots=8, layers=32, batch=64, precision=FP32, software=MEGATRON)
    weights = [
        memory_use(Costs(made), JobLayout(ProcessTopology.from_spec(f"pipe={pipe},data={8 // pipe}"), 1)).weights
        for pipe in (1, 2, 4, 8)
    ]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] == made.model.parameters * 4


def test_each_further_expert_of_a_token_keeps_its_row_its_result_and_its_activations() -> None:
    layout = JobLayout(ProcessTopology.from_spec("data=8"), 2)
    kept = []
    for top_k in (1, 2):
        made = job(experts=4, top_k=top_k, gated=True, software=MEGATRON)
        [block, *_] = made.model.blocks
        kept.append(Costs(made).piece(block, layout).kept[Recompute.NONE])
    tokens, hidden, width, size = 2 * 256, 512, 4 * 512, 2
    assert kept[1] - kept[0] == tokens * size * (2 * hidden + 3 * width)
