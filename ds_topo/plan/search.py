"""Search for the fastest layouts of a job that fit in memory.

Candidates form a tree: degrees, then micro-batch, virtual stages, recomputation, sequence parallelism and experts, then
ZeRO stage, then the order of axes. Every node has a bound that none of its leaves can beat: computing alone for
degrees; computing, bubble and the messages on the best possible links further down. Nodes are visited in the order of
their bounds. A node whose bound exceeds the slowest of the plans found so far ends its level.
"""

from __future__ import annotations

import re
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import permutations, product
from math import ceil, gcd, inf

from ds_topo.errors import TopologyError
from ds_topo.plan.hardware import Cluster
from ds_topo.plan.job import AXES, Job, JobLayout, Recompute, degree_problems, layout_problem
from ds_topo.plan.memory import MemoryUse, largest_states, memory_use
from ds_topo.plan.stages import Costs
from ds_topo.plan.step_time import Span, StepTime, layout_spans, schedule_bound, step_time
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ, SHARD, divisors
from ds_topo.topology.process_topology import ProcessTopology

LARGEST_MICRO_BATCH = 64
"""The search does not try micro-batches of more sequences."""
MOST_HOSTS = 1 << 14
"""``smallest_cluster`` tries no more hosts."""
TIE = 0.001
"""Plans whose seconds differ by at most this share are equally fast."""
STEPS = 64
"""The numbers of hosts that ``smallest_cluster`` tries between one that is too small and twice that number."""


@dataclass(frozen=True)
class Wanted:
    """The decisions that the user has made; None leaves a choice to the search."""

    topology: ProcessTopology | None = None
    """Degrees and their order."""
    degrees: tuple[tuple[str, int], ...] = ()
    """Degrees of some axes, in any order."""
    micro_batch: int | None = None
    zero: int | None = None
    recompute: tuple[Recompute, ...] = ()
    """The kinds of recomputation to choose from; all that the software offers if empty."""
    virtual_stages: int | None = None
    sequence_parallel: bool | None = None
    expert_parallel: int | None = None

    def degree(self, axis: str) -> int | None:
        """Return the degree that an axis must have, or None."""
        decided = dict(self.degrees)
        if self.topology is not None:
            decided = {one: max(1, self.topology.get_dim(one)) for one in AXES}
        if axis == DATA and DATA in decided:
            return decided[DATA] * decided.get(SHARD, 1)
        return decided.get(axis)

    def decisions(self) -> list[str]:
        """Return the decisions in words.

        >>> Wanted(degrees=(("model", 2),), zero=2, recompute=(Recompute.FULL,), sequence_parallel=False).decisions()
        ['model=2', 'ZeRO 2', 'recompute full', 'no sequence parallelism']
        """
        said = [] if self.topology is None else [self.topology.spec]
        said += [f"{axis}={degree}" for axis, degree in self.degrees]
        said += [] if self.micro_batch is None else [f"micro-batch {self.micro_batch}"]
        said += [] if self.zero is None else [f"ZeRO {self.zero}"]
        said += [f"recompute {' or '.join(kind.value for kind in self.recompute)}"] if self.recompute else []
        said += [] if self.virtual_stages is None else [f"{self.virtual_stages} virtual stages"]
        if self.sequence_parallel is not None:
            said.append("sequence parallel" if self.sequence_parallel else "no sequence parallelism")
        return said + ([] if self.expert_parallel is None else [f"experts over {self.expert_parallel}"])


@dataclass(frozen=True)
class Plan:
    """A layout with its seconds per step and its bytes per rank."""

    layout: JobLayout
    time: StepTime
    memory: MemoryUse

    @property
    def seconds(self) -> float:
        """The seconds of one step."""
        return self.time.total


@dataclass
class Tally:
    """Counts of a search: sets of degrees, layouts by what became of them, and the closest to fitting.

    Rules that degrees break by themselves are counted apart from those that layouts of possible degrees break.
    """

    degrees: int = 0
    evaluated: int = 0
    bounded: int = 0
    degree_problems: Counter[str] = field(default_factory=Counter)
    layout_problems: Counter[str] = field(default_factory=Counter)
    too_large: int = 0
    smallest: tuple[JobLayout, MemoryUse] | None = None


