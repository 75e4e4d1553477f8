"""Place a topology on hosts, count what crosses hosts, and summarise large layouts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from ds_topo.errors import TopologyError, WorldSizeError, fold_node_list, fold_numbers
from ds_topo.launch.hosts import HostMap, Hosts
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import Spec
from ds_topo.topology.rank_tables import axes_of, copy_axes, degree, grid_groups, partition_axes


@dataclass(frozen=True)
class AxisSpan:
    """All groups over one axis or several on hosts.

    Args:
        hosts_per_group: the fewest and the most hosts of a group.
        pairs: the number of pairs of ranks in all groups, between which an all-to-all sends.
        ring_links: the number of links in the rings rank -> next rank -> ... -> first rank of all groups, over which an
            all-reduce or a pipeline sends; two ranks have one.

    >>> Placement.of("pipe=2,data=4", Hosts.uniform(2, slots=4)).span("pipe").pairs_across_hosts
    4
    """

    hosts_per_group: tuple[int, int]
    groups_across_hosts: int
    pairs: int
    pairs_across_hosts: int
    ring_links: int
    ring_links_across_hosts: int


@dataclass(frozen=True)
class Placement:
    """A topology on hosts.

    >>> placement = Placement.of("pipe=2,data=-1", Hosts.uniform(2, slots=4))
    >>> placement.topology, placement.span("data").groups_across_hosts
    (ProcessTopology('pipe=2,data=4'), 0)
    """

    topology: ProcessTopology
    host_map: HostMap

    def __post_init__(self) -> None:
        self.topology.check_world_size(self.host_map.size)

    @classmethod
    def of(cls, spec: Spec, hosts: Hosts | HostMap) -> Placement:
        """Place a spec on hosts, with one rank in each slot; an error gives the nearest spec that fits."""
        host_map = HostMap.block(hosts) if isinstance(hosts, Hosts) else hosts
        try:
            return cls(ProcessTopology.from_spec(spec, host_map.size), host_map)
        except WorldSizeError as error:
            try:
                needed = ProcessTopology.from_spec(spec).world_size()
            except TopologyError:  # one degree is -1
                needed = 0
            if needed > host_map.size:
                problem = "more ranks than slots"
            elif needed:
                problem = (
                    "slots would be left over, but launchers use each of them: use all, or leave out hosts or slots"
                )
            else:
                problem = "the slots cannot be divided"
            there = f"{len(host_map.hosts)} hosts" if len(host_map.hosts) > 1 else "1 host"
            slots = f"{host_map.size} slots" if host_map.size > 1 else "1 slot"
            raise WorldSizeError(f"{problem}: {there} with {slots} in all; {error}") from None

    def span(self, axes: str | tuple[str, ...]) -> AxisSpan:
        """Count the hosts of all groups over one axis or several, and what crosses hosts in them."""
        tables = self.topology.get_axis_comm_lists(axes_of(self.topology, axes))
        groups = [[self.host_map.host_indices[rank] for rank in ranks] for ranks in tables]
        hosts = [len(set(group)) for group in groups]
        pairs = sum(len(group) * (len(group) - 1) // 2 for group in groups)
        inside = sum(count * (count - 1) // 2 for group in groups for count in Counter(group).values())
        links = [link for group in groups for link in pairwise([*group, group[0]] if len(group) > 2 else group)]
        return AxisSpan(
            hosts_per_group=(min(hosts, default=0), max(hosts, default=0)),
            groups_across_hosts=sum(number > 1 for number in hosts),
            pairs=pairs,
            pairs_across_hosts=pairs - inside,
            ring_links=len(links),
            ring_links_across_hosts=sum(here != there for here, there in links),
        )

    def hosts_of(self, ranks: Iterable[int]) -> list[str]:
        """Return the names of the hosts of these ranks, each once, in the order of the hosts."""
        names = self.host_map.hosts.names
        return [names[index] for index in sorted({self.host_map.host_index(rank) for rank in ranks})]


def gradients_across_hosts(placement: Placement) -> tuple[float, float]:
    """Return what the busiest host sends to others for ZeRO, in units of the bytes of one rank's gradients.

    The first number is per step: the sums over the copies of partitions, of which each of ``h`` hosts sends
    ``2 (h - 1) / h`` of each partition. The second is per reduction to, or gathering from, the owners of partitions.

    >>> hosts = Hosts.uniform(2, slots=4)
    >>> [gradients_across_hosts(Placement.of(spec, hosts)) for spec in ("data=2,shard=4", "shard=2,data=4", "data=8")]
    [(1.0, 0.0), (0.0, 2.0), (0.0, 0.5)]
    """
    topology = placement.topology
    copies, partitions = copy_axes(topology), partition_axes(topology)
    return (
        2 * _most_sent(placement, copies) / degree(topology, partitions) if copies else 0.0,
        _most_sent(placement, partitions) if partitions else 0.0,
    )


def _most_sent(placement: Placement, axes: tuple[str, ...]) -> float:
    """Return the most that a host sends if each host of a group sends all but its own share to the others, once."""
    sent: dict[int, float] = defaultdict(float)
    for ranks in placement.topology.get_axis_comm_lists(axes):
        hosts = {placement.host_map.host_indices[rank] for rank in ranks}
        for host in hosts:
            sent[host] += (len(hosts) - 1) / len(hosts)
    return max(sent.values())


def group_axes(topology: ProcessTopology) -> list[tuple[str, ...]]:
    """Return the axes of each kind of group that a grid creates: every axis, data parallel, model parallel.

    Sets of axes of which only one has a degree above 1 have the same groups as that axis, and are left out.

    >>> group_axes(ProcessTopology.from_spec("pipe=2,data=2,model=2"))
    [('pipe',), ('data',), ('model',), ('pipe', 'model')]
    """
    spans = [group.axes for group in grid_groups(topology, 0)]
    return [span for span in spans if len(span) == 1 or sum(topology.get_dim(axis) > 1 for axis in span) > 1]


# -- summaries of large layouts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostRun:
    """Neighboring hosts with the same indices of the outermost axis: ``n[0001-0128]``, their number, ..."""

    hosts: str
    count: int
    ranks: tuple[int, int]
    """The first and the last rank."""
    indices: tuple[str, ...]
    """The indices of each axis, as text, ``0-127``."""


def host_runs(
    topology: ProcessTopology, names: Sequence[str], ranks_on_hosts: Sequence[Sequence[int]]
) -> list[HostRun]:
    """Group all hosts into runs.

    >>> topology = ProcessTopology.from_spec("pipe=2,data=64,model=8")
    >>> names, ranks = [f"n{i:03d}" for i in range(128)], [range(8 * i, 8 * i + 8) for i in range(128)]
    >>> for run in host_runs(topology, names, ranks):
    ...     print(run.hosts, run.ranks, run.indices)
    n[000-063] (0, 511) ('0', '0-63', '0-7')
    n[064-127] (512, 1023) ('1', '0-63', '0-7')
    """
    held = _indices_held(topology, ranks_on_hosts)
    outermost = next((axis for axis, size in enumerate(topology.dims) if size > 1), 0)
    runs = []
    for _, members in groupby(range(len(held)), key=lambda host: held[host][outermost]):
        hosts = list(members)
        name = fold_node_list([names[host] for host in hosts])
        ranks = min(ranks_on_hosts[host][0] for host in hosts), max(ranks_on_hosts[host][-1] for host in hosts)
        by_axis = zip(*(held[host] for host in hosts), strict=True)
        indices = tuple(fold_numbers(sorted(set().union(*of_axis))) for of_axis in by_axis)
        runs.append(HostRun(name, len(hosts), ranks, indices))
    return runs


def _indices_held(
    topology: ProcessTopology, ranks_on_hosts: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], ...]]:
    """Return, for every host, the ascending indices of its ranks along each axis."""
    coordinate_of = topology.layout.coordinate_of
    return [
        tuple(tuple(sorted(set(indices))) for indices in zip(*map(coordinate_of, ranks), strict=True))
        for ranks in ranks_on_hosts
    ]


def host_patterns(
    topology: ProcessTopology, ranks_on_hosts: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Count hosts by the number of indices that they hold of each axis, the most frequent pattern first.

    >>> host_patterns(ProcessTopology.from_spec("pipe=2,data=4"), [range(4), range(4, 8)])
    [(2, (1, 4))]
    """
    patterns = Counter(tuple(map(len, indices)) for indices in _indices_held(topology, ranks_on_hosts))
    return [(count, pattern) for pattern, count in patterns.most_common()]


def few_ranks(ranks: Sequence[int], most: int = 16) -> str:
    """Write a list of ranks, shortened if it is long.

    >>> few_ranks([0, 8, 16]), few_ranks(range(0, 1024, 8))
    ('[0, 8, 16]', '[0, 8, 16, ..., 1016] (128 ranks)')
    """
    if len(ranks) <= most:
        return f"[{', '.join(map(str, ranks))}]"
    return f"[{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}] ({len(ranks):,} ranks)"
