"""The smallest cluster that a job fits on, by memory alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil

from ds_topo.planner.candidates import Wanted, possible_degrees, schedules, zero_stages
from ds_topo.planner.cluster import Cluster
from ds_topo.planner.costs import Costs
from ds_topo.planner.layout import Job, layout_problem
from ds_topo.planner.memory import largest_states, memory_use
from ds_topo.topology.axes import DATA

MOST_HOSTS = 1 << 14
STEPS = 64
"""Numbers of hosts that are tried between one that is too small and the double of it."""


def smallest_cluster(job: Job, wanted: Wanted) -> Cluster | None:
    """The job's cluster with as many hosts as it takes for some layout to fit; None if no number of them does.

    What the user has decided stays decided, but for the degree of ``data`` (and of all axes in a topology), which grows
    with the hosts. The number is the smallest exactly where it is at most twice ``STEPS``.
    """
    if wanted.topology is not None:
        named = dict(zip(wanted.topology.axes, wanted.topology.dims, strict=True))
        wanted = replace(wanted, topology=None, degrees=tuple(named.items()))
    wanted = replace(wanted, degrees=tuple((axis, size) for axis, size in wanted.degrees if axis != DATA))
    too_few, hosts = job.cluster.hosts, 2 * job.cluster.hosts
    while not _fits(_on_hosts(job, hosts), wanted):
        too_few, hosts = hosts, 2 * hosts
        if hosts > MOST_HOSTS:
            return None
    step = max(1, (hosts - too_few) // STEPS)
    for fewer in range(max(too_few + 1, _fewest_hosts(job)), hosts, step):
        if _fits(_on_hosts(job, fewer), wanted):
            return _on_hosts(job, fewer).cluster
    return _on_hosts(job, hosts).cluster


def _on_hosts(job: Job, hosts: int) -> Job:
    return replace(job, cluster=replace(job.cluster, hosts=hosts))


def _fewest_hosts(job: Job) -> int:
    """No fewer can hold every parameter's weight once."""
    weights = job.model.parameters * job.precision.activation_bytes
    return ceil(weights / job.cluster.memory_limit / job.cluster.slots)


def _fits(job: Job, wanted: Wanted) -> bool:
    """Whether any layout fits."""
    costs = Costs(job)
    for degrees in possible_degrees(job, wanted, Counter()):
        for layout in schedules(job, degrees, wanted):
            for zero in [wanted.zero] if wanted.zero is not None else zero_stages(job, layout):
                candidate = replace(layout, zero=zero)
                if (
                    largest_states(costs, candidate) <= job.cluster.memory_limit
                    and layout_problem(job, candidate) is None
                    and memory_use(costs, candidate).total <= job.cluster.memory_limit
                ):
                    return True
    return False