@dataclass(frozen=True)
class Found:
    """The best plans, one per set of degrees, the fastest first; ``runner_up`` is the second, even if not asked for."""

    job: Job
    plans: tuple[Plan, ...]
    runner_up: Plan | None
    tally: Tally

    @property
    def best(self) -> Plan:
        """The fastest plan."""
        return self.plans[0]


def search(job: Job, wanted: Wanted | None = None, count: int = 10) -> Found:
    """Return the fastest layout that fits for each of the ``count`` best sets of degrees.

    If there is none, the error names the broken rules, or the missing bytes and the smallest cluster that fits.
    """
    wanted, tally = wanted or Wanted(), Tally()
    best = _fastest(job, wanted, tally, max(2, count))
    if not best:
        raise _no_plan(job, wanted, tally)
    return Found(job, tuple(best[:count]), best[1] if len(best) > 1 else None, tally)


def fewest_axes_first(found: Found) -> Found:
    """Return the plans with the simplest of equally fast ones first: the one with the fewest axes.

    Plans are equally fast if they take at most a thousandth longer than the fastest, far less than predictions err.
    """
    best, *others = found.plans
    others += [found.runner_up] if found.runner_up is not None and not others else []
    ties = [plan for plan in (best, *others) if plan.seconds <= best.seconds * (1 + TIE)]
    first = min(ties, key=lambda plan: sum(degree > 1 for degree in plan.layout.topology.dims))
    if first is best:
        return found
    ordered = (first, *(plan for plan in found.plans if plan is not first))
    return replace(found, plans=ordered[: len(found.plans)], runner_up=best)


def plan_or_problem(job: Job, wanted: Wanted) -> Plan | str:
    """Return the fastest layout with these decisions, or in words why there is none."""
    tally = Tally()
    best = _fastest(job, wanted, tally, 1)
    if best:
        return best[0]
    if tally.smallest is None:
        return f"it is not possible: {_reasons(tally)}"
    layout, memory = tally.smallest
    return f"it needs {memory.total / 1e9:.1f} GB per rank, of {job.cluster.memory_limit / 1e9:.1f} GB ({layout})"


def evaluate(job: Job, layout: JobLayout) -> Plan:
    """Return the seconds and bytes of one layout."""
    costs = Costs(job)
    return Plan(layout, step_time(costs, layout), memory_use(costs, layout))


def orders_of(job: Job, plan: Plan) -> list[Plan]:
    """Return the plan's layout in every order of its axes, the fastest first."""
    costs = Costs(job)
    layouts = (replace(plan.layout, topology=topology) for topology in orders(plan.layout.topology))
    plans = (Plan(layout, step_time(costs, layout), plan.memory) for layout in layouts)
    return sorted(plans, key=lambda one: one.seconds)


def possible_degrees(job: Job, wanted: Wanted, problems: Counter[str]) -> Iterator[JobLayout]:
    """Yield degrees whose product is the number of ranks and that divide heads, layers, positions and batch.

    Each is a layout of single sequences, with the axes of more than one rank in the order that is tried first.
    """
    ranks = job.cluster.ranks
    decided = (wanted.degree(axis) for axis in (PIPE, SEQ, MODEL))
    for pipe, seq, tensor in product(*([degree] if degree else divisors(ranks) for degree in decided)):
        data, rest = divmod(ranks, pipe * seq * tensor)
        if rest or wanted.degree(DATA) not in (None, data):
            continue
        problem = next(degree_problems(job, pipe, data, seq, tensor), None)
        if problem:
            problems[problem] += 1
        else:
            degrees = {PIPE: pipe, DATA: data, SEQ: seq, MODEL: tensor}
            wide = {axis: degree for axis, degree in degrees.items() if degree > 1} or {DATA: 1}
            yield JobLayout(ProcessTopology(list(wide), list(wide.values())), micro_batch=1)


