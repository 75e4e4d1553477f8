"""Read the hosts and ranks of a Slurm job or step from the variables that ``salloc``, ``sbatch`` and ``srun`` set.

Compact lists of nodes, ``n[01-03,7],gpu-a``, are parsed as ``scontrol show hostnames`` does, since Slurm's programs
are missing on laptops and in containers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product, zip_longest
from math import prod
from pathlib import Path

from ds_topo.errors import HostError
from ds_topo.hosts.hosts import Host, HostMap, Hosts

MAX_NAMES = 1_000_000
"""The most names or counts that a list may expand to."""
_ADVICE = "give the number of tasks in the request, such as `salloc -N 2 --ntasks-per-node 4`"

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]\s,]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})")


def expand_node_list(text: str) -> list[str]:
    """Return the names of a compact list, in order; numbers keep the zeros of the list.

    >>> expand_node_list("n[01-03,7],gpu-a")
    ['n01', 'n02', 'n03', 'n7', 'gpu-a']
    >>> expand_node_list("rack[0-1]-n[8-9]")
    ['rack0-n8', 'rack0-n9', 'rack1-n8', 'rack1-n9']

    Raises:
        HostError: the list is malformed, or has more than a million names.
    """
    names: list[str] = []
    for item in _items(text):
        pieces = _pieces(item, text)
        if len(names) + prod(map(len, pieces)) > MAX_NAMES:
            raise HostError(f"node list {text[:80]!r} has more than {MAX_NAMES} names")
        names += map("".join, product(*pieces))
    return names


def fold_node_list(names: Sequence[str]) -> str:
    """Invert ``expand_node_list``: fold names that differ only in their last number, where the numbers are consecutive.

    >>> fold_node_list(["n01", "n02", "n03", "n7", "gpu-a"])
    'n[01-03],n7,gpu-a'
    """
    runs: list[list[tuple[str, str]]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, digits = (match[1], match[2]) if match else (name, "")
        first, last = (runs[-1][0][1], runs[-1][-1][1]) if runs and prefix == runs[-1][0][0] else ("", "")
        if digits and last and digits == f"{int(last) + 1:0{len(first)}d}":
            runs[-1].append((prefix, digits))
        else:
            runs.append([(prefix, digits)])
    return ",".join(f"{run[0][0]}[{run[0][1]}-{run[-1][1]}]" if len(run) > 1 else "".join(run[0]) for run in runs)


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's compact list of counts, one per node.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]

    Raises:
        HostError: the list is malformed, or is for more than a million nodes.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None:
            raise HostError(f'counts {text[:80]!r} at {item!r}: expected "N" or "N(xTIMES)", such as "2(x3),1"')
        times = int(match[2] or 1)
        if len(counts) + times > MAX_NAMES:
            raise HostError(f"counts {text[:80]!r} are for more than {MAX_NAMES} nodes")
        counts += [int(match[1])] * times
    return counts


def _items(text: str) -> Iterator[str]:
    """Yield the items of a list, which are separated by commas outside brackets."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if not 0 <= depth <= 1:
            raise HostError(f"node list {text[:80]!r}: brackets do not match at {text[position : position + 10]!r}")
        if character == "," and depth == 0:
            yield text[start:position].strip()
            start = position + 1
    if depth:
        raise HostError(f"node list {text[:80]!r}: a bracket is not closed")
    yield text[start:].strip()


def _pieces(item: str, text: str) -> list[list[str]]:
    """Return the alternatives of each part of an item: ``n[1-2]`` is ``[["n"], ["1", "2"]]``."""
    pieces: list[list[str]] = []
    position = 0
    for match in _PIECE.finditer(item):
        if match.start() != position:
            break
        position = match.end()
        pieces.append([match[2]] if match[1] is None else _numbers(match[1], text))
    if position != len(item) or not pieces:
        raise HostError(
            f'node list {text[:80]!r} at {item[:40]!r}: expected names and bracketed ranges, "n[01-03,7],gpu-a"'
        )
    return pieces


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise HostError(
                f'node list {text[:80]!r} at "[{ranges[:40]}]": expected numbers and ranges such as "01-03,7"'
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise HostError(f"node list {text[:80]!r}: range {part!r} goes down")
        if len(numbers) + last - first >= MAX_NAMES:
            raise HostError(f"node list {text[:80]!r} has more than {MAX_NAMES} names")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started this process, rather than a batch script or a shell of ``salloc``."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ


def slurm_map(environ: Mapping[str, str]) -> HostMap:
    """Return the node of every task of the step, or outside a step, of the step that plain ``srun`` would start.

    >>> slurm_map({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}).host_indices
    (0, 0, 1)

    Raises:
        HostError: this is not a Slurm job, the job has no tasks, or variables contradict each other.
    """
    names = ["SLURM_STEP_NODELIST"] if in_step(environ) else []
    found = next((name for name in (*names, "SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(name)), None)
    if found is None:
        raise HostError(
            "not inside a Slurm job (SLURM_JOB_NODELIST is not set): run this inside `salloc`, `sbatch` or `srun`, or "
            "name the nodes instead"
        )
    nodes = expand_node_list(environ[found])
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
    return HostMap.block(hosts) if order is None else HostMap(hosts, tuple(order))


def _order(environ: Mapping[str, str], hosts: Hosts) -> list[int] | None:
    """Return the node of every task by ``srun --distribution``, or None for one node after the other."""
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
        [[index] * len(host.slots[first : first + size]) for first in range(0, len(host.slots), size)]
        for index, host in enumerate(hosts)
    ]
    return [index for turn in zip_longest(*turns, fillvalue=[]) for planes in turn for index in planes]


def _arbitrary_order(path: str, hosts: Hosts) -> list[int]:
    """Return the node of every task according to the hostfile of ``srun --distribution=arbitrary``."""
    where = f"SLURM_DISTRIBUTION=arbitrary, and SLURM_HOSTFILE={path!r}"
    try:
        words = Path(path).read_text(encoding="utf-8").replace(",", " ").split()
    except (OSError, ValueError) as error:
        raise HostError(f"{where}, which gives the node of every task, cannot be read: {error}") from error
    number = {name: index for index, name in enumerate(hosts.names)}
    if sorted(word for word in words if word in number) != sorted(host.name for host in hosts for _ in host.slots):
        raise HostError(f"{where} does not name every node of {list(hosts.names[:8])} once for each of its tasks")
    return [number[word] for word in words if word in number]
