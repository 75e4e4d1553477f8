"""Answer for one rank of a live topology: its process groups, neighbors and samples. It needs torch, not DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import islice
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from typing_extensions import Never, Self

from ds_topo.base.backends import accelerator, current_device
from ds_topo.base.torch_names import devices_of, job_timeout, timeout_of
from ds_topo.errors import UnknownAxisError, abridged, refuse_others, require_switches, warn
from ds_topo.launch.council import agree
from ds_topo.launch.launchers import TOPOLOGY_OVERRIDE, export_coordinates, warn_of_misspelt_variables
from ds_topo.process_groups.creation import ProcessGroup, ProcessGroups, require_initialized
from ds_topo.topology import ProcessTopology, rank_tables
from ds_topo.topology.axes import Spec, canonical_axis, check_meanings, divisors, whole_number
from ds_topo.topology.rank_tables import RankGroup


class AxesAndDims(Protocol):
    """Any other topology class, such as DeepSpeed's: ranks along its last axis are adjacent."""

    axes: list[str]
    dims: list[int]


AnyTopology: TypeAlias = "ProcessTopology | AxesAndDims | Spec"
"""A topology, or a spec such as ``"pipe=2,data=-1"``."""


@dataclass(eq=False)
class TrainingProgress:
    """Hold what the samplers of a grid need to know about its engines."""

    is_first_rank: bool
    check_samples: bool = True
    steps: int = 0
    """The number of steps that engines of the grid have taken."""
    dealt: str = ""
    """What the sampler that began last deals, in the same words on all ranks that deal the same."""


@dataclass(eq=False)
class _Core:
    """The state of a grid, which several views of the grid share."""

    topology: ProcessTopology
    members: Sequence[int]
    """The global rank of each rank of the topology."""
    rank: int
    """This process's rank in the topology."""
    groups: ProcessGroups
    progress: TrainingProgress
    meshes: dict[tuple[str, tuple[str, ...]], DeviceMesh] = field(default_factory=dict)
    """Meshes by the type of device and the names of the dimensions."""
    check_weights: bool = True
    correct_norms: bool = True
    has_engines: bool = False
    """True once an engine has been built, so that ``correct_norms`` can no longer change."""
    has_summed: bool = False
    """True once the replicas have agreed on a sum or mean over them."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The results of :meth:`place_along`, which programs ask for in every layer and for every parameter."""

    @cached_property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which replicas lie."""
        return rank_tables.gradient_axes(self.topology)

    def place_along(self, axis: str) -> tuple[int, int]:
        """Return this rank's index along an axis, and the degree of the axis."""
        if axis not in self.places:
            axes = rank_tables.axes_of(self.topology, axis)
            index = self.topology.get_axis_index(axes, self.rank)
            self.places[axis] = index, rank_tables.degree(self.topology, axes)
        return self.places[axis]


class FollowedSampler(DistributedSampler[Any]):
    """A sampler that notices forgotten calls of ``set_epoch``, and may begin inside of an epoch."""

    progress: TrainingProgress
    left_out = 0
    """The number of samples of this share that the next iteration leaves out."""
    _last: int | None = None
    """The last epoch in which all samples were read while an engine took steps; -1 once a warning was given."""

    def __iter__(self) -> Iterator[Any]:
        left_out, self.left_out = self.left_out, 0
        order = f"shuffled by seed {self.seed} in epoch {self.epoch}" if self.shuffle else "in order"
        self.progress.dealt = f"{len(self.dataset)} samples {order}"  # type: ignore[arg-type]
        if left_out:
            self.progress.dealt += f" from {left_out * self.num_replicas} on"
        indices = super().__iter__()
        if self.progress.is_first_rank and self.shuffle:
            indices = self._followed(indices)
        return islice(indices, left_out, None)

    def __len__(self) -> int:
        return super().__len__() - self.left_out

    def _followed(self, indices: Iterator[Any]) -> Iterator[Any]:
        steps, epoch, taken = self.progress.steps, self.epoch, 0
        if epoch == self._last and self.progress.check_samples:
            self._last = -1  # a warning is enough
            warn(
                f"a shuffled sampler begins another epoch in the order of the last one, because its epoch is {epoch} "
                "as before: call loader.sampler.set_epoch(epoch) before each epoch (data_sampler.set_epoch of an "
                "engine's own loader), or set grid.check_samples = False if it is intended"
            )
        try:
            for taken, index in enumerate(indices, start=1):  # noqa: B007
                yield index
        finally:
            if taken >= len(self) and self.progress.steps > steps and self._last != -1:
                self._last = epoch


