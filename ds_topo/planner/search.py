"""All layouts of a job, best first: a generator with bounds, so that most are never looked at.

Candidates come as a tree: degrees, then micro-batch, virtual stages, recomputation and sequence parallelism, then ZeRO
stage and experts, then the order of axes. Every node has a bound that none of its leaves can beat: compute alone for
degrees, compute, bubble and the messages on their best links further down. Nodes are taken in the order of
their bounds, and a node whose bound exceeds the last of the best found so far ends its level.
"""

from __future__ import annotations

import heapq
import re
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from math import inf

from ds_topo.errors import TopologyError
from ds_topo.planner.candidates import (
    Degrees,
    Wanted,
    first_order,
    micro_batches,
    orders,
    possible_degrees,
    schedules,
    zero_stages,
)
from ds_topo.planner.costs import Costs
from ds_topo.planner.group_spans import layout_spans, spans_of_factors
from ds_topo.planner.layout import Job, Layout, layout_problem
from ds_topo.planner.memory import MemoryUse, largest_states, memory_use
from ds_topo.planner.smallest import smallest_cluster
from ds_topo.planner.spans import Span
from ds_topo.planner.step_time import StepTime, schedule_bound, step_time
from ds_topo.topology.axes import DATA
from ds_topo.topology.layout import Factors
from ds_topo.topology.process_topology import ProcessTopology


@dataclass(frozen=True)
class Plan:
    """A layout with its seconds per step and its bytes per rank."""

    layout: Layout
    time: StepTime
    memory: MemoryUse

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.time.total


@dataclass
class Tally:
    """What a search looked at: sets of degrees, layouts by what became of them, and the closest to fitting."""

    degrees: int = 0
    evaluated: int = 0
    bounded: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    too_large: int = 0
    smallest: tuple[Layout, MemoryUse] | None = None


@dataclass(frozen=True)
class Found:
    """The best plans, one for each set of degrees, the fastest first; ``runner_up`` is the second, asked for or not."""

    job: Job
    plans: tuple[Plan, ...]
    runner_up: Plan | None
    tally: Tally

    @property
    def best(self) -> Plan:
        """The fastest."""
        return self.plans[0]


def search(job: Job, wanted: Wanted | None = None, count: int = 10) -> Found:
    """The ``count`` sets of degrees with the fastest layouts that fit, each with its best.

    Raises:
        TopologyError: no layout divides heads, batch and layers; or none fits into memory (the message says by how
            much, and which cluster would do).
    """
    wanted, tally = wanted or Wanted(), Tally()
    best = _fastest(job, wanted, tally, max(2, count))
    if not best:
        raise _no_plan(job, wanted, tally)
    return Found(job, tuple(best[:count]), best[1] if len(best) > 1 else None, tally)


def favourite(job: Job, wanted: Wanted) -> Plan | str:
    """The fastest layout of what is decided; in words why there is none."""
    tally = Tally()
    best = _fastest(job, wanted, tally, 1)
    if best:
        return best[0]
    if tally.smallest is None:
        return f"it cannot be: {_reasons(tally)}"
    layout, memory = tally.smallest
    return f"it needs {memory.total / 1e9:.1f} GB per rank, of {job.cluster.memory_limit / 1e9:.1f} GB ({layout})"


def _fastest(job: Job, wanted: Wanted, tally: Tally, kept: int) -> list[Plan]:
    """The fastest layouts that fit of at least the ``kept`` best sets of degrees, the fastest first."""
    costs = Costs(job)
    best: list[Plan] = []
    every = possible_degrees(job, wanted, tally.problems)
    nodes = sorted(((_degrees_bound(costs, degrees, wanted), degrees) for degrees in every), key=lambda node: node[0])
    tally.degrees = len(nodes)
    for position, (bound, degrees) in enumerate(nodes):
        limit = best[kept - 1].seconds if len(best) >= kept else inf
        if bound >= limit:
            tally.bounded += len(nodes) - position
            break
        plan = _best_of_degrees(costs, degrees, wanted, tally, limit)
        if plan is not None:
            insort(best, plan, key=lambda one: (one.seconds, one.memory.total))
    return best


def evaluate(job: Job, layout: Layout) -> Plan:
    """Seconds and bytes of one layout."""
    costs = Costs(job)
    return Plan(layout, step_time(costs, layout), memory_use(costs, layout))


def orders_of(job: Job, plan: Plan) -> list[Plan]:
    """The plan's layout in every order of its axes, the fastest first."""
    costs = Costs(job)
    layouts = (replace(plan.layout, topology=topology) for topology in orders(plan.layout.topology))
    plans = (Plan(layout, step_time(costs, layout), plan.memory) for layout in layouts)
    return sorted(plans, key=lambda one: one.seconds)


def _degrees_bound(costs: Costs, degrees: Degrees, wanted: Wanted) -> float:
    """Seconds that no layout of these degrees beats: the largest micro-batch's work, spread evenly over stages."""
    layout = Layout(first_order(degrees), max(micro_batches(costs.job, degrees[1], wanted)))
    return schedule_bound(costs, layout, even=True)


def _best_of_degrees(costs: Costs, degrees: Degrees, wanted: Wanted, tally: Tally, limit: float) -> Plan | None:
    """The fastest layout of these degrees that fits and takes less than ``limit`` seconds; every order of the axes."""
    nodes: list[tuple[float, int, Layout]] = []
    for index, layout in enumerate(schedules(costs.job, degrees, wanted)):
        problem = layout_problem(costs.job, layout)
        if problem:
            tally.problems[problem] += 1
            continue
        if not _states_fit(costs, layout, wanted):
            _best_of_schedule(costs, layout, wanted, tally, None)  # for the tally; a bound would cost more
            continue
        nodes.append((schedule_bound(costs, layout), index, layout))
    heapq.heapify(nodes)
    best: Plan | None = None
    while nodes:
        bound, _, layout = heapq.heappop(nodes)
        if bound >= (best.seconds if best else limit):
            tally.bounded += 1 + len(nodes)
            break
        best = _best_of_schedule(costs, layout, wanted, tally, best)
    return best


