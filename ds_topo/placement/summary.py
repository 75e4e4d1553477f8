"""Large layouts in few words: runs of hosts with what they hold, lists of ranks by their first and last members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ds_topo.placement.node_list import fold_node_list
from ds_topo.placement.placement import Placement
from ds_topo.topology import ProcessTopology


@dataclass(frozen=True)
class HostRun:
    """Neighboring hosts that have the same indices of the outermost axis.

    Args:
        hosts: their names, folded, ``n[0001-0128]``.
        count: how many.
        ranks: the first and the last rank on them.
        indices: the indices of each axis that they hold, as text, ``0-127``.
    """

    hosts: str
    count: int
    ranks: tuple[int, int]
    indices: tuple[str, ...]


def host_runs(
    topology: ProcessTopology, names: Sequence[str], ranks_on_hosts: Sequence[Sequence[int]]
) -> list[HostRun]:
    """All hosts, in runs.

    >>> topology = ProcessTopology.from_spec("pipe=2,data=64,model=8")
    >>> names, ranks = [f"n{i:03d}" for i in range(128)], [range(8 * i, 8 * i + 8) for i in range(128)]
    >>> for run in host_runs(topology, names, ranks):
    ...     print(run.hosts, run.ranks, run.indices)
    n[000-063] (0, 511) ('0', '0-63', '0-7')
    n[064-127] (512, 1023) ('1', '0-63', '0-7')
    """
    held = indices_held(topology, ranks_on_hosts)
    outermost = next((axis for axis, size in enumerate(topology.dims) if size > 1), 0)
    runs = []
    for _, members in groupby(range(len(held)), key=lambda host: held[host][outermost]):
        hosts = list(members)
        indices = (sorted(set().union(*(held[host][axis] for host in hosts))) for axis in range(len(held[0])))
        runs.append(
            HostRun(
                fold_node_list([names[host] for host in hosts]),
                len(hosts),
                (min(ranks_on_hosts[host][0] for host in hosts), max(ranks_on_hosts[host][-1] for host in hosts)),
                tuple(fold_numbers(numbers) for numbers in indices),
            )
        )
    return runs


def indices_held(
    topology: ProcessTopology, ranks_on_hosts: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], ...]]:
    """For every host, the indices of each axis that its ranks have, ascending."""
    coordinate_of = topology.layout.coordinate_of
    return [
        tuple(tuple(sorted(set(indices))) for indices in zip(*map(coordinate_of, ranks), strict=True))
        for ranks in ranks_on_hosts
    ]


def host_patterns(
    topology: ProcessTopology, ranks_on_hosts: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """How many hosts hold how many indices of each axis, the most frequent pattern first.

    >>> host_patterns(ProcessTopology.from_spec("pipe=2,data=4"), [range(4), range(4, 8)])
    [(2, (1, 4))]
    """
    patterns = Counter(tuple(map(len, indices)) for indices in indices_held(topology, ranks_on_hosts))
    return [(count, pattern) for pattern, count in patterns.most_common()]


def fold_numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges.

    >>> fold_numbers([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def few_ranks(ranks: Sequence[int], most: int = 16) -> str:
    """A list of ranks, shortened where it is long.

    >>> few_ranks([0, 8, 16]), few_ranks(range(0, 1024, 8))
    ('[0, 8, 16]', '[0, 8, 16, ..., 1016] (128 ranks)')
    """
    if len(ranks) <= most:
        return f"[{', '.join(map(str, ranks))}]"
    return f"[{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}] ({len(ranks):,} ranks)"


@dataclass(frozen=True)
class Moves:
    """What changes from one placement of as many ranks to another.

    Args:
        ranks: ranks whose coordinate changes, ascending.
        comparable: whether both have the same axes with the same degrees, in any order: a coordinate of one is then a
            coordinate of the other.
        shards_to_other_hosts: coordinates, and with them what is stored there, whose host changes; None unless
            comparable.
    """

    ranks: tuple[int, ...]
    comparable: bool
    shards_to_other_hosts: int | None


def moves(before: Placement, after: Placement) -> Moves:
    """What moves between two placements of as many ranks.

    >>> from ds_topo.placement.hosts import Hosts
    >>> hosts = Hosts.uniform(2, slots=2)
    >>> moves(Placement.of("pipe=2,data=2", hosts), Placement.of("data=2,pipe=2", hosts))
    Moves(ranks=(1, 2), comparable=True, shards_to_other_hosts=2)
    """
    old, new = before.topology, after.topology
    comparable = dict(zip(old.axes, old.dims, strict=True)) == dict(zip(new.axes, new.dims, strict=True))
    changed = tuple(
        rank for rank in range(old.world_size()) if named_coordinate(old, rank) != named_coordinate(new, rank)
    )
    if not comparable:
        return Moves(changed, comparable, None)
    order = [old.axes.index(axis) for axis in new.axes]
    shards = 0
    for rank in changed:
        coordinate = old.layout.coordinate_of(rank)
        target = new.layout.rank_of([coordinate[axis] for axis in order])
        shards += before.host_map.host_of(rank).name != after.host_map.host_of(target).name
    return Moves(changed, comparable, shards)


def named_coordinate(topology: ProcessTopology, rank: int) -> dict[str, int]:
    """The coordinate of a rank by axis, axes of degree 1 left out."""
    indices = topology.layout.coordinate_of(rank)
    return {axis: index for axis, index, size in zip(topology.axes, indices, topology.dims, strict=True) if size > 1}
