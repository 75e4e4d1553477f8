"""Derive tables of ranks from a topology, as values that can be printed, compared and tested without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ds_topo.errors import ExpertSizeError, UnknownAxisError, require_switches
from ds_topo.topology.axes import (
    DATA,
    DEEPSPEED_AXES,
    EXPERT,
    MODEL,
    PIPE,
    SEQ,
    SHARD,
    axes_near,
    axis_in_spec,
    canonical_axis,
    divisors,
)
from ds_topo.topology.process_topology import PipeDataParallelTopology, ProcessTopology


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks: its axes, and its ranks in ascending order."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """The axes joined by ``+``."""
        return "+".join(self.axes)


def axes_of(topology: ProcessTopology, axes: str | Iterable[str]) -> tuple[str, ...]:
    """Return canonical names of axes, in placement order; absent ``pipe``, ``data``, ``model`` are left out.

    >>> axes_of(ProcessTopology.from_spec("data=2,tensor=2"), ("tp", "pipe", "data"))
    ('data', 'model')

    Raises:
        UnknownAxisError: an axis is neither in the topology nor one of DeepSpeed's, or not a name.
    """
    if not isinstance(axes, Iterable):
        raise UnknownAxisError(f"axes={axes!r}: give the name of an axis of {topology.spec!r}, or several names")
    names = {canonical_axis(axis) for axis in ([axes] if isinstance(axes, str) else axes)}
    if unknown := names.difference(topology.axes, DEEPSPEED_AXES):  # or abbreviations, as in a spec
        names = names - unknown | {axis_in_spec(axis) for axis in unknown}
        unknown = names.difference(topology.axes, DEEPSPEED_AXES)
    if unknown:
        near = axes_near(min(unknown, key=str), topology.axes)
        meant = f". Did you mean {near[0]!r}?" if near else ""
        raise UnknownAxisError(
            f"axis {sorted(unknown)} is not in the topology {topology.spec!r}: {topology.axes}{meant}"
        )
    return tuple(axis for axis in topology.axes if axis in names)


def gradient_axes(topology: ProcessTopology) -> tuple[str, ...]:
    """Return the axes along which replicas lie, whose gradients are summed: all but ``pipe`` and ``model``.

    >>> gradient_axes(ProcessTopology.from_spec("seq=2,pipe=2,data=2"))
    ('seq', 'data')
    """
    return tuple(axis for axis in topology.axes if axis not in (PIPE, MODEL))


def sample_axes(topology: ProcessTopology) -> tuple[str, ...]:
    """Return the gradient axes along which input samples differ: all but ``seq``, whose peers share a sample.

    >>> sample_axes(ProcessTopology.from_spec("seq=2,pipe=2,data=2"))
    ('data',)
    """
    return tuple(axis for axis in gradient_axes(topology) if axis != SEQ)


def partition_axes(topology: ProcessTopology) -> tuple[str, ...]:
    """Return the axes over which ZeRO partitions: ``shard`` if the topology has it, else all gradient axes.

    >>> partition_axes(ProcessTopology.from_spec("data=2,shard=4")), partition_axes(ProcessTopology.from_spec("data=8"))
    (('shard',), ('data',))
    """
    return (SHARD,) if SHARD in topology.axes else gradient_axes(topology)


def copy_axes(topology: ProcessTopology) -> tuple[str, ...]:
    """Return the axes along which ranks hold copies of one partition: the gradient axes beside ``shard``.

    >>> copy_axes(ProcessTopology.from_spec("data=2,shard=4")), copy_axes(ProcessTopology.from_spec("data=8"))
    (('data',), ())
    """
    shared = partition_axes(topology)
    return tuple(axis for axis in gradient_axes(topology) if axis not in shared)


def model_parallel_axes(topology: ProcessTopology) -> tuple[str, ...]:
    """Return the axes that split one replica of the model: ``pipe`` and ``model``."""
    return tuple(axis for axis in topology.axes if axis in (PIPE, MODEL))


def degree(topology: ProcessTopology, axes: Iterable[str]) -> int:
    """Return the number of ranks in a group over these axes; an absent axis has degree 1.

    >>> degree(ProcessTopology.from_spec("pipe=2,data=3"), ["data", "pipe", "model"])
    6
    """
    return prod(max(1, topology.get_dim(axis)) for axis in axes)


def fold_extra_axes(topology: ProcessTopology) -> ProcessTopology:
    """Fold extra axes into ``data``, and add ``pipe`` and ``data`` where they are absent, as DeepSpeed needs them.

    DeepSpeed's grid never reduces gradients over an axis that it does not know. After folding, replicas along such an
    axis are data parallel peers and share checkpoint names.

    >>> fold_extra_axes(ProcessTopology.from_spec("seq=2,pipe=2,data=2")).axes
    ['pipe', 'data']
    >>> fold_extra_axes(ProcessTopology.from_spec("data=2,model=2"))
    ProcessTopology('pipe=1,data=2,model=2')
    """
    present = set(topology.axes)
    if {PIPE, DATA} <= present <= set(DEEPSPEED_AXES):
        return topology
    names = [axis for axis in (PIPE, DATA) if axis not in present]
    names += [axis for axis in topology.axes if axis in DEEPSPEED_AXES]
    inside = {axis: (axis,) if axis in present else () for axis in names}
    return topology.fold({**inside, DATA: gradient_axes(topology)})


def grid_groups(topology: ProcessTopology, rank: int) -> list[RankGroup]:
    """Return the groups of a grid that ``rank`` belongs to: each axis, data parallel, model parallel.

    With an axis ``shard``, also the ranks with copies of one partition.

    >>> [(group.name, group.ranks) for group in grid_groups(ProcessTopology.from_spec("pipe=2,data=2,model=2"), 5)]
    [('pipe', (1, 5)), ('data', (5, 7)), ('model', (4, 5)), ('pipe+model', (0, 1, 4, 5))]
    """
    spans: list[tuple[str, ...]] = [(axis,) for axis in topology.axes]
    spans += [gradient_axes(topology), model_parallel_axes(topology)]
    spans += [copy_axes(topology)] if SHARD in topology.axes else []
    return [RankGroup(span, tuple(topology.get_axis_ranks(span, rank))) for span in dict.fromkeys(spans)]


def created_groups(topology: ProcessTopology, rank: int) -> list[RankGroup]:
    """Return the groups of ``grid_groups`` that a grid creates at the start, each set of ranks once.

    The world's own group exists already, and groups of one rank are created on request.

    >>> [group.name for group in created_groups(ProcessTopology.from_spec("pipe=1,data=2,model=2"), 0)]
    ['data', 'model']
    """
    by_ranks: dict[tuple[int, ...], RankGroup] = {}
    for group in grid_groups(topology, rank):
        if 1 < len(group.ranks) < topology.world_size():
            by_ranks.setdefault(group.ranks, group)
    return list(by_ranks.values())


def neighbor(topology: ProcessTopology, axis: str, rank: int, step: int) -> int:
    """Return the rank ``step`` places further along ``axis``, wrapping around.

    >>> neighbor(ProcessTopology.from_spec("pipe=4,data=2"), "pipe", rank=7, step=1)
    1
    """
    return topology.get_axis_peer(axis, rank, topology.get_axis_index(axis, rank) + step)


def has_two_levels(hosts: Mapping[int, str]) -> bool:
    """Tell whether ranks are on several hosts, with the same number, above one, on each host.

    >>> has_two_levels({0: "a", 1: "a", 4: "b", 5: "b"}), has_two_levels({0: "a", 1: "a", 2: "b"})
    (True, False)
    """
    counts = Counter(hosts.values())
    return len(counts) > 1 and len(set(counts.values())) == 1 and max(counts.values()) > 1


def two_level_ranks(ranks: Sequence[int], hosts: Mapping[int, str], rank: int) -> tuple[list[int], list[int]]:
    """Split a group into two levels: the peers of ``rank`` on its own host, and its counterparts, one on every host.

    >>> two_level_ranks([5, 1, 4, 0], {0: "a", 1: "a", 4: "b", 5: "b"}, rank=4)
    ([4, 5], [0, 4])
    """
    by_host: dict[str, list[int]] = {}
    for member in sorted(ranks):
        by_host.setdefault(hosts[member], []).append(member)
    local = by_host[hosts[rank]]
    counterparts = list(zip(*by_host.values(), strict=True))  # every host has as many ranks: has_two_levels()
    return local, sorted(counterparts[local.index(rank)])


def factorized_topology(world_size: int) -> ProcessTopology:
    """Return DeepSpeed's default topology: ascending prime factors, assigned to ``pipe`` and ``data`` in turn.

    >>> factorized_topology(24)
    ProcessTopology('pipe=4,data=6')
    """
    factors = _prime_factors(world_size)
    return PipeDataParallelTopology(num_pp=prod(factors[0::2]), num_dp=prod(factors[1::2]))


def _prime_factors(number: int) -> list[int]:
    """Return prime factors, ascending, with multiplicity (``deepspeed.runtime.pipe.topology._prime_factors``)."""
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return [*factors, number] if number > 1 else factors


# -- experts and partitions of parameters ------------------------------------------------------------------------------
# The experts of a layer are distributed over the ranks of one pipeline stage. The *pool* of a rank is the set of ranks
# that can hold replicas of its experts. With tensor parallel experts it is the data parallel group, since each slice
# holds a slice of every expert. Otherwise it is the whole stage, since slices then work on different tokens.
#
# An *expert parallel* group holds every expert once and exchanges tokens. An *expert data parallel* group holds the
# replicas of one rank's experts and sums their gradients. Each kind partitions the pool, and a group of one kind shares
# exactly one rank with a group of the other.


@dataclass(frozen=True)
class ExpertPlan:
    """The distribution of experts over the ranks of a topology, for one expert parallel size.

    Neighbors in the pool are ``model`` peers first, then peers along the innermost gradient axis; an axis ``expert``
    comes before both. An expert parallel group is a run of neighbors. With ``use_data_before_expert`` its ranks are as
    far apart in the pool as possible.

    Args:
        topology: the topology of the job.
        expert_parallel_size: the number of ranks in an expert parallel group; ``num_experts`` must be a multiple of it.
        expert_tensor_parallel: True if each expert is itself split along ``model``.
        use_data_before_expert: True if neighbors are expert data parallel peers
            (DeepSpeed's ``use_data_before_expert_parallel_``).

    Raises:
        TypeError: a switch is neither true nor false.
        ExpertSizeError: the size does not divide the pool. The message lists the divisors.

    >>> plan = ExpertPlan(ProcessTopology.from_spec("pipe=2,data=4"), expert_parallel_size=2)
    >>> plan.expert_tables()
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> plan.expert_data_tables()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """

    topology: ProcessTopology
    expert_parallel_size: int
    expert_tensor_parallel: bool = False
    use_data_before_expert: bool = False

    def __post_init__(self) -> None:
        require_switches(
            expert_tensor_parallel=self.expert_tensor_parallel, use_data_before_expert=self.use_data_before_expert
        )
        size, pool = self.expert_parallel_size, len(self._pool_offsets)
        if isinstance(size, bool) or not isinstance(size, int):
            raise ExpertSizeError(f"expert_parallel_size {size!r} is not an integer; choose one of {divisors(pool)}")
        if size < 1 or pool % size:
            raise ExpertSizeError(
                f"expert_parallel_size {size} must divide the {pool} ranks of a stage that share experts "
                f"({' x '.join(self._pool_axes)} of {self.topology.spec!r}): choose one of {divisors(pool)}"
            )

    @property
    def name(self) -> str:
        """The name under which ``deepspeed.moe.layer.MoE`` looks for its groups."""
        return name_of_size(self.expert_parallel_size)

    def pool(self, rank: int) -> list[int]:
        """Return the ranks that share the experts of ``rank``'s stage (and slice), with neighbors adjacent."""
        coordinate = self.topology.get_coord(rank)._asdict()
        base = self.topology.layout.rank_of(
            [0 if axis in self._pool_axes else coordinate[axis] for axis in self.topology.axes]
        )
        return [base + offset for offset in self._pool_offsets]

    def expert_ranks(self, rank: int) -> list[int]:
        """Return the ranks, ascending, that hold every expert of the layer once, including ``rank``."""
        return next(ranks for ranks in self._deal(self.pool(rank)) if rank in ranks)

    def expert_data_ranks(self, rank: int) -> list[int]:
        """Return the ranks, ascending, that hold the same experts as ``rank``."""
        dealt = self._deal(self.pool(rank))
        place = next(ranks.index(rank) for ranks in dealt if rank in ranks)
        return sorted(ranks[place] for ranks in dealt)

    def expert_tables(self) -> list[list[int]]:
        """Return the expert parallel groups of the whole job."""
        return [ranks for pool in self._pools() for ranks in self._deal(pool)]

    def expert_data_tables(self) -> list[list[int]]:
        """Return the expert data parallel groups of the whole job."""
        return [sorted(replicas) for pool in self._pools() for replicas in zip(*self._deal(pool), strict=True)]

    def writes_checkpoint(self, rank: int) -> bool:
        """Tell whether ``rank`` is the first of the replicas of its experts that share its slice.

        The names of checkpoint files contain the model parallel rank of the reader, so each slice needs a writer.
        """
        slice_peers = set(self.topology.get_axis_ranks(gradient_axes(self.topology), rank))
        return rank == min(slice_peers.intersection(self.expert_data_ranks(rank)))

    @cached_property
    def _pool_axes(self) -> tuple[str, ...]:
        """The axes of the pool, the one whose peers are furthest apart first."""
        axes = [axis for axis in gradient_axes(self.topology) if axis != EXPERT]
        if not self.expert_tensor_parallel and MODEL in self.topology.axes:
            axes.append(MODEL)
        if EXPERT in self.topology.axes:
            axes.append(EXPERT)
        return tuple(axes)

    @cached_property
    def _pool_offsets(self) -> list[int]:
        return self.topology.layout.offsets([self.topology.axes.index(axis) for axis in self._pool_axes])

    def _pools(self) -> list[list[int]]:
        outside = [axis for axis in self.topology.axes if axis not in self._pool_axes]
        bases = self.topology.layout.offsets([self.topology.axes.index(axis) for axis in outside])
        return [self.pool(base) for base in bases]

    def _deal(self, pool: list[int]) -> list[list[int]]:
        """Return the expert parallel groups of a pool, each ascending, as torch numbers the ranks of a group."""
        groups = len(pool) // self.expert_parallel_size
        if self.use_data_before_expert:
            return [sorted(pool[first::groups]) for first in range(groups)]
        size = self.expert_parallel_size
        return [sorted(pool[first : first + size]) for first in range(0, len(pool), size)]


def name_of_size(expert_parallel_size: int) -> str:
    """Return the name, ``ep_size_2``, under which ``deepspeed.moe.layer.MoE`` looks for groups of a size."""
    return f"ep_size_{expert_parallel_size}"


def zero_partition_ranks(topology: ProcessTopology, size: int, rank: int) -> list[int]:
    """Return the ranks, ascending, that share a second partition of the parameters (ZeRO++ hpZ).

    They are ``size`` neighbors of the data parallel group, so that all of them hold the same slice of the same stage.
    DeepSpeed takes contiguous ranks of the world, which may also be neighbors along ``model`` or ``seq``.

    >>> topology = ProcessTopology.from_spec("data=4,model=2")
    >>> zero_partition_ranks(topology, size=2, rank=5), zero_partition_ranks(topology, size=1, rank=5)
    ([5, 7], [5])

    Raises:
        ExpertSizeError: the size does not divide the data parallel group. The message lists the divisors.
    """
    replicas = topology.get_axis_ranks(gradient_axes(topology), rank)
    if size < 1 or len(replicas) % size:
        raise ExpertSizeError(
            f"zero_hpz_partition_size {size} must divide the data parallel group of {topology.spec!r}: "
            f"choose one of {divisors(len(replicas))}"
        )
    first = replicas.index(rank) // size * size
    return replicas[first : first + size]
