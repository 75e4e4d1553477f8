"""All layouts of a job, best first: a generator with bounds, so that most are never looked at.

Candidates come as a tree: degrees, then micro-batch, virtual stages, recomputation and sequence parallelism, then ZeRO
stage and experts, then the order of axes. Every node has a bound that none of its leaves can beat: compute alone for
degrees, compute, bubble and the messages on their best links further down. Nodes are taken in the order of
their bounds, and a node whose bound exceeds the last of the best found so far ends its level.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations, product
from math import gcd, inf
from typing import TypeAlias

from ds_topo.errors import TopologyError
from ds_topo.planner.costs import Costs
from ds_topo.planner.layout import AXES, Job, Layout, heads_problem, layout_problem
from ds_topo.planner.memory import MemoryUse, memory_use
from ds_topo.planner.software import Recompute
from ds_topo.planner.spans import Span
from ds_topo.planner.step_time import StepTime, layout_spans, schedule_bound, spans_of_factors, step_time
from ds_topo.topology.expert_tables import divisors
from ds_topo.topology.layout import Factors
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import DATA, MODEL, PIPE, SEQ

Degrees: TypeAlias = tuple[int, int, int, int]
"""Of pipe, data, seq, model."""

LARGEST_MICRO_BATCH = 64
"""Micro-batches of more sequences than this are not tried."""


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


@dataclass(frozen=True)
class Wanted:
    """What the user has decided already; None leaves it to the search.

    Args:
        topology: degrees and their order.
        degrees: degrees of some axes, in any order.
        recompute: the kinds to choose from; all that the software offers if empty.
    """

    topology: ProcessTopology | None = None
    degrees: tuple[tuple[str, int], ...] = ()
    micro_batch: int | None = None
    zero: int | None = None
    recompute: tuple[Recompute, ...] = ()
    virtual_stages: int | None = None
    sequence_parallel: bool | None = None
    expert_parallel: int | None = None

    def degree(self, axis: str) -> int | None:
        """The degree that an axis must have."""
        if self.topology is not None:
            return max(1, self.topology.get_dim(axis))
        return dict(self.degrees).get(axis)


@dataclass
class Tally:
    """What a search looked at: layouts by what became of them, and the one that came closest to fitting."""

    evaluated: int = 0
    bounded: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    too_large: int = 0
    smallest: tuple[Layout, MemoryUse] | None = None


@dataclass(frozen=True)
class Found:
    """The best plans, one for each set of degrees, the fastest first."""

    job: Job
    plans: tuple[Plan, ...]
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
    wanted = wanted or Wanted()
    costs, tally = Costs(job), Tally()
    best: list[Plan] = []
    nodes = sorted(
        ((_degrees_bound(costs, degrees, wanted), degrees) for degrees in _degrees(job, wanted, tally)),
        key=lambda node: node[0],
    )
    for position, (bound, degrees) in enumerate(nodes):
        limit = best[count - 1].seconds if len(best) >= count else inf
        if bound >= limit:
            tally.bounded += len(nodes) - position
            break
        plan = _best_of_degrees(costs, degrees, wanted, tally, limit)
        if plan is not None:
            insort(best, plan, key=lambda one: (one.seconds, one.memory.total))
    if not best:
        raise no_plan(job, wanted, tally)
    return Found(job, tuple(best[:count]), tally)


def evaluate(job: Job, layout: Layout) -> Plan:
    """Seconds and bytes of one layout."""
    costs = Costs(job)
    return Plan(layout, step_time(costs, layout), memory_use(costs, layout))


def orders_of(job: Job, plan: Plan) -> list[Plan]:
    """The plan's layout in every order of its axes, the fastest first."""
    costs = Costs(job)
    layouts = (replace(plan.layout, topology=topology) for topology in _orders(plan.layout.topology))
    plans = (Plan(layout, step_time(costs, layout), plan.memory) for layout in layouts)
    return sorted(plans, key=lambda one: one.seconds)


def _degrees(job: Job, wanted: Wanted, tally: Tally) -> Iterator[Degrees]:
    """Degrees whose product is the number of ranks and that divide heads, layers, positions and batch."""
    ranks = job.cluster.ranks
    choices = {axis: [wanted.degree(axis)] if wanted.degree(axis) else divisors(ranks) for axis in (PIPE, SEQ, MODEL)}
    for pipe, seq, tensor in product(choices[PIPE], choices[SEQ], choices[MODEL]):
        assert pipe is not None
        assert seq is not None
        assert tensor is not None
        if ranks % (pipe * seq * tensor):
            continue
        data = ranks // (pipe * seq * tensor)
        if wanted.degree(DATA) not in (None, data):
            continue
        problem = _degrees_problem(job, pipe, data, seq, tensor)
        if problem:
            tally.problems[problem] += 1
        else:
            yield pipe, data, seq, tensor


def _degrees_problem(job: Job, pipe: int, data: int, seq: int, tensor: int) -> str | None:
    problem = heads_problem(job.model, tensor, seq, job.software)
    if problem:
        return problem
    if pipe > max(job.model.layers, 1):
        return f"pipe={pipe} is more than the {job.model.layers} layers"
    if job.batch % data:
        return f"data={data} does not divide the batch of {job.batch} sequences"
    if job.sequence % seq:
        return f"seq={seq} does not divide the {job.sequence} positions of a sequence"
    if seq > 1 and not job.software.splits_sequences(pipe):
        return f"{job.software.name} cannot split sequences" + (" in a pipeline" if pipe > 1 else "")
    return None