def _stages_of(costs: Costs, layout: Layout, wanted: Wanted) -> list[int]:
    """ZeRO stages to choose from."""
    return zero_stages(costs.job, layout) if wanted.zero is None else [wanted.zero]


def _states_fit(costs: Costs, layout: Layout, wanted: Wanted) -> bool:
    """Whether states alone fit in some ZeRO stage."""
    limit = costs.job.cluster.memory_limit
    candidates = (replace(layout, zero=zero) for zero in _stages_of(costs, layout, wanted))
    return any(largest_states(costs, one) <= limit and not layout_problem(costs.job, one) for one in candidates)


def _best_of_schedule(costs: Costs, layout: Layout, wanted: Wanted, tally: Tally, best: Plan | None) -> Plan | None:
    """The better of ``best`` and the fastest fitting layout of this schedule over ZeRO stages and orders."""
    job = costs.job
    for zero in _stages_of(costs, layout, wanted):
        candidate = replace(layout, zero=zero)
        problem = layout_problem(job, candidate)
        if problem:
            tally.problems[problem] += 1
            continue
        states = largest_states(costs, candidate)
        if states > job.cluster.memory_limit and tally.smallest and states >= tally.smallest[1].total:
            tally.too_large += 1  # states alone are, and more than the smallest needs
            continue
        memory = memory_use(costs, candidate)
        if memory.total > job.cluster.memory_limit:
            tally.too_large += 1
            if tally.smallest is None or memory.total < tally.smallest[1].total:
                tally.smallest = (candidate, memory)
            continue
        for topology, spans in _placements(costs, candidate, wanted):
            tally.evaluated += 1
            time = step_time(costs, candidate, spans)
            if best is None or time.total < best.seconds * (1 - 1e-9):
                best = Plan(replace(candidate, topology=topology()), time, memory)
    return best


def _placements(
    costs: Costs, layout: Layout, wanted: Wanted
) -> Iterator[tuple[Callable[[], ProcessTopology], dict[str, Span]]]:
    """Orders of the axes that put groups on different links, one for each such placement."""
    if wanted.topology is not None:
        topology = wanted.topology
        yield lambda: topology, layout_spans(costs, layout)
        return
    degrees = dict(zip(layout.topology.axes, layout.topology.dims, strict=True))
    moving = tuple(axis for axis in layout.topology.axes if degrees[axis] > 1)
    seen: set[tuple[Span, ...]] = set()
    for order in permutations(moving):
        factors: dict[str, Factors] = {}
        stride = 1
        for axis in reversed(order):
            factors[axis] = ((degrees[axis], stride),)
            stride *= degrees[axis]
        spans = spans_of_factors(costs, factors, order, layout.expert_parallel)
        key = tuple(spans.values())
        if key not in seen:
            seen.add(key)
            yield partial(_ordered, order or (DATA,), degrees), spans


def _ordered(order: tuple[str, ...], degrees: dict[str, int]) -> ProcessTopology:
    return ProcessTopology(order, [degrees[axis] for axis in order])


def _no_plan(job: Job, wanted: Wanted, tally: Tally) -> TopologyError:
    """Why nothing was found, and what would do."""
    cluster, decided = job.cluster, wanted.decisions()
    within = f" with what is decided ({', '.join(decided)})" if decided else ""
    if tally.smallest is None:
        return TopologyError(f"no layout of {cluster.ranks} ranks is possible{within}: {_reasons(tally)}")
    layout, memory = tally.smallest
    enough = smallest_cluster(job, wanted)
    would_do = (
        f"{enough.hosts} hosts with {enough.slots} slots ({enough.ranks} ranks) are the fewest that would do"
        if enough
        else "more hosts alone would not do: what one rank needs for one sequence is too much"
    )
    return TopologyError(
        f"{job.model.name} fits nowhere on {cluster.ranks} ranks of {cluster.accelerator.name}{within}: the smallest "
        f"layout ({layout}) needs {memory.total / 1e9:.1f} GB per rank, "
        f"{(memory.total - cluster.memory_limit) / 1e9:.1f} GB more than the {cluster.memory_limit / 1e9:.1f} GB there "
        f"are; {would_do}"
    )


def _reasons(tally: Tally, shown: int = 4) -> str:
    """The rules that layouts broke, each with the numbers that broke it most often; the batch's first, which is the
    easiest to change."""
    by_rule: dict[str, Counter[str]] = {}
    for problem, count in tally.problems.items():
        by_rule.setdefault(_rule(problem), Counter())[problem] += count
    rules = sorted(by_rule.values(), key=lambda problems: -problems.total())
    texts = [problems.most_common(1)[0][0] for problems in rules]
    texts.sort(key=lambda text: "the batch of" not in text)
    return "; ".join(texts[:shown]) or "no degrees multiply to it"


def _rule(problem: str) -> str:
    """A problem without its numbers and choices.

    >>> _rule("model=5 does not divide the 12 attention heads; choose one of [1, 2]")
    'model= does not divide the  attention heads'
    """
    return re.sub(r"\d+", "", re.split(r"[;(\[]", problem)[0]).strip()
