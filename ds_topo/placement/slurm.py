"""Hosts and ranks of a Slurm job or job step, from the variables that ``salloc``, ``sbatch`` and ``srun`` set."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path

from ds_topo.errors import HostError
from ds_topo.placement.hosts import Host, HostMap, Hosts
from ds_topo.placement.node_list import expand_counts, expand_node_list

_ADVICE = "give the number of tasks when the job is asked for, such as `salloc -N 2 --ntasks-per-node 4`"


def slurm_nodes(environ: Mapping[str, str]) -> list[str]:
    """The nodes of the step, or of the job outside a step, in the order in which Slurm numbers them.

    Raises:
        HostError: not inside a Slurm job, or a malformed list.
    """
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    for name in names[0 if in_step(environ) else 1 :]:
        if environ.get(name):
            return expand_node_list(environ[name])
    raise HostError(
        "not inside a Slurm job (SLURM_JOB_NODELIST is not set): run this inside `salloc`, `sbatch` or `srun`, or name "
        "the nodes instead"
    )


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether the variables are those of a task that ``srun`` started, not of a batch script or an ``salloc`` shell."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ


def slurm_map(environ: Mapping[str, str]) -> HostMap:
    """Which node every task of the step has; outside a step, of one that ``srun`` would start without more options.

    >>> slurm_map({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}).host_indices
    (0, 0, 1)

    Raises:
        HostError: not inside a Slurm job, a job without tasks, or variables that contradict each other.
    """
    nodes = slurm_nodes(environ)
    name = "SLURM_STEP_TASKS_PER_NODE" if in_step(environ) else "SLURM_TASKS_PER_NODE"
    if not environ.get(name):
        raise HostError(f"the Slurm job has no tasks ({name} is not set): {_ADVICE}")
    counts = expand_counts(environ[name])
    if len(counts) != len(nodes):
        raise HostError(
            f"{name}={environ[name]!r} is for {len(counts)} nodes, but the job has {len(nodes)}: {nodes[:8]}"
        )
    if not all(counts):
        raise HostError(f"{name}={environ[name]!r}: node {nodes[counts.index(0)]!r} has no task; {_ADVICE}")
    hosts = Hosts(tuple(Host.of(node, count) for node, count in zip(nodes, counts, strict=True)))
    order = _order(environ, hosts)
    return HostMap.block(hosts) if order is None else HostMap.in_order(hosts, order)


def _order(environ: Mapping[str, str], hosts: Hosts) -> list[int] | None:
    """The node of every task, or None for one node after the other (``srun --distribution``)."""
    distribution = environ.get("SLURM_DISTRIBUTION", "block").split(",")[0].split(":")[0]
    if distribution in ("block", "*", ""):
        return None
    if distribution == "arbitrary":
        return _arbitrary_order(environ.get("SLURM_HOSTFILE", ""), hosts)
    if distribution == "cyclic":
        plane = "1"
    elif distribution.startswith("plane"):
        plane = distribution.partition("=")[2] or environ.get("SLURM_DIST_PLANESIZE", "")
    else:
        raise HostError(f"SLURM_DISTRIBUTION={distribution!r} is not one of block, cyclic, plane, arbitrary")
    if not plane.isdecimal() or int(plane) < 1:
        raise HostError(
            f"SLURM_DISTRIBUTION={distribution!r} needs SLURM_DIST_PLANESIZE, a whole number >= 1, not {plane!r}"
        )
    size = int(plane)
    turns = [
        [[index] * len(slots[first : first + size]) for first in range(0, len(slots), size)]
        for index, slots in ((index, host.slots) for index, host in enumerate(hosts))
    ]
    return [index for turn in zip_longest(*turns, fillvalue=[]) for planes in turn for index in planes]


def _arbitrary_order(path: str, hosts: Hosts) -> list[int]:
    """The node of every task by the file that ``srun --distribution=arbitrary`` was given."""
    where = f"SLURM_DISTRIBUTION=arbitrary, and SLURM_HOSTFILE={path!r}"
    try:
        words = Path(path).read_text(encoding="utf-8").replace(",", " ").split()
    except (OSError, ValueError) as error:
        raise HostError(f"{where}, which says which node has which task, cannot be read: {error}") from error
    number = {name: index for index, name in enumerate(hosts.names)}
    if sorted(word for word in words if word in number) != sorted(host.name for host in hosts for _ in host.slots):
        raise HostError(f"{where} does not name every node of {list(hosts.names[:8])} once for each of its tasks")
    return [number[word] for word in words if word in number]
