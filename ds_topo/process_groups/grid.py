"""The live topology of one rank: its process groups, its neighbors, its samples. torch alone, no DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from typing_extensions import Self

from ds_topo.errors import abridged
from ds_topo.launch.identity import export_coordinates
from ds_topo.process_groups.agreement import agree
from ds_topo.process_groups.creation import ProcessGroup, ProcessGroups, require_initialized
from ds_topo.process_groups.device_mesh import default_device_type, mesh_over
from ds_topo.process_groups.torch_names import job_timeout, timeout_of
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import canonical_axis, check_meanings
from ds_topo.topology.rank_tables import (
    RankGroup,
    axes_of,
    degree,
    factorized_topology,
    gradient_axes,
    grid_groups,
    neighbor,
    sample_axes,
)
from ds_topo.topology.spec import Spec


class AxesAndDims(Protocol):
    """Any other class of topologies, DeepSpeed's among them: the last axis is adjacent."""

    axes: list[str]
    dims: list[int]


AnyTopology: TypeAlias = "ProcessTopology | AxesAndDims | Spec"
"""A topology, or a spec such as ``"pipe=2,data=-1"``."""


@dataclass(eq=False)
class _Core:
    """Everything that a grid has; several faces of one grid share it."""

    topology: ProcessTopology
    members: Sequence[int]
    """The global rank of each rank of the topology."""
    rank: int
    """This process's rank in the topology."""
    groups: ProcessGroups
    meshes: dict[tuple[str | None, tuple[str, ...]], DeviceMesh] = field(default_factory=dict)
    """By the type of device that was asked for, or None for the default, and the names of the dimensions."""
    check_samples: bool = True


