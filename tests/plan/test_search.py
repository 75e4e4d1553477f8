"""Compare the search with all layouts one by one; test its bounds, its errors, and monotony in the machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings

from ds_topo.errors import TopologyError
from ds_topo.plan import search as search_module
from ds_topo.plan.explain import differences, explain_axes, explain_memory, explain_time, reason
from ds_topo.plan.hardware import Cluster
from ds_topo.plan.job import DEEPSPEED, MEGATRON, Job, JobLayout, Software, layout_problem
from ds_topo.plan.memory import largest_states, memory_use
from ds_topo.plan.search import Wanted, evaluate, fewest_axes_first, orders_of, search, smallest_cluster
from ds_topo.plan.stages import Costs
from ds_topo.plan.step_time import schedule_bound, step_time
from ds_topo.topology.process_topology import ProcessTopology
from tests.plan.jobs import every_layout, job, jobs_and_layouts


@pytest.mark.parametrize("software", [DEEPSPEED, MEGATRON])
@pytest.mark.parametrize(
    "change", [{}, {"layers": 6, "batch": 12}, {"experts": 2, "top_k": 1, "slots": 2}, {"memory": 0.6e9}]
)
def test_search_finds_the_best_of_all_layouts(software: Software, change: dict[str, float]) -> None:
    memory = change.get("memory")
    made = job(software=software, **{key: int(value) for key, value in change.items() if key != "memory"})
    if memory:
        made = replace(made, cluster=replace(made.cluster, memory_limit=memory))
    costs = Costs(made)
    fitting = [layout for layout in every_layout(made) if memory_use(costs, layout).total <= made.cluster.memory_limit]
    assert fitting
    best = min(step_time(costs, layout).total for layout in fitting)
    found = search(made, count=3)
    assert found.best.seconds == pytest.approx(best)
    assert [plan.seconds for plan in found.plans] == sorted(plan.seconds for plan in found.plans)
    assert found.best.layout in fitting


@settings(deadline=None, max_examples=60)
@given(jobs_and_layouts())
def test_no_layout_beats_its_bound(made: tuple[Job, JobLayout]) -> None:
    task, layout = made
    costs = Costs(task)
    seconds = step_time(costs, layout).total
    assert schedule_bound(costs, layout) <= seconds * (1 + 1e-9)


def _link(cluster: Cluster, name: str, **change: float) -> Cluster:
    return replace(cluster, **{name: replace(getattr(cluster, name), **change)})


BETTER: dict[str, Callable[[Cluster], Cluster]] = {
    "bandwidth across": lambda one: _link(one, "across", bandwidth=2 * one.across.bandwidth),
    "bandwidth inside": lambda one: _link(one, "inside", bandwidth=2 * one.inside.bandwidth),
    "latency across": lambda one: _link(one, "across", latency=one.across.latency / 2),
    "latency inside": lambda one: _link(one, "inside", latency=one.inside.latency / 2),
    "peak": lambda one: replace(
        one,
        accelerator=replace(
            one.accelerator, peak_flops={name: 2 * peak for name, peak in one.accelerator.peak_flops.items()}
        ),
    ),
    "memory bandwidth": lambda one: replace(
        one, accelerator=replace(one.accelerator, memory_bandwidth=2 * one.accelerator.memory_bandwidth)
    ),
}


@pytest.mark.parametrize("name", BETTER)
@settings(deadline=None, max_examples=40)
@given(made=jobs_and_layouts())
def test_better_machine_is_never_slower(name: str, made: tuple[Job, JobLayout]) -> None:
    task, layout = made
    better = replace(task, cluster=BETTER[name](task.cluster))
    worse, faster = (step_time(Costs(one), layout).total for one in (task, better))
    assert faster <= worse * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(jobs_and_layouts())
def test_explanations_add_up(made: tuple[Job, JobLayout]) -> None:
    task, layout = made
    costs, plan = Costs(task), evaluate(task, layout)
    assert sum(term.value for term in explain_time(costs, plan)) == pytest.approx(plan.seconds)
    assert sum(term.value for term in explain_memory(costs, plan)) == pytest.approx(plan.memory.total)
    assert all(term.text for term in (*explain_time(costs, plan), *explain_memory(costs, plan)))
    axes = explain_axes(costs, layout)
    for use in axes:
        named = [axis for axis in use["axis"].split(" ")[0].split("+") if axis != "experts"]
        assert use["ranks"] == prod(layout.topology.get_dim(axis) for axis in named) or not named
    for other in orders_of(task, plan):
        lost = sum(term.value for term in differences(plan, other))
        assert lost == pytest.approx(other.seconds - plan.seconds, abs=1e-12)


def test_bubble_of_equal_stages_matches_narayanan_et_al() -> None:
    """It is (p - 1) / (v m) of the time without it (Narayanan et al., section 2.2), sends aside."""
    made = job(hosts=1, slots=4, layers=16, batch=32, vocabulary=1, software=MEGATRON)
    for virtual in (1, 2, 4):
        time = step_time(Costs(made), JobLayout(ProcessTopology.from_spec("pipe=4"), 1, virtual_stages=virtual))
        assert time.bubble / (time.compute + time.recompute) == pytest.approx(3 / (virtual * 32), rel=0.2)


@pytest.mark.parametrize(("slow_across", "inner"), [(True, "data"), (False, "model")])
def test_best_order_keeps_the_largest_messages_inside_hosts(slow_across: bool, inner: str) -> None:
    # few tokens and many parameters: gradients outweigh activations; the other way round
    shape = {"batch": 4, "sequence": 16, "hidden": 1024} if slow_across else {"batch": 64, "sequence": 1024}
    made = job(hosts=2, slots=2, layers=4, **shape)
    made = replace(made, cluster=_link(made.cluster, "across", bandwidth=1e9))
    found = search(made, Wanted(degrees=(("data", 2), ("model", 2), ("pipe", 1), ("seq", 1))))
    assert found.best.layout.topology.axes[-1] == inner


def test_search_keeps_decisions() -> None:
    made = job()
    wanted = Wanted(degrees=(("model", 4), ("pipe", 1)), micro_batch=2, zero=2)
    for plan in search(made, wanted).plans:
        assert (plan.layout.model, plan.layout.pipe, plan.layout.micro_batch, plan.layout.zero) == (4, 1, 2, 2)
    topology = ProcessTopology.from_spec("model=2,data=4")
    assert search(made, Wanted(topology=topology)).best.layout.topology == topology


def test_deepspeed_has_no_zero_3_with_expert_parallelism() -> None:
    made = job(experts=4, top_k=2, batch=64)
    split = JobLayout(ProcessTopology.from_spec("data=8"), 1, zero=3, expert_parallel=2)
    assert "no ZeRO 3 where experts are distributed over ranks, only [0, 1, 2]" in (layout_problem(made, split) or "")
    assert layout_problem(made, replace(split, zero=2)) is None
    assert layout_problem(made, replace(split, expert_parallel=1)) is None
    assert layout_problem(replace(made, software=MEGATRON), split) is None
    assert {plan.layout.expert_parallel for plan in search(made, Wanted(zero=3)).plans} == {1}


@pytest.mark.parametrize(
    ("bytes_more", "text"), [(1e9, "as fast as .* and needs less memory"), (0.0, "are equally fast")]
)
def test_reason_names_less_memory_only_if_it_is_less(bytes_more: float, text: str) -> None:
    found = search(job())
    best = found.best
    other = replace(best, memory=replace(best.memory, working=best.memory.working + bytes_more))
    assert re.search(text, reason(replace(found, runner_up=other)))


@pytest.mark.parametrize(("slower", "is_first"), [(1.0005, True), (1.002, False)])
def test_fewest_axes_are_first_among_equally_fast_plans(slower: float, is_first: bool) -> None:
    found = search(job())
    one, two = (
        replace(found.best.layout, topology=ProcessTopology.from_spec(spec)) for spec in ("data=8", "data=4,seq=2")
    )
    time = found.best.time
    fast = replace(found.best, layout=two)
    simple = replace(found.best, layout=one, time=replace(time, bubble=time.bubble + (slower - 1) * time.total))
    for plans in ((fast, simple), (fast,)):  # the runner-up is considered even if one plan is asked for
        ordered = fewest_axes_first(replace(found, plans=plans, runner_up=simple))
        assert ordered.best.layout == (one if is_first else two)
        assert len(ordered.plans) == len(plans)
        if is_first:
            assert reason(ordered) == "The first is as fast as data=4,seq=2 and has fewer axes."


def test_reason_names_the_next_best() -> None:
    found = search(job())
    assert found.plans[1].layout.topology.spec in reason(found)


def test_memory_error_names_missing_bytes_and_smallest_cluster() -> None:
    made = job(hosts=1, slots=1, hidden=8192, layers=24, heads=64, batch=48)
    with pytest.raises(TopologyError) as raised:
        search(made)
    enough = smallest_cluster(made, Wanted())
    assert enough is not None
    text = (
        r"needs ([\d.]+) GB per rank, ([\d.]+) GB more than the ([\d.]+) GB there are; use at least (\d+) hosts with 1"
    )
    needed, more, there, hosts = map(float, re.findall(text, str(raised.value))[0])
    assert needed - more == pytest.approx(there, abs=0.11)
    assert hosts == enough.hosts
    search(replace(made, cluster=enough))
    with pytest.raises(TopologyError, match="does not fit in the memory"):
        search(replace(made, cluster=replace(enough, hosts=enough.hosts - 1)))


def test_smallest_cluster_is_the_next_larger_one_that_fits() -> None:
    enough = smallest_cluster(job(hosts=3, batch=48), Wanted())
    assert enough is not None
    assert enough.hosts == 4, "two hosts fit, too"


@settings(deadline=None, max_examples=60)
@given(jobs_and_layouts())
def test_states_never_exceed_all_bytes(made: tuple[Job, JobLayout]) -> None:
    task, layout = made
    costs = Costs(task)
    assert 0 < largest_states(costs, layout) <= memory_use(costs, layout).total
    again = replace(layout, zero=0, expert_parallel=1)
    assert largest_states(costs, again) >= largest_states(costs, layout)


@pytest.mark.parametrize("change", [{}, {"experts": 4, "top_k": 2}])
def test_memory_error_names_the_smallest_of_all_layouts(change: dict[str, int]) -> None:
    made = job(**change)
    costs = Costs(made)
    least = min(memory_use(costs, layout).total for layout in every_layout(made))
    with pytest.raises(TopologyError, match=f"needs {least / 1e9:.1f} GB per rank"):
        search(replace(made, cluster=replace(made.cluster, memory_limit=1e6)))


def test_activations_are_not_computed_if_states_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job(hosts=1, slots=1, batch=1)
    made = replace(made, cluster=replace(made.cluster, memory_limit=1e5))
    monkeypatch.setattr(search_module, "memory_use", lambda *_: pytest.fail("states alone are too large"))
    assert smallest_cluster(made, Wanted()) is None


def test_memory_error_says_that_more_hosts_do_not_help() -> None:
    made = job(hosts=1, slots=1, batch=1)
    made = replace(made, cluster=replace(made.cluster, memory_limit=1e5))
    with pytest.raises(TopologyError, match="more hosts alone do not help"):
        search(made)


def test_stage_3_is_partitioned_inside_hosts_where_that_is_faster() -> None:
    """Gathering inside hosts beats gathering over all ranks; a fixed degree of shard is kept."""
    made = job(software=DEEPSPEED)
    found = search(made, Wanted(zero=3, degrees=(("pipe", 1), ("model", 1), ("seq", 1))), count=1).best
    assert "shard" in found.layout.topology.axes
    plain = evaluate(made, replace(found.layout, topology=ProcessTopology(["data"], [made.cluster.ranks])))
    assert found.seconds <= plain.seconds
    assert found.memory.total > plain.memory.total, "a rank holds a greater share"
    fixed = search(made, Wanted(degrees=(("shard", 2),)), count=1).best.layout
    assert (fixed.topology.get_dim("shard"), fixed.partitions) == (2, 2)


@pytest.mark.parametrize("degree", [1, 2])
def test_decided_degree_of_shard_is_that_of_every_plan(degree: int) -> None:
    plans = search(job(), Wanted(degrees=(("shard", degree),)), count=100).plans
    assert {max(1, plan.layout.topology.get_dim("shard")) for plan in plans} == {degree}


def test_update_counts_the_parameters_of_the_partition() -> None:
    """Experts over four of eight ranks have two replicas, dense parameters eight."""
    made = job(experts=4, top_k=2, batch=64)
    layout = JobLayout(ProcessTopology.from_spec("data=8"), 1, zero=1, expert_parallel=4)
    [held] = Costs(made).all_parameters(layout)
    wanted = f"Adam on {(held.dense / 8 + held.experts / 2) / 1e6:,.1f} M parameters, bound by memory"
    [told] = [term.text for term in explain_time(Costs(made), evaluate(made, layout)) if term.name == "optimizer"]
    assert told == wanted
