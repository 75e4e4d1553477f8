"""Derive tables of ranks for experts and parameter partitions from a topology.

The experts of a layer are distributed over the ranks of one pipeline stage. The *pool* of a rank is the set of ranks
that can hold replicas of its experts. With tensor parallel experts it is the data parallel group, since each slice
holds a slice of every expert. Otherwise it is the whole stage, since slices then work on different tokens.

An *expert parallel* group holds every expert once and exchanges tokens. An *expert data parallel* group holds the
replicas of one rank's experts and sums their gradients. Each kind partitions the pool, and a group of one kind shares
exactly one rank with a group of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ds_topo.errors import ExpertSizeError
from ds_topo.topology.axes import DATA, EXPERT, MODEL, PIPE
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import gradient_axes
from ds_topo.topology.spec import divisors


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
        for name in ("expert_tensor_parallel", "use_data_before_expert"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: give True or False")
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
    """Return the name under which ``deepspeed.moe.layer.MoE`` looks for groups of a size.

    >>> name_of_size(2)
    'ep_size_2'
    """
    return f"ep_size_{expert_parallel_size}"


def expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size: int,
    expert_parallel_size: int,
    pipeline_parallel_size: int = 1,
    use_data_before_expert: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return expert parallel and expert data parallel tables in DeepSpeed's order, pipe x data x model.

    Drop-in for ``deepspeed.utils.groups._get_expert_parallel_ranks`` (experts are tensor parallel there).

    >>> expert_parallel_ranks(world_size=8, tensor_parallel_size=2, expert_parallel_size=2)
    ([[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]])

    Raises:
        ExpertSizeError: a size does not divide the number of ranks.
    """
    model_parallel_size = tensor_parallel_size * pipeline_parallel_size
    if min(world_size, model_parallel_size) < 1 or world_size % model_parallel_size:
        raise ExpertSizeError(
            f"{tensor_parallel_size} slices x {pipeline_parallel_size} stages do not divide {world_size} ranks"
        )
    data = world_size // model_parallel_size
    topology = ProcessTopology([PIPE, DATA, MODEL], [pipeline_parallel_size, data, tensor_parallel_size])
    plan = ExpertPlan(topology, expert_parallel_size, True, use_data_before_expert)
    return plan.expert_tables(), plan.expert_data_tables()


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