def _topology(degrees: Degrees) -> ProcessTopology:
    """The axes of more than one rank in the order that is tried first; ``data`` is always there."""
    named = [(axis, degree) for axis, degree in zip(AXES, degrees, strict=True) if degree > 1 or axis == DATA]
    return ProcessTopology([axis for axis, _ in named], [degree for _, degree in named])


def _orders(topology: ProcessTopology) -> Iterator[ProcessTopology]:
    degrees = dict(zip(topology.axes, topology.dims, strict=True))
    moving = [axis for axis in topology.axes if degrees[axis] > 1]
    fixed = [axis for axis in topology.axes if degrees[axis] == 1]
    for order in permutations(moving):
        yield ProcessTopology([*fixed, *order], [degrees[axis] for axis in (*fixed, *order)])


def _degrees_bound(costs: Costs, degrees: Degrees, wanted: Wanted) -> float:
    """Seconds that no layout of these degrees beats: the largest micro-batch's work, spread evenly over stages."""
    layout = Layout(_topology(degrees), max(_micro_batches(costs.job, degrees[1], wanted)))
    return schedule_bound(costs, layout, even=True)


def _best_of_degrees(costs: Costs, degrees: Degrees, wanted: Wanted, tally: Tally, limit: float) -> Plan | None:
    """The fastest layout of these degrees that fits and takes less than ``limit`` seconds; every order of the axes."""
    nodes: list[tuple[float, int, Layout]] = []
    for index, layout in enumerate(_schedules(costs.job, degrees, wanted)):
        problem = layout_problem(costs.job, layout)
        if problem:
            tally.problems[problem] += 1
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


def _best_of_schedule(costs: Costs, layout: Layout, wanted: Wanted, tally: Tally, best: Plan | None) -> Plan | None:
    """The better of ``best`` and the fastest fitting layout of this schedule over ZeRO stages and orders."""
    job = costs.job
    for zero in [wanted.zero] if wanted.zero is not None else _zero_stages(job, layout):
        candidate = replace(layout, zero=zero)
        problem = layout_problem(job, candidate)
        if problem:
            tally.problems[problem] += 1
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


def _zero_stages(job: Job, layout: Layout) -> list[int]:
    """The stages to choose from; one is enough where there is nothing to shard."""
    stages = list(job.software.zero_stages(layout.pipe, mixed=bool(job.precision.master_bytes)))
    return stages if layout.replicas > 1 else stages[:1]


def _schedules(job: Job, degrees: Degrees, wanted: Wanted) -> Iterator[Layout]:
    """Micro-batches, virtual stages, recomputation, sequence parallelism and sharers of experts."""
    pipe, data, seq, tensor = degrees
    topology = wanted.topology if wanted.topology is not None else _topology(degrees)
    software, model = job.software, job.model
    virtuals = [wanted.virtual_stages] if wanted.virtual_stages else [1]
    if not wanted.virtual_stages and software.virtual_stages > 1 and pipe > 1:
        virtuals = [stages for stages in _virtual_stages(model.layers, pipe) if stages <= software.virtual_stages]
    recompute = wanted.recompute or software.recompute
    split = [False]
    if software.sequence_parallel and tensor > 1 and job.sequence % (seq * tensor) == 0:
        split = [True] if software.regathers else [False, True]
    if wanted.sequence_parallel is not None:
        split = [wanted.sequence_parallel]
    experts = [wanted.expert_parallel] if wanted.expert_parallel else [1]
    if not wanted.expert_parallel and model.expert_count:
        experts = divisors(gcd(model.expert_count, data * seq))
    stages = software.zero_stages(pipe, mixed=bool(job.precision.master_bytes))
    zero = stages[0] if wanted.zero is None else wanted.zero  # all of them are tried later
    for micro_batch in _micro_batches(job, data, wanted):
        for virtual, kind, spread, sharers in product(virtuals, recompute, split, experts):
            yield Layout(topology, micro_batch, zero, kind, virtual, spread, sharers)


def _micro_batches(job: Job, data: int, wanted: Wanted) -> list[int]:
    if wanted.micro_batch:
        return [wanted.micro_batch]
    return [size for size in divisors(job.batch // data) if size <= LARGEST_MICRO_BATCH]


def _virtual_stages(layers: int, pipe: int) -> list[int]:
    """Numbers of virtual stages that make chunks of different lengths, the fewest of each.

    >>> _virtual_stages(layers=12, pipe=2)
    [1, 2, 3, 6]
    """
    by_length = {-(-layers // (pipe * virtual)): virtual for virtual in range(-(-layers // pipe), 0, -1)}
    return sorted(by_length.values())


def no_plan(job: Job, wanted: Wanted, tally: Tally) -> TopologyError:
    """Why nothing was found."""
    if tally.smallest is None:
        reasons = "; ".join(problem for problem, _ in tally.problems.most_common(4))
        return TopologyError(
            f"no layout of {job.cluster.ranks} ranks is possible: {reasons or 'no degrees multiply to it'}"
        )
    layout, memory = tally.smallest
    over = memory.total - job.cluster.memory_limit
    message = (
        f"{job.model.name} fits nowhere on {job.cluster.ranks} ranks of {job.cluster.accelerator.name}: the smallest "
        f"layout ({layout}) needs {memory.total / 1e9:.1f} GB per rank, "
        f"{over / 1e9:.1f} GB more than the {job.cluster.memory_limit / 1e9:.1f} GB there are"
    )
    return TopologyError(message)