@lru_cache(maxsize=1024)
def orders(topology: ProcessTopology) -> tuple[ProcessTopology, ...]:
    """Return the topology in every order of its axes of more than one rank."""
    degrees = dict(zip(topology.axes, topology.dims, strict=True))
    fixed = [axis for axis in topology.axes if degrees[axis] == 1]
    return tuple(
        ProcessTopology([*fixed, *order], [degrees[axis] for axis in (*fixed, *order)])
        for order in permutations(axis for axis in topology.axes if degrees[axis] > 1)
    )


def zero_stages(job: Job, layout: JobLayout, wanted: Wanted) -> list[int]:
    """Return the ZeRO stages to choose from; one is enough if there is nothing to shard."""
    if wanted.zero is not None:
        return [wanted.zero]
    stages = list(job.software.zero_stages(layout.pipe, job.precision))
    return stages if layout.replicas > 1 else stages[:1]


def schedules(job: Job, degrees: JobLayout, wanted: Wanted) -> Iterator[JobLayout]:
    """Yield micro-batches, virtual stages, recomputation, sequence parallelism and degrees of experts."""
    pipe, data, seq, tensor = degrees.pipe, degrees.data, degrees.seq, degrees.model
    software, model = job.software, job.model
    topology = wanted.topology if wanted.topology is not None else degrees.topology
    most = software.virtual_stages if pipe > 1 else 1
    virtuals = [wanted.virtual_stages] if wanted.virtual_stages else _virtual_stages(model.layers, pipe, most)
    split = [False]
    if software.sequence_parallel and tensor > 1 and job.sequence % (seq * tensor) == 0:
        split = [True] if software.regathers else [False, True]
    if wanted.sequence_parallel is not None:
        split = [wanted.sequence_parallel]
    over = gcd(model.expert_count or 1, data * seq)
    experts = [wanted.expert_parallel] if wanted.expert_parallel else divisors(over)
    # ``zero_stages`` replaces the first stage by all of them later
    zero = software.zero_stages(pipe, job.precision)[0] if wanted.zero is None else wanted.zero
    kinds = wanted.recompute or software.recompute
    choices = product(micro_batches(job, data, wanted), virtuals, kinds, split, experts)
    for micro_batch, virtual, kind, spread, sharers in choices:
        yield JobLayout(topology, micro_batch, zero, kind, virtual, spread, sharers)


