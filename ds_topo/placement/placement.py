"""A topology on hosts: which groups stay inside a host, and which cross."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ds_topo.errors import TopologyError, WorldSizeError
from ds_topo.placement.hosts import HostMap, Hosts
from ds_topo.topology import ProcessTopology
from ds_topo.topology.rank_tables import axes_of, grid_groups
from ds_topo.topology.spec import Spec


@dataclass(frozen=True)
class GroupSpan:
    """One group of ranks on hosts.

    Args:
        ranks: ascending.
        hosts: the number of each host that it spans, ascending.
        crossing_pairs: pairs of its ranks on different hosts: what an all-to-all sends between hosts.
        crossing_links: of the ring rank -> next rank -> ... -> first rank, the links between hosts: what an all-reduce
            or a pipeline sends over.
    """

    ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    crossing_pairs: int
    crossing_links: int

    @property
    def pairs(self) -> int:
        """All pairs of its ranks."""
        return len(self.ranks) * (len(self.ranks) - 1) // 2

    @property
    def links(self) -> int:
        """All links of its ring; two ranks have one."""
        return len(self.ranks) if len(self.ranks) > 2 else len(self.ranks) - 1


@dataclass(frozen=True)
class AxisSpan:
    """All groups over one axis, or several axes, on hosts.

    >>> Placement.of("pipe=2,data=4", Hosts.uniform(2, slots=4)).span("pipe").crossing_pairs
    4
    """

    axes: tuple[str, ...]
    groups: tuple[GroupSpan, ...]

    @property
    def size(self) -> int:
        """Ranks in each group."""
        return len(self.groups[0].ranks)

    @property
    def hosts_per_group(self) -> tuple[int, int]:
        """The fewest and the most hosts of a group."""
        numbers = [len(group.hosts) for group in self.groups]
        return min(numbers), max(numbers)

    @property
    def crossing_groups(self) -> int:
        """Groups that span more than one host."""
        return sum(len(group.hosts) > 1 for group in self.groups)

    @property
    def pairs(self) -> int:
        """Pairs of ranks of all groups."""
        return sum(group.pairs for group in self.groups)

    @property
    def crossing_pairs(self) -> int:
        """Pairs on different hosts."""
        return sum(group.crossing_pairs for group in self.groups)

    @property
    def links(self) -> int:
        """Links of the rings of all groups."""
        return sum(group.links for group in self.groups)

    @property
    def crossing_links(self) -> int:
        """Links between hosts."""
        return sum(group.crossing_links for group in self.groups)


@dataclass(frozen=True)
class Placement:
    """A topology whose every rank has a host.

    Args:
        topology: which coordinate every rank has.
        host_map: which host.

    Raises:
        WorldSizeError: the topology is not for as many ranks; the message names the nearest that is.

    >>> placement = Placement.of("pipe=2,data=-1", Hosts.uniform(2, slots=4))
    >>> placement.topology, placement.span("data").crossing_groups
    (ProcessTopology('pipe=2,data=4'), 0)
    """

    topology: ProcessTopology
    host_map: HostMap

    def __post_init__(self) -> None:
        self.topology.check_world_size(self.host_map.size)

    @classmethod
    def of(cls, spec: Spec, hosts: Hosts | HostMap) -> Placement:
        """A spec, one of whose degrees may be -1, on hosts; one rank in each slot.

        Raises:
            TopologyError: a malformed spec.
            WorldSizeError: its ranks are more or fewer than the slots; the message names the nearest that fit.
        """
        host_map = HostMap.block(hosts) if isinstance(hosts, Hosts) else hosts
        return cls(fit(spec, host_map), host_map)

    def axes_of_groups(self) -> list[tuple[str, ...]]:
        """The axes of each kind of group that training creates, as ``PipelineParallelGrid`` does."""
        return group_axes(self.topology)

    def span(self, axes: str | tuple[str, ...]) -> AxisSpan:
        """The hosts of every group over one axis or several."""
        names = axes_of(self.topology, axes)
        return AxisSpan(names, tuple(self._group_span(ranks) for ranks in self.topology.get_axis_comm_lists(names)))

    def hosts_of(self, ranks: Iterable[int]) -> list[str]:
        """The names of the hosts of these ranks, each once, in the order of the hosts."""
        names = self.host_map.hosts.names
        return [names[index] for index in sorted({self.host_map.host_index(rank) for rank in ranks})]

    def _group_span(self, ranks: list[int]) -> GroupSpan:
        host_indices = self.host_map.host_indices
        hosts = [host_indices[rank] for rank in ranks]
        counts = Counter(hosts)
        same_host = sum(count * (count - 1) // 2 for count in counts.values())
        neighbors = zip(hosts, [*hosts[1:], hosts[0]] if len(hosts) > 2 else hosts[1:], strict=False)
        return GroupSpan(
            tuple(ranks),
            tuple(sorted(counts)),
            len(ranks) * (len(ranks) - 1) // 2 - same_host,
            sum(here != there for here, there in neighbors),
        )


def group_axes(topology: ProcessTopology) -> list[tuple[str, ...]]:
    """The axes of each kind of group that a training grid creates: every axis, gradient replicas, model parallel.

    >>> group_axes(ProcessTopology.from_spec("pipe=2,data=2,model=2"))
    [('pipe',), ('data',), ('model',), ('pipe', 'model')]

    Several axes of which one alone has a degree above 1 have that one's groups and are left out.
    """
    spans = [group.axes for group in grid_groups(topology, 0)]
    return [span for span in spans if len(span) == 1 or sum(topology.get_dim(axis) > 1 for axis in span) > 1]


def fit(spec: Spec, host_map: HostMap) -> ProcessTopology:
    """The topology of a spec for the slots of hosts.

    Raises:
        TopologyError: a malformed spec.
        WorldSizeError: it does not fit; the message says which would.
    """
    try:
        return ProcessTopology.from_spec(spec, host_map.size)
    except WorldSizeError as error:
        needed = _ranks_of(spec)
        if needed > host_map.size:
            problem = "more ranks than slots"
        elif needed:
            problem = (
                "slots would be left over, but launchers start a rank in each (leave out hosts or slots, or use all)"
            )
        else:
            problem = "the slots cannot be shared out"
        hosts = f"{len(host_map.hosts)} hosts" if len(host_map.hosts) > 1 else "1 host"
        raise WorldSizeError(f"{problem}: {hosts} with {host_map.size} slots in all; {error}") from None


def _ranks_of(spec: Spec) -> int:
    """The ranks of a spec, 0 if one degree is -1."""
    try:
        return ProcessTopology.from_spec(spec).world_size()
    except TopologyError:
        return 0