class ProcessGrid:
    """The process groups of one job's topology, as this rank sees them.

    Creation is collective: all ranks compare what they are about to create and raise together if they differ. A rank
    joins only the groups that it belongs to, each distinct set of ranks once: one for each axis, data parallel (the
    replicas of a parameter: all axes but ``pipe`` and ``model``) and model parallel (``pipe`` x ``model``).

    A grid of the whole job exports this rank's coordinate as variables of the environment, ``DS_TOPO_PIPE=1``, ...,
    until ``destroy()`` (:mod:`ds_topo.launch.identity`).

    ``PipelineParallelGrid`` adds the answers that DeepSpeed and Megatron-style code want of an ``mpu``.

    Args:
        topology: a topology (DeepSpeed's own too) or a spec such as ``"pipe=2,data=-1"``. Without one the world size is
            factorised as DeepSpeed does.
        process_group: the ranks of the job to lay out, all by default.
        timeout: seconds, or a ``timedelta``: of agreement and of every group; the job's own
            (``init_process_group(timeout=)``) by default. A group of all ranks is the world's own group and keeps the
            job's.
        extra_axes: names of axes in the topology, besides ``pipe``, ``data``, ``model``, ``seq`` and ``expert``, along
            which ranks are replicas; ``"+name=2"`` in a spec says the same.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        TopologyError: the topology is malformed or not for this number of ranks.
        UnknownAxisError: an axis without a meaning that is not declared.
        DisagreementError: ranks came with different topologies, or did not come.

    >>> import torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    >>> with ProcessGrid("pipe=2,data=2,model=2") as grid:
    ...     print(grid)
    ...     grid.get_ranks("data"), grid.get_ranks(("pipe", "model")), grid.get_next_rank("pipe")
    ProcessGrid('pipe=2,data=2,model=2', rank 5: pipe=1, data=0, model=1)
    ([5, 7], [0, 1, 4, 5], 1)
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        topology: AnyTopology | None = None,
        process_group: ProcessGroup | None = None,
        *,
        timeout: float | timedelta | None = None,
        extra_axes: Iterable[str] = (),
    ) -> None:
        require_initialized(type(self).__name__)
        members = _members_of(process_group)
        # the job's own may differ by what passed between the starts of two ranks; what was given must not
        given = "the job's timeout"
        try:
            limit = timeout_of(timeout)
            if timeout is not None:
                given = f"timeout {limit}"
            agreed = _checked_topology(topology, extra_axes, len(members))
        except Exception as error:  # whatever it is: the others hear of it
            agree("", members, job_timeout(), failure=error)
            raise
        rank = members.index(dist.get_rank())
        groups = [
            RankGroup(group.axes, tuple(members[rank] for rank in group.ranks))
            for group in grid_groups(agreed, rank)
            if len(group.ranks) > 1  # one rank's own group is made when it is asked for, by that rank alone
        ]
        created = ProcessGroups(f"grid {agreed.spec}, {given}", groups, members, limit)
        self._core = _Core(agreed, members, rank, created)
        if len(members) == dist.get_world_size():
            self.on_destroy(export_coordinates(agreed, rank))

    @classmethod
    def over(cls, grid: ProcessGrid) -> Self:
        """Another face of a grid that exists: the same ranks and groups, which both then own."""
        face = cls.__new__(cls)
        face._core = grid._core
        return face

    def shares_groups_with(self, other: ProcessGrid) -> bool:
        """Whether both are faces of one grid, as a module's ``mpu()`` is of the ``grid`` that it was built on."""
        return self._core is other._core

    # -- this rank ---------------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """This rank in the whole job."""
        return self._core.members[self._core.rank]

    @property
    def grid_rank(self) -> int:
        """This rank's number within the topology; the global rank unless the grid lays out a part of the job."""
        return self._core.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the topology."""
        return len(self._core.members)

    def topology(self) -> ProcessTopology:
        """The topology as it was given."""
        return self._core.topology

    def to_global(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Global ranks of ranks of the topology."""
        return tuple(self._core.members[rank] for rank in ranks)

    # -- any axis, any set of axes -----------------------------------------------------------------------------------

    def get_ranks(self, axes: str | Iterable[str]) -> list[int]:
        """Global ranks, ascending, of this rank's group over one axis or several.

        Raises:
            UnknownAxisError: an axis that is not in the topology (``pipe``, ``data``, ``model`` have degree 1 then).
        """
        topology = self._core.topology
        return list(self.to_global(topology.get_axis_ranks(axes_of(topology, axes), self._core.rank)))

    def get_group(self, axes: str | Iterable[str]) -> ProcessGroup:
        """This rank's process group over one axis or several.

        Every single axis, model parallel (pipe x model) and data parallel groups exist from the start, and answering
        never communicates. Any other set of axes is created when its ranks first ask; all of them must.

        Raises:
            UnknownAxisError: an axis that is not in the topology.
            DisagreementError: a new set of axes, and some of its ranks did not ask within the timeout.
            RuntimeError: the grid was destroyed.
        """
        span = axes_of(self._core.topology, axes)
        group = self._core.groups.get(span)
        return self.create_group(RankGroup(span, tuple(self.get_ranks(span)))) if group is None else group

    def get_axis_rank(self, axis: str) -> int:
        """This rank's index along one axis; equal to its rank in ``get_group(axis)``."""
        topology = self._core.topology
        return topology.get_axis_index(axes_of(topology, axis), self._core.rank)

    def get_axis_size(self, axis: str) -> int:
        """The degree of one axis."""
        return degree(self._core.topology, axes_of(self._core.topology, axis))

    def get_next_rank(self, axis: str) -> int:
        """The global rank of the next peer along ``axis``; the last one's is the first."""
        return self._neighbor(axis, +1)

    def get_prev_rank(self, axis: str) -> int:
        """The global rank of the previous peer along ``axis``; the first one's is the last."""
        return self._neighbor(axis, -1)

    # -- replicas and samples ----------------------------------------------------------------------------------------

    def get_data_parallel_group(self) -> ProcessGroup:
        """The replicas of this rank's parameters: all ranks that share stage and slice."""
        return self.get_group(gradient_axes(self._core.topology))

    def get_sample_rank(self) -> int:
        """Which of the step's distinct samples this rank works on; its pipe, model and seq peers share them."""
        topology = self._core.topology
        return topology.get_axis_index(sample_axes(topology), self._core.rank)

    def get_sample_world_size(self) -> int:
        """The number of distinct samples that the grid works on at a time."""
        return degree(self._core.topology, sample_axes(self._core.topology))

    def sampler(
        self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> DistributedSampler[Any]:
        """Which samples of a dataset this rank reads: the same on its ``pipe``, ``model`` and ``seq`` peers.

        torch's ``DistributedSampler`` over :meth:`get_sample_world_size` shares; without arguments that class deals
        over all ranks of the job. Call its ``set_epoch(epoch)`` before every epoch if it shuffles.

        Args:
            dataset: with a length.
            shuffle: the order, by ``seed`` and epoch, equal on all ranks.
            seed: equal on all ranks.
            drop_last: leave out what does not fill all shares; else some samples are read twice.

        Raises:
            TypeError: an iterable dataset: deal it by ``get_sample_rank()`` of ``get_sample_world_size()``.

        >>> import torch.distributed as dist
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
        >>> with ProcessGrid("data=2,model=2") as grid:
        ...     list(grid.sampler(range(6), shuffle=False))
        [1, 3, 5]
        >>> dist.destroy_process_group()
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset={abridged(dataset)} has no length: deal it by yourself, every "
                "grid.get_sample_world_size()-th sample from grid.get_sample_rank()"
            )
        return DistributedSampler(
            dataset,  # type: ignore[arg-type]
            num_replicas=self.get_sample_world_size(),
            rank=self.get_sample_rank(),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    def data_loader(
        self,
        dataset: Sized,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> DataLoader[Any]:
        """A torch ``DataLoader`` of this rank's samples, dealt by :meth:`sampler`, which is its ``sampler``.

        Args:
            dataset: with a length.
            batch_size: samples per micro-batch.
            shuffle: the order; off by default, as in ``DataLoader``.
            seed: equal on all ranks.
            drop_last: leave out what fills neither all shares nor a batch.
            **options: of ``DataLoader``.

        Raises:
            TypeError: an iterable dataset, or a sampler of another kind.
        """
        if given := {"sampler", "batch_sampler"} & options.keys():
            raise TypeError(f"{sorted(given)}: samples are dealt by the grid; give them to DataLoader instead")
        sampler = self.sampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last)
        options |= {"sampler": sampler, "drop_last": drop_last}
        return DataLoader(dataset, batch_size, **options)  # type: ignore[arg-type]

    @property
    def check_samples(self) -> bool:
        """Whether engines compare the first samples of ranks that should work on the same ones; True by default."""
        return self._core.check_samples

    @check_samples.setter
    def check_samples(self, value: bool) -> None:
        self._core.check_samples = value

    # -- more groups -------------------------------------------------------------------------------------------------

    def create_group(self, group: RankGroup) -> ProcessGroup:
        """A group of this grid's ranks beyond its axes; collective over ``group.ranks`` (global, ascending).

        Equal rank sets share one process group; it lives as long as the grid.

        Raises:
            DisagreementError: ranks of the group did not ask within the timeout.
        """
        return self._core.groups.extend(group)

    def create_groups(
        self, description: str, groups: Sequence[RankGroup], failure: Exception | None = None
    ) -> list[ProcessGroup]:
        """Groups beyond the axes that all ranks of the grid create together; collective over the grid.

        Args:
            description: what is created, the same text on every rank.
            groups: this rank's own, global ranks ascending, in the one order that all ranks follow.
            failure: why this rank cannot take part; raised here, and told to the others.

        Raises:
            DisagreementError: ranks came with different descriptions, failed, or did not come.
        """
        return self._core.groups.extend_all(description, groups, self._core.members, failure)

    def device_mesh(self, device_type: str | None = None, names: Mapping[str, str] | None = None) -> DeviceMesh:
        """The same layout as a torch ``DeviceMesh``: one dimension per axis, over this grid's own process groups.

        For ``parallelize_module``, ``DTensor``, ``fully_shard`` and ``torch.distributed.checkpoint``; slice it by axis,
        ``grid.device_mesh()["data"]``. It lives as long as the grid.

        Args:
            device_type: ``"cpu"``, ``"cuda"``, ...; by default the accelerator that the groups serve, else the CPU.
            names: other names for some axes, such as ``{"model": "tp", "data": "dp"}``.

        Raises:
            UnknownAxisError: another name for an axis that is not there.
        """
        meshes, topology = self._core.meshes, self._core.topology
        names = {canonical_axis(axis): name for axis, name in (names or {}).items()}
        axes_of(topology, names)
        dimensions = tuple(names.get(axis, axis) for axis in topology.axes)
        if (device_type, dimensions) not in meshes:
            groups = [self.get_group(axis) for axis in topology.axes]
            wanted = device_type or default_device_type(groups[0])
            if (wanted, dimensions) not in meshes:
                made = mesh_over(topology, self._core.members, groups, wanted, dimensions)
                meshes[wanted, dimensions] = made
            meshes[device_type, dimensions] = meshes[wanted, dimensions]
        return meshes[device_type, dimensions]

    # -- life cycle --------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether ``destroy()`` is still to come."""
        return self._core.groups.is_alive

    @property
    def has_its_world(self) -> bool:
        """Whether the job's ``torch.distributed`` is still the one that the grid was made in."""
        return self._core.groups.has_its_world

    def on_destroy(self, callback: Callable[[], None]) -> None:
        """Call this, last one first, before the groups are destroyed."""
        self._core.groups.on_destroy(callback)

    def destroy(self) -> None:
        """Destroy the groups of this grid; every rank should call it. Later queries for groups raise RuntimeError."""
        self._core.meshes.clear()
        self._core.groups.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def __repr__(self) -> str:
        coordinate = self._core.topology.get_coord(self._core.rank)._asdict()
        where = ", ".join(f"{axis}={index}" for axis, index in coordinate.items())
        return f"{type(self).__name__}({self._core.topology.spec!r}, rank {self.global_rank}: {where})"

    def _neighbor(self, axis: str, step: int) -> int:
        topology = self._core.topology
        axes_of(topology, axis)
        return self._core.members[neighbor(topology, axis, self._core.rank, step)]


def _members_of(process_group: ProcessGroup | None) -> Sequence[int]:
    """Global ranks of a group; the whole world by default."""
    if process_group is None:
        return range(dist.get_world_size())
    members = dist.get_process_group_ranks(process_group)
    if dist.get_rank() not in members:
        raise ValueError(f"process_group: rank {dist.get_rank()} is not one of its ranks {members}")
    if members != sorted(members):
        raise ValueError(
            f"process_group: its ranks {members} do not ascend, so that places along an axis and ranks in its groups "
            "would differ: make it without sort_ranks=False, and name the axes in the order that you want"
        )
    return members


def _checked_topology(topology: AnyTopology | None, extra_axes: Iterable[str], world_size: int) -> ProcessTopology:
    """The topology for so many ranks.

    Raises:
        TopologyError, TypeError: there is none.
    """
    checked = as_topology(topology, world_size).with_extra_axes(extra_axes)
    check_meanings(checked.axes, checked.extra_axes)
    checked.check_world_size(world_size)
    return checked


def as_topology(topology: AnyTopology | None, world_size: int) -> ProcessTopology:
    """A topology, another class's, a spec for so many ranks, or DeepSpeed's default one.

    Raises:
        TopologyError: a malformed one.
        TypeError: something else.
    """
    if topology is None:
        return factorized_topology(world_size)
    if isinstance(topology, ProcessTopology):
        return topology
    if hasattr(topology, "axes") and hasattr(topology, "dims") and not isinstance(topology, type):
        return ProcessTopology(topology.axes, topology.dims)
    if isinstance(topology, (ProcessGrid, type)) or callable(topology) or hasattr(topology, "mpu"):
        raise TypeError(
            f"topology={abridged(topology)}: give a topology or a spec such as 'pipe=2,data=-1'"
            + (", or use that grid itself" if isinstance(topology, ProcessGrid) or hasattr(topology, "mpu") else "")
        )
    return ProcessTopology.from_spec(topology, world_size)