def micro_batches(job: Job, data: int, wanted: Wanted) -> list[int]:
    """Return the micro-batches to choose from."""
    if wanted.micro_batch:
        return [wanted.micro_batch]
    return [size for size in divisors(job.batch // data) if size <= LARGEST_MICRO_BATCH]


def _virtual_stages(layers: int, pipe: int, most: int) -> list[int]:
    """Return the numbers of virtual stages, up to ``most``, that make chunks of different lengths, the fewest of each.

    >>> _virtual_stages(layers=12, pipe=2, most=3)
    [1, 2, 3]
    """
    by_length = {-(-layers // (pipe * virtual)): virtual for virtual in range(-(-layers // pipe), 0, -1)}
    return sorted(virtual for virtual in by_length.values() if virtual <= most)


def _fastest(job: Job, wanted: Wanted, tally: Tally, kept: int) -> list[Plan]:
    """Return the fastest fitting layout of each of at least the ``kept`` best sets of degrees, the fastest first."""
    costs = Costs(job)
    best: list[Plan] = []
    nodes = []
    for degrees in possible_degrees(job, wanted, tally.degree_problems):
        # no layout of these degrees beats the largest micro-batch's work, spread evenly over stages
        largest = replace(degrees, micro_batch=max(micro_batches(job, degrees.data, wanted)))
        nodes.append((schedule_bound(costs, largest, even=True), degrees))
    nodes.sort(key=lambda node: node[0])
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


def _best_of_degrees(costs: Costs, degrees: JobLayout, wanted: Wanted, tally: Tally, limit: float) -> Plan | None:
    """Return the fastest fitting layout of these degrees in any order of axes, if faster than ``limit`` seconds."""
    nodes: list[tuple[float, int, JobLayout]] = []
    for index, layout in enumerate(schedules(costs.job, degrees, wanted)):
        problem = layout_problem(costs.job, layout)
        if problem:
            tally.layout_problems[problem] += 1
            continue
        if not any(_with_states_that_fit(costs, layout, wanted)):
            _best_of_schedule(costs, layout, wanted, tally, None)  # for the tally; a bound would cost more
            continue
        nodes.append((schedule_bound(costs, layout), index, layout))
    best: Plan | None = None
    for position, (bound, _, layout) in enumerate(sorted(nodes, key=lambda node: node[:2])):
        if bound >= (best.seconds if best else limit):
            tally.bounded += len(nodes) - position
            break
        best = _best_of_schedule(costs, layout, wanted, tally, best)
    return best


def _with_states_that_fit(costs: Costs, layout: JobLayout, wanted: Wanted) -> Iterator[JobLayout]:
    """Yield the layout in those ZeRO stages in which states alone fit in memory."""
    for zero in zero_stages(costs.job, layout, wanted):
        candidate = replace(layout, zero=zero)
        if largest_states(costs, candidate) <= costs.job.cluster.memory_limit and not layout_problem(
            costs.job, candidate
        ):
            yield candidate


def _best_of_schedule(costs: Costs, layout: JobLayout, wanted: Wanted, tally: Tally, best: Plan | None) -> Plan | None:
    """Return the better of ``best`` and the fastest fitting layout of this schedule over ZeRO stages and orders."""
    job = costs.job
    for candidate in _partitioned(job, layout, wanted):
        problem = layout_problem(job, candidate)
        if problem:
            tally.layout_problems[problem] += 1
            continue
        states = largest_states(costs, candidate)
        if states > job.cluster.memory_limit and tally.smallest and states >= tally.smallest[1].total:
            tally.too_large += 1  # states alone are too large, and more than the smallest layout needs
            continue
        memory = memory_use(costs, candidate)
        if memory.total > job.cluster.memory_limit:
            tally.too_large += 1
            if tally.smallest is None or memory.total < tally.smallest[1].total:
                tally.smallest = (candidate, memory)
            continue
        for placed in _placements(costs, candidate, wanted).values():
            tally.evaluated += 1
            time = step_time(costs, placed)
            if best is None or time.total < best.seconds * (1 - 1e-9):
                best = Plan(placed, time, memory)
    return best


def _partitioned(job: Job, layout: JobLayout, wanted: Wanted) -> Iterator[JobLayout]:
    """Yield the layout in each ZeRO stage, partitioned over all replicas, and over those of a host alone."""
    topology, decided = layout.topology, dict(wanted.degrees).get(SHARD)
    degrees = dict(zip(topology.axes, topology.dims, strict=True))
    data, slots = degrees.get(DATA, 1), job.cluster.slots // (layout.model * layout.seq)
    inside = decided or max((size for size in divisors(data) if size <= slots), default=1)
    may_split = wanted.topology is None and data % inside == 0 and inside > 1 and (inside < data or bool(decided))
    may_split = may_split and job.software.shards and not job.model.expert_count and job.cluster.hosts > 1
    split = {**degrees, DATA: data // inside, SHARD: inside}
    axes = [axis for axis in AXES if axis in split]
    for zero in zero_stages(job, layout, wanted):
        if not decided or decided == 1:
            yield replace(layout, zero=zero)
        if zero and may_split:
            yield replace(layout, zero=zero, topology=ProcessTopology(axes, [split[axis] for axis in axes]))


def _placements(costs: Costs, layout: JobLayout, wanted: Wanted) -> dict[tuple[Span, ...], JobLayout]:
    """Return the orders of the axes that put groups on different links, one for each such placement."""
    placements: dict[tuple[Span, ...], JobLayout] = {}
    for topology in orders(layout.topology) if wanted.topology is None else [wanted.topology]:
        placed = replace(layout, topology=topology)
        placements.setdefault(tuple(layout_spans(costs, placed).values()), placed)
    return placements


def smallest_cluster(job: Job, wanted: Wanted) -> Cluster | None:
    """Return the job's cluster with as many hosts as some layout needs to fit, or None if no number of them does.

    The user's decisions are kept, except for the degree of ``data``, which grows with the hosts. A decided topology
    keeps its other degrees, in any order. The number is the smallest exactly if it is at most twice ``STEPS``.
    """
    degrees = wanted.degrees
    if wanted.topology is not None:
        degrees = tuple(zip(wanted.topology.axes, wanted.topology.dims, strict=True))
    wanted = replace(wanted, topology=None, degrees=tuple((axis, size) for axis, size in degrees if axis != DATA))
    too_few, hosts = job.cluster.hosts, 2 * job.cluster.hosts
    while not _fits(_on_hosts(job, hosts), wanted):
        too_few, hosts = hosts, 2 * hosts
        if hosts > MOST_HOSTS:
            return None
    weights = job.model.parameters * job.precision.activation_bytes  # the hosts hold each at least once
    fewest = max(too_few + 1, ceil(weights / job.cluster.memory_limit / job.cluster.slots))
    fewer = range(fewest, hosts, max(1, (hosts - too_few) // STEPS))
    enough = next((number for number in fewer if _fits(_on_hosts(job, number), wanted)), hosts)
    return _on_hosts(job, enough).cluster


def _on_hosts(job: Job, hosts: int) -> Job:
    return replace(job, cluster=replace(job.cluster, hosts=hosts))


def _fits(job: Job, wanted: Wanted) -> bool:
    costs = Costs(job)
    return any(
        memory_use(costs, candidate).total <= job.cluster.memory_limit
        for degrees in possible_degrees(job, wanted, Counter())
        for layout in schedules(job, degrees, wanted)
        for candidate in _with_states_that_fit(costs, layout, wanted)
    )


def _no_plan(job: Job, wanted: Wanted, tally: Tally) -> TopologyError:
    """Return the error that says why nothing was found, and what to change."""
    cluster, decided = job.cluster, wanted.decisions()
    within = f" with what is decided ({', '.join(decided)})" if decided else ""
    if tally.smallest is None:
        return TopologyError(f"no layout of {cluster.ranks} ranks is possible{within}: {_reasons(tally)}")
    layout, memory = tally.smallest
    enough = smallest_cluster(job, wanted)
    advice = (
        f"use at least {enough.hosts} hosts with {enough.slots} slots ({enough.ranks} ranks)"
        if enough
        else "more hosts alone do not help: one sequence needs too much memory on one rank"
    )
    return TopologyError(
        f"{job.model.name} does not fit in the memory of {cluster.ranks} ranks of {cluster.accelerator.name}{within}: "
        f"the smallest layout ({layout}) needs {memory.total / 1e9:.1f} GB per rank, "
        f"{(memory.total - cluster.memory_limit) / 1e9:.1f} GB more than the {cluster.memory_limit / 1e9:.1f} GB there "
        f"are; {advice}"
    )


def _reasons(tally: Tally) -> str:
    """Return the rules that layouts broke, each with the numbers that broke it most often.

    If some degrees are possible, the rules that others break are not the reason. Rules about the batch come first,
    since it is the easiest to change.
    """
    by_rule: dict[str, Counter[str]] = {}
    for problem, count in (tally.layout_problems or tally.degree_problems).items():
        by_rule.setdefault(_rule(problem), Counter())[problem] += count
    rules = sorted(by_rule.values(), key=lambda problems: -problems.total())
    texts = [problems.most_common(1)[0][0] for problems in rules]
    texts.sort(key=lambda text: "the batch of" not in text)
    return "; ".join(texts[:4]) or "no degrees multiply to it"


def _rule(problem: str) -> str:
    """Return a problem without its numbers and choices.

    >>> _rule("model=5 does not divide the 12 attention heads; choose one of [1, 2]")
    'model= does not divide the  attention heads'
    """
    return re.sub(r"\d+", "", re.split(r"[;(\[]", problem)[0]).strip()