def _single(value: float | torch.Tensor) -> float:
    """Return the number in a value; raise ``TypeError`` if it is not one number."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise TypeError(f"{abridged(value)} is not one number: give that of this rank, such as loss.mean()") from None


class ProcessGrid:
    """The process groups of one job's topology, as this rank sees them.

    Construction is collective: all ranks compare the groups that they are about to create, and raise together if they
    differ. A rank joins only the groups that it belongs to, each distinct set of ranks once. These are one group per
    axis, data parallel (the replicas of a parameter: all axes but ``pipe`` and ``model``) and model parallel (``pipe``
    x ``model``). With an axis ``shard``, over which ZeRO partitions, a rank also belongs to the group of the copies of
    its partition.

    A grid of the whole job exports this rank's coordinate as environment variables, ``DS_TOPO_PIPE=1``, ..., until
    ``destroy()``.

    ``PipelineParallelGrid`` adds the methods that DeepSpeed and Megatron-style code call on an ``mpu``.

    Args:
        topology: a topology (also DeepSpeed's own) or a spec such as ``"pipe=2,data=-1"``. Without one, the world size
            is factorised as DeepSpeed does.
        process_group: the ranks of the job to lay out; all by default.
        timeout: the timeout of the agreement and of every group, in seconds or as a ``timedelta``; the job's own
            (``init_process_group(timeout=)``) by default. A group of all ranks is the world's own group and keeps the
            job's timeout.
        extra_axes: names of axes in the topology, besides ``pipe``, ``data``, ``model``, ``seq``, ``expert`` and
            ``shard``, along which ranks are replicas. ``"+name=2"`` in a spec has the same effect.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        TopologyError: the topology is malformed or not for this number of ranks.
        UnknownAxisError: an axis has no known meaning and is not in ``extra_axes``.
        DisagreementError: ranks passed different topologies, or did not come.

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
        **others: Never,
    ) -> None:
        degrees = dict.fromkeys(others, "axes and degrees are one argument, such as 'data=2,model=2'")
        refuse_others(f"{type(self).__name__}():", others, degrees)
        require_initialized(type(self).__name__)
        members = _members_of(process_group)
        try:
            limit = timeout_of(timeout)
            agreed = as_topology(topology, len(members)).with_extra_axes(extra_axes)
            check_meanings(agreed.axes, agreed.extra_axes)
            agreed.check_world_size(len(members))
        except Exception as error:  # the other ranks name any error
            agree("", members, job_timeout(), failure=error)
            raise
        rank = members.index(dist.get_rank())
        if rank == 0:
            warn_of_misspelt_variables()
        groups = [
            RankGroup(group.axes, tuple(members[rank] for rank in group.ranks))
            for group in rank_tables.grid_groups(agreed, rank)
            if len(group.ranks) > 1  # a group of one rank is created when that rank first requests it
        ]
        # the job's own timeout may differ by milliseconds between ranks; a given one must be equal
        given = "the job's timeout" if timeout is None else f"timeout {limit}"
        created = ProcessGroups(f"grid {agreed.spec}, {given}", groups, members, limit)
        self._core = _Core(agreed, members, rank, created, TrainingProgress(rank == 0))
        if len(members) == dist.get_world_size():
            self.on_destroy(export_coordinates(agreed, rank))

    @classmethod
    def over(cls, grid: ProcessGrid) -> Self:
        """Return another view of an existing grid, with the same ranks and groups, which both then own."""
        view = cls.__new__(cls)
        view._core = grid._core
        return view

    def shares_groups_with(self, other: ProcessGrid) -> bool:
        """Return whether both are views of one grid, as a module's ``mpu()`` is of the ``grid`` it was built on."""
        return self._core is other._core

    # -- this rank ---------------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """The rank of this process in the whole job."""
        return self._core.members[self._core.rank]

    @property
    def grid_rank(self) -> int:
        """The rank of this process in the topology; the global rank unless the grid lays out a part of the job."""
        return self._core.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the topology."""
        return len(self._core.members)

    @cached_property
    def members(self) -> Sequence[int]:
        """The global rank of each rank of the topology."""
        return self._core.members

    def topology(self) -> ProcessTopology:
        """Return the topology of the grid."""
        return self._core.topology

    def to_global(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Convert ranks of the topology to global ranks."""
        return tuple(self._core.members[rank] for rank in ranks)

    # -- any axis, any set of axes -----------------------------------------------------------------------------------

    def get_ranks(self, axes: str | Iterable[str]) -> list[int]:
        """Return the global ranks, ascending, of this rank's group over one axis or several.

        Raises:
            UnknownAxisError: an axis is not in the topology. ``pipe``, ``data`` and ``model`` have degree 1 then.
        """
        topology = self._core.topology
        return list(self.to_global(topology.get_axis_ranks(rank_tables.axes_of(topology, axes), self._core.rank)))

    def get_group(self, axes: str | Iterable[str]) -> ProcessGroup:
        """Return this rank's process group over one axis or several.

        Groups over a single axis, model parallel groups (pipe x model) and data parallel groups exist from the start:
        returning them never communicates. A group over any other set of axes is created at the first call, which is
        collective over its ranks.

        Raises:
            UnknownAxisError: an axis is not in the topology.
            DisagreementError: the group is new, and some of its ranks did not call this within the timeout.
            RuntimeError: the grid was destroyed.
        """
        span = rank_tables.axes_of(self._core.topology, axes)
        group = self._core.groups.get(span)
        return self.create_group(RankGroup(span, tuple(self.get_ranks(span)))) if group is None else group

    def get_axis_rank(self, axis: str) -> int:
        """Return this rank's index along one axis, which is its rank in ``get_group(axis)``."""
        return self._core.place_along(axis)[0]

    def get_axis_size(self, axis: str) -> int:
        """Return the degree of one axis."""
        return self._core.place_along(axis)[1]

    def get_next_rank(self, axis: str) -> int:
        """Return the global rank of the next peer along ``axis``; the last rank's next peer is the first."""
        return self._neighbor(axis, +1)

    def get_prev_rank(self, axis: str) -> int:
        """Return the global rank of the previous peer along ``axis``; the first rank's previous peer is the last."""
        return self._neighbor(axis, -1)

    # -- replicas and samples ----------------------------------------------------------------------------------------

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the group of all replicas of this rank's parameters, the ranks with the same stage and slice."""
        group = self._core.groups.get(self._core.replica_axes)  # DeepSpeed asks several times in each step
        return self.get_group(self._core.replica_axes) if group is None else group

    def get_data_parallel_world_size(self) -> int:
        """Refuse a grid for torch alone that was passed as ``mpu=``, of which DeepSpeed asks this first."""
        raise TypeError(
            f"mpu={self!r}: this grid lacks DeepSpeed's methods; build PipelineParallelGrid({self.topology().spec!r})"
        )

    def get_sample_rank(self) -> int:
        """Return the index of this rank's share of each step's samples; pipe, model and seq peers have the same."""
        topology = self._core.topology
        return topology.get_axis_index(rank_tables.sample_axes(topology), self._core.rank)

    def get_sample_world_size(self) -> int:
        """Return the number of shares into which each step's samples are divided."""
        return rank_tables.degree(self._core.topology, rank_tables.sample_axes(self._core.topology))

    def is_logging_rank(self, each: str | Iterable[str] = ()) -> bool:
        """Return whether this rank is the one that logs: the first of the grid, or for each index along some axes.

        Engines of a pipeline return the loss of a step on every stage, and DeepSpeed's monitor writes on rank 0, so the
        first rank has what there is to log.

        Args:
            each: axes; one rank for each index along them logs. ``each="data"`` has one rank of each replica.

        Raises:
            UnknownAxisError: an axis is not in the topology.

        >>> import torch.distributed as dist
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
        >>> with ProcessGrid("data=2,model=2") as grid:
        ...     grid.is_logging_rank(), grid.is_logging_rank(each="data")
        (False, True)
        >>> dist.destroy_process_group()
        """
        spared = rank_tables.axes_of(self.topology(), each)
        return not any(self.get_axis_rank(axis) for axis in self.topology().axes if axis not in spared)

    def sum_over_replicas(self, value: float | torch.Tensor) -> float:
        """Return the sum of a number, such as of tokens, over the replicas of this rank's parameters; collective."""
        return self._sums(value)[0]

    def mean_over_replicas(self, value: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> float:
        """Return the mean of a number, such as a loss, over the replicas of this rank's parameters; collective.

        It waits for the device, so call it only in steps that log.

        Args:
            value: the number of this rank, such as the mean over its own samples.
            weight: what the number is a mean of, if replicas differ in it: samples, or tokens that are not padding.
        """
        weight = _single(weight)
        total, weights = self._sums(_single(value) * weight, weight)
        return total / weights

    def _sums(self, *values: float | torch.Tensor) -> list[float]:
        group = self.get_data_parallel_group()
        if not self._core.has_summed:  # else a rank alone would be a part of the collective that others call next
            what = "a sum or mean over replicas"
            agree(what, sorted(dist.get_process_group_ranks(group)), job_timeout(), subject=what)
            self._core.has_summed = True
        device = torch.device("cpu") if "cpu" in devices_of(group) else current_device()
        sums = torch.tensor([*map(_single, values)], dtype=torch.float64, device=device)
        dist.all_reduce(sums, group=group)
        return [float(value) for value in sums.tolist()]

    def batch_sizes(
        self, train_batch_size: int, micro_batch_size: int | None = None, *, accumulation: int = 1
    ) -> dict[str, int]:
        """Divide the samples of a step among the replicas that there are, and into micro-batches.

        A job that continues at another number of replicas, because a host was lost or added, then takes steps of the
        same samples. The result has the keys of a DeepSpeed config: ``config |= grid.batch_sizes(256, 8)``.

        Args:
            train_batch_size: the samples of a step, over all replicas.
            micro_batch_size: the most samples of a rank in a forward pass, which bounds its memory. Micro-batches are
                as large as that allows, and all of one size.
            accumulation: the number of micro-batches, if ``micro_batch_size`` is not given.

        Raises:
            ValueError: the samples cannot be divided; the message has the nearest numbers that can.

        >>> import torch.distributed as dist
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
        >>> with ProcessGrid("data=2,model=2") as grid:
        ...     grid.batch_sizes(24, 8)
        {'train_batch_size': 24, 'train_micro_batch_size_per_gpu': 6, 'gradient_accumulation_steps': 2}
        >>> dist.destroy_process_group()
        """
        numbers = {"train_batch_size": train_batch_size, "micro_batch_size": micro_batch_size}
        for name, value in (numbers | {"accumulation": accumulation}).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={abridged(value)}: give a whole number, at least 1")
        size, replicas = train_batch_size, self.get_sample_world_size()
        count = accumulation if micro_batch_size is None else 1
        if size % (replicas * count):
            unit = replicas * count
            sizes = [str(near) for near in (size // unit * unit, (size // unit + 1) * unit) if near]
            possible = divisors(size // count) if size % count == 0 else []
            near = [one for one in possible if one < replicas][-1:] + [one for one in possible if one > replicas][:1]
            choices = f", or start {' or '.join(map(str, near))} replicas" if near else ""
            raise ValueError(
                f"{size} samples cannot be divided among {replicas} replicas ({self.topology().spec!r}) x {count} "
                f"micro-batches: give {' or '.join(sizes)} samples{choices}"
            )
        share = size // replicas
        if micro_batch_size is not None:
            count = share // max(number for number in divisors(share) if number <= micro_batch_size)
        return {
            "train_batch_size": size,
            "train_micro_batch_size_per_gpu": share // count,
            "gradient_accumulation_steps": count,
        }

    def sampler(
        self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False, start: int = 0
    ) -> DistributedSampler[Any]:
        """Return a sampler of this rank's share of a dataset; ``pipe``, ``model`` and ``seq`` peers get the same share.

        It is torch's ``DistributedSampler`` over :meth:`get_sample_world_size` shares. By default that class would
        shard over all ranks of the job. If it shuffles, call its ``set_epoch(epoch)`` before every epoch.

        Args:
            dataset: a dataset with a length.
            shuffle: shuffle by ``seed`` and epoch, in the same order on all ranks.
            seed: the seed, equal on all ranks.
            drop_last: leave out samples that do not fill all shares; otherwise some samples are read twice.
            start: the number of samples of the epoch that all shares together have read before; the sampler's first
                iteration leaves them out. They may have been read at another number of shares, as by an earlier job on
                more hosts: the order of all samples depends on ``seed`` and epoch alone, so a step of as many samples
                has the same ones. It must be a multiple of the number of shares, as the samples of whole steps are.

        Raises:
            TypeError: the dataset is iterable. Shard it by ``get_sample_rank()`` of ``get_sample_world_size()``. Or a
                switch is neither true nor false.
            ValueError: ``start`` is no multiple of the shares, or is not inside the dataset.

        >>> import torch.distributed as dist
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
        >>> with ProcessGrid("data=2,model=2") as grid:
        ...     list(grid.sampler(range(6), shuffle=False)), list(grid.sampler(range(6), shuffle=False, start=4))
        ([1, 3, 5], [5])
        >>> dist.destroy_process_group()
        """
        require_switches(shuffle=shuffle, drop_last=drop_last)
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset={abridged(dataset)} has no length, so its samples have no index: shard it yourself, every "
                "grid.get_sample_world_size()-th sample from grid.get_sample_rank()"
            )
        shares = self.get_sample_world_size()
        if isinstance(start, bool) or not isinstance(start, int) or start % shares or not 0 <= start <= len(dataset):
            raise ValueError(
                f"start={abridged(start)}: give the number of samples that all {shares} shares have read together, a "
                f"multiple of {shares} from 0 to {len(dataset)}"
            )
        sampler = FollowedSampler(
            dataset,  # type: ignore[arg-type]
            num_replicas=shares,
            rank=self.get_sample_rank(),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        sampler.progress, sampler.left_out = self._core.progress, start // shares
        if not start and not len(sampler):
            self.warn_of_no_batch(dataset, f"{shares} shares")
        return sampler

    def warn_of_no_batch(self, dataset: Sized, wanted: str) -> None:
        """Warn, on the first rank, that a dataset with samples has too few of them for a batch of each share."""
        if self._core.progress.is_first_rank and len(dataset):
            warn(
                f"{len(dataset)} samples are too few for {wanted}, because incomplete batches are dropped (drop_last): "
                "a loop over the batches takes no step. Give more samples or smaller batches, or leave out drop_last"
            )

    def data_loader(
        self,
        dataset: Sized,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        start: int = 0,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return a torch ``DataLoader`` of this rank's samples; its ``sampler`` is that of :meth:`sampler`.

        Args:
            dataset: a dataset with a length.
            batch_size: samples per micro-batch.
            shuffle: shuffle the samples; off by default, as in ``DataLoader``.
            seed: the seed, equal on all ranks.
            drop_last: leave out samples that do not fill all shares, and the last incomplete batch.
            start: samples that were read before, as in :meth:`sampler`.
            **options: further options of ``DataLoader``.

        Raises:
            TypeError: the dataset is iterable, ``options`` has a sampler, or the size of a batch is no whole number.
            ValueError: the size of a batch is below 1.
        """
        if given := {"sampler", "batch_sampler"} & options.keys():
            raise TypeError(
                f"options {sorted(given)}: the grid provides the sampler; for your own, construct a DataLoader instead"
            )
        size = 1 if batch_size is None else None if isinstance(batch_size, bool) else whole_number(batch_size)
        if size is None or size < 1:
            kind = TypeError if size is None else ValueError
            raise kind(f"batch_size={abridged(batch_size)}: give a number of samples, at least 1")
        sampler = self.sampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last, start=start)
        options |= {"sampler": sampler, "drop_last": drop_last}
        loader: DataLoader[Any] = DataLoader(dataset, batch_size, **options)  # type: ignore[arg-type]
        if not start and len(sampler) and not len(loader):
            self.warn_of_no_batch(dataset, f"a batch of {batch_size} in each of {self.get_sample_world_size()} shares")
        return loader

    @property
    def check_samples(self) -> bool:
        """Return whether engines check the first samples, and losses, of ranks that share samples; True by default."""
        return self._core.progress.check_samples

    @check_samples.setter
    def check_samples(self, value: bool) -> None:
        require_switches(check_samples=value)
        self._core.progress.check_samples = value

    @property
    def check_weights(self) -> bool:
        """Return whether engines look after weights that a program writes or copies by mistake; True by default.

        They warn about parameters that were written after ``deepspeed.initialize`` and will be overwritten, replicas
        whose weights or learning rates differ, ranks along ``model`` that train copies of the whole model, parameters
        that were frozen since, and steps of the optimizer or the scheduler that the program takes itself.
        """
        return self._core.check_weights

    @check_weights.setter
    def check_weights(self, value: bool) -> None:
        require_switches(check_weights=value)
        self._core.check_weights = value

    # -- more groups -------------------------------------------------------------------------------------------------

    def create_group(self, group: RankGroup) -> ProcessGroup:
        """Create a group of any of this grid's ranks; collective over ``group.ranks`` (global, ascending).

        Equal rank sets share one process group, which lives as long as the grid.

        Raises:
            DisagreementError: ranks of the group did not call this within the timeout.
        """
        return self._core.groups.extend(group)

    def create_groups(
        self, description: str, groups: Sequence[RankGroup], failure: Exception | None = None
    ) -> list[ProcessGroup]:
        """Create groups of any ranks; collective over the grid.

        Args:
            description: the groups to create, as the same text on every rank.
            groups: this rank's own groups, global ranks ascending, in the one order that all ranks follow.
            failure: the reason why this rank cannot take part. It is raised here, and named on the other ranks.

        Raises:
            DisagreementError: ranks passed different descriptions, failed, or did not come.
        """
        return self._core.groups.extend_all(description, groups, self._core.members, failure)

    def device_mesh(self, device_type: str | None = None, names: Mapping[str, str] | None = None) -> DeviceMesh:
        """Return this layout as a torch ``DeviceMesh``: one dimension per axis, over this grid's own process groups.

        Use it for ``parallelize_module``, ``DTensor``, ``fully_shard`` and ``torch.distributed.checkpoint``. Slice it
        by axis, ``grid.device_mesh()["data"]``. It lives as long as the grid.

        Args:
            device_type: ``"cpu"``, ``"cuda"``, ...; by default the accelerator that the groups serve, else the CPU.
            names: other names for some axes, such as ``{"model": "tp", "data": "dp"}``.

        Raises:
            TypeError: ``names`` is not a mapping.
            ValueError: two dimensions would have the same name, or there is no such type of device.
            UnknownAxisError: ``names`` has an axis that is not in the topology.
        """
        meshes, topology = self._core.meshes, self._core.topology
        if names is not None and not isinstance(names, Mapping):
            raise TypeError(f"names={abridged(names)}: give a mapping of axes to names, such as {{'model': 'tp'}}")
        names = {canonical_axis(axis): name for axis, name in (names or {}).items()}
        rank_tables.axes_of(topology, names)
        dimensions = tuple(names.get(axis, axis) for axis in topology.axes)
        if len(set(dimensions)) < len(dimensions) or not all(isinstance(name, str) for name in dimensions):
            raise ValueError(f"names={abridged(names)} name the dimensions {dimensions}: give each another text")
        if device_type is not None and not _is_device_type(device_type):
            raise ValueError(f"device_type={abridged(device_type)}: give a type of device, such as 'cpu' or 'cuda'")
        groups = [self.get_group(axis) for axis in topology.axes]
        if device_type is None:
            device = accelerator()
            device_type = device.type if device is not None and device.type in devices_of(groups[0]) else "cpu"
        if (device_type, dimensions) not in meshes:
            if len(groups) == 1:  # torch accepts no list here
                made = DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=dimensions)
            else:
                ranks = torch.tensor(self.to_global(topology.layout.offsets(range(len(groups)))), dtype=torch.int)
                mesh = ranks.view(topology.dims)
                made = DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=dimensions)
            meshes[device_type, dimensions] = made
        return meshes[device_type, dimensions]

    # -- life cycle --------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Return whether ``destroy()`` has not been called yet."""
        return self._core.groups.is_alive

    @property
    def has_its_world(self) -> bool:
        """Return whether the job's ``torch.distributed`` is still the one in which the grid was created."""
        return self._core.groups.has_its_world

    def on_destroy(self, callback: Callable[[], None]) -> None:
        """Register a function to call before the groups are destroyed; the last one registered is called first."""
        self._core.groups.on_destroy(callback)

    def destroy(self) -> None:
        """Destroy the groups of this grid. Every rank should call it. Later queries for groups raise RuntimeError.

        It waits a moment for ranks that are still connecting to this one, and for no others.
        """
        self._core.meshes.clear()
        self._core.groups.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.destroy()

    # -- the habits of DeviceMesh and FSDP2 --------------------------------------------------------------------------

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh along one axis or several, such as ``fully_shard(model, mesh=grid["data"])`` needs.

        Raises:
            UnknownAxisError: an axis is not in the topology.
        """
        span = rank_tables.axes_of(self._core.topology, axes)
        if not span:
            raise UnknownAxisError(
                f"grid[{abridged(axes)}]: {self._core.topology.spec!r} has the axes {self._core.topology.axes} alone"
            )
        return self.device_mesh()[span if len(span) > 1 else span[0]]

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _OF_ENGINES]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied, because process groups belong to one process: keep it outside of "
            "what is copied, or keep grid.topology() instead"
        )

    def __repr__(self) -> str:
        coordinate = self._core.topology.get_coord(self._core.rank)._asdict()
        where = ", ".join(f"{axis}={index}" for axis, index in coordinate.items())
        return f"{type(self).__name__}({self._core.topology.spec!r}, rank {self.global_rank}: {where})"

    def _neighbor(self, axis: str, step: int) -> int:
        topology = self._core.topology
        (named,) = rank_tables.axes_of(topology, axis) or (axis,)
        return self._core.members[rank_tables.neighbor(topology, named, self._core.rank, step)]


_OF_ENGINES = frozenset({"create_groups", "has_its_world", "over", "shares_groups_with"})
"""What the rest of the package calls, and programs rarely; ``dir()`` leaves it out."""


def _is_device_type(name: object) -> bool:
    try:
        return isinstance(name, str) and torch.device(name).type == name
    except RuntimeError:
        return False


def _members_of(process_group: ProcessGroup | None) -> Sequence[int]:
    """Return the global ranks of a group; the whole world by default."""
    if process_group is None:
        return range(dist.get_world_size())
    if not isinstance(process_group, ProcessGroup):
        if process_group == dist.GroupMember.NON_GROUP_MEMBER:  # the result of new_group() on other ranks
            raise ValueError(
                f"process_group: rank {dist.get_rank()} is not one of its ranks: build the grid there only"
            )
        raise TypeError(
            f"process_group={abridged(process_group)}: give a group of torch.distributed of which this rank is a "
            "member; axes and degrees are one argument, 'pipe=2,data=2'"
        )
    members = dist.get_process_group_ranks(process_group)
    if members != sorted(members):
        raise ValueError(
            f"process_group: its ranks {members} do not ascend, so indices along an axis would differ from ranks in "
            "its groups: create it without sort_ranks=False, and name the axes in the order that you want"
        )
    return members


def as_topology(topology: AnyTopology | None, world_size: int) -> ProcessTopology:
    """Convert a topology of any class, or a spec, to a topology; None gives DeepSpeed's default for the world size.

    The topology of a job that ``ds-topo verify`` runs, an environment variable, takes precedence.

    Raises:
        TopologyError: the topology or spec is malformed.
        TypeError: the argument is neither.
    """
    if (
        (override := os.environ.get(TOPOLOGY_OVERRIDE))
        and dist.is_initialized()
        and world_size == dist.get_world_size()
    ):
        return ProcessTopology.from_spec(override, world_size)
    if topology is None:
        return rank_tables.factorized_topology(world_size)
    if isinstance(topology, ProcessTopology):
        return topology
    if hasattr(topology, "axes") and hasattr(topology, "dims") and not isinstance(topology, type):
        return ProcessTopology(topology.axes, topology.dims)
    if isinstance(topology, (ProcessGrid, DeviceMesh, type)) or callable(topology):
        raise TypeError(f"topology={abridged(topology)}: give a topology or a spec such as 'pipe=2,data=-1'")
    return ProcessTopology.from_spec(topology, world_size)
